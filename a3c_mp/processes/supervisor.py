"""Supervised processes: started, watched, restarted within a budget, named in errors, and stopped with their parent.

A supervised process has a pipe for messages, tuples that start with their kind: `ERROR`, `DONE` and `STARTING` are for
the supervisor, all others for its owner.
"""

import errno
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from torch import Tensor

from a3c_mp.errors import WorkerError
from a3c_mp.processes.slots import cores
from a3c_mp.processes.spawn import DONE, ERROR, STARTING

START_SECONDS = 120.0  # longest time from the start of a process to its first heartbeat, where it has a core to itself
WAIT_SECONDS = 0.1  # longest wait for messages and deaths before the parent looks whether it should stop
SENTINEL_SECONDS, QUIET_SECONDS = 0.05, 1.0
"""longest wait for the end of processes, and silence of one, before a look at exit codes: a fork of a process may hold
its sentinel open
"""
PAUSE_SECONDS = 5.0
"""most that counts as silence between two looks: the parent may have been stopped, and its processes with it"""
CLOSE_SECONDS = 2.0  # longest time from SIGTERM or an exception to the end of a process, before it is killed


@dataclass
class Child:
    """A role that one process at a time fills: its name, its current process, its heartbeats."""

    name: str  # role and number, in messages and errors
    launch: Callable[[], tuple[Any, connection.Connection]]
    """starts a process; returns it and the pipe that its messages come through"""
    flag: str  # the setting that says how many such processes there are; they share a restart budget
    on_lost: Callable[[WorkerError], None] | None = None
    """called once the child is given up, and the others go on; None: that error is raised"""
    number: int = 0  # among the children of its supervisor
    process: Any = None
    pipe: Any = None
    beats: int = 0  # heartbeats, when last looked at
    silence: float = 0.0  # seconds since the last heartbeat
    max_silence: float = 0.0
    has_result: bool = False  # the current process has produced something
    had_result: bool = False  # this one or an earlier one has; before that, an exception is final
    is_done: bool = False  # its work is done, or it is given up: it is not replaced

    def __str__(self) -> str:
        return f"{self.name} (pid {self.process.pid})"

    def start(self) -> None:
        """Start a process. Raises WorkerError if the machine, or a limit of the user's, does not allow it."""
        try:
            self.process, self.pipe = self.launch()
        except (OSError, RuntimeError) as error:  # EAGAIN, ENOMEM, EMFILE; "can't start new thread"
            is_files = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
            limit = "limit on open files (ulimit -n)" if is_files else "limit on processes (ulimit -u) or the memory"
            why, fix = getattr(error, "strerror", None) or error, f"lower {self.flag}, or raise the {limit}"
            raise WorkerError(f"{self.name} cannot be started: {why}; {fix}") from error
        self.has_result = False

    def record_result(self) -> None:
        """Record that the current process has produced something: it can work."""
        self.has_result = self.had_result = True

    def messages(self) -> Iterator[tuple]:
        """The messages that have arrived. One that a kill has cut short is dropped; the exit code says why."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while self.pipe.poll():
                yield self.pipe.recv()


def start_seconds(children: int) -> float:
    """Longest time to the first step of a process, where so many start at once."""
    return START_SECONDS * max(1.0, children / cores())


class Supervisor:
    """Starts, watches, restarts and stops the processes of its children.

    Args:
        beats: int64 [children] in shared memory, heartbeats; each process counts up its own.
        max_restarts: budget for all children of the same flag together.
        hang_seconds: a process whose heartbeats stop for so long is killed and restarted.
        hang_setting: the name of `hang_seconds` for the user.
        on_message, on_restart: called with (number of the child, message), and with (number, text) before a restart.
    """

    def __init__(
        self, children: Sequence[Child], beats: Tensor, *, max_restarts: int, hang_seconds: float,
        on_message: Callable[[int, tuple], None], on_restart: Callable[[int, str], None],
        hang_setting: str = "--hang-seconds",
    ):  # fmt: skip
        for number, child in enumerate(children):
            child.number = number
        self.children, self._beats, self.max_restarts, self.hang_seconds = children, beats, max_restarts, hang_seconds
        self.on_message, self.on_restart, self.hang_setting = on_message, on_restart, hang_setting
        self.restarts: Counter[str] = Counter()  # by flag: processes that have been replaced
        self._frames: list[str] = []  # of the last traceback
        self._checked = time.monotonic()  # when heartbeats were last looked at

    @property
    def processes(self) -> list[Any]:
        """The newest process of each child that has had one, running or not."""
        return [child.process for child in self.children if child.process is not None]

    def start(self) -> None:
        """Start a process for each child. Raises WorkerError if one cannot be started, after the others have ended."""
        try:
            for child in self.children:
                self._start(child)
        except BaseException:
            self.stop()
            raise

    def watch(self, should_stop: Callable[[], bool], seconds: float = WAIT_SECONDS, also: Sequence[Any] = ()) -> None:
        """Wait for a message, a death, one of the file descriptors `also` or so long (s), and deal with it.

        Raises WorkerError if a child without `on_lost` failed before any result, or its restart budget is spent.
        """
        working = [child for child in self.children if not child.is_done]
        pipes = {child.pipe: child for child in working}
        sentinels = {child.process.sentinel: child for child in working}
        events = connection.wait([*pipes, *sentinels, *also], seconds)
        if should_stop():  # a signal to all processes has ended the children too; they are not to be replaced
            return
        for event in events:  # messages first: they say why a process died
            if event in pipes:
                self._receive(pipes[event])
        for event in events:
            if event in sentinels:
                self._check_end(sentinels[event])
        self._check_heartbeats()

    def stop(self) -> None:
        """End all processes for good: SIGTERM, then SIGKILL for those that take longer than `CLOSE_SECONDS`."""
        for child in self.children:
            child.is_done = True
        for process in self.processes:
            process.terminate()
        await_end(self.processes, CLOSE_SECONDS)

    def _start(self, child: Child) -> None:
        try:
            child.start()
        except WorkerError as error:
            self._give_up(child, error)
        else:
            self._await_first_beat(child)

    def _await_first_beat(self, child: Child) -> None:
        """Allow a child the time of a start until its next heartbeat."""
        child.beats, child.silence = int(self._beats[child.number]), 0.0
        child.max_silence = max(start_seconds(len(self.children)), self.hang_seconds)

    def _receive(self, child: Child) -> None:
        for message in child.messages():
            if message[0] == ERROR:
                self._fail(child, message[1])
                return
            if message[0] == DONE:
                child.is_done = True
                return
            if message[0] == STARTING:
                self._await_first_beat(child)
            else:
                self.on_message(child.number, message)

    def _fail(self, child: Child, text: str) -> None:
        """Replace a process that sent an exception, once it has closed what it holds."""
        await_end([child.process], CLOSE_SECONDS)
        if child.had_result:
            self._restart(child, f"raised an exception{'' if child.has_result else ' before its first result'}", text)
        else:
            self._give_up(child, WorkerError(f"{child} failed before its first result:\n{text}"))

    def _check_end(self, child: Child) -> None:
        """Replace a process if it has ended."""
        process = child.process
        if process.exitcode is None:
            return  # replaced already
        self._receive(child)  # what it still managed to send
        if child.process is not process or child.is_done:
            return
        how = how_ended(process.exitcode)
        if process.exitcode >= 0 and not child.has_result:
            how += " before its first result"
            if not child.had_result:  # it could not send why, but may have printed it
                self._give_up(child, WorkerError(f"{child} {how}; what it printed before is above"))
                return
        self._restart(child, how)

    def _check_heartbeats(self) -> None:
        now = time.monotonic()
        passed, self._checked = min(now - self._checked, PAUSE_SECONDS), now
        for child, beats in zip(self.children, self._beats.tolist(), strict=True):
            if child.is_done:
                continue
            if beats != child.beats:
                child.beats, child.silence, child.max_silence = beats, 0.0, self.hang_seconds
            elif child.silence >= QUIET_SECONDS and child.process.exitcode is not None:
                self._check_end(child)
            else:
                child.silence += passed
                if child.silence > child.max_silence:
                    self._replace_hanging(child)

    def _replace_hanging(self, child: Child) -> None:
        child.process.kill()
        child.process.join(CLOSE_SECONDS)  # a driver or a disk may hold it for longer
        how = f"sent no heartbeat for {child.max_silence:.0f} s and was killed ({self.hang_setting})"
        if child.max_silence > self.hang_seconds:  # none since its start, or since an environment is made
            how = f"took longer than {child.max_silence:.0f} s to start or to make an environment and was killed"
            how += f" (raise {self.hang_setting})"
        self._restart(child, how)

    def _restart(self, child: Child, how: str, details: str = "") -> None:
        message, details = f"{child} {how}", f"\n{details.rstrip()}" if details else ""
        if self.restarts[child.flag] >= self.max_restarts:
            self._give_up(child, WorkerError(f"{message}; restart budget of {self.max_restarts} spent{details}"))
            return
        self.restarts[child.flag] += 1
        how_often = f"restart {self.restarts[child.flag]} of {self.max_restarts}"
        self.on_restart(child.number, f"{message}; {how_often}{self._without_repetition(details)}")
        self._start(child)

    def _without_repetition(self, text: str) -> str:
        """A traceback without the frames that the last one had, too."""
        lines = text.splitlines()
        end = max((number for number, line in enumerate(lines, 1) if line.startswith("  ")), default=0)
        if not end or lines[:end] != self._frames:
            self._frames = lines[:end] or self._frames
            return text
        return "\n".join(["", "the same traceback as the last one, then:", *lines[end:]])

    def _give_up(self, child: Child, error: WorkerError) -> None:
        if child.on_lost is None:
            raise error
        child.is_done = True
        child.on_lost(error)


def await_end(processes: Iterable[Any], seconds: float, kill: bool = True) -> None:
    """Wait until processes have ended; kill those that take longer than `seconds`, even stopped ones (SIGSTOP)."""
    deadline = time.monotonic() + seconds
    alive = [process for process in processes if process.is_alive()]
    while alive and time.monotonic() < deadline:
        connection.wait([process.sentinel for process in alive], SENTINEL_SECONDS)
        alive = [process for process in alive if process.is_alive()]
    for process in alive if kill else ():
        process.kill()
        process.join(CLOSE_SECONDS)


def how_ended(exit_code: int) -> str:
    """How a process ended: "was killed by SIGKILL", "ended with exit code 3"."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}  # most real-time signals have none
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"
