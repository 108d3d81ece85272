"""Seeds of the environments in a vector, and resets with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import VectorEnv

SEEDS = 2**31
"""number of seeds; ALE's are an int32"""


def env_seed(seed: int, env: int, seedings: int = 0) -> int:
    """Seed of environment `env` after it was seeded `seedings` times; the first is `seed + env`."""
    if seedings == 0:
        return (seed + env) % SEEDS
    return int(np.random.SeedSequence((seed, env, seedings)).generate_state(1)[0]) % SEEDS


def reset_envs(env: VectorEnv, which: np.ndarray, seeds: list[int] | None) -> tuple[np.ndarray, dict[str, Any]]:
    """Reset the environments in `which`, bool [N], with a seed for each of all N, or without seeds."""
    options = None if which.all() else {"reset_mask": which}
    own: Any = seeds  # SyncVectorEnv takes a seed for each environment, Atari's for each that is reset
    if seeds is not None and isinstance(env.unwrapped, AtariVectorEnv):
        own = np.array(seeds)[which]
    return env.reset(seed=own, options=options)
