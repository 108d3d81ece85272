"""Nodes in processes of their own: order, restarts, nodes that are stopped, killed or cut off."""

import signal
import time

import psutil
import pytest
from nodes import Net, Node, enter

from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints
from a3c_mp.task.wire import JOINED, LEFT

pytestmark = pytest.mark.usefixtures("forked")

EMITS = 3000
OUTAGE_SECONDS = 20
PAYLOAD = "x" * 1000


@pytest.fixture
def net():
    net = Net()
    with net.stack:
        yield net


@pytest.fixture
def start(net):
    """Starts nodes and enters their routers, all at once; ends their processes after the test."""
    nodes = []

    def start(*endpoints, **how):
        new = [Node(endpoint, net, **how) for endpoint in endpoints]
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
def hub(net):
    """A hub in this process for one spoke."""
    with ipc_folder() as folder:
        endpoints = local_endpoints(folder, [(), ("spoke",)], None)
        router = net.enter(endpoints[0])
        router.spoke = endpoints[1]
        yield router


def changes(net, hub):
    return [event for _, event, _ in net.inboxes[hub] if event in (JOINED, LEFT)]


# ---- what nodes do


def exchange(net, router, emits):
    """Send numbered events to node 0, and return the numbers of its events."""
    for number in range(emits):
        router.send("number", number)
    return numbers(net, router, emits)


def send_numbers(net, router, numbers):
    for number in numbers:
        router.send("number", number)


def numbers(net, router, count):
    return [message.args[0] for message in net.take(router, count)]


# ---- order


@pytest.mark.parametrize("over", ["ipc", "tcp"])
def test_each_of_many_events_arrives_once_and_in_order(net, start, tmp_path, over):
    with ipc_folder() as folder:
        listen, settings = ("tcp://127.0.0.1:0", {"key_file": tmp_path / "key"}) if over == "tcp" else (None, {})
        first, *others = local_endpoints(folder, [(), (), ()], listen, **settings)
        hub = net.enter(first)
        if over == "tcp":
            others = [Endpoint(dials=hub.addresses[1], **settings)] * 2
        nodes = start(*others)
        for node in nodes:
            node.begin(exchange, EMITS)
        for number in range(EMITS):
            hub.send("number", number)
        for node in nodes:
            assert node.end(timeout=120) == list(range(EMITS))
        found = net.take(hub, 2 * EMITS)
        for name in hub.peers:
            assert [args[0] for sender, _, args in found if sender == name] == list(range(EMITS))


def test_a_node_that_ends_leaves_its_last_messages(net, hub, start):
    (spoke,) = start(hub.spoke)
    spoke(send_numbers, range(1000))
    spoke.stop()
    assert numbers(net, hub, 1000) == list(range(1000))
    net.wait_until(lambda: changes(net, hub) == [LEFT])


# ---- nodes that are lost


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
        first, second = local_endpoints(folder, [(), ("spoke",)], None)
        (hub,) = start(first)
        spoke = net.enter(second)
        hub.kill()
        net.wait_until(lambda: not spoke.peers, timeout=7)
        spoke.send("number", 1)  # nobody is there
        (hub,) = start(first)
        net.wait_until(lambda: spoke.peers)
        spoke.send("number", 2)
        assert hub(numbers, 1) == [2]


def test_a_stopped_node_costs_its_peers_neither_time_nor_memory_and_joins_again(net, hub, start):
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
    net.wait_until(lambda: hub.peers)
    spoke(drain)
    hub.send("number", 7)
    assert spoke(numbers, 1) == [7], "nothing of the old session"
    assert changes(net, hub) == [JOINED, LEFT, JOINED]


def test_a_stopped_node_holds_up_nobodys_end(net, hub, start):
    (spoke,) = start(hub.spoke)
    spoke.signal(signal.SIGSTOP)
    timed_burst(hub, 5000)
    begin = time.monotonic()
    net.leave(hub)
    assert time.monotonic() - begin < 5


def timed_burst(router, count):
    """Seconds for each of so many messages."""
    begin = time.monotonic()
    for _ in range(count):
        router.send("burst", PAYLOAD)
    return (time.monotonic() - begin) / count


def drain(net, router):
    """Wait for the connection, and forget what has come before it."""
    net.wait_until(lambda: router.peers)
    net.inboxes[router].clear()


@pytest.mark.slow
def test_a_silent_node_is_lost_after_ten_seconds_on_both_sides(net, hub, start):
    (spoke,) = start(hub.spoke)
    begin = time.monotonic()
    spoke.signal(signal.SIGSTOP)
    net.wait_until(lambda: not hub.peers)
    assert 6 < time.monotonic() - begin < 13
    spoke.signal(signal.SIGCONT)
    net.wait_until(lambda: hub.peers)
    hub.send("number", 1)
    assert spoke(numbers, 1) == [1]


def busy(net, router, seconds):
    """Python code without a pause."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    return numbers(net, router, 15)


@pytest.mark.slow
def test_a_busy_node_is_not_lost(net, hub, start):
    (spoke,) = start(hub.spoke)
    spoke.begin(busy, 15)
    for number in range(15):
        hub.send("number", number)
    assert spoke.end() == list(range(15))
    assert changes(net, hub) == [JOINED]


def numbers_and_end(net, router):
    """Numbers until the event "end", and the machine's clock when the hub was lost."""
    lost, found = [], []

    def is_over():
        found.extend((event, args, time.monotonic()) for _, event, args in net.inboxes[router])
        net.inboxes[router].clear()
        return found and found[-1][0] == "end"

    net.wait_until(is_over, 120)
    lost = [seconds for event, _, seconds in found if event == LEFT]
    return [args[0] for event, args, _ in found if event == "number"], lost


@pytest.mark.slow
def test_a_node_whose_link_is_down_is_lost_on_both_sides_and_joins_again(net, tmp_path, start, cable):
    end = Endpoint(binds=("tcp://10.231.7.1:50515",), key_file=tmp_path / "key")
    hub, sent, left = net.enter(end), 0, []
    (spoke,) = start(Endpoint(dials=end.binds[0], key_file=end.key_file), namespace="a3c-test")
    spoke.begin(numbers_and_end)

    def send_until(happened, timeout=60):
        nonlocal sent
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline
            hub.send("number", sent)
            sent += 1
            net.look()
            if not left and LEFT in changes(net, hub):
                left.append(time.monotonic())
            time.sleep(0.002)

    send_until(lambda: sent > 200)
    down = time.monotonic()
    cable("link set a3c-hub down")
    send_until(lambda: time.monotonic() > down + OUTAGE_SECONDS)
    cable("link set a3c-hub up")
    up, last_lost = time.monotonic(), sent
    send_until(lambda: hub.peers, 10)
    assert time.monotonic() - up < 10
    rejoined = sent
    send_until(lambda: sent > rejoined + 100)
    hub.send("end")
    numbers, lost = spoke.end()
    assert 5 < left[0] - down < 13
    assert [5 < seconds - down < 13 for seconds in lost] == [True]
    assert numbers == sorted(set(numbers)), "each once and in order"
    before = [number for number in numbers if number < last_lost]
    assert before == list(range(len(before))), "whole up to the cut"
    assert 100 < len(before) < 1000, "nothing late that was sent while the link was down"
    after = numbers[len(before) :]
    assert after == list(range(after[0], sent)), "whole since the second joining"


def test_by_default_no_tcp_port_is_open(hub, start):
    (spoke,) = start(hub.spoke)
    found = psutil.Process(spoke.process.pid).net_connections("tcp")
    assert not [connection for connection in found if connection.status == psutil.CONN_LISTEN]
