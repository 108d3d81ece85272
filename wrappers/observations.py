"""Observations as nets take them: an image uint8 [C, H, W], float32 vectors, or both in one flat float32 array."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import cv2
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from gymnasium.spaces.utils import flatdim, flatten, flatten_space

from a3c_mp.wrappers.ids import Extras, UnsupportedEnv

SMALLEST_IMAGE = 36  # pixels a side that the convolutions need; smaller images are treated as vectors
NUMBERS = Box | Discrete | MultiBinary | MultiDiscrete  # spaces of parts that nets can take
WIDEST = 2**16  # distance of the bounds of a pixel that is a float; wider ones stand for infinity
MOST_AXES = 4  # of images; those besides height and width, such as stacked frames and colours, become channels
OWN_WRAPPER = "give --wrapper module:Class, a gymnasium.ObservationWrapper of your own"


class ImageAndVector(Box):
    """Flat observations float32: the pixels, 0 to 255, of an image [C, H, W], then the numbers of a vector."""

    def __init__(self, image_shape: tuple[int, ...], vector: Box):
        pixels = np.zeros(np.prod(image_shape), np.float32)
        super().__init__(np.append(pixels, vector.low), np.append(pixels + 255, vector.high), dtype=np.float32)
        self.image_shape = image_shape

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.image_shape == getattr(other, "image_shape", None)


class Part(NamedTuple):
    """A part of a structured observation: the keys that lead to it, and its space."""

    keys: tuple[Any, ...]
    space: Space

    @property
    def path(self) -> str:
        return ".".join(map(str, self.keys))

    def of(self, obs: Any) -> Any:
        """The part's value in an observation."""
        return reduce(getitem, self.keys, obs)


