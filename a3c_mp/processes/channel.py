"""A worker's end of the pipes to its parent, and how a worker ends: its environments closed, the reason sent."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import connection
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from a3c_mp.errors import Terminated
from a3c_mp.processes.supervised import MAX_MESSAGE, STARTING, raise_terminated, run_supervised

FILLED, NOT_RESTORED = "filled", "not restored"
"""kinds of messages: `(FILLED, slot, payload)` and `(NOT_RESTORED, reason)`"""
BEAT_SECONDS = 0.25
"""between two heartbeats of a worker that waits for a token"""
NICENESS = 5
"""where cores are short the learner goes first: it trains on fresh rollouts, instead of letting them queue"""


class HasClose(Protocol):
    def close(self) -> Any: ...


Closable = TypeVar("Closable", bound=HasClose)


class Upkeep(Protocol):
    """What environments need of the process that they live in."""

    @property
    def beat(self) -> Callable[[], None]: ...
    @property
    def closing(self) -> Callable[[Any], Any]: ...


class ActorChannel(Upkeep, Protocol):
    """What a collector of data needs of its connection to the learner; see `WorkerChannel`."""

    worker: int
    actor: int
    seed_key: tuple[int, ...]
    restored: Any
    memory: Any

    def not_restored(self, reason: str) -> None: ...


class Token(NamedTuple):
    """A slot to fill, and the weights version to act with."""

    slot: int
    version: int  # used where the run is deterministic; else the newest is loaded


class Pipes(NamedTuple):
    """What connects a worker to its parent."""

    tokens: connection.Connection  # to receive tokens from
    results: connection.Connection  # to send filled slots to
    beats: torch.Tensor  # int64 [workers] in shared memory: heartbeats


class Closing:
    """Closes the environments of a process, however it ends."""

    def __init__(self) -> None:
        self._open: list[HasClose] = []

    def closing(self, resource: Closable) -> Closable:
        """Have the argument, such as a vector environment, closed however the process ends; returns it."""
        self._open.append(resource)
        return resource

    def close(self) -> None:
        """Close what `closing` was given, the latest first. An error in one does not keep the others open."""
        while self._open:
            with suppress(BaseException):
                self._open.pop().close()


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
