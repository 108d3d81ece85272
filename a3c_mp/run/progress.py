"""Progress of a run: what the training loop needs of it (`RunState`), its counters and its stop rules."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import wrappers
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.processes.learner_group import Stateful
from a3c_mp.processes.pool import WorkerEvent
from a3c_mp.run.averages import Timings
from a3c_mp.run.evaluation import Evaluations
from a3c_mp.run.mean_return import CountedEpisode, ReturnWindow


class RunState(Protocol):
    """What a training loop needs of its run: a `Run` in learner 0, a `ReplicaRun` in the other learners."""

    args: CommonArgs
    progress: Progress
    rng: torch.Generator
    timing: Timings
    log: logging.Logger

    @property
    def steps(self) -> int:
        return self.progress.steps

    @property
    def updates(self) -> int:
        return self.progress.updates

    @property
    def counters(self) -> Counter[str]:
        return self.progress.counters

    def should_stop(self) -> bool: ...
    def record_rollout(self, steps: int, episodes: Sequence[Episode], actor: int, policy_lag: int) -> None: ...
    def record_metrics(self, metrics: Mapping[str, Tensor | float]) -> None: ...
    def record_update(self, metrics: Mapping[str, Tensor | float], samples: int = 0) -> None: ...
    def on_restart(self, message: WorkerEvent) -> None: ...
    def keep(self, **parts: Stateful) -> None: ...
    def end_round(self) -> None: ...


class Progress:
    """Counters, mean return, policy lag and wall time of a run, and the stop rules that follow from them."""

    SAVED = ("steps", "updates", "samples", "worker_restarts", "policy_lag", "confirmed_mean")  # as they are

    def __init__(self, args: CommonArgs, steps: int = 0, updates: int = 0):
        self.args, self.steps, self.updates = args, steps, updates
        self.samples = self.worker_restarts = 0
        self.counters: Counter[str] = Counter()  # the chapter's own; in the summary, and as charts/<name>
        self.window = ReturnWindow(args.max_actors, args.num_envs, args.explorers)
        for actor in range(args.num_actors, args.max_actors):  # they may join later
            self.window.leave(actor)
        self.evals = Evaluations(args)
        self.best_mean = -math.inf  # of the checkpoints so far
        self.policy_lag = [0, 0]  # sum over rollouts, their number
        self.started, self.seconds_before = time.monotonic(), 0.0  # the latter: of earlier processes of a resumed run
        self.budget_since: float | None = None  # when `--max-seconds` began to count: at the first rollout
        self.confirmed_mean = -math.inf  # of games played to confirm that the task is solved, where a chapter does so
        self.solved_at: tuple[float, int] | None = None  # seconds, steps

    def record_rollout(
        self, steps: int, episodes: Sequence[Episode], actor: int, policy_lag: int
    ) -> list[CountedEpisode]:
        """Count agent steps, the episodes that ended in them, and the policy lag; returns those that enter the mean."""
        self.start_budget()
        self.steps += steps
        self.policy_lag = [self.policy_lag[0] + policy_lag, self.policy_lag[1] + 1]
        return self.window.end(actor, episodes)

    def record_update(self, samples: int = 0) -> None:
        self.updates += 1
        self.samples += samples

    def on_restart(self, message: WorkerEvent) -> list[CountedEpisode]:
        """Count a restarted actor, and drop its unfinished games unless rebuilt; returns as `record_rollout`."""
        self.worker_restarts += message.replaced
        plays_on = self.args.deterministic and message.replaced
        if message.actor < 0 or plays_on:  # below 0, it concerns no actor's games
            return []
        if message.left:
            self.window.leave(message.actor)
            return []
        return self.window.lose(message.actor)

    def stop_reason(self) -> str | None:
        """Why the run should stop: "solved", "max_seconds" or "total_steps"; None if it should not."""
        if self.solved_at is not None or self._is_solved():
            return "solved"
        if self.seconds_left <= 0:
            return "max_seconds"
        return "total_steps" if self.steps >= self.args.total_steps else None

    def start_budget(self) -> None:
        """Count `--max-seconds` from now on, unless they count already."""
        if self.budget_since is None:
            self.budget_since = time.monotonic()

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

    def record_solved(self) -> None:
        """Record when a mean return, of training or evaluation, first reaches its goal; called between rounds."""
        if self.solved_at is None and self._is_solved():
            self.solved_at = (round(self.wall_seconds, 2), self.steps)

    def confirm(self, mean: float) -> None:
        """Record the mean return of games played to confirm that the task is solved."""
        self.confirmed_mean = mean
        self.record_solved()

    @property
    def is_confirmed(self) -> bool:
        """Whether the games of `confirm` reached `--stop-return`."""
        return self.args.stop_return is not None and self.confirmed_mean >= self.args.stop_return

    def _is_solved(self) -> bool:
        goal = self.args.training_goal
        by_training = goal is not None and self.window.is_representative and self.window.mean >= goal
        return by_training or self.evals.is_solved or self.is_confirmed

    @property
    def is_highest(self) -> bool:
        """Whether the mean return is higher than at every checkpoint so far."""
        return self.window.is_representative and self.window.mean > self.best_mean

    @property
    def is_best(self) -> bool:
        """Whether a checkpoint written now is the best: the highest mean return, unless evaluations decide."""
        return self.is_highest and (not self.args.evaluates or self.evals.has_failed)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint written now holds of it."""
        return {
            **{name: getattr(self, name) for name in self.SAVED},
            "best_mean": self.window.mean if self.is_highest else self.best_mean,
            "episodes": self.window.episodes,
            "returns": list(self.window.returns),
            "wall_seconds": self.wall_seconds,
            "counters": dict(self.counters),
            "evals": self.evals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in (*self.SAVED, "best_mean"):
            setattr(self, name, state[name])
        self.seconds_before, self.window.episodes = state["wall_seconds"], state["episodes"]
        self.window.returns.clear()
        self.window.returns.extend(state["returns"])
        self.counters.clear()
        self.counters.update(state["counters"])
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
