"""The actor's end of the replay: n-step transitions with first priorities, appended to the actor's shard."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from a3c_mp.processes.memory_order import publish_counters, read_counters
from a3c_mp.processes.slots import Spec
from a3c_mp.replay.shards import Shards

MIN_PRIORITY = 1e-6  # added to every |TD error|, so that each transition can be drawn (Schaul et al. 2016, section 3.3)


class EnvStep(NamedTuple):
    """One step of B environments; `q` and `value` come from the actor's net."""

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
    """Shapes and dtypes of `Writer.fields`: what began at step t lies in place t % n of those of shape [n, B]."""
    return {
        "nstep_returns": ((n_step, num_envs), torch.float64),  # discounted sums of the rewards so far
        "nstep_q": ((n_step, num_envs), torch.float64),  # Q(s, a)
        "nstep_pending": ((n_step, num_envs), torch.bool),  # whether a transition is incomplete
        "nstep_time": ((1,), torch.int64),  # steps so far, modulo n
        "writer_t": ((num_envs,), torch.int64),  # steps since the episode's start
    }


class Writer:
    """Appends transitions to a shard, each with its first priority.

    A transition that begins at step t is complete with the value of step t + n, or earlier if the return ends:

        R = r_t + gamma r_{t+1} + ... + gamma^{m-1} r_{t+m-1},    TD error = R + gamma^m V(s_{t+m}) - Q(s_t, a_t)

    with m = n, or fewer up to the episode's end (Horgan et al. 2018, equation 2 and algorithm 1). A termination (and a
    lost life) cuts the bootstrap, a truncation bootstraps from the final observation.

    A writer never waits and can be killed at any instant: the learner reads only what is committed, and the next writer
    of the shard continues behind it. Incomplete transitions of a predecessor are dropped, unless `restored` has its
    `fields()`: then the environments have to be rebuilt to where these were taken.
    """

    def __init__(
        self, shards: Shards, shard: int, n_step: int, gamma: float, restored: Mapping[str, np.ndarray] | None = None
    ):
        self.rows, self.stack, self.n = shards.rows, shards.stack, n_step
        self.arrays = shards.arrays(shard)  # rows and counters of the shard's lanes, by name
        self.env = np.arange(shards.num_envs)
        self.row = self.arrays["written"].copy()  # [B] where the next row of each lane goes
        self.largest_error = np.inf  # finite TD errors count as at most this in priorities
        self.reward_scale = 1.0  # of the net that gives values and Q; rewards in the replay are as they come
        self.powers = gamma ** np.arange(n_step)
        self.discounts = np.array([0.0, *(gamma ** np.arange(1, n_step + 1))])  # of a transition over m steps
        if not restored:
            shards.drop_incomplete(shard)
            spec = writer_state_spec(shards.num_envs, n_step).items()
            restored = {name: torch.zeros(shape, dtype=dtype).numpy() for name, (shape, dtype) in spec}
        names = "nstep_returns", "nstep_q", "nstep_pending", "writer_t"
        self.returns, self.q, self.pending, self.t = (restored[name].copy() for name in names)
        self.time = int(restored["nstep_time"][0])

    def fields(self) -> dict[str, np.ndarray]:
        """State that a successor needs to continue from here, besides the contents of the shard."""
        numbers = {"nstep_returns": self.returns, "nstep_q": self.q, "nstep_pending": self.pending}
        return {**numbers, "nstep_time": np.array([self.time % self.n]), "writer_t": self.t}

    def step(self, step: EnvStep) -> None:
        """Append one step of every environment.

        A transition's n-step return bootstraps from the `value` of a later call, so it is committed n calls later, or
        when its episode ends. Raises RuntimeError if the learner has not made room.
        """
        cut = step.terminated if step.life_lost is None else step.terminated | step.life_lost
        truncated = step.truncated & ~step.terminated
        row, writable_until = self.row.copy(), read_counters(self.arrays["writable_until"])
        if (row + 1 + truncated > writable_until).any():
            raise RuntimeError(f"no room in the replay: rows {row}, writable until {writable_until}; call make_room")
        self._append(self.env, step.obs, step.action, step.mask)
        if truncated.any():
            assert step.final_obs is not None
            ended = np.flatnonzero(truncated)
            final_mask = None if step.final_mask is None else step.final_mask[ended]
            self._append(ended, step.final_obs[ended], None, final_mask)
        publish_counters(self.arrays["written"], self.row)
        self._add_to_returns(step, row, cut, cut | truncated)
        publish_counters(self.arrays["committed"], self.row - self.pending.sum(axis=0))
        self.t[step.terminated | step.truncated] = 0

    def _add_to_returns(self, step: EnvStep, row: np.ndarray, cut: np.ndarray, done: np.ndarray) -> None:
        """Write the transitions that a step at rows [B] completes: with `n` rewards, or because their return ends."""
        place = self.time % self.n
        full = np.flatnonzero(self.pending[place])
        self._complete(place, full, row, self.n, self.n, _where_finite(step.obs, step.value))
        self.returns[place], self.q[place], self.pending[place] = 0.0, _where_finite(step.obs, step.q), True
        ages = (self.time - np.arange(self.n)) % self.n  # steps since what lies in places 0, 1, ... began
        self.returns += self.powers[ages, None] * step.reward
        self.time += 1
        if done.any():
            places, env = np.nonzero(self.pending & done)
            age, values = ages[places], step.final_value
            if step.final_obs is not None and values is not None:
                values = _where_finite(step.final_obs, values)
            self._complete(places, env, row, age, np.where(cut[env], 0, age + 1), values)
            self.pending[:, done] = False

    def _complete(
        self, place: int | np.ndarray, env: np.ndarray, row: np.ndarray, age: int | np.ndarray,
        offset: int | np.ndarray, values: np.ndarray | None,
    ) -> None:  # fmt: skip
        """Write the transitions that lie in (place, env) and began `age` steps before the newest, which has rows [B].

        They bootstrap from `values[env]` after `offset` steps; where that is 0, the return was cut.
        """
        reward, discount = self.returns[place, env], self.discounts[offset]
        bootstrap = 0.0 if values is None else np.where(offset > 0, values[env], 0.0)
        error = np.abs(self.reward_scale * reward + discount * bootstrap - self.q[place, env])
        at = env, (row[env] - age) % self.rows
        self.arrays["reward"][at] = reward
        self.arrays["discount"][at] = discount
        self.arrays["bootstrap_offset"][at] = offset
        error[np.isfinite(error) & (error > self.largest_error)] = self.largest_error
        self.arrays["priority"][at] = error + MIN_PRIORITY

    def _append(self, env: np.ndarray, obs: np.ndarray, action: np.ndarray | None, mask: np.ndarray | None) -> None:
        """Append one row to the lanes of `env`; without an action it is a final observation: no transition begins."""
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
