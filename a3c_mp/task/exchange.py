"""Slots between nodes: `NodePool` of the learner, and a `NodeChannel` of each collector.

On one machine, a message carries the number of a slot that both processes share. From another machine it carries the
fields of the slot too, which the learner copies; with each token it sends its weights there.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from a3c_mp.errors import ConfigError
from a3c_mp.processes.channel import Token
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import Filled, WorkerEvent
from a3c_mp.task.endpoint import number_of
from a3c_mp.task.node import REPORT_NAME, REPORT_RESULT, FirstNode, Node
from a3c_mp.task.one_process import Pool
from a3c_mp.task.wire import JOINED, LEFT, WireError

JOIN, FILLED, NOT_RESTORED = "slots.join", "slots.filled", "slots.not_restored"
"""events of a collector: (host name), it starts or is connected again; (slot, payload, fields or None); (reason)"""
SETUP, TOKEN, NO_PLACE = "slots.setup", "slots.token", "slots.no_place"
"""events to a collector: (worker, seed_key, tokens of all slots that it has to fill, weights); (token, weights);
(number of places). A token is [slot, version], weights are [version, values], or None on the learner's machine"""


class NodeChannel:
    """A collector's end: tokens in, filled slots out.

    On another machine than the learner's, it has one slot and a copy of the weights of its own.

    Raises:
        ConfigError: the learner has no place for another collector; also from later looks at messages, where another
            one has taken its place while the connection was lost.
    """

    worker = actor = 0  # until the learner sends them
    seed_key: tuple[int, ...] = (0, 0, 0)

    def __init__(self, node: Node, slots: Slots | None = None, weights: Weights | None = None):
        self.node, self.own_slots, self.weights = node, slots, weights
        self.beat, self.closing, self.restored = node.beat, node.closing, node.setup
        self._tokens: list[Token] | None = None  # None: the first ones have not arrived
        self._slot: int | None = None  # that is filled now; None if its session has ended
        self._has_sent = False
        node.handle(SETUP, self._on_setup, [int, list, list, object])
        node.handle(TOKEN, self._on_token, [list, object])
        node.handle(NO_PLACE, self._on_no_place, [int])
        node.handle(JOINED, self._on_joined)
        self._on_joined()
        while self._tokens is None and not node.finishing:
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

    def _on_joined(self, sender: str = "") -> None:
        """The node is connected to the learner's, for the first time or again: what was under way is lost."""
        self._tokens = self._slot = None
        self.node.send(JOIN, socket.gethostname())

    def _on_setup(self, sender: str, worker: int, seed_key: list[int], tokens: list[list[int]], weights: Any) -> None:
        self.worker = self.actor = worker
        self.seed_key, self._tokens = tuple(seed_key), []
        for token in tokens:
            self._on_token(sender, token, weights)
        self.node.report(REPORT_NAME, f"collector {worker}")

    def _on_token(self, sender: str, token: list[int], weights: Any) -> None:
        if self._tokens is not None:  # else it is among the first ones, which are on their way
            self._tokens.append(Token(*token))
            if self.weights is not None:
                version, values = weights
                self.weights.load_state_dict({"version": version, "buffers": values})  # in both buffers

    def _on_no_place(self, sender: str, number: int) -> None:
        why = f"its {number} places for collectors of other machines are taken"
        fix = "start it with more --remote-actors, or attach fewer (--num-actors)"
        raise ConfigError("attach-to", self.node.router.endpoint.dials, why, fix)


