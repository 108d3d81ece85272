"""Vector environments: Atari on `ale_py`'s C++ vector environment, all others on gymnasium's `SyncVectorEnv`.

Both autoreset in the step that ends an episode (`SAME_STEP`): the returned observation is the first of the next
episode, and `infos["final_obs"]` has the last one of the ended episode.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from wrappers.actions import ACTIONS, CheckActions
from wrappers.atari import FRAME_SKIP, MAX_FRAMES, atari_settings, game_variant, is_atari, make_env
from wrappers.contract import check_mask, check_reset, check_step
from wrappers.rebuild import Rebuildable, seeding_of
from wrappers.seeds import env_seed, reset_envs

LOG = logging.getLogger(__name__)


class LostLives(VectorWrapper):
    """Adds `infos["life_lost"]`, bool [N]: a life was lost and the game goes on (see `wrappers.atari.LostLife`)."""

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
    """Makes `infos["final_obs"]` one array [N, ...], as in `AtariVectorEnv`; zeros where an environment is not done."""

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        if "final_obs" in infos:
            dense = np.zeros_like(obs)
            for i in np.flatnonzero(terminated | truncated):
                dense[i] = infos["final_obs"][i]
            infos["final_obs"] = dense
        return obs, rewards, terminated, truncated, infos


class WarnNotFinite(VectorWrapper):
    """Logs the first NaN or infinity in rewards and observations, with the environment's seed and step.

    Wraps a `SyncVectorEnv` of `CheckedEnv`s. What is not finite is not learned from (see `a3c_mp.run.guard`).
    """

    warned = False

    def reset(self, **kwargs: Any):
        obs, infos = self.env.reset(**kwargs)
        self._check("the observation", obs)
        return obs, infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        if not self.warned:
            self._check("the reward", rewards)
            if "final_obs" in infos:
                self._check("the last observation", infos["final_obs"])
            self._check("the observation", obs)
        return obs, rewards, terminated, truncated, infos

    def _check(self, name: str, values: np.ndarray) -> None:
        """Check values [N, ...] of all environments at once, which takes two microseconds."""
        if self.warned or values.dtype.kind != "f" or np.isfinite(values).all():
            return
        self.warned = True
        env, *index = np.argwhere(~np.isfinite(values))[0].tolist()
        assert isinstance(self.unwrapped, SyncVectorEnv)
        place = self.unwrapped.envs[env].get_wrapper_attr("place")()
        LOG.warning(f"{name}{index or ''} is {values[env, *index]} in {place}; further ones are not shown")


class CheckedEnv(gymnasium.Wrapper):
    """Checks each result of an environment and adds its id, seed and number of steps to its errors.

    Without the check, a wrong shape or type raises an error in the vector environment that names none of them.
    Final observations are copied: the environment may write to its own arrays later. Masks become boolean arrays. What
    others than Atari games call "life_lost" is left out: here the word has a meaning (see `wrappers.atari.LostLife`).
    """

    def __init__(self, env: gymnasium.Env, env_id: str, seed: int | None):
        super().__init__(env)
        self.env_id, self.seed, self.steps = env_id, seed, 0
        # Cached: gymnasium's properties go through all wrappers.
        self.space, self.actions = env.observation_space, env.action_space
        self.masked: bool | None = None  # whether it gives action masks; known from the first reset on
        self.has_lives = is_atari(env_id)

    def reset(self, **kwargs: Any):
        if kwargs.get("seed") is not None:
            self.seed, self.steps = kwargs["seed"], 0
        try:
            obs, info = check_reset(self.env.reset(**kwargs), self.space)
            return obs, self._checked("reset()", info)
        except Exception as error:
            error.add_note(f"(raised by reset() of {self.place()})")
            raise

    def step(self, action):
        try:
            obs, reward, terminated, truncated, info = check_step(self.env.step(action), self.space)
            info = self._checked("step()", info, ended=bool(terminated or truncated))
        except Exception as error:
            error.add_note(f"(raised by step() of {self.place()})")
            raise
        self.steps += 1
        if terminated or truncated:
            obs = np.array(obs)  # SyncVectorEnv returns it after the reset, which may write to the same array
        return obs, reward, terminated, truncated, info

    def place(self) -> str:
        """Which environment this is, and how far it is, for errors and warnings."""
        return f"{self.env_id}, seed {self.seed}, after {self.steps} steps"

    def _checked(self, call: str, info: dict[str, Any], *, ended: bool = False) -> dict[str, Any]:
        """The info with its mask checked, which most environments do not have."""
        if "life_lost" in info and not self.has_lives:
            info = {name: value for name, value in info.items() if name != "life_lost"}
        if self.masked is False and "action_mask" not in info:
            return info
        mask = check_mask(call, info, self.actions, self.masked, ended=ended)
        self.masked = mask is not None
        others = {name: value for name, value in info.items() if name != "action_mask"}
        return others if mask is None else {**others, "action_mask": mask}


def make_checked_env(env_id: str, seed: int | None, **limits: Any) -> gymnasium.Env:
    """`make_env` in a `CheckedEnv`."""
    try:
        env = make_env(env_id, **limits)
    except Exception as error:
        error.add_note(f"(raised by the constructor of {env_id}, seed {seed})")
        raise
    return CheckedEnv(env, env_id, seed)


def make_vec_env(
    env_id: str,
    num_envs: int,
    *,
    seed: int | None = None,
    noop_max: int = 30,
    max_frames: int = MAX_FRAMES,
    rebuildable: bool = False,
) -> VectorEnv:
    """Vector of `num_envs` environments in `SAME_STEP` autoreset mode, Atari games preprocessed.

    Args:
        env_id: any gymnasium id that `make_env` takes, with one of `ACTIONS`.
        num_envs: number of environments (N).
        seed: of 31 bits; the first `reset()` seeds environment i with (seed + i) % 2^31.
        noop_max, max_frames: Atari only, as in `make_env`.
        rebuildable: return a `Rebuildable`, which also derives the seeds of later games from `seed`.

    Returns:
        Observations as in `make_env`, stacked [N, ...]; rewards [N], **raw**; terminated, truncated bool [N];
        `infos["final_obs"]` [N, ...], present if an environment is done, valid in the rows of those that are;
        `infos["life_lost"]` bool [N] on Atari; `infos["action_mask"]` and `infos["final_mask"]` as in `CheckActions`.

    Raises:
        gymnasium.error.Error: unknown id, with a suggestion.
        ValueError: as `make_env`; another kind of action, `num_envs` < 1.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs must be 1 or more, not {num_envs}")
    limits = {"noop_max": noop_max, "max_frames": max_frames}
    if is_atari(env_id) and not game_variant(env_id):
        env = _make_atari(env_id, num_envs, **limits)
    else:  # also Atari in another mode or difficulty: the C++ environment (ale-py 0.12) has neither
        seeds = [None if seed is None else env_seed(seed, i) for i in range(num_envs)]
        makers = [partial(make_checked_env, env_id, s, **limits) for s in seeds]
        env = WarnNotFinite(DenseFinalObs(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)))
    if not isinstance(env.single_action_space, ACTIONS):
        kind = type(env.single_action_space).__name__
        raise ValueError(
            f"{env_id} has actions of type {kind}; only Discrete, Box, MultiDiscrete and MultiBinary are supported"
        )
    if rebuildable:
        assert seed is not None, "rebuilding needs a seed"
        return Rebuildable(CheckActions(env), seed, seeding_of(env_id))
    return FirstSeed(CheckActions(env), seed)


def _make_atari(env_id: str, num_envs: int, noop_max: int, max_frames: int) -> VectorEnv:
    """ALE's C++ vector environment with `life_lost`."""
    return LostLives(
        AtariVectorEnv(
            num_envs=num_envs,
            num_threads=1,
            autoreset_mode=AutoresetMode.SAME_STEP,
            frameskip=FRAME_SKIP,
            max_num_frames_per_episode=max_frames,
            noop_max=noop_max,
            reward_clipping=False,
            **atari_settings(env_id),
        )
    )


class FirstSeed(VectorWrapper):
    """Seeds the first `reset()` if the caller gives no seed; later resets continue from its random numbers."""

    def __init__(self, env: VectorEnv, seed: int | None):
        super().__init__(env)
        self.first_seed = seed

    def reset(self, *, seed=None, options=None):
        if seed is None:
            seed, self.first_seed = self.first_seed, None
        if isinstance(seed, int | np.integer) and options is None:
            seeds = [env_seed(int(seed), i) for i in range(self.num_envs)]
            return reset_envs(self.env, np.ones(self.num_envs, np.bool_), seeds)
        return self.env.reset(seed=seed, options=options)
