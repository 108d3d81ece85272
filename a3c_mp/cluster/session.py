"""A trainer's connection to Ray: a cluster of its own on this machine, or a running one that it joins."""

import atexit
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from a3c_mp.cluster.access import is_open
from a3c_mp.cluster.node import ENVIRONMENT, LOOPBACK, ClusterAddress, Node, environment, foreign
from a3c_mp.cluster.placement import ClusterState, Resources, choose
from a3c_mp.errors import ConfigError, WorkerError

SHUTDOWN_SECONDS = 2.0  # longest wait for `ray.shutdown()`, which takes 7 s where the head is lost
KILL_SECONDS = 1.0  # the same for `ray.kill()`
STUCK_SECONDS = 60.0  # longest time that a parameter server or a replay shard may take for an answer
WAITING_SECONDS = 10.0  # time to start a process, after which an actor without a place is said to wait for one
NODE_ID = "ray.io/node-id"  # label of a node, by Ray itself
POLL_SECONDS = 1.0  # between two questions to the head of the cluster
ANSWER_SECONDS = 3.0  # longest wait for the next answer of a head that is there
SILENT_SECONDS = 8.0  # silence of the head after which a run ends, if nothing listens at its address any longer
BUSY_SECONDS = 40.0  # the same for a head that is still there: on a crowded machine it may be slow


class TrainerGPU:
    """Ray actor that holds the trainer's GPU: Ray does not place the trainer."""

    def find(self) -> str:
        import ray

        return str(ray.get_gpu_ids()[0])


