"""Contexts, which the middleware of an iteration share, and middleware itself: named, timed, suspended at its yield."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from inspect import isasyncgen, iscoroutine
from types import GeneratorType
from typing import Any

Middleware = Callable[["Context"], Any]
"""a function of the context, or a generator function whose `yield` stands for all later middleware"""
Path = tuple[str, ...]  # a middleware: its name, after the names of those that run it
LOOK_SECONDS = 0.1  # between two looks at messages while middleware runs in threads
INTERNAL = "_kept", "_setters", "_lost"  # attributes of a context that are none of its values
NOTE = "(in the middleware"  # what the note of an error begins with
WINDOW = 10  # iterations that the figures of the timer's table are means of
as_context = contextmanager(lambda suspended: suspended)  # of a generator at its `yield`: it has been entered already
running: ContextVar[tuple[str, ...]] = ContextVar("running", default=())  # names of nested middleware, outermost first


class Context:
    """Values that the middleware of one iteration pass on, as attributes. Each iteration has a new one.

    Attributes that were kept (`ctx.keep("train_iter")`) are in the contexts of all later iterations too. Any other
    attribute ends with its iteration, and reading it later raises an AttributeError that names who set it.
    """

    total_step: int  # number of this iteration, from 0
    finish: bool  # whether this is the last iteration
    _kept: set[str]
    _setters: dict[str, str]  # attribute -> middleware that set it in this iteration
    _lost: dict[str, str]  # attribute that was not kept -> who set it, and when

    def __init__(self, total_step: int = 0) -> None:
        self.__dict__.update(total_step=total_step, finish=False, _kept=set(), _setters={}, _lost={})

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self._setters[name] = running.get()[-1] if running.get() else ""

    def __getattr__(self, name: str) -> Any:
        """Called where there is no such attribute."""
        if lost := self.__dict__.get("_lost", {}).get(name):
            why = f"ctx.{name} is not set in iteration {self.total_step}; {lost}"
            raise AttributeError(f"{why} and did not keep it: call ctx.keep({name!r})")
        raise AttributeError(f"{name!r} is not set: no middleware of this iteration has set it")

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__ and name not in INTERNAL

    def get(self, name: str, default: Any = None) -> Any:
        return self.__dict__[name] if name in self else default

    def setdefault(self, name: str, default: Any) -> Any:
        """Return an attribute; set it to the default first if it is not set in this iteration."""
        if name not in self:
            setattr(self, name, default)
        return self.__dict__[name]

    def keep(self, *names: str) -> None:
        """Carry attributes over to all later iterations, whether they are set yet or not."""
        self._kept.update(names)

    def renew(self) -> "Context":
        """Return the context of the next iteration: kept attributes, and no others."""
        new = Context(self.total_step + 1)
        new.__dict__.update(_kept=self._kept, _lost=self._lost)
        for name, setter in self._setters.items():
            if name not in self.__dict__:  # it was deleted
                continue
            if name in self._kept:
                new.__dict__[name], new._setters[name] = self.__dict__[name], setter
            else:
                self._lost[name] = f"{setter or 'other code'} set it in iteration {self.total_step}"
        return new


class SharedValues:
    """The newest values that other nodes share, as attributes or by `get`: `task.parallel_ctx.get("train_iter", 0)`.

    Names that are read one after the other have values of the same moment. Before a name is read again, as in a loop
    that waits for a change, messages are looked at.
    """

    def __init__(self, look: Callable[[], object]):
        self._look, self._values, self._read = look, dict[str, Any](), set[str]()

    def update(self, values: dict[str, Any]) -> None:
        """Take values that another node has sent; called as messages are handled."""
        self._values = self._values | values

    def __contains__(self, name: str) -> bool:
        if name in self._read:
            self._look()
            self._read.clear()
        self._read.add(name)
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values[name] if name in self else default

    def __getattr__(self, name: str) -> Any:
        """Called where there is no such attribute."""
        if name.startswith("__") or name in ("_look", "_values", "_read") or name not in self:
            raise AttributeError(f"{name!r} is not set: no other node has shared it so far")
        return self._values[name]


def name_of(fn: Middleware) -> str:
    """`collect` for a function `_collect`; for a lambda, the function that it is in; for an object, its class."""
    fn = getattr(fn, "func", fn)  # of a partial
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.removesuffix(".<locals>.<lambda>").rpartition(".")[2].lstrip("_")


class StepTimer:
    """Times middleware, both halves together, nested ones below those that run them: `task.use_wrapper(StepTimer())`.

    `log` gets a table every `print_per_step` iterations (0: never), `record` after each one the seconds of each
    middleware in it, as `time/task/<middleware>`.
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
        if (suspended := self._run(self._start, ctx)) is not None:
            stack.push(lambda *error: self._run(as_context(suspended).__exit__, *error))

    def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        path = (*running.get(), self.name)
        token, started = running.set(path), time.perf_counter()
        try:
            return call(*args)
        except Exception as error:
            notes = getattr(error, "__notes__", ())
            if not any(note.startswith(NOTE) for note in notes):  # of nested ones, the innermost adds it
                error.add_note(f"{NOTE} {' > '.join(path)})")
            raise
        finally:
            running.reset(token)
            for timer in self.timers:
                timer.add(path, time.perf_counter() - started)

    def _start(self, ctx: Context) -> GeneratorType | None:
        """Call the middleware; returns the generator that is suspended at its `yield`, if it is one."""
        result = self.fn(ctx)
        if iscoroutine(result) or isasyncgen(result):
            raise TypeError("an `async def` cannot be middleware: nothing would await it")
        return result if isinstance(result, GeneratorType) and next(result, self) is not self else None


def forward_beside(
    steps: Sequence[Step], ctx: Context, stack: ExitStack, threads: Executor, meanwhile: Callable[[], Any]
) -> None:
    """Run forward halves at the same time. What they suspend goes on the stack in their order, not in time's.

    An error is raised when all halves have ended; until then `ctx.finish` is set. `meanwhile` is called several times a
    second.
    """
    stacks = {step: ExitStack() for step in steps}
    futures = [threads.submit(copy_context().run, step.forward, ctx, own) for step, own in stacks.items()]
    failed: list[Future] = []
    before = None  # `ctx.finish` when the first error came, which may be handled
    try:
        while wait(futures, LOOK_SECONDS).not_done:
            failed = failed or [future for future in futures if future.done() and future.exception()]
            if failed and before is None:
                before, ctx.finish = ctx.finish, True  # halves that wait for it would wait for ever
            meanwhile()
    except BaseException:
        before, ctx.finish = ctx.finish if before is None else before, True
        raise
    finally:
        wait(futures)  # nothing is to run while the way back is gone
        ctx.finish = ctx.finish if before is None else before
        for own in stacks.values():
            stack.push(own)
    for future in (*failed, *futures):  # the first error, not one that followed from it
        future.result()
