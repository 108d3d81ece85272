"""A fleet: supervised actors on the nodes of a Ray cluster that fill slots, a pool as `Workers` is.

The trainer requests every result and the fleet copies it into a slot of this process, so the object store never holds
more than what is in flight. Ray places actors and carries their results; it restarts nothing. The fleet does that.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from a3c_mp.cluster.placement import Resources
from a3c_mp.cluster.ray_worker import RayWorker
from a3c_mp.cluster.session import WAITING_SECONDS, Session
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.pool import Filled, SlotLedger, Token, WorkerEvent, WorkerOptions
from a3c_mp.processes.supervisor import CLOSE_SECONDS, PAUSE_SECONDS, WAIT_SECONDS, start_seconds

BEAT_SECONDS = 1.0  # between two requests for the heartbeats of an actor that has sent nothing


@dataclass
class FleetActor:
    """An actor of the fleet: its current process, and what it owes."""

    in_run: int  # its number in the whole run
    starts: int = 0  # of processes, also after a node was lost
    worked_at: str = ""  # id of the node where this process or an earlier one has produced something; "?": not known
    is_waiting: bool = False  # no node has a place for it
    # of the current process:
    handle: Any = None
    calls: dict[Any, tuple[int, Any]] = field(default_factory=dict)  # reference -> (slot that it fills, its rows)
    beat_request: Any = None  # reference
    pid: int = 0  # 0 until it is ready
    node_id: str = ""
    beats: int = -1  # its heartbeats by its last answer
    silence: float = 0.0  # seconds since the last heartbeat
    has_result: bool = False

    def __str__(self) -> str:
        return f"actor {self.in_run} (pid {self.pid})" if self.pid else f"actor {self.in_run}"

    @property
    def references(self) -> list[Any]:
        """What to wait for; of the calls only the oldest, as Ray may deliver a later one first."""
        oldest = next(iter(self.calls), None) if self.pid else None
        return [reference for reference in (self.beat_request, oldest) if reference is not None]

    def request_beats(self) -> None:
        self.beat_request = self.handle.heartbeats.options(concurrency_group="control").remote()


class Fleet:
    """Supervised actors on Ray that make `target(channel)` and call it for each token; the rest as in `Workers`.

    A call returns (result, rows): the result comes to the trainer, of the rows only a reference. `store(slot, result,
    rows)` puts a result into its slot; what that returns is the payload. Each actor `needs` this of its node.
    """

    def __init__(
        self, session: Session, target: Callable[[Any], Any], store: Callable[[int, Any, Any], Any], needs: Resources,
        num_workers: int, *, states: Any, options: WorkerOptions, on_restart: Callable[[WorkerEvent], None],
    ):  # fmt: skip
        self.session, self.target, self.store, self.needs = session, target, store, needs
        self.states, self.options, self.on_restart = states, options, on_restart
        self.actors = [FleetActor(options.first_actor + number) for number in range(num_workers)]
        self.restarts = 0
        # A cluster of its own is this machine, whose cores actors share when they start.
        self._start_seconds = start_seconds(1 if session.cluster is not None else num_workers)
        self._ledger = SlotLedger(num_workers, options)
        self._looked = time.monotonic()
        self._first_nodes = frozenset(session.state.nodes) if not session.is_restart else frozenset()
        self._refused: set[str] = set()  # nodes that joined later, but cannot do this work

    def __enter__(self) -> Self:
        self._actor_class = self.session.actor_class(RayWorker, concurrency_groups={"control": 1})
        free = self.session.state.free  # as it was before the first of them: it counts those that start
        for number in range(len(self.actors)):
            self._start(number, free)
        return self

    def __exit__(self, *exc: object) -> None:
        """End all actors: they close their environments, and those that take too long are killed."""
        if self.session.is_lost:
            return  # they end with the session
        ray, ready = self.session.ray, [actor for actor in self.actors if actor.pid]
        for reference in (ref for actor in ready for ref in actor.calls):
            ray.cancel(reference, force=False)
        if closing := [actor.handle.close.remote() for actor in ready]:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for actor in self.actors:
            self.session.kill(actor.handle)

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Wait for a round of filled slots, as `Workers.take` does; a smaller one where actors have no place."""
        while not should_stop():
            able = self.options.slots_per_worker * self.placed
            if found := self._ledger.take(min(size, max(able, 1))):
                return found
            self._wait()
            if not should_stop():
                self._look_after()
        return []

    def release(self, filled: Iterable[Filled], version: int) -> None:
        for message in filled:
            self._request(message.worker, self._ledger.give(message, version))

    @property
    def running(self) -> int:
        """How many actors have started."""
        return sum(actor.pid > 0 for actor in self.actors)

    @property
    def placed(self) -> int:
        """How many actors do not wait for a place."""
        return sum(not actor.is_waiting for actor in self.actors)

    def _request(self, number: int, token: Token) -> None:
        """Have an actor fill a slot, as one of those that run: of all actors in a deterministic run, where all do."""
        runs = [other for other, actor in enumerate(self.actors) if actor.pid or other == number]
        running = None if self.options.in_order else (runs.index(number), len(runs))
        actor = self.actors[number]
        result, rows_ref = actor.handle.fill.options(num_returns=2).remote(token, running)
        actor.calls[result] = token.slot, rows_ref

    def _start(self, number: int, free: Mapping[str, dict[str, float]]) -> None:
        last = self.actors[number]
        restored = self.states.record_start(last.in_run)
        seed_key = self.states.start, last.in_run, 0 if restored is not None else last.starts
        made_of = self.target, self.options.niceness, seed_key, restored
        handle = self.session.start(self._actor_class, made_of, self.needs, free, refused=self._refused)
        self.actors[number] = actor = FleetActor(last.in_run, last.starts + 1, last.worked_at, last.is_waiting, handle)
        actor.request_beats()
        for token in self._ledger.given[number]:
            self._request(number, token)

    def _wait(self) -> None:
        """Wait for a result for at most `WAIT_SECONDS`, and take all that have arrived."""
        self.session.check()
        owners = {ref: number for number, actor in enumerate(self.actors) for ref in actor.references}
        if not owners:
            time.sleep(WAIT_SECONDS)
            return
        wait = self.session.ray.wait
        ready = wait(list(owners), num_returns=1, timeout=WAIT_SECONDS)[0]
        if ready and len(owners) > 1:  # all of them, in the order of the requests
            ready = wait(list(owners), num_returns=len(owners), timeout=0)[0]
        for reference in ready:
            if reference in self.actors[owners[reference]].references:  # its process may be replaced by now
                self._settle(owners[reference], reference)

    def _settle(self, number: int, reference: Any) -> None:
        """Take an answer of an actor, or replace the actor if it failed."""
        actor, ray = self.actors[number], self.session.ray
        try:
            result = ray.get(reference)
        except ray.exceptions.RayError as error:
            self._fail(number, *self._how_it_died(actor, error))
            return
        if reference is not actor.beat_request:
            actor.silence, actor.has_result, actor.worked_at = 0.0, True, actor.node_id or "?"
            slot, rows_ref = actor.calls.pop(reference)
            self._ledger.fill(number, slot, self.store(slot, result, rows_ref))
            return
        before, is_new, actor.beat_request = actor.beats, not actor.pid, None
        actor.beats, actor.pid, actor.node_id, not_restored, refusal = result
        if refusal:
            self._refuse(number, refusal)
            return
        if actor.beats != before:
            actor.silence = 0.0
        if actor.is_waiting:
            actor.is_waiting = False
            where = f"pid {actor.pid} at {self.session.state.nodes.get(actor.node_id)}"
            self._report_place(actor, f"has found a place ({where})", joined=True)
        for reason in not_restored if is_new else ():
            self.states.forget(actor.in_run)
            self.on_restart(WorkerEvent(actor.in_run, f"{actor} cannot be rebuilt: {reason}", replaced=False))

    def _refuse(self, number: int, why: str) -> None:
        """Let an actor run elsewhere than on a node that differs; raise ConfigError at the start of a run."""
        actor = self.actors[number]
        where = self.session.state.nodes.get(actor.node_id)
        if actor.worked_at and actor.node_id in {actor.worked_at, *self._first_nodes}:  # it may be able to soon
            self._fail(number, f"cannot work on the node at {where}: {why}")
        elif actor.node_id in self._first_nodes and not actor.is_waiting:
            raise ConfigError("address", where, f"this node cannot work in this run: {why}")
        else:
            self._refused.add(actor.node_id)
            self._fail(number, f"cannot work on the node at {where}, which is not used: {why}", is_lost=True)

    def _report_place(self, actor: FleetActor, text: str, **change: bool) -> None:
        """Report that an actor has found a place or waits for one: its games count from now on, or no longer."""
        # In deterministic runs no actor plays while one waits, and its games go on: the report is no actor's (-1).
        number = -1 if self.options.in_order else actor.in_run
        self.on_restart(WorkerEvent(number, f"actor {actor.in_run} {text}", replaced=False, **change))

    def _how_it_died(self, actor: FleetActor, error: Exception) -> tuple[str, str, bool]:
        """(What happened, the traceback if there is one, whether the node is lost)."""
        session, kinds, text = self.session, self.session.ray.exceptions, str(error)
        # Results or connections of a lost node may be noticed before its death.
        is_lost = actor.pid and isinstance(error, (kinds.ObjectLostError, kinds.ActorUnavailableError))
        if isinstance(error, kinds.RayTaskError) or getattr(error, "actor_init_failed", False):
            return "raised an exception", text, False
        says_so = "node has died" in text or "node was" in text  # as an environment's error above may, too
        if says_so or (is_lost and session.wait_for(lambda: actor.node_id not in session.state.nodes)):
            return "was lost with its node", "", True
        return "died", "", False

    def _fail(self, number: int, how: str, details: str = "", is_lost: bool = False) -> None:
        """Replace the process of an actor, unless that would not help; one that its node loses costs no restart."""
        actor, budget = self.actors[number], self.options.max_restarts
        message, details = f"{actor} {how}", f"\n{details.rstrip()}" if details else ""
        self.session.kill(actor.handle)
        if details and not actor.worked_at:
            raise WorkerError(f"{actor} failed before its first result:{details}")
        if not is_lost:
            if self.restarts >= budget:
                raise WorkerError(f"{message}; restart budget of {budget} spent{details}")
            self.restarts += 1
            message += f"; restart {self.restarts} of {budget}"
        self.on_restart(WorkerEvent(-1 if actor.is_waiting else actor.in_run, message + details))
        self._ledger.forget(number)
        self._start(number, self.session.state.free)

    def _look_after(self) -> None:
        """Ask silent actors for their heartbeats; replace those that have been silent for too long."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, PAUSE_SECONDS), now
        for number, actor in enumerate(self.actors):
            before = actor.silence
            actor.silence = before + passed if actor.references else 0.0
            if int(before / BEAT_SECONDS) < int(actor.silence / BEAT_SECONDS):
                self._ask(number, actor)

    def _ask(self, number: int, actor: FleetActor) -> None:
        longest = max(self.options.hang_seconds, 0 if actor.has_result else self._start_seconds)
        if self.session.is_waiting(actor.handle._actor_id.hex()):
            if actor.silence >= WAITING_SECONDS and not actor.is_waiting:
                actor.is_waiting = True
                self._report_place(actor, f"waits for {self.session.state.node_with(self.needs)}", left=True)
            actor.silence = min(actor.silence, WAITING_SECONDS)
        elif actor.silence > longest:
            self._fail(number, f"sent no heartbeat for {longest:.0f} s and was killed (--hang-seconds)")
        elif actor.beat_request is None:
            actor.request_beats()
