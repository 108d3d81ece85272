"""The actor's end of the replay: appending transitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from a3c_mp.processes.slots import Spec
from a3c_mp.replay.nstep import NStep, Transitions, nstep_spec
from a3c_mp.replay.shards import Shards

MIN_PRIORITY = 1e-6
"""added to every |TD error|, so that each transition can be drawn (Schaul et al. 2016, section 3.3)"""


class EnvStep(NamedTuple):
    """One step of B environments, for `Writer.step`; `q` and `value` come from the actor's net."""

    obs: np.ndarray  # [B, *obs_shape], which `action` was chosen at
    action: np.ndarray  # int64 [B], or float32 [B, A]
    reward: np.ndarray  # [B], already clipped if learning clips rewards
    terminated: np.ndarray  # bool [B]
    truncated: np.ndarray  # bool [B]; where both hold, terminated counts
    q: np.ndarray  # [B], Q(obs, action)
    value: np.ndarray  # [B], bootstrap value of `obs`: max_a Q(obs, a), or Q(obs, mu(obs))
    final_obs: np.ndarray | None = None  # [B, *obs_shape], needed where truncated, ignored elsewhere
    final_value: np.ndarray | None = None  # [B], bootstrap value of `final_obs`
    life_lost: np.ndarray | None = None  # bool [B]; ends the return as a termination does, but not the episode
    mask: np.ndarray | None = None  # bool [B, A], actions allowed at `obs`, if the environment has masks
    final_mask: np.ndarray | None = None  # bool [B, A], those allowed at `final_obs`


def writer_state_spec(num_envs: int, n_step: int) -> Spec:
    """Shapes and dtypes of `Writer.fields`."""
    return {**nstep_spec(num_envs, n_step), "writer_t": ((num_envs,), torch.int64)}


class Writer:
    """An actor's writing end of the replay: n-step transitions with first priorities, appended to the actor's shard.

    A writer never waits and can be killed at any instant: the learner reads only what is committed, and the next writer
    of the shard continues behind it. Environments must be at an episode's start when a writer is made, or be rebuilt
    to where `restored` was taken.

    Args:
        shards: the memory.
        shard: number of the actor's shard.
        n_step: rewards in a return (n).
        gamma: discount factor.
        restored: `fields()` of a predecessor whose incomplete transitions this writer completes; else they are dropped.
    """

    def __init__(
        self, shards: Shards, shard: int, n_step: int, gamma: float, restored: Mapping[str, np.ndarray] | None = None
    ):
        self.rows, self.stack = shards.rows, shards.stack
        self.arrays = shards.arrays(shard)  # rows and counters of the shard's lanes, by name
        self.nstep = NStep(shards.num_envs, n_step, gamma)
        self.env = np.arange(shards.num_envs)
        self.row = self.arrays["written"].copy()  # [B] where the next row of each lane goes
        self.t = np.zeros_like(self.row)  # [B] steps since the episode's start
        if restored:
            self.nstep.restore(restored)
            self.t = restored["writer_t"].copy()
            return
        for env in self.env:  # transitions that a killed writer left incomplete
            incomplete = np.arange(self.arrays["committed"][env], self.arrays["written"][env]) % self.rows
            self.arrays["priority"][env, incomplete] = 0.0

    def fields(self) -> dict[str, np.ndarray]:
        """State that a successor needs to continue from here, besides the contents of the shard."""
        return {**self.nstep.fields(), "writer_t": self.t}

    def step(self, step: EnvStep) -> None:
        """Append one step of every environment.

        Call it once after each step of the vector environment. A transition's n-step return bootstraps from the `value`
        of a later call, so it is committed n calls later, or when its episode ends.

        Raises:
            RuntimeError: no room: the learner has not retired the rows that would be overwritten.
            ValueError: an episode's first observation is not a stack padded with zeros.
        """
        cut = step.terminated if step.life_lost is None else step.terminated | step.life_lost
        bootstrapped = step.truncated & ~step.terminated
        self._check(step.obs, bootstrapped)
        row = self.row.copy()
        self._append(self.env, step.obs, step.action, step.mask)
        if bootstrapped.any():
            assert step.final_obs is not None, "an episode was truncated: its final observation is missing"
            assert step.final_value is not None, (
                "an episode was truncated: the value of its final observation is missing"
            )
            ended = np.flatnonzero(bootstrapped)
            final_mask = None if step.final_mask is None else step.final_mask[ended]
            self._append(ended, step.final_obs[ended], None, final_mask)
        self.arrays["written"][:] = self.row

        q, value, final_value = _where_finite(step.obs, step.q), _where_finite(step.obs, step.value), step.final_value
        if step.final_obs is not None and final_value is not None:
            final_value = _where_finite(step.final_obs, final_value)
        self._commit(row, self.nstep.step(step.reward, cut, bootstrapped, q, value, final_value))
        self.t[step.terminated | step.truncated] = 0

    def _commit(self, row: np.ndarray, done: Transitions) -> None:
        """Write the transitions that a step at rows [B] has completed, then raise `committed`."""
        at = done.env, (row[done.env] - done.age) % self.rows
        self.arrays["reward"][at] = done.reward
        self.arrays["discount"][at] = done.discount
        self.arrays["bootstrap_offset"][at] = done.bootstrap_offset
        self.arrays["priority"][at] = np.abs(done.td_error) + MIN_PRIORITY
        self.arrays["committed"][:] = self.row - self.nstep.waiting

    def _check(self, obs: np.ndarray, bootstrapped: np.ndarray) -> None:
        writable_until = self.arrays["writable_until"]
        if (self.row + 1 + bootstrapped > writable_until).any():
            raise RuntimeError(
                f"no room in the replay: rows {self.row}, writable until {writable_until}; call make_room"
            )
        if self.stack > 1 and not self.t.all() and obs[self.t == 0, :-1].any():
            raise ValueError(f"an episode must begin with {self.stack - 1} frames of zeros before its first")

    def _append(self, env: np.ndarray, obs: np.ndarray, action: np.ndarray | None, mask: np.ndarray | None) -> None:
        """One row to the lanes of `env`; without an action it is a final observation, where no transition begins."""
        at = env, self.row[env] % self.rows
        self.arrays["frame"][at] = obs[:, -1] if self.stack > 1 else obs
        self.arrays["step"][at] = self.t[env]
        if mask is not None:
            self.arrays["mask"][at] = mask
        if action is None:
            self.arrays["priority"][at] = 0.0
        else:
            self.arrays["action"][at] = action
        self.row[env] += 1
        self.t[env] += 1


def _where_finite(obs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values [B], NaN where an observation is not finite: such transitions are never drawn."""
    if obs.dtype.kind != "f" or np.isfinite(obs).all():
        return values
    return np.where(np.isfinite(obs).all(axis=tuple(range(1, obs.ndim))), values, np.nan)
