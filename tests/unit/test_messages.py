"""Routers of several nodes in one process: who gets what, requests, and what hostile or broken peers can do."""

import contextlib
import dataclasses
import json
import os
import pickle
import select
import socket
import threading
import time
from multiprocessing import connection

import pytest
import torch
import zmq
from nodes import free_port, wait_for_peers

from a3c_mp.errors import ConfigError, RequestError, WorkerError
from a3c_mp.task import inbox as inbox_module
from a3c_mp.task import link as link_module
from a3c_mp.task import router as router_module
from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints
from a3c_mp.task.events import JOINED
from a3c_mp.task.keys import make_key
from a3c_mp.task.limited_log import RateLimitedLog
from a3c_mp.task.router import Router
from a3c_mp.task.wire import Envelope, encode, encode_envelope

ROLES = [("learner",), ("collector",), ("collector",), ("evaluator",)]


@pytest.fixture
def folder():
    with ipc_folder() as path:
        yield path


@pytest.fixture
def enter(log):
    """Enters routers of endpoints, until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda endpoint: stack.enter_context(Router(endpoint, log))


@pytest.fixture(params=["star", "mesh"])
def nodes(request, folder, enter):
    """A learner, two collectors and an evaluator, connected."""
    routers = [enter(endpoint) for endpoint in local_endpoints(folder, request.param, ROLES)]
    for router in routers:
        wait_for_peers(router, 3, 10)
    return routers


def receive(router, count, timeout=20):
    messages, deadline = [], time.monotonic() + timeout
    while len(messages) < count:
        assert connection.wait([router.wake_fd], deadline - time.monotonic()), f"{len(messages)} of {count} messages"
        messages += router.receive()
    return messages


def wait_until(happened, timeout=20):
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen within {timeout} s"
        time.sleep(0.005)


# ---- events


@pytest.mark.parametrize(
    ("to", "reached"),
    [
        ("*", [0, 2, 3]),
        ("collector", [2]),
        ("node.0", [0]),
        ("node.[03]", [0, 3]),
        ("*or", [2, 3]),
        ("node.1", []),
        ("nobody", []),
    ],
)
def test_an_event_reaches_the_other_nodes_that_match(nodes, to, reached):
    nodes[1].send("event", 1, {"a": [2.5]}, to=to)
    nodes[1].send("end")
    for number in (0, 2, 3):
        messages = receive(nodes[number], 1 + (number in reached))
        assert [message.event for message in messages] == ["event", "end"][number not in reached :]
        assert {message.sender for message in messages} == {"node.1"}
        assert number not in reached or messages[0].args == [1, {"a": [2.5]}]
    assert not nodes[1].receive()


def test_tensors_that_a_hub_relays_are_its_own(nodes):
    nodes[1].send("weights", torch.zeros(50_000))
    received = [receive(nodes[number], 1)[0].args[0] for number in (0, 2, 3)]
    for number, tensor in enumerate(received, 1):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in received] == [[1], [2], [3]]


def test_threads_send_side_by_side(nodes):
    """Each thread's events arrive once and in order, with more of them than the outbox holds."""
    threads = [
        threading.Thread(target=lambda i=i: [nodes[1].send("number", i, n) for n in range(3000)]) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    messages = receive(nodes[3], 12_000, timeout=60)
    for thread in threads:
        thread.join()
    for i in range(4):
        assert [message.args[1] for message in messages if message.args[0] == i] == list(range(3000))


def test_the_descriptor_is_readable_while_there_are_messages_and_callbacks_are_called(nodes):
    sender, receiver = nodes[:2]
    arrived = threading.Event()
    receiver.on_arrival(lambda: 1 / 0)  # goes to the log
    receiver.on_arrival(arrived.set)
    assert not select.select([receiver.wake_fd], [], [], 0)[0]
    sender.send("event")
    assert arrived.wait(10)
    for _ in range(2):
        assert select.select([receiver.wake_fd], [], [], 0)[0]
    assert len(receiver.receive()) == 1
    assert not select.select([receiver.wake_fd], [], [], 0)[0]


def test_a_node_alone_has_nobody_to_talk_to():
    with Router(Endpoint(labels=("learner",))) as router:
        assert (router.is_active, router.name, router.labels, router.peers) == (False, "node.0", ("learner",), {})
        router.send("event", 1)
        assert router.receive() == []
        with pytest.raises(RequestError, match="no node matches 'learner' for request 'weights'"):
            router.request("weights", to="learner", timeout=1)


def test_nodes_see_each_other_leave(folder, enter):
    ends = local_endpoints(folder, "star", [(), (), ()])
    hub, stays = enter(ends[0]), enter(ends[1])
    seen = []
    stays.on_join(lambda peer: seen.append("+" + peer.name))
    stays.on_leave(lambda peer: seen.append("-" + peer.name))
    with Router(ends[2]) as leaves:
        wait_for_peers(stays, ["node.2"], 10)
        leaves.send("last words")
    wait_until(lambda: seen == ["+node.2", "-node.2"])
    assert [message.event for message in stays.receive()] == ["last words"]
    assert hub.peers.keys() == {"node.1"}


def test_a_node_whose_session_is_ended_with_another_connection_joins_again(folder, enter):
    """It has the file descriptor of one that ended without a word, and the busy hub reads of both at once."""
    ends = local_endpoints(folder, "star", [(), (), ()])
    hub, free = enter(ends[0]), threading.Event()
    left = []
    hub.on_join(lambda peer: free.wait(20))  # on the router's thread
    hub.on_leave(left.append)
    enter(ends[1])
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(40)]
        for stranger in strangers:  # more than the descriptors that the next one opens at its own end
            stranger.connect(ends[0].binds[0].removeprefix("ipc://"))
        time.sleep(0.2)  # until they are accepted
        for stranger in strangers:
            stranger.shutdown(socket.SHUT_RDWR)
        time.sleep(0.2)
        threading.Timer(0.5, free.set).start()
        spoke = enter(ends[2])
        wait_until(lambda: left)
        wait_until(lambda: "node.2" in hub.peers)
        spoke.send("event")
        assert [message.event for message in receive(hub, 1)] == ["event"]


