"""The links of a node: how other nodes join it, which names they get, and how they leave."""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import zmq

from a3c_mp.errors import ConfigError
from a3c_mp.task.endpoint import Endpoint, node_name
from a3c_mp.task.limited_log import RateLimitedLog
from a3c_mp.task.sockets import Dialer, Frames, Listener
from a3c_mp.task.wire import JOINED, LEFT, Envelope, encode, encode_envelope

HELLO, WELCOME, REFUSED = "node.hello", "node.welcome", "node.refused"
"""to join: the node that dials says who it is, and is let in or not"""
DROPPED = "node.dropped"
"""to a node that did not read: it has to join again"""


class Link(NamedTuple):
    """A session with another node, from its welcome to its end."""

    name: str
    labels: tuple[str, ...]
    port: Listener | Dialer
    token: bytes
    instance: str  # random id of the node's process, the same when it joins again

    def matches(self, pattern: str) -> bool:
        return matches(pattern, (self.name, *self.labels))


class Links:
    """The nodes that are connected to this one: at node 0 all others, elsewhere node 0.

    Args:
        endpoint: settings of this node.
        on_change: called with (name of a node, `JOINED` or `LEFT`).
        log: for what other nodes do wrong.
    """

    def __init__(self, endpoint: Endpoint, on_change: Callable[[str, str], None], log: RateLimitedLog):
        self.endpoint, self.on_change, self.log = endpoint, on_change, log
        self.name, self.num_nodes, self.greeting = node_name(endpoint.number), endpoint.num_nodes, endpoint.greeting
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
        number, labels, versions = self.endpoint.number, self.endpoint.labels, self.endpoint.versions
        content = {"number": number, "labels": labels, "versions": versions, "instance": self._instance}
        return self._frames(HELLO, content)

    def admit(self, port: Listener, token: bytes, hello: dict[str, Any]) -> None:
        """Let a node in. Raises KeyError, TypeError or ValueError for a malformed hello."""
        theirs, ours, instance = dict(hello["versions"]), self.endpoint.versions, str(hello["instance"])
        labels = tuple(hello["labels"])
        if token in self.by_token or not all(isinstance(label, str) for label in labels):
            raise ValueError("a second hello, or labels that are no text")
        names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if differs := ", ".join(f"{name} {theirs.get(name)} instead of {ours.get(name)}" for name in names):
            self.log.warning("a node with other versions was refused", differs)
            port.send(token, self._frames(REFUSED, f"it has {differs}"))
            return
        name = self._choose_name(port, hello["number"], instance)
        for older in list(self.by_token.values()):  # of a process that was killed, or has lost its connection
            if older.name == name:
                self.end(older.token)
        own = {"name": name, "greeting": self.endpoint.greeting, "num_nodes": self.endpoint.num_nodes}
        if port.send(token, self._frames(WELCOME, own)):
            self.by_token[token] = Link(name, labels, port, token, instance)
            self.on_change(name, JOINED)

    def enter(self, port: Dialer, event: str, content: Any) -> None:
        """Begin a session with node 0, which has answered. Raises ConfigError if it refuses this node."""
        if event == REFUSED:
            why = f"this node is refused: {content}"
            raise ConfigError("attach-to", port.address, why, "install the same versions")
        self.name, self.greeting, self.num_nodes = content["name"], content["greeting"], content["num_nodes"]
        self.by_token[port.token] = Link(node_name(0), (), port, port.token, "")
        self.on_change(node_name(0), JOINED)

    def _choose_name(self, port: Listener, wanted: Any, instance: str) -> str:
        """A node that was started by node 0 keeps its number; others get the next one, or theirs if they come back."""
        if port.is_local:
            if type(wanted) is not int or not 0 < wanted < self.endpoint.num_nodes:
                raise ValueError("the number of the node is out of range")
            return node_name(wanted)
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
                if not port.send(token, self._frames(DROPPED, None) if token in self._dropped else [b""]):
                    lost.append(token)
                self._dropped.pop(token, None)
            except zmq.Again:
                continue  # a node that does not read is dropped with the next real message
        return lost

    def _frames(self, event: str, content: Any) -> Frames:
        return [encode_envelope(Envelope(event, self.name, "*")), *encode(content)]


def matches(pattern: str, texts: tuple[str, ...]) -> bool:
    """Whether a name or label matches a pattern (as of file names)."""
    return any(fnmatchcase(text, pattern) for text in texts)
