"""Routers of several nodes in one process: who gets what, who is let in, and what hostile or broken peers can do."""

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
import zmq
from nodes import free_port

from a3c_mp.errors import ConfigError
from a3c_mp.processes.program import differences
from a3c_mp.task import limits as limits_module
from a3c_mp.task import router as router_module
from a3c_mp.task import sockets as sockets_module
from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints, read_key
from a3c_mp.task.node import JoinedNode
from a3c_mp.task.router import Hub, Spoke
from a3c_mp.task.sockets import Dialer, RateLimitedLog
from a3c_mp.task.wire import JOINED, LEFT, encode


@pytest.fixture
def folder():
    with ipc_folder() as path:
        yield path


@pytest.fixture
def nodes(folder, net):
    """Node 0 and two others, connected."""
    return [net.enter(endpoint) for endpoint in local_endpoints(folder, [(), (), ()], None)]


def wait_for(happened):
    deadline = time.monotonic() + 20
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert happened()


# ---- events


def test_an_event_of_node_0_reaches_all_or_one_and_an_answer_node_0(nodes, net):
    hub, first, second = nodes
    hub.send("event", 1, {"a": [2.5]})
    for name in ("node.2", "node.0", "node.9"):
        hub.send("for one", to=name)
    hub.send("end")
    assert net.take(first, 2) == [("node.0", "event", [1, {"a": [2.5]}]), ("node.0", "end", [])]
    assert [message.event for message in net.take(second, 3)] == ["event", "for one", "end"]
    second.send("answer")
    assert net.take(hub, 1) == [("node.2", "answer", [])]


def test_a_tensor_that_several_nodes_get_is_their_own(nodes, net):
    hub, *others = nodes
    sent = torch.zeros(50_000)
    hub.send("weights", sent)
    sent.fill_(5)
    received = [net.take(node, 1)[0].args[0] for node in others]
    for number, tensor in enumerate(received):
        assert not tensor.any()
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in received] == [[0], [1]]


@pytest.mark.parametrize("over", ["ipc", "tcp"])
def test_what_threads_send_side_by_side_arrives_once_and_in_order(listening, folder, net, over):
    hub, end = listening
    spoke = net.enter(end if over == "tcp" else Endpoint(1, dials=hub.endpoint.binds[0]))

    def send(thread):
        for number in range(3000):
            spoke.send("number", thread, number)

    for thread in range(4):
        threading.Thread(target=send, args=(thread,)).start()
    numbers = [message.args for message in net.take(hub, 12_000)]
    for thread in range(4):
        assert [number for sender, number in numbers if sender == thread] == list(range(3000))


def test_a_wait_ends_with_a_message(nodes, net):
    hub, node, _ = nodes
    assert not select.select(node.files, [], [], 0)[0]
    hub.send("event")
    assert select.select(node.files, [], [], 10)[0]
    assert net.take(node, 1)


def test_a_node_alone_sends_nowhere():
    with Hub(Endpoint()) as router:
        router.send("event", 1)
        assert (router.is_active, router.name, router.peers, router.receive()) == (False, "node.0", [], [])


def test_a_node_that_ends_leaves_after_its_last_words_and_nothing_is_sent_to_it(nodes, net):
    hub, spoke, _ = nodes
    spoke.send("last words")
    spoke.__exit__()
    net.wait_until(lambda: hub.peers == ["node.2"])
    assert [event for name, event, _ in net.inboxes[hub] if name == "node.1"] == [JOINED, "last words", LEFT]
    hub.send("to no node")
    spoke.send("too late")
    assert spoke.receive() == []


