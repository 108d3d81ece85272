"""The two ends of connections: a `Listener` that nodes connect to, a `Dialer` that connects to one node.

Each connection is a session with a random token, which is its routing id. A session that ends does not come back: the
dialer opens a new socket with a new token, so nothing that was sent in the old session arrives late.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from a3c_mp.errors import ConfigError
from a3c_mp.task.endpoint import is_tcp
from a3c_mp.task.keys import KeyPair
from a3c_mp.task.link import WINDOW_MESSAGES, Frames
from a3c_mp.task.wire import MAX_TENSOR

MAX_FRAME = MAX_TENSOR + 1024
"""bytes, with what encryption adds; a connection that announces a larger frame is closed before memory is allocated"""
QUEUE = WINDOW_MESSAGES + 1000
"""high-water marks: the window, and room for acknowledgements, which are not counted in it"""
HEARTBEAT_SECONDS, SILENCE_SECONDS = 2.0, 8.0
"""between heartbeats of zmq's own thread, and without an answer to one before the connection counts as lost: the end of
a link is seen after 8 to 10 s"""
HANDSHAKE_SECONDS = 5.0
"""longest handshake; a client that says nothing is disconnected"""
CONNECT_SECONDS = 2.0
"""longest attempt to connect, where packets are lost"""
RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 0.01, 0.5
"""pause after the first and after later failed attempts"""
BATCH = 500
"""messages read before the router looks at its other sockets"""

END = zmq.Event.DISCONNECTED
FAILED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH


class Batch(NamedTuple):
    """What has happened at a socket."""

    arrived: list[tuple[bytes, Frames]]  # (token, frames)
    gone: list[bytes]  # tokens of sessions that have ended; all that arrived in them has been read
    refused: int  # handshakes that failed


class Listener:
    """A bound ROUTER socket; clients over TCP must have the key.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(self, context: zmq.Context, addresses: tuple[str, ...], key: KeyPair | None):
        self.socket = _make_socket(context, zmq.ROUTER)
        self.socket.router_mandatory = True  # sending to a node that is gone is an error, not silence
        self.monitor = self.socket.get_monitor_socket(END | FAILED)
        self.addresses: list[str] = []
        self._authenticator: ThreadAuthenticator | None = None
        self._tokens: dict[int, bytes] = {}  # file descriptor of a connection -> token
        self._ended: list[int] = []  # descriptors of connections that have ended
        self._replaced: list[bytes] = []  # tokens of ended sessions whose descriptors are in use again
        self._refused = 0
        try:
            for address in sorted(addresses, key=is_tcp):  # options of TCP only take effect after ipc is bound
                if is_tcp(address):
                    assert key is not None
                    self._admit(context, key)
                    self.socket.ipv6 = "[" in address
                _bind(self.socket, address)
                self.addresses.append(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except BaseException:
            self.close(0)
            raise

    def send(self, token: bytes, frames: Frames) -> None:
        """Send to one node; nothing happens if it is gone, as `read` is about to report that after its last messages.

        Raises:
            zmq.Again: it has not read far more than a window.
        """
        try:
            self.socket.send_multipart([token, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def read(self) -> Batch:
        """Messages that have arrived, and what has ended."""
        self._read_monitor()
        arrived = []
        for token, *frames in _received(self.socket):
            if not frames:
                continue
            descriptor = frames[0].get(zmq.SRCFD)
            if self._tokens.get(descriptor) != token.bytes:
                self._note(descriptor, token.bytes)
            arrived.append((token.bytes, frames))
        if len(arrived) >= BATCH:  # messages of sessions that have ended may still wait
            return Batch(arrived, [], 0)
        gone = [self._tokens.pop(descriptor) for descriptor in self._ended if descriptor in self._tokens]
        batch = Batch(arrived, self._replaced + gone, self._refused)
        self._ended, self._replaced, self._refused = [], [], 0
        return batch

    def close(self, linger: int) -> None:
        """Close the socket once what was sent is on its way, after `linger` milliseconds at the latest."""
        _close(self.socket, self.monitor, linger)
        if self._authenticator is not None:
            self._authenticator.stop()

    def _admit(self, context: zmq.Context, key: KeyPair) -> None:
        self.socket.curve_publickey, self.socket.curve_secretkey = key
        self.socket.curve_server = True
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=_OneKey(key.public))

    def _read_monitor(self) -> None:
        for event, descriptor in _events(self.monitor):
            if event == END:
                self._ended.append(descriptor)
            else:
                self._refused += 1

    def _note(self, descriptor: int, token: bytes) -> None:
        """First message of a session. Another session that had its descriptor has ended; its event came before."""
        if descriptor in self._tokens:
            self._read_monitor()
            with suppress(ValueError):
                self._ended.remove(descriptor)
            self._replaced.append(self._tokens[descriptor])
        self._tokens[descriptor] = token


class _OneKey:
    """Lets clients with one public key in; asked by the authenticator's thread."""

    def __init__(self, public: bytes):
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


class Dialer:
    """A DEALER socket that keeps connecting to one address; `renew` begins a new session."""

    def __init__(self, context: zmq.Context, address: str, key: KeyPair | None):
        self.context, self.address, self.key = context, address, key
        self.failures = 0
        """handshakes that failed since the last one that succeeded"""
        self.socket: zmq.Socket
        self.monitor: zmq.Socket
        self._connected = self._ended = False
        self._open()

    def renew(self) -> None:
        """Drop the session with all that is under way in it, and connect again."""
        self.close(0)
        self._open()

    def send(self, token: bytes, frames: Frames) -> None:
        if token == self.token:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def read(self) -> Batch:
        """Messages that have arrived, and whether the session has ended."""
        for event, _ in _events(self.monitor):
            if event == END:
                self._ended |= self._connected
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._connected, self.failures = True, 0
            else:
                self.failures += 1
        arrived = [(self.token, frames) for frames in _received(self.socket)]
        ended = self._ended and len(arrived) < BATCH
        return Batch(arrived, [self.token] if ended else [], 0)

    def close(self, linger: int) -> None:
        """As `Listener.close`; without a connection nothing is on its way."""
        _close(self.socket, self.monitor, linger if self._connected else 0)

    def _open(self) -> None:
        self.token = os.urandom(16)
        self._connected = self._ended = False
        self.socket = _make_socket(self.context, zmq.DEALER)
        self.monitor = self.socket.get_monitor_socket(END | FAILED | zmq.Event.HANDSHAKE_SUCCEEDED)
        self.socket.routing_id = self.token
        if is_tcp(self.address):
            assert self.key is not None
            self.socket.curve_publickey, self.socket.curve_secretkey = self.key
            self.socket.curve_serverkey = self.key.public
            self.socket.ipv6 = True
        self.socket.connect(self.address)


def _make_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = QUEUE
    socket.maxmsgsize = MAX_FRAME
    socket.heartbeat_ivl = _ms(HEARTBEAT_SECONDS)
    # The peer gets the time to live with each heartbeat: it, too, closes the connection after so long a silence.
    socket.heartbeat_timeout = socket.heartbeat_ttl = socket.tcp_maxrt = _ms(SILENCE_SECONDS)
    socket.handshake_ivl = _ms(HANDSHAKE_SECONDS)
    socket.connect_timeout = _ms(CONNECT_SECONDS)
    socket.reconnect_ivl, socket.reconnect_ivl_max = _ms(RECONNECT_SECONDS), _ms(MAX_RECONNECT_SECONDS)
    return socket


def _bind(socket: zmq.Socket, address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if not is_tcp(address):
            raise
        fix = "choose another port, or an address of this machine"
        raise ConfigError("listen", address, f"cannot be bound ({error.strerror})", fix) from error


def _received(socket: zmq.Socket) -> Iterator[Any]:
    with suppress(zmq.Again):
        for _ in range(BATCH):
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)


def _events(monitor: zmq.Socket) -> Iterator[tuple[int, int]]:
    """Events of a connection and its file descriptor."""
    with suppress(zmq.Again):
        while True:
            event = recv_monitor_message(monitor, zmq.NOBLOCK)
            yield event["event"], event["value"]


def _close(socket: zmq.Socket, monitor: zmq.Socket, linger: int) -> None:
    socket.disable_monitor()
    monitor.close(0)
    socket.close(linger)


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
