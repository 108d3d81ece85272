"""The classic Atari wrappers, each a few lines, and `make_env`, which stacks them.

They reproduce, frame by frame, what `ale_py`'s C++ vector environment does in `wrappers.vector`, so a policy trained
there is evaluated here under the same conditions (`tests/unit/test_wrappers.py` holds the two together).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import ale_py
import cv2
import gymnasium
import numpy as np
from gymnasium.spaces import Box

from wrappers.ids import find_spec, make_registered
from wrappers.structured import SMALLEST_IMAGE, Float32Observation, flatten

gymnasium.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner for each emulator

cv2.setNumThreads(0)  # each actor is a process; more threads would compete for its core

NOOP, FIRE = 0, 1
FRAME_SKIP = 4
"""emulator frames for one agent step"""
MAX_FRAMES = 108_000
"""emulator frames after which a game is truncated: half an hour of play (Machado et al. 2018)"""
FIXED_SETTINGS = {"continuous": False, "sound_obs": False, "max_num_frames_per_episode": MAX_FRAMES}
"""settings of a game that an id must not change"""


class NoopReset(gymnasium.Wrapper):
    """Random number of no-ops at reset, 0 to `noop_max` - 1, so that games start differently (Mnih et al. 2015)."""

    def __init__(self, env: gymnasium.Env, noop_max: int = 30):
        super().__init__(env)
        if noop_max < 0:
            raise ValueError(f"noop_max must be 0 or more, not {noop_max}")
        self.noop_max = noop_max

    def reset(self, **kwargs: Any):
        obs, info = self.env.reset(**kwargs)
        noops = int(self.unwrapped.np_random.integers(self.noop_max)) if self.noop_max else 0
        for _ in range(noops):
            obs, _, terminated, truncated, info = self.env.step(NOOP)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class FireReset(gymnasium.Wrapper):
    """Presses FIRE once after a reset, in games that wait for it."""

    def reset(self, **kwargs: Any):
        obs, info = self.env.reset(**kwargs)
        if self.get_wrapper_attr("get_action_meanings")()[FIRE : FIRE + 1] == ["FIRE"]:
            obs, _, _, _, info = self.env.step(FIRE)
        return obs, info


class MaxAndSkip(gymnasium.Wrapper):
    """Frame skip: repeats each action for `skip` frames; max-pools the last two (Mnih et al. 2015).

    Atari 2600 sprites flicker: some are drawn on even frames only, others on odd ones.
    """

    def __init__(self, env: gymnasium.Env, skip: int = FRAME_SKIP):
        super().__init__(env)
        self.skip = skip
        self.pooled = np.zeros(env.observation_space.shape or (), np.uint8)
        self.last = np.zeros_like(self.pooled)

    def reset(self, **kwargs: Any):
        obs, info = self.env.reset(**kwargs)
        self.pooled, self.last = obs.copy(), np.zeros_like(obs)
        return self.pooled.copy(), info

    def step(self, action):
        total_reward = 0.0
        for i in range(self.skip):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total_reward += float(reward)
            if terminated or truncated:  # a game's last frame is not drawn: the one before it stays
                break
            if i == self.skip - 2:
                self.last = obs
            elif i == self.skip - 1:
                self.pooled = obs
        self.pooled = np.maximum(self.pooled, self.last)
        return self.pooled.copy(), total_reward, terminated, truncated, info


class LostLife(gymnasium.Wrapper):
    """Adds `info["life_lost"]`: a life was lost and the game goes on. It does not end the episode.

    The learner chooses whether a lost life cuts the return; the episode return stays that of the whole game.
    """

    def reset(self, **kwargs: Any):
        obs, info = self.env.reset(**kwargs)
        self.lives = info["lives"]
        info["life_lost"] = False
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        info["life_lost"] = info["lives"] < self.lives and not (terminated or truncated)
        self.lives = info["lives"]
        return obs, reward, terminated, truncated, info


class WarpFrame(gymnasium.ObservationWrapper):
    """Resizes a greyscale screen uint8 [210, 160] to [height, width], by area."""

    def __init__(self, env: gymnasium.Env, width: int = 84, height: int = 84):
        super().__init__(env)
        self.size = (width, height)
        self.observation_space = Box(0, 255, (height, width), np.uint8)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return cv2.resize(observation, self.size, interpolation=cv2.INTER_AREA)


class FrameStack(gymnasium.Wrapper):
    """Stacks the last `k` frames, oldest first: uint8 [k, height, width]; zeros before the first frame."""

    def __init__(self, env: gymnasium.Env, k: int = 4):
        super().__init__(env)
        height, width = env.observation_space.shape  # type: ignore[misc]
        self.frames: deque[np.ndarray] = deque(maxlen=k)
        self.observation_space = Box(0, 255, (k, height, width), np.uint8)

    def reset(self, **kwargs: Any):
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.frames.maxlen or 0):
            self.frames.append(np.zeros_like(obs))
        self.frames.append(obs)
        return np.stack(self.frames), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.frames.append(obs)
        return np.stack(self.frames), reward, terminated, truncated, info


class ChannelsFirst(gymnasium.ObservationWrapper):
    """Transposes images uint8 [height, width, channels] to [channels, height, width], as torch expects."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        height, width, channels = env.observation_space.shape  # type: ignore[misc]
        self.observation_space = Box(0, 255, (channels, height, width), np.uint8)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(observation, -1, 0))


