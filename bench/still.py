"""An environment that sleeps and a net that costs nothing: what transport costs, and soak tests beside other work.

    python bench/throughput.py --chapter ray_impala --env-id bench.still:Still-v0 --net bench.still:cheap_net

A learner's time for a step is then what it needs besides gradients, and its inverse the most that one learner can take.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from a3c_mp.nets.distributions import num_outputs

WEIGHTS = 678_000
"""parameters of the net that the chapters have on Pong"""


class Still(gymnasium.Env):
    """An image that never changes, of Atari's size: one frame, as chapter 7 sends of a step, or more."""

    def __init__(self, frames: int = 1, seconds: float = 0.005):
        self.observation_space, self.action_space = Box(0, 255, (frames, 84, 84), np.uint8), Discrete(6)
        self.seconds, self.obs = seconds, np.zeros((frames, 84, 84), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.obs, {}

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return self.obs, 0.0, False, False, {}


class CheapNet(nn.Module):
    """A linear layer on one pixel, and parameters that only have a size, as they count on a network."""

    def __init__(self, outputs: int):
        super().__init__()
        self.layer, self.size = nn.Linear(1, outputs + 1), nn.Parameter(torch.zeros(WEIGHTS))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layer(obs[:, 0, 0, :1])
        return found[:, 1:], found[:, 0]


def cheap_net(obs_space: Box, action_space: Discrete) -> nn.Module:
    return CheapNet(num_outputs(action_space))


gymnasium.register("Still-v0", f"{__name__}:Still", max_episode_steps=1000)
