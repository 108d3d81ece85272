"""One training run: its folder, counters, stop rules, signals, checkpoints and summary.

A chapter opens a `Run` in a `with` block, tells it what was learned from and what came of it, and asks it when to stop.
However the block is left, a checkpoint and `summary.json` are written.
"""

from __future__ import annotations

import math
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wrappers
from a3c_mp._bootstrap import IGNORED_AT_START
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError, TrainingError, WorkerError
from a3c_mp.maths.schedules import Every, passes_power_of_two
from a3c_mp.nets.obs_norm import note_on_inputs
from a3c_mp.processes.console import console
from a3c_mp.processes.prints import prints
from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.processes.workers import RestartMessage
from a3c_mp.run import checkpoint
from a3c_mp.run.checkpoint import Stateful
from a3c_mp.run.display import Display, hms, open_log
from a3c_mp.run.episode_log import EpisodeLog
from a3c_mp.run.preflight import check_limits
from a3c_mp.run.run_dir import claim_folder, describe_run, refuse_unwritable, write_json
from a3c_mp.run.start_order import CountedEpisode, StartOrder
from a3c_mp.run.tracking import FLUSH_SECONDS, EventFile, Means, Timings, episode_points

WINDOW = 100
"""episodes in the mean return"""
MIN_EPISODES = 20
"""fewest episodes that can show a game solved"""
COUNTERS = ("steps", "updates", "samples", "episodes", "worker_restarts")


TOLD = (WorkerError, TrainingError)
"""errors whose message says it all; others keep their traceback"""


def describe(error: BaseException) -> str:
    """What run.log, and `exit_reason` in its first line, say of an error."""
    return str(error) if isinstance(error, TOLD) and str(error) else f"{type(error).__name__}: {error}"


