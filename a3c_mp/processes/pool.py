"""The protocol between a learner and its workers, which three carriers implement: processes, nodes of a task, Ray.

    learner (a pool, as `Workers`)                           worker (its channel, as `WorkerChannel`)
    release(filled, version)   --- token: slot, version -->  take()
    take() -> filled slots     <-- slot, payload -----------  send(slot, payload)
    on_restart(event)                                        beat(), starting(); restored, not_restored(reason)

A worker fills the slots whose tokens it has, and sends back their numbers with a few figures. Which slots are given,
filled and next is in a `SlotLedger`, the same one for every carrier: a worker that is lost has its slots filled again
by its successor. What a worker is rebuilt from comes from its pool's `states` (see `ResumeStates`).
"""

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

NICENESS = 5  # where cores are short the learner goes first: it trains on fresh rollouts, instead of letting them queue


class Token(NamedTuple):
    """A slot to fill, and the weights version to act with."""

    slot: int
    version: int  # used where the run is deterministic; else the newest is loaded


class Filled(NamedTuple):
    """A slot that a worker has filled."""

    worker: int
    slot: int
    payload: Any  # what the worker sent with it


class WorkerEvent(NamedTuple):
    """Report of an actor that was replaced, could not be rebuilt, waits for a place, or has joined."""

    actor: int  # its number in the whole run
    text: str
    replaced: bool = True  # False without a join or leave: the actor runs, but its games could not be rebuilt
    joined: bool = False  # from another machine, or after it waited for a place
    left: bool = False  # its machine has left, or no node has a place for it: no process acts for it now


@dataclass(frozen=True)
class WorkerOptions:
    """How workers get their slots, and how they are supervised."""

    role: str = "worker"  # what workers are called in messages and errors, before their number
    flag: str = "--num-actors"  # the setting that says how many there are
    slots_per_worker: int = 2  # worker i fills slots i * slots_per_worker and on, and no others
    max_restarts: int = 5  # restart budget of all workers together
    hang_seconds: float = 60.0  # a worker whose heartbeats stop for so long is killed and restarted
    in_order: bool = False
    """a round has one slot of each of workers 0, 1, ...; otherwise slots come in the order in which they were filled"""
    versions: Sequence[int] = ()
    """weights versions for the first `slots_per_worker` slots of each worker; empty: version 0 for all"""
    first_actor: int = 0  # number of worker 0 among the actors of the whole run
    name: str | None = None  # of the process and in messages, for a single worker that is no actor
    niceness: int = NICENESS  # of the processes: added to that of their parent


class SlotLedger:
    """Which slots each worker has to fill, which it has filled, and which come next."""

    def __init__(self, num_workers: int, options: WorkerOptions):
        self.options, size = options, options.slots_per_worker
        tokens = list(map(Token, range(num_workers * size), itertools.cycle(options.versions or [0])))
        self.given = [deque(tokens[w * size : (w + 1) * size]) for w in range(num_workers)]
        """tokens of each worker whose slots the caller does not have: a successor gets them again"""
        self.ready: list[deque[Filled]] = [deque() for _ in range(num_workers)]  # the caller does not have them yet
        self._arrivals: deque[int] = deque()  # workers in the order of their messages

    def fill(self, number: int, slot: int, payload: Any) -> None:
        """Record that a worker has filled the slot of its oldest token."""
        self.ready[number].append(Filled(number, slot, payload))
        if not self.options.in_order:
            self._arrivals.append(number)

    def take(self, size: int) -> list[Filled]:
        """Hand out a round, as `Workers.take` does; empty if it is not complete."""
        if self.options.in_order:
            chosen = list(range(len(self.ready))) if all(self.ready) else []
        else:
            chosen = [self._arrivals.popleft() for _ in range(size)] if len(self._arrivals) >= size else []
        for number in chosen:
            self.given[number].popleft()
        return [self.ready[number].popleft() for number in chosen]

    def give(self, filled: Filled, version: int) -> Token:
        """Return the token by which a slot goes back to its worker, to be filled with weights `version`."""
        self.given[filled.worker].append(token := Token(filled.slot, version))
        return token

    def due(self, number: int) -> int | None:
        """The slot that a worker fills next; None if it has filled all of its slots."""
        filled = len(self.ready[number])
        return self.given[number][filled].slot if filled < len(self.given[number]) else None

    def forget(self, number: int) -> None:
        """Drop what a lost worker has filled and the caller does not have: its successor fills the same slots again."""
        self.ready[number].clear()
        self._arrivals = deque(other for other in self._arrivals if other != number)


class Closing:
    """Closes the environments of a process, however it ends."""

    @cached_property
    def _open(self) -> ExitStack:
        return ExitStack()

    def closing(self, resource: Any) -> Any:
        """Have the argument, such as a vector environment, closed however the process ends; returns it."""
        return self._open.enter_context(closing(resource))

    def close(self) -> None:
        """Close them, the latest first. An error in one does not keep the others open."""
        with suppress(BaseException):
            self._open.close()
