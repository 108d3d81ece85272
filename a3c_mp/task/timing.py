"""Step timer: how long each middleware takes, forward and on the way back, nested ones below those that run them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

_parents: ContextVar[tuple[str, ...]] = ContextVar("_parents", default=())


@dataclass
class _Durations:
    """Seconds that one middleware took in the current iteration, and in the last ones."""

    halves: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    last: deque[tuple[float, float]] = field(default_factory=deque)

    def end_iteration(self) -> None:
        self.last.append((self.halves["forward"], self.halves["backward"]))
        self.halves = {"forward": 0.0, "backward": 0.0}

    def means(self) -> tuple[float, float]:
        """Return mean seconds (forward, backward) of an iteration."""
        return tuple(sum(half) / len(self.last) for half in zip(*self.last, strict=True))


class StepTimer:
    """Wrapper that times both halves of every middleware: `task.use_wrapper(StepTimer())`.

    Args:
        print_per_step: print a table every so many iterations; 0 prints none.
        log: called with the table.
        record: called after each iteration with `time/task/<middleware>`, its seconds in that iteration.
        smooth_window: iterations that the figures are means of.
    """

    def __init__(
        self,
        print_per_step: int = 1,
        log: Callable[[str], object] = print,
        record: Callable[[dict[str, float]], object] | None = None,
        smooth_window: int = 10,
    ):
        self.print_per_step, self.smooth_window, self.log, self.record = print_per_step, smooth_window, log, record
        self._durations: dict[tuple[str, ...], _Durations] = {}  # by path: the middleware, after those that run it

    def __call__(self, name: str, half: str) -> _Stopwatch:
        return _Stopwatch(self._durations, name, half)

    def end_iteration(self, step: int) -> None:
        """Called by the task when an iteration has ended."""
        for durations in self._durations.values():
            durations.end_iteration()
            while len(durations.last) > self.smooth_window:
                durations.last.popleft()
        if self.record is not None and self._durations:
            self.record({f"time/task/{'/'.join(path)}": sum(d.last[-1]) for path, d in self._durations.items()})
        if self.print_per_step and (step + 1) % self.print_per_step == 0 and self._durations:
            self.log(self.table(step))

    def table(self, step: int) -> str:
        """Return the means of the last iterations as text: a line for each middleware, its share of the whole last."""
        means = {path: durations.means() for path, durations in sorted(self._durations.items(), key=self._order)}
        total = sum(sum(halves) for path, halves in means.items() if len(path) == 1) or 1.0
        width = max(len(path[-1]) + 2 * len(path) for path in means)
        lines = [f"iteration {step:<{width - 8}}  forward ms  backward ms     mean ms  share"]
        for path, (forward, backward) in means.items():
            name = "  " * (len(path) - 1) + path[-1]
            figures = f"{forward * 1e3:>12.2f} {backward * 1e3:>12.2f} {(forward + backward) * 1e3:>11.2f}"
            lines.append(f"{name:<{width + 1}}{figures} {(forward + backward) / total:>6.0%}")
        return "\n".join(lines)

    def _order(self, item: tuple[tuple[str, ...], _Durations]) -> tuple[int, ...]:
        """In the order of first runs, nested middleware after the one that runs them."""
        paths = list(self._durations)
        path = item[0]
        return tuple(paths.index(path[: depth + 1]) for depth in range(len(path)) if path[: depth + 1] in paths)


class _Stopwatch:
    """Times one half of a middleware; a context manager."""

    __slots__ = ("_durations", "_half", "_path", "_started", "_token")
    _token: Token[tuple[str, ...]]
    _started: float

    def __init__(self, durations: dict[tuple[str, ...], _Durations], name: str, half: str):
        self._path, self._half = (*_parents.get(), name), half
        if self._path not in durations:
            durations[self._path] = _Durations()
        self._durations = durations[self._path]

    def __enter__(self) -> None:
        self._token = _parents.set(self._path)
        self._started = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._durations.halves[self._half] += time.perf_counter() - self._started
        _parents.reset(self._token)
