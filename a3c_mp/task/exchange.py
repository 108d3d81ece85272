"""Slots between nodes: the learner's `Intake` looks like `Workers`, a collector's `Outlet` like a `WorkerChannel`.

On one machine, a message carries the number of a slot that both processes share. From another machine it carries the
fields of the slot too, and the learner copies them into a slot of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from a3c_mp.processes.channel import ActorChannel, Token
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import Filled, RestartMessage, SlotLedger, StateSource, WorkerOptions
from a3c_mp.task.parallel import JOINED, LEFT, Callbacks, FirstNode, Node, Nodes

READY, TOKEN, FILLED, NOT_RESTORED = "slots.ready", "slots.token", "slots.filled", "slots.not_restored"
"""events: of a collector that has started (number,), to it (slot, version), of it (slot, payload, fields), (reason,)"""
JOIN, SETUP = "slots.join", "slots.setup"
"""events: of a collector of another machine (), and to it (worker, entropy)"""
WEIGHTS = "slots.weights"
"""request (version that the asking node has): (newest version, its values or None if it is the same)"""


class Setup(NamedTuple):
    """What a collector starts with."""

    worker: int  # its number among the collectors, from 0
    entropy: tuple[int, ...]  # numbers that its seeds follow from, as of a `WorkerChannel`
    restored: Any = None  # the state to continue from


class CollectorChannel(ActorChannel, Protocol):
    """A collector's end, wherever it runs; see `Outlet`."""

    def take(self) -> Token | None: ...
    def fields(self, slots: Slots, slot: int) -> dict[str, Tensor]: ...
    def send(self, slot: int, payload: Any) -> None: ...


# ---- at a collector


class Outlet:
    """A collector's end: tokens in, filled slots out.

    Args:
        node: of this process.
        setup: of this collector.
        own_slots: where a collector of another machine has its data; None where it shares the learner's slots.
    """

    def __init__(self, node: Node, setup: Setup, own_slots: Slots | None = None):
        self.node, self.own_slots = node, own_slots
        self.worker = self.actor = setup.worker
        self.entropy, self.restored = setup.entropy, setup.restored
        self._tokens: list[Token] = []
        node.handle(TOKEN, lambda sender, slot, version: self._tokens.append(Token(slot, version)))
        self.beat, self.closing = node.beat, node.closing
        self._say_ready()

    def _say_ready(self) -> None:
        self._tokens.clear()
        self.node.send(READY, self.worker, to="node.0")

    def take(self) -> Token | None:
        """Wait for a token to fill a slot; None if the task ends meanwhile."""
        while not self.node.finishing:
            if self._tokens:
                return self._tokens.pop(0)
            self.node.wait()
        return None

    def fields(self, slots: Slots, slot: int) -> dict[str, Tensor]:
        """Return the fields of a slot, to be filled."""
        return slots[slot] if self.own_slots is None else self.own_slots[0]

    def send(self, slot: int, payload: Any) -> None:
        """Hand a filled slot to the learner."""
        fields = None if self.own_slots is None else {name: f.clone() for name, f in self.own_slots[0].items()}
        self.node.send(FILLED, slot, payload, fields, to="node.0")

    def not_restored(self, reason: str) -> None:
        """Report that the collector cannot continue from `restored`, and what it does instead."""
        self.node.send(NOT_RESTORED, reason, to="node.0")


class RemoteOutlet(Outlet):
    """The end of a collector of another machine: it fills a slot of its own, whose fields travel with the message.

    Args:
        node: of this process.
        slots: one slot.
    """

    def __init__(self, node: Node, slots: Slots):
        self._setup: Setup | None = None
        self._session = 0  # a slot that was given in an earlier one is not this collector's any longer
        node.handle(SETUP, self._on_setup)
        node.handle(JOINED, self._on_joined)
        node.send(JOIN, to="node.0")
        while self._setup is None:
            node.wait()
        super().__init__(node, self._setup, slots)

    def take(self) -> Token | None:
        token = super().take()
        self._given_in = self._session
        return token

    def send(self, slot: int, payload: Any) -> None:
        if self._given_in == self._session:
            super().send(slot, payload)

    def _on_joined(self, sender: str) -> None:
        """Ask for slots again after the connection was lost."""
        if sender == "node.0":
            self._session += 1
            self._tokens.clear()
            self.node.send(JOIN, to="node.0")

    def _on_setup(self, sender: str, worker: int, entropy: list[int]) -> None:
        first, self._setup = self._setup is None, Setup(worker, tuple(entropy))
        if not first:
            self.worker = self.actor = worker
            self._say_ready()


