"""Requests to other nodes, and the functions of this one that answer theirs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from a3c_mp.errors import RequestError
from a3c_mp.task.endpoint import Peer
from a3c_mp.task.limited_log import RateLimitedLog
from a3c_mp.task.peers import matches
from a3c_mp.task.switch import ANSWER, REQUEST
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

    def wait(self, timeout: float, beat: Callable[[], None]) -> Any:
        """Wait for the answer. Raises RequestError, TimeoutError."""
        deadline = time.monotonic() + timeout
        while not self.done.wait(max(0.0, min(BEAT_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.to} did not answer {self.name!r} within {timeout:g} s")
            beat()
        if self.error:
            raise RequestError(f"{self.to} did not answer {self.name!r}: {self.error}")
        return self.answer


class Requests:
    """The requests of this node that are under way, and its handlers for those of others.

    Args:
        post: sends a message: kind, content, name of the node, number of the request. Raises TypeError or ValueError
            for what cannot be sent.
        peers: the nodes that are connected now, by name.
        log: for requests that fail here.
    """

    def __init__(
        self, post: Callable[[str, Any, str, int], None], peers: Callable[[], Mapping[str, Peer]], log: RateLimitedLog
    ):
        self.log = log
        self._post, self._peers = post, peers
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._open: dict[int, Request] = {}
        self._numbers = itertools.count(1)

    def serve(self, name: str, handler: Callable[..., Any]) -> None:
        self._handlers[name] = handler

    def ask(self, name: str, args: tuple, to: str, timeout: float, beat: Callable[[], None]) -> Any:
        """See `Router.request`."""
        names = [peer.name for peer in self._peers().values() if matches(peer, to)]
        if not names:
            raise RequestError(f"no node matches {to!r} for request {name!r}")
        number, request = next(self._numbers), Request(names[0], name)
        self._open[number] = request
        try:
            if request.to not in self._peers():  # it left meanwhile, before its requests could fail
                request.fail("it has left")
            else:
                self._post(REQUEST, [name, args], request.to, number)
            return request.wait(timeout, beat)
        finally:
            del self._open[number]

    # ---- on the router's thread

    def answer(self, envelope: Envelope, name: str, args: list) -> None:
        """Run the handler of a request, and send [whether it succeeded, result or error]."""
        try:
            self._post(ANSWER, self._handle(envelope.sender, name, args), envelope.sender, envelope.request)
        except (TypeError, ValueError) as error:  # the result cannot be sent
            content = [False, f"{type(error).__name__}: {error}"]
            self._post(ANSWER, content, envelope.sender, envelope.request)

    def _handle(self, sender: str, name: str, args: list) -> list:
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