def test_a_mesh_has_a_link_for_each_pair_again_when_a_node_comes_back(folder, enter):
    ends = local_endpoints(folder, "mesh", [(), (), ()])
    first, last = enter(ends[0]), enter(ends[2])
    for _ in range(2):
        with Router(ends[1]) as middle:
            for router in (first, middle, last):
                wait_for_peers(router, 2, 10)
            middle.send("here")
            assert receive(first, 1) == receive(last, 1) == [("node.1", "here", [])]
        wait_until(lambda: len(first.peers) == len(last.peers) == 1)


def test_after_the_end_nothing_is_sent_and_what_has_arrived_can_be_received(folder, enter):
    first, second = local_endpoints(folder, "star", [(), ()])
    hub = enter(first)
    with Router(second) as spoke:
        hub.send("event")
        assert connection.wait([spoke.wake_fd], 10)
    spoke.send("too late")
    assert [message.event for message in spoke.receive()] == ["event"]
    assert spoke.receive() == []
    with pytest.raises(RequestError):
        spoke.request("name", to="node.0", timeout=10)
    hub.send("nobody is there")
    assert hub.receive() == []


# ---- requests


def test_requests_are_answered_by_the_first_node_that_matches(nodes):
    for number, node in enumerate(nodes):
        node.serve("scale", lambda tensor, factor, number=number: {"node": number, "tensor": tensor * factor})
    for to, number in [("learner", 0), ("collector", 2), ("evaluator", 3)]:
        answer = nodes[1].request("scale", torch.ones(3), 2, to=to, timeout=10)
        assert (answer["node"], answer["tensor"].tolist()) == (number, [2, 2, 2])
    assert nodes[0].request("scale", torch.ones(1), 3, to="node.3", timeout=10)["node"] == 3


