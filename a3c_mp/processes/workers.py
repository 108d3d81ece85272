"""Supervised worker processes: spawned, watched, restarted, and gone when the parent is.

A worker is a plain function `target(channel, *args)`. It takes tokens (slot, weights version) from its channel, fills
the slot, and sends back the slot's number with a few statistics. Every worker has a pair of pipes of its own: a queue
with one writer and one reader is a pipe and needs no lock, so a worker that is killed at any instant starves nobody.
Each message stays below 4 KiB, which a pipe takes as one atomic write.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import connection
from typing import Any, NamedTuple, Protocol

import torch.multiprocessing as mp

from a3c_mp.errors import WorkerError
from a3c_mp.processes.channel import Token, WorkerChannel, run_worker
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import refused, signal_name, start_child

END_SECONDS = 0.05
"""longest wait for the end of workers before a look at exit codes: a fork of a worker may hold its sentinel open"""
QUIET_SECONDS = 1.0
"""silence of a worker after which the parent looks at its exit code, for the same reason"""
POLL_SECONDS = 0.1
"""longest wait of the parent before it looks whether it should stop"""
PAUSE_SECONDS = 5.0
"""most that counts as a worker's silence between two looks: the parent may have been stopped, and the worker with it"""
START_SECONDS = 120.0
"""longest time from the start of a worker to its first heartbeat, where it has a core to itself"""
CLOSE_SECONDS = 2.0
"""longest time from a worker's end to that of its environments, before it is killed"""


class Filled(NamedTuple):
    """A slot that a worker has filled."""

    worker: int
    slot: int
    payload: Any  # what the worker sent along


class RestartMessage(NamedTuple):
    """What happened to an actor."""

    actor: int  # its number in the whole run
    text: str
    replaced: bool = True  # else it lives, but its games could not be rebuilt and were replaced by others


class ActorSource(Protocol):
    """Gives what a worker is rebuilt from when it is started; see `actor_states.ActorStates`."""

    start: int

    def of(self, actor: int) -> Any: ...
    def start_new_games(self, actor: int) -> None: ...


