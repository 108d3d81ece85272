"""A trainer's connection to Ray: a cluster of its own on this machine, or a running one that it joins."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from a3c_mp.cluster.access import is_open
from a3c_mp.cluster.node import ENVIRONMENT, LOOPBACK, ClusterAddress, Node, environment, foreign
from a3c_mp.errors import ConfigError, WorkerError

SHUTDOWN_SECONDS = 2.0  # longest wait for `ray.shutdown()`, which takes 7 s where the head is lost
KILL_SECONDS = 1.0  # the same for `ray.kill()`
STUCK_SECONDS = 60.0  # longest time that a parameter server or a replay shard may take for an answer
POLL_SECONDS = 1.0  # between two questions to the head of the cluster
ANSWER_SECONDS = 3.0  # longest wait for the next answer of a head that is there
SILENT_SECONDS = 8.0  # silence of the head after which a run ends, if nothing listens at its address any longer
BUSY_SECONDS = 40.0  # the same for a head that is still there: on a crowded machine it may be slow


class ClusterState(NamedTuple):
    """A cluster, as its head describes it."""

    nodes: Mapping[str, str] = {}  # ids of the nodes that are alive -> their addresses
    num_cpus: float = 0.0  # of all nodes: places for actors
    store_bytes: float = 0.0  # used in the object stores of all nodes
    waiting: frozenset[str] = frozenset()  # ids of the actors that no node has a place for


class Session:
    """A connection to Ray, to be used in a `with` block: everything that it started is gone afterwards.

    It joins a running `cluster`, or starts one on this machine with `num_cpus` places for actors and an object store
    of `store_bytes`. Entering raises ConfigError if that cannot be done.
    """

    def __init__(self, cluster: ClusterAddress | None, log: logging.Logger, num_cpus: int = 0, store_bytes: int = 0):
        self.cluster, self.log, self.num_cpus, self.store_bytes = cluster, log, num_cpus, store_bytes
        self.duties: list[Callable[[], None]] = []  # called while a fleet waits
        self.state = ClusterState()  # the last answer of the head
        self.answered = time.monotonic()  # when it came
        self.is_lost = False  # there will be no further one
        self.ray: Any = None  # the module; it reads the environment when it is imported
        self._address = ""  # HOST:PORT of the head
        self._node: Node | None = None  # of a cluster of its own
        self._ending = threading.Event()

    def __enter__(self) -> Session:
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._connect()
        except BaseException:
            if self._node is not None:
                self._node.close()
            raise
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # `ray.init` replaces it
        threading.Thread(target=self._watch_head, name="ray-watchdog", daemon=True).start()
        self.wait_for(lambda: bool(self.state.nodes))
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        # No daemon: `exit_with` then ends the process at once, as Ray's threads may crash an interpreter that ends.
        shutdown = threading.Thread(target=self.ray.shutdown, name="ray-shutdown", daemon=False)
        shutdown.start()
        shutdown.join(SHUTDOWN_SECONDS)
        if shutdown.is_alive():  # without its node, Ray would end this process: the node ends after it
            atexit.unregister(self.ray.shutdown)  # it would wait again
        elif self._node is not None:
            self._node.close()

    def check(self) -> None:
        """Look after what has been started. Raises WorkerError if the head of the cluster is lost."""
        longest = BUSY_SECONDS if self._silence() >= SILENT_SECONDS / 2 and is_open(self._address) else SILENT_SECONDS
        limit = longest - ANSWER_SECONDS  # it has this time, also where this process itself was stopped for a while
        if self._silence() >= limit and not self.wait_for(lambda: self._silence() < limit):
            self.is_lost = True
            where = "" if self.cluster is None else f" at {self.cluster.address}"
            raise WorkerError(f"the head of the Ray cluster{where} has not answered for {longest:.0f} s")
        for duty in self.duties:
            duty()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until something follows from an answer of the head, or should have. Returns whether it does."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not (found := condition()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        return found

    def _silence(self) -> float:
        return time.monotonic() - self.answered

    def _watch_head(self) -> None:
        """Ask the head for the state of the cluster, on a thread: the call does not return where the head is lost."""
        while not self._ending.is_set():
            with suppress(Exception):
                self.state, self.answered = self._ask_head(), time.monotonic()
            self._ending.wait(POLL_SECONDS)

    def _ask_head(self) -> ClusterState:
        from ray._private import state

        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        used = total.get("object_store_memory", 0.0) - free.get("object_store_memory", 0.0)
        before_start = "DEPENDENCIES_UNREADY", "PENDING_CREATION"
        waiting = (key for key, it in state.actors().items() if it["State"] in before_start and not it["Pid"])
        return ClusterState(nodes, total.get("CPU", 0.0), used, frozenset(waiting))

    def actor_class(self, kind: Any, **options: Any) -> Any:
        """Return a class whose `remote(*args)` starts an actor; only the first one waits for the head."""
        return self.ray.remote(**{"max_restarts": 0, "max_task_retries": 0, **options})(kind)

    def is_done(self, reference: Any, seconds: float = 0.0) -> bool:
        """Wait until an actor has answered or died."""
        return bool(self.ray.wait([reference], timeout=seconds)[0])

    def kill(self, actor: Any) -> None:
        """Kill an actor; where the head is lost, Ray's call may not return."""
        thread = threading.Thread(target=self.ray.kill, args=(actor,), kwargs={"no_restart": False}, daemon=True)
        thread.start()
        thread.join(KILL_SECONDS)

    def _connect(self) -> None:
        if self.cluster is None:
            settings = {**ENVIRONMENT, **LOOPBACK, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            options = ["--head", "--port=0", "--include-dashboard=false", "--num-gpus=0", f"--num-cpus={self.num_cpus}"]
            store = f"--object-store-memory={self.store_bytes}", '--system-config={"preallocate_plasma_memory": true}'
            self._node = Node([*options, *store], settings)
        else:
            settings, self._address = environment(self.cluster), self.cluster.address
        for name in os.environ.keys() - foreign(os.environ).keys():
            del os.environ[name]
        os.environ |= settings
        import ray  # meanwhile the node starts

        self.ray = ray
        ray._private.worker.print_to_stdstream = lambda *args, **options: None  # the fleet says what is lost
        self.ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # an earlier session had another token
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # it warns in a thread, which has no signals
        if self._node is not None:
            self._address = self._node.wait_for_start()
        try:
            ray.init(self._address, log_to_driver=False, configure_logging=False)
        except Exception as error:
            why = f"the cluster cannot be joined ({' '.join(str(error).split())[:300]})"
            raise ConfigError("address", self._address, why, "see docs/ray.md") from error
