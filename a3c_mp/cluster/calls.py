"""Calls of Ray that may not come back where the head of the cluster is lost: noted ones, and ones in limited time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

WAITING = ("cancel", "get", "kill", "put", "wait")
"""functions of Ray that may wait for another process"""


class Calls:
    """Whether the trainer is in a call of Ray, and since when: the watchdog saves the run if it does not come back."""

    def __init__(self) -> None:
        self.since: float | None = None  # on the clock of `time.monotonic`; None outside of calls

    @contextmanager
    def noted(self) -> Iterator[None]:
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None


class NotedModule:
    """The module `ray`, whose calls that may wait are noted.

    Args:
        ray: the module.
        calls: where they are noted.
    """

    def __init__(self, ray: ModuleType, calls: Calls):
        self._ray, self._calls = ray, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ray, name)
        if name not in WAITING:
            return found

        def call(*args: Any, **options: Any) -> Any:
            with self._calls.noted():
                return found(*args, **options)

        return call


def in_time(function: Callable[[], object], seconds: float) -> bool:
    """Call a function on a thread. Returns whether it came back within `seconds` without an exception."""
    done = threading.Event()

    def call() -> None:
        with suppress(Exception):
            function()
            done.set()
        ended.set()

    ended = threading.Event()
    threading.Thread(target=call, daemon=True).start()
    ended.wait(seconds)
    return done.is_set()
