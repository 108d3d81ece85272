"""What an environment has to keep to, tried out before anything is built on it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class BrokenContract(ValueError):
    """An environment departs from gymnasium's API, or from its own spaces."""


def check_contract(env: gymnasium.Env) -> None:
    """Reset an environment and step it, with the lowest and with the highest action.

    Its own wrappers are left aside: they would speak of what they received instead of naming its fault.

    Raises:
        BrokenContract: says how it departs from gymnasium's API.
        Exception: whatever it raises itself.
    """
    env = env.unwrapped
    for action in _extreme_actions(env.action_space):
        obs, _ = _unpack("reset()", env.reset(seed=0), "(observation, info)")
        _check_obs("reset()", obs, env.observation_space)
        names = "(observation, reward, terminated, truncated, info)"
        obs, reward, *ended, _ = _unpack(f"step({action})", env.step(action), names)
        _check_obs(f"step({action})", obs, env.observation_space)
        if np.ndim(reward) != 0 or not np.isfinite(float(reward)):
            raise BrokenContract(f"step({action}) gave the reward {reward}, a finite number is needed")
        if not all(np.ndim(flag) == 0 and isinstance(flag, bool | np.bool_ | int | np.integer) for flag in ended):
            raise BrokenContract(f"step({action}) gave {ended} for terminated and truncated, True or False are needed")


def _extreme_actions(space: gymnasium.Space) -> list[Any]:
    if isinstance(space, Discrete):
        return [space.dtype.type(space.start), space.dtype.type(space.start + space.n - 1)]
    if isinstance(space, Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        return [space.low.copy(), space.high.copy()]
    return [space.sample()]


def _unpack(call: str, result: Any, names: str) -> tuple:
    wanted = names.count(",") + 1
    if not isinstance(result, tuple) or len(result) != wanted:
        given = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise BrokenContract(f"{call} gave {given}, gymnasium's API has {wanted}: {names}")
    if not isinstance(result[-1], dict):
        raise BrokenContract(f"{call} gave an info of type {type(result[-1]).__name__}, a dict is needed")
    return result


def _check_obs(call: str, obs: Any, space: gymnasium.Space) -> None:
    obs = np.asarray(obs)
    if obs.shape != space.shape:
        raise BrokenContract(f"{call} gave an observation of shape {obs.shape}, its space says {space.shape}")
    if not np.can_cast(obs.dtype, space.dtype or object, "same_kind"):
        raise BrokenContract(f"{call} gave an observation of type {obs.dtype}, its space says {space.dtype}")
    if not np.isfinite(obs).all():
        raise BrokenContract(f"{call} gave an observation with NaN or infinity")
