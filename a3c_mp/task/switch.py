"""The thread that owns a node's sockets: it sends, receives, relays, acknowledges, and waits for nothing else."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import zmq

from a3c_mp.errors import ConfigError
from a3c_mp.task.endpoint import Endpoint, is_tcp
from a3c_mp.task.keys import COPY_IT, FLAG, KeyPair
from a3c_mp.task.limited_log import RateLimitedLog
from a3c_mp.task.link import Frames, Link
from a3c_mp.task.peers import (
    ACK,
    DROPPED,
    GOODBYE,
    HELLO,
    PEER_JOINED,
    PEER_LEFT,
    REFUSED,
    WELCOME,
    Hooks,
    PeerTable,
    matches,
    parse_peer,
)
from a3c_mp.task.sockets import Dialer, Listener
from a3c_mp.task.wire import Envelope, WireError, decode, decode_envelope, encode_envelope

EVENT, REQUEST, ANSWER = "event", "request", "answer"
"""kinds of messages that are for the router, not for the switch"""
OUTBOX = 2000
"""messages that other threads have sent and this one has not taken yet; beyond, `post` waits for it"""
CLOSE_SECONDS = 2.0
"""longest wait at the end for nodes to read what waits for them"""
LINGER_MS = 1500
"""longest wait after that for the operating system to take what is on its way"""
STUCK_SECONDS = 5.0
"""longest wait at the end for a handler that runs on the thread; the thread ends with the process"""
BAD_KEYS = 3
"""handshakes over TCP that fail in a row, before the first success, until the key counts as wrong"""


class Switch:
    """Moves messages between this node's router and other nodes.

    Args:
        endpoint: settings of the node.
        key: for TCP.
        hooks: called on the switch's thread.
        log: for what other nodes do wrong.
    """

    def __init__(self, endpoint: Endpoint, key: KeyPair | None, hooks: Hooks, log: logging.Logger):
        self.endpoint, self.key, self.hooks = endpoint, key, hooks
        self.log = RateLimitedLog(log)
        self.table = PeerTable(endpoint, hooks, self.log)
        self.ports: list[Listener | Dialer] = []
        self.is_ready = False
        """bound, and welcomed by node 0"""
        self.error: BaseException | None = None
        """what has ended the thread"""
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._outbox = _Outbox()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once what was sent is on its way or `CLOSE_SECONDS` have passed."""
        self._outbox.stop()
        self._thread.join(CLOSE_SECONDS + LINGER_MS / 1000 + STUCK_SECONDS)
        if not self._thread.is_alive():
            os.close(self._outbox.wake_fd)

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, envelope: Envelope, content: list[zmq.Frame]) -> None:
        """Send a message, from any thread, to all other nodes that match `envelope.to` then."""
        self._outbox.put((envelope, content), wait=not self.is_own_thread())

    def wake(self) -> None:
        """Have the thread look again at what it has held back."""
        self._outbox.wake()

    # ---- on the thread

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._open(context)
            self._loop()
            for link in list(self.table.links.values()):
                with suppress(zmq.Again):
                    link.transmit(self.table.frames(GOODBYE, None))
        except BaseException as error:
            self.error = error
        finally:
            self._outbox.close()
            for port in self.ports:
                port.close(0 if self.error else LINGER_MS)
            context.term()
            self.table.peers = {}
            self.hooks.changed()

    def _open(self, context: zmq.Context) -> None:
        if self.endpoint.binds:
            self.ports.append(Listener(context, self.endpoint.binds, self.key))
        for address in self.endpoint.dials:
            dialer = Dialer(context, address, self.key)
            self.ports.append(dialer)
            dialer.send(dialer.token, self.table.hello())
        self.is_ready = not self.endpoint.dials
        self.hooks.changed()

    def _loop(self) -> None:
        deadline = None
        poller = self._poller()
        while True:
            rest = None if deadline is None else max(round(1000 * (deadline - time.monotonic())), 0)
            poller.poll(rest)
            for envelope, content in self._outbox.take():
                self._send(envelope, content)
            for port in self.ports:
                self._read(port)
            self.hooks.batch()
            self._acknowledge()
            if self._renew():
                poller = self._poller()
            if self._outbox.is_stopped:
                deadline = deadline or time.monotonic() + CLOSE_SECONDS
                idle = all(link.is_idle for link in self.table.links.values()) and self._outbox.is_empty
                if idle or time.monotonic() >= deadline:
                    return

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._outbox.wake_fd, zmq.POLLIN)
        for port in self.ports:
            poller.register(port.socket, zmq.POLLIN)
            poller.register(port.monitor, zmq.POLLIN)
        return poller

    def _read(self, port: Listener | Dialer) -> None:
        arrived, gone, refused = port.read()
        for token, frames in arrived:
            try:
                self._handle(port, token, frames)
            except (WireError, ValueError, TypeError, KeyError) as error:
                link = self.table.links.get(token)
                sender = "a node that has not joined" if link is None else link.peer.name
                self.log.warning(f"message from {sender} dropped", error)
            except zmq.Again:  # it does not read what it is to acknowledge
                self.table.end(token)
        for token in gone:
            link = self.table.links.get(token)
            if link is None or isinstance(port, Dialer):
                self.table.end(token)
            else:  # it may be the end of an older connection with the same descriptor: then the node joins again
                self.table.drop(link)
        if refused:
            self.log.warning("a connection was refused: another key, or no node", count=refused)
        if isinstance(port, Dialer) and port.failures >= BAD_KEYS and not self.is_ready and is_tcp(port.address):
            raise ConfigError(FLAG, self.endpoint.key_file, f"the node at {port.address} has another one", COPY_IT)

    def _handle(self, port: Listener | Dialer, token: bytes, frames: Frames) -> None:
        envelope = decode_envelope(frames[0])
        link = self.table.links.get(token)
        if isinstance(port, Listener) and envelope.kind == HELLO:
            self.table.admit(decode(frames[1:]), port, token)
        elif isinstance(port, Dialer) and envelope.kind in (WELCOME, REFUSED) and link is None:
            self._joined(port, envelope.kind, decode(frames[1:]))
        elif link is None:
            return  # of a session that has ended
        elif envelope.kind == ACK:
            messages, size = decode(frames[1:])
            link.acknowledge(messages, size)
        elif envelope.kind == DROPPED:
            self.hooks.discard(token)
            self.table.end(token)
        else:
            link.count(frames)
            self._take(link, envelope, frames)

    def _joined(self, port: Dialer, kind: str, content: Any) -> None:
        if kind == REFUSED:
            raise ConfigError(
                "attach-to", port.address, f"this node is refused: {content}", "install the same versions"
            )
        self.table.enter(content, port, port.token)
        self.is_ready |= port.address == self.endpoint.dials[0]
        self.hooks.changed()

    def _take(self, link: Link, envelope: Envelope, frames: Frames) -> None:
        """A message from a link: for this node, and from a hub on to others."""
        table = self.table
        if envelope.kind == GOODBYE:
            table.end(link.token)
        elif envelope.kind in (PEER_JOINED, PEER_LEFT) and table.is_spoke:
            table.announce(envelope.kind, parse_peer(decode(frames[1:])))
        elif envelope.kind in (EVENT, REQUEST, ANSWER):
            if not table.is_spoke:
                envelope = envelope._replace(sender=link.peer.name)
            others = [other for other in table.route(envelope.to) if other is not link] if table.is_hub else []
            for other in others:
                table.send(other, [encode_envelope(envelope), *frames[1:]])
            if matches(table.own, envelope.to):
                self.hooks.deliver(envelope, frames[1:], link.token, bool(others))
        else:
            raise WireError(f"unexpected kind {envelope.kind[:20]!r}")

    def _send(self, envelope: Envelope, content: list[zmq.Frame]) -> None:
        frames = [encode_envelope(envelope._replace(sender=self.table.own.name)), *content]
        for link in self.table.route(envelope.to):
            self.table.send(link, list(frames))

    def _renew(self) -> bool:
        """Begin new sessions where this node dials and a session has ended; returns whether there was one."""
        ended = [port for port in self.ports if isinstance(port, Dialer) and port.token in self.table.ended]
        self.table.ended.clear()
        for port in ended:
            port.renew()
            port.send(port.token, self.table.hello())
        return bool(ended)

    def _acknowledge(self) -> None:
        if self.hooks.is_full():
            return
        for link in list(self.table.links.values()):
            if due := link.take_due():
                try:
                    link.transmit(self.table.frames(ACK, due))
                except zmq.Again:
                    self.table.drop(link)


