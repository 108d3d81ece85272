"""A worker's end of the pipes to its parent, and how a worker ends: its environments closed, the reason sent."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from a3c_mp.errors import Terminated

MAX_MESSAGE = 4096 - 4
"""bytes; PIPE_BUF on Linux, the most that a pipe takes in one piece, less the length that stands before a message"""
BEAT_SECONDS = 0.25
"""between two heartbeats of a worker that waits for a token"""
NICENESS = 5
"""where cores are short the learner goes first: rollouts are learned from while fresh, instead of queueing"""


class HasClose(Protocol):
    def close(self) -> Any: ...


Closable = TypeVar("Closable", bound=HasClose)


class Token(NamedTuple):
    """A slot to fill, and the weights version to act with."""

    slot: int
    version: int  # weights version to act with, where the run is deterministic; else the newest is taken


class WorkerChannel:
    """A worker's end: tokens in, filled slots out. Made by `Workers`, passed to the target."""

    def __init__(
        self,
        worker: int,
        actor: int,
        entropy: tuple[int, ...],
        restored: Any,
        tokens: connection.Connection,
        results: connection.Connection,
        beats: torch.Tensor,
    ):
        self.worker = worker  # 0, 1, ... of this learner
        self.actor = actor  # 0, 1, ... of the whole run
        self.entropy = entropy  # for seeds; others after an asynchronous restart or resume, so that no games repeat
        self.restored = restored  # what it is rebuilt from; None: nothing
        self._tokens = tokens
        self._results = results
        self._beats = beats
        self._open: list[Any] = []
        self._terminated = False

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
        message = pickle.dumps(("filled", slot, payload))
        assert len(message) <= MAX_MESSAGE, "the statistics of one slot must fit into 4 KiB"
        self._results.send_bytes(message)

    def beat(self) -> None:
        """Show that the worker is alive; called at least once for each environment step."""
        if self._terminated:  # again: an environment may have caught the first one
            raise Terminated
        self._beats[self.worker] += 1

    def closing(self, resource: Closable) -> Closable:
        """Have the argument, such as a vector environment, closed however the worker ends; returns it."""
        self._open.append(resource)
        return resource

    def close(self) -> None:
        """Close what `closing` was given, the latest first. What goes wrong there stops nothing."""
        while self._open:
            with suppress(BaseException):
                self._open.pop().close()

    def unwind(self, signum: int, frame: FrameType | None) -> None:
        """Handler of SIGTERM: leave the target, so that what is open can be closed."""
        signal.signal(signum, signal.SIG_IGN)  # a second one does not interrupt the closing
        self._terminated = True
        raise Terminated

    def fail(self, text: str) -> None:
        """Send the parent the reason why this worker ends: the tail of a traceback."""
        tail = text.encode(errors="backslashreplace")[-MAX_MESSAGE // 2 :].decode(errors="replace")
        with suppress(OSError):  # the parent is gone
            self._results.send(("error", tail, None))

    def lose_games(self, text: str) -> None:
        """Send the parent the reason why the games in progress could not be rebuilt; others are played instead."""
        self._results.send(("games lost", text, None))


def run_worker(target: Callable[..., None], channel: WorkerChannel, args: tuple) -> None:
    """What a worker process does."""
    torch.set_num_threads(1)
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, channel.unwind)
    code = 0
    try:
        try:
            target(channel, *args)
        except Terminated:
            raise
        except BaseException:  # an environment's SystemExit too
            code = 1
            channel.fail(traceback.format_exc())
    except Terminated:  # also while the reason is sent
        code = -signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.close()
    if code < 0:  # to the parent, and to the sender, it ends as any other program does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(code)
