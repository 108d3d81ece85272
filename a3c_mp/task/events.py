"""Events of a task: emitted by any thread or node, listened to on the task's own thread, and waited for."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

from a3c_mp.task.wire import Message

JOINED, LEFT = "node.joined", "node.left"
"""events of the nodes themselves, for `Node.handle`: a node is connected, or no longer"""
LOOK_SECONDS = 0.1
"""longest wait of the task's thread for messages: with each look, a node sends a heartbeat, or looks after others"""


class RouterLike(Protocol):
    """What a task needs of a `Node`."""

    finishing: bool
    """set once the task is asked to end, here or by another node"""

    @property
    def is_active(self) -> bool: ...
    @property
    def name(self) -> str: ...
    def send(self, event: str, *args: Any, to: str = "*") -> None: ...
    def receive(self) -> Sequence[Message]: ...
    def on_arrival(self, callback: Callable[[], None]) -> None: ...
    def handle(self, event: str, handler: Callable[..., None]) -> None: ...


Listener = Callable[..., Any]
"""called with the arguments of an event"""


class _Registered(NamedTuple):
    listener: Listener
    once: bool


class Events:
    """Listeners of a task, and the events of its current iteration.

    Listeners of a local event run in the thread that emits it, at once; those of an event from another node on the
    task's thread, between two middlewares or while it waits.

    Args:
        labels: names that `to` of a local event is matched with.
        router: to the other nodes; None if there are none.
    """

    def __init__(self, labels: Sequence[str], router: RouterLike | None = None):
        self.labels, self.router = labels, router
        self.error: BaseException | None = None  # of a middleware that runs beside others: nobody is to wait any longer
        self.finishing = False  # the task is asked to end; set without a lock, also by a signal handler
        self.condition = threading.Condition()
        self._listeners: defaultdict[str, list[_Registered]] = defaultdict(list)
        self._emitted: dict[str, tuple[Any, ...]] = {}  # newest arguments, since the iteration began
        self._internal: dict[str, Callable[[str, Sequence[Any]], None]] = {}  # of the task: called with the sender too
        self._thread = threading.get_ident()
        self._arrived = False  # something, since this thread last looked
        if router is not None:
            router.on_arrival(self.wake)

    # ---- listeners

    def on(self, event: str, listener: Listener, *, once: bool = False) -> None:
        with self.condition:
            self._listeners[event].append(_Registered(listener, once))

    def off(self, event: str, listener: Listener | None = None) -> None:
        """Remove a listener, or all listeners of an event."""
        with self.condition:
            kept = [known for known in self._listeners[event] if listener not in (None, known.listener)]
            self._listeners[event] = kept

    def on_internal(self, event: str, listener: Callable[[str, Sequence[Any]], None]) -> None:
        """Have an event from other nodes handled by the task itself."""
        self._internal[event] = listener

    # ---- emitting

    def emit(self, event: str, *args: Any, to: str, local: bool, remote: bool) -> None:
        if remote and self.router is not None and self.router.is_active:
            self.router.send(event, *args, to=to)
        if local and any(fnmatchcase(label, to) for label in self.labels):
            self._deliver(event, args)

    def _deliver(self, event: str, args: tuple[Any, ...]) -> None:
        with self.condition:
            self._emitted[event] = args
            self.condition.notify_all()
            registered = self._listeners.get(event, [])
            if any(known.once for known in registered):
                self._listeners[event] = [known for known in registered if not known.once]
        for known in registered:
            known.listener(*args)

    # ---- the task's thread

    def start_iteration(self) -> None:
        """Forget the events of the last iteration."""
        self.error = None
        with self.condition:
            self._emitted.clear()

    def dispatch(self) -> None:
        """Call the listeners of events that have arrived from other nodes."""
        if self.router is None:
            return
        for message in self.router.receive():
            if message.event in self._internal:
                self._internal[message.event](message.sender, message.args)
            else:
                self._deliver(message.event, tuple(message.args))

    def wake(self) -> None:
        """Have everybody who waits look again."""
        with self.condition:
            self._arrived = True
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """End all waits with an error."""
        with self.condition:
            self.error = self.error or error
            self.condition.notify_all()

    def wait_for(self, event: str, timeout: float | None) -> tuple[Any, ...] | None:
        """Wait until an event has been emitted since the iteration began; see `Task.wait_for`."""

        def found() -> bool:
            return event in self._emitted or self.finishing or self.error is not None

        if not self.wait_until(found, timeout):
            raise TimeoutError(f"no event {event!r} within {timeout:g} s")
        if event in self._emitted:
            return self._emitted[event]
        if self.error is not None:
            raise Cancelled(f"the wait for {event!r} is over: another middleware has failed") from self.error
        return None

    def wait_until(self, found: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `found()`; events of other nodes are dispatched meanwhile. Returns False after `timeout` (s)."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        dispatches = threading.get_ident() == self._thread
        longest = LOOK_SECONDS if dispatches and self.router is not None else threading.TIMEOUT_MAX
        while True:
            if dispatches:
                self._arrived = False
                self.dispatch()
            with self.condition:
                if found():
                    return True
                if dispatches and self._arrived:  # after the look above: its notification would be missed
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.condition.wait(min(left, longest))


class Cancelled(RuntimeError):
    """Raised in middleware that waits while another one that runs beside it has failed."""
