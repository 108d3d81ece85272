"""A process's connection to Ray: a cluster of its own on this machine, or a running one that it joins."""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from a3c_mp.cluster.calls import Calls, NotedModule, in_time
from a3c_mp.cluster.guardian import Guardian, end_cluster, remove_folder
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.processes.supervisor import START_SECONDS

RAY_VERSION = "2.60.0"
MIB = 2**20
FOLDER_PREFIX = "a3c-ray-"
TEMP_FOLDER = "ray"
"""in a folder of mode 0700: Ray opens the one that it is given to everybody"""
LEAST_STORE = 80 * MIB
"""smallest object store; Ray refuses less than 75 MiB"""
POLL_SECONDS = 1.0
"""between two looks of the watchdog at the head of the cluster"""
ANSWER_SECONDS = 2.0
"""longest wait for one answer of the head"""
SILENT_SECONDS = 8.0
"""silence of the head after which a run ends"""
SHUTDOWN_SECONDS = 4.0
"""longest wait for `ray.shutdown()`"""
STUCK_ACTOR_SECONDS = 15.0
"""longest time that a parameter server or a replay shard may take for an answer, once it has started"""
STUCK_SECONDS = 4.0
"""longest time that the trainer may take from there on; it may wait in a call of Ray that does not return"""
STORE = "object_store_memory"
WAITING_STATES = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")
LOST_SECONDS = 1.0
"""the same where the head of the cluster is lost"""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # where it is over, Ray exits the process, without `finally`
    "RAY_NUM_REDIS_GET_RETRIES": "1",  # a wrong token is refused after 1 s instead of 20 s
    "RAY_health_check_period_ms": "1000",  # of nodes by the head: one that is gone refuses at once, a busy one has 10 s
    "RAY_health_check_failure_threshold": "2",
}
"""environment variables that Ray reads when it is imported, and that its processes inherit"""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""keeps all of Ray on 127.0.0.1 (so it does on Windows and macOS); also read at the import"""


LOCAL_HOSTS = ("127.0.0.1", "localhost")


class Note(NamedTuple):
    """Where a running cluster is, and the file of its token."""

    address: str  # HOST:PORT of its head
    token_file: str


def foreign(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without those that Ray reads, but for the ones of its TLS, which are the user's choice."""
    kept = "RAY_USE_TLS", "RAY_TLS_"
    return {name: value for name, value in variables.items() if not name.startswith("RAY_") or name.startswith(kept)}


def environment(address: str, token_file: str) -> dict[str, str]:
    """Variables of a process that starts or joins a cluster at an address."""
    local = LOOPBACK if address.partition(":")[0] in LOCAL_HOSTS else {}
    return {**ENVIRONMENT, **local, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file}


class Needs(NamedTuple):
    """What a run needs of a cluster."""

    num_cpus: int  # one for each actor
    object_bytes: int  # most bytes in the object store at the same time


_working: list[Guardian] = []
"""guardians that clean up once this process has ended"""


