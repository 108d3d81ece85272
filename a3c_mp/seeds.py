"""Seeds of everything random in a run, all derived from `--seed`."""

import numpy as np

LEARNER, EVALUATOR, FIRST, MEMBER, FITNESS, WEIGHTS, EVOLUTION, CONFIRMATION, SHARD, DRAWS, BURSTS, NOISE = range(
    2**32 - 1, 2**32 - 13, -1
)
"""Last number of the key of seeds; an actor's is its restart count. In populations: first genomes, a member's
generation, games that decide fitness, first weights, a generation's births, games that confirm a fitness. On Ray: a
replay shard, the trainer's choice of shards. In collectors: bursts of exploration, noise that is held.
"""


def derive_seeds(*key: int) -> tuple[int, int]:
    """Return two seeds, the first of 31 bits for environments; different numbers give different seeds."""
    first, second = np.random.SeedSequence(key).generate_state(2)
    return int(first // 2), int(second)
