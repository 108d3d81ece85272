"""Rollouts: T steps of B environments, as actors write them and the learner reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from a3c_mp.errors import ConfigError
from a3c_mp.nets.distributions import num_params
from a3c_mp.processes.slots import Spec, page_locked


class Rollout(NamedTuple):
    """A rollout: T steps of B environments, time first. In a slot, the fields are views of shared memory.

    Step t: the action chosen at obs[t] earned reward[t] and led to obs[t+1], which is already the next episode's first
    observation where the episode ended at t.
    """

    obs: Tensor  # [T+1, B, *obs_shape] uint8 for images, float32 otherwise
    action: Tensor  # [T, B, *action_shape] int64, or float32 as sampled, unclipped
    reward: Tensor  # [T, B] float32, raw
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    life_lost: Tensor  # [T, B] bool, a life lost while the game goes on
    behaviour_logits: Tensor  # [T, B, P] float32, parameters of the distribution that the action was sampled from
    value: Tensor  # [T+1, B] float32, V(obs[t]) from the acting pass
    truncation_value: Tensor  # [T, B] float32, V of the observation an episode was truncated at, which alone is read
    episode_return: Tensor  # [T, B] float64, sum of raw rewards of the game so far
    episode_length: Tensor  # [T, B] int32, agent steps of the game so far
    lstm_state: Tensor  # [1, B, S] float32, state of a recurrent net before obs[0]; S = 0 for other nets
    extra: Mapping[str, Tensor] = {}  # [T, B, ...], the fields that a chapter declares besides (see `InfoField`)

    @classmethod
    def of(cls, fields: Mapping[str, Tensor]) -> Rollout:
        """The rollout whose fields a slot has."""
        own = {name: fields[name] for name in cls._fields if name != "extra"}
        return cls(**own, extra={name: field for name, field in fields.items() if name not in own})

    @property
    def done(self) -> Tensor:
        """Where episodes end, bool [T, B]."""
        return self.terminated | self.truncated

    def fields(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._fields if name != "extra"} | dict(self.extra)

    def map(self, function: Callable[[Tensor], Tensor]) -> Rollout:
        """A rollout with `function` applied to every field."""
        return Rollout.of({name: function(field) for name, field in self.fields().items()})

    def to(self, device: torch.device) -> Rollout:
        """Copy the rollout to a device; from pinned memory to a GPU, the copies are asynchronous."""
        return self.map(lambda field: field.to(device, non_blocking=True))


class InfoField(NamedTuple):
    """A field that a chapter adds to its rollouts: what `infos` of each step says under the field's name.

    Place t has what the step that led to obs[t+1] said, at the end of an episode too; what `reset` says is left out.
    On Atari the last step of an episode has the values of the next one's first screen.
    Where `infos` does not have it, or None, 0.
    """

    shape: tuple[int, ...] = ()  # for one environment
    dtype: torch.dtype = torch.float32

    def read(self, infos: Mapping[str, Any], name: str, num_envs: int) -> np.ndarray:
        """The values [B, *shape] of one step of a vector environment. Raises ValueError for one that does not fit."""
        values = np.zeros((num_envs, *self.shape), torch.empty(0, dtype=self.dtype).numpy().dtype)
        for env, value in enumerate(infos.get(name, ())):
            if value is None:
                continue
            try:
                if np.shape(value) != self.shape:
                    raise ValueError
                values[env] = value
                if values.dtype.kind in "biu" and not np.array_equal(values[env], value):
                    raise ValueError
            except (TypeError, ValueError, OverflowError):
                given, wanted = " ".join(repr(value).split())[:80], f"{self.dtype} of shape {self.shape}"
                raise ValueError(f"infos[{name!r}] is {given}, rollout_fields says {wanted}") from None
        return values


def rollout_spec(
    unroll_length: int, num_envs: int, obs_space: gymnasium.Space, action_space: gymnasium.Space, lstm_size: int = 0,
    extra: Mapping[str, InfoField] = {},
) -> Spec:  # fmt: skip
    """Shapes and dtypes of a `Rollout`: T = unroll_length, B = num_envs."""
    assert isinstance(obs_space, Box), obs_space
    if taken := extra.keys() & {*Rollout._fields, "action_mask", "final_obs", "final_info"}:
        raise ConfigError("rollout_fields", " ".join(taken), "rollouts or infos have this name", "rename it")
    steps = (unroll_length, num_envs)
    states = (unroll_length + 1, num_envs)
    obs_dtype = torch.uint8 if obs_space.dtype == np.uint8 else torch.float32
    action_dtype = torch.float32 if isinstance(action_space, Box) else torch.int64
    return {
        "obs": ((*states, *obs_space.shape), obs_dtype),
        "action": ((*steps, *(action_space.shape or ())), action_dtype),
        "reward": (steps, torch.float32),
        "terminated": (steps, torch.bool),
        "truncated": (steps, torch.bool),
        "life_lost": (steps, torch.bool),
        "behaviour_logits": ((*steps, num_params(action_space)), torch.float32),
        "value": (states, torch.float32),
        "truncation_value": (steps, torch.float32),
        "episode_return": (steps, torch.float64),
        "episode_length": (steps, torch.int32),
        "lstm_state": ((1, num_envs, lstm_size), torch.float32),
        **{name: ((*steps, *field.shape), field.dtype) for name, field in extra.items()},
    }


def empty_rollout(spec: Spec, pin: bool = False) -> Rollout:
    """A rollout of zeros in the memory of this process; `pin` page-locks it, for copies to the GPU."""
    rollout = Rollout.of({name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()})
    return rollout.map(page_locked) if pin else rollout


def write_step(fields: Mapping[str, Tensor], t: int, /, **values: Tensor | np.ndarray | bool) -> None:
    """Write the values [B, ...] of step t into fields [T, B, ...], as of a rollout."""
    for name, value in values.items():
        fields[name][t] = torch.as_tensor(value)


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts along the batch dimension: several [T, B, ...] -> [T, sum of B, ...]."""
    if len(rollouts) == 1:
        return rollouts[0]
    parts = [rollout.fields() for rollout in rollouts]
    return Rollout.of({name: torch.cat([fields[name] for fields in parts], 1) for name in parts[0]})


def episode_starts(rollout: Rollout) -> Tensor:
    """Whether obs[t] is an episode's first, bool [T+1, B]; false at t = 0, where `lstm_state` is reset already."""
    return torch.cat([torch.zeros_like(rollout.terminated[:1]), rollout.done])


def is_finite(rollout: Rollout) -> bool:
    """Whether a rollout has no NaN or inf in what is learned from."""
    fields = [rollout.reward, rollout.value, rollout.behaviour_logits, rollout.truncation_value[rollout.truncated]]
    fields += [rollout.obs, rollout.lstm_state, rollout.action, *rollout.extra.values()]
    return all(bool(torch.isfinite(field).all()) for field in fields if field.is_floating_point())


def minibatches(num_samples: int, batch_size: int, rng: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """The indices int64 [M] of shuffled minibatches in which every sample is once.

    They are of nearly one size, `batch_size` at most: a small last one would weigh as much as the others.
    """
    if num_samples == 0:
        return ()
    return to_device(torch.randperm(num_samples, generator=rng), device).tensor_split(-(-num_samples // batch_size))


def to_device(indices: Tensor, device: torch.device) -> Tensor:
    """Move indices to a device; to a GPU through page-locked memory, for which nothing waits."""
    return (page_locked(indices) if device.type == "cuda" else indices).to(device, non_blocking=True)
