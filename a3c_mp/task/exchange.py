"""Slots between the learner (`NodePool`) and collectors that are nodes (`NodeChannel`), or run in its own process.

On one machine, a message carries the number of a slot that both processes share. From another machine it carries the
fields of the slot too, which the learner copies; with each token it sends its weights there.
"""

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from a3c_mp.errors import ConfigError, Stopped
from a3c_mp.processes.pool import Closing, Filled, SlotLedger, Token, WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.task.endpoint import number_of
from a3c_mp.task.node import REPORT_NAME, REPORT_RESULT, FirstNode, Node
from a3c_mp.task.wire import JOINED, LEFT, WireError

JOIN, FILLED, NOT_RESTORED = "slots.join", "slots.filled", "slots.not_restored"
"""events of a collector: (host name), it starts or is connected again; (slot, payload, fields or None); (reason)"""
FROM_COLLECTORS = JOIN, FILLED, NOT_RESTORED
SETUP, TOKEN, NO_PLACE = "slots.setup", "slots.token", "slots.no_place"
"""events to a collector: (worker, seed_key, tokens of all slots that it has to fill, weights); (token, weights);
(number of places). A token is [slot, version], weights are [version, values], or None on the learner's machine"""
ALONE_SECONDS = 10.0  # without a collector, until a line of the log says so; longer with some of this machine


class Pool(Closing, AbstractContextManager["Pool"]):
    """The learner's end of its collectors; arguments as of `Workers`."""

    def __init__(
        self, num_workers: int, *, states: Any, options: WorkerOptions, on_restart: Callable[[WorkerEvent], None]
    ):
        super().__init__()
        self.ledger = SlotLedger(num_workers, options)
        self.states, self.on_restart = states, on_restart
        self.seed_keys: list[tuple[int, ...]] = [()] * num_workers  # of their channels
        self.restarts = 0

    def __exit__(self, *exc: object) -> None:
        self.close()

    def prepare(self, worker: int) -> Any:
        """Called before a collector of this machine starts; returns the state that it continues from."""
        restored = self.states.record_start(worker)
        self.seed_keys[worker] = self.states.start, worker, 0 if restored is not None else self.restarts
        return restored

    def forget_state(self, worker: int, reason: str) -> None:
        self.states.forget(worker)
        self.on_restart(WorkerEvent(worker, f"collector {worker} cannot be rebuilt: {reason}", replaced=False))


class NodeChannel:
    """A collector's end: tokens in, filled slots out. `own` is its memory on another machine than the learner's.

    Raises ConfigError if the learner has no place for it, also later: another one may take it while the link is down.
    """

    worker = actor = 0  # until the learner sends them
    seed_key: tuple[int, ...] = (0, 0, 0)

    def __init__(self, node: Node, own: Any = None):
        self.node, self.own, self.memory = node, own, own
        self.beat, self.starting, self.closing, self.restored = node.beat, node.starting, node.closing, node.setup
        self._tokens: list[Token] | None = None  # None: the first ones have not arrived
        self._slot: int | None = None  # that is filled now; None if its session has ended
        self._has_sent = False
        node.handle(SETUP, self._on_setup, [int, list, list, object])
        node.handle(TOKEN, self._on_token, [list, object])
        node.handle(NO_PLACE, self._on_no_place, [int])
        node.handle(JOINED, self._on_joined)
        self._greeting = node.router.greeting
        self._on_joined()
        while self._tokens is None and not node.finishing:
            node.wait()

    def take(self) -> Token | None:
        """Wait for a token to fill a slot; None if the task ends meanwhile."""
        while not self.node.finishing:
            if self._tokens:
                token = self._tokens.pop(0)
                self._slot = token.slot
                return token
            self.node.wait()
        return None

    def send(self, slot: int, payload: Any) -> None:
        """Hand a filled slot to the learner. One of an earlier session is lost: its token is given again."""
        if slot == self._slot:
            self.node.send(FILLED, slot, payload, None if self.own is None else self.own.slots[slot])
        if not self._has_sent:
            self._has_sent = True
            self.node.report(REPORT_RESULT)

    def not_restored(self, reason: str) -> None:
        self.node.send(NOT_RESTORED, reason)

    def _on_joined(self, sender: str = "") -> None:
        """The node is connected to the learner's, for the first time or again: what was under way is lost."""
        self._tokens = self._slot = None
        if self.node.router.greeting == self._greeting:  # else another task listens there now: see `JoinedNode`
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
            if self.own is not None:
                version, values = weights
                self.own.weights.load_state_dict({"version": version, "buffers": values})  # in both buffers

    def _on_no_place(self, sender: str, number: int) -> None:
        why = f"its {number} places for collectors of other machines are taken"
        fix = "start it with more --remote-actors, or attach fewer (--num-actors)"
        raise ConfigError("attach-to", self.node.router.endpoint.dials, why, fix)


