"""CartPole whose steps take 10 ms without using a core: for soak tests beside other work.

PYTHONPATH=bench python bench/soak.py --chapter ray_impala --env-id slow_cartpole:SlowCartPole-v0
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

STEP_SECONDS = 0.01


class SlowCartPole(CartPoleEnv):
    """CartPole that sleeps."""

    def step(self, action: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return super().step(action)


gymnasium.register("SlowCartPole-v0", f"{__name__}:SlowCartPole", max_episode_steps=500)
