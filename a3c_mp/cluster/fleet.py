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

from a3c_mp.cluster.host import FleetChannel, Hello, Host, beats
from a3c_mp.cluster.session import Session, versions
from a3c_mp.errors import WorkerError
from a3c_mp.processes.channel import Token
from a3c_mp.processes.supervisor import CLOSE_SECONDS, PAUSE_SECONDS, START_SECONDS, WAIT_SECONDS
from a3c_mp.processes.workers import Filled, RestartMessage, SlotLedger, StateSource, WorkerOptions

BEAT_SECONDS = 1.0
"""between two requests for the heartbeats of an actor that has sent nothing"""
WAITING_SECONDS = 10.0
"""time without a place after which an actor is said to wait for one; starting a process takes some of it"""
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""pause before the first, second, ... restart in a row of an actor that has not produced anything"""


class Store(Protocol):
    """Where the fleet puts what actors send; see `transport.Inbox`."""

    def write(self, slot: int, result: Any, cargo: Any) -> Any:
        """Copy a result into a slot; returns the payload that the caller gets with it.

        Args:
            cargo: reference to what else the actor has sent.
        """


@dataclass
class Member:
    """An actor of the fleet: its current process, and what it owes."""

    name: str
    handle: Any = None
    hello: Any = None  # reference to its `Hello`, until that has arrived
    calls: dict[Any, tuple[int, Any]] = field(default_factory=dict)  # reference -> slot that it fills, its cargo
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
        return [ref for ref in (self.hello, self.beat_request, *self.calls) if ref is not None]


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
        states: StateSource, options: WorkerOptions, on_restart: Callable[[RestartMessage], None],
    ):  # fmt: skip
        self.session, self.target, self.args, self.store = session, target, args, store
        self.states, self.options, self.on_restart = states, options, on_restart
        self.members = [Member(f"{options.role} {number}") for number in range(num_workers)]
        self.restarts = 0
        self._ledger = SlotLedger(num_workers, options)
        self._looked = time.monotonic()

    def __enter__(self) -> Fleet:
        ray = self.session.ray
        self._host = type("Host", (Host,), {"beats": ray.method(concurrency_group="control")(beats)})
        for number in range(len(self.members)):
            self._start(number)
        return self

    def __exit__(self, *exc: object) -> None:
        """End all actors: they close their environments, and those that take too long are killed."""
        if self.session.lost is not None:
            return  # its processes end with the session
        ray, closing = self.session.ray, []
        with suppress(Exception):
            for member in self.members:
                for reference in member.calls:
                    ray.cancel(reference, force=False)
                if member.handle is not None and member.has_result:
                    closing.append(member.handle.close.remote())
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for member in self.members:
            self._end(member)

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots, as `Workers.take` does."""
        while not should_stop():
            if found := self._ledger.take(size):
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
        return sum(member.hello is None and member.handle is not None for member in self.members)

    # ---- results

    def _watch(self, should_stop: Callable[[], bool], seconds: float) -> None:
        """Wait for a result or so long (s), and deal with it and with deaths and silence."""
        self.session.check()
        owners = {ref: number for number, member in enumerate(self.members) for ref in member.references}
        if owners:
            ready, _ = self.session.ray.wait(list(owners), num_returns=1, timeout=seconds)
            for reference in self._also_ready(ready, owners):
                if reference in self.members[owners[reference]].references:  # its process may be replaced by now
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
        member, ray = self.members[number], self.session.ray
        try:
            result = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            self._fail(number, "raised an exception", str(error))
            return
        except ray.exceptions.RayError as error:
            self._fail(number, *self._how_it_died(member, error))
            return
        if reference is member.beat_request:
            member.beat_request = None
            if result == member.beats:
                return
            member.beats = result
        member.silence = 0.0
        if reference is member.hello:
            self._welcome(number, result)
        elif reference in member.calls:
            slot, cargo = member.calls.pop(reference)
            member.has_result = member.had_result = True
            member.failures = 0
            self._ledger.fill(number, slot, self.store.write(slot, result, cargo))

    def _counted(self, number: int) -> int:
        """The number of an actor for a message by which its games leave the count, or join it.

        In deterministic runs nobody plays while one waits, and its games go on: it is no actor's (-1).
        """
        return -1 if self.options.in_order else number

    def _welcome(self, number: int, hello: Hello) -> None:
        member = self.members[number]
        member.hello, member.pid, member.node_id = None, hello.pid, hello.node_id
        if (theirs := hello.versions) != (own := dict(versions())):
            differing = ", ".join(f"{name} {theirs.get(name)}" for name in own if theirs.get(name) != own[name])
            raise WorkerError(f"{member} runs with {differing}, the trainer with other versions; install the same")
        if member.is_waiting:
            member.is_waiting = False
            text = f"{member.name} has found a place (pid {member.pid} at {self.session.nodes.get(member.node_id)})"
            self.on_restart(RestartMessage(self._counted(number), text, replaced=False, joined=True))
        for reason in hello.not_restored:
            self.states.forget(number)
            text = f"{member} cannot be rebuilt: {reason}"
            self.on_restart(RestartMessage(number, text, replaced=False))

    # ---- deaths

    def _how_it_died(self, member: Member, error: Exception) -> tuple[str, str]:
        if "node has died" in str(error) or "node was" in str(error):
            return "was lost with its node", ""
        if member.hello is not None and "creation task" in str(error):
            return "raised an exception", str(error)
        return "died", ""

    def _fail(self, number: int, how: str, details: str = "") -> None:
        """Replace the process of an actor, unless that would not help."""
        member, with_node = self.members[number], how == "was lost with its node"
        message = f"{member} {how}"
        details = f"\n{details.rstrip()}" if details else ""
        self._end(member)
        if details and not member.had_result:
            raise WorkerError(f"{member} failed before its first result:{details}")
        if not with_node:
            if self.restarts >= self.options.max_restarts:
                raise WorkerError(f"{message}; restart budget of {self.options.max_restarts} spent{details}")
            self.restarts += 1
            message += f"; restart {self.restarts} of {self.options.max_restarts}"
        self.on_restart(RestartMessage(number, message + details))
        self._ledger.forget(number)
        pause = BACKOFF_SECONDS[min(member.failures, len(BACKOFF_SECONDS) - 1)]
        member.failures += 1
        member.start_at = time.monotonic() + pause
        if pause == 0.0:
            self._start(number)

    def _look_after(self) -> None:
        """Start actors whose pause is over, and ask silent ones for their heartbeats."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, PAUSE_SECONDS), now
        for number, member in enumerate(self.members):
            if member.start_at is not None and now >= member.start_at:
                self._start(number)
            if member.handle is None or not (member.calls or member.hello):
                member.silence = 0.0
                continue
            before, member.silence = member.silence, member.silence + passed
            if int(before / BEAT_SECONDS) < int(member.silence / BEAT_SECONDS):
                self._ask(number)

    def _ask(self, number: int) -> None:
        """Ask a silent actor for its heartbeats; replace it if it has been silent for too long."""
        member = self.members[number]
        longest = self.options.hang_seconds if member.has_result else max(START_SECONDS, self.options.hang_seconds)
        if member.hello is not None and member.handle._actor_id.hex() in self.session.waiting:
            member.silence = 0.0
            if not member.is_waiting and time.monotonic() - member.started >= WAITING_SECONDS:
                member.is_waiting = True
                text = f"{member.name} waits for a node with a free CPU"
                self.on_restart(RestartMessage(self._counted(number), text, replaced=False, left=True))
        elif member.silence > longest:
            place = (member.node_id, member.pid) if member.pid else self.session.place_of(member.handle)
            if place is not None:  # otherwise it has no process yet
                self.session.kill_process(*place)
            self._fail(number, f"sent no heartbeat for {longest:.0f} s and was killed (--hang-seconds)")
        elif member.beat_request is None and member.hello is None:
            member.beat_request = member.handle.beats.remote()

    # ---- processes

    def _start(self, number: int) -> None:
        member = self.members[number]
        restored = self.states.of(number)
        entropy = (self.states.start, number, 0 if restored is not None else member.starts)
        member.starts += 1
        channel = FleetChannel(number, entropy, restored)
        member.handle = self.session.start_actor(
            self._host, (self.target, channel, self.args, self.options.niceness), num_cpus=1,
            concurrency_groups={"control": 1},
        )  # fmt: skip
        member.hello, member.start_at, member.started = member.handle.hello.remote(), None, time.monotonic()
        member.pid, member.node_id, member.beats, member.silence, member.has_result = 0, "", 0, 0.0, False
        for token in self._ledger.given[number]:
            self._request(number, token)

    def _request(self, number: int, token: Token) -> None:
        member = self.members[number]
        if member.handle is not None:
            result, cargo = member.handle.fill.options(num_returns=2).remote(token)
            member.calls[result] = token.slot, cargo

    def _end(self, member: Member) -> None:
        """Kill an actor's process, if it has one, and forget its requests."""
        if member.handle is not None:
            self.session.end_actor(member.handle)
        member.handle = member.hello = member.beat_request = None
        member.calls.clear()
