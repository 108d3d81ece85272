"""The router of a node: sends events to other nodes and receives theirs.

The nodes of a task form a star: node 0 has a connection to each of the others. zmq's own thread moves the bytes,
encrypts them and sends heartbeats; this code runs when the node sends, or looks at its messages.
"""

from __future__ import annotations

import logging
import threading
import time
from itertools import islice
from multiprocessing import connection
from typing import Any

import zmq

from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.task.endpoint import COPY_IT, FLAG, Endpoint, is_tcp
from a3c_mp.task.links import DROPPED, HELLO, REFUSED, WELCOME, Link, Links, RateLimitedLog
from a3c_mp.task.sockets import Dialer, Frames, Listener
from a3c_mp.task.wire import JOINED, Message, WireError, decode, encode

WELCOME_SECONDS = 10.0  # longest wait for node 0 over TCP, where authentication fails without a word
LOCAL_WELCOME_SECONDS = 60.0  # the same on this machine, where it may be busy with its start
PROBE_SECONDS = 0.5  # between two looks whether nodes are gone
BATCH = 500  # most messages of a socket in one look
LINGER_MS = 1500  # longest wait at the end for what is on its way
BAD_KEYS = 3  # handshakes that fail in a row, before the first success, until the key counts as wrong


class Router:
    """Connects a node to node 0, or node 0 to the others; to be used in a `with` block.

    Messages arrive in the order in which their sender sent them, each once, as long as the two stay connected. A node
    that leaves and joins again begins a new session: what was under way is lost. What others do wrong goes to `log`.
    """

    def __init__(self, endpoint: Endpoint, log: logging.Logger | None = None):
        self.endpoint = endpoint
        self.log = RateLimitedLog(log or logging.getLogger(__name__))
        self.links = Links(endpoint, lambda name, event: self._received.append(Message(name, event, [])), self.log)
        self.is_active = bool(endpoint.binds or endpoint.dials)  # there are, or may be, other nodes
        self._ports: list[Listener | Dialer] = []
        self._received: list[Message] = []
        self._lock = threading.RLock()
        self._probed = 0.0

    def __enter__(self) -> Router:
        """Bind, or connect; returns once node 0 has let this node in.

        Raises:
            ConfigError: an address or the key is invalid, or node 0 refuses this node.
            WorkerError: node 0 does not answer, on this machine.
        """
        if self.is_active:
            key = self.endpoint.load_key()
            self._context = zmq.Context()
            try:
                for address in self.endpoint.binds:
                    self._ports.append(Listener(self._context, address, key))
                if self.endpoint.dials:
                    self._ports.append(dialer := Dialer(self._context, self.endpoint.dials, key))
                    dialer.send(dialer.token, self.links.hello())
                    self._wait_for_welcome(dialer)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Send what is under way, for a second or two at most."""
        with self._lock:
            if self._ports:
                for port in self._ports:
                    port.close(LINGER_MS)
                self._context.term()
            self._ports.clear()
            self.links.by_token.clear()

    @property
    def peers(self) -> list[str]:
        """Names of the nodes that are connected now: at node 0 all others, elsewhere node 0."""
        return [link.name for link in self.links.by_token.values()]

    @property
    def addresses(self) -> list[str]:
        """Bound addresses."""
        return [port.address for port in self._ports if isinstance(port, Listener)]

    @property
    def files(self) -> list[Any]:
        """What becomes readable when there may be something to receive, for a wait after `receive` found nothing."""
        with self._lock:
            return [port.socket.FD for port in self._ports]

    def send(self, event: str, *args: Any, to: str = "*") -> None:
        """Send an event, from any thread; values are copied.

        Node 0 sends to all nodes whose name or label matches the pattern `to`, other nodes to node 0. Nodes that do not
        read are dropped, so this never waits for them. Raises TypeError and ValueError as `encode` does.
        """
        with self._lock:
            if links := [link for link in self.links.by_token.values() if self.endpoint.dials or link.matches(to)]:
                frames = encode(event, args)
                for link in links:
                    self.links.send(link, frames)

    def receive(self) -> list[Message]:
        """All messages that have arrived since the last call, in order of arrival."""
        with self._lock:
            self._read()
            received, self._received = self._received, []
            return received

    def _wait_for_welcome(self, dialer: Dialer) -> None:
        local = not is_tcp(dialer.address)
        seconds = LOCAL_WELCOME_SECONDS if local else WELCOME_SECONDS
        deadline = time.monotonic() + seconds
        while not self.peers:
            if time.monotonic() > deadline:
                why = f"no node lets this one in within {seconds:g} s"
                if local:
                    raise WorkerError(f"{self.links.name}: {why}, at {dialer.address}")
                fix = "start the node that listens there first, with the same key"
                raise ConfigError("attach-to", dialer.address, why, fix)
            if dialer.failures >= BAD_KEYS and not local:
                why = f"the node at {dialer.address} has another one"
                raise ConfigError(FLAG, self.endpoint.key_file, why, COPY_IT)
            connection.wait(self.files, PROBE_SECONDS / 10)
            self._read()
        self._received = [message for message in self._received if message.event != JOINED]

    # ---- reading

    def _read(self) -> None:
        """Read what has arrived; then end the sessions of nodes that are gone."""
        lost: list[bytes] = []
        if self.endpoint.binds and self._ports and time.monotonic() - self._probed > PROBE_SECONDS:
            self._probed = time.monotonic()
            lost = self.links.find_lost()
        for port in self._ports:
            for _ in range(port.count_refused() if isinstance(port, Listener) else 0):
                self.log.warning("a connection was refused: another key, or no node")
            if isinstance(port, Dialer) and port.is_to_renew():
                lost = [port.token]
            arrived = list(islice(port.received(), BATCH))
            for token, frames in arrived:
                self._handle(port, token, frames)
            if len(arrived) == BATCH:  # more may wait
                lost = []
        for token in lost:
            self._end(token)

    def _end(self, token: bytes) -> None:
        """End a session; one with node 0 is followed by another."""
        self.links.end(token)
        for port in self._ports:
            if isinstance(port, Dialer):
                port.renew()
                port.send(port.token, self.links.hello())

    def _handle(self, port: Listener | Dialer, token: bytes, frames: Frames) -> None:
        link = self.links.by_token.get(token)
        try:
            if any(map(len, frames)):  # an empty message finds out whether this node is there
                self._dispatch(port, token, link, *decode(frames))
        except (WireError, ValueError, TypeError, zmq.Again) as error:
            sender = "a node that has not joined" if link is None else link.name
            self.log.warning(f"message from {sender} dropped", error)

    def _dispatch(self, port: Listener | Dialer, token: bytes, link: Link | None, event: str, args: list) -> None:
        if isinstance(port, Listener) and event == HELLO:
            self.links.admit(port, token, *args)
        elif isinstance(port, Dialer) and event in (WELCOME, REFUSED) and link is None:
            self.links.enter(port, event, *args)
        elif isinstance(port, Dialer) and event == DROPPED:
            self._end(token)
        elif event.startswith("node."):
            raise WireError(f"unexpected {event[:20]!r}")
        elif link is not None:  # else it is of a session that has ended
            self._received.append(Message(link.name, event, args))
