"""A fleet: supervised actors on the nodes of a Ray cluster that fill slots, with the face of `Workers`.

The trainer requests every result and the fleet copies it into a slot of this process, so the object store never holds
more than what is in flight. Ray places actors and carries their results; it restarts nothing. The fleet does that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from a3c_mp.cluster.environment import versions
from a3c_mp.cluster.ray_worker import FleetChannel, Hello, RayWorker, beats
from a3c_mp.cluster.session import Session
from a3c_mp.errors import WorkerError
from a3c_mp.processes.pool import Filled, SlotLedger, StateSource, Token, WorkerEvent, WorkerOptions
from a3c_mp.processes.supervisor import CLOSE_SECONDS, PAUSE_SECONDS, START_SECONDS, WAIT_SECONDS

BEAT_SECONDS = 1.0
"""between two requests for the heartbeats of an actor that has sent nothing"""
WAITING_SECONDS = 10.0
"""time without a place after which an actor is said to wait for one; starting a process takes some of it"""
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""pause before the first, second, ... restart in a row of an actor that has not produced anything"""


class Store(Protocol):
    """Where the fleet puts what actors send; see `transport.Inbox`."""

    def write(self, slot: int, result: Any, rows_ref: Any) -> Any:
        """Copy a result into a slot; returns the payload that the caller gets with it.

        Args:
            rows_ref: reference to what else the actor has sent.
        """


@dataclass
class FleetActor:
    """An actor of the fleet: its current process, and what it owes."""

    name: str
    handle: Any = None
    hello: Any = None  # reference to its `Hello`, until that has arrived
    calls: dict[Any, tuple[int, Any]] = field(default_factory=dict)  # reference -> slot that it fills, its rows_ref
    beat_request: Any = None  # reference
    pid: int = 0
    node_id: str = ""
    beats: int = 0
    silence: float = 0.0  # seconds since the last heartbeat
    has_result: bool = False  # the current process has produced something
    had_result: bool = False  # this one or an earlier one has
    failures: int = 0  # in a row
    starts: int = 0  # of processes, also after a node was lost
    is_waiting: bool = False  # no node has a place for it
    started: float = 0.0  # when the current process was requested
    start_at: float | None = None  # when it is started again

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid else self.name

    @property
    def references(self) -> list[Any]:
        """What to wait for. Of the calls only the oldest, so that results count in order.

        Ray may deliver a later one first.
        """
        return [ref for ref in (self.hello, self.beat_request, next(iter(self.calls), None)) if ref is not None]


