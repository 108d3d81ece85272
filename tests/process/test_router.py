"""Nodes in processes of their own: order, restarts, nodes that are stopped, killed or cut off."""

import dataclasses
import multiprocessing.connection
import signal
import threading
import time

import psutil
import pytest
from nodes import Node, enter, free_port, wait_for_peers

from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints
from a3c_mp.task.router import Router

pytestmark = pytest.mark.usefixtures("forked")

EMITS = 3000
OUTAGE_SECONDS = 20


@pytest.fixture
def folder():
    with ipc_folder() as path:
        yield path


@pytest.fixture
def start():
    """Starts nodes and enters their routers, all at once; ends their processes after the test."""
    nodes = []

    def start(*endpoints, **how):
        new = [Node(endpoint, **how) for endpoint in endpoints]
        nodes.extend(new)
        for node in new:
            node.begin(enter)
        for node in new:
            node.end()
        return new

    yield start
    for node in nodes:
        node.kill()


@pytest.fixture
def hub(folder):
    """A hub in this process for one spoke, and what it notes of others."""
    endpoints = local_endpoints(folder, "star", [(), ("spoke",)])
    with Router(endpoints[0]) as router:
        router.tape = []
        router.on_join(lambda peer: router.tape.append(("join", peer.name)))
        router.on_leave(lambda peer: router.tape.append(("leave", peer.name)))
        router.spoke = endpoints[1]
        yield router


# ---- what nodes do


def receive(router, count, timeout=60):
    """Wait for so many messages."""
    messages, deadline = [], time.monotonic() + timeout
    while len(messages) < count:
        rest = deadline - time.monotonic()
        assert multiprocessing.connection.wait([router.wake_fd], rest), f"{len(messages)} of {count} messages"
        messages += router.receive()
    return messages


def emit_and_receive(router, emits):
    """Send numbered events to all, and receive those of all: {sender: numbers in order of arrival}."""
    for number in range(emits):
        router.send("number", number)
    found = {}
    for message in receive(router, emits * len(router.peers)):
        found.setdefault(message.sender, []).append(message.args[0])
    return found


def send_numbers(router, numbers):
    for number in numbers:
        router.send("number", number)


def numbers(router, count):
    return [message.args[0] for message in receive(router, count)]


# ---- order


@pytest.mark.parametrize(
    ("topology", "over"),
    [
        ("star", "ipc"),
        ("mesh", "tcp"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("star", "tcp"), ("mesh", "ipc"))),
    ],
)
def test_each_of_many_events_arrives_once_and_in_order_at_every_node(start, folder, tmp_path, topology, over):
    endpoints = local_endpoints(folder, topology, [("learner",), ("collector",), ("evaluator",)])
    if over == "tcp":
        tcp = {address: f"tcp://127.0.0.1:{free_port()}" for end in endpoints for address in end.binds}
        endpoints = [
            dataclasses.replace(
                end,
                binds=tuple(tcp[address] for address in end.binds),
                dials=tuple(tcp[address] for address in end.dials),
                key_file=tmp_path / "key",
            )
            for end in endpoints
        ]
        endpoints[0].load_key()  # the file is there before any node looks for it
    nodes = start(*endpoints)
    for node in nodes:
        node.begin(wait_for_peers, 2)
    assert max(node.end() for node in nodes) < 7, "seconds: not by a heartbeat, that takes 8 s"
    for node in nodes:
        node.begin(emit_and_receive, EMITS)
    names = {f"node.{number}" for number in range(3)}
    for number, node in enumerate(nodes):
        found = node.end(timeout=120)
        assert found.keys() == names - {f"node.{number}"}
        assert all(numbers == list(range(EMITS)) for numbers in found.values())


def test_a_node_that_ends_leaves_its_last_messages(hub, start):
    (spoke,) = start(hub.spoke)
    spoke.begin(send_numbers, range(1000))
    spoke.end()
    spoke.stop()
    assert numbers(hub, 1000) == list(range(1000))
    wait_until(lambda: hub.tape == [("join", "node.1"), ("leave", "node.1")])


# ---- nodes that are lost


def wait_until(happened, timeout=60):
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, f"it did not happen within {timeout} s"
        time.sleep(0.01)


def test_a_killed_node_is_seen_at_once_and_its_successor_joins_under_its_name(hub, start):
    for restart in range(3):
        (spoke,) = start(hub.spoke)
        hub.send("number", restart)
        assert spoke(numbers, 1) == [restart]
        spoke.kill()
        wait_until(lambda: not hub.peers, timeout=7)  # not by a heartbeat, that takes 8 s
    assert hub.tape == [("join", "node.1"), ("leave", "node.1")] * 3


def test_a_hub_that_was_killed_is_missed_and_its_successor_is_joined(folder, start):
    first, second = local_endpoints(folder, "star", [(), ("spoke",)])
    (hub,) = start(first)
    with Router(second) as spoke:
        left = []
        spoke.on_leave(left.append)
        hub.kill()
        wait_until(lambda: not spoke.peers, timeout=7)
        assert [peer.name for peer in left] == ["node.0"]
        spoke.send("number", 1)  # nobody is there
        (hub,) = start(first)
        wait_for_peers(spoke, 1)
        spoke.send("number", 2)
        assert hub(numbers, 1) == [2]


PAYLOAD = "x" * 1000


