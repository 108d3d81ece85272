"""The two ends of connections: a `Listener` that nodes connect to, and a `Dialer` that connects to node 0.

Each connection is a session with a random token, which is its routing id. A session that ends does not come back:
another one has a socket and a token of its own, so nothing that was sent in the old session arrives late.
"""

import errno
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from a3c_mp.errors import ConfigError
from a3c_mp.task.endpoint import KeyPair, check_tcp, is_tcp
from a3c_mp.task.wire import PART

MAX_FRAME = PART + 1024  # bytes, with what encryption adds; zmq allocates no memory for a larger frame
QUEUE = 50_000  # high-water mark: most messages that wait for a node; with one more it counts as not reading
HEARTBEAT_MS, SILENCE_MS = 2000, 8000
"""between heartbeats of zmq's own thread, and without an answer to one before the connection counts as lost: the end of
a link is seen after 8 to 10 s"""
HANDSHAKE_MS = 5000  # longest handshake; a client that says nothing is disconnected
CONNECT_MS = 2000  # longest attempt to connect, where packets are lost
SILENT_SECONDS = 30.0  # longest attempt of which zmq tells nothing, with the time to find the addresses of a name
RECONNECT_SECONDS = 0.5  # shortest time between two attempts to connect

FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
ENDED = zmq.Event.DISCONNECTED | zmq.Event.CLOSED  # of a connection, or of an attempt to connect
Frames = list[Any]  # bytes and zmq frames, without the routing id


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


class _Port:
    """A socket, and perhaps the monitor of its connections."""

    _monitor: zmq.Socket | None = None

    def __init__(self, context: zmq.Context, kind: int, address: str):
        self.socket = socket = context.socket(kind)
        socket.sndhwm = socket.rcvhwm = QUEUE
        socket.maxmsgsize = MAX_FRAME
        if is_tcp(address):  # elsewhere a process that is gone closes its connection, and one that is stopped may go on
            socket.heartbeat_ivl = HEARTBEAT_MS
        # The peer gets the time to live with each heartbeat: it, too, closes the connection after so long a silence.
        socket.heartbeat_timeout = socket.heartbeat_ttl = socket.tcp_maxrt = SILENCE_MS
        socket.handshake_ivl, socket.connect_timeout = HANDSHAKE_MS, CONNECT_MS

    def close(self, linger: int) -> None:
        """Close the socket once what was sent is on its way, after `linger` milliseconds at the latest."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
        self.socket.close(linger)

    def has_more(self) -> bool:
        """Whether a message has arrived."""
        return _has_more(self.socket)

    # Of a `LimitedListener`:
    def admit(self, token: bytes, name: str) -> None: ...  # the session is that of a node from now on
    def allow(self, token: bytes, size: int) -> None: ...  # so many bytes may wait, besides those that any node may
    def record_fault(self, token: bytes) -> None: ...  # count a malformed or unexpected message of the session

    def _messages(self) -> Iterator[Frames]:
        while _has_more(self.socket):
            yield self.socket.recv_multipart(zmq.NOBLOCK, copy=False)

    def _events(self) -> Iterator[Any]:
        while self._monitor is not None and _has_more(self._monitor):
            yield recv_monitor_message(self._monitor, zmq.NOBLOCK)


class Listener(_Port):
    """A bound ROUTER socket. Raises ConfigError if the address cannot be bound."""

    is_local = True  # to this machine

    def __init__(self, context: zmq.Context, address: str, key: KeyPair | None = None):
        super().__init__(context, zmq.ROUTER, address)
        self.socket.router_mandatory = True  # sending to a node that is gone is an error, not silence
        try:
            self._bind(context, address, key)
        except zmq.ZMQError as error:
            self.close(0)
            why, fix = os.strerror(error.errno or 0), "choose another port, or an address of this machine"
            raise ConfigError("listen", address, f"cannot be bound ({why})", fix) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)  # with the port that was chosen for port 0

    def _bind(self, context: zmq.Context, address: str, key: KeyPair | None) -> None:
        self.socket.bind(address)

    def send(self, token: bytes, frames: Frames) -> bool:
        """Send to one node; returns False if it is gone. Raises zmq.Again if too much waits for it."""
        try:
            self.socket.send_multipart([token, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def received(self) -> Iterator[tuple[bytes, Frames]]:
        """Tokens of sessions, and frames of the messages that have arrived in them."""
        return ((token.bytes, frames) for token, *frames in self._messages())


class Dialer(_Port):
    """A DEALER socket that is connected to one address, for one session."""

    def __init__(self, context: zmq.Context, address: str, key: KeyPair | None, attempt: int = 0):
        super().__init__(context, zmq.DEALER, address)
        self._monitor = self.socket.get_monitor_socket(FAILED | ENDED | zmq.Event.HANDSHAKE_SUCCEEDED)
        self.token = os.urandom(16)
        self._is_connected = self._has_ended = self.has_failed = False  # the latter: its handshake
        self.socket.routing_id = self.token
        self.socket.reconnect_ivl = -1  # that would be the same session without what was under way
        if key is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = key
            self.socket.curve_serverkey = key.public
            self.socket.ipv6 = _uses_ipv6(address, attempt)
        try:
            self.socket.connect(address)
        except zmq.ZMQError as error:
            self.close(0)
            why = f"it is not an address ({os.strerror(error.errno or 0)})"
            raise ConfigError("attach-to", address, why, "give that of a node that listens") from error
        self._opened = time.monotonic()

    def send(self, token: bytes, frames: Frames) -> None:
        """Send to node 0, unless the session has ended. Raises zmq.Again if too much waits for it: then it ends."""
        self._read_events()
        if not self._has_ended:
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._has_ended = True
                raise

    def received(self) -> Iterator[tuple[bytes, Frames]]:
        return ((self.token, frames) for frames in self._messages())

    def is_connected(self) -> bool:
        """Whether the process of node 0 is there and has the same key, whether its program looks at messages or not."""
        self._read_events()
        return self._is_connected and not self._has_ended

    def is_over(self) -> bool:
        """Whether the session has ended, some time after its start; what has arrived in it can still be read."""
        self._read_events()
        age = time.monotonic() - self._opened
        is_silent = not self._is_connected and age > SILENT_SECONDS  # zmq does not tell that it has found no address
        return is_silent or (self._has_ended and age > RECONNECT_SECONDS)

    def close(self, linger: int) -> None:
        super().close(linger if self._is_connected else 0)  # without a connection nothing is on its way

    def _read_events(self) -> None:
        for event in (each["event"] for each in self._events()):
            self._has_ended |= bool(event & ENDED)
            self.has_failed |= bool(event & FAILED)
            self._is_connected |= event == zmq.Event.HANDSHAKE_SUCCEEDED


def _has_more(socket: zmq.Socket) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _uses_ipv6(address: str, attempt: int) -> bool:
    """Whether to dial over IPv6, which finds IPv4 too, but one address of a name: where it has both, they alternate."""
    try:
        families = {family for family, *_ in socket.getaddrinfo(check_tcp("attach-to", address)[0], None)}
    except (OSError, UnicodeError):  # the latter: it is no name of a host
        return True
    return len(families) == 1 or attempt % 2 == 0
