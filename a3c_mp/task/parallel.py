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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor

from a3c_mp.errors import WorkerError
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import start_child
from a3c_mp.processes.supervised import DONE, run_supervised
from a3c_mp.processes.supervisor import CLOSE_SECONDS, Child, Supervisor
from a3c_mp.task.endpoint import Endpoint, Topology, ipc_folder, local_endpoints
from a3c_mp.task.node import FirstNode, JoinedNode, Node
from a3c_mp.task.router import Router
from a3c_mp.task.start import StartBarrier
from a3c_mp.task.task import FINISH


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


class NodeArgs(NamedTuple):
    """What the process of a node is started with."""

    endpoint: Endpoint
    beats: Tensor  # int64 [1] in shared memory: its heartbeats
    known_labels: Sequence[str] = ()
    setup: Any = None
    """what node 0 has prepared for it; see `Callbacks.prepare`"""
    waits_for_others: bool = False
    """`main` begins once all nodes are connected to each other; see `StartBarrier`"""


class Callbacks(NamedTuple):
    """What node 0 calls as it looks after another node of its machine."""

    prepare: Callable[[], Any] = lambda: None
    """makes what the node is given as `node.setup`; before each start"""
    on_restart: Callable[[str], Any] = print
    """gets what happened; before the node is replaced"""
    on_lost: Callable[[WorkerError], Any] | None = None
    """gets the error that the node is given up for, and the task goes on; without it, the error ends the task"""


