"""Seeds of everything random in a run, all derived from `--seed`."""

from __future__ import annotations

import numpy as np

LEARNER = 2**32 - 1
"""last number of the key of a learner's seeds; an actor's is its restart count"""
EVALUATOR = 2**32 - 2
"""the same for the evaluator"""
FIRST, MEMBER, FITNESS, WEIGHTS, EVOLUTION, CONFIRMATION = (2**32 - number for number in range(3, 9))
"""the same for populations: first genomes; a member's generation; games that decide fitness; first weights; a
generation's births; games that confirm a fitness"""
SHARD, DRAWS = 2**32 - 9, 2**32 - 10
"""the same for a replay shard, and for the trainer's choice of shards, on Ray"""

BURSTS, NOISE = 2**32 - 11, 2**32 - 12
"""the same for the bursts of exploration in a rollout, and for noise that is held for several steps"""


def derive_seeds(*key: int) -> tuple[int, int]:
    """Return two seeds, the first of 31 bits for environments; different numbers give different seeds."""
    first, second = np.random.SeedSequence(key).generate_state(2)
    return int(first // 2), int(second)
