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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from a3c_mp.processes.supervisor import CLOSE_SECONDS
from a3c_mp.task.endpoint import Endpoint, ipc_folder, local_endpoints, node_name
from a3c_mp.task.node import FirstNode
from a3c_mp.task.router import Router
from a3c_mp.task.start import NodeArgs, Role, start_node, supervise
from a3c_mp.task.wire import FINISH


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
    listen: str | None = None
    """address tcp://HOST:PORT at which nodes of other machines join; needs `key_file`"""
    key_file: Path | None = None
    joining: Sequence[str] = ()
    """labels that filters may name though no node has them at the start: of nodes that join"""
    greeting: dict[str, Any] = field(default_factory=dict)
    """JSON values that nodes of other machines are sent"""
    log: logging.Logger | None = None
    """for what other nodes do wrong"""
    max_restarts: int = 5
    hang_seconds: float = 60.0
    """both as of `supervise`"""
    starts_together: bool = False
    """`main` of node 0 begins once all these nodes are connected"""
    is_interrupted: Callable[[], bool] = lambda: False
    """as of `FirstNode`"""

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
            names = {endpoint.name for endpoint in self._endpoints[1:]} if self.starts_together else set()
            while not names <= set(router.peers):
                self._node.wait()
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
        if len(self.roles) == 1:
            return []
        own = [label for number, role in enumerate(self.roles) for label in (node_name(number), *role.labels)]
        return list(dict.fromkeys(["distributed", *own, *self.joining]))

    def _launch(self, index: int, beats: Tensor) -> tuple[Any, Any]:
        role, endpoint = self.roles[index + 1], self._endpoints[index + 1]
        labels = self._node.known_labels
        node_args = NodeArgs(endpoint, beats, role.niceness, role.prepare(), labels)
        return start_node(self.main, self.args, node_args, role.name.replace(" ", "-"))

    def _stop(self) -> None:
        """End all nodes: they end their iteration, and those that take longer are terminated."""
        try:
            self._node.send(FINISH)
            self._node.supervisor.await_own_end(CLOSE_SECONDS)
        finally:
            self._node.supervisor.stop()


def runner(
    n_parallel_workers: int, *, labels: Sequence[Sequence[str]] = (), max_restarts: int = 5, hang_seconds: float = 60.0
) -> Callable[..., Any]:
    """Return a function `run(main, *args)` that runs `main(node, *args)` in so many processes, node 0 in this one.

    `main` of node 0 begins once all of them are connected to it.

    Args:
        labels: of each node, besides "node.0", ...
        max_restarts, hang_seconds: as of `supervise`.

    Returns:
        of `run`: what `main` returns in this process.
    """
    roles = [
        Role(f"node {number}", tuple(labels[number]) if number < len(labels) else ())
        for number in range(n_parallel_workers)
    ]

    def run(main: Callable[..., Any], *args: Any) -> Any:
        nodes = Nodes(main, args, roles, max_restarts=max_restarts, hang_seconds=hang_seconds, starts_together=True)
        with nodes as node:
            return main(node, *args)

    return run
