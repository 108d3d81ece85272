"""Metrics of a run: TensorBoard scalars, `episodes.csv` and the progress line."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import TrainingError
from a3c_mp.maths.losses import with_diagnostics
from a3c_mp.run.averages import Means, Timings
from a3c_mp.run.display import Display
from a3c_mp.run.episode_log import EpisodeLog
from a3c_mp.run.eval_progress import Evaluation
from a3c_mp.run.mean_return import CountedEpisode, short_return
from a3c_mp.run.progress import Progress
from a3c_mp.run.rates import RateClock
from a3c_mp.run.tensorboard import EventFile, episode_points
from a3c_mp.run.tracking import Tracker

FLUSH_SECONDS = 1.0
"""time between two points of a curve, each a mean over that time; a point before a checkpoint can come sooner"""
MOST_UPDATES = 100
"""updates a second whose metrics enter that mean; with small nets there are a thousand, and statistics of all of them
would take a tenth of the learner's time"""


def table_of(args: CommonArgs) -> str:
    """Settings as a Markdown table."""
    rows = [f"|{name}|{value}|" for name, value in dataclasses.asdict(args).items()]
    return "\n".join(["|setting|value|", "|-|-|", *rows])


class MetricsWriter:
    """Averages metrics over `FLUSH_SECONDS` and writes them, with the progress of the run.

    Args:
        folder: of the run.
        progress: of the run, where it starts.
        log: where warnings and, without a terminal, progress lines go.

    Raises:
        OSError: `episodes.csv` cannot be read or written.
    """

    def __init__(self, folder: Path, progress: Progress, log: logging.Logger):
        self.folder, self.progress, self.log = folder, progress, log
        self.timing = Timings()
        self.clock = RateClock(progress, self.timing)
        self.gauges: dict[str, Callable[[], float]] = {}  # read once at each flush
        self.phase: Callable[[], str] = lambda: ""  # for the progress line, while nothing is learned yet
        self.headline: Callable[[], list[str]] | None = None  # for the progress line instead of mean return and lag
        self._means = Means()
        self._updates, self._share = 0, 1.0  # since the last flush; the share of them whose metrics are averaged
        self._rng = random.Random(0)  # an update is drawn: every k-th would often be the same minibatch of a rollout
        self._episode_log = EpisodeLog(folder / "episodes.csv", progress.steps, log)
        self._games: list[tuple[int, Episode]] = []  # since the last flush, each with the steps when it was counted

    def open(self) -> None:
        """Open the event file and the display."""
        resumed = self.progress.args.resume is not None
        self.event_file = EventFile(self.folder, self.progress.steps + 1 if resumed else None, self.log)
        self.event_file.text("hyperparameters", table_of(self.progress.args), self.progress.steps)
        args = self.progress.args
        self.tracker = Tracker(args, self.folder, self.log) if args.track != "none" else None
        self.display = Display(self.progress.args.total_steps, self.log, self.progress.steps)

    def close_files(self) -> None:
        self.event_file.close()
        if self.tracker is not None:
            self.tracker.close()
        self._episode_log.close()

    def start_clock(self) -> None:
        """Count agent steps a second, and `--max-seconds`, from now on, instead of from the first rollout."""
        self.clock.start()
        self.progress.start_budget()

    def record(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Add values to the means that the next flush writes."""
        self._means.add(with_diagnostics(metrics))

    def record_update(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Add the metrics of an update, or of a share of them where there are more than `MOST_UPDATES` a second."""
        self._updates += 1
        if self._rng.random() < self._share:
            self.record(metrics)

    def record_rollout(self, policy_lag: int, games: Sequence[CountedEpisode]) -> None:
        """Record the policy lag (versions) of a rollout, and the games that enter the mean return with it."""
        if not self.clock.is_started:  # neither starting up nor the first rollout is in a rate
            self.clock.start()
        self._means.add({"charts/policy_lag": float(policy_lag)})
        self.record_games(games)

    def record_games(self, games: Sequence[CountedEpisode]) -> None:
        """Record games that enter the mean return."""
        for actor, episode in games:
            self._episode_log.add(self.progress.steps, self.progress.wall_seconds, actor, episode)
            self._games.append((self.progress.steps, episode))

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write the result of an evaluation, at the agent steps of its weights."""
        figures = evaluation.figures.items()
        self._write([(f"eval/{name}", value, evaluation.steps) for name, value in figures])

    def _write(self, points: list[tuple[str, float, int]]) -> None:
        """Write points of curves, (name, value, step): the one place from which they leave the run."""
        self.event_file.scalars(points)
        if self.tracker is not None:
            self.tracker.scalars(points)

    @property
    def sps(self) -> float:
        """Agent steps a second consumed by the learner since the first rollout arrived."""
        return self.clock.sps()

    def sync_episodes(self) -> None:
        """Wait until `episodes.csv` has on disk every game recorded so far."""
        self._episode_log.flush(sync=True)

    def end_round(self) -> None:
        """Note the time, and flush if it is due."""
        self.clock.end_round()
        if self.clock.seconds >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded since the last flush.

        Raises:
            TrainingError: the mean loss is NaN or infinite.
        """
        means = self._means.pop()
        if not means and not self._games:
            return
        if not math.isfinite(loss := means.get("losses/total", 0.0)):
            raise TrainingError(
                f"the loss became {loss} before step {self.progress.steps:,}; "
                f"lower --learning-rate, or look for NaN or inf in rewards and observations"
            )
        if (seconds := self.clock.seconds) >= FLUSH_SECONDS:  # a point that came early says nothing about a second
            self._share = min(1.0, MOST_UPDATES * seconds / max(self._updates, 1))
        if rates := self.clock.take_point():
            self._updates = 0
        means |= rates
        values = means | self._read_values()
        points = [(name, value, self.progress.steps) for name, value in values.items()]
        self._write(episode_points(self._games) + points)
        self._games = []
        self._episode_log.flush()
        self.clock.note()
        sps = self.clock.recent_sps
        line = self._progress_line(values.get("charts/policy_lag", math.nan), sps)
        self.display.show(self.progress.steps, line, self._seconds_left(self.progress.steps, sps))

    def show_pending(self, steps: int, text: str) -> None:
        """Show agent steps that are done but not recorded yet, as in a generation under way, and a text.

        The rate is that of the whole run: generations have parts without steps, which a shorter time would miss or hit.
        """
        sps, steps_done = self.clock.sps(steps), self.progress.steps + steps
        line = "  ".join(filter(None, (self._progress_line(math.nan, sps), text)))
        self.display.show(steps_done, line, self._seconds_left(steps_done, sps))

    def _read_values(self) -> dict[str, float]:
        """Values that are read at a flush rather than averaged since the last one."""
        progress = self.progress
        mean = {"charts/mean_return_100": progress.window.mean} if progress.window.returns else {}
        return {
            **mean,
            **{f"charts/{name}": float(count) for name, count in progress.counters.items()},
            **{name: read() for name, read in self.gauges.items()},
            "time/elapsed_seconds": progress.wall_seconds,
            **{f"time/{name}": share for name, share in self.timing.shares().items()},
        }

    def _progress_line(self, lag: float, sps: float) -> str:
        rate = f"{sps:,.0f} sps" if sps else "- sps"
        counts = [f"{count:,} {name.replace('_', ' ')}" for name, count in self.progress.counters.items() if count]
        if self.headline is not None:
            return "  ".join([*self.headline(), rate, *counts])
        mean = short_return(self.progress.window.mean) if self.progress.window.returns else "-"
        phase = [text] if (text := self.phase()) else []
        return "  ".join([*phase, f"return {mean}", rate, f"lag {lag:.1f}", *counts])

    def _seconds_left(self, steps: int, sps: float) -> float:
        """Until the budget of steps or seconds is spent."""
        args, progress = self.progress.args, self.progress
        left = (args.total_steps - steps) / sps if sps else math.inf
        return min(left, progress.seconds_left)
