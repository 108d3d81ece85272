"""Task: a loop of middleware, forward in order of registration and back in reverse, in one thread or several.

Middleware is any callable of a context. A generator function has two halves: the part up to its `yield` runs on the
way forward, the rest on the way back, as in a context manager:

    def timed(ctx):
        started = time.perf_counter()
        yield
        ctx.seconds = time.perf_counter() - started

    with Task() as task:
        task.use(timed)
        task.use(work)
        task.run(max_step=10)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

from a3c_mp.errors import ConfigError
from a3c_mp.task.context import Context, ParallelContext
from a3c_mp.task.events import Events, Listener, RouterLike
from a3c_mp.task.middleware import Middleware, Step, Wrapper, name_of, open_stack
from a3c_mp.task.sharing import Sharing
from a3c_mp.task.signals import finish_on_signal
from a3c_mp.task.threads import Threads

FINISH = "task.finish"
"""event between tasks: ()"""


class Task:
    """Loop of middleware; to be used in a `with` block.

    Args:
        async_mode: the forward halves of an iteration run at the same time in threads, and all have ended before the
            way back begins. What one middleware sets, another can rely on in the next iteration only.
        n_async_workers: number of these threads.
        labels: of this node, besides those that it has of itself: "standalone" or "distributed", "async", "node.0".
        known_labels: of all nodes; empty if they are not known. A filter that matches none of them is an error.
        router: to the tasks of other nodes.
    """

    def __init__(
        self, *, async_mode: bool = False, n_async_workers: int = 3, labels: Sequence[str] = (),
        known_labels: Sequence[str] = (), router: RouterLike | None = None,
    ):  # fmt: skip
        assert n_async_workers >= 1, n_async_workers
        distributed = router is not None and router.is_active
        own = ["distributed" if distributed else "standalone", *(["async"] if async_mode else [])]
        self.labels = tuple(dict.fromkeys([*own, "node.0" if router is None else router.name, *labels]))
        self.known_labels = (*self.labels, *known_labels) if known_labels else ()
        self.ctx, self.router = Context(), router
        self.events = Events(self.labels, router)
        self._ended_elsewhere = False  # by another node, which has sent FINISH to all
        self.events.on_internal(FINISH, self._on_finish)
        self._middleware: list[Step] = []
        self._wrappers: list[Wrapper] = []
        self._sharing = Sharing(self.events)
        self._lock = threading.RLock()  # of middleware with `lock=True`
        self._cleanup, self._manual = ExitStack(), ExitStack()
        # Threads are started when they are needed.
        self._threads = self._start_threads(n_async_workers, "middleware") if async_mode else None

    def __enter__(self) -> Task:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._cleanup.close()

    # ---- setting up

    def use(
        self, fn: Middleware, *, filter_labels: Sequence[str] | None = None, lock: bool = False, name: str | None = None
    ) -> Task:
        """Append a middleware.

        Args:
            fn: the middleware.
            filter_labels: use it only on nodes with a label that one of these patterns (as of file names) matches.
            lock: never run a half of it beside a half of another middleware that has a lock.
            name: for timings and errors; default: the name of the function that made it.

        Raises:
            ConfigError: no node has such a label.
        """
        if filter_labels is not None:
            if self.known_labels and not _match(filter_labels, self.known_labels):
                why = f"no node has such a label; there are {', '.join(sorted(set(self.known_labels)))}"
                raise ConfigError("filter-labels", ", ".join(filter_labels), why, "name one of these")
            if not _match(filter_labels, self.labels):
                return self
        self._middleware.append(self._step(fn, lock, name))
        return self

    def use_wrapper(self, wrapper: Wrapper) -> Task:
        """Run a wrapper around both halves of every middleware, whether it has been added yet or not."""
        self._wrappers.append(wrapper)
        return self

    def share(self, *names: str) -> None:
        """Send these attributes of the context to the other tasks, each time they have changed: small, plain values."""
        self._sharing.declare(names)

    @property
    def parallel_ctx(self) -> ParallelContext:
        """What the other tasks share."""
        return self._sharing.received

    # ---- running

    def run(self, max_step: int | None = None) -> Context:
        """Run iterations until one sets `ctx.finish`, or another node, a signal or `max_step` ends the task.

        `ctx.finish` is true on the way back of the last iteration, whatever the cause; a middleware sets it on the way
        forward.

        Returns:
            the context of the last iteration.

        Raises:
            Exception: of a middleware, unless an earlier one that is suspended around it handles it.
        """
        assert self._middleware, "the task has no middleware"
        with finish_on_signal(self.finish, lambda: self.events.finishing):
            while True:
                self._iterate(max_step)
                for wrapper in self._wrappers:
                    wrapper.end_iteration(self.ctx.total_step)
                if self.ctx.finish:
                    break
                self.ctx = self.ctx.renew()
        if self.router is not None and self.router.is_active and not self._ended_elsewhere:
            self.router.send(FINISH)
        return self.ctx

    def _on_finish(self, sender: str, args: Sequence[Any]) -> None:
        self._ended_elsewhere = True
        self.finish()

    def finish(self) -> None:
        """Make the current iteration the last one, here and on all other nodes; for any thread or signal handler."""
        self.events.finishing = True
        if self.router is not None:
            self.router.finishing = True
        self.events.wake()

    def forward(self, fn: Middleware, ctx: Context | None = None) -> Context:
        """Run the forward half of a middleware now; the other one runs on the way back, or in `backward`.

        In a middleware, the way back is that of this middleware's iteration.
        """
        ctx = self.ctx if ctx is None else ctx
        self._step(fn).forward(ctx, open_stack.get(self._manual))
        return ctx

    def backward(self) -> None:
        """Go the way back of what `forward` has run: in a middleware, of what this one has."""
        open_stack.get(self._manual).close()

    def wrap(self, fn: Middleware) -> Callable[[Context], Callable[[], None]]:
        """Make a middleware callable by another one: `back = task.wrap(fn)(ctx)`, and later `back()`."""
        step = self._step(fn)

        def wrapped(ctx: Context) -> Callable[[], None]:
            stack = ExitStack()
            step.forward(ctx, stack)
            open_stack.get(self._manual).push(stack)  # where an error goes if `back` is not called before
            return stack.close

        return wrapped

    def serial(self, *fns: Middleware) -> Middleware:
        """Combine middleware into one that runs them one after the other."""
        steps = [self._step(fn) for fn in fns]

        def serial(ctx: Context) -> Iterator[None]:
            with ExitStack() as stack:
                for step in steps:
                    step.forward(ctx, stack)
                yield

        return serial

    def parallel(self, *fns: Middleware) -> Middleware:
        """Combine middleware into one that runs their forward halves at the same time, in threads."""
        steps = [self._step(fn) for fn in fns]
        threads = self._start_threads(len(fns), "parallel")

        def parallel(ctx: Context) -> Iterator[None]:
            with ExitStack() as stack:
                threads.forward(steps, ctx, stack)
                yield

        return parallel

    # ---- events

    def emit(self, event: str, *args: Any, to: str = "*", only_local: bool = False, only_remote: bool = False) -> None:
        """Call the listeners of an event, on this node and on others; for any thread.

        Args:
            event: its name.
            args: for the listeners; to other nodes they travel as JSON, tensors and arrays as they are.
            to: pattern of the labels or names of the nodes that get it.
            only_local, only_remote: not to other nodes, not on this one.
        """
        self.events.emit(event, *args, to=to, local=not only_remote, remote=not only_local)

    def on(self, event: str, listener: Listener) -> None:
        """Call a listener at each event of this name: `listener(*args)`."""
        self.events.on(event, listener)

    def once(self, event: str, listener: Listener) -> None:
        """Call a listener at the next event of this name."""
        self.events.on(event, listener, once=True)

    def off(self, event: str, listener: Listener | None = None) -> None:
        """Remove a listener, or all listeners of an event."""
        self.events.off(event, listener)

    def wait_for(self, event: str, timeout: float | None = None) -> tuple[Any, ...] | None:
        """Wait for an event; one that was emitted since the iteration began counts too.

        Returns:
            its newest arguments, or None if the task is asked to finish meanwhile.

        Raises:
            TimeoutError: it has not come within `timeout` (s).
            Cancelled: another middleware has failed meanwhile.
        """
        return self.events.wait_for(event, timeout)

    # ---- inside

    def _step(self, fn: Middleware, lock: bool = False, name: str | None = None) -> Step:
        return Step(fn, name or name_of(fn), self._wrappers, self._lock if lock else None)

    def _start_threads(self, number: int, name: str) -> Threads:
        return self._cleanup.enter_context(Threads(number, self.events, name))

    def _iterate(self, max_step: int | None) -> None:
        ctx, events = self.ctx, self.events
        events.start_iteration()
        with ExitStack() as stack:
            events.dispatch()
            try:
                if self._threads is not None:
                    self._threads.forward(self._middleware, ctx, stack)
                else:
                    for step in self._middleware:
                        step.forward(ctx, stack)
                        events.dispatch()
            finally:  # also if one of the suspended handles an error
                if events.finishing or (max_step is not None and ctx.total_step + 1 >= max_step):
                    ctx.finish = True
        self._sharing.send(ctx)


def _match(patterns: Sequence[str], labels: Sequence[str]) -> bool:
    return any(fnmatchcase(label, pattern) for pattern in patterns for label in labels)