def test_failed_requests_name_the_node(nodes, tape):
    nodes[2].serve("weights", lambda: {}["conv1"])
    nodes[2].serve("unsendable", lambda: b"bytes")
    for name, error in [
        ("weights", "KeyError: 'conv1'"),
        ("unsendable", "TypeError: bytes cannot be sent"),
        ("nothing", "it has no handler"),
    ]:
        with pytest.raises(RequestError, match=f"^node.2 did not answer '{name}': {error}"):
            nodes[3].request(name, to="node.2", timeout=10)
    assert "request 'weights' failed (1 so far): 'from node.3'" in tape.messages
    for _ in range(99):
        with pytest.raises(RequestError):
            nodes[3].request("weights", to="node.2", timeout=10)
    assert len([text for text in tape.messages if "'weights'" in text]) == 7, "numbers 1, 2, 4, 8, 16, 32 and 64"


def test_a_slow_answer_is_a_timeout_and_dropped_when_it_comes(nodes):
    go, done = threading.Event(), threading.Event()
    nodes[0].serve("slow", lambda: go.wait(20))
    nodes[0].serve("fast", done.set)
    with pytest.raises(TimeoutError, match=r"node.0 did not answer 'slow' within 0.05 s"):
        nodes[1].request("slow", to="node.0", timeout=0.05)
    go.set()
    assert nodes[1].request("fast", to="node.0", timeout=10) is None


def test_a_request_on_the_routers_thread_is_an_error_instead_of_a_deadlock(nodes):
    nodes[0].serve("name", lambda: "learner")
    nodes[1].serve("ask back", lambda: nodes[1].request("name", to="node.0", timeout=1))
    with pytest.raises(RequestError, match="RuntimeError: request 'name' on the router's thread would wait for itself"):
        nodes[0].request("ask back", to="node.1", timeout=10)


# ---- nodes that do not read


@pytest.fixture
def small_limits(monkeypatch):
    for module in (link_module, inbox_module):
        monkeypatch.setattr(module, "BACKLOG_MESSAGES", 300)
    for name, value in {"WINDOW_MESSAGES": 40, "ACK_MESSAGES": 10}.items():
        monkeypatch.setattr(link_module, name, value)


@pytest.mark.slow
def test_a_node_whose_loop_receives_nothing_is_dropped_and_joins_again(small_limits, folder, enter, tape):
    """300 in its inbox, 40 on their way, 300 waiting: the rest is too much."""
    first, second = local_endpoints(folder, "star", [(), ()])
    hub, spoke = enter(first), enter(second)
    left, joined = threading.Event(), threading.Event()
    hub.on_leave(lambda peer: left.set())
    hub.on_join(lambda peer: joined.set())
    for count in range(100, 700, 100):
        for number in range(100):
            hub.send("number", count + number)
        wait_until(lambda count=count: len(spoke._inbox._messages) >= min(count, 300))
    assert not left.is_set()
    for number in range(100):
        hub.send("number", number)
    assert left.wait(10)
    assert joined.wait(10)
    wait_for_peers(spoke, 1, 10)
    hub.send("new", 1)
    wait_until(lambda: any(entry[0].event == "new" for entry in list(spoke._inbox._messages)))
    numbers = [message.args[0] for message in spoke.receive()[:-1]]
    assert all(number < 100 for number in numbers), "what it had not received when it was dropped is gone"
    assert sum("node.1 does not read; dropped" in text for text in tape.messages) == 1


def test_a_node_that_receives_again_in_time_gets_everything(small_limits, folder, enter):
    first, second = local_endpoints(folder, "star", [(), ()])
    hub, spoke = enter(first), enter(second)
    numbers = []
    for burst in range(10):
        for number in range(300):
            hub.send("number", 300 * burst + number)
        numbers += [message.args[0] for message in receive(spoke, 300)]
    assert numbers == list(range(3000))


# ---- over TCP: who is let in, and what others can do


@pytest.fixture
def listening(folder, tmp_path, enter):
    """A hub that listens, and the endpoint of a node that may attach."""
    key_file, address = tmp_path / "key", f"tcp://127.0.0.1:{free_port()}"
    (end,) = local_endpoints(folder, "star", [()], listen=address, key_file=key_file)
    hub = enter(end)
    return hub, Endpoint(None, "star", dials=(address,), key_file=key_file)


def works(listening, enter):
    """Whether a node can attach and be heard."""
    hub, end = listening
    enter(end).send("works")
    return receive(hub, 1)[0].event == "works"


