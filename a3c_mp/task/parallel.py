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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor

from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import DONE, run_supervised, start_child
from a3c_mp.processes.supervisor import CLOSE_SECONDS, Child, Supervisor
from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints, node_name
from a3c_mp.task.node import REPORT_NAME, REPORT_REFUSAL, REPORT_RESULT, FirstNode, JoinedNode, Node
from a3c_mp.task.router import Router
from a3c_mp.task.wire import FINISH, JOINED


@dataclass(frozen=True)
class Role:
    """What a node is called and does, and what its parent does for it."""

    name: str = "node"
    """in messages and errors"""
    labels: tuple[str, ...] = ()
    """besides its name"""
    flag: str = "n_parallel_workers"
    """the setting that says how many such nodes there are; they share a restart budget"""
    niceness: int = 0
    needs_result: bool = False
    """an exception is final unless the node has reported a result before: a restart would not help"""
    prepare: Callable[[], Any] = lambda: None
    """makes what the node is given as `node.setup`; called before each start"""
    on_restart: Callable[[str], Any] = print
    """gets what happened; called before the node is replaced"""
    on_lost: Callable[[WorkerError], Any] | None = None
    """gets the error that the node is given up for, and the task goes on; without it, the error ends the task"""


class NodeArgs(NamedTuple):
    """What the process of a node is started with."""

    endpoint: Endpoint
    beats: Tensor  # int64 [1] in shared memory: its heartbeats
    niceness: int
    setup: Any = None  # see `Role.prepare`
    known_labels: Sequence[str] = ()


def supervise(
    roles: Sequence[Role], launch: Callable[[int, Tensor], tuple[Any, Any]], on_report: Callable[[int, tuple], None],
    max_restarts: int, hang_seconds: float,
) -> Supervisor:  # fmt: skip
    """Make the supervisor of one process for each role.

    Args:
        launch: starts the process of a role: (index, its heartbeats) -> what `start_node` returns.
        on_report: gets what a node reports, except for results: (index, report).
        max_restarts: restart budget of all nodes whose roles have the same flag.
        hang_seconds: a node whose heartbeats stop for so long is killed and restarted.
    """

    def on_message(index: int, report: tuple) -> None:
        if report[0] == REPORT_RESULT:
            supervisor.children[index].record_result()
        else:
            on_report(index, report)

    beats = shared_counters(len(roles) + 1)[:-1]  # there is no empty shared memory
    children = [
        Child(role.name, partial(launch, index, beats[index : index + 1]), role.flag, role.on_lost, role.needs_result)
        for index, role in enumerate(roles)
    ]
    supervisor = Supervisor(
        children, beats, max_restarts=max_restarts, hang_seconds=hang_seconds, on_message=on_message,
        on_restart=lambda index, text: roles[index].on_restart(text),
    )  # fmt: skip
    return supervisor


def start_node(main: Callable[..., Any], args: tuple[Any, ...], node_args: NodeArgs, name: str) -> tuple[Any, Any]:
    """Start a process that runs `main(node, *args)`; returns it and the pipe of its messages."""
    pipe, child_end = mp.Pipe(duplex=False)
    with child_end:  # the child has a copy; with this one closed, its death reads as an end of file
        child_args = (main, args, node_args, child_end)
        return start_child(run_node, child_args, name=name, daemon=True, group=True), pipe


def run_node(main: Callable[..., Any], args: tuple[Any, ...], node_args: NodeArgs, pipe: connection.Connection) -> None:
    """Entry point of the process of a node besides node 0."""
    endpoint, beats, niceness, setup, known_labels = node_args
    torch.set_num_threads(1)
    os.nice(niceness)
    open_nodes = ExitStack()

    def body() -> None:
        with Router(endpoint) as router:
            node = Node(
                router, known_labels=known_labels, setup=setup, beat=lambda: beats.add_(1),
                report=lambda *message: pipe.send(message),
            )  # fmt: skip
            open_nodes.callback(node.close)
            main(node, *args)
            pipe.send((DONE,))

    run_supervised(body, pipe, close=open_nodes.close)


