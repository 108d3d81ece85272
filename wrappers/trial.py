"""A trial of an environment before a run: its first steps, with all that they show of its faults."""

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from a3c_mp.wrappers.actions import ACTIONS, ActionScaling, PlainActions, allowed_action, bounds, with_plain_actions
from a3c_mp.wrappers.contract import BrokenContract, CheckedEnv
from a3c_mp.wrappers.observations import NUMBERS, Image, Part, Prepared, leaves


class Trial(NamedTuple):
    """What the first steps of an environment have shown."""

    step_seconds: float
    lost: str  # which numbers of observations change, but not in float32, which nets get; "" if there are none


def check_contract(env: gymnasium.Env, beat: Callable[[], object] = lambda: None) -> Trial:
    """Reset an environment and step it with the lowest and with the highest action that it allows.

    It keeps the wrappers of its own, but not those that gymnasium and `make_env` have added: their errors would not
    name its fault. Raises BrokenContract, or what the environment raises.
    """
    images: Sequence[Image] = ()
    used: list[Part] = []
    if isinstance(env, Prepared):
        images, used, env = env.images, [*(image.part for image in env.images), *env.parts], env.env
    while isinstance(env, PlainActions | OrderEnforcing | TimeLimit):
        env = env.env
    for each in (env, env.unwrapped):  # a wrapper of its own may pass on any keywords
        for keywords in ({}, {"seed": 0, "options": None}):
            try:
                inspect.signature(each.reset).bind(**keywords)
            except TypeError as error:
                api = "gymnasium's API has reset(*, seed=None, options=None)"
                raise BrokenContract(f"{error} of reset(), {api}") from None
    checked = CheckedEnv(with_plain_actions(env), beat=beat)
    used = used or [Part(keys, part) for keys, part, _ in leaves(env.observation_space)]
    seen = []
    for last in (False, True):
        obs, info = checked.reset() if last else checked.reset(seed=0)  # as in the middle of a run, and as at its start
        _check_values("reset()", obs, used, images)
        seen.append([np.array(part.of(obs)) for part in used])
        started = time.perf_counter()
        obs, reward, *_ = checked.step(_extreme_action(checked.action_space, info.get("action_mask"), last))
        seconds = time.perf_counter() - started
        _check_values("step()", obs, used, images)
        seen.append([np.array(part.of(obs)) for part in used])
        if not np.isfinite(reward):
            raise BrokenContract(f"step() returned the reward {reward}, must be a finite number")
    lost = [
        f"{part.path} {number}".strip()
        for part, *values in zip(used, *seen, strict=True)
        if isinstance(part.space, Box) and part not in [image.part for image in images]
        for number in _lost(np.stack(values))
    ]
    return Trial(seconds, lost[0] + (f" and {len(lost) - 1} more" if lost[1:] else "") if lost else "")


def _lost(values: np.ndarray) -> np.ndarray:
    """Which numbers change in values [N, ...], by more than float64 rounds, but not in float32."""
    values = values.reshape(len(values), -1).astype(np.float64)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    changes = np.abs(values - values[0]).max(0) > 1e-12 * np.abs(values[0])
    return np.flatnonzero(changes & (single == single[0]).all(0) & (single[0] != 0) & np.isfinite(single[0]))


def _check_values(call: str, obs: Any, used: Sequence[Part], images: Sequence[Image]) -> None:
    for part in used:
        if isinstance(part.space, NUMBERS) and not np.isfinite(np.asarray(part.of(obs))).all():
            which = f"its observation[{part.path}]" if part.path else "an observation"
            raise BrokenContract(f"{call} returned {which} with NaN or infinity")
    for image in images:
        try:
            image.check(obs)
        except ValueError as error:
            raise BrokenContract(f"{call} returned an observation: {error}") from None


def _extreme_action(space: gymnasium.Space, mask: np.ndarray | None, last: bool) -> Any:
    """The lowest action, or the last: the highest; -1 or 1 without bounds, a random one of an unsupported space."""
    if mask is not None:
        return allowed_action(space, mask, max if last else min)
    if isinstance(space, Box):
        return ActionScaling(space)(np.full(space.shape, 1.0 if last else -1.0))[()]
    if not isinstance(space, ACTIONS):
        return space.sample()
    return bounds(space)[last].astype(space.dtype)[()]
