"""Flow control of the connection to one node: a window of messages on their way, and a bounded backlog behind it.

The sockets alone cannot tell when one node among several reads again, so nodes acknowledge what they have read. At
most a window is on its way to a node; the rest waits here, and is dropped with the node once it exceeds the limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from a3c_mp.task.endpoint import Peer
from a3c_mp.task.wire import num_bytes

MIB = 2**20
WINDOW_MESSAGES, WINDOW_BYTES = 1000, 16 * MIB
"""most that is on its way to a node that has not acknowledged it"""
BACKLOG_MESSAGES, BACKLOG_BYTES = 50_000, 256 * MIB
"""most that waits for a node, before the node is dropped"""
ACK_MESSAGES, ACK_BYTES = WINDOW_MESSAGES // 4, WINDOW_BYTES // 4
"""read messages or bytes after which a node acknowledges them"""

Frames = list[Any]
"""bytes and zmq frames, without the routing id"""


class BacklogFull(Exception):
    """More waits for a node than it may: it does not read, or not fast enough."""


class Link:
    """The connection to one node, from its hello to its end.

    Args:
        peer: the node.
        token: of the session.
        transmit: hands frames to the socket; raises zmq.Again if it takes no more.
        instance: random id of the node's process, the same when it joins again.
    """

    def __init__(self, peer: Peer, token: bytes, transmit: Callable[[Frames], None], instance: str = ""):
        self.peer, self.token, self.transmit, self.instance = peer, token, transmit, instance
        self._waiting: deque[tuple[Frames, int]] = deque()
        self._waiting_bytes = 0
        self._sent_messages = self._sent_bytes = 0  # on their way, not yet acknowledged
        self._read_messages = self._read_bytes = 0  # read from the node, not yet acknowledged to it

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def send(self, frames: Frames) -> None:
        """Send frames after all that were sent before. Raises BacklogFull, zmq.Again."""
        size = num_bytes(frames)
        if self._waiting:
            if len(self._waiting) >= BACKLOG_MESSAGES or self._waiting_bytes + size > BACKLOG_BYTES:
                raise BacklogFull(f"{len(self._waiting):,} messages, {self._waiting_bytes / MIB:.1f} MiB")
        elif self._fits(size):
            self._transmit(frames, size)
            return
        self._waiting.append((frames, size))
        self._waiting_bytes += size

    def acknowledge(self, messages: int, size: int) -> None:
        """The node has read so much: send what waits. Raises zmq.Again."""
        self._sent_messages = max(self._sent_messages - max(messages, 0), 0)
        self._sent_bytes = max(self._sent_bytes - max(size, 0), 0)
        while self._waiting and self._fits(self._waiting[0][1]):
            frames, size = self._waiting.popleft()
            self._waiting_bytes -= size
            self._transmit(frames, size)

    def count(self, frames: Frames) -> None:
        """Count a message that was read from the node."""
        self._read_messages += 1
        self._read_bytes += num_bytes(frames)

    def take_due(self) -> tuple[int, int] | None:
        """Messages and bytes to acknowledge now; None while they are too few."""
        if self._read_messages < ACK_MESSAGES and self._read_bytes < ACK_BYTES:
            return None
        due = self._read_messages, self._read_bytes
        self._read_messages = self._read_bytes = 0
        return due

    def _fits(self, size: int) -> bool:
        # The node may never acknowledge less than this, so a large message does not wait for it.
        if self._sent_messages < ACK_MESSAGES and self._sent_bytes < ACK_BYTES:
            return True
        return self._sent_messages < WINDOW_MESSAGES and self._sent_bytes + size <= WINDOW_BYTES

    def _transmit(self, frames: Frames, size: int) -> None:
        self._sent_messages += 1
        self._sent_bytes += size
        self.transmit(frames)
