"""Checks that an environment follows gymnasium's API and its own spaces, in every step."""

from collections.abc import Callable, Collection
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from a3c_mp.wrappers.actions import mask_in, num_choices
from a3c_mp.wrappers.observations import NUMBERS, leaves

RESET = "observation", "info"
STEP = "observation", "reward", "terminated", "truncated", "info"  # parts of the results of `reset` and `step`
FLAGS = bool | int | np.bool_ | np.integer
UNWATCHED: Any = SimpleNamespace(starting=lambda: None, beat=lambda: None)
"""`heartbeats` that go nowhere: `starting` is called before an environment is made, `beat` after each reset and step"""


class BrokenContract(ValueError):
    """An environment violates gymnasium's API or its own spaces."""


class CheckedEnv(gymnasium.Wrapper):
    """Checks each result of an environment and adds its id, seed and number of steps to its errors.

    Without the check, a wrong shape or type raises an error in the vector environment that names none of them. NaN and
    infinity pass. Observations are copied: environments may write to the same arrays later. Of its infos,
    only the masks are passed on, as boolean arrays: a vector environment fails to merge values whose types change. Each
    result is a heartbeat.
    """

    def __init__(
        self, env: gymnasium.Env, env_id: str = "", seed: int | None = None, fields: Collection[str] = (),
        beat: Callable[[], object] = lambda: None, assume_identity: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        super().__init__(env)
        self.env_id, self.seed, self.steps, self.beat = env_id, seed, 0, beat
        self.assume_identity = assume_identity
        self.fields: dict[str, Any] = dict.fromkeys(fields)  # what the last step's info said under these names, or None
        self.space, self.actions = env.observation_space, env.action_space  # cached: properties go through all wrappers
        self.masked: bool | None = None  # whether it gives action masks; known from the first reset on

    def reset(self, **kwargs: Any):
        self.assume_identity()
        if kwargs.get("seed") is not None:
            self.seed, self.steps = kwargs["seed"], 0
        if not kwargs.get("options"):  # gymnasium passes {} where some of the environments are reset, else None
            kwargs.pop("options", None)
        return self._checked("reset()", RESET, self.env.reset, **kwargs)

    def step(self, action):
        result = self._checked("step()", STEP, self.env.step, action)
        self.steps += 1
        return result

    def place(self) -> str:
        """Which environment this is, and how far it is, for errors and warnings."""
        return f"{self.env_id}, seed {self.seed}, after {self.steps} steps"

    def _checked(self, call: str, names: tuple[str, ...], method: Callable[..., Any], *args: Any, **kwargs: Any):
        try:
            result = check_result(call, method(*args, **kwargs), names, self.space)
            info, mask = result[-1], None
            for name in self.fields if names is STEP else ():
                self.fields[name] = deepcopy(info.get(name))
            if self.masked is not False or "action_mask" in info:
                mask = self._mask(call, info, ended=names is STEP and bool(result[2] or result[3]))
        except Exception as error:
            error.add_note(f"(raised by {call} of {self.place()})")
            raise
        self.beat()
        obs = np.array(result[0]) if isinstance(self.space, Box) else result[0]
        return obs, *result[1:-1], {} if mask is None else {"action_mask": mask}

    def _mask(self, call: str, info: dict[str, Any], ended: bool) -> np.ndarray | None:
        """The mask of actions in an info: all have one, or none has, but for the end of an episode."""
        try:
            mask = mask_in(info, self.actions, ended=ended)
        except ValueError as error:
            raise BrokenContract(f"{call} returned {error}") from None
        has_mask = mask is not None
        if self.masked is None or self.masked == has_mask:
            self.masked = has_mask
            return mask
        if ended and self.masked:  # no action follows
            return np.ones(num_choices(self.actions).sum(), np.bool_)
        first, now = ("one", "no") if self.masked else ("none", "an")
        raise BrokenContract(f"{call} returned {now} action_mask, reset() returned {first}")


def check_result(call: str, result: Any, names: tuple[str, ...], space: gymnasium.Space) -> tuple:
    """Check and return the result of `reset` (names: `RESET`) or `step` (`STEP`), a reward of shape [1] as a number."""
    if not isinstance(result, tuple) or len(result) != len(names):
        given = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise BrokenContract(f"{call} returned {given}, gymnasium's API has {len(names)}: ({', '.join(names)})")
    if not isinstance(result[-1], dict):
        raise BrokenContract(f"{call} returned an info of type {type(result[-1]).__name__}, must be a dict")
    _check_obs(call, result[0], space)
    if names is STEP:
        _, reward, terminated, truncated, _ = result
        if type(reward) is not float:
            number = np.asarray(reward)
            if number.dtype.kind not in "biuf":
                raise BrokenContract(f"{call} returned the reward {reward}, must be a finite number")
            if number.size != 1:
                raise BrokenContract(f"{call} returned a reward of shape {number.shape}, must be one number")
            result = result[0], number.item(), *result[2:]
        if not (isinstance(terminated, FLAGS) and isinstance(truncated, FLAGS)):
            flags = [terminated, truncated]
            raise BrokenContract(f"{call} returned {flags} for terminated and truncated, must be True or False")
    return result


def _check_obs(call: str, obs: Any, space: gymnasium.Space, path: str = "") -> None:
    if isinstance(space, Dict | Tuple):
        try:
            parts = list(leaves(space, obs))
        except ValueError as error:
            raise BrokenContract(f"{call} returned an observation with other parts: {error}") from None
        for keys, inner_space, value in parts:
            _check_obs(call, value, inner_space, ".".join(map(str, keys)))
        return
    if not isinstance(space, NUMBERS):  # it is left out
        return
    obs = np.asarray(obs)
    part = f"its observation[{path}]" if path else "an observation"
    if obs.shape != space.shape:
        raise BrokenContract(f"{call} returned {part} of shape {obs.shape}, its space has {space.shape}")
    if obs.dtype != space.dtype and not np.can_cast(obs.dtype, space.dtype or object, "same_kind"):
        raise BrokenContract(f"{call} returned {part} of type {obs.dtype}, its space has {space.dtype}")
    if isinstance(space, Discrete | MultiDiscrete) and not space.contains(obs.astype(space.dtype)):
        raise BrokenContract(f"{call} returned {part} {obs}, its space is {space}")