def test_a_wrong_key_is_one_line_on_both_sides_within_ten_seconds(listening, tmp_path, enter, tape):
    _, end = listening
    make_key(tmp_path / "other")
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=rf"^key-file=.*/other: the node at {end.dials[0]} has another one; copy"):
        enter(dataclasses.replace(end, key_file=tmp_path / "other"))
    assert time.monotonic() - begin < 10
    wait_until(lambda: tape.messages)
    assert tape.messages[0] == "a connection was refused: another key, or no node (1 so far)"
    assert works(listening, enter)


def test_other_versions_are_refused_by_name(listening, enter, tape):
    _, end = listening
    old = {"a3c_mp": "0.0.1", "torch": end.versions["torch"]}
    with pytest.raises(ConfigError, match=r"^attach-to=tcp.*: this node is refused: it has a3c_mp 0.0.1 instead of"):
        enter(dataclasses.replace(end, versions=old))
    assert ["0.0.1 instead of" in text for text in tape.messages] == [True]
    assert works(listening, enter)


def test_where_nobody_listens_the_attempt_ends(tmp_path, folder, monkeypatch):
    for name in ("WELCOME_SECONDS", "LOCAL_WELCOME_SECONDS"):
        monkeypatch.setattr(router_module, name, 0.1)
    make_key(tmp_path / "key")
    end = Endpoint(None, "star", dials=(f"tcp://127.0.0.1:{free_port()}",), key_file=tmp_path / "key")
    with pytest.raises(ConfigError, match=r"^attach-to=.*: no node lets this one in within 0.1 s; start"), Router(end):
        pass
    with pytest.raises(WorkerError, match=r"^node.1: no node lets this one in within 0.1 s, at ipc://"):
        Router(local_endpoints(folder, "star", [(), ()])[1]).__enter__()


@pytest.mark.parametrize(
    ("address", "why"), [("tcp://127.0.0.1:{port}", "Address already in use"), ("tcp://192.0.2.1:9", "cannot be bound")]
)
def test_an_address_that_cannot_be_bound(tmp_path, address, why):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = address.format(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"^listen={address}: cannot be bound \(.*; choose another") as error:
            Router(Endpoint(0, "star", binds=(address,), key_file=tmp_path / "key")).__enter__()
        assert why in str(error.value)


def test_a_node_that_is_refused_when_it_comes_back_hears_of_it(folder, enter):
    first, second = local_endpoints(folder, "star", [(), ()])
    with Router(first):
        spoke = enter(second)
    enter(dataclasses.replace(first, versions={"a3c_mp": "9"}))
    assert connection.wait([spoke.wake_fd], 10)
    with pytest.raises(ConfigError, match="refused"):
        spoke.receive()
    with pytest.raises(ConfigError, match="refused"):
        spoke.send("event")


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


def test_strangers_on_the_tcp_port_do_no_harm(listening, enter, tmp_path):
    hub, end = listening
    host, port = end.dials[0].removeprefix("tcp://").split(":")
    silent = socket.create_connection((host, int(port)))
    for attack in attacks(tmp_path / "bomb"):
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(attack)
            assert is_closed(stranger), attack[:50]
    assert works(listening, enter)
    assert len(hub.peers) == 1
    assert not (tmp_path / "bomb").exists()
    silent.close()


def is_closed(stranger):
    """Whether the other side hangs up, after whatever it says first."""
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1000):
            pass
    return True


@contextlib.contextmanager
def raw_client(end):
    """A socket that has the key, but follows no protocol."""
    key = end.load_key()
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.curve_publickey, client.curve_secretkey, client.curve_serverkey = *key, key.public
        client.connect(end.dials[0])
        yield client


HELLO = {"number": None, "labels": [], "versions": Endpoint().versions, "instance": "x"}
MALFORMED_HELLOS = [
    None,
    [],
    {},
    {**HELLO, "number": 0},
    {**HELLO, "number": -1},
    {**HELLO, "number": "1"},
    {**HELLO, "number": 2**40},
    {**HELLO, "labels": "learner"},
    {**HELLO, "labels": [1]},
    {**HELLO, "versions": 3},
]


def message(kind, content, to="*"):
    return [encode_envelope(Envelope(kind, "node.0", to)), *encode(content)]


