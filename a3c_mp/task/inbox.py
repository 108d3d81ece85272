"""Messages that have arrived and wait for the node's own loop."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from a3c_mp.task.link import BACKLOG_BYTES, BACKLOG_MESSAGES
from a3c_mp.task.wire import Message


class Inbox:
    """Messages in order of arrival, between the router's thread and those that receive.

    While it is full, nothing is acknowledged, so what follows waits at the sender, within the limits of its backlog.
    """

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """readable while there are messages"""
        self._messages: list[tuple[Message, int, bytes]] = []  # message, its bytes, token of its session
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        return len(self._messages) >= BACKLOG_MESSAGES or self._bytes >= BACKLOG_BYTES

    def put(self, message: Message, size: int, token: bytes) -> None:
        with self._lock:
            if not self._messages:
                os.eventfd_write(self.wake_fd, 1)
            self._messages.append((message, size, token))
            self._bytes += size

    def take(self) -> list[Message]:
        """All messages; none of them twice."""
        with self._lock:
            taken, self._messages, self._bytes = self._messages, [], 0
            self._clear_wake()
        return [message for message, _, _ in taken]

    def discard(self, token: bytes) -> None:
        """Forget the messages of a session."""
        with self._lock:
            self._messages = [entry for entry in self._messages if entry[2] != token]
            self._bytes = sum(size for _, size, _ in self._messages)
            if not self._messages:
                self._clear_wake()

    def wake(self) -> None:
        """Have `wake_fd` readable until the next `take`."""
        os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        """What has arrived can still be taken."""
        with self._lock:
            os.close(self.wake_fd)
            self.wake_fd = -1

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError, ValueError):  # there was nothing, or it is closed
            os.eventfd_read(self.wake_fd)
