"""Values that the tasks of several nodes share: what one sends, and the newest that the others have sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from a3c_mp.task.context import Context, ParallelContext
from a3c_mp.task.events import JOINED, Events
from a3c_mp.task.wire import encode

SHARE = "task.share"
"""event between tasks: ({name: value},)"""


class Sharing:
    """Sends the declared attributes of a task's contexts to the other tasks, and receives theirs.

    Args:
        events: of the task.
    """

    def __init__(self, events: Events):
        self.received = ParallelContext()
        self._router = events.router
        self._sent: dict[str, bytes] = {}  # by name, of the names that this task shares; empty if not sent
        events.on_internal(SHARE, self._on_shared)

    def declare(self, names: Sequence[str]) -> None:
        """Share attributes of these names from now on."""
        if not self._sent and self._router is not None:
            self._router.handle(JOINED, self._on_joined)
        self._sent |= {name: b"" for name in names if name not in self._sent}

    def send(self, ctx: Context) -> None:
        """Send what has changed, also inside of a list or an array; and all of it once a node has joined."""
        if not self._sent or self._router is None or not self._router.is_active:
            return
        values = {
            name: b"".join(frame.bytes for frame in encode([ctx.get(name)])) for name in self._sent if name in ctx
        }
        if changed := [name for name, value in values.items() if value != self._sent[name]]:
            self._sent |= values
            self._router.send(SHARE, {name: ctx.get(name) for name in changed})

    def _on_joined(self, sender: str) -> None:
        self._sent = dict.fromkeys(self._sent, b"")

    def _on_shared(self, sender: str, args: Sequence[Any]) -> None:
        if len(args) == 1 and isinstance(args[0], dict):  # else it is not from a `Task`
            self.received.update(sender, args[0])
