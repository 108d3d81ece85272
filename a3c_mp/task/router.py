"""The routers of nodes, which send events to each other: the `Hub` of node 0, and a `Spoke` of each other node.

The nodes of a task form a star: node 0 has a connection to each of the others. zmq's own thread moves the bytes,
encrypts them and sends heartbeats; this code runs when the node sends, or looks at its messages.
"""

import itertools
import logging
import os
import threading
import time
from contextlib import suppress
from multiprocessing import connection
from typing import Any, NamedTuple, Self

import zmq

from a3c_mp.errors import ConfigError
from a3c_mp.processes.program import differences
from a3c_mp.task.endpoint import COPY_IT, FLAG, Endpoint, KeyPair, is_tcp, node_name
from a3c_mp.task.limits import LimitedListener
from a3c_mp.task.sockets import Dialer, Listener, RateLimitedLog
from a3c_mp.task.wire import JOINED, LEFT, Message, WireError, decode, encode

HELLO, WELCOME, REFUSED = "node.hello", "node.welcome", "node.refused"
"""to join: the node that dials says who it is, and is let in or not"""
UNFIT = "node.unfit"  # of a node that cannot take part: (why), for the log of node 0
DROPPED = "node.dropped"  # to a node that did not read: it has to join again

WELCOME_SECONDS = 10.0  # longest wait for node 0 over TCP, where authentication fails without a word
LOCAL_WELCOME_SECONDS = 60.0  # the same on this machine, where it may be busy with its start
PROBE_SECONDS = 0.5  # between two looks whether nodes are gone
MAX_INSTANCE = 64  # characters of what tells one start of a node from another
LAST_WORDS_SECONDS = 2.0  # longest time in which what a node has sent before its end is read, where much arrives
BATCH = 500  # most messages of a socket in one look
ZERO_COPY_RECV = 10  # option of zmq: without it, no message holds the 8 KiB that it has arrived in
LINGER_MS = 1500  # longest wait at the end for what is on its way
BAD_KEYS = 3  # handshakes that fail in a row, before the first success, until the key counts as wrong


class Link(NamedTuple):
    """A session with another node, from its welcome to its end."""

    name: str
    port: Any  # the Listener or Dialer
    instance: str  # random id of the node's process, the same when it joins again


class Router:
    """What both ends of a connection share; to be used in a `with` block. What others do wrong goes to `log`.

    Messages arrive in their sender's order, each once, as long as the two stay connected. A node that leaves and joins
    again begins a new session: what was under way is lost.
    """

    def __init__(self, endpoint: Endpoint, log: logging.Logger | None = None):
        self.endpoint, self.name, self.greeting = endpoint, node_name(endpoint.number), endpoint.greeting
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
        """Send to a node, or to all, without waiting, from any thread. Raises TypeError and ValueError as `encode`."""
        with self._lock:
            if links := self._links_to(to):
                frames = encode(event, args)
                for token, link in links:
                    try:
                        link.port.send(token, frames)
                    except zmq.Again:
                        self.log.warning("a node does not read; dropped with what waited for it", link.name)
                        self._drop(token, link)

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
    def _drop(self, token: bytes, link: Link) -> None: ...  # end a session in which too much waits to be sent
    def _read(self) -> None: ...  # read what has arrived; then end the sessions of nodes that are gone
    def _on_protocol(self, port: Any, token: bytes, event: str, args: list) -> None: ...  # of the other router

    def _read_port(self, port: Any) -> bool:
        """Handle what has arrived at a port; returns whether that was all."""
        arrived, have_read_all = list(itertools.islice(port.received(), BATCH)), not port.has_more()
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


