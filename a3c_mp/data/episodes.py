"""Episode statistics: returns and lengths of finished games and of games in progress."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Episode(NamedTuple):
    """Return and length of a finished episode: the whole game, even if a lost life is terminal for the learner."""

    episode_return: float  # sum of raw rewards
    length: int  # agent steps
    env: int = 0  # number of the environment inside its actor


def episodes_at(done: Tensor, episode_return: Tensor, episode_length: Tensor) -> list[Episode]:
    """The episodes that ended where `done`, in order of time; all arguments are [T, B]."""
    t, b = torch.nonzero(done, as_tuple=True)
    fields = (episode_return[t, b].tolist(), episode_length[t, b].tolist(), b.tolist())
    return [Episode(*values) for values in zip(*fields, strict=True)]


class EpisodeStats:
    """Running raw return float64 [N] and length int32 [N] of the episode in each of N environments.

    `steps_since_reward` int32 [N] counts the steps since the last reward other than 0, across episodes.
    """

    def __init__(self, num_envs: int):
        self.returns = np.zeros(num_envs)  # float32 loses small rewards that follow large ones
        self.lengths = np.zeros(num_envs, dtype=np.int32)
        self.done = np.zeros(num_envs, dtype=np.bool_)
        self.steps_since_reward = np.zeros(num_envs, dtype=np.int32)

    def step(self, reward: np.ndarray, done: np.ndarray) -> None:
        """Add one step: rewards [N] and `done` bool [N]. The values of a finished episode stay until the next step."""
        self.returns[self.done] = 0.0
        self.lengths[self.done] = 0
        self.returns += reward
        self.lengths += 1
        self.done = done
        self.steps_since_reward = np.where(reward == 0, self.steps_since_reward + 1, 0).astype(np.int32)

    def totals(self) -> dict[str, np.ndarray]:
        """Return and length of each episode so far, [N] each."""
        return {"episode_return": self.returns, "episode_length": self.lengths}

    def fields(self) -> dict[str, np.ndarray]:
        """All arrays, [N] each, for `restore`."""
        return {**self.totals(), "episode_done": self.done, "steps_since_reward": self.steps_since_reward}

    def restore(self, fields: Mapping[str, np.ndarray]) -> None:
        for name, array in self.fields().items():
            array[...] = fields[name]
