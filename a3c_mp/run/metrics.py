"""Metrics of a run: TensorBoard scalars, `episodes.csv` and the progress line."""

import dataclasses
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from a3c_mp.errors import TrainingError
from a3c_mp.maths.losses import with_diagnostics
from a3c_mp.run.display import Display
from a3c_mp.run.episode_log import EpisodeLog
from a3c_mp.run.followed import tell
from a3c_mp.run.mean_return import CountedEpisode, short_return
from a3c_mp.run.preflight import FOUND
from a3c_mp.run.progress import Progress, Timings
from a3c_mp.run.signs import Signs

FLUSH_SECONDS = 1.0
"""time between two points of a curve, each a mean over that time; a point before a checkpoint can come sooner"""
MOST_UPDATES = 100
"""updates per second whose metrics enter that mean: of a thousand, as with small nets, statistics take a tenth of the
learner's time"""
MIN_RATE_SECONDS = 0.1  # shortest time over which a rate says something
SMOOTHING = 0.1  # weight of the newest point, one per second, in the rate of the progress line


class MetricsWriter:
    """Averages metrics over `FLUSH_SECONDS` and writes them. Raises OSError if it cannot use `episodes.csv`."""

    def __init__(self, folder: Path, progress: Progress, log: logging.Logger):
        self.folder, self.progress, self.log = folder, progress, log
        self.timing, self.clock = Timings(), RateClock(progress)
        self.gauges: dict[str, Callable[[], float]] = {}  # read once at each flush
        self.phase: Callable[[], str] = lambda: ""  # for the progress line, while nothing is learned yet
        self.headline: Callable[[], list[str]] | None = None  # for the progress line instead of mean return and lag
        self._means = Means()
        self.sources: list[Callable[[], dict[str, float]]] = []  # of further means, since the last flush
        self._updates, self._share = 0, 1.0  # since the last flush; the share of them whose metrics are averaged
        self._rng = random.Random(0)  # an update is drawn: every k-th would often be the same minibatch of a rollout
        self.episode_log = EpisodeLog(folder / "episodes.csv", progress.steps, log)

    def open(self) -> None:
        from a3c_mp.run.tracking import EventFile, Tracker  # here, so that actors do not load tensorboardX

        args, steps = self.progress.args, self.progress.steps
        self.event_file = EventFile(self.folder, None if args.resume is None else steps + 1, self.log)
        self.event_file.describe(steps, dataclasses.asdict(args))
        self.tracker = None if args.track == "none" else Tracker(args, self.folder, self.log)
        self.display = Display(args.total_steps, self.log, steps)
        self.signs = Signs(self.progress, FOUND[args.env_id], self.log) if args.env_id in FOUND else None

    def close_files(self) -> None:
        if self.tracker is not None:
            self.tracker.close()
        self.event_file.close()
        self.episode_log.close()

    def start_clock(self) -> None:
        """Count agent steps per second, and `--max-seconds`, from now on; only the first call counts."""
        self.clock.start()
        self._start_budget()

    def _start_budget(self) -> None:
        self.progress.budget_since = self.progress.budget_since or time.monotonic()

    def record(self, metrics: Mapping[str, Tensor | float]) -> None:
        self._means.add(with_diagnostics(metrics))

    def record_update(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Add the metrics of an update, or of a share of them where there are more than `MOST_UPDATES` per second."""
        self._updates += 1
        if self._rng.random() < self._share:
            self.record(metrics)

    def record_rollout(self, policy_lag: int, games: Sequence[CountedEpisode]) -> None:
        """Record the policy lag (versions) of a rollout, and the games that enter the mean return with it."""
        self._start_budget()
        self._means.add({"charts/policy_lag": float(policy_lag)})
        self.record_games(games)

    def record_games(self, games: Sequence[CountedEpisode]) -> None:
        for actor, episode in games:
            self.episode_log.add(self.progress.steps, self.progress.wall_seconds, actor, episode)
            means = {"charts/episodic_return": episode.episode_return, "charts/episodic_length": float(episode.length)}
            self._means.add(means)

    def write(self, steps: int, points: Mapping[str, float]) -> None:
        """Write a point of each of several curves at this number of agent steps, to all who take them."""
        self.event_file.scalars(steps, points)
        tell(steps=steps, metrics=points)
        if self.tracker is not None:
            self.tracker.scalars(steps, points)

    def end_round(self) -> None:
        """Note the time, and flush if it is due."""
        self.timing.ended = time.monotonic()
        self.clock.start()  # the first round is in no rate
        if self.clock.seconds >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded since the last flush. Raises TrainingError if the mean loss is NaN or infinite."""
        means, progress = self._means.pop(), self.progress
        for source in self.sources:
            means |= source()
        if not means:
            return
        if not math.isfinite(loss := means.get("losses/total", 0.0)):
            fix = "lower --learning-rate, or look for NaN or inf in rewards and observations"
            raise TrainingError(f"the loss became {loss} before step {progress.steps:,}; {fix}")
        if (seconds := self.clock.seconds) >= FLUSH_SECONDS:  # a point that came early says nothing about a second
            self._share = min(1.0, MOST_UPDATES * seconds / max(self._updates, 1))
        if rates := self.clock.take_point():
            self._updates = 0
        self.write(progress.steps, means | rates | self._values())
        if self.signs is not None:
            self.signs.add(means)
        self.episode_log.flush()
        self._show(self.clock.recent_sps, means.get("charts/policy_lag", math.nan))

    def show_pending(self, steps: int, text: str) -> None:
        """Show agent steps that are done but not recorded yet, as in a generation under way, and a text."""
        self._show(self.clock.sps(steps), pending=steps, text=text)  # of the whole run: some parts have no steps

    def _show(self, sps: float, lag: float = math.nan, pending: int = 0, text: str = "") -> None:
        """Show the progress of the run, with the time until the budget of steps or seconds is spent."""
        steps, line = self.progress.steps + pending, "  ".join(filter(None, (self.progress_line(lag, sps), text)))
        left = (self.progress.args.total_steps - steps) / sps if sps else math.inf
        self.display.show(steps, line, min(left, self.progress.seconds_left))

    def _values(self) -> dict[str, float]:
        progress = self.progress
        return {
            **({"charts/mean_return_100": progress.window.mean} if progress.window.returns else {}),
            **{f"counts/{name}": float(count) for name, count in progress.counters.items()},
            **{name: read() for name, read in self.gauges.items()},
            "time/elapsed_seconds": progress.wall_seconds,
            **{f"time/{name}": share for name, share in self.timing.shares().items()},
        }

    def progress_line(self, lag: float, sps: float) -> str:
        rate = f"{sps:,.0f} sps" if sps else "- sps"
        counts = self.progress.counts
        if self.headline is not None:
            return "  ".join([*self.headline(), rate, *counts])
        mean = short_return(self.progress.window.mean) if self.progress.window.returns else "-"
        phase = [text] if (text := self.phase()) else []
        shown_lag = "-" if math.isnan(lag) else f"{lag:.1f}"  # since the last line no rollout has arrived
        return "  ".join([*phase, f"return {mean}", rate, f"lag {shown_lag}", *counts])


class Means:
    """Means of named values; tensors stay on their device until `pop`."""

    def __init__(self) -> None:
        self.values = defaultdict[str, list[Tensor | float]](list)

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self.values[name].append(value.detach().float().mean() if isinstance(value, Tensor) else value)

    def pop(self) -> dict[str, float]:
        """Return the means; the next ones are of what is added from now on."""
        values, self.values = self.values, defaultdict(list)
        return {name: _mean(found) for name, found in values.items()}


def _mean(found: Sequence[Tensor | float]) -> float:
    """The mean of numbers and of tensors on one device, in one operation there."""
    device = next((value.device for value in found if isinstance(value, Tensor)), None)
    return torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in found]).mean().item()


