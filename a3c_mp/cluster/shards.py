"""Replay shards on the nodes of a cluster: each holds the transitions of some actors, the trainer samples from all.

Actors append to a short ring of their own and send the new rows, which go from node to node; the trainer sees neither
rows nor frames before it samples them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from a3c_mp.cluster.session import Session
from a3c_mp.errors import WorkerError
from a3c_mp.processes.supervisor import WAIT_SECONDS
from a3c_mp.replay import Batch, Replay, Shards

OBSERVED = ("frame", "action", "step")
"""fields that a row has as soon as it is written"""
COMPLETED = ("reward", "discount", "bootstrap_offset", "priority")
"""fields that it has once its transition is complete"""
NEW_GAMES, CONTINUED = "new games", "continued"
"""how a process starts: what its predecessor left incomplete is dropped, or it completes that"""


class ReplaySpec(NamedTuple):
    """What the rows of a replay hold."""

    num_envs: int  # of each actor (B)
    obs_space: gymnasium.Space
    action_space: gymnasium.Space  # as the replay stores actions
    stack: int  # frames of an observation

    def shards(self, num_actors: int, rows: int) -> Shards:
        """Allocate lanes of so many rows for the environments of so many actors."""
        return Shards(num_actors, self.num_envs, rows, self.obs_space, self.action_space, self.stack)

    def bytes_needed(self, num_actors: int, rows: int) -> int:
        """Memory that such lanes take (bytes)."""
        sizes = num_actors, self.num_envs, rows, self.obs_space, self.action_space, self.stack
        return Shards.bytes_needed(*sizes)


class Rows(NamedTuple):
    """New rows of an actor. Its lanes' rows are numbered from 0 in each process."""

    start: str | None  # of the first rows of a process: NEW_GAMES or CONTINUED
    written: np.ndarray  # [2, B], before and now: the observed rows are between them
    committed: np.ndarray  # [2, B], the same for completed rows
    observed: dict[str, np.ndarray]  # [M, ...], the lanes one after the other
    completed: dict[str, np.ndarray]  # [K]


class Outbox:
    """An actor's end: a ring that its `Writer` appends to, and from which new rows are taken.

    Args:
        spec: of the rows.
        steps: of each environment between two calls of `take`, at most.
        n_step: rewards in a return.
        restored: state of a predecessor whose incomplete transitions this process continues; see `Writer.fields`.
    """

    def __init__(self, spec: ReplaySpec, steps: int, n_step: int, restored: Any = None):
        self.ring = spec.shards(1, 4 * steps + 2 * n_step + spec.stack + 2)
        carried = restored.carried if restored is not None else {}
        self.start: str | None = CONTINUED if carried else NEW_GAMES
        if carried:
            self.ring.written[:] = carried["nstep_pending"].sum(axis=0)
        self._counters = np.stack([self.ring.written, self.ring.committed])  # at the last `take`

    def take(self) -> Rows:
        """Return the rows that are new since the last call, and make room for as many."""
        ring = self.ring
        written = np.stack([self._counters[0], ring.written])
        committed = np.stack([self._counters[1], ring.committed])
        rows = Rows(self.start, written, committed, self._read(OBSERVED, written), self._read(COMPLETED, committed))
        self.start = None
        self._counters = np.stack([ring.written, ring.committed])
        ring.writable_until[:] = ring.committed + ring.rows - ring.stack
        return rows

    def _read(self, names: tuple[str, ...], span: np.ndarray) -> dict[str, np.ndarray]:
        lane, row = spread(span)
        return {name: getattr(self.ring, name)[lane, row % self.ring.rows] for name in names}


def all_finite(rows: Rows) -> bool | None:
    """Whether the first priorities of all transitions in new rows are finite; None if there are none."""
    priority = rows.completed["priority"]
    usable = (priority >= 0) & (priority < np.inf)  # false for NaN too
    return bool(usable.all()) if priority.any() else None


class Reply(NamedTuple):
    """What a shard answers: its size and sum of priorities, for the trainer's next draw."""

    size: int
    total: float
    batch: dict[str, np.ndarray] | None = None


