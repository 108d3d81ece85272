"""The trainer's end of the replay shards: samples from all of them, in proportion to priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from a3c_mp.cluster.session import Call, Session
from a3c_mp.cluster.shards import Reply
from a3c_mp.errors import WorkerError
from a3c_mp.processes.supervisor import WAIT_SECONDS
from a3c_mp.replay import Batch

UNANSWERED = 2  # insertions of each actor that may wait for their shard; their rows lie in the object store


class Part(NamedTuple):
    """A shard's part of a batch, requested from it."""

    shard: int
    places: np.ndarray  # in the batch
    share: float  # of the shard in the sum of all priorities, when it was drawn
    call: Call


class RemoteReplay:
    """The trainer's end: sampling from all shards in proportion to priority, with the calls of `Replay` and `Prefetch`.

    `start_shard(number)` starts the actor of a shard; actor i sends to shard i % num_shards. `ahead` batches are
    requested ahead: 0 in deterministic runs, which also wait for every insertion.
    """

    def __init__(
        self, session: Session, start_shard: Callable[[int], Any], num_actors: int, num_shards: int, *,
        batch_size: int, ahead: int, seed: int, max_restarts: int, should_stop: Callable[[], bool],
        device: torch.device,
    ):  # fmt: skip
        self.session, self.start_shard, self.num_shards = session, start_shard, num_shards
        self.restarts_left, self.should_stop, self.device = max_restarts, should_stop, device
        self.num_actors, self.batch_size, self.ahead = num_actors, batch_size, ahead
        self.rng = np.random.default_rng(seed)
        self.sizes, self.totals = np.zeros(num_shards, np.int64), np.zeros(num_shards)
        self.shards = [start_shard(number) for number in range(num_shards)]
        self._insertions: list[deque[Call]] = [deque() for _ in range(num_shards)]  # without an answer yet
        self._requests: deque[list[Part]] = deque()  # of the next batches
        session.duties.append(self.look_after)

    @property
    def size(self) -> int:
        """Transitions that can be drawn."""
        return int(self.sizes.sum())

    def insert(self, actor: int, rows: Any) -> None:
        """Have a shard insert an actor's rows, given by reference; waits while too many insertions have no answer."""
        number, index = actor % self.num_shards, actor // self.num_shards
        calls, most = self._insertions[number], UNANSWERED * len(range(number, self.num_actors, self.num_shards))
        while len(calls) >= most and self._wait(calls[0]):
            self.look_after()  # it takes the answer
        calls.append(self.session.call(self.shards[number], "insert", index, rows))
        if self.ahead == 0 and self._wait(calls[0]):
            self.look_after()

    def look_after(self) -> None:
        """Take the answers that have arrived; replace shards that have died. Called while the trainer waits."""
        for number, calls in enumerate(self._insertions):
            while calls and self.session.is_done(calls[0]):
                self._take_reply(number, calls.popleft())

    def next(self) -> Batch | None:
        """Return the next batch; None if all shards are empty or the run should stop."""
        while not self.should_stop() and self.totals.sum() > 0:
            while len(self._requests) <= self.ahead:
                self._requests.append(self._request())
            if (batch := self._gather(self._requests.popleft())) is not None:
                return batch
        return None

    def update(self, ids: Tensor, priorities: Tensor) -> None:
        """Set the priorities of sampled transitions: absolute TD errors."""
        own_ids, shard = np.divmod(ids.cpu().numpy(), self.num_shards)
        values = priorities.detach().double().cpu().numpy()
        for number in np.unique(shard):
            chosen = shard == number
            self.shards[number].update.remote(own_ids[chosen], values[chosen])

    def _request(self) -> list[Part]:
        """Ask shards for their parts of a batch, stratified over the sum of all priorities."""
        edges = self.totals.cumsum()
        places = (np.arange(self.batch_size) + self.rng.random(self.batch_size)) / self.batch_size * edges[-1]
        owner = edges.searchsorted(np.minimum(places, np.nextafter(edges[-1], 0.0)), side="right")
        parts = []
        for number in np.unique(owner).tolist():
            chosen = np.flatnonzero(owner == number)
            call = self.session.call(self.shards[number], "sample", len(chosen))
            parts.append(Part(number, chosen, float(self.totals[number] / edges[-1]), call))
        return parts

    def _gather(self, parts: list[Part]) -> Batch | None:
        """Wait for the parts of a batch; None if a shard of them is lost, or the run should stop."""
        fields: dict[str, np.ndarray] = {}
        for number, places, share, call in parts:
            reply = self._take_reply(number, call) if self._wait(call) else None
            if reply is None or reply.batch is None:
                return None
            part = {**reply.batch, "probability": reply.batch["probability"] * share}
            part["ids"] = part["ids"] * self.num_shards + number
            for name, values in part.items():
                whole = fields.setdefault(name, np.empty((self.batch_size, *values.shape[1:]), values.dtype))
                whole[places] = values
        if any(call.actor is not self.shards[number] for number, *_, call in parts):
            return None  # replaced since it answered: the ids would be its successor's
        return Batch(**{name: torch.from_numpy(whole) for name, whole in fields.items()}).to(self.device)

    def _wait(self, call: Call) -> bool:
        """Wait for the answer of a shard, or its death; returns False if the run should stop."""
        while not self.session.is_done(call, WAIT_SECONDS):
            self.session.check()
            if self.should_stop():
                return False
        return True

    def _take_reply(self, number: int, call: Call) -> Reply | None:
        """Take a shard's answer, which has arrived; None if it is lost."""
        ray = self.session.ray
        try:
            reply = ray.get(call.answer)
        except ray.exceptions.RayActorError as error:
            if call.actor is self.shards[number]:
                self._replace(number, str(error))
            return None
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ray.exceptions.RayError):
                raise  # a mistake in this program
            return None  # the actor's rows were lost with its node
        if call.actor is self.shards[number]:
            self.sizes[number], self.totals[number] = reply.size, reply.total
        return reply

    def _replace(self, number: int, why: str) -> None:
        """Start an empty shard in place of one that has died."""
        if self.restarts_left == 0 or "creation task" in why:  # one that cannot be made, for instance too large
            raise WorkerError(f"replay shard {number} died; no restart is left\n{why}")
        self.restarts_left -= 1
        lost = f"its {self.sizes[number]:,} transitions are lost"
        self.session.log.warning(f"replay shard {number} died; {lost}, an empty one is started")
        self.sizes[number] = self.totals[number] = 0
        self._insertions[number].clear()
        self._requests.clear()
        self.shards[number] = self.start_shard(number)