class RateClock:
    """Steps and samples per second, from the end of the first round until the training loop is left (`stopped`)."""

    def __init__(self, progress: Progress):
        self.progress, self.recent_sps = progress, 0.0
        self.stopped = 0.0  # when; 0 before
        self._start = self._last = math.inf, 0, 0  # time, steps, samples: at the start, and at the last point

    def start(self) -> None:
        if self._start[0] == math.inf:
            self._start = self._last = time.monotonic(), self.progress.steps, self.progress.samples

    @property
    def seconds(self) -> float:
        """Since the last point of the curves; -inf before the start."""
        return (self.stopped or time.monotonic()) - self._last[0]

    def sps(self, pending: int = 0) -> float:
        """Agent steps per second since the start, with those that are not recorded yet."""
        then, steps_then, _ = self._start
        seconds = (self.stopped or time.monotonic()) - then
        return (self.progress.steps + pending - steps_then) / seconds if seconds >= MIN_RATE_SECONDS else 0.0

    def take_point(self) -> dict[str, float]:
        """Return the rates since the last point; none, and the next point covers this time too, if it is too short."""
        if (seconds := self.seconds) < MIN_RATE_SECONDS:
            return {}
        then, steps_then, samples_then = self._last
        steps, samples = self.progress.steps, self.progress.samples
        self._last = then + seconds, steps, samples
        sps = (steps - steps_then) / seconds
        self.recent_sps += (SMOOTHING if self.recent_sps else 1.0) * (sps - self.recent_sps)
        rates = {"charts/sps": sps}
        return rates | ({"charts/samples_per_second": (samples - samples_then) / seconds} if samples else {})
