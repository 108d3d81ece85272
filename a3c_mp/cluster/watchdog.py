"""The watchdog of a session: what the head of the cluster says of it, and whether it still answers."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

from a3c_mp.cluster.calls import Calls, in_time
from a3c_mp.cluster.environment import import_ray

POLL_SECONDS = 1.0
"""between two looks of the watchdog at the head of the cluster"""
ANSWER_SECONDS = 2.0
"""longest wait for one answer of the head"""
SILENT_SECONDS = 8.0
"""silence of the head after which a run ends, if nothing listens at its address any longer"""
BUSY_SECONDS = 40.0
"""the same for a head that is still there: on a crowded machine it may be slow"""
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
        self.address = ""  # HOST:PORT of the head
        self.lost: str | None = None  # why the cluster cannot be used any longer
        self.on_stuck: Callable[[str], int] = lambda why: 1  # called on this thread; the process ends with its result
        self._calls = calls
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-watchdog", daemon=True)

    def start(self, address: str) -> None:
        """Ask the head at this address for the first time, and go on doing so on a thread."""
        self.address = address
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
            silent, longest = time.monotonic() - answered, BUSY_SECONDS if self._listens() else SILENT_SECONDS
            if silent >= longest and not self._stopping.is_set():
                self.lost = f"the head of {self.cluster} has not answered for {longest:.0f} s"
                self._end_if_trainer_is_stuck(self.lost)
                return

    def _listens(self) -> bool:
        """Whether there is still a process at the head's address, however busy it is."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        except (OSError, ValueError):
            return False
        return True

    def _end_if_trainer_is_stuck(self, why: str) -> None:
        """Save the run and end the process where the trainer is in a call of Ray that does not return.

        While it does anything else, for instance a gradient step, nothing is done: `check` raises after that.
        """
        lost_at = time.monotonic()
        while not self._stopping.wait(POLL_SECONDS):
            called = self._calls.since
            if called is not None and time.monotonic() - max(called, lost_at) >= STUCK_SECONDS:
                try:
                    code = self.on_stuck(why)
                except Exception:
                    traceback.print_exc()
                    code = 1
                os._exit(code)


def ask_head() -> ClusterState:
    """Ask the head of the cluster that this process is connected to; does not return if it is lost."""
    from ray._private import state

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in import_ray().nodes() if node["Alive"]}
    total, free, actors = state.cluster_resources(), state.available_resources(), state.actors()
    places = {key: (actor["Address"]["NodeID"], actor["Pid"]) for key, actor in actors.items()}
    waiting = (key for key, actor in actors.items() if actor["State"] in WAITING_STATES and not actor["Pid"])
    used = total.get(STORE, 0.0) - free.get(STORE, 0.0)
    return ClusterState(nodes, total.get("CPU", 0.0), used, places, frozenset(waiting))
