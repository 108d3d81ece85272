"""Seeds of everything random in a run, all derived from `--seed`."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

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


def seed_global_generators(seed: int) -> None:
    """Seed the generators that all code of a process shares; some environments draw from them instead of their own."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restore these generators at the end: a run whose environments draw from them goes on in the same process."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