@dataclass(frozen=True)
class Network:
    """How the nodes of a task are connected, and who may join them."""

    topology: Topology = "star"
    """star (node 0 relays between the others) or mesh"""
    transport: Literal["ipc", "tcp"] = "ipc"
    """of the messages of this machine's nodes: Unix sockets, or TCP on loopback, with `key_file`"""
    listen: str | None = None
    """address tcp://HOST:PORT at which nodes of other machines join; needs `key_file`"""
    key_file: Path | None = None
    joining: Sequence[str] = ()
    """labels that filters may name though no node has them at the start: of nodes that join, for instance"""
    greeting: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that nodes of other machines are sent"""
    log: logging.Logger | None = None
    """for what other nodes do wrong"""

    def endpoints(self, stack: ExitStack, roles: Sequence[Role]) -> list[Endpoint]:
        """Endpoints of the nodes of this machine; the folder of their sockets is removed with the stack."""
        labels = [role.labels for role in roles]
        if len(labels) == 1 and self.listen is None:
            return [Endpoint(labels=labels[0])]
        settings = {"key_file": self.key_file, "greeting": dict(self.greeting)}
        ends = local_endpoints(stack.enter_context(ipc_folder()), self.topology, labels, self.listen, **settings)
        if self.transport == "tcp":
            ends[0] = replace(ends[0], binds=(*ends[0].binds, "tcp://127.0.0.1:0"))
        return ends

    def known_labels(self, roles: Sequence[Role]) -> tuple[str, ...]:
        """All labels that a filter may name; empty for a node alone."""
        if len(roles) == 1:
            return ()
        labels = [label for number, role in enumerate(roles) for label in (f"node.{number}", *role.labels)]
        return tuple(dict.fromkeys(["distributed", *labels, *self.joining]))


@dataclass(frozen=True)
class Supervision:
    """How node 0 starts the other nodes of its machine, and looks after them."""

    max_restarts: int = 5
    """restart budget of all nodes whose roles have the same flag"""
    hang_seconds: float = 60.0
    """a node whose heartbeats stop for so long is killed and restarted"""
    starts_together: bool = False
    """no `main` runs before all these nodes are connected to each other; one that is replaced later does not wait"""
    is_interrupted: Callable[[], bool] = lambda: False
    """whether a signal has arrived: it may have ended other nodes too, which are not to be replaced"""
    callbacks: dict[int, Callbacks] = field(default_factory=dict)
    """by the number of the node"""

    def callbacks_of(self, number: int) -> Callbacks:
        return self.callbacks.get(number, Callbacks())


@dataclass
class Nodes:
    """Nodes on this machine, to be used in a `with` block by node 0: starts the others, replaces and ends them.

    Each of them is a process that runs `main(node, *args)`.

    Args:
        main: a module-level function.
        args: can be pickled; shared tensors stay shared.
        roles: of nodes 0, 1, ...
    """

    main: Callable[..., Any]
    args: tuple[Any, ...]
    roles: Sequence[Role]
    network: Network = field(default_factory=Network)
    supervision: Supervision = field(default_factory=Supervision)

    def __enter__(self) -> FirstNode:
        with ExitStack() as stack:
            network, supervision = self.network, self.supervision
            self._endpoints = network.endpoints(stack, self.roles)
            self._known = network.known_labels(self.roles)
            router = stack.enter_context(Router(self._endpoints[0], network.log))
            if network.transport == "tcp":
                port = router.addresses[-1]
                ends = self._endpoints
                ends[1:] = [replace(end, dials=(port, *end.dials[1:])) for end in ends[1:]]
            self._beats = shared_counters(len(self.roles))
            supervisor = Supervisor(
                [self._make_child(number) for number in range(1, len(self.roles))],
                self._beats[1:],
                max_restarts=supervision.max_restarts,
                hang_seconds=supervision.hang_seconds,
                on_restart=lambda child, text: supervision.callbacks_of(child + 1).on_restart(text),
            )
            self._node = FirstNode(router, supervisor, supervision.is_interrupted, self._known)
            stack.callback(self._node.close)
            stack.callback(self._stop)
            self._has_started = not supervision.starts_together
            supervisor.start()
            if not self._has_started:
                self._has_started = StartBarrier(self._node).wait()
            self._stack = stack.pop_all()
        return self._node

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def _stop(self) -> None:
        """End all nodes: they end their iteration, and those that take longer are terminated."""
        try:
            self._node.send(FINISH)
            self._node.supervisor.await_own_end(CLOSE_SECONDS)
        finally:
            self._node.supervisor.stop()

    def _make_child(self, number: int) -> Child:
        role, on_lost = self.roles[number], self.supervision.callbacks_of(number).on_lost
        return Child(role.name, partial(self._launch, number), role.flag, on_lost, role.needs_result)

    def _launch(self, number: int) -> tuple[Any, Any]:
        setup = self.supervision.callbacks_of(number).prepare()
        beats = self._beats[number : number + 1]
        node_args = NodeArgs(self._endpoints[number], beats, self._known, setup, waits_for_others=not self._has_started)
        name = self.roles[number].name.replace(" ", "-")
        return start_node(self.main, self.args, node_args, self.roles[number].niceness, name)


def start_node(
    main: Callable[..., Any], args: tuple[Any, ...], node_args: NodeArgs, niceness: int, name: str
) -> tuple[Any, Any]:
    """Start a process that runs `main(node, *args)`; returns it and the pipe of its messages."""
    pipe, child_end = mp.Pipe(duplex=False)
    with child_end:  # the child has a copy; with this one closed, its death reads as an end of file
        child_args = (main, args, node_args, niceness, child_end)
        return start_child(run_node, child_args, name=name, daemon=True, group=True), pipe


def run_node(
    main: Callable[..., Any], args: tuple[Any, ...], node_args: NodeArgs, niceness: int,
    pipe: connection.Connection,
) -> None:  # fmt: skip
    """Entry point of the process of a node besides node 0."""
    torch.set_num_threads(1)
    os.nice(niceness)
    open_nodes: list[Node] = []

    def beat() -> None:
        node_args.beats[0] += 1

    def body() -> None:
        with Router(node_args.endpoint) as router:
            settings = {"known_labels": node_args.known_labels, "setup": node_args.setup, "beat": beat}
            open_nodes.append(node := Node(router, **settings, report=lambda *message: pipe.send(message)))
            if not node_args.waits_for_others or StartBarrier(node).wait():
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

    No `main` begins before all of them are connected to each other. A node that is replaced later begins at once.

    Args:
        labels: of each node, besides "node.0", ...
        topology, listen, key_file: as of `Network`.
        max_restarts, hang_seconds: as of `Supervision`.
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
        network = Network(topology, listen=listen, key_file=key_file)
        with Nodes(main, args, roles, network, Supervision(max_restarts, hang_seconds, starts_together=True)) as node:
            return main(node, *args)

    return run
