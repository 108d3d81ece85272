"""A replay in shards on the nodes of a cluster, each with the transitions of some actors; one replay for the trainer.

    Outbox (actor) --(new rows)--> ReplayShard (a Ray actor on some node) --(part of a batch)--> RemoteReplay (trainer)

Rows go from node to node; the trainer sees neither rows nor frames before it samples them.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import starmap
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from a3c_mp.cluster.session import STUCK_SECONDS, Session
from a3c_mp.errors import PeerLost, WorkerError
from a3c_mp.processes.supervisor import PAUSE_SECONDS, WAIT_SECONDS
from a3c_mp.replay import Batch, Replay, Shards
from a3c_mp.replay.shards import spread

OBSERVED = ("frame", "action", "mask", "step")  # fields that a row has as soon as it is written
COMPLETED = ("reward", "discount", "bootstrap_offset", "priority")  # fields that wait for the end of its transition
NEW_GAMES, CONTINUED = "new games", "continued"  # what its predecessor left incomplete: dropped, or completed
UNANSWERED = 2  # insertions of each actor that may wait for their shard; their rows lie in the object store


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
    spans: np.ndarray  # [2, 2, B], numbers of `written` and `committed`, before and now: the new rows are between them
    fields: dict[str, np.ndarray]  # of those rows, the lanes one after the other: OBSERVED [M, ...], COMPLETED [K]

    def all_finite(self) -> bool | None:
        """Whether the first priorities of all transitions in these rows are finite; None if there are none."""
        priority = self.fields["priority"]
        usable = (priority >= 0) & (priority < np.inf)  # false for NaN too
        return bool(usable.all()) if priority.any() else None


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
        rows = Rows(self.start, np.stack([before, self._counters], axis=1), {})
        for names, (lane, row) in zip((OBSERVED, COMPLETED), starmap(spread, rows.spans), strict=True):
            rows.fields.update({name: getattr(ring, name)[lane, row % ring.rows] for name in names})
        self.start = None
        ring.writable_until[:] = ring.committed + ring.rows - ring.stack
        return rows


Reply = tuple[int, float, dict[str, np.ndarray]]  # size and sum of priorities of a shard now; fields of a batch


class ReplayShard:
    """Ray actor that holds a part of the replay."""

    def __init__(self, spec: ReplaySpec, num_actors: int, rows: int, priority_exponent: float, seed: int):
        torch.set_num_threads(1)
        self.replay = Replay(Shards(*spec.sizes(num_actors, rows)), priority_exponent, seed)
        self.offsets: dict[int, np.ndarray] = {}  # rows of an actor's lanes here, less their numbers there, [B]
        self.first_whole: dict[int, np.ndarray] = {}  # rows of an actor's lanes whose observations have all frames, [B]

    def insert(self, actor: int, new: Rows, after_lost: bool = False) -> Reply:
        """Append an actor's new rows to its lanes; `after_lost`: the trainer knows that those before them were lost."""
        replay, shards, is_first = self.replay, self.replay.shards, actor not in self.offsets
        arrays = shards.arrays(actor)
        if new.start is None and not is_first:  # they were sent before the trainer knew
            after_lost |= bool((new.spans[0, 0] + self.offsets[actor] != arrays["written"]).any())
        if new.start == NEW_GAMES or after_lost:  # of an actor that was lost, or what is lost would complete them
            shards.drop_incomplete(actor)
        if is_first or after_lost:  # games that go on have earlier rows, which this shard has not
            self.first_whole[actor] = arrays["written"] + (0 if new.start == NEW_GAMES else shards.stack - 1)
        if is_first or after_lost or new.start is not None:
            self.offsets[actor] = arrays["written"] - new.spans[0, 0]
        written, committed = spans = new.spans + self.offsets[actor]
        least = arrays["committed"].copy()  # rows before these are complete
        replay.make_room(actor, int((written[1] - written[0]).max()))
        for names, (lane, row) in zip((OBSERVED, COMPLETED), starmap(spread, spans), strict=True):
            kept = row >= least[lane]
            for name in names:
                values = new.fields[name]
                if name == "priority":  # no transition begins at an observation that lacks frames
                    values = np.where(row < self.first_whole[actor][lane], 0.0, values)
                arrays[name][lane[kept], row[kept] % shards.rows] = values[kept]
        arrays["written"][:], arrays["committed"][:] = written[1], np.maximum(committed[1], least)
        replay.ingest(actor)
        return self.sample(0)

    def sample(self, size: int) -> Reply:
        """Sample transitions; their probabilities are relative to this shard."""
        batch = self.replay.sample(size)._asdict() if size else {}
        fields = {name: field.numpy() for name, field in batch.items()}
        return self.replay.size, self.replay.tree.total, fields

    def update(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        self.replay.update(torch.from_numpy(ids.copy()), priorities)


class RemoteReplay:
    """The trainer's end: sampling from all shards in proportion to priority, with the calls of `Replay` and `Prefetch`.

    `start_shard(number)` starts the actor of a shard; actor i sends to shard i % num_shards. `own_shards` and
    `own_actors` are the numbers that this learner's have in the whole run. Batches are requested ahead (`--prefetch`),
    except in deterministic runs, which also wait for every insertion. One of several learners, which all take as many
    batches, gets the latest one again where all shards have been lost meanwhile.
    """

    def __init__(
        self, session: Session, start_shard: Callable[[int], Any], args: Any, own_shards: range, own_actors: range, *,
        seed: int, should_stop: Callable[[], bool], device: torch.device,
    ):  # fmt: skip
        self.session, self.start_shard, self.should_stop, self.device = session, start_shard, should_stop, device
        self.own_shards, self.own_actors = own_shards, own_actors
        self.num_shards = num_shards = len(own_shards)
        self.batch_size, self.restarts_left, self.repeats = args.batch_size, args.max_restarts, args.num_learners > 1
        self.ahead = 0 if args.deterministic else args.prefetch
        self.max_unanswered = UNANSWERED * -(-len(own_actors) // num_shards) if self.ahead else 0  # of a shard
        self.rng = np.random.default_rng(seed)
        self._latest: Batch | None = None
        self.sizes, self.totals = np.zeros(num_shards, np.int64), np.zeros(num_shards)
        self.shards = [start_shard(number) for number in range(num_shards)]
        self._insertions: list[deque[Any]] = [deque() for _ in range(num_shards)]  # actors, answers that have not come
        self._lost = set[int]()  # actors whose latest rows were lost with their node, or with a shard
        self._requests: deque[list[tuple]] = deque()  # of the next batches
        session.duties.append(self.look_after)

    @property
    def size(self) -> int:
        """Transitions that can be drawn."""
        return int(self.sizes.sum())

    def insert(self, actor: int, rows: Any) -> None:
        """Have a shard insert an actor's rows, given by reference; waits while too many insertions have no answer."""
        index, number = divmod(actor, self.num_shards)
        answers = self._insertions[number]
        answers.append((actor, self.shards[number].insert.remote(index, rows, actor in self._lost)))
        self._lost.discard(actor)
        while len(answers) > self.max_unanswered and self._wait(self.shards[number], answers[0][1]):
            self.look_after()  # it takes the answer

    def look_after(self) -> None:
        """Take the answers that have arrived; replace shards that have died. Called while the trainer waits."""
        for number, answers in enumerate(self._insertions):
            while answers and self.session.is_done(answers[0][1]):
                (actor, answer), shard = answers.popleft(), self.shards[number]
                if self._take_reply(number, shard, answer) is None:
                    self._lost.add(actor)
                    if shard is self.shards[number]:
                        text = "are lost with their node: determinism, if it was asked for, is lost, too"
                        self.session.warn(f"the newest transitions of actor {self.own_actors[actor]} {text}")

    def next(self) -> Batch | None:
        """Return the next batch; None if all shards are empty or the run should stop."""
        while not self.should_stop() and self.totals.sum() > 0:
            while len(self._requests) <= self.ahead:
                self._requests.append(self._request())
            if (batch := self._gather(self._requests.popleft())) is not None:
                self._latest = batch if self.repeats else None
                return batch
        if not self.repeats or self.should_stop():
            return None
        if self._latest is None:
            raise PeerLost("all replay shards of a learner are lost, before its first batch")
        return self._latest._replace(ids=torch.full_like(self._latest.ids, -1))  # no shard has them

    def update(self, ids: Tensor, priorities: Tensor) -> None:
        """Set the priorities of sampled transitions: absolute TD errors."""
        own_ids, shard = np.divmod(ids.cpu().numpy(), self.num_shards)
        values = priorities.detach().double().cpu().numpy()
        for number in np.unique(shard):
            chosen = shard == number
            self.shards[number].update.remote(own_ids[chosen], values[chosen])

    def _request(self) -> list[tuple]:
        """Ask shards for their parts of a batch, stratified over the sum of all priorities.

        Returns, of each part, the shard's number, places in the batch, share of the sum, actor and answer.
        """
        edges = self.totals.cumsum()
        places = (np.arange(self.batch_size) + self.rng.random(self.batch_size)) / self.batch_size * edges[-1]
        owner = edges.searchsorted(np.minimum(places, np.nextafter(edges[-1], 0.0)), side="right")
        parts = []
        for number in np.unique(owner).tolist():
            chosen, shard = np.flatnonzero(owner == number), self.shards[number]
            share = float(self.totals[number] / edges[-1])
            parts.append((number, chosen, share, shard, shard.sample.remote(len(chosen))))
        return parts

    def _gather(self, parts: list[tuple]) -> Batch | None:
        """Wait for the parts of a batch; None if a shard of them is lost, or the run should stop."""
        fields: dict[str, np.ndarray] = {}
        for number, places, share, shard, answer in parts:
            batch = self._take_reply(number, shard, answer) if self._wait(shard, answer) else None
            if batch is None:
                return None
            part = {**batch, "probability": batch["probability"] * share}
            part["ids"] = part["ids"] * self.num_shards + number
            for name, values in part.items():
                whole = fields.setdefault(name, np.empty((self.batch_size, *values.shape[1:]), values.dtype))
                whole[places] = values
        if any(shard is not self.shards[number] for number, *_, shard, _ in parts):
            return None  # replaced since it answered: the ids would be its successor's
        return Batch(**{name: torch.from_numpy(whole) for name, whole in fields.items()}).to(self.device)

    def _wait(self, shard: Any, answer: Any) -> bool:
        """Wait for the answer of a shard, or its death; returns False if the run should stop."""
        waited, looked = 0.0, time.monotonic()
        while not self.session.is_done(answer, WAIT_SECONDS):
            self.session.check()
            now = time.monotonic()
            passed, looked = min(now - looked, PAUSE_SECONDS), now  # more: this process was stopped
            waited = 0.0 if self.session.is_waiting(shard._actor_id.hex()) else waited + passed
            if waited > STUCK_SECONDS:
                self.session.kill(shard)  # as a stopped process it would answer nothing more; it is replaced
            if self.should_stop():
                return False
        return True

    def _take_reply(self, number: int, shard: Any, answer: Any) -> dict[str, np.ndarray] | None:
        """Take a shard's answer, which has arrived, and return its part of a batch; None if it is lost."""
        ray = self.session.ray
        try:
            size, total, batch = ray.get(answer)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            if shard is self.shards[number]:
                self._replace(number, str(error))
        except ray.exceptions.ObjectLostError:
            pass  # it lay on a node that is lost; the next call says so of the shard
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ray.exceptions.RayError):  # else the actor's rows were lost with its node
                raise  # a mistake in this program
        else:
            if shard is self.shards[number]:
                self.sizes[number], self.totals[number] = size, total
            return batch
        return None

    def _replace(self, number: int, why: str) -> None:
        """Start an empty shard in place of one that has died."""
        is_lost = "node has died" in why or "node was" in why  # its node is, which costs no restart
        if "creation task" in why or (self.restarts_left == 0 and not is_lost):  # it cannot be made, as it is too large
            raise WorkerError(f"replay shard {self.own_shards[number]} died; no restart is left\n{why}")
        self.restarts_left -= not is_lost
        lost = f"its {self.sizes[number]:,} transitions are lost"
        self.session.warn(f"replay shard {self.own_shards[number]} died; {lost}, an empty one is started")
        self.sizes[number] = self.totals[number] = 0
        self._insertions[number].clear()
        self._requests.clear()
        self.shards[number] = self.start_shard(number)
