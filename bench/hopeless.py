"""CartPole and Pendulum with a fault that keeps a run from learning: for `bench/signs.py`, as `bench.hopeless:Name`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
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


class Unrewarded(CartPoleEnv):
    """Only a game of 500 steps is rewarded, which chance never reaches."""

    def reset(self, **kwargs: Any) -> Any:
        self.t = 0
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.t += 1
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(self.t == 500), terminated, truncated, info


def scaled(factor: float = 1.0) -> gymnasium.Env:
    """CartPole with all rewards multiplied."""
    return TransformReward(CartPoleEnv(), lambda reward: factor * float(reward))


for name, entry_point, longest in (
    ("Blind", Blind, 500), ("Endless", Endless, None), ("Luck", Luck, None), ("Unrewarded", Unrewarded, 500),
    ("Scaled", scaled, 500),
):  # fmt: skip
    gymnasium.register(f"{name}-v0", entry_point, max_episode_steps=longest)
