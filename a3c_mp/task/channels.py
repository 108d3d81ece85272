"""The end of a collector that is a node, on the learner's machine or another.

On one machine, a message carries the number of a slot that both processes share. From another machine it carries the
fields of the slot too, and with each token the learner sends its weights there.
"""

from __future__ import annotations

import socket
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from a3c_mp.errors import ConfigError
from a3c_mp.processes.channel import ActorChannel, Token
from a3c_mp.processes.slots import Slots
from a3c_mp.task.node import Node
from a3c_mp.task.start import REPORT_NAME, REPORT_RESULT
from a3c_mp.task.wire import JOINED

JOIN, FILLED, NOT_RESTORED = "slots.join", "slots.filled", "slots.not_restored"
"""events of a collector: (host name), it starts or is connected again; (slot, payload, fields or None); (reason)"""
SETUP, TOKEN, NO_PLACE = "slots.setup", "slots.token", "slots.no_place"
"""events to a collector: (worker, seed_key, tokens of all slots that it has to fill, weights); (token, weights);
(number of places). A token is [slot, version], weights are [version, values], or None on the learner's machine"""


class Setup(NamedTuple):
    """What a collector starts with."""

    worker: int  # its number among the collectors, from 0
    seed_key: tuple[int, ...]  # numbers that its seeds follow from, as of a `WorkerChannel`
    restored: Any = None  # the state to continue from


class CollectorChannel(ActorChannel, Protocol):
    """A collector's end, wherever it runs: `NodeChannel`, or `exchange.LocalChannel`."""

    def take(self) -> Token | None: ...
    def fields(self, slots: Slots, slot: int) -> dict[str, Tensor]: ...
    def send(self, slot: int, payload: Any) -> None: ...


class RemoteWeights:
    """The learner's weights at a collector of another machine, used as `Weights` is: they come with the tokens.

    Args:
        dtype: that its actors compute in; the learner's may be another.
    """

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.buffers = torch.empty(0, dtype=dtype)  # of the dtype and on the device that actors compute in
        self.version, self.values = -1, torch.empty(0)

    def load(self, net: nn.Module, version: int | None = None) -> int:
        """Copy the newest version into `net`, and return it."""
        tensors = [tensor.detach() for tensor in net.state_dict().values()]
        parts = self.values.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])
        return self.version


class NodeChannel:
    """A collector's end: tokens in, filled slots out.

    Args:
        node: of this process.
        setup: of this collector, on the learner's machine; else None, as the learner sends it.
        slots, weights: on another machine, its only slot, and what it loads its weights from.

    Raises:
        ConfigError: the learner has no place for another collector; also from later looks at messages, where another
            one has taken its place while the connection was lost.
    """

    worker: int
    actor: int
    seed_key: tuple[int, ...]
    restored: Any

    def __init__(
        self, node: Node, setup: Setup | None, slots: Slots | None = None, weights: RemoteWeights | None = None
    ):
        self.node, self.own_slots, self.weights = node, slots, weights
        self.beat, self.closing = node.beat, node.closing
        self._tokens: list[Token] | None = None  # None: the first ones have not arrived
        self._slot: int | None = None  # that is filled now; None if its session has ended
        self._has_sent = False
        node.handle(SETUP, self._on_setup, [int, list, list, object])
        node.handle(TOKEN, self._on_token, [list, object])
        node.handle(NO_PLACE, self._on_no_place, [int])
        node.handle(JOINED, self._on_joined)
        self._on_joined()
        if setup is not None:
            self._set_up(setup)
            return
        while self._tokens is None:
            node.wait()
        node.starting()  # its first heartbeat was long ago; its environments are not made yet

    def take(self) -> Token | None:
        """Wait for a token to fill a slot; None if the task ends meanwhile."""
        while not self.node.finishing:
            if self._tokens:
                token = self._tokens.pop(0)
                self._slot = token.slot
                return token
            self.node.wait()
        return None

    def fields(self, slots: Slots, slot: int) -> dict[str, Tensor]:
        """Return the fields of a slot, to be filled."""
        return slots[slot] if self.own_slots is None else self.own_slots[0]

    def send(self, slot: int, payload: Any) -> None:
        """Hand a filled slot to the learner. One of an earlier session is lost: its token is given again."""
        if slot == self._slot:
            fields = None if self.own_slots is None else self.own_slots[0]
            self.node.send(FILLED, slot, payload, fields)
        if not self._has_sent:
            self._has_sent = True
            self.node.report(REPORT_RESULT)

    def not_restored(self, reason: str) -> None:
        """Report that the collector cannot continue from `restored`, and what it does instead."""
        self.node.send(NOT_RESTORED, reason)

    def _set_up(self, setup: Setup) -> None:
        self.worker = self.actor = setup.worker
        self.seed_key, self.restored = setup.seed_key, setup.restored

    def _on_joined(self, sender: str = "") -> None:
        """The node is connected to the learner's, for the first time or again: what was under way is lost."""
        self._tokens = self._slot = None
        self.node.send(JOIN, socket.gethostname())

    def _on_setup(self, sender: str, worker: int, seed_key: list[int], tokens: list[list[int]], weights: Any) -> None:
        self._tokens = []
        for token in tokens:
            self._on_token(sender, token, weights)
        if self.own_slots is not None:
            self._set_up(Setup(worker, tuple(seed_key)))
            self.node.report(REPORT_NAME, f"collector {worker}")

    def _on_token(self, sender: str, token: list[int], weights: Any) -> None:
        if self._tokens is not None:  # else it is among the first ones, which are on their way
            self._tokens.append(Token(*token))
            if self.weights is not None:
                self.weights.version, self.weights.values = weights

    def _on_no_place(self, sender: str, number: int) -> None:
        why = f"its {number} places for collectors of other machines are taken"
        fix = "start it with more --remote-actors, or attach fewer (--num-actors)"
        raise ConfigError("attach-to", self.node.router.endpoint.dials, why, fix)