@pytest.mark.parametrize("reader", [1, 0], ids=["node 0 sends", "node 0 does not read"])
def test_a_node_that_does_not_read_is_dropped_and_joins_again(folder, net, monkeypatch, reader, tape):
    monkeypatch.setattr(sockets_module, "QUEUE", 100)
    routers = [net.enter(endpoint) for endpoint in local_endpoints(folder, [(), ()], None)]
    sender, stuck = routers[1 - reader], routers[reader]
    for number in range(20_000):  # the system's buffers hold some, too
        sender.send("number", number, "x" * 1000)
    net.wait_until(lambda: [event for _, event, _ in net.inboxes[sender]][-2:] == [LEFT, JOINED])
    numbers = [args[0] for _, event, args in net.inboxes[stuck] if event == "number"]
    assert numbers == list(range(len(numbers))), "what arrives is whole up to the end of the session"
    net.inboxes[stuck].clear()
    sender.send("new")
    assert net.take(stuck, 1) == [(sender.name, "new", [])]
    assert sum("a node does not read; dropped" in text and stuck.name in text for text in tape.messages) == 1


# ---- over TCP: who is let in, and what others can do


@pytest.fixture
def listening(folder, tmp_path, net, request):
    """A hub that listens, and the endpoint of a node that may attach."""
    key_file, address = tmp_path / "key", f"tcp://127.0.0.1:{free_port()}"
    settings = {"greeting": {"seed": 3}, **getattr(request, "param", {})}
    first, *_ = local_endpoints(folder, [(), ("own",)], address, key_file=key_file, **settings)
    return net.enter(first), Endpoint(dials=address, key_file=key_file)


def works(listening, net):
    """Whether a node can attach and be heard."""
    hub, end = listening
    net.enter(end).send("works")
    return net.take(hub, 1)[0].event == "works"


def test_what_is_no_address_is_refused_and_leaves_no_socket():
    context = zmq.Context()
    with pytest.raises(ConfigError, match=r"^attach-to=tcp://10.0.0.5,:1: it is not an address"):
        Dialer(context, "tcp://10.0.0.5,:1", None)
    context.term()  # it waits until all are closed


def test_attached_nodes_get_numbers_after_those_of_the_hubs_own_and_its_greeting(listening, net):
    hub, end = listening
    first, second = net.enter(end), net.enter(end)
    assert [router.name for router in (first, second)] == ["node.2", "node.3"] == hub.peers
    assert first.greeting == {"seed": 3}
    first.__exit__()
    net.wait_until(lambda: len(hub.peers) == 1)
    assert net.enter(end).name == "node.4"


def test_other_versions_are_refused_also_when_a_node_comes_back(listening, net, tape):
    hub, end = listening
    net.enter(end)
    net.leave(hub)
    old = {**end.versions, "a3c_mp": "0.0.1"}
    net.enter(dataclasses.replace(hub.endpoint, versions=old))
    with pytest.raises(ConfigError, match=r"^attach-to=tcp.*: this node is refused: it has a3c_mp .* instead of 0.0.1"):
        net.wait_until(lambda: False)
    assert ["instead of 0.0.1" in text for text in tape.messages] == [True], tape.messages


def test_versions_that_may_differ_are_named_on_both_sides(listening, net, tape):
    _, end = listening
    older = {**end.versions, "numpy": end.versions["numpy"] + "9", "no-package": "3"}
    node = net.enter(dataclasses.replace(end, versions=older))
    assert f"numpy {older['numpy']} instead of {end.versions['numpy']}" in node.differs
    assert "no-package" not in node.differs, "only one of them has it"
    assert ["slightly other versions joined" in text for text in tape.messages] == [True]


HERE = {"protocol": "2", "a3c_mp": "1.0.0", "torch": "2.13.0", "gymnasium": "1.2.2", "numpy": "2.4.0", "commit": "c0"}


@pytest.mark.parametrize(
    ("change", "fatal", "harmless"),
    [
        ({}, "", ""),
        ({"a3c_mp": "1.0.1"}, "a3c_mp 1.0.1 instead of 1.0.0", ""),
        ({"protocol": None}, "protocol None instead of 2", ""),
        ({"gymnasium": "1.3.0"}, "gymnasium 1.3.0 instead of 1.2.2", ""),
        ({"gymnasium": "1.2.3"}, "", "gymnasium 1.2.3 instead of 1.2.2"),
        ({"numpy": "2.5.0", "commit": "c1"}, "", "commit c1 instead of c0, numpy 2.5.0 instead of 2.4.0"),
        ({"numpy": "1.26.4", "commit": "c1"}, "numpy 1.26.4 instead of 2.4.0", "commit c1 instead of c0"),
        ({"ale-py": "0.11.2", "commit": None}, "", ""),
        ({"torch": {"a": "list"}}, "torch {'a': 'list'} instead of 2.13.0", ""),
    ],
)
def test_which_versions_must_agree(change, fatal, harmless):
    theirs = {name: value for name, value in {**HERE, **change}.items() if value is not None}
    assert differences(theirs, HERE) == (fatal, harmless)


