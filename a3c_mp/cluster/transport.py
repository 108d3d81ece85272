"""Slots as messages: the fields of a slot packed into one array of bytes, of stacked frames only the new ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from a3c_mp.processes.slots import Slots, Spec, layout


class Result(NamedTuple):
    """What an actor returns for a token."""

    payload: Any
    fields: np.ndarray  # uint8, from `Packer.pack`
    state: Mapping[str, Any]  # fields of its state slot; empty unless the run is deterministic


class Packer:
    """Packs slots of a spec into arrays of bytes and back, bit for bit.

    Args:
        spec: shapes and dtypes of a slot's fields.
        stack: observations [stack, ...] hold the last `stack` frames of their episode, oldest first, zeros before its
            first; only the newest of each is packed. With 1, whole observations are.
    """

    def __init__(self, spec: Spec, stack: int = 1):
        self.spec, self.stack, self.packed_spec = spec, stack, dict(spec)
        if stack > 1:
            (states, num_envs, _, *frame), dtype = spec["obs"]
            self.packed_spec["obs"] = (states + stack - 1, num_envs, *frame), dtype
        self.offsets, self.nbytes = layout(self.packed_spec)

    def empty(self) -> dict[str, Tensor]:
        """Allocate the fields of a slot in the memory of this process."""
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self.spec.items()}

    def pack(self, fields: Mapping[str, Tensor]) -> np.ndarray:
        """Return the fields of a slot as uint8 [nbytes]."""
        packed = np.empty(self.nbytes, np.uint8)
        for name, place in self._views(packed).items():
            if name == "obs" and self.stack > 1:
                obs = fields["obs"].numpy()
                place[: self.stack] = obs[0].swapaxes(0, 1)
                place[self.stack :] = obs[1:, :, -1]
            else:
                place[...] = fields[name].numpy()
        return packed

    def unpack(self, packed: np.ndarray, fields: Mapping[str, Tensor]) -> None:
        """Write what `pack` returned into the fields of a slot."""
        views = self._views(packed)
        for name, place in fields.items():
            if name == "obs" and self.stack > 1:
                self._restack(views["obs"], place.numpy(), views["terminated"] | views["truncated"])
            else:
                place.numpy()[...] = views[name]

    def _restack(self, frames: np.ndarray, obs: np.ndarray, done: np.ndarray) -> None:
        """Stack frames [T+stack, B, ...] into observations [T+1, B, stack, ...]; `done` [T, B] ends an episode."""
        states = len(obs)
        for position in range(self.stack):
            obs[:, :, position] = frames[position : position + states]
        for t, env in np.argwhere(done).tolist():
            for age in range(min(self.stack - 1, states - 1 - t)):  # steps since the new episode's start, at t + 1
                obs[t + 1 + age, env, : self.stack - 1 - age] = 0

    def _views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of a packed slot, as views."""
        views = {}
        for name, (shape, dtype) in self.packed_spec.items():
            start = self.offsets[name]
            numbers = torch.empty(0, dtype=dtype).numpy().dtype
            views[name] = packed[start : start + math.prod(shape) * dtype.itemsize].view(numbers).reshape(shape)
        return views


class Inbox:
    """Where a fleet puts results: fields into the trainer's slots, states of actors into their own.

    Args:
        packer: as that of the actors.
        slots: of this process.
        states: slots for the states of actors, beside each slot; None unless the run is deterministic.
    """

    def __init__(self, packer: Packer, slots: Slots, states: Slots | None):
        self.packer, self.slots, self.states = packer, slots, states
        self.rows_ref: dict[int, Any] = {}  # of each slot

    def write(self, slot: int, result: Result, rows_ref: Any) -> Any:
        """Copy a result into a slot, keep the reference to its rows_ref; returns its payload."""
        self.packer.unpack(result.fields, self.slots[slot])
        if self.states is not None:
            for name, place in self.states[slot].items():
                place.numpy()[...] = result.state[name]
        self.rows_ref[slot] = rows_ref
        return result.payload
