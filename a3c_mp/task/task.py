"""Task: a loop of middleware, forward in order of registration and back in reverse, in one thread or several.

Middleware is any callable of a context. A generator function has two halves: the part up to its `yield` runs on the
way forward, the rest on the way back, as in a context manager.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from typing import Any, Self

from a3c_mp.errors import ConfigError
from a3c_mp.task.endpoint import Endpoint, node_name
from a3c_mp.task.middleware import Context, Middleware, SharedValues, Step, StepTimer, forward_beside, name_of
from a3c_mp.task.node import Node
from a3c_mp.task.router import Hub
from a3c_mp.task.wire import FINISH, JOINED, OVER, STARTED, encode

SHARE = "task.share"  # event between tasks: ({name: value},)
MODES = "standalone", "distributed", "async"  # labels that a task has or has not, as it is run


class Task(AbstractContextManager["Task"]):
    """Loop of middleware; to be used in a `with` block. `router` connects it to the tasks of other nodes.

    Its labels are those of the node, its name, "standalone" or "distributed", and "async": in `async_mode` the forward
    halves of an iteration run at the same time, each in a thread, and all have ended before the way back begins. What
    one middleware sets, another can rely on in the next iteration only.
    """

    def __init__(self, *, async_mode: bool = False, router: Node | None = None):
        self.async_mode, self.router = async_mode, router or Node(Hub(Endpoint()))
        own = ["distributed" if self.router.is_active else "standalone", *(["async"] if async_mode else [])]
        self.labels = (*own, self.router.name, *self.router.labels)
        self.ctx = Context(-1)  # before the first iteration
        self.parallel_ctx = SharedValues(self._poll)
        self._thread = threading.get_ident()  # that looks at messages
        self._middleware: list[Step] = []
        self._timers: list[StepTimer] = []
        self._shared: dict[str, bytes] = {}  # name -> value that was sent last; empty if it is to be sent
        self._values: dict[str, Any] = {}  # the same values, for nodes that join later
        self._run = 0  # number of the last run of this task
        self._ended = 0  # number of the last one that is over: nodes that join later leave it out
        self.router.handle(SHARE, lambda sender, values: self.parallel_ctx.update(values), [dict])
        for event in (FINISH, OVER):
            self.router.handle(event, lambda sender, run: self._see_end())
        self.router.handle(JOINED, self._on_joined)
        self.router.handle(STARTED, self._on_joined, [int])

    def __exit__(self, *exc: object) -> None:
        self._shared.clear()  # nodes that join later get those of later tasks

    def use(self, fn: Middleware, *, filter_labels: Sequence[str] | str | None = None, name: str = "") -> Self:
        """Append a middleware; its name is by default that of the function that made it.

        With `filter_labels`, patterns as of file names, it is used only on nodes with a label that one of them matches.
        Raises ConfigError if no node has such a label, unless nodes that may join could have it.
        """
        patterns = [filter_labels] if isinstance(filter_labels, str) else filter_labels
        if patterns is not None and not _match(patterns, self.labels):
            known, given = self.router.known_labels if self.router.is_active else self.labels, ", ".join(patterns)
            if known and not _match(patterns, (*known, *MODES)):
                if not self.router.others_may_join:
                    why = f"no node has such a label; there are {', '.join(known)}"
                    raise ConfigError("filter-labels", given, why, "name one of these")
                if self.router.name == node_name(0):
                    self.router.log.warning(f"filter-labels={given}: waits for a node with such a label to join")
            return self
        self._middleware.append(Step(fn, name or name_of(fn), self._timers))
        return self

    def use_wrapper(self, timer: StepTimer) -> None:
        """Have a timer measure every middleware, also those that are added later."""
        self._timers.append(timer)

    def share(self, *names: str) -> None:
        """Send these attributes of the context to the other tasks, each time they have changed: small, plain values."""
        self._shared |= {name: b"" for name in names if name not in self._shared}

    def serial(self, *fns: Middleware) -> Middleware:
        """Combine middleware into one that runs them one after the other."""
        steps = [Step(fn, name_of(fn), self._timers) for fn in fns]

        def serial(ctx: Context) -> Iterator[None]:
            with ExitStack() as stack:
                for step in steps:
                    step.forward(ctx, stack)
                yield

        return serial

    def run(self, max_step: int | None = None) -> Context:
        """Run so many iterations, or until one sets `ctx.finish`, or another node ends the run.

        `ctx.finish` is true on the way back of the last iteration, whose context is returned; where another node has
        ended the run, as soon as this node has looked at its messages. An exception of a middleware is raised unless an
        earlier one, suspended around it, handles it. A second call goes on where the first one has ended.
        """
        assert self._middleware, "the task has no middleware"
        self._thread, run = threading.get_ident(), self.router.begin_run()
        if run > 1 and not self._ended:  # the task before may have taken what is shared with this one
            self.router.send(STARTED, run)
        self._run = run
        last_step = math.inf if max_step is None else self.ctx.total_step + max_step
        with ThreadPoolExecutor(len(self._middleware), "middleware") as threads:
            is_over = max_step is not None and max_step <= 0
            while not is_over:
                self.ctx = self.ctx.renew()
                self._iterate(threads, last_step)
                for timer in self._timers:
                    timer.end_iteration(self.ctx.total_step)
                is_over = self.ctx.finish
        if not self.router.finishing or self.router.name == node_name(0):  # which passes on what another one has ended
            self.router.send(FINISH, run)
        self._ended = run
        return self.ctx

    def _iterate(self, threads: ThreadPoolExecutor, last_step: float) -> None:
        ctx, is_last = self.ctx, False
        with ExitStack() as stack:
            try:
                self._see_end()
                if self.async_mode:
                    self.router.look()
                    forward_beside(self._middleware, ctx, stack, threads, self.router.look)
                else:
                    for step in self._middleware:
                        self.router.look()
                        step.forward(ctx, stack)
            finally:  # also if one of the suspended handles an error
                is_last = self.router.finishing or ctx.total_step >= last_step
                ctx.finish = ctx.finish or is_last
        ctx.finish = ctx.finish or is_last  # also if a middleware has set it to False
        self._send_shared()

    def _see_end(self) -> None:
        """Show the middleware whether another node has ended the run."""
        if self.router.finishing:
            self.ctx.finish = True

    def _poll(self) -> None:
        """Look while a middleware waits, unless it runs in a thread: this task's own thread looks meanwhile."""
        if threading.get_ident() == self._thread:
            self.router.look()

    def _on_joined(self, sender: str, run: int | None = None) -> None:
        """Give a node that joins, or begins this `run`, what was sent before: the iteration may wait for it."""
        if run not in (None, self._run):
            return
        if self._ended and self.router.name == node_name(0):
            self.router.send(OVER, self._ended, to=sender)
        if sent := {name: self._values[name] for name in self._shared if name in self._values}:
            self.router.send(SHARE, sent, to=sender)
        self._shared.update(dict.fromkeys(self._shared, b""))  # what another thread changes follows

    def _send_shared(self) -> None:
        """Send what has changed, also inside of a list or a tensor, and once a node has joined what was sent before."""
        changed = {}
        for name, sent in self._shared.items():
            if name in self.ctx:
                self._values[name] = self.ctx.get(name)
            elif sent or name not in self._values:
                continue
            value = b"".join(frame.bytes for frame in encode(SHARE, [self._values[name]]))
            if value != sent:
                self._shared[name], changed[name] = value, self._values[name]
        if changed:
            self.router.send(SHARE, changed)


def _match(patterns: Sequence[str], labels: Sequence[str]) -> bool:
    return any(fnmatchcase(label, pattern) for pattern in patterns for label in labels)
