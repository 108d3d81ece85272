"""The process of a fleet's actor, on whichever node Ray has started it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import a3c_mp
from a3c_mp.processes.pool import Closing, Token

ROOT = Path(a3c_mp.__file__).parent
sys.path.append(str(ROOT / "chapters" if (ROOT / "chapters").exists() else ROOT.parent))  # actors are those of chapters


class FleetChannel(Closing):
    """An actor's connection to its fleet, an `ActorChannel`.

    Args:
        actor: its number in the fleet.
        seed_key: numbers that its seeds follow from, as of a `WorkerChannel`.
        restored: the state to continue from, or None.
    """

    def __init__(self, actor: int, seed_key: tuple[int, ...], restored: Any = None):
        super().__init__()
        self.worker, self.actor = 0, actor  # the only one that writes into the memory of its process
        self.seed_key, self.restored = seed_key, restored
        self.beats = 0
        self.memory: Any = None
        self.reasons: list[str] = []  # why it could not be rebuilt

    def beat(self) -> None:
        """Count a heartbeat."""
        self.beats += 1

    def not_restored(self, reason: str) -> None:
        """Report that the actor cannot continue from `restored`, and what it does instead."""
        self.reasons.append(reason)


class Hello(NamedTuple):
    """What an actor sends once it is ready."""

    pid: int
    node_id: str
    not_restored: list[str]


class RayWorker:
    """The process of an actor: makes `target(channel, *args)`, and calls it with each token.

    Ray runs `beats` on a thread of its own.
    """

    def __init__(self, target: Callable[..., Any], channel: FleetChannel, args: tuple, niceness: int):
        os.nice(niceness)
        torch.set_num_threads(1)
        self.channel = channel
        self.produce = target(channel, *args)

    def hello(self) -> Hello:
        import ray

        return Hello(os.getpid(), ray.get_runtime_context().get_node_id(), self.channel.reasons)

    def fill(self, token: Token) -> tuple[Any, Any]:
        """Return (result, rows): the result is for the trainer, the rows are sent on by reference."""
        self.channel.beat()
        return self.produce(token)

    def beats(self) -> int:
        """How many heartbeats there have been."""
        return self.channel.beats

    def close(self) -> None:
        self.channel.close()
