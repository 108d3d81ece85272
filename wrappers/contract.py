"""Checks that an environment follows gymnasium's API and its own spaces."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.wrappers import FlattenObservation, OrderEnforcing, TimeLimit

from wrappers.actions import allowed_action, mask_in, num_choices
from wrappers.structured import Float32Observation, parts_of

ADDED = OrderEnforcing, TimeLimit, Float32Observation, FlattenObservation
"""wrappers of gymnasium that `make_env` adds; an environment's own are part of it"""


class BrokenContract(ValueError):
    """An environment violates gymnasium's API or its own spaces."""


def check_contract(env: gymnasium.Env) -> None:
    """Try an environment: reset it and step it with the lowest and with the highest action that it allows.

    It is checked with the wrappers of its own, but without those of `make_env`, whose errors would not name its fault.

    Raises:
        BrokenContract: how it violates gymnasium's API.
        Exception: whatever the environment raises.
    """
    while isinstance(env, ADDED) or (isinstance(env, gymnasium.Wrapper) and type(env).__module__ == "wrappers.atari"):
        env = env.env
    for last in (False, True):
        obs, info = check_reset(env.reset(seed=0), env.observation_space)
        _check_finite("reset()", obs, env.observation_space)
        mask = check_mask("reset()", info, env.action_space)
        action = _extreme_action(env.action_space, mask, last)
        call = f"step({action})"
        obs, reward, terminated, truncated, info = check_step(env.step(action), env.observation_space, call)
        _check_finite(call, obs, env.observation_space)
        check_mask(call, info, env.action_space, mask is not None, ended=bool(terminated or truncated))
        if not np.isfinite(reward):
            raise BrokenContract(f"{call} returned the reward {reward}, must be a finite number")


def check_reset(result: Any, space: gymnasium.Space) -> tuple:
    """The (observation, info) of `reset`, checked. Raises BrokenContract."""
    result = _unpack("reset()", result, "(observation, info)")
    _check_obs("reset()", result[0], space)
    return result


def check_step(result: Any, space: gymnasium.Space, call: str = "step()") -> tuple:
    """The (observation, reward, terminated, truncated, info) of `step`, checked; NaN and infinity pass.

    The check takes less than a microsecond, so every step can afford it.

    Raises:
        BrokenContract: a part has the wrong shape or type.
    """
    result = _unpack(call, result, "(observation, reward, terminated, truncated, info)")
    obs, reward, terminated, truncated, _ = result
    _check_obs(call, obs, space)
    if type(reward) is not float and (np.ndim(reward) != 0 or np.asarray(reward).dtype.kind not in "biuf"):
        raise BrokenContract(f"{call} returned the reward {reward}, must be a finite number")
    if not (_is_flag(terminated) and _is_flag(truncated)):
        flags = [terminated, truncated]
        raise BrokenContract(f"{call} returned {flags} for terminated and truncated, must be True or False")
    return result


def check_mask(
    call: str, info: dict[str, Any], space: gymnasium.Space, masked: bool | None = None, *, ended: bool = False
) -> np.ndarray | None:
    """The mask of actions in an info, as `mask_in` gives it, checked. Raises BrokenContract.

    Args:
        call: that returned the info.
        info: of an environment.
        space: of its actions.
        masked: whether it gave masks before; None if this is its first info.
        ended: the episode has ended.
    """
    try:
        mask = mask_in(info, space, ended=ended)
    except ValueError as error:
        raise BrokenContract(f"{call} returned {error}") from None
    if masked is None or masked == (mask is not None):
        return mask
    if ended and masked:  # no action follows
        return np.ones(num_choices(space).sum(), np.bool_)
    raise BrokenContract(
        f"{call} returned {'no' if masked else 'an'} action_mask, reset() returned {'one' if masked else 'none'}"
    )


def _extreme_action(space: gymnasium.Space, mask: np.ndarray | None, last: bool) -> Any:
    """The lowest action, or the last: the highest."""
    if mask is not None:
        return allowed_action(space, mask, last=last)
    if isinstance(space, Discrete):
        return space.dtype.type(space.start + (space.n - 1 if last else 0))
    if isinstance(space, Box) and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        return (space.high if last else space.low).copy()
    return space.sample()


def _unpack(call: str, result: Any, names: str) -> tuple:
    wanted = names.count(",") + 1
    if not isinstance(result, tuple) or len(result) != wanted:
        given = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise BrokenContract(f"{call} returned {given}, gymnasium's API has {wanted}: {names}")
    if not isinstance(result[-1], dict):
        raise BrokenContract(f"{call} returned an info of type {type(result[-1]).__name__}, must be a dict")
    return result


def _check_obs(call: str, obs: Any, space: gymnasium.Space, part: str = "observation") -> None:
    if isinstance(space, Dict | Tuple):
        for path, inner, inner_space in _parts(call, obs, space):
            _check_obs(call, inner, inner_space, f"observation[{path}]")
        return
    obs = np.asarray(obs)
    a = "an" if part == "observation" else "its"
    if obs.shape != space.shape:
        raise BrokenContract(f"{call} returned {a} {part} of shape {obs.shape}, its space has {space.shape}")
    if obs.dtype != space.dtype and not np.can_cast(obs.dtype, space.dtype or object, "same_kind"):
        raise BrokenContract(f"{call} returned {a} {part} of type {obs.dtype}, its space has {space.dtype}")
    if isinstance(space, Discrete | MultiDiscrete) and not space.contains(obs.astype(space.dtype)):
        raise BrokenContract(f"{call} returned {a} {part} {obs}, its space is {space}")


def _parts(call: str, obs: Any, space: gymnasium.Space) -> list[tuple[str, Any, gymnasium.Space]]:
    try:
        return list(parts_of(obs, space))
    except ValueError as error:
        raise BrokenContract(f"{call} returned an observation with other parts: {error}") from None


def _check_finite(call: str, obs: Any, space: gymnasium.Space) -> None:
    for _, part, _ in _parts(call, obs, space):
        if not np.isfinite(np.asarray(part)).all():
            raise BrokenContract(f"{call} returned an observation with NaN or infinity")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (np.ndim(value) == 0 and isinstance(value, np.bool_ | int | np.integer))
