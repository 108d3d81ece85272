"""Actions of environments: which ones they allow now (masks), and a check of every action before it is taken.

An environment with masks gives `info["action_mask"]` with each observation: an array of 0 and 1, or booleans, for each
choice. Discrete(A) has [A]; MultiDiscrete and MultiBinary have the choices of all parts, one part after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import VectorEnv, VectorWrapper

ACTIONS = Discrete | Box | MultiDiscrete | MultiBinary
"""supported classes of action spaces"""


def num_choices(space: gymnasium.Space) -> np.ndarray:
    """Number of choices in each part of an action, int64; none for continuous actions."""
    if isinstance(space, Discrete):
        return np.array([space.n])
    if isinstance(space, MultiDiscrete):
        return space.nvec.ravel().astype(np.int64)
    return np.full(int(np.prod(space.shape or ())) if isinstance(space, MultiBinary) else 0, 2)


def mask_in(info: Mapping[str, Any], space: gymnasium.Space, *, ended: bool = False) -> np.ndarray | None:
    """The choices that an environment allows: bool [sum of `num_choices`]; None if its info has no mask.

    Args:
        info: of `reset` or `step`.
        space: of actions.
        ended: the episode has ended, so no action follows; a mask without choices then allows all.

    Raises:
        ValueError: the mask does not fit the space, or allows nothing; the message begins with "an action_mask".
    """
    if (given := info.get("action_mask")) is None:
        return None
    choices = num_choices(space)
    if not len(choices):
        raise ValueError(f"an action_mask for actions {space}, which have no choices")
    parts = given if isinstance(given, tuple | list) else [given]
    mask = np.concatenate([np.ravel(part) for part in parts])
    if mask.shape != (choices.sum(),):
        raise ValueError(f"an action_mask of {len(mask)} values, {space} has {choices.sum()} choices")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"an action_mask {mask}, must be of 0 and 1")
    if all(part.any() for part in np.split(mask, choices.cumsum()[:-1])):
        return mask.astype(np.bool_)
    if not ended:
        raise ValueError("an action_mask that allows no action")
    return np.ones(mask.shape, np.bool_)


def allows(space: gymnasium.Space, mask: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Whether masks [N, choices] allow the actions [N, ...]: bool [N]."""
    choices = num_choices(space)
    chosen = actions.reshape(len(mask), -1) + (choices.cumsum() - choices)
    return np.asarray(np.take_along_axis(mask, chosen.astype(np.int64), axis=1).all(axis=1))


def _action(space: gymnasium.Space, chosen: list[Any]) -> Any:
    """The choices of all parts as an action of a space."""
    return np.array(chosen, space.dtype).reshape(space.shape or ())[()]


def allowed_action(space: gymnasium.Space, mask: np.ndarray, *, last: bool = False) -> Any:
    """The first action, or the last one, that a mask [choices] allows."""
    parts = np.split(mask, num_choices(space).cumsum()[:-1])
    chosen = [np.flatnonzero(part)[-1 if last else 0] for part in parts]
    return _action(space, chosen)


def random_action(space: gymnasium.Space, mask: np.ndarray, rng: np.random.Generator) -> Any:
    """A random one of the actions that a mask [choices] allows."""
    parts = np.split(mask, num_choices(space).cumsum()[:-1])
    chosen = [rng.choice(np.flatnonzero(part)) for part in parts]
    return _action(space, chosen)


class CheckActions(VectorWrapper):
    """Refuses actions outside the action space, on which `AtariVectorEnv` would hang, and masked ones.

    Discrete actions arrive as int64 [N], others in the dtype of their space [N, *shape].

    `mask` is of the newest observations: bool [N, choices], or None if the environments have no masks. Where episodes
    ended, `infos["final_mask"]` has the masks of their final observations, and elsewhere what allows all.
    """

    mask: np.ndarray | None = None

    def reset(self, **kwargs: Any):
        obs, infos = self.env.reset(**kwargs)
        self._keep_mask(infos)
        return obs, infos

    def step(self, actions: np.ndarray):
        self._check(actions)
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        if self._keep_mask(infos) and "final_info" in infos:
            final = infos["final_info"]
            infos["final_mask"] = np.where(final["_action_mask"][:, None], final["action_mask"], True)
        return obs, rewards, terminated, truncated, infos

    def _keep_mask(self, infos: Mapping[str, Any]) -> bool:
        """Keep the masks of the environments that have given an observation; returns whether there are masks."""
        if "action_mask" in infos:
            given = infos["_action_mask"]
            self.mask = np.ones_like(infos["action_mask"]) if self.mask is None else self.mask.copy()
            self.mask[given] = infos["action_mask"][given]
        return self.mask is not None

    def _check(self, actions: np.ndarray) -> None:
        space, shape = self.single_action_space, self.action_space.shape
        if actions.shape != shape:
            raise ValueError(f"actions have shape {actions.shape}, must be {shape}")
        if isinstance(space, Discrete):
            low, high = space.start, space.start + space.n - 1
        elif isinstance(space, MultiDiscrete):
            low, high = space.start, space.start + space.nvec - 1
        elif isinstance(space, MultiBinary):
            low, high = 0, 1
        else:
            assert isinstance(space, Box), space
            low, high = space.low, space.high
        if not ((actions >= low) & (actions <= high)).all():  # false for NaN too
            raise ValueError(f"actions {actions} are outside {space}")
        if self.mask is not None and not (allowed := allows(space, self.mask, actions)).all():
            env = int(np.flatnonzero(~allowed)[0])
            raise ValueError(f"action {actions[env]} is masked in environment {env}")


def action_mask(env: VectorEnv) -> np.ndarray | None:
    """The choices that the environments of `make_vec_env` allow now: bool [N, choices]; None without masks."""
    while isinstance(env, VectorWrapper) and not isinstance(env, CheckActions):
        env = env.env
    return env.mask if isinstance(env, CheckActions) else None
