"""The nodes that are connected to this one: how they join, which names they get, and how they leave."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from hmac import compare_digest
from typing import Any, NamedTuple, Protocol

import zmq

from a3c_mp.task.endpoint import Endpoint, Peer, node_name
from a3c_mp.task.limited_log import RateLimitedLog
from a3c_mp.task.link import BacklogFull, Frames, Link
from a3c_mp.task.wire import Envelope, encode, encode_envelope

HELLO, WELCOME, REFUSED = "hello", "welcome", "refused"
"""to join: the node that dials says who it is, and is let in or not"""
ACK, DROPPED = "ack", "dropped"
"""flow control; they overtake what waits in a backlog"""
PEER_JOINED, PEER_LEFT, GOODBYE = "joined", "left", "goodbye"
"""a hub tells its spokes of each other; a node says that it ends"""
MAX_NUMBER = 2**31


class Port(Protocol):
    """A socket, as nodes that join through it need it."""

    def send(self, token: bytes, frames: Frames) -> None: ...


class Hooks(NamedTuple):
    """What the router does when something happens; called on its thread."""

    deliver: Callable[[Envelope, Sequence[zmq.Frame], bytes, bool], None]
    """message for this node: envelope, frames, token of its session, whether the frames are sent on as well"""
    batch: Callable[[], None]
    """messages have been delivered"""
    joined: Callable[[Peer], None]
    left: Callable[[Peer], None]
    discard: Callable[[bytes], None]
    """this node was dropped: forget what arrived in the session and was not received"""
    is_full: Callable[[], bool]
    """whether too much has been delivered and not received"""
    changed: Callable[[], None]
    """waits for the router are to look again"""


class PeerTable:
    """The table of connected nodes of one router; used on the router's thread, `peers` may be read on any.

    In a star the hub has a link to each spoke, and a spoke has one link, to the hub; it knows the others by name.
    """

    def __init__(self, endpoint: Endpoint, hooks: Hooks, log: RateLimitedLog):
        self.endpoint, self.hooks, self.log = endpoint, hooks, log
        self.number = endpoint.number
        self.greeting, self.num_nodes = endpoint.greeting, endpoint.num_nodes
        self.links: dict[bytes, Link] = {}
        self.peers: dict[str, Peer] = {}
        self.ended: set[bytes] = set()
        """tokens of sessions that have ended, for the dialers"""
        self._instance = os.urandom(8).hex()
        self._next_number = endpoint.num_nodes

    @property
    def own(self) -> Peer:
        return Peer(node_name(self.number), self.endpoint.labels)

    @property
    def is_hub(self) -> bool:
        return self.endpoint.topology == "star" and self.number == 0

    @property
    def is_spoke(self) -> bool:
        return self.endpoint.topology == "star" and not self.is_hub

    def frames(self, kind: str, content: Any) -> Frames:
        return [encode_envelope(Envelope(kind, self.own.name, "*")), *encode(content)]

    def route(self, to: str) -> list[Link]:
        """The links through which a message of this node reaches all nodes that match a pattern."""
        return [link for link in self.links.values() if self.is_spoke or matches(link.peer, to)]

    def send(self, link: Link, frames: Frames) -> None:
        """Send through a link; drop the node if it does not read."""
        try:
            link.send(frames)
        except (BacklogFull, zmq.Again) as error:
            self.log.warning(f"{link.peer.name} does not read; dropped with what waited for it", error)
            self.drop(link)

    def drop(self, link: Link) -> None:
        """End a session that the node itself may still believe in."""
        with suppress(zmq.Again):
            link.transmit(self.frames(DROPPED, None))
        self.end(link.token)

    # ---- joining

    def hello(self) -> Frames:
        """First message of a session, from the node that dials."""
        content = {
            "number": self.number,
            "labels": self.endpoint.labels,
            "versions": self.endpoint.versions,
            "instance": self._instance,
            "secret": self.endpoint.local_secret,
        }
        return self.frames(HELLO, content)

    def admit(self, hello: dict[str, Any], port: Port, token: bytes) -> None:
        """Let a node in that dialled this one. Raises KeyError, TypeError or ValueError for a malformed hello."""
        transmit = partial(port.send, token)
        versions, instance = dict(hello["versions"]), str(hello["instance"])
        if token in self.links:
            raise ValueError("a second hello")
        if differs := _differences(versions, self.endpoint.versions):
            self.log.warning("a node with other versions was refused", differs)
            transmit(self.frames(REFUSED, f"it has {differs}"))
            return
        labels = _labels(hello["labels"])
        number = self._choose_number(hello["number"], instance, str(hello.get("secret", "")))
        peer = Peer(node_name(number), labels)
        if (older := self._link(peer.name)) is not None:  # a process that was killed, or lost its connection
            self.end(older.token)
        others = list(self.peers.values()) if self.is_hub else []
        own = {"node": self.own, "greeting": self.endpoint.greeting, "num_nodes": self.endpoint.num_nodes}
        welcome = {"number": number, "peers": others, **own}
        transmit(self.frames(WELCOME, welcome))
        announced = list(self.links.values()) if self.is_hub else []
        self.links[token] = Link(peer, token, transmit, instance)
        self._add(peer)
        for link in announced:
            self.send(link, self.frames(PEER_JOINED, peer))

    def enter(self, welcome: dict[str, Any], port: Port, token: bytes) -> None:
        """Begin a session with a node that this one dialled. Raises as `admit` does."""
        peer = parse_peer(welcome["node"])
        others = [parse_peer(other) for other in welcome["peers"]]
        if (older := self._link(peer.name)) is not None:
            self.end(older.token)
        if peer.name == node_name(0):
            self.number = _number(welcome["number"])
            self.greeting, self.num_nodes = dict(welcome["greeting"]), _number(welcome["num_nodes"])
        self.links[token] = Link(peer, token, partial(port.send, token))
        for one in (peer, *others):
            self._add(one)

    def announce(self, kind: str, peer: Peer) -> None:
        """A hub says that another spoke has joined or left."""
        if kind == PEER_JOINED:
            self._add(peer)
        else:
            self._remove([peer.name])

    # ---- leaving

    def end(self, token: bytes) -> None:
        """End a session; a spoke that loses its hub loses all nodes."""
        self.ended.add(token)  # also where it ends before a welcome
        if (link := self.links.pop(token, None)) is None:
            return
        self._remove(list(self.peers) if self.is_spoke else [link.peer.name])
        if self.is_hub:
            for other in list(self.links.values()):
                self.send(other, self.frames(PEER_LEFT, link.peer))

    def _add(self, peer: Peer) -> None:
        self.peers = {**self.peers, peer.name: peer}  # a new dict: other threads may be reading the old one
        self.hooks.joined(peer)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.peers:
                peer = self.peers[name]
                self.peers = {other: peer for other, peer in self.peers.items() if other != name}
                self.hooks.left(peer)

    def _link(self, name: str) -> Link | None:
        return next((link for link in self.links.values() if link.peer.name == name), None)

    def _choose_number(self, wanted: Any, instance: str, secret: str) -> int:
        """The number that a node asks for, if it may have it, or the next free one."""
        if wanted is not None:
            number = _number(wanted)
            if number == self.number:
                raise ValueError(f"it calls itself {self.own.name}")
            if number < self.endpoint.num_nodes:  # one that attached to an earlier task may ask for such a number too
                is_free = compare_digest(secret.encode(), self.endpoint.local_secret.encode())
            else:
                link = self._link(node_name(number))
                is_free = link is None or link.instance == instance
            if is_free:
                return number
        while node_name(self._next_number) in self.peers:
            self._next_number += 1
        self._next_number += 1
        return self._next_number - 1


def matches(peer: Peer, pattern: str) -> bool:
    """Whether the name or a label of a node matches an fnmatch pattern."""
    return any(fnmatchcase(text, pattern) for text in (peer.name, *peer.labels))


def parse_peer(content: Any) -> Peer:
    """A node from JSON. Raises TypeError or ValueError."""
    name, labels = content
    if not isinstance(name, str):
        raise TypeError("the name is no text")
    return Peer(name, _labels(labels))


def _labels(content: Any) -> tuple[str, ...]:
    if not isinstance(content, list) or not all(isinstance(label, str) for label in content):
        raise TypeError("labels are no list of texts")
    return tuple(content)


def _number(content: Any) -> int:
    if type(content) is not int or not 0 <= content < MAX_NUMBER:
        raise ValueError("the number of the node is out of range")
    return content


def _differences(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """What the versions of a node that wants to join differ in."""
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    return ", ".join(f"{name} {theirs.get(name)} instead of {ours.get(name)}" for name in names)
