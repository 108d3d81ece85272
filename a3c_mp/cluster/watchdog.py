"""The watchdog of a session: what the head of the cluster says of it, and whether it still answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from a3c_mp.cluster.calls import Calls, in_time
from a3c_mp.cluster.environment import import_ray

POLL_SECONDS = 1.0
"""between two looks of the watchdog at the head of the cluster"""
ANSWER_SECONDS = 2.0
"""longest wait for one answer of the head"""
SILENT_SECONDS = 8.0
"""silence of the head after which a run ends, where nothing accepts connections at its address any longer"""
BUSY_SECONDS = 60.0
"""the same where something does: its machine is busy"""
STUCK_SECONDS = 4.0
"""longest time that the trainer may take from there on; it may wait in a call of Ray that does not return"""
STORE = "object_store_memory"
WAITING_STATES = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


class ClusterState(NamedTuple):
    """A cluster, as its head describes it."""

    nodes: Mapping[str, str]  # ids of the nodes that are alive -> their addresses
    num_cpus: float  # of all nodes: places for actors
    store_bytes: float  # used in the object stores of all nodes
    places: Mapping[str, tuple[str, int]]  # of actors: id -> (node, process)
    waiting: frozenset[str]  # ids of the actors that no node has a place for


class Watchdog:
    """Thread that asks the head of a cluster how it is, and notes when it has not answered for too long.

    No other thread may ask it: where the head is lost, such a call does not return.

    Args:
        cluster: what it is called in messages.
        calls: of Ray, by the trainer.
    """

    def __init__(self, cluster: str, calls: Calls):
        self.cluster = cluster
        self.state = ClusterState({}, 0.0, 0.0, {}, frozenset())  # the last answer
        self.lost: str | None = None  # why the cluster cannot be used any longer
        self.on_stuck: Callable[[str], None] = lambda why: None  # called on this thread before the process ends
        self._calls = calls
        self._head = "127.0.0.1:0"  # where it listens
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-watchdog", daemon=True)

    def start(self) -> None:
        """Ask the head for the first time, and go on doing so on a thread."""
        self._head = import_ray().get_runtime_context().gcs_address
        self.ask()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def ask(self) -> bool:
        """Ask the head; returns whether it has answered."""
        return in_time(self._update, ANSWER_SECONDS)

    def _update(self) -> None:
        self.state = ask_head()

    def _watch(self) -> None:
        answered = time.monotonic()
        while not self._stopping.wait(POLL_SECONDS):
            if self.ask():
                answered = time.monotonic()
                continue
            limit = BUSY_SECONDS if accepts_connections(self._head) else SILENT_SECONDS
            if time.monotonic() - answered >= limit and not self._stopping.is_set():
                self.lost = f"the head of {self.cluster} has not answered for {limit:.0f} s"
                self._end_if_trainer_is_stuck(self.lost)
                return

    def _end_if_trainer_is_stuck(self, why: str) -> None:
        """Save the run and end the process where the trainer is in a call of Ray that does not return.

        While it does anything else, for instance a gradient step, nothing is done: `check` raises after that.
        """
        lost_at = time.monotonic()
        while not self._stopping.wait(POLL_SECONDS):
            called = self._calls.since
            if called is not None and time.monotonic() - max(called, lost_at) >= STUCK_SECONDS:
                self.on_stuck(why)
                os._exit(1)


def accepts_connections(address: str) -> bool:
    """Whether something listens at `host:port`; the kernel answers, however busy that process is."""
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), ANSWER_SECONDS):
        return True
    return False


def ask_head() -> ClusterState:
    """Ask the head of the cluster that this process is connected to; does not return if it is lost."""
    from ray._private import state

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in import_ray().nodes() if node["Alive"]}
    total, free, actors = state.cluster_resources(), state.available_resources(), state.actors()
    places = {key: (actor["Address"]["NodeID"], actor["Pid"]) for key, actor in actors.items()}
    waiting = (key for key, actor in actors.items() if actor["State"] in WAITING_STATES and not actor["Pid"])
    used = total.get(STORE, 0.0) - free.get(STORE, 0.0)
    return ClusterState(nodes, total.get("CPU", 0.0), used, places, frozenset(waiting))
