"""Nodes that join a task from another machine: processes that are started, replaced and ended together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from a3c_mp.errors import ConfigError
from a3c_mp.processes.supervisor import CLOSE_SECONDS
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.node import JoinedNode
from a3c_mp.task.router import Router
from a3c_mp.task.start import REPORT_NAME, REPORT_REFUSAL, NodeArgs, Role, start_node, supervise


@dataclass
class JoinedNodes:
    """Nodes of this machine in a task elsewhere, to be used in a `with` block.

    Each is a process with a connection of its own. This process has one too, through which it sees the task end.

    Args:
        main, args: as of `Nodes`.
        roles: of the nodes.
        router: the connection of this process.
        log: what happens to the nodes.
        max_restarts, hang_seconds: as of `supervise`.
    """

    main: Callable[..., Any]
    args: tuple[Any, ...]
    roles: Sequence[Role]
    router: Router
    log: logging.Logger
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
        while not all(child.is_done for child in children) and (node.is_connected or not node.finishing):
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
