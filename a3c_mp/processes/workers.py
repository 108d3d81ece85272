"""Workers that are spawned processes of this machine: both ends of their pipes.

A worker is a plain function `target(channel, *args)`. It takes tokens (slot, weights version) from its channel, fills
the slot, and sends back the slot's number with a few statistics. Every worker has a pair of pipes of its own: a queue
with one writer and one reader is a pipe and needs no lock, so a worker that is killed at any instant blocks no other.
Each message stays below 4 KiB, which a pipe takes as one atomic write.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import connection
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp

from a3c_mp.errors import Terminated
from a3c_mp.processes.pool import NICENESS, Closing, Filled, SlotLedger, StateSource, Token, WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import start_child
from a3c_mp.processes.supervised import MAX_MESSAGE, STARTING, raise_terminated, run_supervised
from a3c_mp.processes.supervisor import Child, Supervisor

FILLED, NOT_RESTORED = "filled", "not restored"
"""kinds of messages: `(FILLED, slot, payload)` and `(NOT_RESTORED, reason)`"""
BEAT_SECONDS = 0.25
"""between two heartbeats of a worker that waits for a token"""


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


# ---- at a worker


class Pipes(NamedTuple):
    """What connects a worker to its parent."""

    tokens: connection.Connection  # to receive tokens from
    results: connection.Connection  # to send filled slots to
    beats: torch.Tensor  # int64 [workers] in shared memory: heartbeats


class WorkerChannel(Closing):
    """A worker's connection to its parent: tokens in, filled slots out. Made by `Workers`, passed to the target.

    Args:
        worker: its number among the workers of this learner.
        actor: its number among the actors of the whole run.
        pipes: to its parent.
        seed_key: numbers that its seeds follow from: agent steps of the run at the start, the actor's number, restarts
            so far. Where nothing can be restored, the last one keeps a successor from playing the same games again.
        restored: the state to continue from, what `StateSource.record_start` returned; None for a fresh start.
    """

    def __init__(self, worker: int, actor: int, pipes: Pipes, *, seed_key: tuple[int, ...], restored: Any = None):
        self.worker, self.actor, self.seed_key, self.restored = worker, actor, seed_key, restored
        self._tokens, self._results, self._beats = pipes
        super().__init__()
        self._terminated = False
        self.memory: Any = None

    def tokens(self) -> Iterator[Token]:
        """The slots to fill, one after the other, without end: `for slot, version in channel.tokens()`."""
        while True:
            yield self.take()

    def take(self) -> Token:
        """Wait for a token to fill a slot; ends the process when the parent is gone."""
        self.beat()
        try:
            while not self._tokens.poll(BEAT_SECONDS):
                self.beat()
            return self._tokens.recv()
        except (EOFError, ConnectionResetError):
            raise Terminated from None

    def send(self, slot: int, payload: Any) -> None:
        """Hand a filled slot to the parent, with statistics of a few hundred bytes."""
        message = pickle.dumps((FILLED, slot, payload))
        assert len(message) <= MAX_MESSAGE, "the statistics of one slot must fit into 4 KiB"
        self._results.send_bytes(message)

    def not_restored(self, reason: str) -> None:
        """Report that the worker cannot continue from `restored`, and what it does instead."""
        self._results.send((NOT_RESTORED, reason))

    def beat(self) -> None:
        """Count a heartbeat; called at least once for each environment step."""
        if self._terminated:  # again: an environment may have caught the first one
            raise Terminated
        self._beats[self.worker] += 1

    def starting(self) -> None:
        """Say that environments are made: until the next heartbeat there is as much time as a process has to start."""
        self._results.send((STARTING,))

    def run(self, target: Callable[..., None], args: tuple) -> None:
        """Run `target(channel, *args)` and close its environments; the parent gets the traceback of an exception."""
        run_supervised(lambda: target(self, *args), self._results, on_sigterm=self._raise_terminated, close=self.close)

    def _raise_terminated(self, signum: int, frame: FrameType | None) -> None:
        self._terminated = True
        raise_terminated(signum, frame)


def run_worker(target: Callable[..., None], channel: WorkerChannel, args: tuple, niceness: int = NICENESS) -> None:
    """Entry point of a worker process."""
    torch.set_num_threads(1)
    os.nice(niceness)
    channel.run(target, args)
