"""Vectorised environments: Atari on `ale_py`'s C++ vector environment, anything else on gymnasium's `SyncVectorEnv`.

Both reset an environment in the very step that ended its episode (`SAME_STEP`): the observation returned is already the
next episode's first, and `infos["final_obs"]` holds the one that ended it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from wrappers.atari import FRAME_SKIP, MAX_FRAMES, atari_settings, game_variant, is_atari, make_env
from wrappers.contract import check_reset, check_step
from wrappers.rebuild import Rebuildable, seeding_of


class CheckActions(VectorWrapper):
    """Refuse actions outside the action space, which `AtariVectorEnv` would answer by waiting for ever.

    Discrete actions arrive as int64 [N], Box actions as float32 [N, *shape].
    """

    def step(self, actions: np.ndarray):
        space, shape = self.single_action_space, self.action_space.shape
        if actions.shape != shape:
            raise ValueError(f"actions have shape {actions.shape}, {shape} is needed")
        if isinstance(space, Discrete):
            low, high = space.start, space.start + space.n - 1
        else:
            assert isinstance(space, Box), space
            low, high = space.low, space.high
        if not ((actions >= low) & (actions <= high)).all():  # false for NaN too
            raise ValueError(f"actions {actions} lie outside {space}")
        return self.env.step(actions)


class LostLives(VectorWrapper):
    """`infos["life_lost"]`, bool [N]: a life was lost while the game goes on (see `wrappers.atari.LostLife`)."""

    def reset(self, **kwargs: Any):
        obs, infos = self.env.reset(**kwargs)
        self.lives = infos["lives"]
        return obs, infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        infos["life_lost"] = (infos["lives"] < self.lives) & ~(terminated | truncated)
        self.lives = infos["lives"]
        return obs, rewards, terminated, truncated, infos


class DenseFinalObs(VectorWrapper):
    """`infos["final_obs"]` as one array [N, ...], like `AtariVectorEnv`'s; zeros where an environment is not done."""

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        if "final_obs" in infos:
            dense = np.zeros_like(obs)
            for i in np.flatnonzero(terminated | truncated):
                dense[i] = infos["final_obs"][i]
            infos["final_obs"] = dense
        return obs, rewards, terminated, truncated, infos


class TellWhere(gymnasium.Wrapper):
    """Checks what an environment returns, and notes in its errors its id, its seed and how many steps it had taken.

    Without the check, what has the wrong shape or type is an error of the vector environment's that names none of it.
    Final observations are copies: what an environment does to its own arrays later does not change them.
    """

    def __init__(self, env: gymnasium.Env, env_id: str, seed: int | None):
        super().__init__(env)
        self.env_id, self.seed, self.steps = env_id, seed, 0
        self.space = env.observation_space  # gymnasium's property asks wrapper after wrapper, at each step

    def reset(self, **kwargs: Any):
        if kwargs.get("seed") is not None:
            self.seed, self.steps = kwargs["seed"], 0
        try:
            return check_reset(self.env.reset(**kwargs), self.space)
        except Exception as error:
            add_place(error, "reset()", self.env_id, self.seed, self.steps)
            raise

    def step(self, action):
        try:
            result = check_step(self.env.step(action), self.space)
        except Exception as error:
            add_place(error, "step()", self.env_id, self.seed, self.steps)
            raise
        self.steps += 1
        obs, reward, terminated, truncated, info = result
        if terminated or truncated:
            # SyncVectorEnv keeps it over the reset, which may write the next episode's first one into the same array.
            obs = np.array(obs)
        return obs, reward, terminated, truncated, info


def add_place(error: Exception, call: str, env_id: str, seed: int | None, steps: int) -> None:
    """Note at the end of an error's traceback where an environment raised it."""
    error.add_note(f"(raised by {call} of {env_id}, seed {seed}, after {steps} steps)")


def make_told(env_id: str, seed: int | None, **limits: Any) -> gymnasium.Env:
    """`make_env` in a `TellWhere`."""
    try:
        env = make_env(env_id, **limits)
    except Exception as error:
        add_place(error, "the constructor", env_id, seed, 0)
        raise
    return TellWhere(env, env_id, seed)


def make_vec_env(
    env_id: str,
    num_envs: int,
    *,
    seed: int | None = None,
    noop_max: int = 30,
    max_frames: int = MAX_FRAMES,
    rebuildable: bool = False,
) -> VectorEnv:
    """`num_envs` copies of `env_id`, stepped together, each reset in the step that ends its episode.

    Args:
        env_id: any gymnasium id with a Box observation and a Discrete or Box action; `module:Env-v0` imports `module`.
        num_envs: number of copies (N).
        seed: of 31 bits; environment i is seeded with (seed + i) % 2^31 by the first `reset()`.
        noop_max, max_frames: Atari only, as in `make_env`.
        rebuildable: return a `Rebuildable`, which later games too are seeded by `seed` in; it must be given.

    Returns:
        Observations as in `make_env`, stacked [N, ...]; rewards [N], **raw**; terminated, truncated bool [N];
        `infos["final_obs"]` [N, ...], present when some environment is done, valid in the rows that are;
        `infos["life_lost"]` bool [N] on Atari.

    Raises:
        gymnasium.error.Error: unknown id, with a suggestion.
        ValueError: an observation that is no Box, an action that is neither Discrete nor Box, `num_envs` < 1.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs must be 1 or more, not {num_envs}")
    env: VectorEnv
    if is_atari(env_id) and not game_variant(env_id):
        env = AtariVectorEnv(
            num_envs=num_envs,
            num_threads=1,
            autoreset_mode=AutoresetMode.SAME_STEP,
            frameskip=FRAME_SKIP,
            max_num_frames_per_episode=max_frames,
            noop_max=noop_max,
            reward_clipping=False,
            **atari_settings(env_id),
        )
        env = LostLives(env)
    else:
        seeds = [None] * num_envs if seed is None else env_seeds(int(seed), num_envs)
        # Atari in another mode or difficulty comes here too: the C++ environment (ale-py 0.12) has neither.
        limits = {"noop_max": noop_max, "max_frames": max_frames}
        makers = [partial(make_told, env_id, s, **limits) for s in seeds]
        env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        env = DenseFinalObs(env)
    if not isinstance(env.single_action_space, Discrete | Box):
        raise ValueError(
            f"{env_id} has actions of type {type(env.single_action_space).__name__}; Discrete or Box is needed"
        )
    if rebuildable:
        assert seed is not None, "without a seed nothing can be rebuilt"
        return Rebuildable(CheckActions(env), seed, seeding_of(env_id))
    return FirstSeed(CheckActions(env), seed)


def env_seeds(seed: int, num_envs: int) -> list[int | None]:
    """The seed of each environment. They have 31 bits: ALE's are an int32."""
    return [(seed + i) % 2**31 for i in range(num_envs)]


class FirstSeed(VectorWrapper):
    """Seed the first `reset()`, when the caller gives it none; later resets go on from there."""

    def __init__(self, env: VectorEnv, seed: int | None):
        super().__init__(env)
        self.first_seed = seed

    def reset(self, *, seed=None, options=None):
        if seed is None:
            seed, self.first_seed = self.first_seed, None
        if isinstance(seed, int | np.integer) and options is None:
            seeds = env_seeds(
                int(seed), self.num_envs
            )  # AtariVectorEnv takes an array, gymnasium a list of Python's int
            seed = np.array(seeds) if isinstance(self.env.unwrapped, AtariVectorEnv) else seeds
        return self.env.reset(seed=seed, options=options)
