"""Nodes in processes of their own that are stopped, killed or busy."""

import os
import signal
import time

import psutil
import pytest
from nodes import Node, free_port

from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints
from a3c_mp.task.wire import JOINED, LEFT

pytestmark = pytest.mark.usefixtures("forked")

PAYLOAD = "x" * 1000


@pytest.fixture
def start(net):
    """Starts nodes, all at once; ends their processes after the test."""
    nodes = []

    def start(*endpoints):
        new = [Node(endpoint, net) for endpoint in endpoints]
        nodes.extend(new)
        for node in new:
            node.end()
        return new

    yield start
    for node in nodes:
        node.kill()


@pytest.fixture
def hub(net):
    """A hub in this process for one spoke."""
    with ipc_folder() as folder:
        first, second = local_endpoints(folder, [(), ()], None)
        router = net.enter(first)
        router.spoke = second
        yield router


def changes(net, hub):
    return [event for _, event, _ in net.inboxes[hub] if event in (JOINED, LEFT)]


def numbers(net, router, count):
    return [message.args[0] for message in net.take(router, count)]


def drain(net, router):
    """Wait for the connection, and forget what has come before it."""
    net.wait_until(lambda: router.peers)
    net.inboxes[router].clear()


def busy(net, router, seconds):
    """Python code without a pause."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    return numbers(net, router, 15)


def test_a_killed_node_is_seen_at_once_and_its_successor_joins_under_its_name(net, hub, start):
    for restart in range(3):
        (spoke,) = start(hub.spoke)
        hub.send("number", restart)
        assert spoke(numbers, 1) == [restart]
        spoke.kill()
        net.wait_until(lambda: not hub.peers, timeout=7)  # not by a heartbeat, that takes 8 s
    assert changes(net, hub) == [JOINED, LEFT] * 3


def test_a_hub_that_was_killed_is_missed_and_its_successor_is_joined(net, start):
    with ipc_folder() as folder:
        first, second = local_endpoints(folder, [(), ()], None)
        (hub,) = start(first)
        spoke = net.enter(second)
        hub.kill()
        net.wait_until(lambda: not spoke.peers, timeout=7)
        spoke.send("number", 1)  # there is no connection
        (hub,) = start(first)
        net.wait_until(lambda: spoke.peers)
        spoke.send("number", 2)
        assert hub(numbers, 1) == [2]


def test_a_stopped_node_costs_its_peers_neither_time_nor_memory_and_joins_again(net, hub, start):
    """50,000 messages wait for it, then it is dropped."""
    (spoke,) = start(hub.spoke)
    per_message = timed_burst(hub, 2000)  # to a node that reads
    memory = psutil.Process().memory_info().rss
    os.kill(spoke.process.pid, signal.SIGSTOP)
    while hub.peers:
        assert timed_burst(hub, 1000) < 20 * per_message + 5e-3, "seconds for a message; not until it is dropped"
        assert psutil.Process().memory_info().rss - memory < 250 * 2**20
    memory = psutil.Process().memory_info().rss
    timed_burst(hub, 20_000)
    assert psutil.Process().memory_info().rss - memory < 10 * 2**20, "flat from here on"
    os.kill(spoke.process.pid, signal.SIGCONT)
    net.wait_until(lambda: hub.peers)
    spoke(drain)
    hub.send("number", 7)
    assert spoke(numbers, 1) == [7], "nothing of the old session"
    assert changes(net, hub) == [JOINED, LEFT, JOINED]
    os.kill(spoke.process.pid, signal.SIGSTOP)
    timed_burst(hub, 5000)
    begin = time.monotonic()
    net.leave(hub)
    assert time.monotonic() - begin < 5, "its peers can end"


def timed_burst(router, count):
    """Seconds for each of so many messages."""
    begin = time.monotonic()
    for _ in range(count):
        router.send("burst", PAYLOAD)
    return (time.monotonic() - begin) / count


@pytest.mark.slow
def test_a_silent_node_is_lost_after_ten_seconds_and_a_busy_one_is_not(net, start, tmp_path):
    """Over TCP: on one machine, a process that is stopped keeps its connection."""
    address, key = f"tcp://127.0.0.1:{free_port()}", {"key_file": tmp_path / "key"}
    hub = net.enter(Endpoint(binds=(address,), **key))
    (spoke,) = start(Endpoint(dials=address, **key))
    spoke.begin(busy, 15)
    for number in range(15):
        hub.send("number", number)
    assert spoke.end() == list(range(15))
    assert changes(net, hub) == [JOINED]
    begin = time.monotonic()
    os.kill(spoke.process.pid, signal.SIGSTOP)
    net.wait_until(lambda: not hub.peers)
    assert 6 < time.monotonic() - begin < 13
    os.kill(spoke.process.pid, signal.SIGCONT)
    net.wait_until(lambda: hub.peers)
    hub.send("number", 1)
    assert spoke(numbers, 1) == [1]
