"""Workers: supervised processes that fill slots, and the slots that travel to them and back.

A worker is a plain function `target(channel, *args)`. It takes tokens (slot, weights version) from its channel, fills
the slot, and sends back the slot's number with a few statistics. Every worker has a pair of pipes of its own: a queue
with one writer and one reader is a pipe and needs no lock, so a worker that is killed at any instant blocks no other.
Each message stays below 4 KiB, which a pipe takes as one atomic write.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.multiprocessing as mp

from a3c_mp.processes.channel import NICENESS, NOT_RESTORED, Pipes, Token, WorkerChannel, run_worker
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import start_child
from a3c_mp.processes.supervisor import Child, Supervisor


class Filled(NamedTuple):
    """A slot that a worker has filled."""

    worker: int
    slot: int
    payload: Any  # what the worker sent with it


class WorkerEvent(NamedTuple):
    """Report of an actor that was replaced, could not be rebuilt, waits for a place, or has joined."""

    actor: int  # its number in the whole run
    text: str
    replaced: bool = True  # False, if it has neither joined nor left: it runs, but plays new games
    joined: bool = False  # from another machine, or after it waited for a place
    left: bool = False  # its machine has left, or no node has a place for it: no process acts for it now


class StateSource(Protocol):
    """Gives the state that an actor is rebuilt from when it is started; see `resume_states.ResumeStates`."""

    start: int  # seeds of workers follow from it

    def record_start(self, actor: int) -> Any: ...
    def forget(self, actor: int) -> None: ...


@dataclass(frozen=True)
class WorkerOptions:
    """How workers get their slots, and how they are supervised."""

    role: str = "worker"
    """what workers are called in messages and errors, before their number"""
    flag: str = "--num-actors"
    """the setting that says how many there are"""
    slots_per_worker: int = 2
    """worker i fills slots i * slots_per_worker and on, and no others"""
    max_restarts: int = 5
    """restart budget of all workers together"""
    hang_seconds: float = 60.0
    """a worker whose heartbeats stop for so long is killed and restarted"""
    in_order: bool = False
    """a round has one slot of each of workers 0, 1, ...; otherwise slots come in the order in which they were filled"""
    versions: Sequence[int] = ()
    """weights versions for the first `slots_per_worker` slots of each worker; empty: version 0 for all"""
    first_actor: int = 0
    """number of worker 0 among the actors of the whole run"""
    name: str | None = None
    """of the process and in messages, for a single worker that is no actor"""
    niceness: int = NICENESS
    """of the processes: added to that of their parent"""


class WorkerPool(Protocol):
    """What a learner needs of its workers: `Workers`, or others that give rounds of filled slots."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: object) -> None: ...
    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]: ...
    def release(self, filled: Iterable[Filled], version: int) -> None: ...


class SlotLedger:
    """Which slots each worker has to fill, which it has filled, and which come next.

    Args:
        num_workers: number of workers.
        options: see `WorkerOptions`.
    """

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
        """The slot that a worker fills next; None if it has filled all that it was given."""
        filled = len(self.ready[number])
        return self.given[number][filled].slot if filled < len(self.given[number]) else None

    def forget(self, number: int) -> None:
        """Drop what a lost worker has filled and the caller does not have: its successor fills the same slots again."""
        self.ready[number].clear()
        self._arrivals = deque(other for other in self._arrivals if other != number)


