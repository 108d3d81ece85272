"""A model of chapter 7 on a cluster: a closed queueing network with a barrier, simulated event by event.

Each actor has one request open: it loads the newest weights, collects a rollout and sends it, and is asked for the next
one when its trainer has learned from it. Rollouts queue for their trainer's network link, then for the trainer. All
trainers take a rollout at the same time, once each has one, and average their gradients, which cross the link of each,
2 (N - 1) / N times their size each way, as a ring of N needs. Weights go out once for each version, node and trainer;
the actors of each trainer are spread over all nodes. Collecting varies by `JITTER`, all other times are fixed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

JITTER = 0.1
"""collecting takes between 1 - this and 1 + this of its mean"""
FITTED = ("transport", "messages", "skew")
"""costs that are found from the rates of clusters"""
SATURATED = 0.9
"""share of its time in which what limits a cluster works"""
PARTS, LINKS = ("messages", "learning", "all-reduce"), ("link in", "link out")
KINDS = ("rollouts", "weights", "gradients")
"""parts of a trainer's time in a round; its network link's directions; what crosses the network"""


class Costs(NamedTuple):
    """What a rollout costs."""

    rollout_steps: int  # agent steps in it
    rollout_bytes: float  # on the network
    weights_bytes: float  # of one version
    gradient_bytes: float
    updates: int  # gradients for each rollout
    collect: float  # an actor's time for it (s)
    transport: float = 0.0  # from the request to the arrival, besides collecting and the network (s)
    messages: float = 0.0  # its trainer's time besides gradients: receiving, counting, publishing, requesting (s)
    learn: float = 0.0  # its trainer's time for the gradients (s)
    agree: Mapping[int, float] = {}  # number of trainers -> their time to exchange counts and gradients (s), likewise
    skew: float = 0.0  # for which one of several trainers waits in a round as processes do not wake up at once (s)


class Cluster(NamedTuple):
    """Its nodes and trainers, and what connects a trainer to the rest."""

    nodes: int
    actors_per_node: int
    trainers: int = 1
    bandwidth: float = math.inf  # of a trainer's network link, each way (bytes/s)


class Prediction(NamedTuple):
    """What the model says of a cluster."""

    sps: float  # agent steps a second
    supply: float  # what the actors would collect if nothing held them up, likewise
    busy: dict[str, float]  # what all rollouts of a trainer pass -> share of the time in which it works
    link_in: float  # of a trainer (bytes/s)
    link_out: float
    carried: dict[str, float]  # of `KINDS` -> bytes on the network for each agent step
    trainer_store: float  # bytes in the object store of a trainer's node, at most
    stores: float  # bytes in the object stores of all nodes, at most

    @property
    def bottleneck(self) -> str:
        """What limits the cluster: a link, the largest part of the trainers' time, or the actors."""
        links, parts = ({name: self.busy[name] for name in names} for names in (LINKS, PARTS))
        if max(links.values()) > SATURATED:
            return max(links, key=links.__getitem__)
        return max(parts, key=parts.__getitem__) if sum(parts.values()) > SATURATED else "actors"