def test_malformed_messages_of_a_node_with_the_key_are_dropped_and_counted(listening, enter, tape, tmp_path):
    hub, end = listening
    with raw_client(end) as client:
        for hello in MALFORMED_HELLOS:
            client.send_multipart(message("hello", hello))
        client.send_multipart([b"junk"])
        client.send_multipart(message("event", ["before the hello", []]))
        client.send_multipart(message("hello", HELLO))
        assert client.recv_multipart()[0].startswith(b'["welcome"')
        bomb = pickle.dumps(Bomb(tmp_path / "bomb"))
        for frames in [
            [b""],
            [bomb, bomb],
            [encode_envelope(Envelope("event", "node.1", "*")), bomb],
            [encode_envelope(Envelope("event", "node.1", "*"))],
            message("unheard of", 1),
            message("welcome", {}),
            message("joined", ["node.7", []]),
            message("hello", HELLO),
            message("ack", 1),
            message("ack", ["a", "b"]),
            message("event", ["name", "no list"]),
            message("event", [1, []]),
            message("event", 5),
            message("answer", [True, 1]),
            message("request", [[], []]),
            message("event", [JOINED, [1]]),
            message("event", ["good", [1]]),
        ]:
            client.send_multipart(frames)
        (good,) = receive(hub, 1)
        assert good == ("node.1", "good", [1]), "and its sender is not who it says"
    assert all("dropped" in text for text in tape.messages)
    assert len(tape.messages) == 8, "numbers 1, 2, 4 and 8, before and after it has joined"
    assert works(listening, enter)
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize(("wanted", "given"), [(1, 2), (7, 7)])
def test_numbers_of_the_nodes_that_are_started_together_are_theirs(folder, tmp_path, enter, wanted, given):
    """A node that attached to an earlier task may ask for one when it connects again."""
    address, key_file = f"tcp://127.0.0.1:{free_port()}", tmp_path / "key"
    first, second = local_endpoints(folder, "star", [(), ("own",)], listen=address, key_file=key_file)
    hub = enter(first)
    with raw_client(Endpoint(None, "star", dials=(address,), key_file=key_file)) as client:
        client.send_multipart(message("hello", {**HELLO, "number": wanted, "secret": "guess"}))
        assert json.loads(client.recv_multipart()[1])["number"] == given
        enter(second)
        wait_for_peers(hub, 2, 10)
        assert hub.peers["node.1"].labels == ("own",)


def test_a_request_to_a_node_that_is_lost_fails_at_once(listening, enter):
    hub, end = listening
    spoke = enter(end)
    errors = []

    def ask(router):
        try:
            router.request("stuck", to="evaluator", timeout=60)
        except RequestError as error:
            errors.append(str(error))

    with raw_client(end) as evaluator:
        evaluator.send_multipart(message("hello", {**HELLO, "labels": ["evaluator"]}))
        wait_for_peers(spoke, ["evaluator"], 10)
        threads = [threading.Thread(target=ask, args=[router]) for router in (hub, spoke)]
        for thread in threads:
            thread.start()
        kinds = [evaluator.recv_multipart()[0].split(b'"')[1] for _ in range(3)]
        assert kinds == [b"welcome", b"request", b"request"]
    for thread in threads:
        thread.join(10)
    assert errors == ["node.2 did not answer 'stuck': it has left"] * 2


def test_a_frame_that_is_too_large_ends_the_connection_and_nothing_else(listening, enter):
    hub, end = listening
    with raw_client(end) as client:
        client.send_multipart(message("hello", HELLO))
        client.recv_multipart()
        client.send(bytes(130 * 2**20))
        wait_until(lambda: not hub.peers)
    assert works(listening, enter)


def test_repeated_warnings_are_few(log, tape):
    limited = RateLimitedLog(log)
    for _ in range(1000):
        limited.warning("noise")
    limited.warning("other", "line 1\nline 2" + 1000 * "x", count=3)
    assert len([text for text in tape.messages if "noise" in text]) == 10
    assert [text[:34] for text in tape.messages[-2:]] == [f"other ({n} so far): 'line 1\\nline 2x" for n in (1, 2)]
    assert len(tape.messages[-1]) < 250