def test_a_stopped_node_costs_its_peers_neither_time_nor_memory_and_joins_again(hub, start):
    """50,000 messages wait for it, then it is dropped."""
    (spoke,) = start(hub.spoke)
    per_message = timed_burst(hub, 2000)  # to a node that reads
    memory = psutil.Process().memory_info().rss
    spoke.signal(signal.SIGSTOP)
    while hub.peers:
        assert timed_burst(hub, 1000) < 20 * per_message + 5e-3, "seconds for a message; not until it is dropped"
        assert psutil.Process().memory_info().rss - memory < 250 * 2**20
    memory = psutil.Process().memory_info().rss
    timed_burst(hub, 20_000)
    assert psutil.Process().memory_info().rss - memory < 10 * 2**20, "flat from here on"
    spoke.signal(signal.SIGCONT)
    wait_for_peers(hub, 1)
    spoke(drain)
    hub.send("number", 7)
    assert spoke(numbers, 1) == [7], "nothing of the old session"
    assert hub.tape == [("join", "node.1"), ("leave", "node.1"), ("join", "node.1")]


def test_a_stopped_node_holds_up_nobodys_end(folder, start):
    first, second = local_endpoints(folder, "star", [(), ()])
    with Router(first) as hub:
        (spoke,) = start(second)
        spoke.signal(signal.SIGSTOP)
        timed_burst(hub, 5000)
        begin = time.monotonic()
    assert time.monotonic() - begin < 5


def timed_burst(router, count):
    """Seconds for each of so many messages."""
    begin = time.monotonic()
    for _ in range(count):
        router.send("burst", PAYLOAD)
    return (time.monotonic() - begin) / count


def drain(router):
    """Wait for the connection, and forget what has come before it."""
    wait_for_peers(router, 1, 30)
    return len(router.receive())


@pytest.mark.slow
def test_a_silent_node_is_lost_after_ten_seconds_on_both_sides(hub, start):
    (spoke,) = start(hub.spoke)
    begin = time.monotonic()
    spoke.signal(signal.SIGSTOP)
    wait_until(lambda: not hub.peers)
    assert 6 < time.monotonic() - begin < 13
    spoke.signal(signal.SIGCONT)
    wait_until(lambda: hub.peers)
    hub.send("number", 1)
    assert spoke(numbers, 1) == [1]


def busy(router, seconds):
    """Python code without a pause."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    return len(router.receive())


@pytest.mark.slow
def test_a_busy_node_is_not_lost(hub, start):
    (spoke,) = start(hub.spoke)
    spoke.begin(busy, 15)
    for number in range(15):
        hub.send("number", number)
    assert spoke.end() == 15
    assert hub.tape == [("join", "node.1")]


def numbers_and_end(router):
    """Numbers until the event "end", and seconds (of the machine's clock) at which the hub was lost."""
    lost, found = [], []
    router.on_leave(lambda peer: lost.append(time.monotonic()))
    while not found or found[-1].event != "end":
        found += receive(router, 1)
    return [message.args[0] for message in found[:-1]], lost


@pytest.mark.slow
def test_a_node_whose_link_is_down_is_lost_on_both_sides_and_joins_again(folder, tmp_path, start, cable):
    (end,) = local_endpoints(folder, "star", [()], listen="tcp://10.231.7.1:50515", key_file=tmp_path / "key")
    sent, stop, left = [0], threading.Event(), []
    with Router(end) as hub:
        hub.on_leave(lambda peer: left.append(time.monotonic()))
        (spoke,) = start(Endpoint(None, "star", dials=end.binds[1:], key_file=end.key_file), namespace="a3c-test")
        spoke.begin(numbers_and_end)

        def send():
            while not stop.wait(0.002):
                hub.send("number", sent[0])
                sent[0] += 1

        thread = threading.Thread(target=send)
        thread.start()
        wait_until(lambda: sent[0] > 200)
        down = time.monotonic()
        cable("link set a3c-hub down")
        time.sleep(OUTAGE_SECONDS)
        cable("link set a3c-hub up")
        up, last_lost = time.monotonic(), sent[0]
        wait_for_peers(hub, 1, 30)
        assert time.monotonic() - up < 10
        rejoined = sent[0]
        wait_until(lambda: sent[0] > rejoined + 100)
        stop.set()
        thread.join()
        hub.send("end")
        numbers, lost = spoke.end()
    assert 5 < left[0] - down < 13
    assert [5 < seconds - down < 13 for seconds in lost] == [True]
    assert numbers == sorted(set(numbers)), "each once and in order"
    before = [number for number in numbers if number < last_lost]
    assert before == list(range(len(before))), "whole up to the cut"
    assert 100 < len(before) < 1000, "nothing late that was sent while the link was down"
    after = numbers[len(before) :]
    assert after == list(range(after[0], sent[0])), "whole since the second joining"


def test_by_default_no_tcp_port_is_open(hub, start):
    (spoke,) = start(hub.spoke)
    found = psutil.Process(spoke.process.pid).net_connections("tcp")
    assert not [connection for connection in found if connection.status == psutil.CONN_LISTEN]


def test_an_attached_node_gets_a_number_and_the_greeting(folder, tmp_path, start):
    (alone,) = local_endpoints(
        folder, "star", [()], listen="tcp://127.0.0.1:0", key_file=tmp_path / "k", greeting={"seed": 3}
    )
    with Router(alone) as hub:
        address = next(address for address in hub.addresses if address.startswith("tcp"))
        attached = Endpoint(None, "star", dials=(address,), key_file=tmp_path / "k", labels=("collector",))
        nodes = start(attached, attached)
        wait_for_peers(hub, 2, 30)
        assert sorted(node(name_and_greeting) for node in nodes) == [("node.1", {"seed": 3}), ("node.2", {"seed": 3})]
        assert [peer.labels for peer in hub.peers.values()] == [("collector",)] * 2
        nodes[0].kill()
        wait_until(lambda: len(hub.peers) == 1)
        (third,) = start(attached)
        assert third(name_and_greeting)[0] == "node.3"


def name_and_greeting(router):
    return router.name, router.greeting