def test_where_no_node_listens_the_attempt_ends(tmp_path, folder, monkeypatch):
    for name in ("WELCOME_SECONDS", "LOCAL_WELCOME_SECONDS"):
        monkeypatch.setattr(router_module, name, 0.1)
    read_key(tmp_path / "key", make=True)
    remote = Endpoint(dials=f"tcp://127.0.0.1:{free_port()}", key_file=tmp_path / "key")
    for end in (remote, local_endpoints(folder, [(), ()], None)[1]):
        with pytest.raises(ConfigError, match=rf"^attach-to={end.dials}: no node lets this one in within 0.1 s; start"):
            Spoke(end).__enter__()


@pytest.mark.parametrize("is_local", [False, True])
def test_a_node_waits_for_a_node_0_that_computes(listening, net, monkeypatch, tape, is_local):
    """Its process answers; its program does not look at messages."""
    for name in ("WELCOME_SECONDS", "LOCAL_WELCOME_SECONDS"):
        monkeypatch.setattr(router_module, name, 0.1)
    hub, end = listening
    if is_local:
        end = Endpoint(1, dials=hub.endpoint.binds[0])
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(Spoke(end, net.log).__enter__)
        wait_for(lambda: tape.messages)
        time.sleep(0.2)
        assert not joining.done()
        net.wait_until(joining.done)
        net.stack.push(joining.result())
    busy = f"{end.dials} is busy: waiting until its node 0 looks at messages (1 so far)"
    assert tape.messages == [busy]


def test_a_node_that_waits_for_a_node_0_that_is_killed_gives_up(listening, net, monkeypatch, tape):
    monkeypatch.setattr(router_module, "WELCOME_SECONDS", 0.1)
    hub, end = listening
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(Spoke(end, net.log).__enter__)
        wait_for(lambda: tape.messages)
        for port in hub._ports:
            port.close(0)
        with pytest.raises(ConfigError, match=r"no node lets this one in within 0\.1 s"):
            joining.result(20)
    hub._ports.clear()


def test_a_name_that_is_not_resolved_ends_the_attempt(monkeypatch):
    """zmq reports no event then."""
    monkeypatch.setattr(sockets_module, "SILENT_SECONDS", 0.5)
    dialer = sockets_module.Dialer(zmq.Context.instance(), "tcp://no-such-host.invalid:1", None)
    wait_for(dialer.is_over)
    dialer.close(0)


@pytest.mark.parametrize(("error", "is_gone"), [("No route to host", True), ("timed out", False)])
def test_a_name_with_several_addresses_is_gone_where_one_refuses_and_the_others_have_no_route(
    error, is_gone, monkeypatch
):
    others = {"No route to host": OSError(errno.EHOSTUNREACH, error), "timed out": TimeoutError(error)}
    errors = ExceptionGroup("create_connection failed", [ConnectionRefusedError(), others[error]])

    def create_connection(*args, **options):
        raise errors if options["all_errors"] else others[error]

    monkeypatch.setattr(socket, "create_connection", create_connection)
    lines = []
    node = SimpleNamespace(address="tcp://hub:1", _refused_since=None, _is_lost=False, log_line=lines.append)
    JoinedNode._probe(node)
    assert (node._refused_since is not None, lines == []) == (is_gone, is_gone)


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + bytes(16 + 1 + 31)
"""of version 3.1 of zmq's protocol, without encryption"""


