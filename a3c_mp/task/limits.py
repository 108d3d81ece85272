"""A `Listener` on TCP that limits what others can cost: connections, and bytes that wait in either direction.

zmq reads whatever a peer sends into memory, a message in parts without end too, and reports neither how much nor whose.
A thread compares what the kernel has counted for each connection with what this program has read and written there, and
shuts down those beyond their limits. What they have sent is discarded at once, also while the program is busy.
"""

import errno
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from a3c_mp.task.endpoint import Endpoint, KeyPair
from a3c_mp.task.sockets import FAILED, HEARTBEAT_MS, Frames, Listener

STRANGERS = 64  # most connections that have not joined; with one more, the oldest is shut down
STRANGER_BYTES = 64 * 2**10  # most that one of them may send
TOO_MUCH = f"it has sent more than {STRANGER_BYTES // 2**10} KiB without joining"
STRANGER_SECONDS = 30.0  # longest time without joining; zmq itself ends a handshake after `HANDSHAKE_MS`
FAULTS = 100  # malformed or unexpected messages of a node, until it is cut off
AHEAD = 64  # most messages of a node that are read while others are discarded; each takes a KiB of memory
READ_BYTES = 2**20  # most that the program reads in one go, if that is more than one message
PERIOD, PERIOD_STRANGERS = 0.02, 0.005
"""seconds between two looks at the counters, and while some have not joined; one core decrypts 0.7 MB in 1 ms"""
DISCARD_SECONDS = 0.01  # longest time to discard messages in one go
HANDSHAKE_BYTES = 4096  # more than a handshake makes a difference between the two counts
HEARTBEAT_BYTES = 82  # a PING and a PONG, encrypted
TCP_COUNTERS = struct.Struct("=QQ"), 120  # bytes_acked, bytes_received of struct tcp_info (Linux 4.1)


class Connection:
    """A connection to a listener, from its start until all that arrived there is read or discarded."""

    def __init__(self, fd: int, port: int):
        # Stays this connection's after zmq has closed its own. (`socket.dup` would make both block.)
        copy = os.dup(fd)
        try:
            self.handle = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            raise
        if self.handle.family == socket.AF_UNIX or self.handle.getsockname()[1] != port:
            self.handle.close()
            raise OSError(errno.EBADF, "the connection has ended, and its number is another file's")
        self.inode, self.since = os.fstat(fd).st_ino, time.monotonic()
        self.name = ""  # of the node, once it has joined
        self.read = self.written = 0  # bytes of messages on the wire
        self.allowance = 0  # bytes that may wait besides; see `Router.allow`
        self.faults = self.ahead = 0  # ahead: messages that were read while others were discarded
        self.ended: float | None = None  # when
        self.is_cut = False  # what it has sent is discarded
        self._counters = 0, 0

    def waiting(self) -> int:
        """Bytes that wait here to be read by this program, or to be acknowledged by the other end."""
        acked, received = self.counters()
        heartbeats = int(((self.ended or time.monotonic()) - self.since) * 1000 / HEARTBEAT_MS) * HEARTBEAT_BYTES
        unread = max(received - self.read - heartbeats, 0)  # zmq reads heartbeats itself
        return max(unread + max(self.written - acked, 0) - HANDSHAKE_BYTES - self.allowance, 0)

    def counters(self) -> tuple[int, int]:
        """Bytes that the other end has acknowledged, and that it has sent."""
        layout, offset = TCP_COUNTERS
        if self.ended is None:
            info = self.handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + layout.size)
            self._counters = layout.unpack_from(info.ljust(offset + layout.size, b"\0"), offset)
        return self._counters

    def close(self) -> None:
        if self.ended is None:
            self.counters()
            self.ended = time.monotonic()
            self.handle.close()


