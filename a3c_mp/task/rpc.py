"""Requests to other nodes, and the functions of this one that answer theirs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from a3c_mp.errors import RequestError
from a3c_mp.task.endpoint import Peer
from a3c_mp.task.limited_log import RateLimitedLog
from a3c_mp.task.wire import Envelope

BEAT_SECONDS = 0.25
"""between two heartbeats while a request waits for its answer"""


@dataclass
class Request:
    """A request under way."""

    to: str  # name of the node that answers
    name: str
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: str = ""

    def fail(self, why: str) -> None:
        self.error = why
        self.done.set()


class Requests:
    """The requests of this node that are under way, and its handlers for those of others."""

    def __init__(self, log: RateLimitedLog) -> None:
        self.log = log
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._open: dict[int, Request] = {}
        self._numbers = itertools.count(1)

    def serve(self, name: str, handler: Callable[..., Any]) -> None:
        self._handlers[name] = handler

    def begin(self, to: str, name: str) -> tuple[int, Request]:
        number, request = next(self._numbers), Request(to, name)
        self._open[number] = request
        return number, request

    def finish(self, number: int, request: Request, timeout: float, beat: Callable[[], None]) -> Any:
        """Wait for the answer. Raises RequestError, TimeoutError."""
        deadline = time.monotonic() + timeout
        try:
            while not request.done.wait(max(0.0, min(BEAT_SECONDS, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{request.to} did not answer {request.name!r} within {timeout:g} s")
                beat()
        finally:
            del self._open[number]
        if request.error:
            raise RequestError(f"{request.to} did not answer {request.name!r}: {request.error}")
        return request.answer

    # ---- on the router's thread

    def handle(self, sender: str, name: str, args: list) -> list:
        """Run a handler; returns [whether it succeeded, result or error]."""
        if name not in self._handlers:
            return [False, "it has no handler for that"]
        try:
            return [True, self._handlers[name](*args)]
        except Exception as error:
            self.log.warning(f"request {name!r} failed", f"from {sender}", traceback=True)
            return [False, f"{type(error).__name__}: {error}"]

    def receive(self, envelope: Envelope, succeeded: bool, result: Any) -> None:
        """An answer has arrived; one that nobody waits for is dropped."""
        request = self._open.get(envelope.request)
        if request is not None and request.to == envelope.sender:
            if succeeded:
                request.answer = result
                request.done.set()
            else:
                request.fail(str(result))

    def fail(self, why: str, peer: Peer | None = None) -> None:
        """Nobody will answer: fail the requests to a node, or all."""
        for request in list(self._open.values()):
            if peer is None or request.to == peer.name:
                request.fail(why)
