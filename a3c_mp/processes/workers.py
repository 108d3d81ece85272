"""Workers that are spawned processes of this machine, and both ends of their pipes; `pool` has the protocol.

Every worker has a pair of pipes of its own: a queue with one writer and one reader is a pipe and needs no lock, so a
worker that is killed at any instant blocks no other. Each message stays below 4 KiB, which a pipe takes as one atomic
write.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any, Self

import torch
import torch.multiprocessing as mp

from a3c_mp.errors import Terminated
from a3c_mp.processes.pool import Closing, Filled, SlotLedger, Token, WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import MAX_MESSAGE, STARTING, TERMINATED, run_supervised, start_child
from a3c_mp.processes.supervisor import Child, Supervisor

FILLED, NOT_RESTORED = "filled", "not restored"
"""kinds of messages: `(FILLED, slot, payload)` and `(NOT_RESTORED, reason)`"""
BEAT_SECONDS = 0.25  # between two heartbeats of a worker that waits for a token


class Workers:
    """`num_workers` supervised processes that run `target(channel, *args)`; to be used in a `with` block.

    `target` is a module-level function; `args` are pickled, and shared tensors stay shared. `states` (`ResumeStates`)
    give what workers are rebuilt from, and the agent steps that their seeds follow from; `on_restart` is called each
    time a worker is replaced, or cannot be rebuilt.
    """

    def __init__(
        self, target: Callable[..., None], num_workers: int, args: tuple, *, states: Any = None,
        options: WorkerOptions, on_restart: Callable[[WorkerEvent], None],
    ):  # fmt: skip
        self.target, self.args, self.states, self.on_restart = target, args, states, on_restart
        self.options, self._ledger = options, SlotLedger(num_workers, options)
        self._actors = range(options.first_actor, options.first_actor + num_workers)  # numbers in the whole run
        self._token_pipes: list[Any] = [None] * num_workers
        self._beats = shared_counters(num_workers)
        children = [
            Child(options.name or f"{options.role} {self._actors[worker]}", partial(self._launch, worker), options.flag)
            for worker in range(num_workers)
        ]
        self.supervisor = Supervisor(
            children, self._beats, max_restarts=options.max_restarts, hang_seconds=options.hang_seconds,
            on_message=self._receive, on_restart=self._forget,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self.supervisor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """End every worker: they close their environments, and those that take too long are killed."""
        self.supervisor.stop()

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots: `size` in order of arrival, or `in_order` one of each worker.

        They are the caller's until it releases them; there are none once `should_stop()`. A worker that dies before the
        last slot of a round has arrived is replaced, and fills its own slots again. Raises WorkerError if one failed
        before its first filled slot, or the restart budget is spent.
        """
        while not should_stop():
            if not self.options.in_order:  # of messages that have waited together, worker 0's come first
                self.supervisor.watch(should_stop, 0.0)
            if found := self._ledger.take(size):
                return found
            self.supervisor.watch(should_stop)
        return []

    def poll(self, should_stop: Callable[[], bool]) -> list[Filled]:
        """As `take`, but return an empty list instead of waiting for a slot."""
        self.supervisor.watch(should_stop, seconds=0.0)
        return self._ledger.take(1)

    def release(self, filled: Iterable[Filled], version: int) -> None:
        """Give slots back to their workers, to be filled acting with weights `version` or newer."""
        for message in filled:
            self._send(message.worker, self._ledger.give(message, version))

    def _launch(self, worker: int) -> tuple[Any, Any]:
        """Start the process of a worker and give it its tokens; returns it and the pipe of its messages."""
        actor, start, restored = self._actors[worker], 0, None
        if self.states is not None:
            start, restored = self.states.start, self.states.record_start(actor)
        seed_key = (start, actor, self.supervisor.restarts.total() if restored is None else 0)
        tokens, self._token_pipes[worker] = mp.Pipe(duplex=False)
        messages, results = mp.Pipe(duplex=False)
        with tokens, results:  # the child has copies; with these closed, its death reads as an end of file
            channel = WorkerChannel(worker, actor, seed_key, restored, tokens, results, self._beats)
            args = (self.target, channel, self.args, self.options.niceness)
            name = self.options.name or f"worker-{worker}"
            process = start_child(run_worker, args, name=name, daemon=True, group=True)
        for token in self._ledger.given[worker]:
            self._send(worker, token)
        return process, messages

    def _receive(self, worker: int, message: tuple) -> None:
        kind, *content = message
        child, actor = self.supervisor.children[worker], self._actors[worker]
        if kind == FILLED:
            self._ledger.fill(worker, *content)
            child.record_result()
        elif self.states is not None:
            self.states.forget(actor)
            self.on_restart(WorkerEvent(actor, f"{child} cannot be rebuilt: {content[0]}", replaced=False))

    def _forget(self, worker: int, text: str) -> None:
        self.on_restart(WorkerEvent(self._actors[worker], text))
        self._ledger.forget(worker)

    def _send(self, worker: int, token: Token) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died; its successor gets the token again
            self._token_pipes[worker].send(token)


# ---- at a worker


@dataclass(eq=False)
class WorkerChannel(Closing):
    """A worker's connection to its parent: tokens in, filled slots out. Made by `Workers`, passed to the target."""

    worker: int  # its number among the workers of this learner
    actor: int  # its number among the actors of the whole run
    seed_key: tuple[int, ...]
    """numbers that its seeds follow from: agent steps of the run at the start, the actor's number, restarts so far.
    Where nothing can be restored, the last one keeps a successor from playing the same games again
    """
    restored: Any  # what `ResumeStates.record_start` returned: the state to continue from, or None
    token_pipe: connection.Connection
    result_pipe: connection.Connection
    beats: torch.Tensor  # int64 [workers] in shared memory: heartbeats
    counts: Any = None  # the same as an array: torch takes ten times as long for an addition
    memory: Any = None

    def tokens(self) -> Iterator[Token]:
        """The slots to fill, one after the other, without end: `for slot, version in channel.tokens()`."""
        while True:
            yield self.take()

    def take(self) -> Token:
        """Wait for a token to fill a slot; ends the process when the parent is gone."""
        self.beat()
        try:
            while not self.token_pipe.poll(BEAT_SECONDS):
                self.beat()
            return self.token_pipe.recv()
        except (EOFError, ConnectionResetError):
            raise Terminated from None

    def send(self, slot: int, payload: Any) -> None:
        """Hand a filled slot to the parent, with statistics of a few hundred bytes."""
        message = pickle.dumps((FILLED, slot, payload))
        assert len(message) <= MAX_MESSAGE, "the statistics of one slot must fit into 4 KiB"
        self.result_pipe.send_bytes(message)

    def not_restored(self, reason: str) -> None:
        """Report that the worker cannot continue from `restored`, and what it does instead."""
        self.result_pipe.send((NOT_RESTORED, reason[: MAX_MESSAGE // 5]))  # a character has at most 4 bytes

    def beat(self) -> None:
        """Count a heartbeat; called at least once for each step of each environment."""
        if TERMINATED:
            raise Terminated
        self.counts[self.worker] += 1

    def starting(self) -> None:
        """Say that an environment is made: until the next heartbeat there is as much time as a process has to start."""
        self.result_pipe.send((STARTING,))


def run_worker(target: Callable[..., None], channel: WorkerChannel, args: tuple, niceness: int) -> None:
    """Entry point of a worker process."""
    torch.set_num_threads(1)
    os.nice(niceness)
    channel.counts = channel.beats.numpy()
    body = partial(target, channel, *args)
    run_supervised(body, channel.result_pipe, close=channel.close)