def is_atari(env_id: str) -> bool:
    """Whether `env_id` is an Atari game with images as observations (RAM observations are vectors)."""
    spec = find_spec(env_id)
    return spec.entry_point == "ale_py.env:AtariEnv" and spec.kwargs.get("obs_type", "rgb") != "ram"


def atari_settings(env_id: str) -> dict[str, Any]:
    """Game, sticky-action probability and action set from the id's spec.

    Raises:
        ValueError: the id skips a random number of frames, as `Pong-v4` does, or has another setting that is not
            supported here.
    """
    kwargs = find_spec(env_id).kwargs
    skip = kwargs.get("frameskip", FRAME_SKIP)
    if not isinstance(skip, int):
        name = env_id.split("/")[-1].split("-")[0]
        raise ValueError(f"{env_id} skips a random number of frames; use {name}NoFrameskip-v4 or ALE/{name}-v5")
    if skip not in (1, FRAME_SKIP):
        raise ValueError(
            f"{env_id} has frameskip={skip}; only 1 and {FRAME_SKIP} are supported: a step is {FRAME_SKIP} frames"
        )
    for setting, default in FIXED_SETTINGS.items():
        if kwargs.get(setting, default) not in (None, default):
            raise ValueError(f"{env_id} has {setting}={kwargs[setting]}; only {setting}={default} is supported")
    return {
        "game": kwargs["game"],
        "repeat_action_probability": kwargs.get("repeat_action_probability", 0.25),  # ALE's own default
        "full_action_space": kwargs.get("full_action_space", False),
    }


def game_variant(env_id: str) -> dict[str, int]:
    """`mode` and `difficulty` from an Atari id's spec; empty for the game's defaults."""
    kwargs = find_spec(env_id).kwargs
    return {name: kwargs[name] for name in ("mode", "difficulty") if kwargs.get(name) is not None}


def channel_axis(shape: tuple[int, ...]) -> int:
    """Axis of the channels in images of this shape, 0 or 2: the shorter one.

    Raises:
        ValueError: both have the same length, and it is large enough for a side of the image.
    """
    first, _, last = shape
    if first == last and min(shape) >= SMALLEST_IMAGE:
        raise ValueError(f"observations are images {shape}; it is ambiguous whether they have channels first or last")
    return 2 if last < first else 0


def make_env(
    env_id: str, *, noop_max: int = 30, max_frames: int = MAX_FRAMES, render_mode: str | None = None
) -> gymnasium.Env:
    """One environment with the same observations and raw rewards as `make_vec_env`.

    Args:
        env_id: any gymnasium id with observations of fixed size; see `wrappers.ids`.
        noop_max: Atari only, upper limit (exclusive) of the random no-ops after a reset.
        max_frames: Atari only, emulator frames after which a game is truncated.
        render_mode: as in `gymnasium.make`; "rgb_array" for video.

    Returns:
        Atari: observations uint8 [4, 84, 84]; images uint8 [C, H, W]; anything else float32, structures as one vector.

    Raises:
        gymnasium.error.Error: unknown id, with a suggestion.
        ValueError: an observation of no fixed size, images beside other parts, or an image whose channel axis is
            ambiguous; or an Atari id has a setting that `atari_settings` refuses.
    """
    # not every custom environment has the parameter
    render: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    if is_atari(env_id):
        settings = atari_settings(env_id)
        settings.pop("game")
        env = make_registered(
            env_id,
            obs_type="grayscale",
            frameskip=1,
            max_num_frames_per_episode=max_frames,
            disable_env_checker=True,
            **render,
            **settings,
            **game_variant(env_id),
        )
        env = LostLife(MaxAndSkip(NoopReset(FireReset(env), noop_max)))
        return FrameStack(WarpFrame(env))
    env = flatten(make_registered(env_id, disable_env_checker=True, **render), env_id)
    space = env.observation_space
    assert isinstance(space, Box), space
    if space.dtype == np.uint8 and len(space.shape) == 3:
        return ChannelsFirst(env) if channel_axis(space.shape) == 2 else env
    if space.dtype != np.float32:
        env = Float32Observation(env)
    return env


def spaces(env_id: str) -> tuple[gymnasium.Space, gymnasium.Space]:
    """The spaces of (observations, actions) of an environment, which is made for it and closed."""
    env = make_env(env_id)
    found = env.observation_space, env.action_space
    env.close()
    return found
