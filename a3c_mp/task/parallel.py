"""Nodes: processes that run one function each, with messages between them, supervised by the process that started them.

    def main(node):
        with Task(router=node, labels=node.labels) as task:
            task.use(produce, filter_labels=["node.0"])
            task.use(consume, filter_labels=["node.[12]"])
            task.run(max_step=100)

    if __name__ == "__main__":
        runner(3)(main)

Node 0 is the process that the user started. If another node dies, hangs or raises an exception, node 0 names and
replaces it; with node 0 all of them end.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.multiprocessing as mp

from a3c_mp.errors import WorkerError
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import start_child
from a3c_mp.processes.supervisor import CLOSE_SECONDS, DONE, WAIT_SECONDS, Child, Supervisor, run_supervised
from a3c_mp.task.endpoint import Endpoint, Topology, check_tcp, ipc_folder, local_endpoints, node_name
from a3c_mp.task.members import RateLimitedLog
from a3c_mp.task.router import Message, Router
from a3c_mp.task.task import FINISH
from a3c_mp.task.wire import WireError

JOINED, LEFT = "node.joined", "node.left"
"""events of the nodes themselves, for `Node.handle`: a node is connected, or no longer"""
GONE_SECONDS = 5.0
"""a node that has joined ends when node 0's machine has refused connections for so long: node 0 is gone"""
PROBE_SECONDS = 1.0
"""between two attempts to find out why node 0 does not answer, and the longest of them"""
LOST_SECONDS = 2.0
"""time without a connection after which that is logged"""


@dataclass(frozen=True)
class Role:
    """What a node is called and does."""

    name: str = "node"
    """in messages and errors"""
    labels: tuple[str, ...] = ()
    """besides its name"""
    flag: str = "n_parallel_workers"
    """the setting that says how many such nodes there are; they share a restart budget"""
    niceness: int = 0
    needs_result: bool = False
    """an exception is final unless node 0 has called `record_result` before: a restart would not help"""


class Callbacks(NamedTuple):
    """What node 0 calls as it looks after another node of its machine."""

    prepare: Callable[[], Any] = lambda: None
    """makes what the node is given as `node.setup`; before each start"""
    on_restart: Callable[[str], Any] = print
    """gets what happened; before the node is replaced"""
    on_lost: Callable[[WorkerError], Any] | None = None
    """gets the error that the node is given up for, and the task goes on; without it, the error ends the task"""