class _Outbox:
    """What other threads have sent, until the switch's thread takes it."""

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """readable when there is something to do"""
        self.is_stopped = self._is_closed = False
        self._parcels: deque[tuple[Envelope, list[zmq.Frame]]] = deque()
        self._changed = threading.Condition()

    @property
    def is_empty(self) -> bool:
        return not self._parcels

    def put(self, parcel: tuple[Envelope, list[zmq.Frame]], wait: bool) -> None:
        """Add a message; `wait` while there are too many. After the end they are dropped."""
        with self._changed:
            while wait and len(self._parcels) >= OUTBOX and not self._is_closed:
                self._changed.wait()
            if not self._is_closed:
                self._parcels.append(parcel)
                os.eventfd_write(self.wake_fd, 1)

    def take(self) -> list[tuple[Envelope, list[zmq.Frame]]]:
        with self._changed:
            with suppress(BlockingIOError):
                os.eventfd_read(self.wake_fd)
            parcels = list(self._parcels)
            self._parcels.clear()
            self._changed.notify_all()
        return parcels

    def wake(self) -> None:
        with self._changed:
            if not self._is_closed:
                os.eventfd_write(self.wake_fd, 1)

    def stop(self) -> None:
        """Have the thread end once all is sent."""
        self.is_stopped = True
        self.wake()

    def close(self) -> None:
        """Nobody takes anything any more."""
        with self._changed:
            self._is_closed = True
            self._parcels.clear()
            self._changed.notify_all()