class Workers:
    """`num_workers` supervised processes running `target(channel, *args)`, to be used in a `with` block.

    Args:
        target: a module-level function.
        args: passed on, pickled; shared tensors stay shared.
        states: what workers are rebuilt from, and the agent steps that their seeds follow from.
        slots_per_worker: worker i fills slots i * slots_per_worker and on, and no others.
        max_restarts: budget for the whole run.
        hang_seconds: a worker whose heartbeat stops for so long is killed and restarted.
        in_order: take one filled slot from each of workers 0, 1, ... instead of first come, first served.
        versions: weights versions that the first `slots_per_worker` slots of each worker are filled with.
        on_restart: called each time a worker is replaced, or cannot be rebuilt.
        first_actor: number of worker 0 among the actors of the whole run; restart_messages name it by this.
    """

    def __init__(
        self,
        target: Callable[..., None],
        num_workers: int,
        args: tuple = (),
        *,
        states: ActorSource | None = None,
        slots_per_worker: int = 2,
        max_restarts: int = 5,
        hang_seconds: float = 60.0,
        in_order: bool = False,
        versions: Sequence[int] | None = None,
        on_restart: Callable[[RestartMessage], None] = print,
        first_actor: int = 0,
    ):
        self.target, self.num_workers, self.args = target, num_workers, args
        self.states, self.slots_per_worker = states, slots_per_worker
        self.max_restarts, self.hang_seconds = max_restarts, hang_seconds
        self.in_order, self.on_restart, self.first_actor = in_order, on_restart, first_actor
        self.restarts = 0
        self._context = mp.get_context("spawn")
        cores = len(os.sched_getaffinity(0))
        self._start_seconds = START_SECONDS * max(1.0, num_workers / cores)
        self._beats = shared_counters(num_workers)
        self._processes: list[Any] = [None] * num_workers
        self._tokens: list[Any] = [None] * num_workers
        self._results: list[Any] = [None] * num_workers
        self._seen_beats = [
            (0, 0.0, self._start_seconds)
        ] * num_workers  # last count, seconds of silence, how many it may be
        self._checked = time.monotonic()  # when heartbeats were last looked at
        self._has_filled = [False] * num_workers
        # Tokens given to each worker, whose slots the caller has not got yet: its successor is given them once more.
        slots = range(num_workers * slots_per_worker)
        first = zip(slots, itertools.cycle(versions or [0] * slots_per_worker))
        tokens = [Token(slot, version) for slot, version in first]
        self._given = [deque(tokens[w * slots_per_worker : (w + 1) * slots_per_worker]) for w in range(num_workers)]
        self._ready: list[deque[Filled]] = [deque() for _ in range(num_workers)]
        self._arrivals: deque[int] = deque()  # workers in the order of their messages

    def __enter__(self) -> Workers:
        try:
            for worker in range(self.num_workers):
                self._start(worker)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def rounds(self, should_stop: Callable[[], bool], size: int = 1) -> Iterator[list[Filled]]:
        """Yield filled slots until `should_stop()`: `size` in order of arrival, or `in_order` one of each worker.

        They are the caller's until it releases them. A round is whole or not there: a worker that dies before the last
        slot of a round has arrived fills its own once more.

        Raises:
            WorkerError: a worker raised before it filled anything, or the restart budget is spent.
        """
        while not should_stop():
            if found := self._next_round(size):
                yield found
            else:
                self._wait(should_stop)

    def release(self, filled: Iterable[Filled], version: int) -> None:
        """Give slots back to their workers, to be filled acting with weights `version` or newer."""
        for worker, slot, _ in filled:
            self._given[worker].append(token := Token(slot, version))
            self._give(worker, token)

    def _give(self, worker: int, token: Token) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died; its successor is given what it had
            self._tokens[worker].send(token)

    def stop(self) -> None:
        """End every worker: they close their environments, and those that take too long are killed."""
        alive = [process for process in self._processes if process is not None and process.is_alive()]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + CLOSE_SECONDS
        while alive and time.monotonic() < deadline:
            connection.wait([process.sentinel for process in alive], END_SECONDS)
            alive = [process for process in alive if process.is_alive()]
        for process in alive:  # stopped (SIGSTOP), or something in its environments takes long
            process.kill()
        for process in alive:
            process.join()

    def _start(self, worker: int) -> None:
        try:
            process = self._spawn(worker)
        except OSError as error:  # EAGAIN, ENOMEM, EMFILE
            raise WorkerError(refused(f"actor {self.first_actor + worker}", "--num-actors", error)) from error
        for token in self._given[worker]:
            self._give(worker, token)
        self._processes[worker] = process
        self._seen_beats[worker] = (int(self._beats[worker]), 0.0, max(self._start_seconds, self.hang_seconds))

    def _spawn(self, worker: int) -> Any:
        """The process of a worker, with the pipes to it."""
        with (
            ExitStack() as child_ends
        ):  # the child has its own copies; without these, its death reads as an end of file
            take_end, self._tokens[worker] = self._context.Pipe(duplex=False)
            child_ends.enter_context(take_end)
            self._results[worker], send_end = self._context.Pipe(duplex=False)
            child_ends.enter_context(send_end)
            actor = self.first_actor + worker
            restored = None if self.states is None else self.states.of(actor)
            restarts = 0 if restored is not None else self.restarts
            entropy = (0 if self.states is None else self.states.start, actor, restarts)
            channel = WorkerChannel(worker, actor, entropy, restored, take_end, send_end, self._beats)
            args = (self.target, channel, self.args)
            return start_child(run_worker, args, name=f"worker-{worker}", daemon=True, group=True)

    def _next_round(self, size: int) -> list[Filled]:
        if self.in_order:
            chosen = list(range(self.num_workers)) if all(self._ready) else []
        else:
            chosen = [self._arrivals.popleft() for _ in range(size)] if len(self._arrivals) >= size else []
        for worker in chosen:
            self._given[worker].popleft()
        return [self._ready[worker].popleft() for worker in chosen]

    def _wait(self, should_stop: Callable[[], bool]) -> None:
        """Wait for a message, a death or `POLL_SECONDS`, whichever comes first, and deal with it."""
        readers = {pipe: worker for worker, pipe in enumerate(self._results)}
        sentinels = {process.sentinel: worker for worker, process in enumerate(self._processes)}
        events = connection.wait([*readers, *sentinels], POLL_SECONDS)
        if should_stop():  # a signal to all processes has ended the workers too: nobody is to replace them
            return
        for event in events:  # messages first: they say why a worker died
            if event in readers:
                self._receive(readers[event])
        for event in events:
            if event in sentinels:
                self._bury(sentinels[event])
        self._check_heartbeats()

    def _receive(self, worker: int) -> None:
        try:
            while self._results[worker].poll():
                kind, content, payload = self._results[worker].recv()
                if kind == "error":
                    self._fail(worker, content)
                    return
                if kind == "games lost":
                    self._lose_games(worker, content)
                    continue
                self._has_filled[worker] = True
                self._ready[worker].append(Filled(worker, content, payload))
                if not self.in_order:
                    self._arrivals.append(worker)
        except (EOFError, OSError, pickle.UnpicklingError):
            return  # cut short by a kill; the sentinel tells

    def _fail(self, worker: int, text: str) -> None:
        process = self._processes[worker]
        self._await_end(process)  # it may only be closing its environments; its successor needs the slots
        if not self._has_filled[worker]:
            raise WorkerError(f"{self._name(worker)} failed before its first rollout:\n{text}")
        self._restart(worker, "raised an exception", "\n" + text.rstrip())

    def _await_end(self, process: Any) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        while process.is_alive() and time.monotonic() < deadline:
            connection.wait([process.sentinel], END_SECONDS)
        process.kill()
        process.join()

    def _bury(self, worker: int) -> None:
        process = self._processes[worker]
        if process.exitcode is None:
            return  # restarted already
        self._receive(worker)  # what it still managed to send
        if self._processes[worker] is process:
            code = process.exitcode
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            if code >= 0 and not self._has_filled[worker]:  # it failed before it could say why, but not silently
                raise WorkerError(f"{self._name(worker)} {how} before its first rollout; see above")
            self._restart(worker, how)

    def _check_heartbeats(self) -> None:
        now = time.monotonic()
        passed, self._checked = min(now - self._checked, PAUSE_SECONDS), now
        for worker, (count, silence, limit) in enumerate(self._seen_beats):
            beats = int(self._beats[worker])
            if beats != count:
                self._seen_beats[worker] = (beats, 0.0, self.hang_seconds)
            elif silence >= QUIET_SECONDS and self._processes[worker].exitcode is not None:
                self._bury(worker)
            elif silence + passed <= limit:
                self._seen_beats[worker] = (beats, silence + passed, limit)
            else:
                self._processes[worker].kill()
                self._processes[worker].join()
                how = f"gave no sign of life for {limit:.0f} s and was killed (--hang-seconds)"
                if limit > self.hang_seconds:  # it has not shown any yet
                    how = f"took longer than {limit:.0f} s to start and was killed (lower --num-actors)"
                self._restart(worker, how)

    def _name(self, worker: int) -> str:
        return f"actor {self.first_actor + worker} (pid {self._processes[worker].pid})"

    def _restart(self, worker: int, how: str, details: str = "") -> None:
        message = f"{self._name(worker)} {how}"
        if self.restarts >= self.max_restarts:
            raise WorkerError(f"{message}; restart budget of {self.max_restarts} spent{details}")
        self.restarts += 1
        text = f"{message}; restart {self.restarts} of {self.max_restarts}{details}"
        self.on_restart(RestartMessage(self.first_actor + worker, text))
        self._ready[worker].clear()  # whole rollouts, but simplest to forget: at most `slots_per_worker` of them
        self._arrivals = deque(other for other in self._arrivals if other != worker)
        self._start(worker)

    def _lose_games(self, worker: int, why: str) -> None:
        assert self.states is not None
        self.states.start_new_games(self.first_actor + worker)
        text = f"{self._name(worker)} cannot be rebuilt: {why}; it starts new games"
        self.on_restart(RestartMessage(self.first_actor + worker, text, replaced=False))
