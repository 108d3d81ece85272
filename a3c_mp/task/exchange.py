"""Slots between nodes: the learner's `NodePool` is used as `Workers` is, a collector's `NodeChannel` as a channel.

On one machine, a message carries the number of a slot that both processes share. From another machine it carries the
fields of the slot too, and the learner copies them into a slot of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from a3c_mp.processes.pool import ActorChannel, Filled, SlotLedger, StateSource, Token, WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import Slots
from a3c_mp.task.endpoint import node_name
from a3c_mp.task.events import JOINED, LEFT
from a3c_mp.task.node import FirstNode, Node
from a3c_mp.task.parallel import Callbacks
from a3c_mp.task.wire import WireError

COLLECTOR_READY, TOKENS, TOKEN = "slots.ready", "slots.tokens", "slots.token"
"""events: of a collector that has started (number), to it the tokens of all slots that it has to fill ([[slot,
version], ...]), and later of one more (slot, version)"""
FILLED, NOT_RESTORED = "slots.filled", "slots.not_restored"
"""events: of a collector (slot, payload, fields or None), (reason)"""
JOIN, SETUP, NO_PLACE = "slots.join", "slots.setup", "slots.no_place"
"""events: of a collector of another machine (host name), and to it (worker, seed_key), or (number of places)"""


class Setup(NamedTuple):
    """What a collector starts with."""

    worker: int  # its number among the collectors, from 0
    seed_key: tuple[int, ...]  # numbers that its seeds follow from, as of a `WorkerChannel`
    restored: Any = None  # the state to continue from


class CollectorChannel(ActorChannel, Protocol):
    """A collector's end, wherever it runs; see `NodeChannel`."""

    def take(self) -> Token | None: ...
    def send(self, slot: int, payload: Any) -> None: ...


# ---- at a collector


class NodeChannel:
    """A collector's end: tokens in, filled slots out.

    Args:
        node: of this process.
        setup: of this collector; None if the learner sends it later.
        own_slots: where a collector of another machine has its data; None where it shares the learner's slots.
    """

    worker: int
    actor: int
    seed_key: tuple[int, ...]
    restored: Any
    memory: Any

    def __init__(self, node: Node, setup: Setup | None, own_slots: Slots | None = None):
        self.node, self.own_slots = node, own_slots
        self._tokens: list[Token] = []
        self._has_asked = False  # its first tokens are on their way, and what comes before is among them
        self._session = self._taken_in = 0  # a slot that was taken in an earlier session is not this collector's now
        node.handle(TOKENS, self._on_tokens, [list], sender="node.0")
        node.handle(TOKEN, self._on_token, [int, int], sender="node.0")
        node.handle(JOINED, self._on_joined)
        self.beat, self.closing = node.beat, node.closing
        if setup is not None:
            self._set_up(setup)

    def take(self) -> Token | None:
        """Wait for a token to fill a slot; None if the task ends meanwhile."""
        while not self.node.finishing:
            if self._tokens:
                self._taken_in = self._session
                return self._tokens.pop(0)
            self.node.wait()
        return None

    def send(self, slot: int, payload: Any) -> None:
        """Hand a filled slot to the learner. One of an earlier session is lost: its token is given again."""
        if self._taken_in == self._session:
            fields = None if self.own_slots is None else self.own_slots[0]
            self.node.send(FILLED, slot, payload, fields, to="node.0")

    def not_restored(self, reason: str) -> None:
        """Report that the collector cannot continue from `restored`, and what it does instead."""
        self.node.send(NOT_RESTORED, reason, to="node.0")

    def _set_up(self, setup: Setup) -> None:
        self.worker = self.actor = setup.worker
        self.seed_key, self.restored = setup.seed_key, setup.restored
        self._ask()

    def _ask(self) -> None:
        """Ask for slots."""
        self._has_asked = True
        self.node.send(COLLECTOR_READY, self.worker, to="node.0")

    def _ask_again(self) -> None:
        """The connection was lost, and is there again."""
        self._ask()

    def _on_tokens(self, sender: str, tokens: list[list[int]]) -> None:
        self._has_asked, self._tokens = False, [Token(*token) for token in tokens]

    def _on_token(self, sender: str, slot: int, version: int) -> None:
        if not self._has_asked:
            self._tokens.append(Token(slot, version))

    def _on_joined(self, sender: str) -> None:
        if sender == "node.0":
            self._session += 1
            self._tokens.clear()
            self._ask_again()


# ---- at the learner