class Node:
    """One process of a task: its messages to the other nodes, and its labels; `Task(router=node)` uses it.

    Args:
        router: the connection to the other nodes.
        known_labels: of all nodes, also of those that may join.
        setup: what node 0 has prepared for this node; see `Callbacks.prepare`.
        beat: counts a heartbeat of this process; called with each look at messages.
        report: sends a message, kind and contents, to the process that has started this one.
    """

    def __init__(
        self, router: Router, *, known_labels: Sequence[str] = (), setup: Any = None,
        beat: Callable[[], None] = lambda: None, report: Callable[..., None] = lambda *message: None,
    ):  # fmt: skip
        self.router, self.known_labels, self.setup, self.beat = router, tuple(known_labels), setup, beat
        self.report = report
        self.finishing = False  # the task is asked to end, by another node or its own
        self.log = RateLimitedLog(router.log)
        self._handlers: dict[str, list[tuple[Callable[..., None], Sequence[type] | None]]] = {}
        self._pending: list[Message] = []  # that are for the task
        self._lock = threading.RLock()
        self._open: list[Any] = []
        # Among the messages: what a node sent before it left is handled before that, and what it sends after it joined.
        router.on_join(lambda peer: router.insert(Message(peer.name, JOINED, [])))
        router.on_leave(lambda peer: router.insert(Message(peer.name, LEFT, [])))

    @property
    def is_active(self) -> bool:
        return self.router.is_active

    @property
    def name(self) -> str:
        return self.router.name

    @property
    def labels(self) -> tuple[str, ...]:
        return self.router.labels

    def send(self, event: str, *args: Any, to: str = "*") -> None:
        """Send an event to the nodes whose name or label matches; for any thread."""
        self.router.send(event, *args, to=to)

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Have a function called on the router's thread when messages have arrived."""
        self.router.on_arrival(callback)

    def handle(self, event: str, handler: Callable[..., None], types: Sequence[type] | None = None) -> None:
        """Have an event handled as it is read, by `handler(sender, *args)`, instead of by the task's listeners.

        Args:
            event: its name.
            handler: may raise WireError for a malformed message, which is then dropped with a warning.
            types: of `args`; a message with others is dropped too.
        """
        with self._lock:
            self._handlers.setdefault(event, []).append((handler, types))
            waiting = [message for message in self._pending if message.event == event]
            self._pending = [message for message in self._pending if message.event != event]
            for message in waiting:
                self._call_handlers(message)

    def receive(self) -> list[Message]:
        """Return the messages for the task that have arrived. Called by the task between two middlewares."""
        self.look()
        with self._lock:
            found, self._pending = self._pending, []
        return found

    def look(self) -> None:
        """Read the messages that have arrived, and handle those that have a handler."""
        self.beat()
        with self._lock:
            for message in self.router.receive():
                if message.event == FINISH:
                    self.finishing = True
                if message.event in self._handlers:
                    self._call_handlers(message)
                elif message.event not in (JOINED, LEFT):
                    self._pending.append(message)

    def _call_handlers(self, message: Message) -> None:
        args = message.args
        try:
            for handler, types in self._handlers[message.event]:
                if types is not None and not (len(args) == len(types) and all(map(isinstance, args, types))):
                    raise WireError(f"not [{', '.join(kind.__name__ for kind in types)}]")
                handler(message.sender, *args)
        except WireError as error:
            self.log.warning(f"malformed message {message.event} from {message.sender} dropped", error)

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for a message or `WAIT_SECONDS`, whichever comes first, and look."""
        connection.wait([self.router.wake_fd], WAIT_SECONDS)
        self.look()

    def closing(self, resource: Any) -> Any:
        """Have the argument, such as a vector environment, closed however the process ends; returns it."""
        self._open.append(resource)
        return resource

    def close(self) -> None:
        """Close what `closing` was given, the latest first. An error in one does not keep the others open."""
        while self._open:
            with suppress(BaseException):
                self._open.pop().close()


class JoinedNode(Node):
    """A node that has joined from elsewhere. It waits for node 0 while the link is down, and ends when node 0 has.

    Args:
        router: the connection to node 0.
        log: gets a line when node 0 cannot be reached, and when it can again.
    """

    def __init__(self, router: Router, log: Callable[[str], None]):
        super().__init__(router)
        self._greeting, self._reach = router.greeting, _Reach(router.endpoint.dials[0], log)

    @property
    def is_connected(self) -> bool:
        return node_name(0) in self.router.peers

    def look(self) -> None:
        """Read messages. Raises WorkerError when node 0 has ended without a word, or is that of another task."""
        super().look()
        if self.is_connected:
            if self.router.greeting != self._greeting:
                raise WorkerError(f"another task listens at {self._reach.address} now; attach to it again")
            self._reach.confirm()
        elif not self.finishing:
            self._reach.probe()


class _Reach:
    """Whether a machine can be reached: tells a link that is down, which may come back, from a process that is gone."""

    def __init__(self, address: str, log: Callable[[str], None]):
        self.address, self.log = address, log
        self._seen = self._probed = time.monotonic()
        self._refused_since: float | None = None
        self._is_lost = False  # and that has been logged

    def confirm(self) -> None:
        """The connection is there."""
        if self._is_lost:
            self.log(f"{self.address} answers again")
        self._is_lost, self._refused_since = False, None
        self._seen = self._probed = time.monotonic()

    def probe(self) -> None:
        """Find out, now and then, why there is no connection. Raises WorkerError if nobody listens there."""
        if time.monotonic() - self._probed < PROBE_SECONDS:
            return
        why = "it is stopped, or very busy"
        try:
            socket.create_connection(check_tcp("attach-to", self.address), timeout=PROBE_SECONDS).close()
            self._refused_since = None
        except ConnectionRefusedError:
            self._refused_since = self._refused_since or time.monotonic()
            if time.monotonic() - self._refused_since > GONE_SECONDS:
                what = f"{self.address} refuses connections"
                raise WorkerError(f"{what}: the task there was killed, or its machine restarted") from None
        except OSError as error:
            why, self._refused_since = error.strerror or str(error), None
        self._probed = time.monotonic()
        if not self._is_lost and self._refused_since is None and self._probed - self._seen > LOST_SECONDS:
            self.log(f"{self.address} does not answer ({why}); waiting until it does")
            self._is_lost = True


class FirstNode(Node):
    """Node 0, which looks after the processes of the others.

    Args:
        router, known_labels: as of `Node`.
        supervisor: of nodes 1, 2, ...
        is_interrupted: as of `Nodes`.
    """

    def __init__(
        self, router: Router, supervisor: Supervisor, is_interrupted: Callable[[], bool], known_labels: Sequence[str]
    ):
        super().__init__(router, known_labels=known_labels)
        self.supervisor, self.is_interrupted = supervisor, is_interrupted
        self._looked = time.monotonic()

    def child(self, name: str) -> Child | None:
        """The process of a node; None for one of another machine."""
        number = int(name.removeprefix("node."))
        return self.supervisor.children[number - 1] if 0 < number <= len(self.supervisor.children) else None

    def record_result(self, name: str) -> None:
        """A node has produced something: it can work."""
        if (child := self.child(name)) is not None:
            child.record_result()

    def receive(self) -> list[Message]:
        if threading.current_thread() is threading.main_thread() and time.monotonic() - self._looked > WAIT_SECONDS:
            self._watch(lambda: self.finishing, 0.0)  # a signal to all processes has ended others too
        return super().receive()

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for a message or the end of a process; replace a process that has ended.

        Raises:
            WorkerError: a node failed before its first result, or the restart budget is spent.
        """
        if threading.current_thread() is threading.main_thread():
            self._watch(should_stop, WAIT_SECONDS)
            self.look()
        else:  # a process ends with the thread that started it
            super().wait(should_stop)

    def wait_for_nodes(self, number: int) -> None:
        """Wait until so many other nodes are connected. Raises WorkerError as `wait` does."""
        while len(self.router.peers) < number:
            self.wait()

    def _watch(self, should_stop: Callable[[], bool], seconds: float) -> None:
        wake = [self.router.wake_fd]
        self.supervisor.watch(lambda: should_stop() or self.is_interrupted(), seconds, also=wake)
        self._looked = time.monotonic()


