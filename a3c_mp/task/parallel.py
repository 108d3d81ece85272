"""Nodes: processes that run one function each, with messages between them, supervised by the process that started them.

Node 0 is the process that the user started. If another node dies, hangs or raises an exception, node 0 names and
replaces it; with node 0 all of them end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import DONE, run_supervised, start_child
from a3c_mp.processes.supervisor import CLOSE_SECONDS, Child, Supervisor
from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints
from a3c_mp.task.node import REPORT_NAME, REPORT_REFUSAL, REPORT_RESULT, FirstNode, JoinedNode, Node
from a3c_mp.task.router import Hub, Spoke
from a3c_mp.task.wire import FINISH, JOINED


@dataclass(frozen=True)
class Role:
    """What a node is called and does, and what its parent does for it."""

    name: str = "node"  # in messages and errors
    labels: tuple[str, ...] = ()  # besides "node.0", ...
    flag: str = "n_parallel_workers"  # that says how many such nodes there are; they share a restart budget
    niceness: int = 0
    needs_result: bool = False
    """an exception is final unless the node has reported a result before: a restart would not help"""
    prepare: Callable[[], Any] = lambda: None
    """makes what the node is given as `node.setup`; called before each start"""
    on_restart: Callable[[str], Any] = print
    """gets what happened, before the node is replaced"""
    on_lost: Callable[[WorkerError], Any] | None = None
    """gets the error that the node is given up for, and the task goes on; without it, the error ends the task"""
    args: tuple[Any, ...] = ()
    """arguments of `main` in this node, after those that all nodes get"""


def supervise(
    main: Callable[..., Any], args: tuple[Any, ...], roles: Sequence[Role], endpoints: Sequence[Endpoint],
    max_restarts: int, hang_seconds: float, on_report: Callable[[int, tuple], None] = lambda index, report: None,
) -> Supervisor:  # fmt: skip
    """Make the supervisor of one process for each role, which runs `main(node, *args)`.

    Nodes of the same flag share a budget of `max_restarts`; one whose heartbeats stop for `hang_seconds` is replaced.
    `on_report` gets (index, what a node reports), except for results.
    """
    beats = shared_counters(len(roles) + 1)[:-1]  # there is no empty shared memory

    def launch(index: int) -> tuple[Any, connection.Connection]:
        role = roles[index]
        pipe, child_end = mp.Pipe(duplex=False)
        with child_end:  # the child has a copy; with this one closed, its death reads as an end of file
            node_args = endpoints[index], beats[index : index + 1], role.niceness, role.prepare()
            name = role.name.replace(" ", "-")
            run_args = main, (*args, *role.args), node_args, child_end
            return start_child(run_node, run_args, name=name, daemon=True, group=True), pipe

    def on_message(index: int, report: tuple) -> None:
        if report[0] == REPORT_RESULT:
            supervisor.children[index].record_result()
        else:
            on_report(index, report)

    children = [
        Child(role.name, partial(launch, index), role.flag, role.on_lost, role.needs_result)
        for index, role in enumerate(roles)
    ]
    supervisor = Supervisor(
        children, beats, max_restarts=max_restarts, hang_seconds=hang_seconds, on_message=on_message,
        on_restart=lambda index, text: roles[index].on_restart(text),
    )  # fmt: skip
    return supervisor


def run_node(
    main: Callable[..., Any], args: tuple[Any, ...], node_args: tuple[Endpoint, Tensor, int, Any],
    pipe: connection.Connection,
) -> None:  # fmt: skip
    """Entry point of the process of a node besides node 0; its reports go through the pipe."""
    endpoint, beats, niceness, setup = node_args  # beats: int64 [1] in shared memory
    counts = beats.numpy()  # the same memory, faster
    torch.set_num_threads(1)
    os.nice(niceness)
    open_nodes = ExitStack()

    def beat() -> None:
        counts[0] += 1

    def body() -> None:
        with Spoke(endpoint) as router:
            node = Node(router, setup, beat, lambda *report: pipe.send(report))
            open_nodes.callback(node.close)
            main(node, *args)
            pipe.send((DONE,))

    run_supervised(body, pipe, close=open_nodes.close)


@contextmanager
def start_nodes(
    main: Callable[..., Any], args: tuple[Any, ...], roles: Sequence[Role], *, max_restarts: int, hang_seconds: float,
    listen: str | None = None, log: logging.Logger | None = None,
    is_interrupted: Callable[[], bool] = lambda: False, **settings: Any,
) -> Iterator[FirstNode]:  # fmt: skip
    """Start nodes on this machine, of which this process is node 0; replace those that fail, and end all of them.

    Args:
        main, args: each of the others is a process that runs `main(node, *args)`.
        roles: of nodes 0, 1, ...
        log: for what other nodes do wrong.
        listen, settings: as of `local_endpoints`.
    """
    labels = [role.labels for role in roles]
    with ExitStack() as stack:
        endpoints = [Endpoint(labels=labels[0])]
        if len(roles) > 1 or listen is not None:
            endpoints = local_endpoints(stack.enter_context(ipc_folder()), labels, listen, **settings)
        router = stack.enter_context(Hub(endpoints[0], log))
        supervisor = supervise(main, args, roles[1:], endpoints[1:], max_restarts, hang_seconds)
        node = FirstNode(router, supervisor, is_interrupted)
        stack.callback(node.close)
        stack.callback(supervisor.stop)
        supervisor.start()
        try:
            yield node
        finally:  # they end their iteration; those that take longer are terminated
            node.send(FINISH)
            supervisor.await_own_end(CLOSE_SECONDS)


def run_joined_nodes(
    main: Callable[..., Any], args: tuple[Any, ...], roles: Sequence[Role], router: Spoke, log: logging.Logger,
    max_restarts: int, hang_seconds: float,
) -> None:  # fmt: skip
    """Run nodes of this machine in a task elsewhere until that has ended; arguments as of `start_nodes`.

    Each is a process with a connection of its own. This process has one too (`router`), by which it sees the task end.

    Raises:
        ConfigError: the task has no place for a node; one that has lost its place ends alone if there are others.
        WorkerError: the task was killed, a node failed before its first result, or the restart budget is spent.
    """
    address, key_file = router.endpoint.dials, router.endpoint.key_file
    node = JoinedNode(router, log.info)

    def on_report(index: int, report: tuple) -> None:
        kind, *content = report
        child = supervisor.children[index]
        if kind == REPORT_NAME:
            [child.name] = content
            log.info(f"{child} has joined {address}")
        elif kind == REPORT_REFUSAL:
            others = [other for other in supervisor.children if other is not child and not other.is_done]
            if not (child.had_result and others):
                raise ConfigError(*content)
            log.warning(f"{child} has lost its place and ends: {ConfigError(*content)}")

    endpoints = [Endpoint(dials=address, labels=role.labels, key_file=key_file) for role in roles]
    supervisor = supervise(main, args, roles, endpoints, max_restarts, hang_seconds, on_report)
    supervisor.start()
    try:
        while not all(child.is_done for child in supervisor.children) and (router.peers or not node.finishing):
            supervisor.watch(lambda: False, also=router.files)
            node.look()
        supervisor.await_own_end(CLOSE_SECONDS)
    finally:
        supervisor.stop()


def runner(n_parallel_workers: int, *, max_restarts: int = 5, hang_seconds: float = 60.0) -> Callable[..., Any]:
    """Return a function `run(main, *args)` that runs `main(node, *args)` in each of several processes.

    Node 0 is this one. Its `main` begins once all others are connected, and its result is that of `run`.
    """
    roles = [Role(f"node {number}") for number in range(n_parallel_workers)]

    def run(main: Callable[..., Any], *args: Any) -> Any:
        joined: set[str] = set()
        with start_nodes(main, args, roles, max_restarts=max_restarts, hang_seconds=hang_seconds) as node:
            node.handle(JOINED, joined.add)
            while len(joined) < n_parallel_workers - 1 and not node.finishing:
                node.wait()
            return main(node, *args)

    return run
