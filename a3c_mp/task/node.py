"""Nodes as their processes see them: messages, heartbeats, what to close; node 0 looks after the others too."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from a3c_mp.errors import WorkerError
from a3c_mp.processes.pool import Closing
from a3c_mp.processes.supervised import STARTING
from a3c_mp.processes.supervisor import WAIT_SECONDS, Child, Supervisor
from a3c_mp.task.endpoint import check_tcp, node_name
from a3c_mp.task.events import JOINED, LEFT
from a3c_mp.task.limited_log import RateLimitedLog
from a3c_mp.task.router import Message, Router
from a3c_mp.task.task import FINISH
from a3c_mp.task.wire import WireError

GONE_SECONDS = 5.0
"""a node that has joined ends when node 0's machine has refused connections for so long: node 0 is gone"""
PROBE_SECONDS = 1.0
"""between two attempts to find out why node 0 does not answer, and the longest of them"""
LOST_SECONDS = 2.0
"""time without a connection after which that is logged"""


class Node(Closing):
    """One process of a task: its messages to the other nodes, and its labels; `Task(router=node)` uses it.

    Args:
        router: the connection to the other nodes.
        known_labels: of all nodes, also of those that may join.
        setup: what node 0 has prepared for this node; see `Callbacks.prepare`.
        beat: counts a heartbeat of this process; called with each look at messages.
        report: sends a message, kind and contents, to the process that has started this one.
    """

    def __init__(
        self, router: Router, *, known_labels: Sequence[str] = (), setup: Any = None,
        beat: Callable[[], None] = lambda: None, report: Callable[..., None] = lambda *message: None,
    ):  # fmt: skip
        self.router, self.known_labels, self.setup, self.beat = router, tuple(known_labels), setup, beat
        self.report = report
        self.finishing = False  # the task is asked to end, by another node or its own
        self.log = RateLimitedLog(router.log)
        self._handlers: dict[str, list[tuple[Callable[..., None], Sequence[type] | None, str | None]]] = {}
        self._pending: list[Message] = []  # that are for the task
        self._lock = threading.RLock()
        super().__init__()
        # Among the messages: what a node sent before it left is handled before that, and what it sends after it joined.
        router.on_join(lambda peer: router.insert(Message(peer.name, JOINED, [])))
        router.on_leave(lambda peer: router.insert(Message(peer.name, LEFT, [])))

    def starting(self) -> None:
        """Report that environments are made: until the next heartbeat there is the time that a start may take."""
        self.report(STARTING)

    @property
    def is_active(self) -> bool:
        return self.router.is_active

    @property
    def name(self) -> str:
        return self.router.name

    @property
    def labels(self) -> tuple[str, ...]:
        return self.router.labels

    def send(self, event: str, *args: Any, to: str = "*") -> None:
        """Send an event to the nodes whose name or label matches; for any thread."""
        self.router.send(event, *args, to=to)

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Have a function called on the router's thread when messages have arrived."""
        self.router.on_arrival(callback)

    def handle(
        self, event: str, handler: Callable[..., None], types: Sequence[type] | None = None, sender: str | None = None
    ) -> None:
        """Have an event handled as it is read, by `handler(sender, *args)`, instead of by the task's listeners.

        Args:
            event: its name.
            handler: may raise WireError for a malformed message, which is then dropped with a warning.
            types: of `args`; a message with others is dropped too.
            sender: the only node that may send it; messages of others are dropped too. None: any node.
        """
        with self._lock:
            self._handlers.setdefault(event, []).append((handler, types, sender))
            waiting = [message for message in self._pending if message.event == event]
            self._pending = [message for message in self._pending if message.event != event]
            for message in waiting:
                self._call_handlers(message)

    def receive(self) -> list[Message]:
        """Return the messages for the task that have arrived. Called by the task between two middlewares."""
        self.look()
        with self._lock:
            found, self._pending = self._pending, []
        return found

    def look(self) -> None:
        """Read the messages that have arrived, and handle those that have a handler."""
        self.beat()
        with self._lock:
            for message in self.router.receive():
                if message.event == FINISH:
                    if not self.may_finish(message.sender):
                        self.log.warning(f"end of the task by {message.sender} refused", "it has joined from elsewhere")
                        continue
                    self.finishing = True
                if message.event in self._handlers:
                    self._call_handlers(message)
                elif message.event not in (JOINED, LEFT):
                    self._pending.append(message)

    def may_finish(self, sender: str) -> bool:
        """Whether a node may end the task. One that has joined may not: it leaves."""
        return int(sender.removeprefix("node.")) < self.router.num_nodes

    def _call_handlers(self, message: Message) -> None:
        args = message.args
        try:
            for handler, types, sender in self._handlers[message.event]:
                if sender is not None and message.sender != sender:
                    raise WireError(f"only {sender} may send it")
                if types is not None and not (len(args) == len(types) and all(map(isinstance, args, types))):
                    raise WireError(f"not [{', '.join(kind.__name__ for kind in types)}]")
                handler(message.sender, *args)
        except WireError as error:
            self.log.warning(f"malformed message {message.event} from {message.sender} dropped", error)

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for a message or `WAIT_SECONDS`, whichever comes first, and look."""
        connection.wait([self.router.wake_fd], WAIT_SECONDS)
        self.look()


class JoinedNode(Node):
    """A node that has joined from elsewhere. It waits for node 0 while the link is down, and ends when node 0 has.

    Args:
        router: the connection to node 0.
        log: gets a line when node 0 cannot be reached, and when it can again.
    """

    def __init__(self, router: Router, log: Callable[[str], None]):
        super().__init__(router)
        self._greeting, self._reach = router.greeting, _Reach(router.endpoint.dials[0], log)

    @property
    def is_connected(self) -> bool:
        return node_name(0) in self.router.peers

    def look(self) -> None:
        """Read messages. Raises WorkerError when node 0 has ended without a word, or is that of another task."""
        super().look()
        if self.is_connected:
            if self.router.greeting != self._greeting:
                raise WorkerError(f"another task listens at {self._reach.address} now; attach to it again")
            self._reach.confirm()
        elif not self.finishing:
            self._reach.probe()


class _Reach:
    """Whether a machine can be reached: tells a link that is down, which may come back, from a process that is gone."""

    def __init__(self, address: str, log: Callable[[str], None]):
        self.address, self.log = address, log
        self._seen = self._probed = time.monotonic()
        self._refused_since: float | None = None
        self._is_lost = False  # and that has been logged

    def confirm(self) -> None:
        """The connection is there."""
        if self._is_lost:
            self.log(f"{self.address} answers again")
        self._is_lost, self._refused_since = False, None
        self._seen = self._probed = time.monotonic()

    def probe(self) -> None:
        """Find out, now and then, why there is no connection. Raises WorkerError if nobody listens there."""
        if time.monotonic() - self._probed < PROBE_SECONDS:
            return
        why = "it is stopped, or very busy"
        try:
            socket.create_connection(check_tcp("attach-to", self.address), timeout=PROBE_SECONDS).close()
            self._refused_since = None
        except ConnectionRefusedError:
            self._refused_since = self._refused_since or time.monotonic()
            if time.monotonic() - self._refused_since > GONE_SECONDS:
                what = f"{self.address} refuses connections"
                raise WorkerError(f"{what}: the task there was killed, or its machine restarted") from None
        except OSError as error:
            why, self._refused_since = error.strerror or str(error), None
        self._probed = time.monotonic()
        if not self._is_lost and self._refused_since is None and self._probed - self._seen > LOST_SECONDS:
            self.log(f"{self.address} does not answer ({why}); waiting until it does")
            self._is_lost = True


class FirstNode(Node):
    """Node 0, which looks after the processes of the others.

    Args:
        router, known_labels: as of `Node`.
        supervisor: of nodes 1, 2, ...
        is_interrupted: as of `Supervision`.
    """

    def __init__(
        self, router: Router, supervisor: Supervisor, is_interrupted: Callable[[], bool], known_labels: Sequence[str]
    ):
        super().__init__(router, known_labels=known_labels)
        self.supervisor, self.is_interrupted = supervisor, is_interrupted
        self._looked = time.monotonic()

    def child(self, name: str) -> Child | None:
        """The process of a node; None for one of another machine."""
        number = int(name.removeprefix("node."))
        return self.supervisor.children[number - 1] if 0 < number <= len(self.supervisor.children) else None

    def record_result(self, name: str) -> None:
        """A node has produced something: it can work."""
        if (child := self.child(name)) is not None:
            child.record_result()

    def receive(self) -> list[Message]:
        if threading.current_thread() is threading.main_thread() and time.monotonic() - self._looked > WAIT_SECONDS:
            self._watch(lambda: self.finishing, 0.0)  # a signal to all processes has ended others too
        return super().receive()

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for a message or the end of a process; replace a process that has ended.

        Raises:
            WorkerError: a node failed before its first result, or the restart budget is spent.
        """
        if threading.current_thread() is threading.main_thread():
            self._watch(should_stop, WAIT_SECONDS)
            self.look()
        else:  # a process ends with the thread that started it
            super().wait(should_stop)

    def _watch(self, should_stop: Callable[[], bool], seconds: float) -> None:
        wake = [self.router.wake_fd]
        self.supervisor.watch(lambda: should_stop() or self.is_interrupted(), seconds, also=wake)
        self._looked = time.monotonic()
