"""Middleware, one half at a time: named, timed, and suspended between its halves."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, wait
from contextlib import ExitStack
from types import GeneratorType
from typing import Any

from a3c_mp.task.context import Context, running
from a3c_mp.task.timing import StepTimer

Middleware = Callable[[Context], Any]
"""a function of the context, or a generator function whose `yield` stands for all later middleware"""
Suspended = Generator[Any, None, None]  # a middleware at its `yield`
LOOK_SECONDS = 0.1  # between two looks at messages while middleware runs in threads


def name_of(fn: Middleware) -> str:
    """`collect` for a function `_collect`; for a lambda, the function that it is in; for an object, its class."""
    fn = getattr(fn, "func", fn)  # of a partial
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.removesuffix(".<locals>.<lambda>").rpartition(".")[2].lstrip("_")


class Step:
    """A middleware as a task runs it."""

    def __init__(self, fn: Middleware, name: str, timers: Sequence[StepTimer]):
        self.fn, self.name, self.timers = fn, name, timers

    def forward(self, ctx: Context, stack: ExitStack) -> None:
        """Run the forward half; the rest of a generator runs when the stack is closed."""
        suspended = self._run(self._start, ctx)
        if suspended is not None:
            stack.push(lambda kind, error, trace: self._run(self._resume, suspended, error))

    def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        path = (*running.get(), self.name)
        token, started = running.set(path), time.perf_counter()
        try:
            return call(*args)
        finally:
            running.reset(token)
            for timer in self.timers:
                timer.add(path, time.perf_counter() - started)

    def _start(self, ctx: Context) -> Suspended | None:
        result = self.fn(ctx)
        if not isinstance(result, GeneratorType):
            return None
        try:
            next(result)
        except StopIteration:  # it returned before its `yield`
            return None
        return result

    def _resume(self, suspended: Suspended, error: BaseException | None) -> bool:
        """Run the half after the `yield`, or throw the error into it; returns whether it has handled that."""
        try:
            if error is None:
                next(suspended)
            else:
                suspended.throw(error)
        except StopIteration:
            return True
        except BaseException as raised:
            if raised is error:
                return False
            raise
        suspended.close()
        raise RuntimeError(f"middleware {self.name} has a second yield: there is one way back")


def forward_beside(
    steps: Sequence[Step], ctx: Context, stack: ExitStack, threads: Executor, meanwhile: Callable[[], Any]
) -> None:
    """Run forward halves at the same time. What they suspend goes on the stack in their order, not in time's.

    The first error is raised when all halves have ended; `meanwhile` is called several times a second until then.
    """
    stacks, errors = [ExitStack() for _ in steps], list[BaseException]()

    def run(step: Step, own: ExitStack) -> None:
        try:
            step.forward(ctx, own)
        except BaseException as error:
            errors.append(error)

    futures = [
        threads.submit(contextvars.copy_context().run, run, step, own) for step, own in zip(steps, stacks, strict=True)
    ]
    try:
        while wait(futures, LOOK_SECONDS).not_done:
            meanwhile()
    finally:
        wait(futures)  # nothing is to run while the way back is gone
        for own in stacks:
            stack.push(own)
    if errors:
        raise errors[0]
