"""Observations with a structure (Dict, Tuple, Discrete, ...), flattened to one vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.wrappers import FlattenObservation

SMALLEST_IMAGE = 36
"""pixels a side that the convolutions need; smaller images are treated as vectors"""


class Float32Observation(gymnasium.ObservationWrapper):
    """Vectors in float32. Unlike gymnasium's `DtypeObservation` it does not warn that bounds lose precision."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, Box)
        with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
            low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        self.observation_space = Box(low, high, dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.asarray(observation, np.float32)


def flatten(env: gymnasium.Env, env_id: str) -> gymnasium.Env:
    """Flatten observations that are no Box, or a single number. Raises ValueError for a part without a fixed size."""
    space = env.observation_space
    if isinstance(space, Box):
        return env if space.shape else FlattenObservation(env)
    for name, part in leaves(space):
        at = f" under {name!r}" if name else ""
        if not isinstance(part, Box | Discrete | MultiBinary | MultiDiscrete):
            raise ValueError(f"{env_id} has observations of type {type(part).__name__}{at}, which have no fixed size")
        shape = part.shape or ()  # of an image, either the first or the last axis has the channels
        if part.dtype == np.uint8 and len(shape) == 3 and sorted(shape)[1] >= SMALLEST_IMAGE:
            raise ValueError(f"{env_id} has images {part.shape}{at}; only an image alone, a Box, is supported")
    return FlattenObservation(env)


def leaves(space: Space, name: str = "") -> Iterator[tuple[str, Space]]:
    """(path, space) of each part of a space, in the order in which gymnasium flattens them."""
    parts: list[tuple[object, Space]] = []
    if isinstance(space, Dict):
        parts = list(space.spaces.items())
    elif isinstance(space, Tuple):
        parts = list(enumerate(space.spaces))
    else:
        yield name, space
    for key, part in parts:
        yield from leaves(part, f"{name}.{key}" if name else str(key))


def layout(env: gymnasium.Env) -> str:
    """Which numbers of a flattened observation are which part, such as `position 0-1, phase 2-5 one-hot`; or ""."""
    while not isinstance(env, FlattenObservation):
        if not isinstance(env, gymnasium.Wrapper):
            return ""
        env = env.env
    if isinstance(env.env.observation_space, Box):
        return ""
    parts = list(leaves(env.env.observation_space))
    ends = accumulate((gymnasium.spaces.flatdim(part) for _, part in parts), initial=0)
    return ", ".join(
        f"{name} {start}{f'-{end - 1}' if end - start > 1 else ''}{kind(part)}".strip()
        for (name, part), (start, end) in zip(parts, pairwise(ends), strict=True)
    )


def kind(part: Space) -> str:
    """How gymnasium flattens a part: discrete ones as one-hot vectors."""
    return " one-hot" if isinstance(part, Discrete | MultiDiscrete) else ""


def parts_of(value: object, space: Space, path: str = "") -> Iterator[tuple[str, object, Space]]:
    """(path, value, space) of each part of a structured observation. Raises ValueError where it has other parts."""
    parts: list[tuple[object, object, Space]]
    if isinstance(space, Dict):
        if not isinstance(value, Mapping) or set(value) != set(space.spaces):
            given = sorted(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise ValueError(f"{given}, its space has the keys {sorted(space.spaces)}")
        parts = [(key, value[key], part) for key, part in space.spaces.items()]
    elif isinstance(space, Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            raise ValueError(f"a {type(value).__name__}, its space is a tuple of {len(space.spaces)}")
        parts = [(i, value[i], part) for i, part in enumerate(space.spaces)]
    else:
        yield path, value, space
        return
    for key, inner, part in parts:
        yield from parts_of(inner, part, f"{path}.{key}" if path else str(key))
