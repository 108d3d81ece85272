"""The router of a node: sends events to other nodes, receives theirs, asks and answers requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.task.endpoint import Endpoint, Peer, is_tcp
from a3c_mp.task.events import JOINED, LEFT
from a3c_mp.task.inbox import Inbox
from a3c_mp.task.limited_log import RateLimitedLog
from a3c_mp.task.peers import Hooks
from a3c_mp.task.rpc import Requests
from a3c_mp.task.switch import ANSWER, EVENT, REQUEST, Switch
from a3c_mp.task.wire import Envelope, Message, WireError, decode, encode, num_bytes

WELCOME_SECONDS = 10.0
"""longest wait for the welcome of a node that is reached over TCP: authentication fails without a word"""
LOCAL_WELCOME_SECONDS = 60.0
"""the same on this machine, where the other node may still be starting"""


class Router:
    """Connects a node to the others of its star or mesh; to be used in a `with` block.

    Messages arrive in the order in which their sender sent them, each once, as long as the two stay connected. A node
    that leaves and joins again begins a new session: what was under way is lost.

    Args:
        endpoint: settings of the node.
        log: for what other nodes do wrong.
    """

    def __init__(self, endpoint: Endpoint, log: logging.Logger | None = None):
        self.endpoint = endpoint
        self.log = log or logging.getLogger(__name__)
        self._inbox = Inbox()
        self._requests = Requests(self._post, lambda: self.peers, RateLimitedLog(self.log))
        self._callbacks: dict[str, list[Callable[..., None]]] = {"arrival": [], "join": [], "leave": []}
        self._changed = threading.Condition()
        self._has_arrived = False
        self._switch: Switch | None = None

    def __enter__(self) -> Router:
        """Bind and connect; returns once node 0 has let this node in.

        Raises:
            ConfigError: an address or the key is invalid, or node 0 refuses this node.
            WorkerError: node 0 does not answer, on this machine.
        """
        if not self.is_active:
            return self
        hooks = Hooks(
            deliver=self._deliver,
            batch=self._end_batch,
            joined=self._on_joined,
            left=self._on_left,
            discard=self._inbox.discard,
            is_full=lambda: self._inbox.is_full,
            changed=self._on_change,
        )
        self._switch = Switch(self.endpoint, self.endpoint.load_key(), hooks, self.log)
        self._switch.start()
        try:
            self._wait_for_welcome(self._switch)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Send what is under way, for a few seconds at most, and say goodbye."""
        if self._switch is not None:
            self._switch.stop()
        self._requests.fail("this node has ended")
        self._inbox.close()

    @property
    def is_active(self) -> bool:
        """Whether there are other nodes."""
        return self.endpoint.topology != "alone"

    @property
    def name(self) -> str:
        return self._own.name

    @property
    def labels(self) -> tuple[str, ...]:
        return self.endpoint.labels

    @property
    def peers(self) -> dict[str, Peer]:
        """The nodes that are connected now, by name."""
        return {} if self._switch is None else dict(self._switch.table.peers)

    @property
    def greeting(self) -> dict[str, Any]:
        """What node 0 sends to each node that joins."""
        return self.endpoint.greeting if self._switch is None else self._switch.table.greeting

    @property
    def num_nodes(self) -> int:
        """Nodes that were started together with node 0; those that have joined have numbers from here on."""
        return self.endpoint.num_nodes if self._switch is None else self._switch.table.num_nodes

    @property
    def addresses(self) -> list[str]:
        """Bound addresses; for TCP port 0 the port that was chosen."""
        ports = [] if self._switch is None else self._switch.ports
        return [address for port in ports for address in getattr(port, "addresses", [])]

    @property
    def wake_fd(self) -> int:
        """A file descriptor that is readable while there are messages to receive."""
        return self._inbox.wake_fd

    def send(self, event: str, *args: Any, to: str = "*") -> None:
        """Send an event to all other nodes whose name or label matches the pattern `to`, from any thread.

        Values are copied. Nodes that do not read are dropped, so this never waits for them.

        Raises:
            TypeError: a value is no JSON, torch tensor or numpy array.
            ValueError: the message is too large.
        """
        self._post(EVENT, [event, args], to)

    def receive(self) -> list[Message]:
        """All messages that have arrived since the last call, in order of arrival."""
        self._check()
        was_full = self._inbox.is_full
        messages = self._inbox.take()
        if was_full and self._switch is not None:
            self._switch.wake()  # it acknowledges what it has held back
        return messages

    def insert(self, message: Message) -> None:
        """Add a message to those that this node receives, in order; for callbacks on the router's thread."""
        self._inbox.put(message, 0, b"")
        self._has_arrived = True

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Have a function called on the router's thread after messages have arrived."""
        self._callbacks["arrival"].append(callback)

    def on_join(self, callback: Callable[[Peer], None]) -> None:
        """Have a function called on the router's thread when a node has joined."""
        self._callbacks["join"].append(callback)

    def on_leave(self, callback: Callable[[Peer], None]) -> None:
        """Have a function called on the router's thread when a node has ended, was lost or was dropped."""
        self._callbacks["leave"].append(callback)

    def serve(self, name: str, handler: Callable[..., Any]) -> None:
        """Answer requests of other nodes: `handler(*args)` runs on the router's thread, and its result is sent back."""
        self._requests.serve(name, handler)

    def request(self, name: str, *args: Any, to: str, timeout: float, beat: Callable[[], None] = lambda: None) -> Any:
        """Ask a node, the first that matches the pattern `to`, and wait for its answer.

        Args:
            timeout: longest wait, in seconds.
            beat: called several times a second meanwhile.

        Raises:
            TimeoutError: no answer in time.
            RequestError: no node matches, it left, or its handler raised an exception.
        """
        if self._switch is not None and self._switch.is_own_thread():
            raise RuntimeError(f"request {name!r} on the router's thread would wait for itself")
        return self._requests.ask(name, args, to, timeout, beat)

    @property
    def _own(self) -> Peer:
        if self._switch is None:
            return Peer(f"node.{self.endpoint.number or 0}", self.endpoint.labels)
        return self._switch.table.own

    @property
    def _error(self) -> BaseException | None:
        return None if self._switch is None else self._switch.error

    def _check(self) -> None:
        """Raise what has ended the router's thread."""
        if self._error is not None:
            raise self._error

    def _post(self, kind: str, content: Any, to: str, request: int = 0) -> None:
        self._check()
        if self._switch is not None:
            self._switch.post(Envelope(kind, "", to, request), encode(content))

    def _wait_for_welcome(self, switch: Switch) -> None:
        address = self.endpoint.dials[0] if self.endpoint.dials else ""
        seconds = WELCOME_SECONDS if is_tcp(address) else LOCAL_WELCOME_SECONDS
        with self._changed:
            self._changed.wait_for(lambda: switch.is_ready or switch.error, seconds)
        self._check()
        if not switch.is_ready:
            why = f"no node lets this one in within {seconds:g} s"
            if is_tcp(address):
                fix = "start the node that listens there first, with the same key"
                raise ConfigError("attach-to", address, why, fix)
            raise WorkerError(f"{self.name}: {why}, at {address}")

    # ---- on the router's thread

    def _deliver(self, envelope: Envelope, frames: Sequence[zmq.Frame], token: bytes, shared: bool) -> None:
        name, args = decode(frames, copy=shared)
        if envelope.kind == ANSWER:
            self._requests.receive(envelope, name, args)
        elif not isinstance(name, str) or not isinstance(args, list):
            raise WireError("malformed message")
        elif name in (JOINED, LEFT):
            raise WireError(f"{name} is an event of this node's own")
        elif envelope.kind == REQUEST:
            self._requests.answer(envelope, name, args)
        else:
            self._inbox.put(Message(envelope.sender, name, args), num_bytes(frames), token)
            self._has_arrived = True

    def _end_batch(self) -> None:
        if self._has_arrived:
            self._has_arrived = False
            self._call("arrival")

    def _on_joined(self, peer: Peer) -> None:
        self._on_change()
        self._call("join", peer)

    def _on_left(self, peer: Peer) -> None:
        self._requests.fail("it has left", peer)
        self._on_change()
        self._call("leave", peer)

    def _on_change(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._error is not None:
            self._requests.fail(str(self._error))
            self._inbox.wake()  # a wait there ends with the error

    def _call(self, kind: str, *args: Any) -> None:
        for callback in self._callbacks[kind]:
            try:
                callback(*args)
            except Exception:
                self.log.exception(f"on_{kind} of {self.name} failed")
