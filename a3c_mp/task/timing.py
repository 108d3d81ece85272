"""Step timer: how long each middleware takes, forward and on the way back, nested ones below those that run them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Path = tuple[str, ...]
"""a middleware: its name, after the names of those that run it"""


class StepTimer:
    """Wrapper that times both halves of every middleware: `task.use_wrapper(StepTimer())`.

    Args:
        print_per_step: print a table every so many iterations; 0 prints none.
        log: called with the table.
        record: called after each iteration with `time/task/<middleware>`, its seconds in that iteration.
        smooth_window: iterations that the figures of the table are means of.
    """

    def __init__(
        self, print_per_step: int = 1, log: Callable[[str], object] = print,
        record: Callable[[dict[str, float]], object] | None = None, smooth_window: int = 10,
    ):  # fmt: skip
        self.print_per_step, self.smooth_window, self.log, self.record = print_per_step, smooth_window, log, record
        self._seconds: dict[Path, dict[str, float]] = {}  # in this iteration, by half; in the order of first runs
        self._last: dict[Path, deque[dict[str, float]]] = {}

    @contextmanager
    def __call__(self, path: Path, half: str) -> Iterator[None]:
        seconds = self._seconds.setdefault(path, {"forward": 0.0, "backward": 0.0})
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds[half] += time.perf_counter() - started

    def end_iteration(self, step: int) -> None:
        """Record the times of an iteration that has ended; called by the task."""
        if self.record is not None and self._seconds:
            self.record({f"time/task/{'/'.join(path)}": sum(s.values()) for path, s in self._seconds.items()})
        for path, seconds in self._seconds.items():
            self._last.setdefault(path, deque(maxlen=self.smooth_window)).append(dict(seconds))
            seconds.update(forward=0.0, backward=0.0)
        if self.print_per_step and (step + 1) % self.print_per_step == 0 and self._last:
            self.log(self.table(step))

    def table(self, step: int) -> str:
        """Return the means of the last iterations as text: a line for each middleware, its share of the whole last."""
        ranks = {path: rank for rank, path in enumerate(self._last)}
        paths = sorted(ranks, key=lambda path: [ranks[path[: depth + 1]] for depth in range(len(path))])
        means = {path: [self._mean_ms(path, half) for half in ("forward", "backward")] for path in paths}
        total = sum(sum(halves) for path, halves in means.items() if len(path) == 1) or 1.0
        width = max(len(path[-1]) + 2 * len(path) for path in means)
        lines = [f"iteration {step:<{width - 8}}  forward ms  backward ms     mean ms  share"]
        for path, (forward, backward) in means.items():
            name, mean = "  " * (len(path) - 1) + path[-1], forward + backward
            lines.append(f"{name:<{width + 1}}{forward:>12.2f} {backward:>12.2f} {mean:>11.2f} {mean / total:>6.0%}")
        return "\n".join(lines)

    def _mean_ms(self, path: Path, half: str) -> float:
        last = self._last[path]
        return 1000 * sum(seconds[half] for seconds in last) / len(last)
