"""What a `Run` is to learner 0, for the learners besides it: counters that keep step, and nothing written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.processes.workers import RestartMessage
from a3c_mp.run.checkpoint import Stateful
from a3c_mp.run.tracking import Timings
from a3c_mp.seeds import LEARNER, derive_seeds


class ReplicaRun:
    """Stands in for `Run` in a learner that was spawned; learner 0 keeps the books and ends it.

    Args:
        args: the chapter's settings.
        rank: of this learner, from 1.
        steps, updates: of the run so far.
    """

    def __init__(self, args: CommonArgs, rank: int, steps: int, updates: int):
        self.args, self.rank, self.steps, self.updates = args, rank, steps, updates
        self.rng = torch.Generator()
        self.timing = Timings()
        self.counters: Counter[str] = Counter()
        self.log = logging.Logger("follower")  # without a handler: learner 0 says the same
        self.log.addHandler(logging.NullHandler())
        self._seed()

    def _seed(self) -> None:
        self.rng.manual_seed(derive_seeds(self.args.seed, self.steps, self.rank, LEARNER)[0])

    def should_stop(self) -> bool:
        return False

    def record_rollout(self, steps: int, episodes: Sequence[Episode], actor: int, policy_lag: int) -> None:
        self.steps += steps

    def record_update(self, metrics: dict[str, Tensor], samples: int = 0) -> None:
        self.updates += 1

    def on_restart(self, message: RestartMessage) -> None:
        pass

    def keep(self, **parts: Stateful) -> None:
        pass

    def end_round(self) -> None:
        """The random numbers of the next round follow from the steps: a learner in a resumed run draws the same."""
        self._seed()
