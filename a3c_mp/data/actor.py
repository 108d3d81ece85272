"""The process of an actor: what it shares with its learner, and its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.processes.pool import Token
from a3c_mp.processes.workers import WorkerChannel

Fill = Callable[[Token], Any]
"""fills the slot of a token with what an actor sends; returns a few figures to send with it, such as the version of the
weights that it acted with"""


@dataclass
class Memory:
    """What actors share with their learner: shared memory of one machine, or what stands for it on another."""

    slots: Any
    """`Slots`, or a `OneSlot`"""
    weights: Any
    """`Weights`, or what requests them from another machine"""
    states: Any
    """`ResumeStates` or `SentStates`"""
    dtype: torch.dtype
    """that actors compute in"""
    in_order: bool
    """whether actors act with the version that a token names; otherwise with the newest"""
    more: Any = None
    """of chapter 2 the weights that actors act with (`Weights`), of chapter 3 the replay that they fill (`Shards`)"""

    def place(self, net: Any) -> Any:
        """Move a net to the device of the weights and to the dtype that actors compute in."""
        return net.to(self.weights.device, self.dtype)

    def load(self, net: nn.Module, token: Token) -> int:
        """Copy the newest weights, or in order those that the token names, into `net`; return their version."""
        return self.weights.load(net, token.version if self.in_order else None)


class OneSlot:
    """Memory of an actor on another machine: one slot, which stands for all of the learner's. Its fields are sent."""

    def __init__(self, fields: dict[str, Tensor]):
        self.fields = fields

    def __getitem__(self, slot: int) -> dict[str, Tensor]:
        return self.fields


class SentStates:
    """In place of `ResumeStates`, in a deterministic actor on another machine: the state after its last message."""

    def __init__(self, deterministic: bool):
        self.deterministic = deterministic
        self.sent: dict[str, np.ndarray] = {}

    def write(self, slot: int, fields: Callable[..., dict[str, Any]], *args: Any) -> None:
        if self.deterministic:
            self.sent = {name: torch.as_tensor(value).numpy() for name, value in fields(*args).items()}


def run_actor(channel: WorkerChannel, make_actor: Callable[..., Fill], args: Any, memory: Memory) -> None:
    """Entry point of an actor: fill the slots of tokens, one after the other, until the learner ends the process."""
    channel.memory = memory
    fill = make_actor(channel, args)
    for token in channel.tokens():
        channel.send(token.slot, fill(token))
