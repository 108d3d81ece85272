"""The process of a fleet's actor, on whichever node Ray has started it, and what it sends."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from a3c_mp.errors import ConfigError
from a3c_mp.processes.pool import Closing, Token
from a3c_mp.processes.slots import Spec


class RayWorker(Closing):
    """Process of a `Fleet`'s actor, and its channel: `target(channel)` returns what is called for each token."""

    def __init__(self, target: Callable[[Any], Any], niceness: int, seed_key: tuple[int, ...], restored: Any):
        os.nice(niceness)
        torch.set_num_threads(1)
        self.worker = 0  # the only one that writes into the memory of its process
        self.seed_key, self.restored = seed_key, restored  # (steps at the start, number of the actor, starts)
        self.actor = seed_key[1]
        self.memory: Any = None
        self.running: tuple[int, int] | None = None  # see `Memory.running`
        self.beats = 0
        self.reasons: list[str] = []  # why it could not be rebuilt
        self.refusal = ""  # why it cannot work on this node
        try:
            self.produce = target(self)
        except ConfigError as error:
            self.refusal = str(error)

    def beat(self) -> None:
        self.beats += 1

    starting = beat

    def not_restored(self, reason: str) -> None:
        self.reasons.append(reason)

    # ---- what the fleet calls, besides `close`

    def heartbeats(self) -> tuple[int, int, str, list[str], str]:
        """(Heartbeats so far, process, node, why it could not be rebuilt, or not work), on a thread of its own."""
        import ray

        return self.beats, os.getpid(), ray.get_runtime_context().get_node_id(), self.reasons, self.refusal

    def fill(self, token: Token, running: tuple[int, int] | None) -> tuple[Any, Any]:
        self.running = running
        self.beat()
        return (None, None) if self.refusal else self.produce(token)


class Packer:
    """Packs slots of a spec into messages and back, bit for bit.

    Observations [stack, ...] hold the last `stack` frames of their episode, oldest first, zeros before its first; only
    the newest of each is packed. With a stack of 1, whole observations are, and of messages that are no rollouts.
    """

    def __init__(self, spec: Spec, stack: int = 1):
        self.spec, self.stack = spec, stack if spec.keys() >= {"obs", "terminated", "truncated"} else 1
        self.nbytes = sum(field.nbytes for field in self.pack(self.empty()).values())  # of a message

    def empty(self) -> dict[str, Tensor]:
        """Allocate the fields of a slot in the memory of this process."""
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self.spec.items()}

    def pack(self, fields: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return the fields of a slot for sending: views, except of stacked observations."""
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