class Hub(Router):
    """The router of node 0: lets other nodes in, and names them."""

    def __init__(self, endpoint: Endpoint, log: logging.Logger | None = None):
        super().__init__(endpoint, log)
        self._numbers, self._probed = itertools.count(endpoint.num_nodes), 0.0  # the former: of nodes that join
        self._lost: dict[bytes, float] = {}  # sessions that have ended, and when that was seen
        self._dropped: dict[bytes, Any] = {}  # of a session with a node that did not read -> port

    @property
    def addresses(self) -> list[str]:
        return [port.address for port in self._ports]

    def _open(self, key: KeyPair | None) -> None:
        for address in self.endpoint.binds:
            if key is not None and is_tcp(address):
                self._ports.append(LimitedListener(self._context, self.endpoint, address, key, self.log, self._lock))
            else:
                self._ports.append(Listener(self._context, address))

    def _drop(self, token: bytes, link: Link) -> None:
        self._end(token)
        self._dropped[token] = link.port

    def _read(self) -> None:
        if time.monotonic() - self._probed > PROBE_SECONDS:
            self._probed = time.monotonic()
            # zmq does not report the end of a session, but an empty message to a node that is gone fails.
            for token, link in self._links.items():
                with suppress(zmq.Again):  # it does not read, and is dropped with the next real message
                    if not link.port.send(token, [b""]):
                        self._lost.setdefault(token, self._probed)
            for token, port in list(self._dropped.items()):
                with suppress(zmq.Again):
                    port.send(token, encode(DROPPED, []))
                    del self._dropped[token]
        have_read_all = [self._read_port(port) for port in self._ports]
        for token, since in [*self._lost.items()]:  # what has arrived before their end can still be read
            if all(have_read_all) or time.monotonic() - since > LAST_WORDS_SECONDS:
                del self._lost[token]
                self._end(token)

    def _on_protocol(self, port: Listener, token: bytes, event: str, args: list) -> None:
        """Let a node in, at its hello."""
        if event == UNFIT and token in self._links:
            self.log.warning("a node with another environment was refused", *args)
            return
        if event != HELLO or token in self._links:
            raise WireError(f"unexpected {event[:20]!r}")
        number, theirs, instance = args
        if not isinstance(theirs, dict) or not isinstance(instance, str) or len(instance) > MAX_INSTANCE:
            raise WireError("its versions or its name are malformed")
        fatal, harmless = differences(theirs, self.endpoint.versions)
        if fatal:
            self.log.warning("a node with other versions was refused", fatal)
            port.send(token, encode(REFUSED, [f"it has {fatal}"]))
            return
        name = self._choose_name(port, number, instance)
        for older, _ in self._links_to(name):  # of a process that was killed, or has lost its connection
            self._end(older)
        if port.send(token, encode(WELCOME, [name, self.greeting, harmless])):
            if harmless:
                self.log.warning("a node with slightly other versions joined", harmless)
            port.admit(token, name)
            self._begin(token, Link(name, port, instance))

    def _choose_name(self, port: Listener, number: int, instance: str) -> str:
        """Nodes that node 0 has started have a number; others get the next one, or theirs if they come back."""
        if port.is_local:
            if type(number) is not int or not 0 < number < self.endpoint.num_nodes:
                raise ValueError("the number of the node is out of range")
            return node_name(number)
        for link in self._links.values():
            if link.instance == instance and not link.port.is_local:
                return link.name
        return node_name(next(self._numbers))


class Spoke(Router):
    """The router of any other node: joins node 0, and joins again when the connection was lost."""

    differs = ""  # of its versions from those of node 0, without harm

    def _open(self, key: KeyPair | None) -> None:
        self._key, self._instance, self._failures, self._attempts = key, os.urandom(8).hex(), 0, itertools.count()
        self._dial()
        address, local = self.endpoint.dials, not is_tcp(self.endpoint.dials)
        seconds = LOCAL_WELCOME_SECONDS if local else WELCOME_SECONDS
        first = deadline = time.monotonic() + seconds
        while not self.peers:
            if (now := time.monotonic()) > first and self._ports[0].is_connected():
                if deadline == first:
                    self.log.warning(f"{address} is busy: waiting until its node 0 looks at messages")
                deadline = now + seconds
            elif now > deadline:
                why, fix = f"no node lets this one in within {seconds:g} s", "start the node that listens there first"
                raise ConfigError("attach-to", address, why, f"{fix}, with the same key")
            if self._failures >= BAD_KEYS and not local:
                why = f"the node at {address} has another one, or what answers there is no node"
                raise ConfigError(FLAG, self.endpoint.key_file, why, COPY_IT)
            connection.wait(self.files, PROBE_SECONDS / 10)
            self._read()
        self._received = [message for message in self._received if message.event != JOINED]

    def _dial(self) -> None:
        self._ports = [dialer := Dialer(self._context, self.endpoint.dials, self._key, next(self._attempts))]
        with suppress(zmq.Again):  # it has been lost already, and is dialled again
            dialer.send(dialer.token, encode(HELLO, [self.endpoint.number, self.endpoint.versions, self._instance]))

    def _redial(self) -> None:
        [dialer] = self._ports
        self._end(dialer.token)
        self._failures = self._failures + 1 if dialer.has_failed else 0
        dialer.close(0)
        self._dial()

    def _read(self) -> None:
        for dialer in self._ports:
            is_over = dialer.is_over()
            if self._read_port(dialer) and is_over:
                self._redial()

    def _on_protocol(self, port: Dialer, token: bytes, event: str, args: list) -> None:
        if event == DROPPED:
            self._redial()
        elif event == REFUSED and not self._links:
            why = f"this node is refused: {args[0]}"
            raise ConfigError("attach-to", self.endpoint.dials, why, "install the same versions")
        elif event == WELCOME and not self._links:
            self.name, self.greeting, self.differs = args
            self._begin(token, Link(node_name(0), port, ""))
        else:
            raise WireError(f"unexpected {event[:20]!r}")