class Simulation:
    """A cluster from its start on. `totals` has seconds of `PARTS`, bytes of links and of `KINDS`, and rollouts."""

    def __init__(self, costs: Costs, cluster: Cluster):
        self.costs, self.cluster, self.rng = costs, cluster, random.Random(0)
        self.now, self.version, self.in_round = 0.0, 0, False
        self.totals = defaultdict[str, float](float)
        self.free = defaultdict[tuple[str, int], float](float)  # link, trainer -> when it has sent what it has taken
        self.waiting: list[deque[int]] = [deque() for _ in range(cluster.trainers)]  # actors whose rollouts are there
        self.found = [0] * cluster.trainers  # of these, those that the trainer has in its own memory
        self.loaded: dict[tuple[int, int], tuple[int, float]] = {}  # node, trainer -> version, when it was there
        self.stored = self.peak = self.trainer_peak = 0  # rollouts in all object stores; most, and of a trainer
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._number = count()
        for actor in range(cluster.nodes * cluster.actors_per_node):
            self._at(self.rng.random() * costs.collect, self._request, actor)

    def run(self, rollouts: float) -> dict[str, float]:
        """Go on until there are so many; returns the totals."""
        while self.totals["learned"] < rollouts:
            self.now, _, event, args = heapq.heappop(self._events)
            event(*args)
        return {**self.totals, "time": self.now}

    def _at(self, time: float, event: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time, next(self._number), event, args))

    def _send(self, link: str, trainer: int, size: float, kind: str = "") -> float:
        """Send something once the link is free; returns when it is there."""
        self.totals[link] += size
        self.totals[kind] += size
        self.free[link, trainer] = max(self.now, self.free[link, trainer]) + size / self.cluster.bandwidth
        return self.free[link, trainer]

    def _request(self, actor: int) -> None:
        trainer, node = actor % self.cluster.trainers, actor // self.cluster.actors_per_node
        version, there = self.loaded.get((node, trainer), (-1, 0.0))
        if version < self.version:
            there = self._send(LINKS[1], trainer, self.costs.weights_bytes, "weights")
            self.loaded[node, trainer] = self.version, there
        collect = self.costs.collect * self.rng.uniform(1 - JITTER, 1 + JITTER) + self.costs.transport
        self._at(max(self.now, there) + collect, self._collected, actor, trainer)

    def _collected(self, actor: int, trainer: int) -> None:
        self.stored += 1
        self.peak = max(self.peak, self.stored)
        there = self._send(LINKS[0], trainer, self.costs.rollout_bytes, "rollouts")
        self._at(there, self._arrived, actor, trainer)

    def _arrived(self, actor: int, trainer: int) -> None:
        self.waiting[trainer].append(actor)
        self.trainer_peak = max(self.trainer_peak, len(self.waiting[trainer]) - self.found[trainer])
        if not self.in_round:
            self._begin()

    def _begin(self) -> None:
        """Trainers that have nothing to learn from take all that has arrived; a round begins if each has a rollout."""
        for trainer, waiting in enumerate(self.waiting):
            if not self.found[trainer]:
                self.found[trainer] = len(waiting)
                self.stored -= len(waiting)
        self.in_round = all(self.waiting)
        if self.in_round:
            self.totals["messages"] += self.costs.messages
            self.totals["learning"] += self.costs.learn
            self._at(self.now + self.costs.messages + self.costs.learn, self._exchange)

    def _exchange(self) -> None:
        costs, trainers, end = self.costs, self.cluster.trainers, self.now
        if trainers > 1:
            size = costs.updates * costs.gradient_bytes * 2 * (trainers - 1) / trainers
            ways = (LINKS[0], ""), (LINKS[1], "gradients")
            end = max(self._send(link, number, size, kind) for number in range(trainers) for link, kind in ways)
            end += costs.agree[trainers] + costs.skew
        self.totals["all-reduce"] += end - self.now
        self._at(end, self._learned)

    def _learned(self) -> None:
        self.version += 1
        self.totals["learned"] += self.cluster.trainers
        for trainer, waiting in enumerate(self.waiting):
            self._request(waiting.popleft())
            self.found[trainer] -= 1
        self._begin()


def predict(costs: Costs, cluster: Cluster, rounds: int = 20) -> Prediction:
    """Simulate so many rollouts of each actor; the first half is for reaching the steady state."""
    simulation, trainers, actors = Simulation(costs, cluster), cluster.trainers, cluster.nodes * cluster.actors_per_node
    half = max(rounds * actors // 2, trainers)
    before, after = defaultdict(float, simulation.run(half)), simulation.run(2 * half)
    done = defaultdict(float, {name: value - before[name] for name, value in after.items()})
    seconds, steps = done["time"], done["learned"] * costs.rollout_steps
    link_in, link_out = (done[link] / seconds / trainers for link in LINKS)
    busy = {name: done[name] / seconds for name in PARTS}
    busy |= {LINKS[0]: link_in / cluster.bandwidth, LINKS[1]: link_out / cluster.bandwidth}
    kept = 2 * costs.weights_bytes  # the two newest versions, of each trainer and on each node that has loaded them
    return Prediction(
        steps / seconds, actors * costs.rollout_steps / (costs.collect + costs.transport),
        busy, link_in, link_out, {kind: done[kind] / steps for kind in KINDS},
        simulation.trainer_peak * costs.rollout_bytes + kept,
        simulation.peak * costs.rollout_bytes + kept * (trainers + len(simulation.loaded)),
    )  # fmt: skip


def fit(costs: Costs, rates: Sequence[tuple[Cluster, float]]) -> Costs:
    """Find the costs in `FITTED`, from first guesses, with which the model is closest to agent steps a second."""

    def error(costs: Costs) -> float:
        return sum(math.log(predict(costs, cluster, rounds=40).sps / sps) ** 2 for cluster, sps in rates)

    factor, least = 2.0, error(costs)
    while factor > 1.02:
        ways = [(name, by) for name in FITTED for by in (factor, 1 / factor)]
        tried = [costs._replace(**{name: getattr(costs, name) * by}) for name, by in ways]
        errors = [error(each) for each in tried]
        if min(errors) < least:
            least, costs = min(errors), tried[errors.index(min(errors))]
        else:
            factor **= 0.5
    return costs