@dataclass
class Nodes:
    """Nodes on this machine, to be used in a `with` block by node 0: starts the others, replaces and ends them.

    Each of them is a process that runs `main(node, *args)`.

    Args:
        main: a module-level function.
        args: pickled; shared tensors stay shared.
        roles: of nodes 0, 1, ...
        topology: star (node 0 relays between the others) or mesh.
        listen: address tcp://HOST:PORT at which nodes of other machines join; needs `key_file`.
        transport: of the messages of this machine's nodes: Unix sockets, or TCP on loopback, with `key_file`.
        joining: labels that filters may name though none of `roles` has them: of nodes that join, for instance.
        greeting: JSON values that nodes of other machines are sent.
        max_restarts: restart budget of all nodes whose roles have the same flag.
        hang_seconds: a node whose heartbeats stop for so long is killed and restarted.
    """

    main: Callable[..., Any]
    args: tuple[Any, ...]
    roles: Sequence[Role]
    topology: Topology = "star"
    listen: str | None = None
    transport: Literal["ipc", "tcp"] = "ipc"
    key_file: Path | None = None
    joining: Sequence[str] = ()
    greeting: Mapping[str, Any] = field(default_factory=dict)
    max_restarts: int = 5
    hang_seconds: float = 60.0
    log: logging.Logger | None = None
    """for what other nodes do wrong"""
    is_interrupted: Callable[[], bool] = lambda: False
    """whether a signal has arrived: it may have ended other nodes too, which are not to be replaced"""
    callbacks: dict[int, Callbacks] = field(default_factory=dict)
    """by the number of the node"""

    def __enter__(self) -> FirstNode:
        with ExitStack() as stack:
            self._endpoints = self._make_endpoints(stack)
            labels = [label for number, role in enumerate(self.roles) for label in (f"node.{number}", *role.labels)]
            self._known = tuple(dict.fromkeys(["distributed", *labels, *self.joining])) if len(self.roles) > 1 else ()
            router = stack.enter_context(Router(self._endpoints[0], self.log))
            if self.transport == "tcp":
                port = router.addresses[-1]
                ends = self._endpoints
                ends[1:] = [replace(end, dials=(port, *end.dials[1:])) for end in ends[1:]]
            self._beats = shared_counters(len(self.roles))
            supervisor = Supervisor(
                [self._make_child(number) for number in range(1, len(self.roles))],
                self._beats[1:],
                max_restarts=self.max_restarts,
                hang_seconds=self.hang_seconds,
                on_restart=lambda child, text: self._callbacks_of(child + 1).on_restart(text),
            )
            self._node = FirstNode(router, supervisor, self.is_interrupted, self._known)
            stack.callback(self._node.close)
            stack.callback(self._stop)
            supervisor.start()
            self._stack = stack.pop_all()
        return self._node

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def _make_endpoints(self, stack: ExitStack) -> list[Endpoint]:
        labels = [role.labels for role in self.roles]
        if len(labels) == 1 and self.listen is None:
            return [Endpoint(labels=labels[0])]
        settings = {"key_file": self.key_file, "greeting": dict(self.greeting)}
        ends = local_endpoints(stack.enter_context(ipc_folder()), self.topology, labels, self.listen, **settings)
        if self.transport == "tcp":
            ends[0] = replace(ends[0], binds=(*ends[0].binds, "tcp://127.0.0.1:0"))
        return ends

    def _stop(self) -> None:
        """End all nodes: they end their iteration, and those that take longer are terminated."""
        self._node.send(FINISH)
        self._node.supervisor.await_own_end(CLOSE_SECONDS)
        self._node.supervisor.stop()

    def _callbacks_of(self, number: int) -> Callbacks:
        return self.callbacks.get(number, Callbacks())

    def _make_child(self, number: int) -> Child:
        role, on_lost = self.roles[number], self._callbacks_of(number).on_lost
        return Child(role.name, partial(self._launch, number), role.flag, on_lost, role.needs_result)

    def _launch(self, number: int) -> tuple[Any, Any]:
        setup = self._callbacks_of(number).prepare()
        node_args = (self._endpoints[number], self._known, setup, self._beats[number : number + 1])
        name = self.roles[number].name.replace(" ", "-")
        return start_node(self.main, self.args, node_args, self.roles[number].niceness, name)