class LimitedListener(Listener):
    """A listener on TCP for those who have the key. Its thread takes the `lock`, held while the socket is used."""

    is_local = False
    _thread: threading.Thread | None = None
    _authenticator: ThreadAuthenticator | None = None

    def __init__(self, context: zmq.Context, endpoint: Endpoint, address: str, key: KeyPair, log: Any, lock: Any):
        self.endpoint, self.log, self._lock, self._is_closing = endpoint, log, lock, False
        self._must_discard = False  # something worthless may have arrived
        self._is_full = False  # more than may wait has not been read, or discarded
        self._by_fd: dict[int, Connection] = {}  # those that are open, in the order of their start
        self._by_token: dict[bytes, Connection] = {}  # those that have sent a message
        self._ahead: deque[tuple[Connection, bytes, Frames]] = deque()  # read while others were discarded
        super().__init__(context, address, key)
        self._port = int(self.address.rpartition(":")[2])
        self._thread = threading.Thread(target=self._watch, name="listener", daemon=True)
        self._thread.start()

    def _bind(self, context: zmq.Context, address: str, key: Any) -> None:
        self.socket.ipv6 = "[" in address
        self.socket.affinity = 2  # a thread of its own, so that those of this machine are served meanwhile
        # Bytes are limited instead: where zmq 4.3.5 has stopped to read at a mark, and the connection breaks before a
        # heartbeat, it aborts the process (issue 4841 of libzmq).
        self.socket.rcvhwm = 0
        self.socket.curve_publickey, self.socket.curve_secretkey = key
        self.socket.curve_server = True
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        only_ours = SimpleNamespace(callback=lambda domain, public: public == key.public)  # whose secret key it proves
        self._authenticator.configure_curve_callback(credentials_provider=only_ours)
        self._monitor = self.socket.get_monitor_socket(FAILED | zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED)
        self._monitor_fd = self._monitor.FD
        super()._bind(context, address, key)

    def close(self, linger: int) -> None:
        self._is_closing = True
        if self._thread is not None:
            self._thread.join()
            self._handle_events()
        super().close(linger)
        for connection in [*self._by_fd.values(), *self._by_token.values()]:
            connection.close()
        if self._authenticator is not None:
            self._authenticator.stop()

    # ---- messages

    def send(self, token: bytes, frames: Frames) -> bool:
        is_sent = super().send(token, frames)
        if is_sent and token in self._by_token:
            self._by_token[token].written += _size_on_wire(frames)
        return is_sent

    def admit(self, token: bytes, name: str) -> None:
        self._by_token[token].name = name

    def allow(self, token: bytes, size: int) -> None:
        if token in self._by_token:
            self._by_token[token].allowance = size

    def record_fault(self, token: bytes) -> None:
        if (connection := self._by_token.get(token)) is not None:
            connection.faults += 1
            if connection.faults > FAULTS:
                self._cut(connection, f"more than {FAULTS} of its messages were malformed")

    def received(self) -> Iterator[tuple[bytes, Frames]]:
        arrived, most = self._arrived(float("inf")), READ_BYTES
        while most > 0 and (message := self._ahead.popleft() if self._ahead else next(arrived, None)) is not None:
            connection, token, frames = message
            connection.read, connection.ahead = connection.read + (size := _size_on_wire(frames)), 0
            if not connection.name and connection.read > STRANGER_BYTES:
                self._cut(connection, TOO_MUCH)
            if not connection.is_cut:
                most -= size
                yield token, frames
        if most <= 0:
            return
        # All has been read; the rest of what was counted was a message without its end.
        for token, connection in list(self._by_token.items()):
            if connection.ended is not None and time.monotonic() - connection.ended > 1.0:
                del self._by_token[token]

    def has_more(self) -> bool:
        return bool(self._ahead) or super().has_more()

    def _arrived(self, seconds: float) -> Iterator[tuple[Connection, bytes, Frames]]:
        """Read messages, and discard those of connections that were cut off, for some time."""
        end = time.monotonic() + seconds
        for token, frames in super().received():
            connection = self._by_token.get(token) or self._find(token, frames[0])
            if connection is not None and connection.is_cut:
                connection.read += _size_on_wire(frames)
            elif connection is not None:
                yield connection, token, frames
            if time.monotonic() > end:
                break

    def _find(self, token: bytes, frame: Any) -> Connection | None:
        """The connection that has brought the first frame of a session; None if it has ended."""
        self._handle_events()
        fd = frame.get(zmq.SRCFD)
        connection = self._by_fd.get(fd)
        with suppress(OSError):
            if connection is not None and os.fstat(fd).st_ino == connection.inode:
                self._by_token[token] = connection
                return connection
        return None

    # ---- limits

    def _watch(self) -> None:
        """Body of the thread."""
        while not self._is_closing:
            has_strangers = not all(each.name for each in list(self._by_fd.values()))
            wait([self._monitor_fd], (PERIOD_STRANGERS if has_strangers else PERIOD) if self._by_fd else 0.2)
            if not self._is_closing and self._lock.acquire(timeout=PERIOD):
                try:
                    self._handle_events()
                    self._check()
                finally:
                    self._lock.release()

    def _handle_events(self) -> None:
        for event in self._events():
            kind, fd = event["event"], event["value"]
            if kind & FAILED:
                self.log.warning("a connection was refused: another key, or no node")
            elif kind == zmq.Event.ACCEPTED:
                with suppress(OSError):  # it has ended
                    self._by_fd[fd] = Connection(fd, self._port)
                    self._check_number(self._by_fd[fd])
            elif (connection := self._by_fd.pop(fd, None)) is not None:
                connection.close()
                connection.is_cut |= not connection.name  # last words are a node's
                self._must_discard |= connection.is_cut and connection.counters()[1] > HANDSHAKE_BYTES

    def _check_number(self, newest: Connection) -> None:
        strangers = [each for each in self._by_fd.values() if not each.name and not each.is_cut]
        if self._is_full:
            self._cut(newest, "too much waits to be discarded")
        if len(strangers) > STRANGERS:
            self._cut(strangers[0], "there are too many")
        if len(self._by_fd) > self.endpoint.max_connections:
            self._cut(newest, f"there are more than {self.endpoint.max_connections}")

    def _check(self) -> None:
        """Shut down the connections that are beyond their limits, and discard what they have sent."""
        waiting = {each: each.waiting() for each in {*self._by_fd.values(), *self._by_token.values()}}
        # The more of the room is taken, the less a node may take of it: few that take much leave enough for the others.
        room, now = self.endpoint.max_waiting - sum(waiting.values()), time.monotonic()
        self._is_full, limit = room < 0, max(room // 2, STRANGER_BYTES)
        for each, size in waiting.items():
            if each.name and size > limit:
                self._cut(each, f"{size // 2**10:,} KiB wait, more than it may send at once, or leave unread")
            elif not each.name and each.counters()[1] > STRANGER_BYTES:
                self._cut(each, TOO_MUCH)
            elif not each.name and now - each.since > STRANGER_SECONDS:
                self._cut(each, f"it has not joined within {STRANGER_SECONDS:g} s")
        if self._must_discard or self._is_full:
            self._must_discard = False
            for message in self._arrived(DISCARD_SECONDS):
                self._ahead.append(message)
                message[0].ahead += 1
                if message[0].ahead > AHEAD:
                    self._cut(message[0], f"more than {AHEAD} of its messages wait")

    def _cut(self, connection: Connection, why: str) -> None:
        """Shut a connection down, unless that has been done; what it has sent is discarded from now on."""
        if connection.is_cut:
            return
        connection.is_cut = True
        self._must_discard |= connection.counters()[1] > HANDSHAKE_BYTES
        with suppress(OSError):
            connection.handle.shutdown(socket.SHUT_RDWR)
        who = "a node of another machine" if connection.name else "a connection that has not joined"
        self.log.warning(f"{who} was cut off", f"{connection.name} {why}".strip())


def _size_on_wire(frames: Frames) -> int:
    """Bytes of frames in encrypted form: 33 of CURVE each, and 2 or 9 of zmq's own header."""
    sizes = [len(frame) + 33 for frame in frames]
    return sum(sizes) + sum(2 if size < 256 else 9 for size in sizes)
