"""An environment whose every number says where it comes from. Loaded as `counting_env:Count-v0`."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

EPISODE_LENGTH = 7


class CountEnv(gymnasium.Env):
    """The observation is (episode, step); the reward of step t is t; every third episode is truncated."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3)

    def __init__(self):
        self.episode = -1
        self.t = 0

    def _obs(self):
        return np.array([self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        reward = float(self.t)
        self.t += 1
        done = self.t == EPISODE_LENGTH
        truncated = done and self.episode % 3 == 2
        return self._obs(), reward, done and not truncated, truncated, {}


class CrashEnv(CountEnv):
    """Raises in its 50th step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 50:
            raise ArithmeticError("the emulator caught fire")
        return super().step(action)


class NanEnv(CountEnv):
    """Rewards with NaN from its 50th step on."""

    steps = 0

    def step(self, action):
        self.steps += 1
        obs, reward, *rest = super().step(action)
        return obs, reward if self.steps < 50 else float("nan"), *rest


class BrokenEnv(CountEnv):
    """Can be made, but not reset."""

    def reset(self, *, seed=None, options=None):
        raise ArithmeticError("no coin in the slot")


gymnasium.register("Count-v0", entry_point=CountEnv)
gymnasium.register("Crash-v0", entry_point=CrashEnv)
gymnasium.register("Broken-v0", entry_point=BrokenEnv)
gymnasium.register("Nan-v0", entry_point=NanEnv)
