"""n-step returns and first TD errors from a stream of steps, for B environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from a3c_mp.processes.slots import Spec


class Transitions(NamedTuple):
    """M n-step transitions that one step has completed, in any order."""

    env: np.ndarray  # [M] int64, which of the B environments
    age: np.ndarray  # [M] int64, how many steps ago it began; 0: with this step
    reward: np.ndarray  # [M] float64, sum of gamma^i r_{t+i}, i < m
    discount: np.ndarray  # [M] float64, gamma^m, or 0 where the return was cut
    bootstrap_offset: np.ndarray  # [M] int64, m, steps to the observation it bootstraps from; 0 where discount is 0
    td_error: np.ndarray  # [M] float64, reward + discount * bootstrap value - q


def nstep_spec(num_envs: int, n: int) -> Spec:
    """Shapes and dtypes of `NStep.fields`."""
    numbers = ((n, num_envs), torch.float64)
    return {
        "nstep_returns": numbers,
        "nstep_q": numbers,
        "nstep_pending": ((n, num_envs), torch.bool),
        "nstep_time": ((1,), torch.int64),
    }


class NStep:
    """n-step returns of B environments, accumulated step by step.

    A transition that begins at step t is complete with the value of step t + n, or earlier if the return ends:

        R = r_t + gamma r_{t+1} + ... + gamma^{m-1} r_{t+m-1},    td_error = R + gamma^m V(s_{t+m}) - Q(s_t, a_t)

    with m = n, or fewer up to the episode's end (Horgan et al. 2018, equation 2 and algorithm 1). A termination (and a
    lost life) cuts the bootstrap, a truncation bootstraps from the final observation.

    Args:
        num_envs: B.
        n: rewards in a return.
        gamma: discount for each step.
    """

    def __init__(self, num_envs: int, n: int, gamma: float):
        if n < 1:
            raise ValueError(f"n_step must be 1 or more, not {n}")
        self.n = n
        self.time = 0  # steps so far; step t lies in place t % n
        self.returns = np.zeros((n, num_envs))  # discounted sums of the rewards so far
        self.q = np.zeros((n, num_envs))
        self.pending = np.zeros((n, num_envs), np.bool_)
        self.powers = gamma ** np.arange(n)
        self.discounts = np.array([0.0, *(gamma ** np.arange(1, n + 1))])  # of a transition over m steps

    def fields(self) -> dict[str, np.ndarray]:
        """State that `step` changes, by name, for `restore`."""
        return {"nstep_returns": self.returns, "nstep_q": self.q, "nstep_pending": self.pending,
                "nstep_time": np.array([self.time % self.n])}  # fmt: skip

    def restore(self, fields: Mapping[str, np.ndarray]) -> None:
        """Continue from `fields`."""
        names = ("nstep_returns", "nstep_q", "nstep_pending")
        self.returns, self.q, self.pending = (fields[name].copy() for name in names)
        self.time = int(fields["nstep_time"][0])

    @property
    def waiting(self) -> np.ndarray:
        """[B] int64, number of incomplete transitions of each environment."""
        return self.pending.sum(axis=0)

    def step(
        self,
        reward: np.ndarray,
        cut: np.ndarray,
        truncated: np.ndarray,
        q: np.ndarray,
        value: np.ndarray,
        final_value: np.ndarray | None = None,
    ) -> Transitions:
        """Take one step of every environment; all arguments are [B]. Returns the transitions that it completes.

        Args:
            reward: r_t.
            cut: bool, the return ends here without bootstrap.
            truncated: bool, the episode ends here with bootstrap from `final_value`; `cut` has precedence.
            q: Q(s_t, a_t).
            value: V(s_t).
            final_value: V(s_{t+1}), needed where truncated.
        """
        place = self.time % self.n
        full = np.flatnonzero(self.pending[place])
        found = self._complete(np.full_like(full, place), full, np.full_like(full, self.n), self.n, value)

        self.returns[place], self.q[place], self.pending[place] = 0.0, q, True
        ages = (self.time - np.arange(self.n)) % self.n  # of the steps in places 0, 1, ...
        self.returns += self.powers[ages, None] * reward

        if (done := cut | truncated).any():
            places, env = np.nonzero(self.pending & done)
            age = ages[places]
            ended = self._complete(places, env, np.where(cut[env], 0, age + 1), age, final_value)
            found = Transitions(*map(np.concatenate, zip(found, ended, strict=True)))
            self.pending[:, done] = False
        self.time += 1
        return found

    def _complete(
        self,
        place: np.ndarray,
        env: np.ndarray,
        bootstrap_offset: np.ndarray,
        age: int | np.ndarray,
        values: np.ndarray | None,
    ) -> Transitions:
        """Transitions that begin in (place, env) and bootstrap from `values[env]`, or end there if the offset is 0."""
        reward, discount = self.returns[place, env], self.discounts[bootstrap_offset]
        bootstrap = 0.0 if values is None else np.where(bootstrap_offset > 0, values[env], 0.0)
        td_error = reward + discount * bootstrap - self.q[place, env]
        return Transitions(env, env * 0 + age, reward, discount, bootstrap_offset, td_error)
