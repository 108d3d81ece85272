"""A model of chapter 7 on a cluster: a closed queueing network, simulated event by event.

Each actor is asked for a rollout, loads the newest weights, collects, and sends the rollout; it is asked for the next
one when the trainer has learned from it. What every rollout passes one at a time is a station: the trainer's network
link inwards, then the trainer. Weights go out once for each node and version, through the link outwards. Time that a
station needs is fixed, that of collecting varies by `JITTER`.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

JITTER = 0.1
"""collecting takes between 1 - this and 1 + this of its mean"""


@dataclass(frozen=True)
class Costs:
    """What a rollout costs."""

    steps: int
    """agent steps in a rollout"""
    rollout_bytes: float
    """bytes of a rollout on the network"""
    weights_bytes: float
    """bytes of one version of the weights"""
    collect: float
    """time in which an actor collects and sends a rollout (s)"""
    trainer: float
    """time of the trainer's thread for a rollout, without the gradient: receiving, unpacking, requesting (s)"""
    publish: float = 0.0
    """time of the trainer's thread for a version of the weights (s)"""
    learn: float = 0.0
    """time of the gradient steps for a rollout (s)"""
    wait: float = 0.0
    """time that one look at all open requests takes, for each request (s)"""


@dataclass(frozen=True)
class Cluster:
    """How many actors there are, and what connects them to the trainer."""

    nodes: int
    actors_per_node: int
    bandwidth: float = float("inf")
    """of the trainer's network link, each way (bytes/s)"""
    publish_every: float = 0.0
    """shortest time between two versions of the weights (s)"""

    @property
    def actors(self) -> int:
        return self.nodes * self.actors_per_node


class Prediction(NamedTuple):
    """What the model says of a cluster."""

    sps: float  # agent steps a second
    supply: float  # what the actors would collect if nothing held them up, likewise
    busy: dict[str, float]  # station -> share of the time in which it works

    @property
    def bottleneck(self) -> str:
        """The station that holds the actors up; "actors" if none does."""
        name = max(self.busy, key=self.busy.__getitem__)
        return name if self.busy[name] > 0.9 else "actors"


class Simulation:
    """Events of a cluster in the order of their times: an actor asks, sends; a rollout arrives, is learned from."""

    def __init__(self, costs: Costs, cluster: Cluster, seed: int):
        self.costs, self.cluster, self.rng = costs, cluster, random.Random(seed)
        self.link_in, self.link_out = costs.rollout_bytes / cluster.bandwidth, costs.weights_bytes / cluster.bandwidth
        self.free = {"link in": 0.0, "link out": 0.0}  # when a link has sent what it has taken so far
        self.worked = dict.fromkeys(("link in", "trainer", "link out"), 0.0)  # seconds
        self.node_weights = [(-1, 0.0)] * cluster.nodes  # version that a node has, and since when
        self.version, self.published = 0, 0.0
        self.waiting: deque[int] = deque()  # actors whose rollouts have arrived
        self.found = 0  # of these, how many the trainer's last look has found
        self._events: list[tuple[float, int, str, int]] = []
        self._number = count()
        for actor in range(cluster.actors):
            self._add(self.rng.random() * costs.collect, "ask", actor)

    def next(self) -> tuple[float, bool]:
        """Go on to the next event. Returns (its time, whether it is that a rollout has been learned from)."""
        now, _, what, actor = heapq.heappop(self._events)
        if what == "ask":
            ready = max(now, self._weights_at(actor // self.cluster.actors_per_node, now))
            self._add(ready + self.costs.collect * self.rng.uniform(1 - JITTER, 1 + JITTER), "send", actor)
        elif what == "send":
            self._add(self._send("link in", now, self.link_in), "arrive", actor)
        elif what == "arrive":
            self.waiting.append(actor)
            if len(self.waiting) == 1:  # the trainer had nothing to do
                self._learn(now)
        else:
            self._add(now, "ask", self.waiting.popleft())
            if self.waiting:
                self._learn(now)
        return now, what == "learned"

    def _add(self, time: float, what: str, actor: int) -> None:
        heapq.heappush(self._events, (time, next(self._number), what, actor))

    def _send(self, link: str, now: float, seconds: float) -> float:
        """Send something when the link is free; returns when it is there."""
        self.worked[link] += seconds
        self.free[link] = max(now, self.free[link]) + seconds
        return self.free[link]

    def _weights_at(self, node: int, now: float) -> float:
        """When a node has the newest weights: it fetches each version once."""
        version, since = self.node_weights[node]
        if version < self.version:
            version, since = self.node_weights[node] = self.version, self._send("link out", now, self.link_out)
        return since

    def _learn(self, now: float) -> None:
        """Begin with the oldest rollout that has arrived."""
        costs, seconds = self.costs, self.costs.trainer + self.costs.learn
        if self.found == 0:
            self.found, seconds = len(self.waiting), seconds + costs.wait * self.cluster.actors
        self.found -= 1
        if now - self.published >= self.cluster.publish_every:
            self.version, self.published, seconds = self.version + 1, now, seconds + costs.publish
        self.worked["trainer"] += seconds
        self._add(now + seconds, "learned", -1)


def predict(costs: Costs, cluster: Cluster, rounds: int = 20, seed: int = 0) -> Prediction:
    """Simulate so many rollouts of each actor; the first half is for reaching the steady state."""
    simulation, done, warm_up = Simulation(costs, cluster, seed), 0, rounds * cluster.actors // 2
    begun, before, now = 0.0, dict(simulation.worked), 0.0
    while done < 2 * warm_up:
        now, is_learned = simulation.next()
        done += is_learned
        if is_learned and done == warm_up:
            begun, before = now, dict(simulation.worked)
    busy = {name: min((worked - before[name]) / (now - begun), 1.0) for name, worked in simulation.worked.items()}
    supply = cluster.actors * costs.steps / costs.collect
    return Prediction(warm_up * costs.steps / (now - begun), supply, busy)


def collect_time(costs: Costs, cluster: Cluster, sps: float) -> float:
    """The time of collecting (s) by which the model gives this many agent steps a second."""
    low, high = 0.0, cluster.actors * costs.steps / sps
    for _ in range(30):
        middle = (low + high) / 2
        too_fast = predict(replace(costs, collect=middle), cluster, rounds=60).sps > sps
        low, high = (middle, high) if too_fast else (low, middle)
    return high
