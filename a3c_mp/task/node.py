"""Nodes as their processes see them: messages, heartbeats, what to close; node 0 looks after the others too."""

import math
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.pool import Closing
from a3c_mp.processes.spawn import STARTING
from a3c_mp.processes.supervisor import WAIT_SECONDS, Supervisor
from a3c_mp.task.endpoint import check_tcp, number_of
from a3c_mp.task.router import Router, Spoke
from a3c_mp.task.wire import FINISH, JOINED, LEFT, OVER, Message, WireError

REPORT_NAME, REPORT_RESULT, REPORT_REFUSAL = "called", "result", "refused"
"""reports of a node to the process that has started it: (name), it has its place in the task; (), it has produced
something; (what, value, why, fix) of a ConfigError"""
ALL_RUNS = 2**31  # number of the run that ends with the program
GONE_SECONDS = 5.0  # a node that has joined ends when node 0's machine has refused connections for so long
PROBE_SECONDS = 1.0  # between two attempts to find out why node 0 does not answer, and the longest of them
PENDING, NAMES = 1000, 100  # most messages of an event without a handler that wait, and most such events


class Node(Closing):
    """One process of a task: its messages to the other nodes, and its labels; `Task(router=node)` uses it.

    `setup` is what `Role.prepare` has made, `beat` counts a heartbeat with each look at messages, `report` sends kind
    and contents of a report to the process that has started this one.
    """

    def __init__(
        self, router: Router, setup: Any = None, beat: Callable[[], Any] = lambda: None,
        report: Callable[..., None] = lambda *report: None,
    ):  # fmt: skip
        self.router, self.setup, self.beat, self.report = router, setup, beat, report
        self.send, self.log, self.is_active = router.send, router.log, router.is_active
        self.labels, self.known_labels = router.endpoint.labels, router.endpoint.known_labels
        self.others_may_join = router.endpoint.open_labels  # nodes with labels that are not known
        self.finishing = False  # another node has ended the task, or the run of it that is this node's
        self._run, self._ended_run = 0, 0  # numbers of runs, from 1: this node's, and the last one that others ended
        self._handlers: dict[str, list[tuple[Callable[..., None], Sequence[type] | None]]] = {}
        self._arrived: deque[Message] = deque()  # to be handled
        self._waiting: dict[str, deque[Message]] = defaultdict(lambda: deque(maxlen=PENDING))  # no handler yet
        self._lock = threading.RLock()
        self.handle(FINISH, self._on_finish, [int])
        self.handle(OVER, self._on_over, [int])

    @property
    def name(self) -> str:
        return self.router.name

    def starting(self) -> None:
        """Report that an environment is made: the next heartbeat may take as long as a start."""
        self.report(STARTING)

    def refuse(self, error: ConfigError) -> None:
        """Report that this node cannot take part; the process that has started it raises the error."""
        self.report(REPORT_REFUSAL, error.what, str(error.value), error.why, error.fix)

    def begin_run(self) -> int:
        """Begin to run a task, until another node ends its run of the same number; returns that number."""
        self._run += 1
        self.finishing = self._ended_run >= self._run
        return self._run

    def handle(self, event: str, handler: Callable[..., None], types: Sequence[type] | None = None) -> None:
        """Have an event handled by `handler(sender, *args)`, as this node looks at its messages.

        Events that arrive before they have a handler wait for it. Malformed ones are dropped with a warning: their
        arguments have other types, or the handler raises WireError.
        """
        with self._lock:
            self._handlers.setdefault(event, []).append((handler, types))
            while self._waiting[event]:
                self._call_handlers(self._waiting[event].popleft())

    def look(self) -> bool:
        """Read and handle the messages that have arrived; returns whether there were any."""
        self.beat()
        with self._lock:
            arrived = self.router.receive()
            self._arrived += arrived  # a handler may look too: the order stays
            while self._arrived:
                message = self._arrived.popleft()
                if message.event in self._handlers:
                    self._call_handlers(message)
                elif message.event not in (JOINED, LEFT):
                    self._keep(message)
        return bool(arrived)

    def _keep(self, message: Message) -> None:
        """Keep an event without a handler until somebody asks for it."""
        for event in [event for event, waiting in self._waiting.items() if not waiting]:
            del self._waiting[event]
        if message.event not in self._waiting and len(self._waiting) == NAMES:
            text = "events of too many names without a handler; those of new names are dropped"
            self.log.warning(text, message.event)
            self.router.record_fault(message.sender)
            return
        if len(self._waiting[message.event]) == PENDING:
            self.log.warning("too many events without a handler; the oldest are dropped", message.event)
        self._waiting[message.event].append(message)

    def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait for a message, for `seconds` at most, and look."""
        if not self.look():
            connection.wait(self.router.files, seconds)
            self.look()

    def wait_for(self, event: str, seconds: float = math.inf) -> Message | None:
        """Return the oldest event of a name that has no handler, or wait for it; None once the task ends.

        Raises TimeoutError after `seconds`.
        """
        assert event not in self._handlers, f"{event} has a handler, which gets it"
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                message = self._waiting[event].popleft() if self._waiting[event] else None
            if message is not None or self.finishing:
                return message
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"no event {event!r} within {seconds:g} s")
            self.wait(min(left, WAIT_SECONDS))

    def _on_finish(self, sender: str, run: int) -> None:
        if number_of(sender) < self.router.endpoint.num_nodes:  # those that have joined from elsewhere do not end it
            self._ended_run = max(self._ended_run, run)
            self.finishing = self._ended_run >= max(self._run, 1)
        elif self.router.endpoint.accepts:  # nodes of a `runner` end tasks of their own
            self.router.record_fault(sender)

    def _on_over(self, sender: str, run: int) -> None:
        """Leave out the runs that were over as this node joined; what it does before its first run goes on."""
        if number_of(sender) == 0:
            self._ended_run = max(self._ended_run, run)
            self.finishing = self.finishing or 0 < self._run <= self._ended_run

    def _call_handlers(self, message: Message) -> None:
        sender, event, args = message
        try:
            for handler, types in self._handlers[event]:
                if types is not None and not (len(args) == len(types) and all(map(_is_a, args, types))):
                    raise WireError(f"not [{', '.join(kind.__name__ for kind in types)}]")
                handler(sender, *args)
        except WireError as error:
            self.log.warning(f"malformed message {event} dropped", f"{sender}: {error}")
            self.router.record_fault(sender)


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value is of a kind; True is no number."""
    return type(value) is int if kind is int else isinstance(value, kind)


