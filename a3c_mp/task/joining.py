"""Nodes that join a task from another machine: processes that are started, replaced and ended together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from a3c_mp.errors import ConfigError
from a3c_mp.processes.slots import shared_counters
from a3c_mp.processes.supervisor import CLOSE_SECONDS, Child, Supervisor
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.node import JoinedNode
from a3c_mp.task.parallel import NodeArgs, Role, start_node
from a3c_mp.task.router import Router

REPORT_NAME, REPORT_RESULT, REPORT_REFUSAL = "called", "result", "refused"
"""reports of a node to the process that has started it: (name), it has its place in the task; (), it has produced
something; (what, value, why, fix) of a ConfigError"""


@dataclass
class JoinedNodes:
    """Nodes of this machine in a task elsewhere, to be used in a `with` block.

    Each is a process with a connection of its own. This process has one too, through which it sees the task end.

    Args:
        main: a module-level function; each process runs `main(node, *args)`.
        args: its arguments; all of them can be pickled.
        roles: of the nodes.
        router: the connection of this process.
        log: what happens to the nodes.
        max_restarts: restart budget of all nodes together.
        hang_seconds: a node whose heartbeats stop for so long is killed and restarted.
    """

    main: Callable[..., Any]
    args: tuple[Any, ...]
    roles: Sequence[Role]
    router: Router
    log: logging.Logger
    max_restarts: int = 5
    hang_seconds: float = 60.0

    def __enter__(self) -> JoinedNodes:
        self._beats = shared_counters(len(self.roles))
        self._node = JoinedNode(self.router, self.log.info)
        self._supervisor = Supervisor(
            [Child(role.name, partial(self._launch, number), role.flag) for number, role in enumerate(self.roles)],
            self._beats,
            max_restarts=self.max_restarts,
            hang_seconds=self.hang_seconds,
            on_message=self._on_report,
            on_restart=lambda number, text: self.log.warning(text),
        )
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
        while not all(child.is_done for child in children) and (node.is_connected or not node.finishing):
            self._supervisor.watch(lambda: False, also=[self.router.wake_fd])
            node.receive()  # events for tasks: there is none in this process
        self._supervisor.await_own_end(CLOSE_SECONDS)

    def _launch(self, number: int) -> tuple[Any, Any]:
        own, role = self.router.endpoint, self.roles[number]
        endpoint = Endpoint(None, own.topology, dials=own.dials, labels=role.labels, key_file=own.key_file)
        node_args = NodeArgs(endpoint, self._beats[number : number + 1])
        return start_node(self.main, self.args, node_args, role.niceness, f"node-{number}")

    def _on_report(self, number: int, message: tuple) -> None:
        kind, *content = message
        child = self._supervisor.children[number]
        if kind == REPORT_REFUSAL:
            others = [other for other in self._supervisor.children if other is not child and not other.is_done]
            if not (child.had_result and others):
                raise ConfigError(*content)
            self.log.warning(f"{child} has lost its place and ends: {ConfigError(*content)}")
        if kind == REPORT_RESULT:
            child.record_result()
        elif kind == REPORT_NAME:
            [child.name] = content
            self.log.info(f"{child} has joined {self.router.endpoint.dials[0]}")