class Run:
    """A training run in `runs_dir/run_name`, or the one that `--resume` names.

    Args:
        args: the chapter's settings.
        algorithm: name of the chapter, stored in checkpoints.
        net, optimizer: what a checkpoint holds; filled from the newest one on resume.
        extra: what else it holds, by name; what the newest one lacks of them starts without, with a warning.

    Raises:
        ConfigError: the folder cannot be made, written or resumed, or is in use; or this machine is too small.
    """

    def __init__(
        self, args: CommonArgs, algorithm: str, net: nn.Module, optimizer: torch.optim.Optimizer,
        extra: Mapping[str, Stateful] | None = None,
    ):  # fmt: skip
        self.args, self.algorithm = args, algorithm
        self._origin: dict[str, Any] = {"algorithm": algorithm, "env_id": args.env_id}  # identifies its checkpoints
        self.net, self.optimizer = net, optimizer
        self.extra = {} if extra is None else dict(extra)
        self.gauges: dict[str, Callable[[], float]] = {}  # curves that are read off once a second
        self.rng = torch.Generator().manual_seed(args.seed)
        self.frames_per_step = wrappers.FRAME_SKIP if wrappers.is_atari(args.env_id) else 1
        self.steps = self.updates = self.samples = self.episodes = 0
        self.returns: deque[float] = deque(maxlen=WINDOW)  # of games in the order in which they started
        self.games = StartOrder(args.num_actors, args.num_envs)
        self.best_mean, self.seconds_before = -math.inf, 0.0  # the latter: of earlier processes of a resumed run
        self.solved_at: tuple[float, int] | None = None  # seconds, steps
        self.lag_sum = self.lag_count = self.worker_restarts = 0
        self.counters: Counter[str] = Counter()  # the chapter's own; in the summary, and as charts/<name>
        self.exit_reason: str | None = None
        self.exit_code = 0
        self._finished = False

        check_limits(args, net)
        self.folder, self._lock = claim_folder(args, algorithm)
        self.checkpoints = self.folder / "checkpoints"
        self.started = time.monotonic()
        self._learning_since: tuple[float, int] | None = None  # when the first rollout came, steps before it
        self._saved_steps: int | None = None
        self.unsaved = False  # the last state could not be saved
        self._resumed: dict[str, Any] | None = None  # parts of the checkpoint of a deterministic run, until `keep`
        self.last_checkpoint: Path | None = None
        with refuse_unwritable(args, self.folder):
            self.log = open_log(self.folder)
            if args.resume is not None:
                self._restore()
            self._episode_log = EpisodeLog(self.folder / "episodes.csv", self.steps, self.log)
            write_json(self.folder / "config.json", describe_run(args, algorithm, self.folder, self.steps))

        self.timing = Timings()
        self._means = Means()
        self._counted: list[tuple[int, Episode]] = []
        self._flushed = (time.monotonic(), self.steps, self.samples)
        # A new run saves after its first round: whatever happens to it then, it can be resumed.
        self._saved_at = time.monotonic() if args.resume is not None else -math.inf
        self._checkpoint_due = Every(args.checkpoint_steps, self.steps)
        self._whole_rounds = self.steps  # steps up to the last tick: between two, a state has half-learned rounds

    # ---- what a chapter calls

    def __enter__(self) -> Run:
        self.event_file = EventFile(self.folder, self.steps + 1 if self.args.resume else None, self.log)
        self.display = Display(self.args.total_steps, self.log)
        handled = [signum for signum in SIGNALS if signum not in IGNORED_AT_START]  # nohup ignores SIGHUP
        self._old_handlers = {signum: signal.signal(signum, self._on_signal) for signum in handled}
        self.log.info(f"{self.algorithm} on {self.args.env_id}, seed {self.args.seed}, in {self.folder}")
        if note := note_on_inputs(self.net):
            self.log.info(note)
        if getattr(self.args, "reward_clip", False):
            self.log.info("rewards are clipped to -1, 0 or 1 for learning (--no-reward-clip: learn from raw rewards)")
        return self

    def should_stop(self) -> bool:
        """Whether the run is over; the reason is in `exit_reason`."""
        if self.exit_reason is None:
            if self._is_solved():
                self.exit_reason = "solved"
                self.solved_at = (round(self.wall_seconds, 2), self.steps)
            elif self.args.max_seconds is not None and time.monotonic() - self.started >= self.args.max_seconds:
                self.exit_reason = "max_seconds"
            elif self.steps >= self.args.total_steps:
                self.exit_reason = "total_steps"
        return self.exit_reason is not None

    def _is_solved(self) -> bool:
        goal = self.args.stop_return
        return goal is not None and len(self.returns) >= MIN_EPISODES and self.mean_return >= goal

    def keep(self, **parts: Stateful) -> None:
        """Put into the checkpoints what a deterministic run needs besides, and fill it from the one that it resumes."""
        if not self.args.deterministic:
            return
        parts = {"games": self.games, **parts}
        self.extra |= parts
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        differs = "the run differs from one that was never interrupted"
        if "actors" not in resumed:
            whose = "it is of a run without --deterministic, or of an older version"
            self.log.warning(f"the checkpoint holds no games ({whose}): actors start new ones; {differs}")
            return
        for name, part in parts.items():
            try:
                part.load_state_dict(resumed[name])
            except (LookupError, ValueError, RuntimeError, TypeError) as error:
                self.log.warning(f"the checkpoint's {name} do not fit these settings ({error}); {differs}")
                if name in ("games", "actors"):  # new games, in an order of their own, with weights of version 0
                    self.games = self.extra["games"] = StartOrder(self.args.num_actors, self.args.num_envs)
                    return

    def record_rollout(self, steps: int, episodes: Sequence[Episode], actor: int, policy_lag: int) -> None:
        """Count what goes into learning: agent steps, episodes that ended in them, age of their policy in versions."""
        if self._learning_since is None:
            self._learning_since = (time.monotonic(), self.steps)
        self.steps += steps
        self.lag_sum += policy_lag
        self.lag_count += 1
        self._means.add({"charts/policy_lag": float(policy_lag)})
        passed_over = self.games.passed_over
        self._count(self.games.end(actor, episodes))
        if passes_power_of_two(passed_over, number := self.games.passed_over):
            what = f"{number} games have not ended while {self.games.limit:,} later ones did"
            self.log.warning(f"{what}; the mean return no longer waits for them")

    def _count(self, episodes: Iterable[CountedEpisode]) -> None:
        """Take games into the mean return, whose turn has come."""
        for actor, episode in episodes:
            if not math.isfinite(episode.episode_return):
                continue
            self._episode_log.add(self.steps, self.wall_seconds, actor, episode)
            self.episodes += 1
            self.returns.append(episode.episode_return)
            self._counted.append((self.steps, episode))

    def record_metrics(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Curves to be averaged."""
        self._means.add(metrics)

    def record_update(self, metrics: Mapping[str, Tensor | float], samples: int = 0) -> None:
        """Count one update, with curves to be averaged, and the samples it used where their rate is of interest."""
        self.updates += 1
        self.samples += samples
        self.record_metrics(metrics)

    def on_restart(self, message: RestartMessage) -> None:
        """Count and log the replacement of a dead or hanging actor, or that its games could not be rebuilt."""
        self._flush(time.monotonic())  # raises if weights are not finite: they kill actors
        self.worker_restarts += message.replaced
        rebuilt = self.args.deterministic and message.replaced
        if not rebuilt:
            self._count(self.games.lose(message.actor))
        what, *details = message.text.splitlines()
        if self.args.deterministic:
            what += "; rebuilt to where it was" if rebuilt else "; determinism is lost for the rest of this run"
        self.log.warning("\n".join([what, *details]))

    def end_round(self) -> None:
        """Write curves, progress and checkpoints, each when it is due; called before slots are given back."""
        now, self._whole_rounds = time.monotonic(), self.steps
        if now - self._flushed[0] >= FLUSH_SECONDS:
            self._flush(now)
        if self._checkpoint_due(self.steps) or now - self._saved_at >= self.args.checkpoint_seconds:
            self._flush(now)  # what the checkpoint counts, the files have
            self.save()

    def save(self) -> None:
        """Write a checkpoint; a failure costs a warning, and the one before it stays."""
        self._episode_log.flush(sync=True)  # the file has every game that the checkpoint counts
        best = len(self.returns) >= MIN_EPISODES and self.mean_return > self.best_mean
        best_mean = self.mean_return if best else self.best_mean
        state = {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
            "torch_rng": torch.get_rng_state(),
            **{name: getattr(self, name) for name in COUNTERS},
            "returns": list(self.returns),
            "best_mean": float(best_mean),
            "wall_seconds": self.wall_seconds,
            "policy_lag": [self.lag_sum, self.lag_count],
            "counters": dict(self.counters),
            "extra": {name: part.state_dict() for name, part in self.extra.items()},
        }
        try:
            self.last_checkpoint = checkpoint.save(self.checkpoints, state, steps=self.steps, best=best, **self._origin)
            self._saved_steps, self.best_mean = self.steps, best_mean
        except (OSError, checkpoint.CheckpointError) as error:
            self.log.warning(f"no checkpoint at {self.steps:,} steps: {error}")
        self._saved_at = time.monotonic()

    # ---- figures

    @property
    def mean_return(self) -> float:
        """Mean raw return of the last `WINDOW` whole games."""
        return float(np.mean(self.returns)) if self.returns else float("nan")

    @property
    def wall_seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    @property
    def sps(self) -> float:
        """Agent steps a second consumed by the learner since the first rollout came."""
        if self._learning_since is None:
            return 0.0
        since, before = self._learning_since
        return (self.steps - before) / max(time.monotonic() - since, 1e-9)

    def summary(self) -> dict[str, Any]:
        solved_seconds, solved_steps = self.solved_at or (None, None)
        return {
            "steps": self.steps,
            "frames": self.steps * self.frames_per_step,
            "updates": self.updates,
            "episodes": self.episodes,
            "wall_seconds": round(self.wall_seconds, 2),
            "sps": round(self.sps, 1),
            "mean_return_100": self.mean_return if self.returns else None,
            "solved": self.solved_at is not None,
            "solved_at_seconds": solved_seconds,
            "solved_at_steps": solved_steps,
            "policy_lag_mean": self.lag_sum / self.lag_count if self.lag_count else None,
            "worker_restarts": self.worker_restarts,
            **self.counters,
            "exit_reason": self.exit_reason,
            "weights_sha256": checkpoint.sha256_of_weights(self.net.state_dict()),
        }

    # ---- the end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.finish(error)
        self.event_file.close()
        self._episode_log.close()
        prints.settle()
        self.display.close()
        if error is not None and self._failed(error):
            self.log.error(f"error: {describe(error)}")
        if self.unsaved:
            self.log.error(f"error: the state at {self.steps:,} steps was not saved; see the warning above")
        if self.exit_code == 1 and self.last_checkpoint is not None:
            self.log.error(f"the last checkpoint is {self.last_checkpoint}; go on with --resume {self.folder}")
        mean = f"mean return {self.mean_return:.1f}, " if self.returns else ""
        self.log.info(
            f"{self.exit_reason or 'ended'} after {hms(self.wall_seconds)}: {mean}{self.steps:,} steps, "
            f"{self.sps:,.0f} sps; in {self.folder}"
        )
        if self.exit_code > 128 and self.last_checkpoint is not None:
            self.log.info(f"continue with --resume {self.folder}")
        console.drain()
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._lock.close()
        return isinstance(error, TOLD)  # any other error keeps its traceback

    def finish(self, error: BaseException | None) -> None:
        """Set exit code and reason, and write the last curves, checkpoint and summary; done by the first call only.

        Args:
            error: what ended the run, if anything did.
        """
        if self._finished:
            return
        self._finished = True
        self.exit_code = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}.get(self.exit_reason or "", 0)
        if error is not None and self._failed(error):
            self.exit_code = 1
            self.exit_reason = f"error: {describe(error).splitlines()[0]}"
        self._attempt("curves", lambda: self._flush(time.monotonic()))
        if self.args.deterministic and self.steps != self._whole_rounds:
            self.log.warning("the round in progress is not saved: bits are exact between two rounds only")
        elif self._saved_steps != self.steps:
            self._attempt("checkpoint", self.save)
            self.unsaved = self._saved_steps != self.steps
        if self.unsaved:
            self.exit_code = 1
        self._attempt("summary", lambda: write_json(self.folder / "summary.json", self.summary()))

    def _failed(self, error: BaseException) -> bool:
        """Whether an error ended the run; once a signal has, workers are lost because they got it too."""
        over = self.exit_reason is not None and not self.exit_reason.startswith("error: ")
        return not (over and isinstance(error, WorkerError))

    def _attempt(self, what: str, write: Callable[[], None]) -> None:
        """One failure at the end of a run (a full disk, a GPU that is gone) must not cost the rest."""
        try:
            write()
        except Exception as error:
            self.log.warning(f"no {what}: {error}")

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self._finished:
            self.exit_reason = signal.Signals(signum).name  # what waits looks at it several times a second

    # ---- parts

    def _flush(self, now: float) -> None:
        then, steps_then, samples_then = self._flushed
        self._flushed = (now, self.steps, self.samples)
        values = self._means.pop()
        if not values and not self._counted:
            return
        if not math.isfinite(values.get("losses/total", 0.0)):
            raise TrainingError(
                f"the loss became {values['losses/total']} before step {self.steps:,}; "
                f"lower --learning-rate, or look for such rewards and observations"
            )
        values["charts/sps"] = (self.steps - steps_then) / max(now - then, 1e-9)
        if self.samples:
            values["charts/samples_per_second"] = (self.samples - samples_then) / max(now - then, 1e-9)
        if self.returns:
            values["charts/mean_return_100"] = self.mean_return
        values |= {f"charts/{name}": float(count) for name, count in self.counters.items()}
        values |= {name: read() for name, read in self.gauges.items()}
        values["time/elapsed_seconds"] = self.wall_seconds
        values |= {f"time/{name}": share for name, share in self.timing.shares().items()}
        points = [(name, value, self.steps) for name, value in values.items()]
        self.event_file.scalars(episode_points(self._counted) + points)
        self._counted = []
        self._episode_log.flush()
        lag = values.get("charts/policy_lag", float("nan"))
        mean = f"{self.mean_return:.1f}" if self.returns else "-"
        counted = "".join(f"  {count} {name.replace('_', ' ')}" for name, count in self.counters.items() if count)
        line = f"return {mean}  {self.sps:,.0f} sps  lag {lag:.1f}  {self.episodes} games{counted}"
        left = (self.args.total_steps - self.steps) / self.sps if self.sps else math.inf
        if self.args.max_seconds is not None:
            left = min(left, self.args.max_seconds - (now - self.started))
        self.display.show(self.steps, line, left)

    def _restore(self) -> None:
        try:
            found = checkpoint.load_newest(self.checkpoints, **self._origin, warn=self.log.warning, take=self._take)
        except checkpoint.CheckpointError as error:
            raise ConfigError("resume", self.folder, str(error), "start a new run, or restore the folder") from error
        self._saved_steps, self.last_checkpoint = self.steps, found[1]
        checkpoint.set_aside_newer(found[1])
        self.log.info(f"resumed from {found[1]} at {self.steps:,} steps")

    def _take(self, state: dict[str, Any], path: Path) -> None:
        """Go on from a state; what does not fit raises."""
        self.net.load_state_dict(state["net"])
        checkpoint.restore_optimizer(self.optimizer, state["optimizer"])
        for name, part in self.extra.items():
            if name in state.get("extra", {}):
                part.load_state_dict(state["extra"][name])
            else:
                self.log.warning(f"{path} holds no {name}: it starts empty")
        self.rng.set_state(state["rng"])
        torch.set_rng_state(state["torch_rng"])
        for name in COUNTERS:
            setattr(self, name, state.get(name, 0))
        self.lag_sum, self.lag_count = state.get("policy_lag", [0, 0])
        self.best_mean, self.seconds_before = state["best_mean"], state["wall_seconds"]
        self.returns = deque(state["returns"], maxlen=WINDOW)
        self.counters = Counter(state.get("counters", {}))
        if self.args.deterministic:
            self._resumed = {n: part for n, part in state.get("extra", {}).items() if n not in self.extra}
