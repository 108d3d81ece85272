"""Nodes in processes of their own, which a test steers one call at a time."""

import ctypes
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.multiprocessing as mp

from a3c_mp.errors import A3CError
from a3c_mp.processes.spawn import start_child
from a3c_mp.task.endpoint import Endpoint, Peer
from a3c_mp.task.peers import matches
from a3c_mp.task.router import Router

WAIT_SECONDS = 60
"""longest wait for a node's answer; spawned processes import torch first"""

CLONE_NEWNET = 0x40000000  # of setns(2)


class Node:
    """A spawned process with a router: `node(function, *args)` runs `function(router, *args)` there.

    Args:
        endpoint: of the router.
        namespace: network namespace to run in; empty for that of the test.
    """

    def __init__(self, endpoint: Endpoint, namespace: str = ""):
        self._pipe, child_end = mp.Pipe()
        with child_end:
            self.process = start_child(_run, (child_end, endpoint, namespace), name="node", daemon=True)

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def end(self, timeout: float = WAIT_SECONDS) -> Any:
        """The result of what was started; raises what it raised."""
        assert self._pipe.poll(timeout), f"no answer within {timeout} s"
        succeeded, result = self._pipe.recv()
        if not succeeded:
            raise result
        return result

    def __call__(self, function: Callable[..., Any], *args: Any, timeout: float = WAIT_SECONDS) -> Any:
        self.begin(function, *args)
        return self.end(timeout)

    def signal(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def stop(self) -> None:
        """Have it leave the `with` block of its router."""
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        self.process.join(WAIT_SECONDS)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join(WAIT_SECONDS)


def _run(pipe: Any, endpoint: Endpoint, namespace: str) -> None:
    """Enter the router at the first call, so that imports are over."""
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    assert pipe.recv() == (enter, ())
    try:
        router = Router(endpoint, logging.getLogger("node"))
        router.__enter__()
    except A3CError as error:
        pipe.send((False, error))
        return
    with suppress(EOFError):
        pipe.send((True, router.name))
        while (task := pipe.recv()) is not None:
            function, args = task
            try:
                pipe.send((True, function(router, *args)))
            except Exception as error:
                pipe.send((False, error))
    router.__exit__()


def enter() -> None:
    """First call of a node."""


def wait_for_peers(router: Router, wanted: int | list[str], timeout: float = WAIT_SECONDS) -> float:
    """Wait until so many other nodes are connected, or one for each pattern; returns seconds."""
    joined, begin = threading.Event(), time.monotonic()
    router.on_join(lambda peer: joined.set())
    while missing := _missing(list(router.peers.values()), wanted):
        assert joined.wait(begin + timeout - time.monotonic()), f"{missing} missing after {timeout} s"
        joined.clear()
    return time.monotonic() - begin


def _missing(peers: list[Peer], wanted: int | list[str]) -> int | list[str]:
    if isinstance(wanted, int):
        return max(wanted - len(peers), 0)
    return [pattern for pattern in wanted if not any(matches(peer, pattern) for peer in peers)]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
