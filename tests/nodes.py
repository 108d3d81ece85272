"""Routers for tests: several of one process that look in turns, and nodes in processes of their own."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from a3c_mp.processes.spawn import start_child
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.router import Hub, Router, Spoke
from a3c_mp.task.wire import JOINED, LEFT, Message

WAIT_SECONDS = 60
"""longest wait for a node's answer; spawned processes import torch first"""


class Net:
    """Routers of one process that look at their messages in turns, and what each has received."""

    def __init__(self, log: logging.Logger | None = None):
        self.log, self.stack = log, contextlib.ExitStack()
        self.inboxes: dict[Router, list[Message]] = {}

    def enter(self, endpoint: Endpoint) -> Router:
        """Enter a router, until the stack is closed, while the others look."""
        router, results = (Spoke if endpoint.dials else Hub)(endpoint, self.log), []

        def enter() -> None:
            try:
                results.append(router.__enter__())
            except Exception as error:
                results.append(error)

        threading.Thread(target=enter).start()
        self.wait_until(lambda: results, 2 * WAIT_SECONDS)
        if isinstance(results[0], Exception):
            raise results[0]
        self.stack.push(router)
        self.inboxes[router] = []
        return router

    def leave(self, router: Router) -> None:
        router.__exit__()
        self.inboxes.pop(router)

    def look(self) -> None:
        for router, inbox in self.inboxes.items():
            inbox += router.receive()

    def wait_until(self, happened: Callable[[], Any], timeout: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, f"it did not happen within {timeout} s"
            self.look()
            time.sleep(0.001)

    def take(self, router: Router, count: int, timeout: float = WAIT_SECONDS) -> list[Message]:
        """Wait for so many messages of other nodes; returns all that have arrived."""
        taken: list[Message] = []

        def has_enough() -> bool:
            taken.extend(message for message in self.inboxes[router] if message.event not in (JOINED, LEFT))
            self.inboxes[router].clear()
            return len(taken) >= count

        self.wait_until(has_enough, timeout)
        return taken


class Node:
    """A process with a router: `node(function, *args)` returns what `function(net, router, *args)` does there.

    The routers of `net`, of this process, look at their messages meanwhile.
    """

    def __init__(self, endpoint: Endpoint, net: Net):
        self.net = net
        self._pipe, child_end = mp.Pipe()
        with child_end:
            self.process = start_child(_run, (child_end, endpoint), name="node", daemon=True)

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def end(self) -> Any:
        """The result of what was started; at first, None once its router has been entered."""
        self.net.wait_until(self._pipe.poll, 2 * WAIT_SECONDS)
        return self._pipe.recv()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.end()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_SECONDS)


def _run(pipe: Any, endpoint: Endpoint) -> None:
    net = Net(logging.getLogger("node"))
    with net.stack, contextlib.suppress(EOFError):
        router = net.enter(endpoint)
        pipe.send(None)
        while True:
            net.wait_until(pipe.poll, float("inf"))
            function, args = pipe.recv()
            pipe.send(function(net, router, *args))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
