"""The two ends of connections: a `Listener` that nodes connect to, and a `Dialer` that connects to node 0.

Each connection is a session with a random token, which is its routing id. A session that ends does not come back: the
dialer opens a new socket with a new token, so nothing that was sent in the old session arrives late.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from a3c_mp.errors import ConfigError
from a3c_mp.task.endpoint import KeyPair, is_tcp
from a3c_mp.task.wire import MAX_TENSOR

MAX_FRAME = MAX_TENSOR + 1024  # bytes, with what encryption adds; zmq allocates no memory for a larger frame
QUEUE = 50_000  # high-water mark: most messages that wait for a node; with one more it counts as not reading
HEARTBEAT_MS, SILENCE_MS = 2000, 8000
"""between heartbeats of zmq's own thread, and without an answer to one before the connection counts as lost: the end of
a link is seen after 8 to 10 s"""
HANDSHAKE_MS = 5000  # longest handshake; a client that says nothing is disconnected
CONNECT_MS = 2000  # longest attempt to connect, where packets are lost
RECONNECT_SECONDS = 0.5  # shortest time between two attempts to connect

FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
ENDED = zmq.Event.DISCONNECTED | zmq.Event.CLOSED  # of a connection, or of an attempt to connect
Frames = list[Any]  # bytes and zmq frames, without the routing id


class _Port:
    """A socket, and the monitor of its connections."""

    socket: zmq.Socket
    _monitor: zmq.Socket

    def close(self, linger: int) -> None:
        """Close the socket once what was sent is on its way, after `linger` milliseconds at the latest."""
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger)

    def _make_socket(self, context: zmq.Context, kind: int, events: int) -> None:
        self.socket = socket = context.socket(kind)
        socket.sndhwm = socket.rcvhwm = QUEUE
        socket.maxmsgsize = MAX_FRAME
        socket.heartbeat_ivl = HEARTBEAT_MS
        # The peer gets the time to live with each heartbeat: it, too, closes the connection after so long a silence.
        socket.heartbeat_timeout = socket.heartbeat_ttl = socket.tcp_maxrt = SILENCE_MS
        socket.handshake_ivl, socket.connect_timeout = HANDSHAKE_MS, CONNECT_MS
        self._monitor = socket.get_monitor_socket(events)

    def _messages(self) -> Iterator[Frames]:
        while _has_more(self.socket):
            yield self.socket.recv_multipart(zmq.NOBLOCK, copy=False)

    def _events(self) -> Iterator[int]:
        while _has_more(self._monitor):
            yield recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]


class Listener(_Port):
    """A bound ROUTER socket; clients over TCP must have the key.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, context: zmq.Context, address: str, key: KeyPair | None):
        self.is_local = not is_tcp(address)
        self._make_socket(context, zmq.ROUTER, FAILED)
        self.socket.router_mandatory = True  # sending to a node that is gone is an error, not silence
        self.socket.ipv6 = "[" in address
        self._authenticator: ThreadAuthenticator | None = None
        try:
            if key is not None and not self.is_local:
                self.socket.curve_publickey, self.socket.curve_secretkey = key
                self.socket.curve_server = True
                self._authenticator = ThreadAuthenticator(context)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(credentials_provider=_OneKey(key.public))
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close(0)
            why, fix = os.strerror(error.errno or 0), "choose another port, or an address of this machine"
            raise ConfigError("listen", address, f"cannot be bound ({why})", fix) from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)  # with the port that was chosen for port 0

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
        """Messages that have arrived: token of the session, frames."""
        return ((token.bytes, frames) for token, *frames in self._messages())

    def count_refused(self) -> int:
        """Handshakes that have failed since the last call."""
        return sum(1 for _ in self._events())

    def close(self, linger: int) -> None:
        super().close(linger)
        if self._authenticator is not None:
            self._authenticator.stop()


class _OneKey:
    """Lets clients with one public key in; asked by the authenticator's thread."""

    def __init__(self, public: bytes):
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


class Dialer(_Port):
    """A DEALER socket that is connected to one address; `renew` begins a new session."""

    is_local = False
    token: bytes
    _has_ended: bool

    def __init__(self, context: zmq.Context, address: str, key: KeyPair | None):
        self.context, self.address, self.key = context, address, key
        self.failures = 0  # handshakes that failed since the last one that succeeded
        self._open()

    def renew(self) -> None:
        """Drop the session with all that is under way in it, and connect again."""
        self.close(0)
        self._open()

    def send(self, token: bytes, frames: Frames) -> bool:
        """Send to node 0; returns False if the session has ended, or ends because too much waits for it."""
        self._read_events()
        if not self._has_ended:
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._has_ended = True
        return not self._has_ended

    def received(self) -> Iterator[tuple[bytes, Frames]]:
        """As `Listener.received`."""
        return ((self.token, frames) for frames in self._messages())

    def is_to_renew(self) -> bool:
        """Whether the session has ended, and some time ago begun; what has arrived in it can still be read."""
        self._read_events()
        return self._has_ended and time.monotonic() - self._opened > RECONNECT_SECONDS

    def close(self, linger: int) -> None:
        """As `Listener.close`; without a connection nothing is on its way."""
        super().close(linger if self._is_connected else 0)

    def _open(self) -> None:
        self.token, self._opened = os.urandom(16), time.monotonic()
        self._is_connected = self._has_ended = False
        self._make_socket(self.context, zmq.DEALER, FAILED | ENDED | zmq.Event.HANDSHAKE_SUCCEEDED)
        self.socket.routing_id = self.token
        self.socket.reconnect_ivl = -1  # that would be the same session without what was under way
        if self.key is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = self.key
            self.socket.curve_serverkey = self.key.public
            self.socket.ipv6 = True
        self.socket.connect(self.address)

    def _read_events(self) -> None:
        for event in self._events():
            if event & ENDED:
                self._has_ended = True
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._is_connected, self.failures = True, 0
            else:
                self.failures += 1


def _has_more(socket: zmq.Socket) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
