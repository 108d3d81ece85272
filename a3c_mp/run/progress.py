"""What a training loop needs of its run (`RunState`): counters, mean return, stop rules."""

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from a3c_mp import wrappers
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import TrainingError
from a3c_mp.maths.schedules import passes_power_of_two
from a3c_mp.processes.learner_group import Stateful
from a3c_mp.processes.pool import WorkerEvent
from a3c_mp.run.evaluation import Evaluations
from a3c_mp.run.mean_return import WINDOW, CountedEpisode, ReturnWindow
from a3c_mp.seeds import LEARNER, derive_seeds

BAD_IN_A_ROW = 5  # rollouts or gradients with NaN or inf after which a run fails, where each has a cause of its own


class RunState:
    """The run of learners 1, 2, ...: it counts what the `Run` of learner 0 counts, and writes nothing."""

    def __init__(self, args: CommonArgs, rank: int, steps: int, updates: int):
        self.args, self.rank = args, rank
        self.progress = Progress(args, steps, updates)
        self.rng = torch.Generator()
        self.timing = Timings()
        self.exit_reason: str | None = None
        self.log = logging.Logger("silent", logging.CRITICAL + 1)  # learner 0 logs the same
        self.end_round()

    @property
    def steps(self) -> int:
        return self.progress.steps

    @property
    def updates(self) -> int:
        return self.progress.updates

    @property
    def counters(self) -> Counter[str]:
        return self.progress.counters

    def should_stop(self) -> bool:
        return self.is_interrupted()

    def is_interrupted(self) -> bool:
        return False  # learner 0 decides it for all

    def record_rollout(self, steps: int, episodes: Sequence[Episode] | None, actor: int, policy_lag: int) -> None:
        """Record agent steps, the episodes of their rollout, unless it was recorded before, and the lag in versions."""
        self.progress.record_rollout(steps, episodes, actor, policy_lag)

    def record_metrics(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Record metrics, to be averaged until they are written."""

    def record_update(self, metrics: Mapping[str, Tensor | float], samples: int = 0) -> None:
        """Record an update of the weights, its metrics, and the samples it used, for charts/samples_per_second."""
        self.progress.record_update(samples)

    def on_restart(self, event: WorkerEvent) -> None:
        """Record the restart of an actor that died or hung, lost games, joins and leaves."""
        self.progress.on_restart(event)

    def keep(self, **parts: Stateful) -> None:
        """Add what an exact resume needs to the checkpoints of a deterministic run; on resume, restore it."""

    def end_round(self) -> None:
        """End a round of all learners; here, seed the next one from the steps, so that a resumed run draws the same."""
        self.rng.manual_seed(derive_seeds(self.args.seed, self.steps, self.rank, LEARNER)[0])


class Timings:
    """A timer of named sections of code; `with timings("learning"):` adds to one."""

    def __init__(self) -> None:
        self.seconds, self.since = defaultdict[str, float](float), time.monotonic()
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
        """Return the share of each section in the time since the last call."""
        now = time.monotonic()
        shares = {name: seconds / (now - self.since) for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self.since = now
        return shares


class Progress:
    """Counters, mean return, policy lag and wall time of a run, and the stop rules that follow from them."""

    SAVED = ("steps", "updates", "samples", "worker_restarts", "policy_lag", "confirmed_mean")  # in checkpoints

    def __init__(self, args: CommonArgs, steps: int = 0, updates: int = 0):
        self.args, self.steps, self.updates = args, steps, updates
        self.samples = self.worker_restarts = 0
        self.counters: Counter[str] = Counter()  # the chapter's own; in the summary, and as counts/<name>
        goal = None if args.has_fitness else args.stop_return
        self.window = ReturnWindow(args.max_actors, args.num_envs, args.explorers, goal)
        for actor in range(args.num_actors, args.max_actors):  # they may join later
            self.window.leave(actor)
        self.evals = Evaluations(args)
        self.best_mean = -math.inf  # of the checkpoints so far
        self.policy_lag = [0, 0]  # sum over rollouts, their number
        self.has_data = False  # whether something without NaN has arrived to learn from, in this start
        self.started, self.seconds_before = time.monotonic(), 0.0  # the latter: of earlier starts
        self.budget_since: float | None = None  # set with the first rollout: `--max-seconds` count from then on
        self.confirmed_mean = -math.inf  # of games played to confirm that the task is solved, where a chapter does so
        self.solved_at: tuple[float, int] | None = None  # seconds, steps

    def record_rollout(
        self, steps: int, episodes: Sequence[Episode] | None, actor: int, policy_lag: int
    ) -> list[CountedEpisode]:
        """Count a rollout; returns the episodes that enter the mean return with it."""
        self.steps += steps
        self.policy_lag = [self.policy_lag[0] + policy_lag, self.policy_lag[1] + 1]
        return [] if episodes is None else self.window.end(actor, episodes)

    def record_update(self, samples: int = 0, updates: int = 1) -> None:
        self.updates += updates
        self.samples += samples

    def on_restart(self, event: WorkerEvent) -> list[CountedEpisode]:
        """Count a restart, and drop the actor's unfinished games unless rebuilt; returns as `record_rollout`."""
        self.worker_restarts += event.replaced
        is_rebuilt = self.args.deterministic and event.replaced
        if event.actor < 0 or is_rebuilt:  # below 0, it concerns no actor's games
            return []
        if event.left:
            self.window.leave(event.actor)
            return []
        return self.window.lose(event.actor)

    def stop_reason(self) -> str | None:
        """Why the run should stop: "solved", "total_steps" or "max_seconds"; None if it should not."""
        if self.solved_at is not None or self._is_solved:
            return "solved"
        if self.steps >= self.args.total_steps:  # first: the time may pass while actors end
            return "total_steps"
        return "max_seconds" if self.seconds_left <= 0 else None

    @property
    def seconds_left(self) -> float:
        """Until `--max-seconds` have passed; inf without a limit."""
        if self.args.max_seconds is None:
            return math.inf
        spent = 0.0 if self.budget_since is None else time.monotonic() - self.budget_since
        return self.args.max_seconds - spent

    @property
    def wall_seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def learned_nothing(self, reached_its_end: bool) -> bool:
        """Whether there was no update because of NaN or inf, not because the run has ended too early."""
        skipped = any(number for name, number in self.counters.items() if name.endswith("_not_finite"))
        args = vars(self.args)
        steps = min(self.steps, args["total_steps"]) // args.get("population", 1)  # the last round may go beyond
        is_early = not reached_its_end or steps <= args.get("learning_starts", 0)
        # Where a gradient had NaN, there was enough to learn from.
        had_no_time = self.has_data and is_early and not self.counters["gradients_not_finite"]
        return skipped and not self.updates and not had_no_time

    def record_solved(self) -> None:
        """Record when a mean return, of training or evaluation, first reaches its goal."""
        if self.solved_at is None and self._is_solved:
            self.solved_at = (round(self.wall_seconds, 2), self.steps)

    @property
    def is_confirmed(self) -> bool:
        """Whether those games reached `--stop-return`."""
        return self.args.stop_return is not None and self.confirmed_mean >= self.args.stop_return

    @property
    def _is_solved(self) -> bool:
        return self.window.has_reached_goal or self.evals.is_solved or self.is_confirmed

    @property
    def is_highest(self) -> bool:
        """Whether the mean return is higher than at every checkpoint so far."""
        return self.window.is_representative and self.window.mean > self.best_mean

    @property
    def is_best(self) -> bool:
        """Whether a checkpoint written now is the best: the highest mean return, unless evaluations decide."""
        return self.is_highest and (not self.evals.decides_now or self.evals.has_failed)

    @property
    def counts(self) -> list[str]:
        """The counters that are not 0, for the log."""
        return [f"{count:,} {name.replace('_', ' ')}" for name, count in self.counters.items() if count]

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in self.SAVED},
            "confirmed_mean": self.confirmed_mean if self.is_confirmed else -math.inf,  # else no checkpoint has its net
            "best_mean": self.window.mean if self.is_highest else self.best_mean,
            "episodes": self.window.episodes,
            "returns": list(self.window.returns),
            "first_returns": list(self.window.first),
            "wall_seconds": self.wall_seconds,
            "counters": dict(self.counters),
            "evals": self.evals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in (*self.SAVED, "best_mean"):
            setattr(self, name, state[name])
        self.seconds_before, self.window.episodes = state["wall_seconds"], state["episodes"]
        self.window.returns, self.counters = deque(state["returns"], WINDOW), Counter(state["counters"])
        self.window.first = state["first_returns"]
        self.evals.load_state_dict(state["evals"], self.steps)

    def summary(self) -> dict[str, Any]:
        """Entries of `summary.json`."""
        solved_seconds, solved_steps = self.solved_at or (None, None)
        total_lag, rollouts = self.policy_lag
        return {
            "steps": self.steps,
            "frames": self.steps * (wrappers.FRAME_SKIP if wrappers.is_atari(self.args.env_id) else 1),
            "updates": self.updates,
            "episodes": self.window.episodes,
            "wall_seconds": round(self.wall_seconds, 2),
            "mean_return_100": self.window.mean if self.window.returns else None,
            "solved": self.solved_at is not None,
            "solved_at_seconds": solved_seconds,
            "solved_at_steps": solved_steps,
            "policy_lag_mean": total_lag / rollouts if rollouts else None,
            "worker_restarts": self.worker_restarts,
            **self.counters,
            **self.evals.summary(),
        }


