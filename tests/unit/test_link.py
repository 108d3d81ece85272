"""Flow control of a link against a receiver that reads when the test says so."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3c_mp.task import link as link_module
from a3c_mp.task.endpoint import Peer
from a3c_mp.task.link import BacklogFull, Link

LIMITS = {"WINDOW_MESSAGES": 8, "WINDOW_BYTES": 100, "BACKLOG_MESSAGES": 20, "BACKLOG_BYTES": 200}


class Pair:
    """A link, the wire behind it, and the link of the receiver."""

    def __init__(self):
        self.wire, self.read = deque(), []
        self.link = Link(Peer("node.1"), b"token", self.wire.append)
        self.receiver = Link(Peer("node.0"), b"token", self.wire.append)

    def step(self):
        """The receiver reads one message, and acknowledges when it is due."""
        frames = self.wire.popleft()
        self.read.append(frames)
        self.receiver.count(frames)
        if due := self.receiver.take_due():
            self.link.acknowledge(*due)


@pytest.fixture
def pair(monkeypatch):
    for name, value in {**LIMITS, "ACK_MESSAGES": 2, "ACK_BYTES": 25}.items():
        monkeypatch.setattr(link_module, name, value)
    return Pair()


def test_a_window_is_on_its_way_and_a_bounded_backlog_waits(pair):
    for number in range(28):
        pair.link.send([b"%d" % number])
    assert len(pair.wire) == 8
    with pytest.raises(BacklogFull, match="20 messages"):
        pair.link.send([b"28"])
    while pair.wire:
        pair.step()
    assert pair.read == [[b"%d" % number] for number in range(28)]
    assert pair.link.is_idle


def test_bytes_are_limited_too(pair):
    for _ in range(3):
        pair.link.send([b"x" * 30, b"y" * 20])
    assert len(pair.wire) == 2
    for _ in range(3):
        pair.link.send([b"x" * 50])
    with pytest.raises(BacklogFull, match="MiB"):
        pair.link.send([b"x"])


def test_a_message_larger_than_all_limits_is_sent_too(pair):
    pair.link.send([b"small"])
    pair.link.send([b"x" * 1000])
    pair.link.send([b"after"])
    assert [len(frames[0]) for frames in pair.wire] == [5, 1000]
    pair.step()
    pair.step()
    assert [len(frames[0]) for frames in pair.wire] == [5]


def test_acknowledgements_of_what_was_never_sent_change_nothing(pair):
    for messages, size in [(-5, -500), (5, 500), (10**9, 10**9)]:
        pair.link.acknowledge(messages, size)
    for number in range(9):
        pair.link.send([b"%d" % number])
    assert len(pair.wire) == 8


@given(st.lists(st.one_of(st.integers(0, 150), st.none()), max_size=200))
def test_messages_of_any_size_arrive_in_order_and_within_the_window(events):
    """An integer is the size of a message to send, None a message to read."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**LIMITS, "BACKLOG_MESSAGES": 10**6, "BACKLOG_BYTES": 10**9}.items():
            patch.setattr(link_module, name, value)
        patch.setattr(link_module, "ACK_MESSAGES", 2)
        patch.setattr(link_module, "ACK_BYTES", 25)
        pair, sent = Pair(), []
        for number, size in enumerate(events):
            if size is not None:
                sent.append([b"%d" % number, b"x" * size])
                pair.link.send(sent[-1])
            elif pair.wire:
                pair.step()
            on_wire = sum(len(frame) for frames in pair.wire for frame in frames)
            assert len(pair.wire) <= LIMITS["WINDOW_MESSAGES"]
            assert on_wire <= max(LIMITS["WINDOW_BYTES"], 25 + 152), "a message may follow what is not acknowledged yet"
        while pair.wire:
            pair.step()
        assert pair.read == sent, "the rest arrives as the receiver reads"
