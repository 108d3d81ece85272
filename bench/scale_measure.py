"""Measures chapter 7's transport on Ray clusters of this machine, with actors that sleep instead of collecting."""

from __future__ import annotations

import logging
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import psutil

from a3c_mp.cluster import Fleet, FleetChannel, Packer, Publisher, Reader, Result, Session
from a3c_mp.cluster.access import HOME_VARIABLE, find_cluster
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.nets.build import NetSpec, make_actor_critic
from a3c_mp.processes.channel import Token
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.workers import WorkerOptions
from bench import common
from bench.scale_model import JITTER

START_SECONDS = 120.0
"""longest wait for the actors of a cluster"""
STARTED_TOGETHER = 2
"""nodes that are started at the same time"""
LOOKS = (50, 400, 1600)
"""numbers of open requests among which the trainer looks for answers"""


class Settings(NamedTuple):
    """What is measured."""

    nodes: Sequence[int]  # sizes of the clusters, without the trainer's node
    actors_per_node: int
    collect_seconds: float  # that an actor sleeps for a rollout
    learn_seconds: float  # that the trainer sleeps for a rollout
    seconds: float  # of each measurement


class Row(NamedTuple):
    """What was measured on a cluster."""

    nodes: int
    actors: int
    rollouts_per_second: float
    trainer_ms: float  # CPU time of the trainer's thread for a rollout
    publish_ms: float  # CPU time of the trainer's thread for a version of the weights
    cpu_ms: float  # CPU time of all processes for a rollout; none of it is collecting or learning


class Message(NamedTuple):
    """What is sent: rollouts in slots of a spec, and the weights of a net."""

    spec: dict[str, Any]
    spaces: tuple[Any, Any]
    net: NetSpec
    stack: int  # frames of an observation, of which only the newest travels; 1 sends whole observations


class SleepingActor:
    """Actor without environment: it loads the weights, sleeps, and sends a rollout."""

    def __init__(self, channel: FleetChannel, message: Message, reader: Reader, seconds: float):
        self.net, self.reader, self.seconds = make_actor_critic(*message.spaces, message.net), reader, seconds
        self.packer = Packer(message.spec, message.stack)
        self.fields, self.rng = self.packer.empty(), random.Random(channel.actor)

    def __call__(self, token: Token) -> tuple[Result, None]:
        version = self.reader.load(self.net)
        time.sleep(self.seconds * self.rng.uniform(1 - JITTER, 1 + JITTER))
        return Result(version, self.packer.pack(self.fields), {}), None


class Idle:
    """Actor that answers late."""

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)


# ---- nodes of this machine


class LocalCluster:
    """Ray nodes on this machine, in a `with` block: one without actors for the trainer, and those that are added."""

    def __enter__(self) -> LocalCluster:
        self.nodes: list[subprocess.Popen] = []
        with ExitStack() as cleanup:
            os.environ[HOME_VARIABLE] = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="scale-"))
            cleanup.callback(self._end)
            with socket.create_server(("127.0.0.1", 0)) as server:
                self.address = f"127.0.0.1:{server.getsockname()[1]}"
            self._start("head", "--port", self.address.partition(":")[2], "--num-cpus", "0")
            self._wait_for(1)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._cleanup.close()

    def add(self, count: int, places: int) -> None:
        """Have nodes with so many places join, and wait until they have."""
        for first in range(0, count, STARTED_TOGETHER):
            together = min(STARTED_TOGETHER, count - first)
            for _ in range(together):
                self._start("join", self.address, "--num-cpus", str(places))
            self._wait_for(together)

    def _start(self, *command: str) -> None:
        command = (sys.executable, "-m", "a3c_mp.cluster", *command)
        self.nodes.append(subprocess.Popen(command, cwd=common.ROOT, stdout=subprocess.PIPE, text=True))

    def _wait_for(self, last: int) -> None:
        for node in self.nodes[-last:]:
            assert node.stdout is not None
            if "cluster at" not in node.stdout.readline():
                raise WorkerError("a node of the cluster has not started; see the error above")

    def _end(self) -> None:
        for node in reversed(self.nodes):
            node.terminate()
        for node in self.nodes:
            node.communicate()


def cpu_seconds() -> float:
    """CPU time that this process and all its descendants have used so far: nodes are among them."""
    total, own = 0.0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


# ---- measuring