@dataclass
class Nodes:
    """Nodes on this machine, to be used in a `with` block by node 0: starts the others, replaces and ends them."""

    main: Callable[..., Any]
    """module-level function; each of the others is a process that runs `main(node, *args)`"""
    args: tuple[Any, ...]
    """can be pickled; shared tensors stay shared"""
    roles: Sequence[Role]
    """of nodes 0, 1, ..."""
    listen: str | None = None
    """address tcp://HOST:PORT at which nodes of other machines join; needs `key_file`"""
    key_file: Path | None = None
    joining: Sequence[str] = ()
    """labels that filters may name though no node has them at the start: of nodes that join"""
    greeting: dict[str, Any] = field(default_factory=dict)
    """JSON values that nodes of other machines are sent"""
    log: logging.Logger | None = None
    """for what other nodes do wrong"""
    max_restarts: int = 5  # as of `supervise`
    hang_seconds: float = 60.0
    is_interrupted: Callable[[], bool] = lambda: False  # as of `FirstNode`

    def __enter__(self) -> FirstNode:
        with ExitStack() as stack:
            self._endpoints = self._make_endpoints(stack)
            router = stack.enter_context(Router(self._endpoints[0], self.log))
            supervisor = supervise(
                self.roles[1:], self._launch, lambda index, report: None, self.max_restarts, self.hang_seconds
            )
            self._node = FirstNode(router, supervisor, self.is_interrupted, self._known_labels())
            stack.callback(self._node.close)
            stack.callback(self._stop)
            supervisor.start()
            self._stack = stack.pop_all()
        return self._node

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def _make_endpoints(self, stack: ExitStack) -> list[Endpoint]:
        """Endpoints of all nodes; the folder of their sockets is removed with the stack."""
        labels = [role.labels for role in self.roles]
        if len(labels) == 1 and self.listen is None:
            return [Endpoint(labels=labels[0])]
        settings = {"key_file": self.key_file, "greeting": self.greeting}
        return local_endpoints(stack.enter_context(ipc_folder()), labels, self.listen, **settings)

    def _known_labels(self) -> list[str]:
        """All labels that a filter may name; empty for a node alone."""
        own = {label for role in self.roles for label in role.labels} | set(map(node_name, range(len(self.roles))))
        return sorted({"distributed", *own, *self.joining}) if len(self.roles) > 1 else []

    def _launch(self, index: int, beats: Tensor) -> tuple[Any, Any]:
        role, endpoint = self.roles[index + 1], self._endpoints[index + 1]
        node_args = NodeArgs(endpoint, beats, role.niceness, role.prepare(), self._node.known_labels)
        return start_node(self.main, self.args, node_args, role.name.replace(" ", "-"))

    def _stop(self) -> None:
        """End all nodes: they end their iteration, and those that take longer are terminated."""
        try:
            self._node.send(FINISH)
            self._node.supervisor.await_own_end(CLOSE_SECONDS)
        finally:
            self._node.supervisor.stop()


@dataclass
class JoinedNodes:
    """Nodes of this machine in a task elsewhere, to be used in a `with` block.

    Each is a process with a connection of its own. This process has one too, through which it sees the task end.
    """

    main: Callable[..., Any]
    args: tuple[Any, ...]
    roles: Sequence[Role]
    router: Router
    """the connection of this process"""
    log: logging.Logger
    """for what happens to the nodes"""
    max_restarts: int = 5
    hang_seconds: float = 60.0

    def __enter__(self) -> JoinedNodes:
        self._node = JoinedNode(self.router, self.log.info)
        self._supervisor = supervise(self.roles, self._launch, self._on_report, self.max_restarts, self.hang_seconds)
        self._supervisor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._supervisor.stop()

    def wait(self) -> None:
        """Look after the nodes until the task has ended.

        Raises:
            ConfigError: the task has no place for one of them. One that has lost its place while the link was down ends
                alone, as long as there are others.
            WorkerError: the task was killed, a node failed before its first result, or the restart budget is spent.
        """
        node, children = self._node, self._supervisor.children
        while not all(child.is_done for child in children) and (self.router.peers or not node.finishing):
            self._supervisor.watch(lambda: False, also=self.router.files)
            node.look()
        self._supervisor.await_own_end(CLOSE_SECONDS)

    def _launch(self, index: int, beats: Tensor) -> tuple[Any, Any]:
        own, role = self.router.endpoint, self.roles[index]
        endpoint = Endpoint(dials=own.dials, labels=role.labels, key_file=own.key_file)
        return start_node(self.main, self.args, NodeArgs(endpoint, beats, role.niceness), f"node-{index}")

    def _on_report(self, index: int, report: tuple) -> None:
        kind, *content = report
        child = self._supervisor.children[index]
        if kind == REPORT_NAME:
            [child.name] = content
            self.log.info(f"{child} has joined {self.router.endpoint.dials}")
        elif kind == REPORT_REFUSAL:
            others = [other for other in self._supervisor.children if other is not child and not other.is_done]
            if not (child.had_result and others):
                raise ConfigError(*content)
            self.log.warning(f"{child} has lost its place and ends: {ConfigError(*content)}")


def runner(
    n_parallel_workers: int, *, labels: Sequence[Sequence[str]] = (), max_restarts: int = 5, hang_seconds: float = 60.0
) -> Callable[..., Any]:
    """Return a function `run(main, *args)` that runs `main(node, *args)` in so many processes, node 0 in this one.

    `main` of node 0 begins once all of them are connected to it, and its result is that of `run`. `labels` are those of
    each node besides "node.0", ...
    """
    own_labels = [*map(tuple, labels), *[()] * n_parallel_workers]
    roles = [Role(f"node {number}", own_labels[number]) for number in range(n_parallel_workers)]

    def run(main: Callable[..., Any], *args: Any) -> Any:
        joined: set[str] = set()
        with Nodes(main, args, roles, max_restarts=max_restarts, hang_seconds=hang_seconds) as node:
            node.handle(JOINED, joined.add)
            while len(joined) < n_parallel_workers - 1 and not node.finishing:
                node.wait()
            return main(node, *args)

    return run
