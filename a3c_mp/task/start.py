"""Start barrier: no node of a `runner` begins before all of them are connected to each other."""

from __future__ import annotations

from a3c_mp.task.endpoint import node_name
from a3c_mp.task.events import JOINED, LEFT
from a3c_mp.task.node import Node

HERE, COMPLETE, START = "start.here", "start.complete", "start.go"
"""events: to a node, its sender sees it; to node 0, the sender is seen by all others; from node 0, begin"""


class StartBarrier:
    """Barrier of the nodes that are started together; made by each of them as soon as it is connected to node 0.

    Each node greets those that it sees connected. Who has been greeted by all others can be reached by all of them,
    and reports that to node 0. Node 0 lets all begin when it has the report of each. One that is lost before has a
    successor, which greets and reports as it did; one that is started afterwards does not wait.

    Args:
        node: of this process.
    """

    def __init__(self, node: Node):
        self.node, self.is_over = node, False
        numbers = range(node.router.endpoint.num_nodes)
        self.others = {node_name(number) for number in numbers} - {node.name}
        self._greeted_by: set[str] = set()
        self._complete: set[str] = set()  # at node 0: the nodes that have reported
        node.handle(JOINED, self._on_joined)
        node.handle(LEFT, self._on_left)
        node.handle(HERE, self._on_here, [])
        node.handle(COMPLETE, self._on_complete, [])
        node.handle(START, self._on_start, [])
        for name in node.router.peers:  # that were there before this node listened for them
            self._on_joined(name)

    def wait(self) -> bool:
        """Wait until all nodes are connected; returns whether they are: the task may be asked to end before.

        Raises:
            WorkerError: at node 0, as `FirstNode.wait` does.
        """
        self._begin_if_complete()  # a node may be alone
        while not (self.is_over or self.node.finishing):
            self.node.wait()
        return self.is_over

    def _on_joined(self, sender: str) -> None:
        if sender in self.others and not self.is_over:
            self.node.send(HERE, to=sender)

    def _on_left(self, sender: str) -> None:
        self._greeted_by.discard(sender)
        self._complete.discard(sender)

    def _on_here(self, sender: str) -> None:
        if self.is_over:
            if self.node.name == node_name(0):  # it lost the connection before it heard of the start
                self.node.send(START, to=sender)
            return
        self._greeted_by.add(sender)
        if self._greeted_by >= self.others:
            self.node.send(COMPLETE, to=node_name(0))
        self._begin_if_complete()

    def _on_complete(self, sender: str) -> None:
        self._complete.add(sender)
        self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        ready = self._greeted_by & self._complete
        if self.node.name == node_name(0) and not self.is_over and ready >= self.others:
            self.is_over = True
            for name in self.others:
                self.node.send(START, to=name)

    def _on_start(self, sender: str) -> None:
        self.is_over = True
