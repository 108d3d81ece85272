"""Agent steps and samples a second: of the whole run, and since the last point of its curves."""

from __future__ import annotations

import time
from collections import deque

from a3c_mp.run.averages import Timings
from a3c_mp.run.progress import Progress

MIN_RATE_SECONDS = 0.1
"""shortest time over which a rate says something"""
RECENT_SECONDS = 30.0
"""time over which the rate of the progress line is taken"""


class RateClock:
    """Measures the rates of a run, from its first rollout until its training loop is left.

    Starting up is in no rate, and neither is what comes after the loop: actors that end, files that are written.

    Args:
        progress: of the run, where it starts.
        timing: of the training loop's sections; the last that ended tells when the loop was left.
    """

    def __init__(self, progress: Progress, timing: Timings):
        self.progress, self.timing = progress, timing
        self.is_started = False
        self._round_ended = 0.0
        self._stopped: float | None = None
        self._start = self._point = self._reading()
        self._recent = deque([self._start[:2]])  # times and agent steps of the last RECENT_SECONDS

    def _reading(self) -> tuple[float, int, int]:
        return self._now(), self.progress.steps, self.progress.samples

    def _now(self) -> float:
        return time.monotonic() if self._stopped is None else self._stopped

    def start(self) -> None:
        """Count from now on."""
        self.is_started = True
        self._start = self._point = self._reading()
        self._recent = deque([self._start[:2]])

    def end_round(self) -> None:
        """Note that the training loop has come this far."""
        self._round_ended = time.monotonic()

    def stop(self) -> None:
        """Stop where the training loop was left: after its last round, or in what it did or waited for then."""
        self._stopped = max(self._round_ended, self.timing.ended) or None

    def sps(self, pending: int = 0) -> float:
        """Agent steps a second since the start; `pending` more are done that `progress` does not count yet."""
        start, steps_then, _ = self._start
        seconds = self._now() - start
        if not self.is_started or seconds < MIN_RATE_SECONDS:
            return 0.0
        return (self.progress.steps + pending - steps_then) / seconds

    def note(self) -> None:
        """Note the agent steps so far, for `recent_sps`."""
        now = self._now()
        self._recent.append((now, self.progress.steps))
        while len(self._recent) > 2 and self._recent[1][0] <= now - RECENT_SECONDS:
            self._recent.popleft()

    @property
    def recent_sps(self) -> float:
        """Agent steps a second over the last `RECENT_SECONDS` before the newest `note`; 0 if that is too short."""
        (then, steps_then), (now, steps_now) = self._recent[0], self._recent[-1]
        if not self.is_started or now - then < MIN_RATE_SECONDS:
            return 0.0
        return (steps_now - steps_then) / (now - then)

    @property
    def seconds(self) -> float:
        """Since the last point of the curves."""
        return self._now() - self._point[0]

    def take_point(self) -> dict[str, float]:
        """Return the rates since the last call; none, and the next call covers this time too, if it is too short."""
        if (seconds := self.seconds) < MIN_RATE_SECONDS:
            return {}
        (_, steps_then, samples_then), self._point = self._point, self._reading()
        rates = {"charts/sps": (self.progress.steps - steps_then) / seconds}
        if self.progress.samples:
            rates["charts/samples_per_second"] = (self.progress.samples - samples_then) / seconds
        return rates