class Session:
    """A connection to Ray, to be used in a `with` block: everything that it started is gone afterwards.

    It joins a running `cluster`, or starts one on this machine with `own_node`, options of `ray start`: places for
    actors (CPUs), GPUs, the size of the object store. `warn` logs what is lost or waits. Entering raises ConfigError if
    that cannot be done.
    """

    def __init__(self, cluster: ClusterAddress | None, warn: Callable[[str], Any], own_node: Sequence[str] = ()):
        self.cluster, self.warn, self.own_node = cluster, warn, own_node
        self.placement = "auto"  # the order in which nodes are filled (`choose`)
        self.duties: list[Callable[[], None]] = []  # called while a fleet waits
        self.state = ClusterState()  # the last answer of the head
        self.answered = time.monotonic()  # when it came
        self.is_lost = False  # there will be no further one
        self.is_restart = False  # of its run, to which nodes may have come that are not used
        self.ray: Any = None  # the module; it reads the environment when it is imported
        self._address = ""  # HOST:PORT of the head
        self._node: Node | None = None  # of a cluster of its own
        self._started: dict[str, tuple[str, Resources, Collection[str], float]] = {}  # of actors; see `start`
        self._trainer: Any = None  # the actor that holds its GPU
        self._ending, self._is_shut_down = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        try:
            self._connect()
        except BaseException:
            if self._node is not None:
                self._node.close()
            raise
        threading.Thread(target=self._watch_head, name="ray-watchdog", daemon=True).start()
        if not self.wait_for(lambda: bool(self.state.nodes), BUSY_SECONDS):
            self.__exit__()
            why = f"its head has not answered for {BUSY_SECONDS:.0f} s"
            raise ConfigError("address", self._address, why, "start it again, or wait until it is less busy")
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        # No daemon: `exit_with` then ends the process at once, as Ray's threads may crash an interpreter that ends.
        shutdown = threading.Thread(target=self._shut_down, name="ray-shutdown", daemon=False)
        shutdown.start()
        if self._is_shut_down.wait(SHUTDOWN_SECONDS):
            shutdown.join()
        else:
            atexit.unregister(self.ray.shutdown)  # it would wait again

    def _shut_down(self) -> None:
        try:
            self.ray.shutdown()
        finally:
            self._is_shut_down.set()
            if self._node is not None:  # not before: without its node, Ray would end this process
                self._node.close()

    def check(self) -> None:
        """Look after what has been started. Raises WorkerError if the head of the cluster is lost."""
        longest = BUSY_SECONDS if self._silence() >= SILENT_SECONDS / 2 and is_open(self._address) else SILENT_SECONDS
        limit = longest - ANSWER_SECONDS  # it has this time, also where this process itself was stopped for a while
        if self._silence() >= limit and not self.wait_for(lambda: self._silence() < limit):
            self.is_lost = True
            where = "" if self.cluster is None else f" at {self.cluster.address}"
            raise WorkerError(f"the head of the Ray cluster{where} has not answered for {longest:.0f} s")
        for key, (name, needs, refused, since) in self._started.items():
            if name and time.monotonic() - since >= WAITING_SECONDS and self.is_waiting(key):
                self.warn(f"{name} waits for {self.state.node_with(needs)}")
                self._started[key] = "", needs, refused, since
        for duty in self.duties:
            duty()

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something follows from an answer of the head, or should have. Returns whether it does."""
        deadline = time.monotonic() + (ANSWER_SECONDS if seconds is None else seconds)
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

        own, free = self.ray.get_runtime_context().get_node_id(), state.available_resources_per_node()
        alive = sorted((node for node in self.ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != own)
        total = {node["NodeID"]: node["Resources"] for node in alive}
        before_start = "DEPENDENCIES_UNREADY", "PENDING_CREATION"
        waiting = (key for key, it in state.actors().items() if it["State"] in before_start and not it["Pid"])
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
        return ClusterState(addresses, total, {node: free.get(node, {}) for node in total}, frozenset(waiting))

    def actor_class(self, kind: Any, **options: Any) -> Any:
        """Return a class whose `remote(*args)` starts an actor; only the first one waits for the head."""
        return self.ray.remote(**{"max_restarts": 0, "max_task_retries": 0, **options})(kind)

    def start(
        self, actor_class: Any, args: tuple, needs: Resources, free: Mapping[str, dict[str, float]], *,
        name: str = "", refused: Collection[str] = (), order: str | None = None,
    ) -> Any:  # fmt: skip
        """Start an actor on a node that is not `refused`; a warning with its `name` says if it has no place.

        `free` is what nodes have left beside others that start at the same time (`choose`); `order` is that in which
        they are filled, if it is not the session's.
        """
        options = choose("auto" if refused else order or self.placement, needs, free)
        if refused:
            options["label_selector"] = {NODE_ID: f"!in({','.join(sorted(refused))})"}
        actor = actor_class.options(**options).remote(*args)
        self._started[actor._actor_id.hex()] = name, needs, refused, time.monotonic()
        return actor

    def is_waiting(self, actor_id: str) -> bool:
        """Whether no node has a place for an actor; if one has, its process may still be starting."""
        _, needs, refused, _ = self._started[actor_id]
        needs_gpu = needs.get("GPU", 0.0) > 0  # what is free may lie in parts on several, none of which has so much
        return actor_id in self.state.waiting and (needs_gpu or not self.state.has_place(needs, refused))

    def reserve_gpu(self, share: float) -> str:
        """Have Ray reserve a GPU of the trainer's node, or a share of one; returns its id. Raises ConfigError."""
        node, host = next(iter(self.state.nodes.items()))
        own = ClusterState({}, {node: self.state.total[node]}, {node: self.state.free[node]})
        if own.has_place({"GPU": share}):
            options = {"num_cpus": 0, "num_gpus": share, "max_restarts": -1, "label_selector": {NODE_ID: node}}
            self._trainer = self.actor_class(TrainerGPU, **options).remote()
            if self.is_done(found := self._trainer.find.remote(), STUCK_SECONDS):
                return self.ray.get(found)
        why = f"on its node, at {host}, the trainer needs {own.node_with({'GPU': share})}"
        raise ConfigError("trainer-gpus", share, why, "lower it, end other runs, or start it on another node")

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
            options = ["--head", "--port=0", "--include-dashboard=false", *self.own_node]
            self._node = Node([*options, '--system-config={"preallocate_plasma_memory": true}'], settings)
        else:
            settings, self._address = environment(self.cluster), self.cluster.address
        for name in os.environ.keys() - foreign(os.environ).keys():
            del os.environ[name]
        os.environ |= settings
        import ray  # meanwhile the node starts

        self.ray = ray
        ray._private.worker.print_to_stdstream = lambda *args, **options: None  # the fleet says what is lost
        ray._private.utils.set_sigterm_handler = lambda handler: None  # that of the run stays
        self.ray._raylet.Config.initialize("")  # it has read whether there are tokens
        self.ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # an earlier session had another token
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # it warns in a thread, which has no signals
        if self._node is not None:
            self._address = self._node.wait_for_start()
        try:
            ray.init(self._address, log_to_driver=False, configure_logging=False)
        except Exception as error:
            why = f"the cluster cannot be joined ({' '.join(str(error).split())[:300]})"
            join = "start a node here: python -m a3c_mp.cluster join HOST:PORT (--num-cpus 0: without actors)"
            fix = join if self.cluster is not None and self.cluster.token_file else "see docs/ray.md"
            raise ConfigError("address", self._address, why, fix) from error
        if threading.current_thread() is threading.main_thread():
            # Ray has put one in front of it that aborts the process 3 s after the signal.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
