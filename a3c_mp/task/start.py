"""Processes of nodes: what they are called and do, and how they are started and supervised by their parent."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor

from a3c_mp.errors import WorkerError
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.spawn import start_child
from a3c_mp.processes.supervised import DONE, run_supervised
from a3c_mp.processes.supervisor import Child, Supervisor
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.node import Node
from a3c_mp.task.router import Router

REPORT_NAME, REPORT_RESULT, REPORT_REFUSAL = "called", "result", "refused"
"""reports of a node to the process that has started it: (name), it has its place in the task; (), it has produced
something; (what, value, why, fix) of a ConfigError"""


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
        roles: of the nodes.
        launch: called with the index of a role and the heartbeats; starts a process, see `start_node`.
        on_report: called with the index of a node and what it reports, except for its results.
        max_restarts: restart budget of all nodes whose roles have the same flag.
        hang_seconds: a node whose heartbeats stop for so long is killed and restarted.
    """

    def on_message(index: int, report: tuple) -> None:
        if report[0] == REPORT_RESULT:
            supervisor.children[index].record_result()
        else:
            on_report(index, report)

    beats = shared_counters(len(roles) + 1)[: len(roles)]  # there is no empty shared memory
    supervisor = Supervisor(
        [
            Child(
                role.name, partial(launch, index, beats[index : index + 1]), role.flag, role.on_lost, role.needs_result
            )
            for index, role in enumerate(roles)
        ],
        beats,
        max_restarts=max_restarts,
        hang_seconds=hang_seconds,
        on_message=on_message,
        on_restart=lambda index, text: roles[index].on_restart(text),
    )
    return supervisor


def start_node(main: Callable[..., Any], args: tuple[Any, ...], node_args: NodeArgs, name: str) -> tuple[Any, Any]:
    """Start a process that runs `main(node, *args)`; returns it and the pipe of its messages."""
    pipe, child_end = mp.Pipe(duplex=False)
    with child_end:  # the child has a copy; with this one closed, its death reads as an end of file
        child_args = (main, args, node_args, child_end)
        return start_child(run_node, child_args, name=name, daemon=True, group=True), pipe


def run_node(main: Callable[..., Any], args: tuple[Any, ...], node_args: NodeArgs, pipe: connection.Connection) -> None:
    """Entry point of the process of a node besides node 0."""
    torch.set_num_threads(1)
    os.nice(node_args.niceness)
    open_nodes = ExitStack()

    def beat() -> None:
        node_args.beats[0] += 1

    def body() -> None:
        with Router(node_args.endpoint) as router:
            settings = {"known_labels": node_args.known_labels, "setup": node_args.setup, "beat": beat}
            node = Node(router, **settings, report=lambda *message: pipe.send(message))
            open_nodes.callback(node.close)
            main(node, *args)
            pipe.send((DONE,))

    run_supervised(body, pipe, close=open_nodes.close)
