"""Mailbox: events of a node that have arrived and have no handler."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch

from a3c_mp.task.wire import Message

PENDING = 1000  # most messages in a mailbox
PENDING_BYTES = 256 * 2**20  # of their tensors and texts; a message with more waits only while no other one does


class Mailbox:
    """Messages by event, in order of arrival, of limited number and size.

    Where there are too many, the oldest of the event that takes most of the room are dropped: a flood of one event
    displaces no other one.
    """

    def __init__(self) -> None:
        self._messages: dict[str, deque[Message]] = {}
        self._bytes: Counter[str] = Counter()

    def add(self, message: Message) -> str | None:
        """Add a message; returns the event of which others were dropped for it."""
        self._messages.setdefault(message.event, deque()).append(message)
        self._bytes[message.event] += size_of(message.args)
        dropped = None
        while (number := sum(map(len, self._messages.values()))) > 1:
            if number > PENDING:
                dropped = max(self._messages, key=lambda event: len(self._messages[event]))
            elif self._bytes.total() > PENDING_BYTES:
                dropped = max(self._messages, key=lambda event: self._bytes[event])
            else:
                break
            self.take(dropped)
        return dropped

    def take(self, event: str) -> Message | None:
        """Remove and return the oldest message of an event; None if there is none."""
        if event not in self._messages:
            return None
        message = self._messages[event].popleft()
        self._bytes[event] -= size_of(message.args)
        if not self._messages[event]:
            del self._messages[event], self._bytes[event]
        return message


def size_of(value: Any) -> int:
    """Bytes of the tensors and texts in a value that has arrived."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(size_of, value)) + sum(map(size_of, value.values()))
    if isinstance(value, list):
        return sum(map(size_of, value))
    return len(value) if isinstance(value, str) else 8