class NodePool(Pool):
    """Collectors that are nodes: workers below `num_local` are nodes 1, 2, ... of this machine, others join.

    What those send is copied into the `slots`, if `check(payload, fields)` raises no WireError; they get the `weights`.
    """

    node: FirstNode

    def __init__(
        self, num_local: int, slots: Slots, weights: Weights, check: Callable[[int, Mapping[str, Tensor]], None],
        num_workers: int, **others: Any,
    ):  # fmt: skip
        super().__init__(num_workers, **others)
        self.num_local, self.slots, self.weights, self.check = num_local, slots, weights, check
        self._names: list[str | None] = [None] * num_workers  # of the nodes that fill the slots now
        self._joins = 0  # of collectors of other machines, so far

    def connect(self, node: FirstNode) -> None:
        self.node = node
        node.handle(JOIN, self._on_join, [str])
        node.handle(FILLED, self._on_filled, [int, int, object])
        node.handle(NOT_RESTORED, self._on_not_restored, [str])
        node.handle(LEFT, self._on_left)

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        next_line = time.monotonic() + ALONE_SECONDS * (6 if self.num_local else 1)
        while not (should_stop() or self.node.finishing):
            if found := self.ledger.take(size):
                return found
            if time.monotonic() > next_line and not any(self._names):
                next_line = time.monotonic() + 6 * ALONE_SECONDS
                self.on_restart(WorkerEvent(-1, "no collector is connected; waiting for one", replaced=False))
            self.node.wait(should_stop=should_stop)
        return []

    def release(self, filled: Iterable[Filled], version: int) -> None:
        for message in filled:
            self._send(message.worker, TOKEN, self.ledger.give(message, version))

    def on_lost(self, worker: int, text: str) -> None:
        """The process of a collector is lost: its successor fills the same slots again."""
        self.restarts += 1
        self.on_restart(WorkerEvent(worker, text))
        self._set_name(worker, None)

    def _set_name(self, worker: int, name: str | None) -> None:
        """Have another node fill the slots of a collector from now on, or none."""
        self._names[worker] = name
        self.ledger.forget(worker)

    def _send(self, worker: int, event: str, *args: Any) -> None:
        """Send an event to a collector, with the weights if it is on another machine."""
        if (name := self._names[worker]) is not None:
            self.node.send(event, *args, self.weights.read() if worker >= self.num_local else None, to=name)

    def _on_join(self, sender: str, host: str) -> None:
        """A collector has started, or is connected again: it gets its tokens, if there is a place for it."""
        if (worker := self._find_place(sender)) is None:
            places = len(self._names) - self.num_local
            text = f"a collector was refused: all {places} places are taken (--remote-actors)"
            self.node.log.warning(text, f"from {host}")
            self.node.send(NO_PLACE, places, to=sender)
            self.node.router.record_fault(sender)
            return
        is_local, is_known = worker < self.num_local, self._names[worker] == sender
        if not is_local and is_known:
            raise WireError("it has its tokens")
        if is_known:
            text = f"collector {worker} was cut off and is back; its rollout is lost"
            self.on_restart(WorkerEvent(worker, text, replaced=False))
        elif not is_local:
            of_a_slot = self.slots.slot_bytes + self.weights.buffers.nbytes  # filled, and the weights for it
            self.node.router.allow(sender, self.ledger.options.slots_per_worker * of_a_slot)
            self._joins += 1
            self.seed_keys[worker] = self.states.start, worker, self._joins
            text = f"collector {worker} joined from {host!r:.80} ({sender})"
            self.on_restart(WorkerEvent(worker, text, replaced=False, joined=True))
        self._set_name(worker, sender)
        self._send(worker, SETUP, worker, self.seed_keys[worker], list(self.ledger.given[worker]))

    def _find_place(self, sender: str) -> int | None:
        if (number := number_of(sender)) <= self.num_local:
            return number - 1
        places = range(self.num_local, len(self._names))
        return next((w for name in (sender, None) for w in places if self._names[w] == name), None)

    def _on_filled(self, sender: str, slot: int, payload: int, fields: Any) -> None:
        if sender not in self._names:  # of a process that is lost: its successor fills the slot again
            self.node.router.record_fault(sender)
            return
        if slot != self.ledger.due(worker := self._names.index(sender)):
            raise WireError(f"slot {slot} is not the one that it is to fill")
        if worker >= self.num_local:
            places = self.slots[slot]
            if not isinstance(fields, dict) or fields.keys() != places.keys():
                raise WireError("its fields are not those of a slot")
            for name, place in places.items():
                field = fields[name]
                if not isinstance(field, Tensor) or (field.shape, field.dtype) != (place.shape, place.dtype):
                    raise WireError(f"field {name} is not {place.dtype} {list(place.shape)}")
                place.copy_(field)
            self.check(payload, places)
        self.ledger.fill(worker, slot, payload)

    def _on_left(self, sender: str) -> None:
        if sender in self._names[self.num_local :]:
            worker = self._names.index(sender)
            self._set_name(worker, None)
            self.on_restart(WorkerEvent(worker, f"collector {worker} left ({sender})", replaced=False, left=True))

    def _on_not_restored(self, sender: str, reason: str) -> None:
        if sender not in self._names[: self.num_local]:
            raise WireError("it is of another machine")
        self.forget_state(self._names.index(sender), reason)


