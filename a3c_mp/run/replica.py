"""The run of a learner besides the first: the same steps and updates as in learner 0, and nothing is written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.processes.learner_group import Stateful
from a3c_mp.processes.pool import WorkerEvent
from a3c_mp.run.averages import Timings
from a3c_mp.run.progress import Progress, RunState
from a3c_mp.seeds import LEARNER, derive_seeds


class ReplicaRun(RunState):
    """The `RunState` of learners 1, 2, ...; learner 0 holds the `Run` and decides when all of them stop.

    Args:
        args: the chapter's settings.
        rank: of this learner, from 1.
        steps, updates: of the run so far.
    """

    def __init__(self, args: CommonArgs, rank: int, steps: int, updates: int):
        self.args, self.rank = args, rank
        self.progress = Progress(args, steps, updates)
        self.rng = torch.Generator()
        self.timing = Timings()
        self.log = logging.Logger("replica")  # without output: learner 0 logs the same
        self.log.addHandler(logging.NullHandler())
        self._seed()

    def _seed(self) -> None:
        self.rng.manual_seed(derive_seeds(self.args.seed, self.steps, self.rank, LEARNER)[0])

    def should_stop(self) -> bool:
        return False

    def record_rollout(self, steps: int, episodes: Sequence[Episode], actor: int, policy_lag: int) -> None:
        self.progress.record_rollout(steps, episodes, actor, policy_lag)

    def record_metrics(self, metrics: Mapping[str, Tensor | float]) -> None:
        pass

    def record_update(self, metrics: Mapping[str, Tensor | float], samples: int = 0) -> None:
        self.progress.record_update(samples)

    def on_restart(self, message: WorkerEvent) -> None:
        self.progress.on_restart(message)

    def keep(self, **parts: Stateful) -> None:
        pass

    def end_round(self) -> None:
        """Seed the next round's random numbers from the steps, so that a resumed run draws the same."""
        self._seed()