class Trainer:
    """A trainer without gradients, in a `with` block: a fleet of sleeping actors, slots, a parameter server."""

    def __init__(self, args: Settings, session: Session, message: Message, num_actors: int):
        self.args, self.net = args, make_actor_critic(*message.spaces, message.net)
        packer = Packer(message.spec, message.stack)
        self.rollout_bytes = packer.nbytes
        self.weights = Publisher(session, self.net)
        slots = Slots(message.spec, num_actors)
        states: Any = SimpleNamespace(start=0, record_start=lambda actor: None, forget=lambda actor: None)
        self.fleet = Fleet(
            session, SleepingActor, (message, Reader(self.weights), args.collect_seconds),
            lambda slot, result: packer.unpack(result.fields, slots[slot]), num_actors, states=states,
            options=WorkerOptions(role="actor", slots_per_worker=1), on_restart=lambda message: None,
        )  # fmt: skip

    def __enter__(self) -> Trainer:
        self.fleet.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.fleet.__exit__(*exc)

    def run(self, seconds: float) -> tuple[int, float]:
        """Take rollouts, sleep and publish for so long; returns (rollouts, CPU time of publishing)."""
        rollouts, publishing, end = 0, 0.0, time.perf_counter() + seconds
        while filled := self.fleet.take(lambda: time.perf_counter() >= end):
            time.sleep(self.args.learn_seconds)
            started = time.thread_time()
            self.weights.publish(self.net)
            publishing += time.thread_time() - started
            self.fleet.release(filled, self.weights.version)
            rollouts += len(filled)
        return rollouts, publishing

    def wait_for(self, actors: int) -> None:
        """Wait until so many actors have started, and have worked for a while."""
        deadline = time.monotonic() + START_SECONDS
        while self.fleet.running < actors:
            if time.monotonic() > deadline:
                raise WorkerError(f"{self.fleet.running} of {actors} actors have started in {START_SECONDS:.0f} s")
            self.run(1.0)
        self.run(2 * self.args.collect_seconds)

    def measure(self, nodes: int, actors: int) -> Row:
        """Measure a cluster, all of whose actors have started."""
        began, thread, cpu = time.perf_counter(), time.thread_time(), cpu_seconds()
        rollouts, publishing = self.run(self.args.seconds)
        if rollouts == 0:
            raise ConfigError("seconds", self.args.seconds, "no rollout arrived in this time", "raise it")
        passed, thread, cpu = time.perf_counter() - began, time.thread_time() - thread, cpu_seconds() - cpu
        per_rollout = ((thread - publishing) / rollouts, publishing / rollouts, cpu / rollouts)
        return Row(nodes, actors, rollouts / passed, *(1000 * seconds for seconds in per_rollout))


def look_seconds(session: Session) -> float:
    """Time of one look of a fleet at all open requests, for each request: it waits for one, then for all."""
    idle, times = session.actor_class(Idle, num_cpus=0).remote(), []
    for number in LOOKS:
        requests = [idle.rest.remote(3600) for _ in range(number)]
        tries = []
        for _ in range(20):
            began = time.thread_time()
            session.ray.wait(requests, num_returns=1, timeout=0)
            session.ray.wait(requests, num_returns=number, timeout=0)
            tries.append(time.thread_time() - began)
        times.append(statistics.median(tries))
    session.kill(idle)
    return max(float(np.polyfit(LOOKS, times, 1)[0]), 0.0)


def measure_clusters(args: Settings, message: Message) -> tuple[list[Row], Row, float]:
    """Rows of the cluster as it grows, the row of one node that sends whole observations, and `look_seconds`."""
    rows: list[Row] = []
    places = args.actors_per_node
    with LocalCluster() as cluster:
        address = find_cluster(cluster.address, None)
        with Session(address, logging.getLogger("scale")) as session:
            with Trainer(args, session, message, max(args.nodes) * places) as trainer:
                for before, nodes in pairwise((0, *args.nodes)):
                    cluster.add(nodes - before, places)
                    trainer.wait_for(nodes * places)
                    rows.append(trainer.measure(nodes, nodes * places))
                    print(show(rows[-1]), flush=True)
            with Trainer(args, session, message._replace(stack=1), places) as trainer:
                trainer.wait_for(places)
                whole = trainer.measure(1, places)
                print(f"whole observations: {show(whole)}", flush=True)
            return rows, whole, look_seconds(session)


def show(row: Row) -> str:
    rate = f"nodes {row.nodes}, actors {row.actors}: {row.rollouts_per_second:.2f} rollouts/s"
    return (
        f"{rate}; trainer {row.trainer_ms:.1f} + {row.publish_ms:.1f} ms, all processes {row.cpu_ms:.0f} ms a rollout"
    )
