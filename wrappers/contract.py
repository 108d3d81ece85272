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
        obs, _ = check_reset(env.reset(seed=0), env.observation_space)
        _check_finite("reset()", obs)
        call = f"step({action})"
        obs, reward, *_ = check_step(env.step(action), env.observation_space, call)
        _check_finite(call, obs)
        if not np.isfinite(reward):
            raise BrokenContract(f"{call} gave the reward {reward}, a finite number is needed")


def check_reset(result: Any, space: gymnasium.Space) -> tuple:
    """(observation, info) as `reset` returned them. Raises BrokenContract where they are of another form."""
    result = _unpack("reset()", result, "(observation, info)")
    _check_obs("reset()", result[0], space)
    return result


def check_step(result: Any, space: gymnasium.Space, call: str = "step()") -> tuple:
    """(observation, reward, terminated, truncated, info) as `step` returned them; NaN and infinity pass.

    Takes less than a microsecond, so that every step can be checked.

    Raises:
        BrokenContract: they are of another form.
    """
    result = _unpack(call, result, "(observation, reward, terminated, truncated, info)")
    obs, reward, terminated, truncated, _ = result
    _check_obs(call, obs, space)
    if type(reward) is not float and (np.ndim(reward) != 0 or np.asarray(reward).dtype.kind not in "biuf"):
        raise BrokenContract(f"{call} gave the reward {reward}, a finite number is needed")
    if not (_is_flag(terminated) and _is_flag(truncated)):
        flags = [terminated, truncated]
        raise BrokenContract(f"{call} gave {flags} for terminated and truncated, True or False are needed")
    return result


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
    if obs.dtype != space.dtype and not np.can_cast(obs.dtype, space.dtype or object, "same_kind"):
        raise BrokenContract(f"{call} gave an observation of type {obs.dtype}, its space says {space.dtype}")


def _check_finite(call: str, obs: Any) -> None:
    if not np.isfinite(np.asarray(obs)).all():
        raise BrokenContract(f"{call} gave an observation with NaN or infinity")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (np.ndim(value) == 0 and isinstance(value, np.bool_ | int | np.integer))