class LocalPool(Pool):
    """Collectors and learner in one process: a round is complete once each collector has filled a slot."""

    def __init__(self, num_workers: int, is_interrupted: Callable[[], bool], *, options: WorkerOptions, **others: Any):
        super().__init__(num_workers, options=replace(options, in_order=True), **others)
        self.is_interrupted = is_interrupted
        self.channels = [LocalChannel(self, worker) for worker in range(num_workers)]

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        return [] if should_stop() else self.ledger.take(size)

    def release(self, filled: Iterable[Filled], version: int) -> None:
        for message in filled:
            self.channels[message.worker].tokens.append(self.ledger.give(message, version))


class LocalChannel:
    """A collector's end in the process of the learner."""

    memory: Any = None

    def __init__(self, pool: LocalPool, worker: int):
        self.worker, self.actor, self.restored = worker, worker, pool.prepare(worker)
        self.seed_key, self.tokens = pool.seed_keys[worker], list(pool.ledger.given[worker])
        self.send, self.closing = partial(pool.ledger.fill, worker), pool.closing
        self.not_restored = partial(pool.forget_state, worker)
        self.is_interrupted = pool.is_interrupted

    def beat(self) -> None:
        """Each step of an environment. Raises Stopped after a signal: where they are slow, a slot takes minutes."""
        if self.is_interrupted():
            raise Stopped

    starting = beat

    def take(self) -> Token | None:
        return self.tokens.pop(0) if self.tokens else None