def attacks(path):
    return [
        os.urandom(100_000),
        b"GET / HTTP/1.1\r\n\r\n",
        pickle.dumps(Bomb(path)),
        b"\1\0",  # version 1: an empty message
        GREETING + b"\4\x19\5READY\x0bSocket-Type\0\0\0\6DEALER",
        GREETING + b"\2" + (2**30).to_bytes(8, "big") + b"x" * 1000,
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE" + bytes(15 + 1 + 31) + b"\6" + (2**30).to_bytes(8, "big") + b"x" * 1000,
    ]


def test_strangers_on_the_tcp_port_do_no_harm(listening, net, tmp_path):
    hub, end = listening
    host, port = end.dials.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))):  # one that is silent
        for attack in attacks(tmp_path / "bomb"):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(attack)
                with contextlib.suppress(ConnectionError):
                    while stranger.recv(1000):  # the other side hangs up, after whatever it says first
                        pass
        assert works(listening, net)
    assert len(hub.peers) == 1
    assert not (tmp_path / "bomb").exists()


@contextlib.contextmanager
def raw_client(end):
    """A socket that has the key, but follows no protocol."""
    key = end.load_key()
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.curve_publickey, client.curve_secretkey, client.curve_serverkey = *key, key.public
        client.connect(end.dials)
        yield client


HELLO = [1, Endpoint().versions, "x"]
MALFORMED_HELLOS = [[], HELLO[:2], [1, 3, "x"], [*HELLO, 1], [*HELLO[:2], torch.zeros(2)], [*HELLO[:2], "x" * 99]]


def test_malformed_messages_of_a_node_with_the_key_are_dropped_and_counted(listening, net, tape, tmp_path):
    hub, end = listening
    bomb = pickle.dumps(Bomb(tmp_path / "bomb"))
    with raw_client(end) as client:
        for frames in [
            [b"junk"],
            [bomb, bomb],
            encode("event", ["before the hello"]),
            *(encode("node.hello", hello) for hello in MALFORMED_HELLOS),
        ]:
            client.send_multipart(frames)
        client.send_multipart(encode("node.hello", HELLO))
        net.wait_until(lambda: client.poll(1))
        assert json.loads(client.recv_multipart()[0]) == ["node.welcome", ["node.2", {"seed": 3}, ""]]
        for frames in [
            [bomb, bomb],
            [*encode("event", []), bomb],
            encode("node.unheard of", []),
            encode("node.welcome", ["node.7", {}]),
            encode("node.dropped", []),
            encode("node.hello", HELLO),
            encode(JOINED, []),
            encode("good", [1]),
        ]:
            client.send_multipart(frames)
        assert net.take(hub, 1) == [("node.2", "good", [1])]
    assert all("dropped" in text for text in tape.messages)
    assert len(tape.messages) == 7, "numbers 1, 2, 4 and 8 before it has joined, 1, 2 and 4 after it"
    assert works(listening, net)
    assert not (tmp_path / "bomb").exists()


def test_a_node_that_joins_again_before_its_end_was_seen_takes_its_own_place(listening, net):
    hub, end = listening
    with raw_client(end) as first, raw_client(end) as second:
        for client in (first, second):
            client.send_multipart(encode("node.hello", HELLO))
            net.wait_until(lambda client=client: client.poll(1))
            assert json.loads(client.recv_multipart()[0])[1][0] == "node.2"
        assert [event for _, event, _ in net.inboxes[hub]] == [JOINED, LEFT, JOINED]


def test_a_frame_that_is_too_large_ends_the_connection_and_nothing_else(listening, net):
    hub, end = listening
    with raw_client(end) as client:
        client.send_multipart(encode("node.hello", HELLO))
        net.wait_until(lambda: hub.peers)
        client.send(bytes(130 * 2**20))
        net.wait_until(lambda: not hub.peers)
    assert works(listening, net)


def test_repeated_warnings_are_few(log, tape):
    limited = RateLimitedLog(log)
    for _ in range(1000):
        limited.warning("noise")
    limited.warning("other", "line 1\nline 2" + 1000 * "x")
    assert len([text for text in tape.messages if "noise" in text]) == 10
    assert tape.messages[-1].startswith(r"other (1 so far): 'line 1\nline 2x")
    assert len(tape.messages[-1]) < 250


