"""Seeds of everything random in a run, all derived from `--seed`."""

from __future__ import annotations

import numpy as np

LEARNER = 2**32 - 1
"""stands last among the numbers that a learner's seeds are derived from, where an actor's have its restart count"""


def derive_seeds(*entropy: int) -> tuple[int, int]:
    """Two seeds, the first of 31 bits as environments take them; others for other `entropy` of the same length."""
    first, second = np.random.SeedSequence(entropy).generate_state(2)
    return int(first // 2), int(second)
