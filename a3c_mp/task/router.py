"""The routers of nodes, which send events to each other: the `Hub` of node 0, and a `Spoke` of each other node.

The nodes of a task form a star: node 0 has a connection to each of the others. zmq's own thread moves the bytes,
encrypts them and sends heartbeats; this code runs when the node sends, or looks at its messages.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from contextlib import suppress
from multiprocessing import connection

import zmq

from a3c_mp.errors import ConfigError
from a3c_mp.processes.program import differences
from a3c_mp.task.endpoint import COPY_IT, FLAG, Endpoint, KeyPair, is_tcp, node_name
from a3c_mp.task.limits import LimitedListener
from a3c_mp.task.links import Link, Router
from a3c_mp.task.sockets import Dialer, Frames, Listener
from a3c_mp.task.wire import JOINED, WireError, encode

HELLO, WELCOME, REFUSED = "node.hello", "node.welcome", "node.refused"
"""to join: the node that dials says who it is, and is let in or not"""
UNFIT = "node.unfit"  # of a node that has found that it cannot take part: (why), for the log of node 0
DROPPED = "node.dropped"  # to a node that did not read: it has to join again

WELCOME_SECONDS = 10.0  # longest wait for node 0 over TCP, where authentication fails without a word
LOCAL_WELCOME_SECONDS = 60.0  # the same on this machine, where it may be busy with its start
PROBE_SECONDS = 0.5  # between two looks whether nodes are gone
BAD_KEYS = 3  # handshakes that fail in a row, before the first success, until the key counts as wrong


class Hub(Router):
    """The router of node 0: lets other nodes in, and names them."""

    def __init__(self, endpoint: Endpoint, log: logging.Logger | None = None):
        super().__init__(endpoint, log)
        self._dropped: dict[bytes, Listener] = {}  # sessions of nodes that did not read
        self._numbers = itertools.count(endpoint.num_nodes)  # of nodes that join
        self._probed = 0.0

    @property
    def addresses(self) -> list[str]:
        return [port.address for port in self._ports]

    def _open(self, key: KeyPair | None) -> None:
        for address in self.endpoint.binds:
            if key is not None and is_tcp(address):
                self._ports.append(LimitedListener(self._context, self.endpoint, address, key, self._lock))
            else:
                self._ports.append(Listener(self._context, address))

    def _send(self, token: bytes, link: Link, frames: Frames) -> None:
        try:
            link.port.send(token, frames)
        except zmq.Again:
            self.log.warning("a node does not read; dropped with what waited for it", link.name)
            self._end(token)
            self._dropped[token] = link.port

    def _read(self) -> None:
        lost = self._find_lost() if time.monotonic() - self._probed > PROBE_SECONDS else []
        for port in self._ports:
            while port.warnings:
                self.log.warning(*port.warnings.popleft())
        have_read_all = [self._read_port(port) for port in self._ports]
        if all(have_read_all):
            for token in lost:
                self._end(token)

    def _find_lost(self) -> list[bytes]:
        """Tokens of the sessions that have ended; what has arrived in them can still be read."""
        self._probed, lost = time.monotonic(), []
        # zmq does not report the end of a session, but an empty message to a node that is gone fails.
        for token, link in self._links.items():
            with suppress(zmq.Again):  # it does not read, and is dropped with the next real message
                if not link.port.send(token, [b""]):
                    lost.append(token)
        for token, port in list(self._dropped.items()):
            with suppress(zmq.Again):
                port.send(token, encode(DROPPED, []))
                del self._dropped[token]
        return lost

    def _on_protocol(self, port: Listener, token: bytes, event: str, args: list) -> None:
        """Let a node in, at its hello."""
        if event == UNFIT and token in self._links:
            [why] = args
            self.log.warning("a node with another environment was refused", why)
            return
        if event != HELLO or token in self._links:
            raise WireError(f"unexpected {event[:20]!r}")
        number, theirs, instance = args
        if not isinstance(theirs, dict):
            raise WireError("its versions are malformed")
        fatal, harmless = differences(theirs, self.endpoint.versions)
        if fatal:
            self.log.warning("a node with other versions was refused", fatal)
            port.send(token, encode(REFUSED, [f"it has {fatal}"]))
            return
        name = self._choose_name(port, number, instance)
        for older, link in list(self._links.items()):  # of a process that was killed, or has lost its connection
            if link.name == name:
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

    def report_unfit(self, why: str) -> None:
        """Report to node 0 why this node cannot take part; raises ConfigError."""
        self.send(UNFIT, why)
        raise ConfigError("attach-to", self.endpoint.dials, f"this node is refused: {why}", "install the same versions")

    def _open(self, key: KeyPair | None) -> None:
        self._key, self._instance, self._failures = key, os.urandom(8).hex(), 0
        self._dial()
        address, local = self.endpoint.dials, not is_tcp(self.endpoint.dials)
        seconds = LOCAL_WELCOME_SECONDS if local else WELCOME_SECONDS
        deadline = time.monotonic() + seconds
        while not self.peers:
            is_late = time.monotonic() > deadline
            if is_late and self._ports[0].is_connected():
                self.log.warning(f"{address} is busy: waiting until its node 0 looks at messages")
                deadline = math.inf
            elif is_late:
                why, fix = f"no node lets this one in within {seconds:g} s", "start the node that listens there first"
                raise ConfigError("attach-to", address, why, f"{fix}, with the same key")
            if self._failures >= BAD_KEYS and not local:
                raise ConfigError(FLAG, self.endpoint.key_file, f"the node at {address} has another one", COPY_IT)
            connection.wait(self.files, PROBE_SECONDS / 10)
            self._read()
        self._received = [message for message in self._received if message.event != JOINED]

    def _dial(self) -> None:
        self._ports = [dialer := Dialer(self._context, self.endpoint.dials, self._key)]
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