class ReplayShard:
    """Actor that holds a part of the replay."""

    def __init__(self, spec: ReplaySpec, num_actors: int, rows: int, priority_exponent: float, seed: int):
        torch.set_num_threads(1)
        self.replay = Replay(spec.shards(num_actors, rows), priority_exponent, seed)
        self.offsets: dict[int, np.ndarray] = {}  # rows of an actor's lanes here, less their numbers there, [B]
        self.first_whole: dict[int, int] = {}  # row of an actor's lanes whose observation has all its frames

    def insert(self, actor: int, new: Rows) -> Reply:
        """Append an actor's new rows to its lanes."""
        replay, shards = self.replay, self.replay.shards
        arrays = shards.arrays(actor)
        if new.start == NEW_GAMES:
            drop_incomplete(arrays, shards.rows)
        if actor not in self.offsets:  # without a start, earlier rows went to a shard that is lost
            self.first_whole[actor] = shards.stack - 1 if new.start is None else 0
        if actor not in self.offsets or new.start is not None:
            self.offsets[actor] = arrays["written"] - new.written[0]
        written, committed = new.written + self.offsets[actor], new.committed + self.offsets[actor]
        replay.make_room(actor, int((written[1] - written[0]).max()))
        write(arrays, new.observed, written, shards.rows)
        write(arrays, new.completed, committed, shards.rows, self.first_whole[actor])
        arrays["written"][:] = written[1]
        arrays["committed"][:] = np.maximum(committed[1], 0)
        replay.ingest(actor)
        return self.reply()

    def sample(self, size: int) -> Reply:
        """Sample transitions; their probabilities are relative to this shard."""
        batch = self.replay.sample(size)
        return self.reply({name: field.numpy() for name, field in batch._asdict().items()})

    def update(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Set priorities, see `Replay.update`."""
        self.replay.update(torch.from_numpy(ids.copy()), priorities)

    def reply(self, batch: dict[str, np.ndarray] | None = None) -> Reply:
        return Reply(self.replay.size, self.replay.tree.total, batch)


def spread(span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(lane, row) of every row from span[0, b] to span[1, b] of each lane b, both [M]."""
    counts = np.maximum(span[1] - span[0], 0)
    lane = np.repeat(np.arange(span.shape[1]), counts)
    first = np.cumsum(counts) - counts
    return lane, np.arange(len(lane)) + np.repeat(span[0] - first, counts)


def write(
    arrays: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], span: np.ndarray, rows: int,
    first_row: int = 0,
) -> None:  # fmt: skip
    """Write values of rows [M] into the lanes of an actor, but for rows below `first_row`, where no transition begins.

    Args:
        arrays: of `Shards.arrays`.
        new: fields of the rows that `spread(span)` lists.
        span: [2, B].
        rows: length of a lane.
        first_row: see above.
    """
    lane, row = spread(span)
    kept = row >= 0
    for name, values in new.items():
        if name == "priority":
            values = np.where(row < first_row, 0.0, values)
        arrays[name][lane[kept], row[kept] % rows] = values[kept]


def drop_incomplete(arrays: Mapping[str, np.ndarray], rows: int) -> None:
    """Drop the transitions that a lost actor has not completed, as `Writer` does where it starts behind them."""
    lane, row = spread(np.stack([arrays["committed"], arrays["written"]]))
    arrays["priority"][lane, row % rows] = 0.0


class Call(NamedTuple):
    """A call of a shard."""

    handle: Any
    reference: Any  # to its answer
    since: float  # time.monotonic()


class Part(NamedTuple):
    """A shard's part of a draw."""

    shard: int
    places: np.ndarray  # in the batch
    share: float  # of the shard in the sum of all priorities, when it was drawn
    call: Call