# ---- what others can cost


@contextlib.contextmanager
def stranger(end, first=b""):
    """A TCP connection, and what it sends first."""
    host, port = end.dials.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(first)
        connection.setblocking(False)
        yield connection


def is_closed(connection):
    """Whether the other side has hung up; forgets what it has said."""
    with contextlib.suppress(BlockingIOError):
        try:
            while connection.recv(1000):
                pass
        except ConnectionError:
            pass
        return True
    return False


CURVE = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE" + bytes(15 + 1 + 31)


def test_a_frame_before_the_handshake_that_is_larger_than_a_part_ends_the_connection(listening, net):
    with stranger(listening[1], CURVE + b"\6" + (2**20).to_bytes(8, "big")) as connection:
        net.wait_until(lambda: is_closed(connection), timeout=3)  # for its size, not at the end of a handshake's time
    assert works(listening, net)


def test_of_many_idle_connections_the_oldest_are_cut_off_and_nodes_come_in(listening, net, monkeypatch):
    monkeypatch.setattr(limits_module, "STRANGERS", 5)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(stranger(listening[1])) for _ in range(20)]
        net.wait_until(lambda: sum(map(is_closed, connections)) == 15, timeout=4)
        assert not is_closed(connections[-1])
        assert works(listening, net)


def test_a_slow_handshake_is_ended_though_its_bytes_come_one_by_one(folder, tmp_path, net, monkeypatch):
    monkeypatch.setattr(sockets_module, "HANDSHAKE_MS", 300)
    address = f"tcp://127.0.0.1:{free_port()}"
    net.enter(local_endpoints(folder, [()], address, key_file=tmp_path / "key")[0])
    for first in (b"\xff", CURVE + b"\6" + (1000).to_bytes(8, "big")):
        with stranger(Endpoint(dials=address), first) as connection:

            def is_over(connection=connection):
                time.sleep(0.05)
                with contextlib.suppress(ConnectionError):
                    connection.send(b"x")
                return is_closed(connection)

            net.wait_until(is_over, timeout=3)


def test_who_has_the_key_and_does_not_join_is_cut_off(listening, net, monkeypatch, tape):
    monkeypatch.setattr(limits_module, "STRANGER_SECONDS", 0.3)
    with raw_client(listening[1]):
        net.wait_until(lambda: "not joined within 0.3 s" in " ".join(tape.messages))


PARTS = [zmq.Frame(bytes(2**16))] * 4000  # its end comes after 250 MiB
FLOODS = {
    "before joining": (False, [bytes(2**16)] * 20),
    "before joining, in parts without end": (False, PARTS),
    "after joining": (True, encode("event", ["x" * 900_000])),
    "after joining, in parts without end": (True, PARTS),
}


