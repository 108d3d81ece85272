"""What a `Run` is to learner 0, for the learners besides it: counters that keep step, and nothing written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from a3c_mp.config import CommonArgs
from a3c_mp.rollout import Episode
from a3c_mp.tracking import Timings


class Follower:
    """Stands in for `Run` in a learner that was spawned; learner 0 keeps the books and ends it.

    Args:
        args: the chapter's settings.
        rank: of this learner, from 1.
        steps: agent steps of the run so far.
    """

    def __init__(self, args: CommonArgs, rank: int, steps: int):
        self.rng = torch.Generator().manual_seed(args.seed + rank)
        self.timing = Timings()
        self.steps, self.updates = steps, 0
        self.counters: Counter[str] = Counter()
        self.log = logging.Logger("follower")  # without a handler: learner 0 says the same
        self.log.addHandler(logging.NullHandler())

    def should_stop(self) -> bool:
        return False

    def consumed(self, steps: int, episodes: Sequence[Episode], actor: int, policy_lag: int) -> None:
        self.steps += steps

    def learned(self, metrics: dict[str, Tensor]) -> None:
        self.updates += 1

    def worker_restarted(self, incident: str) -> None:
        pass

    def tick(self) -> None:
        pass
