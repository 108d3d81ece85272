"""Environments with a fault that keeps a run from learning: for `bench/signs.py`, as `bench.hopeless:Name`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import TransformReward


class Blind(CartPoleEnv):
    """Its observations are all the same."""

    def reset(self, **kwargs: Any) -> Any:
        _, info = super().reset(**kwargs)
        return np.zeros(4, np.float32), info

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return np.zeros(4, np.float32), *rest


class Endless(PendulumEnv):
    """A game that has no end, as no time limit is registered."""


class Luck(CartPoleEnv):
    """Games of 50 steps whose rewards are drawn, whatever is done."""

    def reset(self, **kwargs: Any) -> Any:
        self.t = 0
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.t += 1
        obs, *_ = super().step(action)
        return np.clip(obs, -10, 10), float(self.np_random.normal()), False, self.t == 50, {}


class Corridor(gymnasium.Env):
    """Only its end is rewarded, 40 steps to the right, which steps drawn one by one do not reach in 100."""

    observation_space, action_space = Box(-2.5, 2.5, (1,), np.float32), Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.place += 1 if action else -1
        done = self.place == 40
        return self._obs(), float(done), done, False, {}

    def _obs(self) -> np.ndarray:
        return np.array([self.place / 40], np.float32)


def scaled(factor: float = 1.0) -> gymnasium.Env:
    """CartPole with all rewards multiplied."""
    return TransformReward(CartPoleEnv(), lambda reward: factor * float(reward))


for name, entry_point, longest in (
    ("Blind", Blind, 500), ("Endless", Endless, None), ("Luck", Luck, None), ("Corridor", Corridor, 100),
    ("Scaled", scaled, 500),
):  # fmt: skip
    gymnasium.register(f"{name}-v0", entry_point, max_episode_steps=longest)  # type: ignore[arg-type]