@pytest.mark.parametrize(("joins", "frames"), FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_is_cut_off_though_the_hub_is_busy_and_others_stay(listening, net, joins, frames):
    """The hub does not look at its messages while they come."""
    hub, end = listening
    net.enter(end)
    memory, most = psutil.Process().memory_info().rss, 0
    with raw_client(end) as client:
        client.sndhwm = 5
        monitor = client.get_monitor_socket(zmq.Event.DISCONNECTED)
        if joins:
            client.send_multipart(encode("node.hello", HELLO))
            net.wait_until(lambda: len(hub.peers) == 2)
        deadline = time.monotonic() + 10
        while not monitor.poll(1):
            assert time.monotonic() < deadline
            most = max(most, psutil.Process().memory_info().rss)
            with contextlib.suppress(zmq.Again):
                client.send_multipart(frames, zmq.NOBLOCK, copy=False)
        client.disable_monitor()
        monitor.close(0)
    assert most - memory < 100 * 2**20
    net.wait_until(lambda: hub.peers == ["node.2"])
    assert works(listening, net)


@pytest.mark.parametrize("listening", [{"accepts": ("works",)}], indirect=True)
def test_a_node_that_floods_a_hub_with_events_that_it_does_not_take_is_cut_off(listening, net, tape):
    hub, end = listening
    with raw_client(end) as client:
        client.send_multipart(encode("node.hello", HELLO))
        for _ in range(1000):
            client.send_multipart(encode("event", []))
        net.wait_until(lambda: [event for _, event, _ in net.inboxes[hub]] == [JOINED, LEFT])
    assert any("cut off" in text for text in tape.messages)
    net.inboxes[hub].clear()
    assert works(listening, net)


def test_answers_that_a_node_does_not_read_end_its_connection(listening, net, tape):
    """The hub is made to answer each message with a large one."""
    hub, end = listening
    with raw_client(end) as client:
        client.send_multipart(encode("node.hello", HELLO))
        client.rcvhwm = 1
        net.wait_until(lambda: hub.peers)
        memory, answer = psutil.Process().memory_info().rss, torch.zeros(2**20)
        for _ in range(100):
            hub.send("answer", answer)
            time.sleep(0.005)
        assert psutil.Process().memory_info().rss - memory < 100 * 2**20
        net.wait_until(lambda: not hub.peers)
    assert any("leave unread" in text for text in tape.messages)


def test_a_node_that_sends_many_malformed_messages_is_cut_off(listening, net, monkeypatch):
    monkeypatch.setattr(limits_module, "FAULTS", 5)
    hub, end = listening
    with raw_client(end) as client:
        client.send_multipart(encode("node.hello", HELLO))
        for _ in range(7):
            client.send(b"junk")
        net.wait_until(lambda: [event for _, event, _ in net.inboxes[hub]] == [JOINED, LEFT])


def test_what_a_node_may_have_waiting_is_allowed_to_it(listening, net, tape):
    """Three rollouts of 30 MB arrive while the hub is busy."""
    hub, end = listening
    node = net.enter(end)
    hub.allow(node.name, 100 * 2**20)
    rollout = torch.arange(30_000_000 // 8)
    for _ in range(3):
        node.send("rollout", rollout)
    time.sleep(0.5)
    for message in net.take(hub, 3):
        assert torch.equal(message.args[0], rollout)
    assert not tape.messages


def test_a_node_that_is_gone_is_missed_also_while_others_send_more_than_is_read(listening, net, monkeypatch):
    monkeypatch.setattr(router_module, "LAST_WORDS_SECONDS", 0.5)
    monkeypatch.setattr(Hub, "_read_port", lambda hub, port, read=Hub._read_port: read(hub, port) and False)
    hub, end = listening
    net.leave(net.enter(end))
    net.wait_until(lambda: [event for _, event, _ in net.inboxes[hub]] == [JOINED, LEFT])


def test_heartbeats_are_not_taken_for_what_waits_to_be_read(listening, net, monkeypatch, tape):
    """200 times as often as in a run: these are as many as there in eight minutes."""
    for module in (sockets_module, limits_module):
        monkeypatch.setattr(module, "HEARTBEAT_MS", 10)
    hub, end = listening
    net.enter(end)
    (connection,) = hub._ports[-1]._by_token.values()
    net.wait_until(lambda: connection.counters()[1] > limits_module.HANDSHAKE_BYTES + 20_000)
    assert connection.waiting() == 0


@pytest.mark.parametrize(
    ("families", "attempts"), [((2, 10), [True, False, True]), ((2,), [True] * 3), ((10,), [True] * 3)]
)
def test_a_name_with_addresses_of_both_kinds_is_dialed_at_both_in_turns(families, attempts, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(family, None) for family in families])
    assert [sockets_module._uses_ipv6("tcp://hub:50515", attempt) for attempt in range(3)] == attempts


@pytest.mark.parametrize("other", [os.pipe, lambda: [each.detach() for each in socket.socketpair()]])
def test_the_number_of_a_connection_that_has_ended_may_be_another_file_s(other):
    numbers, files = other(), "/proc/self/fd"
    before = os.listdir(files)
    with pytest.raises(OSError):  # noqa: PT011
        limits_module.Connection(numbers[0], port=1)
    assert os.listdir(files) == before
    for number in numbers:
        os.close(number)
