"""A process's connection to Ray: a cluster of its own on this machine, or a running one that it joins."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from a3c_mp.cluster.calls import Calls, NotedModule
from a3c_mp.cluster.environment import ENVIRONMENT, LOOPBACK, ClusterAddress, environment, foreign, import_ray
from a3c_mp.cluster.guardian import Guardian, end_cluster, remove_folder
from a3c_mp.cluster.watchdog import ANSWER_SECONDS, POLL_SECONDS, ClusterState, Watchdog
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.processes.supervisor import START_SECONDS

MIB = 2**20
FOLDER_PREFIX = "a3c-ray-"
TEMP_FOLDER = "ray"
"""in a folder of mode 0700: Ray opens the one that it is given to everybody"""
LEAST_STORE = 80 * MIB
"""smallest object store; Ray refuses less than 75 MiB"""
SHUTDOWN_SECONDS = 4.0
"""longest wait for `ray.shutdown()`"""
LOST_SECONDS = 1.0
"""the same where the head of the cluster is lost"""
NEWS_SECONDS = POLL_SECONDS + ANSWER_SECONDS
"""longest wait for what the head says of a node now"""
STUCK_ACTOR_SECONDS = 15.0
"""longest time that a parameter server or a replay shard may take for an answer, once it has started"""


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

    def __init__(self, cluster: ClusterAddress | None, needs: Needs, log: logging.Logger):
        self.cluster, self.needs, self.log = cluster, needs, log
        self.node_id = ""  # of the node that this process runs on
        self._head = ""  # HOST:PORT of the cluster's head
        self.duties: list[Callable[[], None]] = []  # called while a fleet waits
        self._calls = Calls()  # of Ray, by the trainer
        self._answered: set[str] = set()  # ids of actors that have answered
        self._cleanup = ExitStack()
        self._shutdown: threading.Thread | None = None
        where = "" if cluster is None else f" at {cluster.address}"
        self.watchdog = Watchdog(f"the Ray cluster{where}", self._calls)

    def __enter__(self) -> Session:
        handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
        try:
            with self._cleanup:
                self._connect()
                self._cleanup = self._cleanup.pop_all()
        finally:
            for signum, handler in handlers.items():  # `ray.init` replaces that of SIGTERM
                signal.signal(signum, handler)
        self.watchdog.start(self._head)
        return self

    def __exit__(self, *exc: object) -> None:
        self.watchdog.stop()
        self._cleanup.close()

    @property
    def state(self) -> ClusterState:
        """The cluster, as its head described it about a second ago."""
        return self.watchdog.state

    @property
    def lost(self) -> str | None:
        """Why the cluster cannot be used any longer."""
        return self.watchdog.lost

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
        node_id, pid = self.state.places.get(actor._actor_id.hex(), ("", 0))
        return (node_id, pid) if pid else None

    def has_left(self, node_id: str) -> bool:
        """Whether a node has left the cluster; waits for newer answers of its head while it is in the last one."""
        deadline = time.monotonic() + NEWS_SECONDS
        while node_id in self.state.nodes and self.lost is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        return node_id not in self.state.nodes

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
        self._head = ray.get_runtime_context().gcs_address

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
        def shut_down() -> None:
            with suppress(Exception):
                self.ray.shutdown()

        # No daemon: `exit_with` then ends the process at once, as Ray's threads may crash an interpreter that ends.
        self._shutdown = threading.Thread(target=shut_down, name="ray-shutdown", daemon=False)
        self._shutdown.start()
        self._shutdown.join(SHUTDOWN_SECONDS if self.lost is None else LOST_SECONDS)
        if self._works_on():
            atexit.unregister(self.ray.shutdown)  # it would wait too

    def _works_on(self) -> bool:
        """Whether Ray may still work in this process, and write into its folder."""
        return self.lost is not None or (self._shutdown is not None and self._shutdown.is_alive())

    def _dismiss(self, guardian: Guardian) -> None:
        """End the guardian, unless Ray still works in this process: then it cleans up behind it."""
        if self._works_on():
            _working.append(guardian)
        else:
            guardian.close()


def check_store(needed: int, num_actors: int, folder: str = "/dev/shm") -> None:
    """Raise ConfigError if the object store does not fit into shared memory."""
    needed, free = max(needed, LEAST_STORE), shutil.disk_usage(folder).free
    if needed > free:
        why = f"the object store needs {needed // MIB:,} MiB in {folder}, {free // MIB:,} MiB is free there"
        fix = "lower it or --num-envs, or enlarge it (docker run --shm-size)"
        raise ConfigError("num-actors", num_actors, why, fix)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _keep_off_the_terminal(ray: Any) -> None:
    """Have Ray's own reports of dead processes and nodes not printed: the fleet says it in one line."""
    ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None
