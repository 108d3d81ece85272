"""Observations as nets take them: images with their channels first, anything else as a float32 array or vector."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.spaces.utils import flatdim, flatten, flatten_space
from gymnasium.wrappers import TransformObservation

from a3c_mp.wrappers.ids import UnsupportedEnv

SMALLEST_IMAGE = 36  # pixels a side that the convolutions need; smaller images are treated as vectors


class Prepared(TransformObservation):
    """A transformation of observations that `as_array` adds; an environment's own are part of it."""


def as_array(env: gymnasium.Env, env_id: str) -> gymnasium.Env:
    """An environment with observations that nets take.

    Raises UnsupportedEnv for a part without a fixed size, an image beside other parts, or an ambiguous channel axis.
    """
    space = env.observation_space
    if not (isinstance(space, Box) and space.shape):
        _check_parts(space, env_id)
        env = Prepared(env, partial(flatten, space), flatten_space(space))
    space = env.observation_space
    assert isinstance(space, Box), space
    if space.dtype == np.uint8 and len(space.shape) == 3:
        if _channel_axis(space.shape) == 0:
            return env
        height, width, channels = space.shape
        channels_first = Box(0, 255, (channels, height, width), np.uint8)
        return Prepared(env, lambda obs: np.ascontiguousarray(np.moveaxis(obs, -1, 0)), channels_first)
    if space.dtype == np.float32:
        return env
    with np.errstate(over="ignore"):  # bounds beyond float32 become infinite, without gymnasium's warning
        float32 = Box(space.low.astype(np.float32), space.high.astype(np.float32))
    return Prepared(env, partial(np.asarray, dtype=np.float32), float32)


def unprepared(env: gymnasium.Env) -> gymnasium.Env:
    """The environment without what `as_array` has added."""
    while isinstance(env, Prepared):
        env = env.env
    return env


def _check_parts(space: Space, env_id: str) -> None:
    for path, part, _ in leaves(space):
        at = f" under {path!r}" if path else ""
        if not isinstance(part, Box | Discrete | MultiBinary | MultiDiscrete):
            kind = type(part).__name__
            raise UnsupportedEnv(f"{env_id} has observations of type {kind}{at}, which have no fixed size")
        shape = part.shape or ()  # of an image, either the first or the last axis has the channels
        if part.dtype == np.uint8 and len(shape) == 3 and sorted(shape)[1] >= SMALLEST_IMAGE:
            raise UnsupportedEnv(f"{env_id} has images {shape}{at}; only an image alone, a Box, is supported")


def _channel_axis(shape: tuple[int, ...]) -> int:
    """Axis of the channels in images of this shape, 0 or 2: the shorter one."""
    first, _, last = shape
    if first == last and min(shape) >= SMALLEST_IMAGE:
        raise UnsupportedEnv(f"observations are images {shape}, which may have their channels first or last")
    return 2 if last < first else 0


def leaves(space: Space, obs: Any = None, path: str = "") -> Iterator[tuple[str, Space, Any]]:
    """(path, space, value) of each part of a structured observation, in the order in which gymnasium flattens them.

    Without an observation, the values are None. `path` is that of the space in a larger one. Raises ValueError if `obs`
    has other parts than its space.
    """
    keys: list[Any]
    if isinstance(space, Dict):
        keys = list(space.spaces)
        fits = isinstance(obs, Mapping) and set(obs) == set(keys)
    elif isinstance(space, Tuple):
        keys = list(range(len(space.spaces)))
        fits = isinstance(obs, tuple) and len(obs) == len(keys)
    else:
        yield path, space, obs
        return
    if obs is not None and not fits:
        given = sorted(map(str, obs)) if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
        raise ValueError(f"{given}, its space has the parts {keys}")
    for key in keys:
        yield from leaves(space[key], None if obs is None else obs[key], f"{path}.{key}" if path else str(key))


def layout(env: gymnasium.Env) -> str:
    """Which numbers of a flattened observation are which part, such as `position 0-1, phase 2-5 one-hot`; or ""."""
    space = unprepared(env).observation_space
    if isinstance(space, Box):
        return ""
    texts, start = [], 0
    for path, part, _ in leaves(space):
        end = start + flatdim(part)
        numbers = f"{start}-{end - 1}" if end - start > 1 else f"{start}"
        one_hot = " one-hot" if isinstance(part, Discrete | MultiDiscrete) else ""
        texts.append(f"{path} {numbers}{one_hot}".strip())
        start = end
    return ", ".join(texts)
