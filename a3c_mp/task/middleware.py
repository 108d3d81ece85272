"""Middleware, one half at a time: named, in its wrappers and its lock, and suspended between its halves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from types import GeneratorType
from typing import Any, Protocol

from a3c_mp.task.context import Context, current_middleware

Middleware = Callable[[Context], Any]
"""a function of the context, or a generator function whose `yield` stands for all later middleware"""
Suspended = Generator[Any, None, None]
"""a middleware at its `yield`"""

open_stack: ContextVar[ExitStack] = ContextVar("open_stack")
"""where the middleware that runs in this thread leaves what it suspends by `Task.forward`"""


class Wrapper(Protocol):
    """Runs something around both halves of every middleware, such as a `StepTimer`."""

    def __call__(self, name: str, half: str) -> AbstractContextManager[Any]: ...
    def end_iteration(self, step: int) -> None: ...


def name_of(fn: Middleware) -> str:
    """`collect` for a function `_collect`; for a lambda, the function that it is in; for an object, its class."""
    fn = getattr(fn, "func", fn)  # of a partial
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.removesuffix(".<locals>.<lambda>").rpartition(".")[2].lstrip("_")


class Step:
    """A middleware as a task runs it: named, in its wrappers and its lock."""

    __slots__ = ("fn", "lock", "name", "wrappers")

    def __init__(
        self, fn: Middleware, name: str, wrappers: Sequence[Wrapper], lock: AbstractContextManager[Any] | None
    ):
        self.fn, self.name, self.wrappers, self.lock = fn, name, wrappers, lock

    def forward(self, ctx: Context, stack: ExitStack) -> None:
        """Run the forward half; what it suspends goes on the stack."""
        with ExitStack() as own:
            token = open_stack.set(own)
            try:
                suspended = self._half("forward", self._start, ctx)
            finally:
                open_stack.reset(token)
            if suspended is not None:
                own.push(_Suspended(self, suspended))
            stack.push(own.pop_all())

    def _start(self, ctx: Context) -> Suspended | None:
        result = self.fn(ctx)
        if not isinstance(result, GeneratorType):
            return None
        try:
            next(result)
        except StopIteration:  # it returned before its `yield`
            return None
        return result

    def resume(self, suspended: Suspended, error: BaseException | None) -> bool:
        """Run the half after the `yield`; returns whether it has handled the error."""
        return self._half("backward", self._resume, suspended, error)

    def _resume(self, suspended: Suspended, error: BaseException | None) -> bool:
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

    def _half(self, half: str, call: Callable[..., Any], *args: Any) -> Any:
        token = current_middleware.set(self.name)
        try:
            if self.lock is None:
                return self._wrapped(half, call, args)
            with self.lock:
                return self._wrapped(half, call, args)
        finally:
            current_middleware.reset(token)

    def _wrapped(self, half: str, call: Callable[..., Any], args: tuple[Any, ...], inside: int = 0) -> Any:
        if inside == len(self.wrappers):
            return call(*args)
        with self.wrappers[inside](self.name, half):
            return self._wrapped(half, call, args, inside + 1)


class _Suspended:
    """A middleware at its `yield`; as a context manager it ends with the way back."""

    __slots__ = ("generator", "step")

    def __init__(self, step: Step, generator: Suspended):
        self.step, self.generator = step, generator

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        return self.step.resume(self.generator, error) and error is not None
