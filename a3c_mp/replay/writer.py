"""An actor's end of the replay."""

from __future__ import annotations

import numpy as np

from a3c_mp.replay.nstep import NStep
from a3c_mp.replay.shards import Shards

MIN_PRIORITY = 1e-6
"""what is added to every |TD error|, so that each transition can be drawn (Schaul et al. 2016, section 3.3)"""


class Writer:
    """Appends the steps of B environments to a shard, and works out priorities from values the actor has already.

    A writer waits for nobody and can be killed at any instant: what it has not made ready is seen by nobody, and the
    next writer of the shard goes on behind it. Environments must stand at an episode's start when a writer is made.

    Args:
        shards: the memory.
        shard: number of the shard, the actor's own.
        n_step: rewards in a return (n).
        gamma: discount for each agent step.
    """

    def __init__(self, shards: Shards, shard: int, n_step: int, gamma: float):
        raise NotImplementedError

    def step(
        self,
        obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        q: np.ndarray,
        value: np.ndarray,
        *,
        final_obs: np.ndarray | None = None,
        final_value: np.ndarray | None = None,
        life_lost: np.ndarray | None = None,
    ) -> None:
        """Append one step of every environment: `action`, chosen at `obs`, earned `reward`.

        Called once for each step of the vector environment, after it. A transition's n-step return bootstraps from the
        `value` of a later call, so it is ready n calls later, or when its episode ends.

        Args:
            obs: [B, *obs_shape], what the action was chosen at (not what came after).
            action: int64 [B], or float32 [B, A].
            reward: [B]; clip before, if rewards are learned from clipped.
            terminated, truncated: bool [B]; where both hold, terminated counts.
            q: [B], Q(obs, action).
            value: [B], the bootstrap value of `obs`: max_a Q(obs, a), or Q(obs, mu(obs)).
            final_obs: [B, *obs_shape], needed where truncated, ignored elsewhere.
            final_value: [B], bootstrap value of `final_obs`, needed where truncated.
            life_lost: bool [B]; ends the return as a termination does, while the episode and its frames go on.

        Raises:
            RuntimeError: there is no room: the learner has not retired what this row would overwrite.
            ValueError: an episode's first observation is no stack padded with zeros.
        """
        raise NotImplementedError