class NonFiniteFilter:
    """Checks for NaN and inf; counts what is not finite as `counter`, and fails after `in_a_row` from one source."""

    def __init__(self, run: RunState, counter: str, in_a_row: int = BAD_IN_A_ROW):
        self.run, self.counter, self.in_a_row = run, counter, in_a_row
        self.bad_in_a_row: Counter[str] = Counter()  # by source
        run.counters.update({counter: 0})  # adds: there from the start, kept on resume

    def check(self, value: bool | float | Tensor, source: str, what: str) -> bool:
        """Return whether a rollout or gradient is finite; count and log one that is not, which the caller skips.

        `value` is a norm or loss that is finite only if all of it is, or the answer itself; `source` is the actor or
        learner that it comes from, `what` its name in the log. Raises TrainingError after `in_a_row` of one source that
        were not finite.
        """
        if value if isinstance(value, bool) else math.isfinite(value):
            self.bad_in_a_row[source] = 0
            return True
        self.bad_in_a_row[source] += 1
        self.count_skipped(1, self.bad_in_a_row[source], source, what)
        return False

    def count_skipped(self, number: int, in_a_row: int, source: str, what: str) -> None:
        """Count and log so many that were not finite, the last of them `what`. Raises as `check` does."""
        if in_a_row >= self.in_a_row:
            self.run.counters[self.counter] += number
            fix = "lower --learning-rate, or look for NaN or inf in rewards, observations and fields of infos"
            raise TrainingError(f"{what} contains NaN or inf, {in_a_row} in a row from {source}; {fix}")
        count(self.run, self.counter, number, f"{what} contains NaN or inf; skipped", repeated=True)


def count(run: RunState, name: str, number: int, warning: str, repeated: bool = False) -> None:
    """Add to a counter, which is there from now on; warn the first time, or `repeated` at powers of two.

    The last lines of a run have the total.
    """
    before = run.counters[name]
    run.counters[name] = total = before + number
    if passes_power_of_two(before, total) and (repeated or before == 0):
        run.log.warning(f"{warning} ({total:,} so far)")
