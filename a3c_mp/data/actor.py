"""The process of an actor: what it shares with its learner, and its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from a3c_mp.data.resume_states import ResumeStates
from a3c_mp.processes.pool import Token
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import WorkerChannel

Fill = Callable[[Token], Any]
"""fills the slot of a token with what an actor sends; returns a few figures to send with it, such as the version of the
weights that it acted with"""


@dataclass
class Memory:
    """What actors share with their learner: shared memory of one machine, or what stands for it on another."""

    slots: Slots
    weights: Weights
    states: ResumeStates
    dtype: torch.dtype
    """that nets act in"""
    in_order: bool
    """whether actors act with the version that a token names; otherwise with the newest"""
    more: Any = None
    """of chapter 2 the weights that actors act with (`Weights`), of chapter 3 the replay that they fill (`Shards`)"""

    def load(self, net: nn.Module, token: Token) -> int:
        """Copy the newest weights, or in order those that the token names, into `net`; return their version."""
        return self.weights.load(net, token.version if self.in_order else None)


def run_actor(channel: WorkerChannel, make_actor: Callable[..., Fill], args: Any, memory: Memory) -> None:
    """Entry point of an actor: fill the slots of tokens, one after the other, until the learner ends the process."""
    channel.memory = memory
    fill = make_actor(channel, args)
    for token in channel.tokens():
        channel.send(token.slot, fill(token))