class NodePool(Pool):
    """Collectors that are nodes: worker i of this machine is node i + 1, those of other machines join.

    Args:
        num_local: collectors of this machine.
        slots: of all collectors; data of those of other machines is copied into them.
        weights: sent to collectors of other machines.
        check: raises WireError for what one of them has sent, (payload, fields), if its values cannot be used.
    """

    def __init__(
        self, num_local: int, slots: Slots, weights: Weights, check: Callable[[int, Mapping[str, Tensor]], None],
        num_workers: int, **others: Any,
    ):  # fmt: skip
        super().__init__(num_workers, **others)
        self.num_local, self.slots, self.weights, self.check = num_local, slots, weights, check
        self.node: FirstNode | None = None
        self._names: list[str | None] = [None] * num_workers  # of the nodes that fill the slots now
        self._joins = 0  # of collectors of other machines, so far

    def connect(self, node: FirstNode) -> None:
        """Take the messages of collectors from now on."""
        self.node = node
        node.handle(JOIN, self._on_join, [str])
        node.handle(FILLED, self._on_filled, [int, int, object])
        node.handle(NOT_RESTORED, self._on_not_restored, [str])
        node.handle(LEFT, self._on_left)

    def prepare(self, worker: int, restarts: int = 0) -> Any:
        """As `Pool.prepare`; called before each start of a node."""
        return super().prepare(worker, 0 if self.node is None else self.node.supervisor.restarts)

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots, as `Workers.take` does."""
        assert self.node is not None, "connect first"
        while not (should_stop() or self.node.finishing):
            if found := self.ledger.take(size):
                return found
            self.node.wait(should_stop=should_stop)
        return []

    def release(self, filled: Iterable[Filled], version: int) -> None:
        """Give slots back to their collectors, to be filled acting with weights `version` or newer."""
        for message in filled:
            self._send(message.worker, TOKEN, self.ledger.give(message, version))

    def on_lost(self, worker: int, text: str) -> None:
        """The process of a collector is lost: its successor fills the same slots again."""
        self.on_restart(WorkerEvent(worker, text))
        self._forget(worker)

    def _forget(self, worker: int) -> None:
        self._names[worker] = None
        self.ledger.forget(worker)

    def _send(self, worker: int, event: str, *args: Any) -> None:
        """Send an event to a collector, with the weights if it is on another machine."""
        if self.node is not None and (name := self._names[worker]) is not None:
            self.node.send(event, *args, self.weights.read() if worker >= self.num_local else None, to=name)

    def _on_join(self, sender: str, host: str) -> None:
        """A collector has started, or is connected again: it gets its tokens, if there is a place for it."""
        assert self.node is not None
        if (number := number_of(sender)) <= self.num_local:
            self._join_local(number - 1, sender)
            return
        places = range(self.num_local, len(self._names))
        worker = next((w for name in (sender, None) for w in places if self._names[w] == name), None)
        if worker is None:
            text = f"a collector was refused: all {len(places)} places are taken (--remote-actors)"
            self.node.log.warning(text, f"from {host}")
            self.node.send(NO_PLACE, len(places), to=sender)
            return
        if self._names[worker] is None:
            self._joins += 1
            self.seed_keys[worker] = self.states.start, worker, self._joins
            text = f"collector {worker} joined from {host!r:.80} ({sender})"
            self.on_restart(WorkerEvent(worker, text, replaced=False, joined=True))
        self._set_up(worker, sender)

    def _join_local(self, worker: int, sender: str) -> None:
        if self._names[worker] == sender:
            text = f"collector {worker} was cut off and is back; its rollout is lost"
            self.on_restart(WorkerEvent(worker, text, replaced=False))
        self._set_up(worker, sender)

    def _set_up(self, worker: int, sender: str) -> None:
        self._names[worker] = sender
        self.ledger.forget(worker)
        self._send(worker, SETUP, worker, self.seed_keys[worker], list(self.ledger.given[worker]))

    def _on_filled(self, sender: str, slot: int, payload: int, fields: Any) -> None:
        if sender not in self._names:
            return  # of a process that is lost: its successor fills the slot again
        worker = self._names.index(sender)
        if slot != self.ledger.due(worker):
            raise WireError(f"slot {slot} is not the one that it is to fill")
        if worker >= self.num_local:
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

    def _on_left(self, sender: str) -> None:
        if sender in self._names[self.num_local :]:
            worker = self._names.index(sender)
            self._forget(worker)
            self.on_restart(WorkerEvent(worker, f"collector {worker} left ({sender})", replaced=False, left=True))

    def _on_not_restored(self, sender: str, reason: str) -> None:
        if sender in self._names[: self.num_local]:
            self.forget_state(self._names.index(sender), reason)