class Workers:
    """`num_workers` supervised processes that run `target(channel, *args)`; to be used in a `with` block.

    Args:
        target: a module-level function.
        args: passed on, pickled; shared tensors stay shared.
        states: gives what workers are rebuilt from, and the agent steps that their seeds follow from.
        options: see `WorkerOptions`.
        on_restart: called each time a worker is replaced, or cannot be rebuilt.
    """

    def __init__(
        self,
        target: Callable[..., None],
        num_workers: int,
        args: tuple = (),
        *,
        states: StateSource | None = None,
        options: WorkerOptions | None = None,
        on_restart: Callable[[WorkerEvent], None] = print,
    ):
        self.options = options = options or WorkerOptions()
        self.target, self.args, self.states, self.on_restart = target, args, states, on_restart
        self._ledger = SlotLedger(num_workers, options)
        self._token_pipes: list[Any] = [None] * num_workers
        self._beats = shared_counters(num_workers)
        self._supervisor = Supervisor(
            [
                Child(
                    options.name or f"{options.role} {options.first_actor + number}",
                    partial(self._launch, number),
                    options.flag,
                )
                for number in range(num_workers)
            ],
            self._beats,
            max_restarts=options.max_restarts,
            hang_seconds=options.hang_seconds,
            on_message=self._receive,
            on_restart=self._forget,
        )

    def __enter__(self) -> Workers:
        self._supervisor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """End every worker: they close their environments, and those that take too long are killed."""
        self._supervisor.stop()

    @property
    def pids(self) -> list[int]:
        return self._supervisor.pids

    @property
    def restarts(self) -> int:
        """How many workers have been replaced."""
        return self._supervisor.restarts

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots: `size` in order of arrival, or `in_order` one of each worker.

        They are the caller's until it releases them. A worker that dies before the last slot of a round has arrived
        is replaced, and fills its own slots again.

        Returns:
            the round; empty once `should_stop()`.

        Raises:
            WorkerError: a worker failed before its first filled slot, or the restart budget is spent.
        """
        while not should_stop():
            if found := self._ledger.take(size):
                return found
            self._supervisor.watch(should_stop)
        return []

    def poll(self, should_stop: Callable[[], bool]) -> list[Filled]:
        """Return a round of one filled slot, or an empty list: this looks after the workers, but does not wait.

        Raises:
            WorkerError: as `take` does.
        """
        self._supervisor.watch(should_stop, seconds=0.0)
        return self._ledger.take(1)

    def release(self, filled: Iterable[Filled], version: int) -> None:
        """Give slots back to their workers, to be filled acting with weights `version` or newer."""
        for message in filled:
            self._send(message.worker, self._ledger.give(message, version))

    def _launch(self, number: int) -> tuple[Any, Any]:
        """Start the process of a worker and give it its tokens; returns it and the pipe of its messages."""
        actor = self.options.first_actor + number
        with ExitStack() as child_ends:  # the child has copies; with these closed, its death reads as an end of file
            take_end, self._token_pipes[number] = mp.Pipe(duplex=False)
            child_ends.enter_context(take_end)
            results, send_end = mp.Pipe(duplex=False)
            child_ends.enter_context(send_end)
            restored = None if self.states is None else self.states.record_start(actor)
            restarts = 0 if restored is not None else self.restarts
            seed_key = (0 if self.states is None else self.states.start, actor, restarts)
            pipes = Pipes(take_end, send_end, self._beats)
            channel = WorkerChannel(number, actor, pipes, seed_key=seed_key, restored=restored)
            args = (self.target, channel, self.args, self.options.niceness)
            name = self.options.name or f"worker-{number}"
            process = start_child(run_worker, args, name=name, daemon=True, group=True)
        for token in self._ledger.given[number]:
            self._send(number, token)
        return process, results

    def _receive(self, number: int, message: tuple) -> None:
        kind, *content = message
        if kind == NOT_RESTORED:
            self._forget_state(number, *content)
            return
        self._ledger.fill(number, *content)
        self._supervisor.children[number].record_result()

    def _forget(self, number: int, text: str) -> None:
        self.on_restart(WorkerEvent(self.options.first_actor + number, text))
        self._ledger.forget(number)

    def _forget_state(self, number: int, reason: str) -> None:
        assert self.states is not None
        actor = self.options.first_actor + number
        self.states.forget(actor)
        text = f"{self._supervisor.children[number]} cannot be rebuilt: {reason}"
        self.on_restart(WorkerEvent(actor, text, replaced=False))

    def _send(self, number: int, token: Token) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died; its successor gets the token again
            self._token_pipes[number].send(token)
