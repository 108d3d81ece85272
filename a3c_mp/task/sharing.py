"""Values that the tasks of several nodes share: what one sends, and the newest that the others have sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from a3c_mp.task.context import Context, ParallelContext
from a3c_mp.task.events import Events

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
        self._sent: dict[str, Any] = {}  # by name, of the names that this task shares
        events.on_internal(SHARE, self._on_shared)

    def declare(self, names: Sequence[str]) -> None:
        """Share attributes of these names from now on."""
        self._sent |= {name: _UNSET for name in names if name not in self._sent}

    def send(self, ctx: Context) -> None:
        """Send what has changed."""
        if not self._sent or self._router is None or not self._router.is_active:
            return
        changed = {name: ctx.get(name) for name, sent in self._sent.items() if name in ctx and ctx.get(name) != sent}
        if changed:
            self._sent |= changed
            self._router.send(SHARE, changed)

    def _on_shared(self, sender: str, args: Sequence[Any]) -> None:
        if len(args) == 1 and isinstance(args[0], dict):  # else it is not from a `Task`
            self.received.update(sender, args[0])


_UNSET = object()
