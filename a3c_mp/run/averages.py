"""Means of metrics between two writes, shares of the learner's time, and steps per second."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

MIN_RATE_SECONDS = 0.1
"""shortest time over which a rate says something"""
RECENT_POINTS = 31
"""points of the curves, one per second, over which the rate of the progress line is taken"""


class Timings:
    """A timer of named sections of code; `with timings("learning"):` adds to one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.since = time.monotonic()
        self.ended = 0.0  # when the last section or round ended

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.ended = time.monotonic()
            self.seconds[name] += self.ended - start

    def shares(self) -> dict[str, float]:
        """The share of each section in the time since the last call."""
        now = time.monotonic()
        shares = {name: seconds / (now - self.since) for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self.since = now
        return shares


class Means:
    """Means of named values between flushes; tensors stay on their device until then."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor | float]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self.values[name].append(value.detach().float().mean() if isinstance(value, Tensor) else value)

    def pop(self) -> dict[str, float]:
        """The means; the next ones are of what is added from now on."""
        values, self.values = self.values, defaultdict(list)
        return {name: torch.stack([torch.as_tensor(v) for v in found]).mean().item() for name, found in values.items()}


class RateClock:
    """Steps and samples per second, from the first rollout until the training loop is left.

    Starting up is in no rate, and neither is what comes after the loop: actors that end, files that are written.
    """

    def __init__(self) -> None:
        self.stopped: float | None = None
        self._start = math.inf, 0  # time, steps
        self._points: deque[tuple[float, int, int]] = deque(maxlen=RECENT_POINTS)  # time, steps, samples

    def start(self, steps: int, samples: int) -> None:
        """Count from now on, unless it does already."""
        if not self._points:
            self._start = time.monotonic(), steps
            self._points.append((*self._start, samples))

    @property
    def seconds(self) -> float:
        """Since the last point of the curves."""
        now = time.monotonic() if self.stopped is None else self.stopped
        return now - self._points[-1][0] if self._points else 0.0

    def sps(self, steps: int) -> float:
        """Agent steps per second since the start."""
        seconds = (time.monotonic() if self.stopped is None else self.stopped) - self._start[0]
        return (steps - self._start[1]) / seconds if seconds >= MIN_RATE_SECONDS else 0.0

    @property
    def recent_sps(self) -> float:
        """Agent steps per second over the last half minute; 0 before the second point."""
        if len(self._points) < 2:
            return 0.0
        (then, steps_then, _), (now, steps, _) = self._points[0], self._points[-1]
        return (steps - steps_then) / (now - then)

    def take_point(self, steps: int, samples: int) -> dict[str, float]:
        """Return the rates since the last point; none, and the next point covers this time too, if it is too short."""
        if (seconds := self.seconds) < MIN_RATE_SECONDS:
            return {}
        then, steps_then, samples_then = self._points[-1]
        self._points.append((then + seconds, steps, samples))
        rates = {"charts/sps": (steps - steps_then) / seconds}
        return rates | ({"charts/samples_per_second": (samples - samples_then) / seconds} if samples else {})