class Fleet:
    """Supervised actors on Ray that make `target(channel, *args)` and call it for each token; used as `Workers` is.

    Args:
        session: the connection to Ray.
        target: a class or function; what it returns is called with tokens (slot, version).
        args: for the target; everything in them is pickled.
        store: takes what the target returns.
        num_workers, states, options, on_restart: as of `Workers`.
    """

    def __init__(
        self, session: Session, target: Callable[..., Any], args: tuple, store: Store, num_workers: int, *,
        states: StateSource, options: WorkerOptions, on_restart: Callable[[WorkerEvent], None],
    ):  # fmt: skip
        self.session, self.target, self.args, self.store = session, target, args, store
        self.states, self.options, self.on_restart = states, options, on_restart
        self.actors = [FleetActor(f"{options.role} {number}") for number in range(num_workers)]
        self.restarts = 0
        self._ledger = SlotLedger(num_workers, options)
        self._looked = time.monotonic()

    def __enter__(self) -> Fleet:
        ray = self.session.ray
        self._worker_class = type("RayWorker", (RayWorker,), {"beats": ray.method(concurrency_group="control")(beats)})
        for number in range(len(self.actors)):
            self._start(number)
        return self

    def __exit__(self, *exc: object) -> None:
        """End all actors: they close their environments, and those that take too long are killed."""
        if self.session.lost is not None:
            return  # its processes end with the session
        ray, closing = self.session.ray, []
        with suppress(Exception):
            for actor in self.actors:
                for reference in actor.calls:
                    ray.cancel(reference, force=False)
                if actor.handle is not None and actor.has_result:
                    closing.append(actor.handle.close.remote())
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for actor in self.actors:
            self._end(actor)

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots, as `Workers.take` does; a smaller one where actors have no place.

        A deterministic run waits for all of its actors.
        """
        while not should_stop():
            able = self.options.slots_per_worker * self.placed
            if found := self._ledger.take(min(size, max(able, 1))):
                return found
            self._watch(should_stop, WAIT_SECONDS)
        return []

    def poll(self, should_stop: Callable[[], bool]) -> list[Filled]:
        """Return a round of one filled slot, or an empty list, without waiting."""
        self._watch(should_stop, 0.0)
        return self._ledger.take(1)

    def release(self, filled: Iterable[Filled], version: int) -> None:
        """Give slots back to their actors, to be filled acting with weights `version` or newer."""
        for message in filled:
            self._request(message.worker, self._ledger.give(message, version))

    @property
    def running(self) -> int:
        """How many actors have started."""
        return sum(actor.hello is None and actor.handle is not None for actor in self.actors)

    @property
    def placed(self) -> int:
        """How many actors do not wait for a place."""
        return sum(not actor.is_waiting for actor in self.actors)

    # ---- results

    def _watch(self, should_stop: Callable[[], bool], seconds: float) -> None:
        """Wait for a result for at most `seconds`, and deal with it and with deaths and silence."""
        self.session.check()
        owners = {ref: number for number, actor in enumerate(self.actors) for ref in actor.references}
        if owners:
            ready, _ = self.session.ray.wait(list(owners), num_returns=1, timeout=seconds)
            for reference in self._also_ready(ready, owners):
                if reference in self.actors[owners[reference]].references:  # its process may be replaced by now
                    self._settle(owners[reference], reference)
        else:
            time.sleep(seconds)
        if not should_stop():
            self._look_after()

    def _also_ready(self, ready: list[Any], owners: dict[Any, int]) -> list[Any]:
        """All results that have arrived, in the order of the requests."""
        if not ready or len(owners) == 1:
            return ready
        return self.session.ray.wait(list(owners), num_returns=len(owners), timeout=0)[0]

    def _settle(self, number: int, reference: Any) -> None:
        actor, ray = self.actors[number], self.session.ray
        try:
            result = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            self._fail(number, "raised an exception", str(error))
            return
        except ray.exceptions.RayError as error:
            self._fail(number, *self._how_it_died(actor, error))
            return
        if reference is actor.beat_request:
            actor.beat_request = None
            if result == actor.beats:
                return
            actor.beats = result
        actor.silence = 0.0
        if reference is actor.hello:
            self._welcome(number, result)
        elif reference in actor.calls:
            slot, rows_ref = actor.calls.pop(reference)
            actor.has_result = actor.had_result = True
            actor.failures = 0
            self._ledger.fill(number, slot, self.store.write(slot, result, rows_ref))

    def _counted(self, number: int) -> int:
        """The number of an actor for a message by which its games leave the count, or join it.

        In deterministic runs nobody plays while one waits, and its games go on: it is no actor's (-1).
        """
        return -1 if self.options.in_order else number

    def _welcome(self, number: int, hello: Hello) -> None:
        actor = self.actors[number]
        actor.hello, actor.pid, actor.node_id = None, hello.pid, hello.node_id
        if (theirs := hello.versions) != (own := dict(versions())):
            differing = ", ".join(f"{name} {theirs.get(name)}" for name in own if theirs.get(name) != own[name])
            raise WorkerError(f"{actor} runs with {differing}, the trainer with other versions; install the same")
        if actor.is_waiting:
            actor.is_waiting = False
            text = f"{actor.name} has found a place (pid {actor.pid} at {self.session.state.nodes.get(actor.node_id)})"
            self.on_restart(WorkerEvent(self._counted(number), text, replaced=False, joined=True))
        for reason in hello.not_restored:
            self.states.forget(number)
            text = f"{actor} cannot be rebuilt: {reason}"
            self.on_restart(WorkerEvent(number, text, replaced=False))

    # ---- deaths

    def _how_it_died(self, actor: FleetActor, error: Exception) -> tuple[str, str]:
        says_so = "node has died" in str(error) or "node was" in str(error)
        # Large results lie on the actor's node; their loss may be noticed before the actor's death.
        is_lost = isinstance(error, self.session.ray.exceptions.ObjectLostError)
        if says_so or (is_lost and self.session.has_left(actor.node_id)):
            return "was lost with its node", ""
        if actor.hello is not None and "creation task" in str(error):
            return "raised an exception", str(error)
        return "died", ""

    def _fail(self, number: int, how: str, details: str = "") -> None:
        """Replace the process of an actor, unless that would not help."""
        actor, with_node = self.actors[number], how == "was lost with its node"
        message = f"{actor} {how}"
        details = f"\n{details.rstrip()}" if details else ""
        self._end(actor)
        if details and not actor.had_result:
            raise WorkerError(f"{actor} failed before its first result:{details}")
        if not with_node:
            if self.restarts >= self.options.max_restarts:
                raise WorkerError(f"{message}; restart budget of {self.options.max_restarts} spent{details}")
            self.restarts += 1
            message += f"; restart {self.restarts} of {self.options.max_restarts}"
        self.on_restart(WorkerEvent(number, message + details))
        self._ledger.forget(number)
        pause = BACKOFF_SECONDS[min(actor.failures, len(BACKOFF_SECONDS) - 1)]
        actor.failures += 1
        actor.start_at = time.monotonic() + pause
        if pause == 0.0:
            self._start(number)

    def _look_after(self) -> None:
        """Start actors whose pause is over, and ask silent ones for their heartbeats."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, PAUSE_SECONDS), now
        for number, actor in enumerate(self.actors):
            if actor.start_at is not None and now >= actor.start_at:
                self._start(number)
            if actor.handle is None or not (actor.calls or actor.hello):
                actor.silence = 0.0
                continue
            before, actor.silence = actor.silence, actor.silence + passed
            if int(before / BEAT_SECONDS) < int(actor.silence / BEAT_SECONDS):
                self._ask(number)

    def _ask(self, number: int) -> None:
        """Ask a silent actor for its heartbeats; replace it if it has been silent for too long."""
        actor = self.actors[number]
        longest = self.options.hang_seconds if actor.has_result else max(START_SECONDS, self.options.hang_seconds)
        if actor.hello is not None and actor.handle._actor_id.hex() in self.session.state.waiting:
            actor.silence = 0.0
            if not actor.is_waiting and time.monotonic() - actor.started >= WAITING_SECONDS:
                actor.is_waiting = True
                text = f"{actor.name} waits for a node with a free CPU"
                self.on_restart(WorkerEvent(self._counted(number), text, replaced=False, left=True))
        elif actor.silence > longest:
            place = (actor.node_id, actor.pid) if actor.pid else self.session.place_of(actor.handle)
            if place is not None:  # otherwise it has no process yet
                self.session.kill_process(*place)
            self._fail(number, f"sent no heartbeat for {longest:.0f} s and was killed (--hang-seconds)")
        elif actor.beat_request is None and actor.hello is None:
            actor.beat_request = actor.handle.beats.remote()

    # ---- processes

    def _start(self, number: int) -> None:
        actor = self.actors[number]
        restored = self.states.record_start(number)
        seed_key = (self.states.start, number, 0 if restored is not None else actor.starts)
        actor.starts += 1
        channel = FleetChannel(number, seed_key, restored)
        actor.handle = self.session.start_actor(
            self._worker_class, (self.target, channel, self.args, self.options.niceness), num_cpus=1,
            concurrency_groups={"control": 1},
        )  # fmt: skip
        actor.hello, actor.start_at, actor.started = actor.handle.hello.remote(), None, time.monotonic()
        actor.pid, actor.node_id, actor.beats, actor.silence, actor.has_result = 0, "", 0, 0.0, False
        for token in self._ledger.given[number]:
            self._request(number, token)

    def _request(self, number: int, token: Token) -> None:
        actor = self.actors[number]
        if actor.handle is not None:
            result, rows_ref = actor.handle.fill.options(num_returns=2).remote(token)
            actor.calls[result] = token.slot, rows_ref

    def _end(self, actor: FleetActor) -> None:
        """Kill an actor's process, if it has one, and forget its requests."""
        if actor.handle is not None:
            self.session.end_actor(actor.handle)
        actor.handle = actor.hello = actor.beat_request = None
        actor.calls.clear()
