"""Environments on the scales that users bring, for `bench/scales.py`, as `bench.units:Name`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import RescaleAction, TransformObservation, TransformReward


class Cue(gymnasium.Env):
    """In 3% of states, none of the first 20, a number of 100 to 400 says which of four actions earns 1."""

    observation_space, action_space = Box(-np.inf, np.inf, (2,), np.float32), Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        reward = float(action == self.cue)
        self.t += 1
        return self._obs(), reward, False, self.t == 200, {}

    def _obs(self) -> np.ndarray:
        self.cue = int(self.np_random.integers(4)) if self.t > 20 and self.np_random.random() < 0.03 else -1
        return np.array([100 * (self.cue + 1), self.np_random.normal()], np.float32)


class Images(gymnasium.Env):
    """Base of environments with one grey picture of 40 x 40 pixels and three actions."""

    observation_space, action_space = Box(0, 255, (1, 40, 40), np.uint8), Discrete(3)


class Catch(Images):
    """A ball falls through 10 rows; the paddle below moves by a column; only the last step has a reward, +-size."""

    def __init__(self, size: float = 1.0):
        self.size = size

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.ball, self.paddle, self.row = int(self.np_random.integers(10)), 5, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.paddle = min(max(self.paddle + int(action) - 1, 0), 9)
        self.row += 1
        done = self.row == 9
        reward = (self.size if self.ball == self.paddle else -self.size) if done else 0.0
        return self._obs(), reward, done, False, {}

    def _obs(self) -> np.ndarray:
        cells = np.zeros((10, 10), np.uint8)
        cells[self.row, self.ball] = cells[9, self.paddle] = 255
        return cells.repeat(4, 0).repeat(4, 1)[None]


class Phases(Images):
    """The grey of the picture says which action earns 1; in the last two steps of a game, the picture is white."""

    def __init__(self, length: int = 32):
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        reward = float(action == self.cue)
        self.t += 1
        return self._obs(), reward, self.t == self.length, False, {}

    def _obs(self) -> np.ndarray:
        self.cue = int(self.np_random.integers(3)) if self.t < self.length - 2 else -1
        return np.full((1, 40, 40), 60 * self.cue if self.cue >= 0 else 255, np.uint8)


def cartpole(rewards: float = 1.0, observations: float = 1.0) -> gymnasium.Env:
    """CartPole in other units."""
    env, space = CartPoleEnv(), Box(-np.inf, np.inf, (4,), np.float32)
    seen = TransformObservation(env, lambda obs: np.float32(observations) * obs, space)
    return TransformReward(seen, lambda reward: rewards * float(reward))


def pendulum(low: float = -2.0, high: float = 2.0) -> gymnasium.Env:
    """Pendulum with other bounds of its action."""
    return RescaleAction(PendulumEnv(), np.float32(low), np.float32(high))


for name, entry_point, longest in (
    ("Cue", Cue, None), ("Catch", Catch, None), ("Phases", Phases, None), ("CartPoleUnits", cartpole, 500),
    ("PendulumUnits", pendulum, 200),
):  # fmt: skip
    gymnasium.register(f"{name}-v0", entry_point, max_episode_steps=longest)  # type: ignore[arg-type]
