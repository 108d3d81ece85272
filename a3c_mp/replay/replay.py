"""The learner's end of the replay: sampling in proportion to priority from all shards at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from a3c_mp.replay.shards import Shards


class Batch(NamedTuple):
    """N transitions, on the CPU. In the memory of a `Prefetch` they are valid until the next batch is asked for."""

    obs: Tensor  # [N, *obs_shape] uint8 for images, float32 otherwise
    action: Tensor  # [N] int64, or [N, A] float32
    reward: Tensor  # [N] float32, sum of the m <= n discounted rewards
    discount: Tensor  # [N] float32, gamma^m; 0 where the return ended by termination or a lost life
    next_obs: Tensor  # [N, *obs_shape], m steps later; where discount is 0 it is `obs` again and means nothing
    probability: Tensor  # [N] float64, P(i) = p_i^alpha / sum over all shards, when it was drawn
    ids: Tensor  # [N] int64, for `Replay.update`


def importance_weights(probability: Tensor, importance_exponent: float) -> Tensor:
    """(N P(i))^-beta, divided by the largest of the batch (Schaul et al. 2016, section 3.4); N, the size, cancels.

    Args:
        probability: [N] float64, P(i).
        importance_exponent: beta, 1 corrects in full.

    Returns:
        [N] float32 in (0, 1].
    """
    raise NotImplementedError


class Replay:
    """All shards as one prioritised replay. The learner owns the priorities that count; actors propose the first ones.

    Every method may be called while writers write, and while another thread of this process is in `sample`.

    Args:
        shards: the memory, shared with the writers.
        priority_exponent: alpha; 0 draws uniformly.
        seed: of the draws.
    """

    size: int  # transitions that can be drawn
    dropped: int  # priorities that came too late, since the start

    def __init__(self, shards: Shards, priority_exponent: float, seed: int):
        raise NotImplementedError

    def announce(self, shard: int) -> int:
        """Take in what the shard's writer has made ready since the last call.

        Returns:
            the number of new transitions (at a deterministic run's call the writer must be idle).

        Raises:
            ValueError: a priority is no finite number: the actor's values are not.
        """
        raise NotImplementedError

    def make_room(self, shard: int, rows: int) -> int:
        """Retire the oldest transitions, so that the writer can append `rows` rows to each lane beyond what it has now.

        A step of the environments appends a row, two if it is truncated: `rows` must be 2 K for each block of K steps
        that the writer has leave to write. Call it before giving leave, and again before a writer is replaced (what the
        dead one had written of its blocks comes on top).

        Returns:
            the number of transitions retired.

        Raises:
            ValueError: lanes are too short to have so much room and still keep anything.
        """
        raise NotImplementedError

    def allocate(self, batch_size: int, pin: bool = False) -> Batch:
        """Memory for `sample` to fill, page-locked if `pin`."""
        raise NotImplementedError

    def sample(self, batch_size: int, out: Batch | None = None) -> Batch:
        """Draw transitions in proportion to p^alpha, one from each of `batch_size` equal parts of the sum over all shards.

        Args:
            batch_size: N.
            out: from `allocate`, to be filled instead of new memory.

        Raises:
            ValueError: the replay is empty.
        """
        raise NotImplementedError

    def update(self, ids: Tensor, priorities: Tensor | np.ndarray) -> int:
        """Set the priorities of sampled transitions: absolute TD errors, without exponent.

        Those that have been retired meanwhile are left alone, although a newer transition may stand in their place.

        Returns:
            how many were.

        Raises:
            ValueError: a priority is no finite number of 0 or more.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain values for `torch.load(weights_only=True)`. Views of live memory: save at once.

        No room may be made while it is being saved.
        """
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; before the writers start.

        Raises:
            ValueError: it is of a replay of other sizes.
        """
        raise NotImplementedError