class RemoteReplay:
    """The trainer's end: sampling from all shards in proportion to priority, with the calls of `Replay` and `Prefetch`.

    Args:
        session: the connection to Ray.
        start_shard: starts the actor of a shard, called with its number.
        num_shards: actor i sends to shard i % num_shards.
        batch_size: transitions of a batch.
        ahead: batches requested ahead; 0 in deterministic runs, which also wait for every insertion.
        seed: of the draws among shards.
        max_restarts: budget for all shards together.
        should_stop: whether to stop waiting for a batch.
        device: of the batches.
    """

    def __init__(
        self, session: Session, start_shard: Callable[[int], Any], num_shards: int, *, batch_size: int, ahead: int,
        seed: int, max_restarts: int, should_stop: Callable[[], bool], device: torch.device,
    ):  # fmt: skip
        self.session, self.start_shard, self.num_shards = session, start_shard, num_shards
        self.max_restarts, self.should_stop, self.device = max_restarts, should_stop, device
        self.batch_size, self.ahead = batch_size, ahead
        self.rng = np.random.default_rng(seed)
        self.sizes, self.totals = np.zeros(num_shards, np.int64), np.zeros(num_shards)
        self.shards = [start_shard(number) for number in range(num_shards)]
        self._calls: list[deque[Call]] = [deque() for _ in range(num_shards)]  # insertions without an answer yet
        self._draws: deque[list[Part]] = deque()
        session.duties.append(self.look_after)

    @property
    def size(self) -> int:
        """Transitions that can be drawn."""
        return int(self.sizes.sum())

    def insert(self, actor: int, rows: Any) -> None:
        """Have a shard insert an actor's rows, given by reference."""
        number, index = actor % self.num_shards, actor // self.num_shards
        call = self._call(number, "insert", index, rows)
        if self.ahead > 0:
            self._calls[number].append(call)
        elif self._wait(call):
            self._take_reply(number, call)

    def look_after(self) -> None:
        """Take the answers that have arrived; replace shards that have died. Called while the trainer waits."""
        for number, calls in enumerate(self._calls):
            while calls and self.session.ray.wait([calls[0].reference], timeout=0)[0]:
                self._take_reply(number, calls.popleft())
            if calls:
                self.session.end_if_stuck(calls[0].handle, calls[0].since)

    def next(self) -> Batch | None:
        """Return the next batch; None if all shards are empty or the run should stop."""
        while not self.should_stop() and self.totals.sum() > 0:
            while len(self._draws) <= self.ahead:
                self._draws.append(self._request())
            if (batch := self._gather(self._draws.popleft())) is not None:
                return batch
        return None

    def update(self, ids: Tensor, priorities: Tensor) -> None:
        """Set the priorities of sampled transitions: absolute TD errors."""
        own_ids, shard = np.divmod(ids.cpu().numpy(), self.num_shards)
        values = priorities.detach().double().cpu().numpy()
        for number in np.unique(shard):
            chosen = shard == number
            self.shards[number].update.remote(own_ids[chosen], values[chosen])

    def _call(self, number: int, method: str, *args: Any) -> Call:
        return Call(self.shards[number], getattr(self.shards[number], method).remote(*args), time.monotonic())

    def _request(self) -> list[Part]:
        """Ask shards for their parts of a batch, stratified over the sum of all priorities."""
        edges = self.totals.cumsum()
        places = (np.arange(self.batch_size) + self.rng.random(self.batch_size)) / self.batch_size * edges[-1]
        owner = edges.searchsorted(np.minimum(places, np.nextafter(edges[-1], 0.0)), side="right")
        parts = []
        for number in np.unique(owner):
            chosen = np.flatnonzero(owner == number)
            call = self._call(number, "sample", len(chosen))
            parts.append(Part(int(number), chosen, float(self.totals[number] / edges[-1]), call))
        return parts

    def _gather(self, parts: list[Part]) -> Batch | None:
        """Wait for the parts of a batch; None if a shard of them is lost, or the run should stop."""
        fields: dict[str, np.ndarray] = {}
        for number, places, share, call in parts:
            if not self._wait(call):
                return None
            reply = self._take_reply(number, call)
            if reply is None or reply.batch is None:
                return None
            part = {**reply.batch, "probability": reply.batch["probability"] * share}
            part["ids"] = part["ids"] * self.num_shards + number
            for name, values in part.items():
                whole = fields.setdefault(name, np.empty((self.batch_size, *values.shape[1:]), values.dtype))
                whole[places] = values
        return Batch(**{name: torch.from_numpy(whole) for name, whole in fields.items()}).to(self.device)

    def _wait(self, call: Call) -> bool:
        """Wait for the answer of a shard, or its death; returns False if the run should stop."""
        while not self.session.ray.wait([call.reference], timeout=WAIT_SECONDS)[0]:
            self.session.check()
            self.session.end_if_stuck(call.handle, call.since)
            if self.should_stop():
                return False
        return True

    def _take_reply(self, number: int, call: Call) -> Reply | None:
        """Take a shard's answer, which has arrived; None if it is lost."""
        ray = self.session.ray
        try:
            reply = ray.get(call.reference)
        except ray.exceptions.RayActorError as error:
            if call.handle is self.shards[number]:
                self._replace(number, str(error))
            return None
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ray.exceptions.RayError):
                raise  # a mistake in this program
            return None  # the actor's rows were lost with its node
        self.session.note_answer(call.handle)
        if call.handle is self.shards[number]:
            self.sizes[number], self.totals[number] = reply.size, reply.total
        return reply

    def _replace(self, number: int, why: str) -> None:
        """Start an empty shard in place of one that has died."""
        if self.max_restarts == 0 or "creation task" in why:  # one that cannot be made, for instance too large
            raise WorkerError(f"replay shard {number} died; no restart is left\n{why}")
        self.max_restarts -= 1
        lost = f"its {self.sizes[number]:,} transitions are lost, an empty one is started"
        self.session.log.warning(f"replay shard {number} died; {lost}")
        self.sizes[number] = self.totals[number] = 0
        self._calls[number].clear()
        self._draws.clear()
        self.shards[number] = self.start_shard(number)
