"""Atari games, as ALE's C++ vector environment and as a single one, for videos, which gives the same frames."""

from typing import Any

import ale_py
import cv2
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from a3c_mp.wrappers.ids import UnsupportedEnv, extras_of, find_spec, make_registered, split_id

gymnasium.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner for each emulator

cv2.setNumThreads(0)  # each actor is a process; more threads would compete for its core

FIRE = 1
FRAME_SKIP = 4  # frames of one step: an action is repeated, the last two are max-pooled (Mnih et al. 2015)
NUM_FRAMES, FRAME_SIZE = (4, 84)  # of an observation, oldest first, zeros before the first; pixels of its sides
NOOP_MAX = 30  # a game begins with 0 to NOOP_MAX - 1 no-ops, so that games differ (Mnih et al. 2015)
MAX_FRAMES = 108_000  # emulator frames after which a game is truncated: half an hour of play (Machado et al. 2018)
SUPPORTED: dict[str, tuple[Any, ...]] = {  # setting of an id -> values that it may have, the default first
    "frameskip": (1, FRAME_SKIP),  # a step is FRAME_SKIP frames with both
    "max_num_frames_per_episode": (MAX_FRAMES, None),
    "continuous": (False, None),
    "sound_obs": (False, None),
    "mode": (None,),  # ALE's vector environment has the game's own mode and difficulty (ale-py 0.12)
    "difficulty": (None,),
}


class FireReset(gymnasium.Wrapper):
    """Presses FIRE once after a reset, in games that wait for it."""

    def reset(self, **kwargs: Any):
        obs, info = self.env.reset(**kwargs)
        if self.get_wrapper_attr("get_action_meanings")()[FIRE : FIRE + 1] == ["FIRE"]:
            obs, _, _, _, info = self.env.step(FIRE)
        return obs, info


class LostLives(VectorWrapper):
    """Adds `infos["life_lost"]`, bool [N]: a life was lost and the game goes on. The learner may cut returns there."""

    lives: np.ndarray  # [N]

    def reset(self, **kwargs: Any):
        obs, infos = self.env.reset(**kwargs)
        self.lives = infos["lives"]
        return obs, infos

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        infos["life_lost"] = (infos["lives"] < self.lives) & ~(terminated | truncated)
        self.lives = infos["lives"]
        return obs, rewards, terminated, truncated, infos


def is_atari(env_id: str) -> bool:
    """Whether an id is an Atari game with images (not RAM) and without wrappers, which `AtariVectorEnv` cannot have."""
    spec = find_spec(env_id)
    if extras_of(env_id).wrapper:
        return False
    return spec.entry_point == "ale_py.env:AtariEnv" and spec.kwargs.get("obs_type", "rgb") != "ram"


def atari_settings(env_id: str) -> dict[str, Any]:
    """Game, sticky-action probability and action set from the id's spec.

    Raises UnsupportedEnv if the id skips a random number of frames, as `Pong-v4` does, or has another such setting.
    """
    kwargs = (spec := find_spec(env_id)).kwargs
    if spec.max_episode_steps is not None or spec.additional_wrappers:
        raise UnsupportedEnv(f"{env_id} has a time limit or wrappers of its own, which Atari games cannot have here")
    if not isinstance(kwargs.get("frameskip", FRAME_SKIP), int):
        name = env_id.split("/")[-1].split("-")[0]
        raise UnsupportedEnv(f"{env_id} skips a random number of frames; use {name}NoFrameskip-v4 or ALE/{name}-v5")
    if split_id(env_id)[1].get("frameskip", FRAME_SKIP) != FRAME_SKIP:  # the user asks for it; "NoFrameskip" ids have 1
        raise UnsupportedEnv(f"{env_id}: other frame skips than {FRAME_SKIP} are not supported")
    for setting, supported in SUPPORTED.items():
        if kwargs.get(setting, supported[0]) not in supported:
            raise UnsupportedEnv(f"{env_id} has {setting}={kwargs[setting]}, which is not supported")
    return {
        "game": kwargs["game"],
        "repeat_action_probability": kwargs.get("repeat_action_probability", 0.25),  # ALE's own default
        "full_action_space": kwargs.get("full_action_space", False),
    }


def frames_of(env_id: str) -> tuple[int, int]:
    """(Number of frames in an observation of this game, their size). Raises UnsupportedEnv for names of parts."""
    extras = extras_of(env_id)
    if extras.obs_keys:
        why = f"the observations of {env_id} are images alone"
        raise UnsupportedEnv(why, "leave it out", "obs-keys", " ".join(extras.obs_keys))
    return extras.frame_stack or NUM_FRAMES, extras.frame_size or FRAME_SIZE


def make_atari_env(env_id: str, **render: Any) -> gymnasium.Env:
    """A single game: observations uint8 [4, 84, 84] (or other sizes, see `frames_of`), raw rewards."""
    stack, size = frames_of(env_id)
    limits = {"frameskip": 1, "max_num_frames_per_episode": MAX_FRAMES}
    game = FireReset(make_registered(env_id, obs_type="grayscale", **limits, **atari_settings(env_id), **render))
    env = AtariPreprocessing(game, noop_max=max(NOOP_MAX - 1, 0), frame_skip=FRAME_SKIP, screen_size=size)
    return FrameStackObservation(env, stack, padding_type="zero")


def screen_settings(env_id: str, env: gymnasium.Env) -> dict[str, Any]:
    """How observations are made of the emulator's frames, and what its actions are, for programs with an emulator."""
    actions, (stack, size) = env.get_wrapper_attr("get_action_meanings")(), frames_of(env_id)
    return {
        "frame_skip": FRAME_SKIP, "max_of_last": 2, "colors": "gray", "size": [size, size], "stack": stack,
        "order": "oldest first, zeros before the first", "noop_max": NOOP_MAX - 1,
        "fire_on_reset": actions[FIRE : FIRE + 1] == ["FIRE"], "actions": actions, **atari_settings(env_id),
    }  # fmt: skip


def make_atari_vec_env(env_id: str, num_envs: int) -> VectorEnv:
    """ALE's C++ vector environment: observations uint8 [N, 4, 84, 84], raw rewards, lost lives."""
    stack, size = frames_of(env_id)
    env = AtariVectorEnv(
        num_envs=num_envs, num_threads=1, autoreset_mode=AutoresetMode.SAME_STEP, frameskip=FRAME_SKIP,
        stack_num=stack, img_height=size, img_width=size, max_num_frames_per_episode=MAX_FRAMES, noop_max=NOOP_MAX,
        reward_clipping=False, **atari_settings(env_id),
    )  # fmt: skip
    return LostLives(env)
