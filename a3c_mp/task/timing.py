"""Step timer: how long each middleware takes, both halves together, nested ones below those that run them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Path = tuple[str, ...]  # a middleware: its name, after the names of those that run it


class StepTimer:
    """Times the middleware of a task: `task.use_wrapper(StepTimer())`.

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
        self._seconds: dict[Path, float] = {}  # in this iteration
        self._last: dict[Path, deque[float]] = {}

    def add(self, path: Path, seconds: float) -> None:
        """Record that a half of a middleware has run for so long; for any thread."""
        self._seconds[path] = self._seconds.get(path, 0.0) + seconds

    def end_iteration(self, step: int) -> None:
        """Record and print the times of an iteration that has ended; called by the task."""
        if self.record is not None and self._seconds:
            self.record({f"time/task/{'/'.join(path)}": seconds for path, seconds in self._seconds.items()})
        for path, seconds in self._seconds.items():
            self._last.setdefault(path, deque(maxlen=self.smooth_window)).append(seconds)
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        if self.print_per_step and (step + 1) % self.print_per_step == 0 and self._last:
            self.log(self.table(step))

    def table(self, step: int) -> str:
        """Return the means of the last iterations as text: a line for each middleware, its share of the whole last."""
        ranks = {path: rank for rank, path in enumerate(self._last)}
        means = {path: 1000 * sum(last) / len(last) for path, last in self._last.items()}
        total = sum(mean for path, mean in means.items() if len(path) == 1) or 1.0
        width = max(len(path[-1]) + 2 * len(path) for path in means)
        lines = [f"iteration {step:<{width - 8}}    mean ms  share"]
        for path in sorted(means, key=lambda path: [ranks[path[: depth + 1]] for depth in range(len(path))]):
            name = "  " * (len(path) - 1) + path[-1]
            lines.append(f"{name:<{width + 1}} {means[path]:>11.2f} {means[path] / total:>6.0%}")
        return "\n".join(lines)
