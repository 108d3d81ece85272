"""Replay shards on the nodes of a cluster: each holds the transitions of some actors; `remote_replay` samples from all.

Actors append to a short ring of their own and send the new rows, which go from node to node; the trainer sees neither
rows nor frames before it samples them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from a3c_mp.replay import Replay, Shards

OBSERVED = ("frame", "action", "mask", "step")  # fields that a row has as soon as it is written
COMPLETED = ("reward", "discount", "bootstrap_offset", "priority")  # and those that it has once its transition is
NEW_GAMES, CONTINUED = "new games", "continued"  # what its predecessor left incomplete: dropped, or completed


class ReplaySpec(NamedTuple):
    """What the rows of a replay hold."""

    num_envs: int  # of each actor (B)
    obs_space: gymnasium.Space
    action_space: gymnasium.Space  # as the replay stores actions
    stack: int  # frames of an observation

    def sizes(self, num_actors: int, rows: int) -> tuple:
        """Arguments of `Shards` for lanes of `rows` rows, one for each environment of `num_actors` actors."""
        return num_actors, self.num_envs, rows, self.obs_space, self.action_space, self.stack


class Rows(NamedTuple):
    """New rows of an actor. Its lanes' rows are numbered from 0 in each process."""

    start: str | None  # of the first rows of a process: NEW_GAMES or CONTINUED
    written: np.ndarray  # [2, B], before and now: the observed rows are between them
    committed: np.ndarray  # [2, B], the same for completed rows
    observed: dict[str, np.ndarray]  # [M, ...], the lanes one after the other
    completed: dict[str, np.ndarray]  # [K]


class Outbox:
    """An actor's end: a ring that its `Writer` appends to, and from which new rows are taken.

    There is room for `steps` steps of each environment between two calls of `take`. `restored` is the state of a
    predecessor whose incomplete transitions this process continues.
    """

    def __init__(self, spec: ReplaySpec, steps: int, n_step: int, restored: Any = None):
        self.ring = Shards(*spec.sizes(1, 4 * steps + 2 * n_step + spec.stack + 2))
        successor_state = restored.successor_state if restored is not None else {}
        self.start: str | None = CONTINUED if successor_state else NEW_GAMES
        if successor_state:
            self.ring.written[:] = successor_state["nstep_pending"].sum(axis=0)
        self._counters = np.stack([self.ring.written, self.ring.committed])  # at the last `take`

    def take(self) -> Rows:
        """Return the rows that are new since the last call, and make room for as many."""
        ring, before = self.ring, self._counters
        self._counters = np.stack([ring.written, ring.committed])
        written, committed = np.stack([before, self._counters], axis=1)
        rows = Rows(self.start, written, committed, self._read(OBSERVED, written), self._read(COMPLETED, committed))
        self.start = None
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
        self.replay = Replay(Shards(*spec.sizes(num_actors, rows)), priority_exponent, seed)
        self.offsets: dict[int, np.ndarray] = {}  # rows of an actor's lanes here, less their numbers there, [B]
        self.first_whole: dict[int, int] = {}  # row of an actor's lanes whose observation has all its frames

    def insert(self, actor: int, new: Rows) -> Reply:
        """Append an actor's new rows to its lanes."""
        replay, shards, is_first = self.replay, self.replay.shards, actor not in self.offsets
        arrays = shards.arrays(actor)
        if new.start == NEW_GAMES:  # drop the transitions that a lost actor has not completed, as `Writer` does
            lane, row = spread(np.stack([arrays["committed"], arrays["written"]]))
            arrays["priority"][lane, row % shards.rows] = 0.0
        if is_first:  # games that go on have earlier rows, which this shard has not
            self.first_whole[actor] = 0 if new.start == NEW_GAMES else shards.stack - 1
        if is_first or new.start is not None:
            self.offsets[actor] = arrays["written"] - new.written[0]
        written, committed = new.written + self.offsets[actor], new.committed + self.offsets[actor]
        replay.make_room(actor, int((written[1] - written[0]).max()))
        for fields, span in ((new.observed, written), (new.completed, committed)):
            lane, row = spread(span)
            kept = row >= 0
            for name, values in fields.items():
                if name == "priority":  # no transition begins at an observation that lacks frames
                    values = np.where(row < self.first_whole[actor], 0.0, values)
                arrays[name][lane[kept], row[kept] % shards.rows] = values[kept]
        arrays["written"][:], arrays["committed"][:] = written[1], np.maximum(committed[1], 0)
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