class Image:
    """Makes an image uint8 [C, H, W] of one part of an observation, which has its height at `axis`.

    All axes besides height and width become channels. Numbers that are no bytes are mapped from their bounds to 0 to
    255: differences below 1/255 of that range may be lost. With a `size` it is scaled to size x size.
    """

    def __init__(self, part: Part, axis: int, size: int | None):
        space = part.space
        assert isinstance(space, Box), space
        self.part, self.axis = part, axis
        sides = space.shape[axis : axis + 2]
        self.full = (int(np.prod(space.shape)) // (sides[0] * sides[1]), *sides)
        self.shape = self.full if size is None else (self.full[0], size, size)
        self.is_plain = space.dtype == np.uint8 and space.shape == self.shape
        self.low, self.scale = 0.0, 1.0
        if space.dtype != np.uint8:
            self.low = float(space.low.flat[0])
            self.scale = 255 / (float(space.high.flat[0]) - self.low)

    def check(self, obs: Any) -> None:
        """Raise ValueError for an image in other units than its space: all of it would become black or white."""
        image, span = np.asarray(self.part.of(obs)), 255 / self.scale
        low, high, least, most = self.low, self.low + span, image.min(), image.max()
        is_far = least < low - span / 2 or most > high + span / 2  # more than noise
        if self.part.space.dtype != np.uint8 and is_far and not ((image > low) & (image < high)).any():
            which = f"the image {self.part.path}".strip()
            raise ValueError(f"{which} has values from {least:g} to {most:g}, its space {low:g} to {high:g}")

    def __call__(self, obs: Any) -> np.ndarray:
        image = np.asarray(self.part.of(obs))
        if self.part.space.dtype != np.uint8:
            if not np.isfinite(image).all():
                raise ValueError(f"the image {self.part.path} contains NaN or infinity")
            image = ((image - self.low) * self.scale).round().clip(0, 255).astype(np.uint8)
        image = np.moveaxis(image, (self.axis, self.axis + 1), (-2, -1)).reshape(self.full)
        if self.shape != self.full:
            image = np.stack([cv2.resize(plane, self.shape[1:], interpolation=cv2.INTER_AREA) for plane in image])
        return np.ascontiguousarray(image)

    def __str__(self) -> str:
        space: Any = self.part.space
        levels = "" if space.dtype == np.uint8 else f" in 256 levels from {self.low:g} to {space.high.flat[0]:g}"
        return f"{self.part.path} {space.shape} {space.dtype}{levels}".strip()


class Prepared(gymnasium.Wrapper):
    """Makes observations of `images`, of which the last `stack` are joined (oldest first, zeros before the first), and
    of `parts`, flattened behind them; of neither: the whole observation as float32. `layout` says what is where."""

    def __init__(
        self, env: gymnasium.Env, space: Box, layout: str,
        images: Sequence[Image] = (), parts: Sequence[Part] = (), stack: int = 1,
    ):  # fmt: skip
        super().__init__(env)
        self.observation_space, self.layout, self.images, self.parts, self.stack = space, layout, images, parts, stack
        self.frames: np.ndarray | None = None  # of the newest observation

    def reset(self, **kwargs: Any):
        obs, info = self.env.reset(**kwargs)
        self.frames = None
        return self._prepared(obs), info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return self._prepared(obs), *rest

    def _prepared(self, obs: Any) -> np.ndarray:
        if not self.images:
            return _flattened(self.parts, obs) if self.parts else np.asarray(obs, np.float32)
        image = np.concatenate([part(obs) for part in self.images])  # their channels
        if self.stack > 1:
            if self.frames is None:
                self.frames = np.zeros((self.stack * len(image), *image.shape[1:]), np.uint8)
            self.frames = image = np.concatenate([self.frames[len(image) :], image])
        return np.append(image.ravel(), _flattened(self.parts, obs)) if self.parts else image


def as_array(env: gymnasium.Env, env_id: str, extras: Extras | None = None) -> gymnasium.Env:
    """An environment with observations that nets take, made of the parts `obs_keys`, or of all but texts.

    Images get `frame_size` and are stacked, `frame_stack` of them. Raises UnsupportedEnv for a part without a fixed
    size, and for images whose channels, levels or common size cannot be told.
    """
    extras, space = extras or Extras(), env.observation_space
    parts, left_out = _chosen(space, env_id, extras.obs_keys)
    axes = [_height_axis(part, env_id) for part in parts]
    others = [part for part, axis in zip(parts, axes, strict=True) if axis is None]
    images = [Image(part, axis, extras.frame_size) for part, axis in zip(parts, axes, strict=True) if axis is not None]
    is_whole = isinstance(space, Box) and bool(space.shape)  # the observation is one array
    if not images:
        instead = f"or use --wrapper gymnasium.wrappers:FrameStackObservation,stack_size={extras.frame_stack}"
        for flag, given, fix in (
            ("frame-size", extras.frame_size, "leave it out"),
            ("frame-stack", extras.frame_stack, f"leave it out, {instead}"),
        ):
            if given:
                why = f"{env_id} has no images of {SMALLEST_IMAGE} x {SMALLEST_IMAGE} or more"
                raise UnsupportedEnv(why, fix, flag, given)
        if is_whole and (space.dtype == np.float32 or (space.dtype == np.uint8 and len(space.shape or ()) == 3)):
            return env  # small images stay bytes
        layout = "" if isinstance(space, Box) else _layout(others) + left_out
        return Prepared(env, _vector_space(others, flat=not is_whole), layout, parts=() if is_whole else others)
    if len({image.shape[1:] for image in images}) > 1:
        sizes = ", ".join(f"{image.part.path} {image.part.space.shape}" for image in images)
        fix = "--frame-size 84 gives them one, --obs-keys chooses among them"
        raise UnsupportedEnv(f"{env_id} has images of several sizes: {sizes}", fix)
    stack = extras.frame_stack or 1
    if is_whole and images[0].is_plain and stack == 1:
        return env
    shape = (stack * sum(image.shape[0] for image in images), *images[0].shape[1:])
    layout = f"image {shape} of {' and '.join(map(str, images))}{f', {stack} frames' if stack > 1 else ''}"
    if not others:
        return Prepared(env, Box(0, 255, shape, np.uint8), layout + left_out, images, stack=stack)
    both = ImageAndVector(shape, _vector_space(others))
    layout += f", {_layout(others, int(np.prod(shape)))}{left_out}"
    return Prepared(env, both, layout, images, others, stack)


def layout(env: gymnasium.Env) -> str:
    """What the log says of observations: which numbers are which part, such as `position 0-1, phase 2-5 one-hot`, or
    what an image is made of; "" if they are the environment's own."""
    return env.layout if isinstance(env, Prepared) else ""


def _chosen(space: Space, env_id: str, names: Sequence[str]) -> tuple[list[Part], str]:
    """(Parts of observations that are used, what the log says of the others)."""
    every = [Part(keys, part) for keys, part, _ in leaves(space)]
    found = {name: [part for part in every if f"{part.path}.".startswith(f"{name}.")] for name in names}
    if missing := [name for name in names if not found[name]]:
        there = ", ".join(filter(None, (part.path for part in every)))
        why = f"there is no such part in the observations of {env_id}{f', which are {there}' if there else ''}"
        raise UnsupportedEnv(why, "choose among its parts" if there else "leave it out", "obs-keys", missing[0])
    chosen = [part for part in every if not names or any(part in found[name] for name in names)]
    texts = [part for part in chosen if getattr(part.space.dtype, "kind", "") == "U"] if len(chosen) > 1 else []
    empty = [part for part in chosen if 0 in (part.space.shape or ())] if len(chosen) > 1 else []
    used = [part for part in chosen if part not in texts and part not in empty]
    for part in used:
        if not isinstance(part.space, NUMBERS):
            at = f" under {part.path!r}" if part.keys else ""
            why = f"{env_id} has observations of type {type(part.space).__name__}{at}, which have no fixed size"
            raise UnsupportedEnv(why, f"choose others by --obs-keys, or {OWN_WRAPPER}" if part.keys else OWN_WRAPPER)
    if not used:
        raise UnsupportedEnv(f"{env_id} has no observations that are numbers", OWN_WRAPPER)
    others = [(texts, "text"), (empty, "empty")]
    left = [f"{', '.join(part.path for part in parts)} ({why})" for parts, why in others if parts]
    return used, f"; left out: {', '.join(left)}" if left else ""


def _height_axis(part: Part, env_id: str) -> int | None:
    """The axis of an image's height, which that of its width follows; None if the part is no image.

    An image has 2 to 4 axes, two neighbours of at least `SMALLEST_IMAGE` pixels, and bytes, or numbers between the same
    bounds everywhere. If there are several such pairs, the fewest channels decide.
    """
    space, shape = part.space, part.space.shape or ()
    pairs = {i: shape[i] * shape[i + 1] for i in range(len(shape) - 1) if min(shape[i : i + 2]) >= SMALLEST_IMAGE}
    if not isinstance(space, Box) or not pairs or len(shape) > MOST_AXES:
        return None
    low, high = float(space.low.flat[0]), float(space.high.flat[0])
    is_float = space.dtype is not None and space.dtype.kind == "f"
    is_even = bool((space.low == low).all() and (space.high == high).all())
    if space.dtype != np.uint8 and not (is_even and 0 < high - low <= (WIDEST if is_float else 255)):
        if not is_float or len(shape) == 2:  # numbers of things, or rows of features
            return None
        why = f"{env_id} has images {shape} of {space.dtype} without the same finite bounds for all pixels"
        fix = "correct its observation_space; --wrapper gymnasium.wrappers:FlattenObservation makes vectors of them"
        raise UnsupportedEnv(why, fix)
    axis = max(pairs, key=lambda i: pairs[i])
    if list(pairs.values()).count(pairs[axis]) > 1:
        why = f"observations are images {shape}, which may have their channels first or last"
        raise UnsupportedEnv(why, OWN_WRAPPER)
    return axis


def _flattened(parts: Sequence[Part], obs: Any) -> np.ndarray:
    """The numbers of all parts, float32 [n], each as gymnasium flattens it."""
    numbers: list[Any] = []
    for part in parts:
        space, value = part.space, part.of(obs)
        if isinstance(space, Discrete | MultiDiscrete):
            given, value = value, np.asarray(value).astype(space.dtype)[()]  # of bytes, a sum is uint64
            if not (space.contains(value) and np.array_equal(value, given)):
                raise ValueError(f"{' '.join(['observation', *part.path.split()])} is {given}, its space is {space}")
        numbers.append(flatten(space, value))
    return np.concatenate(numbers, dtype=np.float32)


def _vector_space(parts: Sequence[Part], *, flat: bool = True) -> Box:
    boxes: list[Any] = [flatten_space(part.space) if flat else part.space for part in parts]
    with np.errstate(over="ignore"):  # bounds beyond float32 become infinite, without gymnasium's warning
        low, high = (np.concatenate([getattr(box, end) for box in boxes], dtype=np.float32) for end in ("low", "high"))
    return Box(low, high)


def _layout(parts: Sequence[Part], start: int = 0) -> str:
    """Which numbers of a vector that begins at `start` are which part."""
    texts = []
    for part in parts:
        end = start + flatdim(part.space)
        numbers = f"{start}-{end - 1}" if end - start > 1 else f"{start}"
        one_hot = " one-hot" if isinstance(part.space, Discrete | MultiDiscrete) else ""
        texts.append(f"{part.path} {numbers}{one_hot}".strip())
        start = end
    return ", ".join(texts)


def leaves(space: Space, obs: Any = None, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Space, Any]]:
    """(keys, space, value) of each part of a structured observation, in the order in which gymnasium flattens them.

    Without an observation, the values are None. Raises ValueError if it has other parts than its space.
    """
    names: list[Any]
    if isinstance(space, Dict):
        names = list(space.spaces)
        fits = isinstance(obs, Mapping) and set(obs) == set(names)
    elif isinstance(space, Tuple):
        names = list(range(len(space.spaces)))
        fits = isinstance(obs, tuple) and len(obs) == len(names)
    else:
        yield keys, space, obs
        return
    if obs is not None and not fits:
        given = sorted(map(str, obs)) if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
        raise ValueError(f"{given}, its space has the parts {names}")
    for name in names:
        yield from leaves(space[name], None if obs is None else obs[name], (*keys, name))
