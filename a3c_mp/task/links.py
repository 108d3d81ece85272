"""What the routers of all nodes share: sessions with other nodes, and messages that are sent and received in them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple, Self

import zmq

from a3c_mp.task.endpoint import Endpoint, KeyPair, node_name
from a3c_mp.task.sockets import Frames
from a3c_mp.task.wire import JOINED, LEFT, Message, WireError, decode, encode

BATCH = 500  # most messages of a socket in one look
ZERO_COPY_RECV = 10  # option of zmq: without it, no message holds the 8 KiB that it has arrived in
LINGER_MS = 1500  # longest wait at the end for what is on its way


class RateLimitedLog:
    """Logs warnings that other nodes can cause without end: the 1st, 2nd, 4th, 8th, ... time."""

    def __init__(self, log: logging.Logger):
        self._log = log
        self._counts: Counter[str] = Counter()

    def warning(self, text: str, detail: object = "") -> None:
        """Count a warning. What differs each time, such as the words of another node, is its `detail`, in one line."""
        self._counts[text] += 1
        if (total := self._counts[text]).bit_count() == 1:
            self._log.warning(f"{text} ({total} so far)" + (f": {str(detail)!r:.200}" if detail else ""))


class Link(NamedTuple):
    """A session with another node, from its welcome to its end."""

    name: str
    port: Any  # the Listener or Dialer
    instance: str  # random id of the node's process, the same when it joins again


class Router:
    """What both ends of a connection share; to be used in a `with` block. What others do wrong goes to `log`.

    Messages arrive in the order in which their sender sent them, each once, as long as the two stay connected. A node
    that leaves and joins again begins a new session: what was under way is lost.
    """

    def __init__(self, endpoint: Endpoint, log: logging.Logger | None = None):
        self.endpoint, self.name = endpoint, node_name(endpoint.number)
        self.greeting = endpoint.greeting  # of node 0
        self.log = RateLimitedLog(log or logging.getLogger(__name__))
        self.is_active = bool(endpoint.binds or endpoint.dials)  # there are, or may be, other nodes
        self._ports: list[Any] = []
        self._links: dict[bytes, Link] = {}  # token of the session -> link
        self._received: list[Message] = []
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        """Bind, or join node 0. Raises ConfigError for an invalid address or key, or if node 0 refuses or is silent."""
        key = self.endpoint.load_key()
        self._context = zmq.Context(io_threads=1 if key is None else 2)
        if key is not None:
            with suppress(zmq.ZMQError):  # a zmq without the option
                self._context.set(ZERO_COPY_RECV, 0)
        try:
            self._open(key)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Send what is under way, for a second or two at most."""
        with self._lock:
            for port in self._ports:
                port.close(LINGER_MS)
            self._context.term()
            self._ports.clear()
            self._links.clear()

    @property
    def peers(self) -> list[str]:
        """Names of the nodes that are connected now: at node 0 all others, elsewhere node 0."""
        return [link.name for link in self._links.values()]

    @property
    def files(self) -> list[Any]:
        """Become readable when there may be something to receive; for a wait after `receive` found nothing."""
        with self._lock:
            return [port.socket.FD for port in self._ports]

    def send(self, event: str, *args: Any, to: str = "*") -> None:
        """Send an event to the node `to`, or to all that this one is connected to, without waiting; from any thread.

        Raises TypeError and ValueError as `encode`.
        """
        with self._lock:
            if links := self._links_to(to):
                frames = encode(event, args)
                for token, link in links:
                    self._send(token, link, frames)

    def receive(self) -> list[Message]:
        """All messages that have arrived since the last call, in order of arrival."""
        with self._lock:
            if self._ports:
                self._read()
            received, self._received = self._received, []
            return received

    def allow(self, name: str, size: int) -> None:
        """Let so many bytes wait for or from a node of another machine, besides what any of them may have waiting."""
        with self._lock:
            for token, link in self._links_to(name):
                link.port.allow(token, size)

    def record_fault(self, name: str) -> None:
        """Count a message of a node that is malformed or was not expected; one that sends many is cut off."""
        with self._lock:
            for token, link in self._links_to(name):
                link.port.record_fault(token)

    def _links_to(self, name: str) -> list[tuple[bytes, Link]]:
        return [(token, link) for token, link in self._links.items() if name in ("*", link.name)]

    def _open(self, key: KeyPair | None) -> None: ...  # bind, or connect
    def _read(self) -> None: ...  # read what has arrived; then end the sessions of nodes that are gone
    def _on_protocol(self, port: Any, token: bytes, event: str, args: list) -> None: ...  # of the other router

    def _send(self, token: bytes, link: Link, frames: Frames) -> None:
        link.port.send(token, frames)

    def _read_port(self, port: Any) -> bool:
        """Handle what has arrived at a port; returns whether that was all."""
        arrived = list(itertools.islice(port.received(), BATCH))
        have_read_all = not port.has_more()
        for token, frames in arrived:
            sender = self._links[token].name if token in self._links else None
            try:
                if any(map(len, frames)):  # an empty message finds out whether this node is there
                    event, args = decode(frames)
                    if event.startswith("node."):
                        self._on_protocol(port, token, event, args)
                    elif sender is not None:  # else it is of a session that has ended
                        if self.endpoint.accepts and not port.is_local and event not in self.endpoint.accepts:
                            raise WireError(f"unexpected {event[:20]!r}")
                        self._received.append(Message(sender, event, args))
            except (WireError, ValueError, TypeError, zmq.Again) as error:
                text = "message from a node that has not joined dropped" if sender is None else "message dropped"
                self.log.warning(text, error if sender is None else f"{sender}: {error}")
                port.record_fault(token)
        return have_read_all

    def _begin(self, token: bytes, link: Link) -> None:
        self._links[token] = link
        self._received.append(Message(link.name, JOINED, []))

    def _end(self, token: bytes) -> None:
        if (link := self._links.pop(token, None)) is not None:
            self._received.append(Message(link.name, LEFT, []))