def start_node(
    main: Callable[..., Any], args: tuple[Any, ...], node_args: tuple[Any, ...], niceness: int, name: str
) -> tuple[Any, Any]:
    """Start a process that runs `main(node, *args)`; returns it and the pipe of its messages."""
    pipe, child_end = mp.Pipe(duplex=False)
    with child_end:  # the child has a copy; with this one closed, its death reads as an end of file
        child_args = (main, args, node_args, niceness, child_end)
        return start_child(run_node, child_args, name=name, daemon=True, group=True), pipe


def run_node(
    main: Callable[..., Any], args: tuple[Any, ...], node_args: tuple[Any, ...], niceness: int,
    pipe: connection.Connection,
) -> None:  # fmt: skip
    """First code of a node besides node 0."""
    endpoint, known_labels, setup, beats = node_args
    torch.set_num_threads(1)
    os.nice(niceness)
    open_nodes: list[Node] = []

    def beat() -> None:
        beats[0] += 1

    def body() -> None:
        with Router(endpoint) as router:
            settings = {"known_labels": known_labels, "setup": setup, "beat": beat}
            open_nodes.append(node := Node(router, **settings, report=lambda *message: pipe.send(message)))
            main(node, *args)
            pipe.send((DONE,))

    def close() -> None:
        for node in open_nodes:
            node.close()

    run_supervised(body, pipe, close=close)


def join(
    main: Callable[..., Any], args: tuple[Any, ...], address: str, labels: tuple[str, ...], key_file: Path | None
) -> Any:
    """Run `main(node, *args)` in this process as one more node of a task that runs elsewhere; returns its result.

    `node.router.greeting` is what node 0 sends to nodes that join.

    Raises:
        ConfigError: the address or the key is wrong, nobody answers, or the versions differ.
        WorkerError: node 0 has ended without a word.
    """
    endpoint = Endpoint(None, "star", dials=(address,), labels=labels, key_file=key_file)
    with ExitStack() as stack:
        node = JoinedNode(stack.enter_context(Router(endpoint)), print)
        stack.callback(node.close)
        return main(node, *args)


def runner(
    n_parallel_workers: int,
    *,
    topology: Topology = "star",
    labels: Sequence[Sequence[str]] = (),
    listen: str | None = None,
    attach_to: str | None = None,
    key_file: Path | None = None,
    max_restarts: int = 5,
    hang_seconds: float = 60.0,
) -> Callable[..., Any]:
    """Return a function `run(main, *args)` that runs `main(node, *args)` in so many processes, node 0 in this one.

    Args:
        labels: of each node, besides "node.0", ...
        topology, listen, key_file, max_restarts, hang_seconds: as of `Nodes`.
        attach_to: address of a node 0 elsewhere, which this process joins as one more node.

    Returns:
        of `run`: what `main` returns in this process.
    """
    roles = [
        Role(f"node {number}", tuple(labels[number]) if number < len(labels) else ())
        for number in range(n_parallel_workers)
    ]

    def run(main: Callable[..., Any], *args: Any) -> Any:
        if attach_to is not None:
            return join(main, args, attach_to, roles[0].labels, key_file)
        nodes = Nodes(
            main, args, roles, topology=topology, listen=listen, key_file=key_file, max_restarts=max_restarts,
            hang_seconds=hang_seconds,
        )  # fmt: skip
        with nodes as node:
            node.wait_for_nodes(n_parallel_workers - 1)  # none of them misses an event
            return main(node, *args)

    return run