class RemoteWeights:
    """The learner's newest weights, requested by a node of another machine; used as `Weights` is."""

    def __init__(self, node: Node, dtype: torch.dtype = torch.float32, timeout: float = 60.0):
        self.node, self.timeout = node, timeout
        self.buffers = torch.empty(0, dtype=dtype)  # of the dtype and on the device that actors compute in
        self.device = self.buffers.device
        self._version, self._values = -1, torch.empty(0)

    def load(self, net: nn.Module, version: int | None = None) -> int:
        """Copy the newest version into `net`, and return it."""
        newest, values = self.node.router.request(WEIGHTS, self._version, to="node.0", timeout=self.timeout)
        if values is not None:
            self._version, self._values = newest, values
        tensors = [tensor.detach() for tensor in net.state_dict().values()]
        parts = self._values.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])
        return self._version


def serve_weights(node: Node, weights: Weights) -> None:
    """Answer the requests of `RemoteWeights`, on the router's thread."""

    def answer(has_version: int) -> tuple[int, Tensor | None]:
        version = weights.version
        return (version, None) if version == has_version else weights.read()

    node.router.serve(WEIGHTS, answer)


# ---- at the learner


class Intake:
    """The filled slots of collectors that are nodes, in rounds, as `Workers` gives them.

    Args:
        nodes: among which the collectors are.
        numbers: of the nodes that are collectors 0, 1, ...
        slots: where data of collectors of other machines goes.
        num_workers, states, options, on_restart: as of `Workers`.
    """

    def __init__(
        self, nodes: Nodes, numbers: Iterable[int], slots: Slots, num_workers: int, *, states: StateSource,
        options: WorkerOptions, on_restart: Callable[[RestartMessage], None],
    ):  # fmt: skip
        self.nodes, self.slots, self.states, self.options, self.on_restart = nodes, slots, states, options, on_restart
        self.numbers = list(numbers)
        self.ledger = SlotLedger(num_workers, options)
        self.node: FirstNode | None = None
        self._names: list[str | None] = [None] * num_workers  # of the nodes that fill the slots now
        self._joins = 0  # of collectors of other machines, so far
        for worker, number in enumerate(self.numbers):
            nodes.callbacks[number] = Callbacks(partial(self._prepare, worker), partial(self._on_restart, worker))

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def connect(self, node: FirstNode) -> None:
        """Take the messages of collectors from now on."""
        self.node = node
        handlers: dict[str, Callable[..., None]] = {
            READY: self._on_ready,
            FILLED: self._on_filled,
            NOT_RESTORED: self._on_not_restored,
            JOIN: self._on_join,
            LEFT: self._on_left,
        }
        for event, handler in handlers.items():
            node.handle(event, handler)

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots, as `Workers.take` does."""
        assert self.node is not None, "connect first"
        while not should_stop():
            if found := self.ledger.take(size):
                return found
            self.node.wait(should_stop)
        return []

    def release(self, filled: Iterable[Filled], version: int) -> None:
        """Give slots back to their collectors, to be filled acting with weights `version` or newer."""
        for message in filled:
            self._send(message.worker, self.ledger.give(message, version))

    def _prepare(self, worker: int) -> Setup:
        """Called before a node of this machine is started."""
        restored = self.states.of(worker)
        restarts = 0 if restored is not None or self.node is None else self.node.supervisor.restarts
        return Setup(worker, (self.states.start, worker, restarts), restored)

    def _on_ready(self, sender: str, worker: int) -> None:
        self._names[worker] = sender
        for token in self.ledger.given[worker]:
            self._send(worker, token)

    def _on_filled(self, sender: str, slot: int, payload: Any, fields: Mapping[str, Tensor] | None) -> None:
        if sender not in self._names:
            return  # of a process that is lost: its successor fills the slot again
        assert self.node is not None
        worker = self._names.index(sender)
        if slot not in (token.slot for token in self.ledger.given[worker]):
            return
        if fields is not None:
            for name, place in self.slots[slot].items():
                place.copy_(fields[name])
        self.ledger.fill(worker, slot, payload)
        self.node.record_result(sender)

    def _on_join(self, sender: str) -> None:
        """Give a collector of another machine a place; without a free one it waits for nothing."""
        assert self.node is not None
        for worker in range(len(self.numbers), len(self._names)):
            if self._names[worker] is None:
                self._names[worker] = sender
                self._joins += 1
                self.on_restart(RestartMessage(worker, f"{sender} joined as collector {worker}", replaced=False))
                self.node.send(SETUP, worker, (self.states.start, worker, self._joins), to=sender)
                return
        self.on_restart(RestartMessage(-1, f"{sender} has no place: --remote-actors are all there", replaced=False))

    def _on_left(self, sender: str) -> None:
        if sender in self._names[len(self.numbers) :]:
            worker = self._names.index(sender)
            self._names[worker] = None
            self.ledger.forget(worker)
            self.on_restart(RestartMessage(worker, f"{sender}, collector {worker}, left", replaced=False, left=True))

    def _on_not_restored(self, sender: str, reason: str) -> None:
        if sender not in self._names:
            return  # of a process that is lost
        assert self.node is not None
        worker = self._names.index(sender)
        self.states.forget(worker)
        text = f"{self.node.child(sender)} cannot be rebuilt: {reason}"
        self.on_restart(RestartMessage(worker, text, replaced=False))

    def _on_restart(self, worker: int, text: str) -> None:
        """Forget what a lost collector has filled."""
        self.on_restart(RestartMessage(worker, text))
        self._names[worker] = None
        self.ledger.forget(worker)

    def _send(self, worker: int, token: Token) -> None:
        assert self.node is not None
        if (name := self._names[worker]) is not None:
            self.node.send(TOKEN, *token, to=name)


class OneProcess:
    """Collectors, slots and learner in one process: their channels, and the rounds that they have filled.

    Args:
        num_workers, states, options, on_restart: as of `Workers`.
    """

    def __init__(
        self, num_workers: int, *, states: StateSource, options: WorkerOptions,
        on_restart: Callable[[RestartMessage], None],
    ):  # fmt: skip
        self.ledger = SlotLedger(num_workers, replace(options, in_order=True))
        self.channels = [
            LocalChannel(self, Setup(worker, (states.start, worker, 0), states.of(worker)))
            for worker in range(num_workers)
        ]
        for channel, tokens in zip(self.channels, self.ledger.given, strict=True):
            channel.tokens.extend(tokens)
        self.states, self.on_restart = states, on_restart

    def __enter__(self) -> OneProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        for channel in self.channels:
            channel.close()

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Return the next round, or an empty one if it is not complete yet."""
        return [] if should_stop() else self.ledger.take(size)

    def release(self, filled: Iterable[Filled], version: int) -> None:
        """Give slots back to their collectors."""
        for message in filled:
            self.channels[message.worker].tokens.append(self.ledger.give(message, version))


class LocalChannel:
    """A collector's end in the process of the learner; see `Outlet`."""

    def __init__(self, pool: OneProcess, setup: Setup):
        self.pool, self.worker, self.actor = pool, setup.worker, setup.worker
        self.entropy, self.restored = setup.entropy, setup.restored
        self.tokens: list[Token] = []
        self._open: list[Any] = []

    def take(self) -> Token | None:
        """Return the next token; None if all slots are filled."""
        return self.tokens.pop(0) if self.tokens else None

    def fields(self, slots: Slots, slot: int) -> dict[str, Tensor]:
        return slots[slot]

    def send(self, slot: int, payload: Any) -> None:
        self.pool.ledger.fill(self.worker, slot, payload)

    def not_restored(self, reason: str) -> None:
        self.pool.states.forget(self.worker)
        text = f"collector {self.worker} cannot be rebuilt: {reason}"
        self.pool.on_restart(RestartMessage(self.worker, text, replaced=False))

    def beat(self) -> None:
        pass

    def closing(self, resource: Any) -> Any:
        self._open.append(resource)
        return resource

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
