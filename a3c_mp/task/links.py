"""The links of a node: how other nodes join it, which names they get, and how they leave."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import zmq

from a3c_mp.errors import ConfigError
from a3c_mp.task.endpoint import Endpoint, node_name
from a3c_mp.task.sockets import Dialer, Frames, Listener
from a3c_mp.task.wire import JOINED, LEFT, encode

HELLO, WELCOME, REFUSED = "node.hello", "node.welcome", "node.refused"
"""to join: the node that dials says who it is, and is let in or not"""
DROPPED = "node.dropped"
"""to a node that did not read: it has to join again"""


class RateLimitedLog:
    """Logs warnings that may repeat without end: the 1st, 2nd, 4th, 8th, ... time.

    Other nodes cause them, so details in their words are shortened to one line, and do not count as another warning.
    """

    def __init__(self, log: logging.Logger):
        self._log = log
        self._counts: Counter[str] = Counter()

    def warning(self, text: str, detail: object = "") -> None:
        """Count a warning, and log it with the detail if its count is a power of two."""
        self._counts[text] += 1
        if (total := self._counts[text]).bit_count() == 1:
            self._log.warning(f"{text} ({total} so far)" + (f": {str(detail)!r:.200}" if detail else ""))


class Link(NamedTuple):
    """A session with another node, from its welcome to its end."""

    name: str
    labels: tuple[str, ...]
    port: Listener | Dialer
    token: bytes
    instance: str  # random id of the node's process, the same when it joins again

    def matches(self, pattern: str) -> bool:
        """Whether the name or a label matches a pattern (as of file names)."""
        return any(fnmatchcase(text, pattern) for text in (self.name, *self.labels))


class Links:
    """The nodes that are connected to this one: at node 0 all others, elsewhere node 0.

    `on_change` is called with (name of a node, `JOINED` or `LEFT`).
    """

    def __init__(self, endpoint: Endpoint, on_change: Callable[[str, str], None], log: RateLimitedLog):
        self.endpoint, self.on_change, self.log = endpoint, on_change, log
        self.name, self.num_nodes, self.greeting = endpoint.name, endpoint.num_nodes, endpoint.greeting
        self.by_token: dict[bytes, Link] = {}
        self._dropped: dict[bytes, Listener | Dialer] = {}  # sessions of nodes that did not read
        self._instance = os.urandom(8).hex()
        self._next_number = endpoint.num_nodes

    def send(self, link: Link, frames: Frames) -> None:
        """Send through a link; a node that does not read is dropped."""
        try:
            link.port.send(link.token, frames)
        except zmq.Again:
            self.log.warning(f"{link.name} does not read; dropped with what waited for it")
            self.end(link.token)
            self._dropped[link.token] = link.port

    # ---- joining

    def hello(self) -> Frames:
        """First message of a session, from the node that dials."""
        return encode(HELLO, [self.endpoint.number, self.endpoint.labels, self.endpoint.versions, self._instance])

    def admit(self, port: Listener, token: bytes, number: int, labels: list, theirs: dict, instance: str) -> None:
        """Let a node in, at its hello. Raises TypeError or ValueError for a malformed one."""
        ours = self.endpoint.versions
        if token in self.by_token or not (isinstance(labels, list) and isinstance(theirs, dict)):
            raise ValueError("a second hello, or a malformed one")
        if not all(isinstance(text, str) for text in (*labels, instance)):
            raise ValueError("labels are no texts")
        names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if differs := ", ".join(f"{name} {theirs.get(name)} instead of {ours.get(name)}" for name in names):
            self.log.warning("a node with other versions was refused", differs)
            port.send(token, encode(REFUSED, [f"it has {differs}"]))
            return
        name = self._choose_name(port, number, instance)
        for older in list(self.by_token.values()):  # of a process that was killed, or has lost its connection
            if older.name == name:
                self.end(older.token)
        if port.send(token, encode(WELCOME, [name, self.greeting, self.num_nodes])):
            self.by_token[token] = Link(name, tuple(labels), port, token, instance)
            self.on_change(name, JOINED)

    def enter(self, port: Dialer, event: str, *answer: Any) -> None:
        """Begin a session with node 0, which has answered. Raises ConfigError if it refuses this node."""
        if event == REFUSED:
            why = f"this node is refused: {answer[0]}"
            raise ConfigError("attach-to", port.address, why, "install the same versions")
        self.name, self.greeting, self.num_nodes = answer
        self.by_token[port.token] = Link(node_name(0), (), port, port.token, "")
        self.on_change(node_name(0), JOINED)

    def _choose_name(self, port: Listener, number: int, instance: str) -> str:
        """A node that was started by node 0 keeps its number; others get the next one, or theirs if they come back."""
        if port.is_local:
            if type(number) is not int or not 0 < number < self.num_nodes:
                raise ValueError("the number of the node is out of range")
            return node_name(number)
        for link in self.by_token.values():
            if link.instance == instance and not link.port.is_local:
                return link.name
        self._next_number += 1
        return node_name(self._next_number - 1)

    # ---- leaving

    def end(self, token: bytes) -> None:
        """End a session."""
        self._dropped.pop(token, None)
        if (link := self.by_token.pop(token, None)) is not None:
            self.on_change(link.name, LEFT)

    def find_lost(self) -> list[bytes]:
        """At node 0: tokens of the sessions that have ended; what has arrived in them can still be read."""
        lost = []
        for token, port in [*((link.token, link.port) for link in self.by_token.values()), *self._dropped.items()]:
            try:  # zmq does not report the end of a session, but an empty message to a node that is gone fails
                if not port.send(token, encode(DROPPED, []) if token in self._dropped else [b""]):
                    lost.append(token)
                self._dropped.pop(token, None)
            except zmq.Again:
                continue  # a node that does not read is dropped with the next real message
        return lost
