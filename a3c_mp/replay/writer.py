"""An actor's end of the replay."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from a3c_mp.processes.slots import Spec
from a3c_mp.replay.nstep import NStep, nstep_spec
from a3c_mp.replay.shards import Shards

MIN_PRIORITY = 1e-6
"""what is added to every |TD error|, so that each transition can be drawn (Schaul et al. 2016, section 3.3)"""


def carried_spec(num_envs: int, n_step: int) -> Spec:
    """Shapes and dtypes of `Writer.fields`."""
    return {**nstep_spec(num_envs, n_step), "writer_t": ((num_envs,), torch.int64)}


class Writer:
    """Appends the steps of B environments to a shard, and works out priorities from values the actor has already.

    A writer waits for nobody and can be killed at any instant: what it has not committed is seen by nobody, and
    the next writer of the shard goes on behind it. Environments must stand at an episode's start when a writer is made,
    or be rebuilt to where `restored` was taken.

    Args:
        shards: the memory.
        shard: number of the shard, the actor's own.
        n_step: rewards in a return (n).
        gamma: discount for each agent step.
        restored: `fields()` of the predecessor, whose incomplete transitions this one completes; else they are dropped.
    """

    def __init__(
        self, shards: Shards, shard: int, n_step: int, gamma: float, restored: Mapping[str, np.ndarray] | None = None
    ):
        lanes = shards.lanes(shard)
        self.rows, self.stack = shards.rows, shards.stack
        self.frame, self.action, self.episode_step = shards.frame[lanes], shards.action[lanes], shards.step[lanes]
        self.reward, self.discount, self.bootstrap_offset = (
            shards.reward[lanes],
            shards.discount[lanes],
            shards.bootstrap_offset[lanes],
        )
        self.priority = shards.priority[lanes]
        self.written, self.committed, self.writable_until = (
            shards.written[lanes],
            shards.committed[lanes],
            shards.writable_until[lanes],
        )

        self.nstep = NStep(shards.num_envs, n_step, gamma)
        self.env = np.arange(shards.num_envs)
        self.row = self.written.copy()  # [B] where the next row of each lane goes
        self.t = np.zeros_like(self.row)  # [B] steps since the episode's start
        if restored:
            self.nstep.restore(restored)
            self.t = restored["writer_t"].copy()
            return
        for env in self.env:  # transitions that a killed writer had begun, and which will never be complete
            self.priority[env, np.arange(self.committed[env], self.written[env]) % self.rows] = 0.0

    def fields(self) -> dict[str, np.ndarray]:
        """What a writer needs that goes on from here, besides what the shard holds."""
        return {**self.nstep.fields(), "writer_t": self.t}

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
        `value` of a later call, so it is committed n calls later, or when its episode ends.

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
        cut = terminated if life_lost is None else terminated | life_lost
        bootstrapped = truncated & ~terminated
        self._check(obs, bootstrapped)
        row = self.row.copy()
        self._append(self.env, obs, action)
        if bootstrapped.any():
            assert final_obs is not None, "an episode was truncated: its final observation is missing"
            assert final_value is not None, "an episode was truncated: the value of its final observation is missing"
            ended = np.flatnonzero(bootstrapped)
            self._append(ended, final_obs[ended], None)
        self.written[:] = self.row

        q, value = _where_finite(obs, q), _where_finite(obs, value)
        if final_obs is not None and final_value is not None:
            final_value = _where_finite(final_obs, final_value)
        done = self.nstep.step(reward, cut, bootstrapped, q, value, final_value)
        at = done.env, (row[done.env] - done.age) % self.rows
        self.reward[at], self.discount[at], self.bootstrap_offset[at] = (
            done.reward,
            done.discount,
            done.bootstrap_offset,
        )
        self.priority[at] = np.abs(done.td_error) + MIN_PRIORITY
        self.committed[:] = self.row - self.nstep.waiting
        self.t[terminated | truncated] = 0

    def _check(self, obs: np.ndarray, bootstrapped: np.ndarray) -> None:
        if (self.row + 1 + bootstrapped > self.writable_until).any():
            raise RuntimeError(
                f"no room in the replay: rows {self.row}, limits {self.writable_until}; make_room before"
            )
        if self.stack > 1 and not self.t.all() and obs[self.t == 0, :-1].any():
            raise ValueError(f"an episode must begin with {self.stack - 1} frames of zeros before its first")

    def _append(self, env: np.ndarray, obs: np.ndarray, action: np.ndarray | None) -> None:
        """One row to the lanes of `env`; without an action it is a final observation, where nothing begins."""
        at = env, self.row[env] % self.rows
        self.frame[at] = obs[:, -1] if self.stack > 1 else obs
        self.episode_step[at] = self.t[env]
        if action is None:
            self.priority[at] = 0.0
        else:
            self.action[at] = action
        self.row[env] += 1
        self.t[env] += 1


def _where_finite(obs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values [B], NaN where an observation is not finite: nothing that begins or ends there will be drawn."""
    if obs.dtype.kind != "f" or np.isfinite(obs).all():
        return values
    return np.where(np.isfinite(obs).all(axis=tuple(range(1, obs.ndim))), values, np.nan)
