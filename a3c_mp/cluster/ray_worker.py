"""The process of a fleet's actor, on whichever node Ray has started it, and what it sends."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from a3c_mp.processes.pool import Closing, Token
from a3c_mp.processes.slots import Spec


class FleetChannel(Closing):
    """An actor's connection to its fleet, an `ActorChannel`."""

    def __init__(self, actor: int, seed_key: tuple[int, ...], restored: Any = None):
        super().__init__()
        self.worker, self.actor = 0, actor  # the only one that writes into the memory of its process
        self.seed_key, self.restored = seed_key, restored
        self.beats = 0
        self.memory: Any = None
        self.reasons: list[str] = []  # why it could not be rebuilt

    def beat(self) -> None:
        self.beats += 1

    def not_restored(self, reason: str) -> None:
        self.reasons.append(reason)


class RayWorker:
    """The process of an actor: makes `target(channel, *args)`, and calls it with each token."""

    def __init__(self, target: Callable[..., Any], channel: FleetChannel, args: tuple, niceness: int):
        os.nice(niceness)
        torch.set_num_threads(1)
        self.channel = channel
        self.produce = target(channel, *args)

    def hello(self) -> tuple[int, str, list[str]]:
        """(Process, node, why it could not be rebuilt), once it is ready."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id(), self.channel.reasons

    def fill(self, token: Token) -> tuple[Any, Any]:
        """Return (result, rows): the result is for the trainer, the rows are sent on by reference."""
        self.channel.beat()
        return self.produce(token)

    def beats(self) -> int:  # Ray runs it on a thread of its own
        return self.channel.beats

    def close(self) -> None:
        self.channel.close()


class Result(NamedTuple):
    """What an actor returns for a token."""

    payload: Any
    fields: Mapping[str, np.ndarray]  # from `Packer.pack`
    state: Mapping[str, Any]  # fields of its state slot; empty unless the run is deterministic


class Packer:
    """Packs slots of a spec into messages and back, bit for bit.

    Observations [stack, ...] hold the last `stack` frames of their episode, oldest first, zeros before its first; only
    the newest of each is packed. With a stack of 1, whole observations are.
    """

    def __init__(self, spec: Spec, stack: int = 1):
        self.spec, self.stack = spec, stack
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in spec.items()}
        if stack > 1:
            states = spec["obs"][0][0]
            sizes["obs"] = sizes["obs"] // (states * stack) * (states + stack - 1)
        self.nbytes = sum(sizes.values())  # of a message

    def empty(self) -> dict[str, Tensor]:
        """Allocate the fields of a slot in the memory of this process."""
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self.spec.items()}

    def pack(self, fields: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return the fields of a slot for sending, as views where they are sent whole."""
        packed = {name: field.numpy() for name, field in fields.items()}
        if self.stack > 1:
            obs = packed["obs"]
            packed["obs"] = np.concatenate([obs[0].swapaxes(0, 1), obs[1:, :, -1]])
        return packed

    def unpack(self, packed: Mapping[str, np.ndarray], fields: Mapping[str, Tensor]) -> None:
        """Write what `pack` returned into the fields of a slot."""
        for name, place in fields.items():
            if name == "obs" and self.stack > 1:
                self._restack(packed["obs"], place.numpy(), packed["terminated"] | packed["truncated"])
            else:
                place.numpy()[...] = packed[name]

    def _restack(self, frames: np.ndarray, obs: np.ndarray, done: np.ndarray) -> None:
        """Stack frames [T+stack, B, ...] into observations [T+1, B, stack, ...]; `done` [T, B] ends an episode."""
        states = len(obs)
        for position in range(self.stack):
            obs[:, :, position] = frames[position : position + states]
        for t, env in np.argwhere(done).tolist():
            for age in range(min(self.stack - 1, states - 1 - t)):  # steps since the new episode's start, at t + 1
                obs[t + 1 + age, env, : self.stack - 1 - age] = 0