class Session:
    """A connection to Ray, to be used in a `with` block: everything that it started is gone afterwards.

    Args:
        cluster: a running one to join; None starts one on this machine.
        needs: of the run.
        log: for incidents.

    Raises:
        ConfigError: (from `with`) the cluster cannot be started or joined.
    """

    def __init__(self, cluster: Note | None, needs: Needs, log: logging.Logger):
        self.cluster, self.needs, self.log = cluster, needs, log
        self.lost: str | None = None  # why the cluster cannot be used any longer
        self.node_id = ""  # of the node that this process runs on
        self.nodes: dict[str, str] = {}  # ids of the nodes that are alive -> their addresses; as the watchdog saw last
        self.num_cpus = 0.0  # of all nodes: places for actors, likewise
        self.store_bytes = 0.0  # used in the object stores of all nodes, likewise
        self.places: dict[str, tuple[str, int]] = {}  # of actors: id -> (node, process), likewise
        self.waiting: frozenset[str] = frozenset()  # ids of the actors that no node has a place for, likewise
        self.on_stuck: Callable[[str], None] = lambda why: None  # called on another thread before the process ends
        self.duties: list[Callable[[], None]] = []  # called while a fleet waits
        self._calls = Calls()  # of Ray, by the trainer
        self._answered: set[str] = set()  # ids of actors that have answered
        self._cleanup = ExitStack()
        self._stopping = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="ray-watchdog", daemon=True)

    def __enter__(self) -> Session:
        handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
        try:
            with self._cleanup:
                self._connect()
                self._cleanup = self._cleanup.pop_all()
        finally:
            for signum, handler in handlers.items():  # `ray.init` replaces that of SIGTERM
                signal.signal(signum, handler)
        in_time(self._ask_head, ANSWER_SECONDS)
        self._watchdog.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._cleanup.close()

    # ---- calls of Ray that a fleet and a parameter server use

    @property
    def ray(self) -> Any:
        """The module; the trainer's calls of it are noted."""
        return NotedModule(import_ray(), self._calls)

    def check(self) -> None:
        """Look after what has been started. Raises WorkerError if the head of the cluster is lost."""
        if self.lost is not None:
            raise WorkerError(self.lost)
        for duty in self.duties:
            duty()

    def start_actor(self, actor_class: type, args: tuple, **options: Any) -> Any:
        """Start an actor, which Ray neither restarts nor retries; returns its handle."""
        remote = self.ray.remote(max_restarts=0, max_task_retries=0, **options)
        with self._calls.noted():
            return remote(actor_class).remote(*args)

    def end_actor(self, actor: Any) -> None:
        """Kill an actor's process."""
        with suppress(Exception):
            self.ray.kill(actor)

    def end_if_stuck(self, actor: Any, since: float) -> None:
        """Kill an actor that has owed an answer for too long, for instance one that is stopped.

        Args:
            actor: its handle.
            since: when it was asked, on the clock of `time.monotonic`.
        """
        longest = STUCK_ACTOR_SECONDS if actor._actor_id.hex() in self._answered else START_SECONDS
        if time.monotonic() - since > longest and (place := self.place_of(actor)) is not None:
            self.kill_process(*place)

    def note_answer(self, actor: Any) -> None:
        """Note that an actor has answered: it has started."""
        self._answered.add(actor._actor_id.hex())

    def place_of(self, actor: Any) -> tuple[str, int] | None:
        """(node, process) of an actor; None while it has no process."""
        node_id, pid = self.places.get(actor._actor_id.hex(), ("", 0))
        return (node_id, pid) if pid else None

    def kill_process(self, node_id: str, pid: int) -> None:
        """Kill a process on a node, also one that is stopped (SIGSTOP) and does not listen to Ray."""
        if node_id == self.node_id:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        with self._calls.noted():
            self.ray.remote(_kill).options(num_cpus=0, max_retries=0, scheduling_strategy=here).remote(pid)

    # ---- start and end

    def _connect(self) -> None:
        for name in os.environ.keys() - foreign(os.environ).keys():
            del os.environ[name]
        options: dict[str, Any]
        if self.cluster is None:
            os.environ |= {**ENVIRONMENT, **LOOPBACK, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            options = self._embedded_options()
        else:
            os.environ |= environment(*self.cluster)
            options = {"address": self.cluster.address}
        ray = import_ray()
        try:
            namespace = f"a3c_mp-{secrets.token_hex(4)}"  # of this run, for the names of its actors
            ray.init(namespace=namespace, log_to_driver=False, configure_logging=False, **options)
        except Exception as error:
            what = "cannot be started" if self.cluster is None else "cannot be joined"
            why = f"the cluster {what} ({' '.join(str(error).split())[:300]})"
            address = "local" if self.cluster is None else self.cluster.address
            raise ConfigError("address", address, why, "see docs/ray.md") from error
        self._cleanup.callback(self._shut_down)
        _keep_off_the_terminal(ray)
        self.node_id = ray.get_runtime_context().get_node_id()

    def _embedded_options(self) -> dict[str, Any]:
        """Settings of a cluster on this machine alone, with a folder and a token of its own."""
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # mode 0700
        self._cleanup.callback(remove_folder, folder)
        self._cleanup.callback(self._dismiss, Guardian(folder))
        self._cleanup.callback(end_cluster, folder)  # what `ray.shutdown()` has left
        self._cleanup.callback(os.environ.pop, "RAY_AUTH_TOKEN", None)
        return {
            "address": "local",
            "_temp_dir": str(folder / TEMP_FOLDER),
            "include_dashboard": False,
            "num_cpus": self.needs.num_cpus,
            "num_gpus": 0,
            "object_store_memory": max(self.needs.object_bytes, LEAST_STORE),
            "_system_config": {"preallocate_plasma_memory": True},
        }

    def _shut_down(self) -> None:
        if self.lost is None:
            in_time(self.ray.shutdown, SHUTDOWN_SECONDS)
            return
        atexit.unregister(self.ray.shutdown)  # it would wait for the head
        # No daemon: `exit_with` then ends the process at once, as Ray's threads may crash an interpreter that ends.
        thread = threading.Thread(target=self.ray.shutdown, name="ray-shutdown", daemon=False)
        thread.start()
        thread.join(LOST_SECONDS)

    def _dismiss(self, guardian: Guardian) -> None:
        """End the guardian, unless Ray still works in this process: then it cleans up behind it."""
        if self.lost is None:
            guardian.close()
        else:
            _working.append(guardian)

    def _watch(self) -> None:
        """Watchdog thread: ask the head about nodes and actors, and note when it has not answered for too long.

        No other thread may ask it: where the head is lost, such a call does not return.
        """
        answered = time.monotonic()
        while not self._stopping.wait(POLL_SECONDS):
            if in_time(self._ask_head, ANSWER_SECONDS):
                answered = time.monotonic()
            elif time.monotonic() - answered >= SILENT_SECONDS and not self._stopping.is_set():
                where = "" if self.cluster is None else f" at {self.cluster.address}"
                self.lost = f"the head of the Ray cluster{where} has not answered for {SILENT_SECONDS:.0f} s"
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

    def _ask_head(self) -> None:
        from ray._private import state

        self.nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        all_of_it, free = state.cluster_resources(), state.available_resources()
        self.num_cpus = all_of_it.get("CPU", 0.0)
        self.store_bytes = all_of_it.get(STORE, 0.0) - free.get(STORE, 0.0)
        actors = state.actors()
        self.places = {key: (actor["Address"]["NodeID"], actor["Pid"]) for key, actor in actors.items()}
        self.waiting = frozenset(
            key for key, actor in actors.items() if actor["State"] in WAITING_STATES and not actor["Pid"]
        )


def import_ray() -> ModuleType:
    """Ray, imported where it is first used. Raises ConfigError if it is not installed."""
    check_installed()
    import ray

    return ray


def check_store(needed: int, num_actors: int, folder: str = "/dev/shm") -> None:
    """Raise ConfigError if the object store does not fit into shared memory."""
    needed, free = max(needed, LEAST_STORE), shutil.disk_usage(folder).free
    if needed > free:
        why = f"the object store needs {needed // MIB:,} MiB in {folder}, {free // MIB:,} MiB is free there"
        fix = "lower it or --num-envs, or enlarge it (docker run --shm-size)"
        raise ConfigError("num-actors", num_actors, why, fix)


def check_installed() -> None:
    """Raise ConfigError if ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray", "none", "it is not installed", f'pip install "ray=={RAY_VERSION}"')


def versions() -> Mapping[str, str]:
    """Versions that must be the same on every node."""
    import platform

    import a3c_mp

    names = ("torch", "numpy", "gymnasium", "ray")
    return {
        "python": platform.python_version(),
        "a3c_mp": a3c_mp.__version__,
        **{name: importlib.metadata.version(name) for name in names},
    }


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _keep_off_the_terminal(ray: Any) -> None:
    """Have Ray's own reports of dead processes and nodes not printed: the fleet says it in one line."""
    ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None