class NodePool:
    """The filled slots of collectors that are nodes, in rounds, as `Workers` gives them.

    Args:
        callbacks: of the nodes, by number; gets those of the collectors.
        numbers: of the nodes that are collectors 0, 1, ...
        slots: where data of collectors of other machines goes.
        num_workers, states, options, on_restart: as of `Workers`.
    """

    def __init__(
        self, callbacks: dict[int, Callbacks], numbers: Iterable[int], slots: Slots, num_workers: int, *,
        states: StateSource, options: WorkerOptions, on_restart: Callable[[WorkerEvent], None],
    ):  # fmt: skip
        self.slots, self.states, self.on_restart = slots, states, on_restart
        self.numbers = list(numbers)
        self.ledger = SlotLedger(num_workers, options)
        self.node: FirstNode | None = None
        self._names: list[str | None] = [None] * num_workers  # of the nodes that fill the slots now
        self._joins = 0  # of collectors of other machines, so far
        self.check: Callable[[int, Mapping[str, Tensor]], None] = lambda payload, fields: None
        """raises WireError for what a collector of another machine sent, if its values cannot be used"""
        for worker, number in enumerate(self.numbers):
            callbacks[number] = Callbacks(partial(self._prepare, worker), partial(self._on_restart, worker))

    def __enter__(self) -> NodePool:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def connect(self, node: FirstNode) -> None:
        """Take the messages of collectors from now on."""
        self.node = node
        handlers: dict[str, tuple[Callable[..., None], list[type]]] = {
            COLLECTOR_READY: (self._on_ready, [int]),
            FILLED: (self._on_filled, [int, int, object]),
            NOT_RESTORED: (self._on_not_restored, [str]),
            JOIN: (self._on_join, [str]),
            LEFT: (self._on_left, []),
        }
        for event, (handler, types) in handlers.items():
            node.handle(event, handler, types)

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots, as `Workers.take` does."""
        assert self.node is not None, "connect first"
        while not (should_stop() or self.node.finishing):
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
        restored = self.states.record_start(worker)
        restarts = 0 if restored is not None or self.node is None else self.node.supervisor.restarts
        return Setup(worker, (self.states.start, worker, restarts), restored)

    def _on_ready(self, sender: str, worker: int) -> None:
        """A collector has started, or has lost its connection and joined again: it gets its tokens."""
        own = self._names[worker] if worker in range(len(self._names)) else None
        is_local = worker in range(len(self.numbers)) and sender == node_name(self.numbers[worker])
        if sender != own and not is_local:
            raise WireError(f"it is not collector {worker}")
        if is_local and sender == own:
            text = f"collector {worker} was cut off and is back; its rollout is lost"
            self.on_restart(WorkerEvent(worker, text, replaced=False))
        self._names[worker] = sender
        self.ledger.forget(worker)
        assert self.node is not None
        self.node.send(TOKENS, list(self.ledger.given[worker]), to=sender)

    def _on_filled(self, sender: str, slot: int, payload: int, fields: Any) -> None:
        if sender not in self._names:
            return  # of a process that is lost: its successor fills the slot again
        assert self.node is not None
        worker = self._names.index(sender)
        if slot != self.ledger.due(worker):
            raise WireError(f"slot {slot} is not the one that it is to fill")
        if worker < len(self.numbers):
            self.node.record_result(sender)
        else:
            self._copy(slot, fields)
            self.check(payload, self.slots[slot])
        self.ledger.fill(worker, slot, payload)

    def _copy(self, slot: int, fields: Any) -> None:
        """Copy what a collector of another machine has sent into a slot."""
        if not isinstance(fields, Mapping) or fields.keys() != self.slots.spec.keys():
            raise WireError("its fields are not those of a slot")
        for name, (shape, dtype) in self.slots.spec.items():
            field = fields[name]
            if not isinstance(field, Tensor) or field.shape != shape or field.dtype != dtype:
                raise WireError(f"field {name} is not {dtype} {list(shape)}")
        for name, place in self.slots[slot].items():
            place.copy_(fields[name])

    def _on_join(self, sender: str, host: str) -> None:
        """Give a collector of another machine a place, or tell it that there is none."""
        assert self.node is not None
        remote = range(len(self.numbers), len(self._names))
        worker = next((w for w in remote if self._names[w] == sender), None)
        if worker is None:
            worker = next((w for w in remote if self._names[w] is None), None)
        if worker is None:
            self.node.send(NO_PLACE, len(remote), to=sender)
            text = f"a collector was refused: all {len(remote)} places are taken (--remote-actors)"
            self.node.log.warning(text, f"from {host}")
            return
        if self._names[worker] is None:
            self._names[worker] = sender
            self._joins += 1
            text = f"collector {worker} joined from {host!r:.80} ({sender})"
            self.on_restart(WorkerEvent(worker, text, replaced=False, joined=True))
        self.node.send(SETUP, worker, (self.states.start, worker, self._joins), to=sender)

    def _on_left(self, sender: str) -> None:
        if sender in self._names[len(self.numbers) :]:
            worker = self._names.index(sender)
            self._names[worker] = None
            self.ledger.forget(worker)
            self.on_restart(WorkerEvent(worker, f"collector {worker} left ({sender})", replaced=False, left=True))

    def _on_not_restored(self, sender: str, reason: str) -> None:
        if sender not in self._names:
            return  # of a process that is lost
        assert self.node is not None
        worker = self._names.index(sender)
        if worker >= len(self.numbers):
            raise WireError("a collector of another machine has no state to restore")
        self.states.forget(worker)
        text = f"{self.node.child(sender)} cannot be rebuilt: {reason}"
        self.on_restart(WorkerEvent(worker, text, replaced=False))

    def _on_restart(self, worker: int, text: str) -> None:
        """Forget what a lost collector has filled."""
        self.on_restart(WorkerEvent(worker, text))
        self._names[worker] = None
        self.ledger.forget(worker)

    def _send(self, worker: int, token: Token) -> None:
        assert self.node is not None
        if (name := self._names[worker]) is not None:
            self.node.send(TOKEN, *token, to=name)
