"""Middleware, one half at a time: named, timed, and suspended between its halves."""

from __future__ import annotations

import contextvars
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from contextlib import ExitStack, contextmanager
from types import GeneratorType
from typing import Any

from a3c_mp.task.context import Context, running

Middleware = Callable[[Context], Any]
"""a function of the context, or a generator function whose `yield` stands for all later middleware"""
Path = tuple[str, ...]  # a middleware: its name, after the names of those that run it
LOOK_SECONDS = 0.1  # between two looks at messages while middleware runs in threads
WINDOW = 10  # iterations that the figures of the timer's table are means of
as_context = contextmanager(lambda suspended: suspended)  # of a generator at its `yield`: it has been entered already


def name_of(fn: Middleware) -> str:
    """`collect` for a function `_collect`; for a lambda, the function that it is in; for an object, its class."""
    fn = getattr(fn, "func", fn)  # of a partial
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.removesuffix(".<locals>.<lambda>").rpartition(".")[2].lstrip("_")


class StepTimer:
    """Times middleware, both halves together, nested ones below those that run them: `task.use_wrapper(StepTimer())`.

    Args:
        print_per_step: print a table every so many iterations; 0 prints none.
        log: called with the table.
        record: called after each iteration with `time/task/<middleware>`, its seconds in that iteration.
    """

    def __init__(
        self, print_per_step: int = 1, log: Callable[[str], object] = print,
        record: Callable[[dict[str, float]], object] = lambda seconds: None,
    ):  # fmt: skip
        self.print_per_step, self.log, self.record = print_per_step, log, record
        self._seconds: dict[Path, float] = {}  # in this iteration
        self._last: dict[Path, deque[float]] = {}

    def add(self, path: Path, seconds: float) -> None:
        """Record that a half of a middleware has run for so long; for any thread."""
        self._seconds[path] = self._seconds.get(path, 0.0) + seconds

    def end_iteration(self, step: int) -> None:
        """Record and print the times of an iteration; called by the task."""
        self.record({f"time/task/{'/'.join(path)}": seconds for path, seconds in self._seconds.items()})
        for path, seconds in self._seconds.items():
            self._last.setdefault(path, deque(maxlen=WINDOW)).append(seconds)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        if self.print_per_step and (step + 1) % self.print_per_step == 0:
            self.log(self.table(step))

    def table(self, step: int) -> str:
        """The means of the last iterations as text: a line for each middleware, its share of the whole last."""
        ranks = {path: rank for rank, path in enumerate(self._last)}
        means = {path: 1000 * sum(last) / len(last) for path, last in self._last.items()}
        total = sum(mean for path, mean in means.items() if len(path) == 1) or 1.0
        width = max(len(path[-1]) + 2 * len(path) for path in means)
        lines = [f"iteration {step:<{width - 8}}    mean ms  share"]
        for path in sorted(means, key=lambda path: [ranks[path[: depth + 1]] for depth in range(len(path))]):
            name = "  " * (len(path) - 1) + path[-1]
            lines.append(f"{name:<{width + 1}} {means[path]:>11.2f} {means[path] / total:>6.0%}")
        return "\n".join(lines)


class Step:
    """A middleware, run and timed in halves."""

    def __init__(self, fn: Middleware, name: str, timers: Sequence[StepTimer]):
        self.fn, self.name, self.timers = fn, name, timers

    def forward(self, ctx: Context, stack: ExitStack) -> None:
        """Run the forward half; the rest of a generator runs when the stack is closed."""
        suspended = self._run(self._start, ctx)
        if suspended is not None:
            stack.push(lambda *error: self._run(as_context(suspended).__exit__, *error))

    def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        path = (*running.get(), self.name)
        token, started = running.set(path), time.perf_counter()
        try:
            return call(*args)
        finally:
            running.reset(token)
            for timer in self.timers:
                timer.add(path, time.perf_counter() - started)

    def _start(self, ctx: Context) -> GeneratorType | None:
        result = self.fn(ctx)
        if not isinstance(result, GeneratorType):
            return None
        try:
            next(result)
        except StopIteration:  # it returned before its `yield`
            return None
        return result


def forward_beside(
    steps: Sequence[Step], ctx: Context, stack: ExitStack, threads: Executor, meanwhile: Callable[[], Any]
) -> None:
    """Run forward halves at the same time. What they suspend goes on the stack in their order, not in time's.

    An error is raised when all halves have ended; `meanwhile` is called several times a second until then.
    """
    stacks = [ExitStack() for _ in steps]
    futures = [
        threads.submit(contextvars.copy_context().run, step.forward, ctx, own)
        for step, own in zip(steps, stacks, strict=True)
    ]
    try:
        while wait(futures, LOOK_SECONDS).not_done:
            meanwhile()
    finally:
        wait(futures)  # nothing is to run while the way back is gone
        for own in stacks:
            stack.push(own)
    for future in futures:
        future.result()