class FirstNode(Node):
    """Node 0, which replaces processes of its machine, but not after a signal: that may have ended them, too."""

    router: Any  # a Hub

    def __init__(self, router: Router, supervisor: Supervisor, is_interrupted: Callable[[], bool] = lambda: False):
        super().__init__(router)
        self.supervisor, self.is_interrupted = supervisor, is_interrupted
        self._watched, self._thread = time.monotonic(), threading.current_thread()

    def look(self) -> bool:
        """As `Node.look`; at times, also replace processes that have ended. Raises what `wait` does."""
        if time.monotonic() - self._watched > WAIT_SECONDS:
            self._watch(lambda: self.finishing, 0.0)
        return super().look()

    def wait(self, seconds: float = WAIT_SECONDS, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for a message or the end of a process, which is replaced. Raises WorkerError as `Supervisor.watch`."""
        self._watch(should_stop, 0.0 if self.look() else seconds)
        self.look()

    def _watch(self, should_stop: Callable[[], bool], seconds: float) -> None:
        self._watched, files = time.monotonic(), self.router.files
        if threading.current_thread() is self._thread:  # a process ends with the thread that started it
            self.supervisor.watch(lambda: should_stop() or self.is_interrupted(), seconds, also=files)
        else:
            connection.wait(files, seconds)


class JoinedNode(FirstNode):
    """The first node of another machine, which has joined. It looks after the processes of the others there.

    It waits for node 0 while the link is down, which `log_line` gets to know, and ends when node 0 has.
    """

    def __init__(self, router: Spoke, supervisor: Supervisor, log_line: Callable[[str], Any]):
        super().__init__(router, supervisor)
        self.address, self.log_line, self._greeting = router.endpoint.dials, log_line, router.greeting
        self._probed = time.monotonic()  # or connected
        self._refused_since: float | None = None
        self._is_lost = False  # which has been logged

    def look(self) -> bool:
        """As `Node.look`. Raises WorkerError when node 0 was killed, or is that of another task."""
        has_arrived = super().look()
        if self.router.peers:
            if self.router.greeting != self._greeting:
                raise WorkerError(f"another task listens at {self.address} now; attach to it again")
            if self._is_lost:
                self.log_line(f"{self.address} answers again")
            self._is_lost, self._refused_since = False, None
            self._probed = time.monotonic()
        elif not self.finishing and time.monotonic() - self._probed > PROBE_SECONDS:
            self._probe()
            self._probed = time.monotonic()
        return has_arrived

    def _watch(self, should_stop: Callable[[], bool], seconds: float) -> None:
        """While the link is down no process is replaced: it could not join, and would use up the restarts."""
        if self.router.peers:
            super()._watch(should_stop, seconds)
        else:
            connection.wait(self.router.files, seconds)

    def _probe(self) -> None:
        """Find out why there is no connection: a link that is down may come back, a process that is gone does not."""
        why = "it is stopped, or very busy"
        try:
            host_and_port = check_tcp("attach-to", self.address)
            socket.create_connection(host_and_port, timeout=PROBE_SECONDS, all_errors=True).close()
        except (OSError, ExceptionGroup) as error:
            errors = getattr(error, "exceptions", [error])  # one for each address of a name
            kinds = [type(each) for each in errors]
            if ConnectionRefusedError in kinds and TimeoutError not in kinds:  # the others may have no route
                self._refused_since = self._refused_since or time.monotonic()
                if time.monotonic() - self._refused_since > GONE_SECONDS:
                    why = "the task there was killed, or its machine restarted"
                    raise WorkerError(f"{self.address} refuses connections: {why}") from None
                return
            why = errors[-1].strerror or str(errors[-1])
        self._refused_since = None
        if not self._is_lost:
            self.log_line(f"{self.address} does not answer ({why}); waiting until it does")
            self._is_lost = True
