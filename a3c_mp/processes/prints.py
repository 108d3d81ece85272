"""Output of child processes: read through pipes, and shown at a limited rate.

An actor that writes to the terminal itself waits for it at every line: an environment that prints in each step slows
training to the terminal's rate. So children print into pipes. A thread of the trainer reads these promptly, shows the
newest lines of each child, at most `LINES_PER_SECOND` in all, and counts the others.
"""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe, connection, parent_process
from typing import cast

from rich.text import Text

from a3c_mp.processes.console import QUEUE_LINES, console

LINES_PER_SECOND = 20
FEW_LINES = 2
"""lines shown of a child that ends while the limit is reached"""
KEPT_LINES = 100
"""newest lines of a child that are kept until they can be shown"""
CRASHES = (b"Fatal Python error", b"Traceback (most recent call last)")
"""how the output of a crash starts; up to `KEPT_LINES` from there on are shown together"""
PIPE_BYTES = 2**20
"""capacity of a child's pipe, if the system allows it"""
LINE_BYTES = 2**12
"""longest line, the rest is cut off"""
PAUSE_SECONDS = 0.02
"""between two reads of pipes that are in use: a child that prints all the time costs the trainer little time"""
IDLE_SECONDS = 0.1
"""longest wait for something to read: each time the thread wakes up, it takes Python's lock from the learner"""
SETTLE_SECONDS = 0.3
"""longest wait for the lines that children have printed last"""


class Tail:
    """The newest lines of a child that are not shown yet."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self.lost = 0  # lines dropped since the last output
        self._rest = b""  # a line that has not ended
        self._has_crashed = False  # all further lines belong to a crash

    def add(self, data: bytes) -> None:
        """Add bytes that were read, in pieces of any length."""
        *lines, rest = (self._rest + data).rsplit(b"\n", KEPT_LINES)
        if rest[LINE_BYTES:]:
            lines, rest = [*lines, rest], b""
        self._rest = rest
        number = len(self.lines) + len(lines)
        if lines:
            hidden = lines[0].count(b"\n")  # rsplit leaves earlier lines in one piece
            self.lost += hidden
            lines[0] = lines[0].rsplit(b"\n", 1)[-1]
        self.lost += max(0, number - KEPT_LINES)
        self.lines.extend(line[:LINE_BYTES] for line in lines)

    def end(self, number: int) -> None:
        """The child has ended: keep its last `number` lines, or all of a crash."""
        if self._rest:
            self.add(b"\n")
        self.keep(number)

    def keep(self, number: int) -> None:
        """Drop all but the newest `number` lines; of a crash, keep also all lines from its start on."""
        if self._has_crashed:
            return
        for i, line in enumerate(self.lines):
            if line.startswith(CRASHES):
                self._has_crashed, number = True, number + len(self.lines) - i
                break
        while len(self.lines) > number:
            self.lines.popleft()
            self.lost += 1

    def take(self) -> list[str]:
        """Remove the lines and return them."""
        lines = [line.decode(errors="backslashreplace").rstrip("\r") for line in self.lines]
        self.lines.clear()
        return lines


class Prints:
    """Reads the output of children on a thread, and shows it at a limited rate.

    Args:
        show: called with each line, from a thread.

    Attributes:
        also: called with the same lines after that; None: nothing is.
    """

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self.also: Callable[[str], None] | None = None
        self._new: deque[connection.Connection] = deque()  # pipes that the thread does not watch yet
        self._tails: dict[connection.Connection, Tail] = {}
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None
        self._due = 0.0  # when more lines may be shown
        self._asked, self._settled = threading.Event(), threading.Event()

    def open_pipe(self) -> connection.Connection | None:
        """The end of a pipe for a child to print into; None in a child, as its own children inherit its pipe.

        Raises:
            OSError: the machine, or a limit of the user's, allows no further pipe or thread.
        """
        if parent_process() is not None:
            return None
        reader, writer = Pipe(duplex=False)
        with suppress(OSError, AttributeError):  # more than the user may have, or not Linux
            fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._new.append(reader)
        if self._thread is None:
            thread = threading.Thread(target=self._read_all, name="prints", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # "can't start new thread"
                raise OSError(errno.EAGAIN, str(error)) from error
            self._thread = thread
        return writer

    def settle(self, seconds: float = SETTLE_SECONDS) -> None:
        """Show what children have printed so far; waits for at most `seconds`."""
        if self._thread is not None:
            self._settled.clear()
            self._asked.set()
            self._settled.wait(seconds)

    def _read_all(self) -> None:
        while True:
            asked = self._asked.is_set()
            while self._new:
                pipe = self._new.popleft()
                self._selector.register(pipe, selectors.EVENT_READ)
                self._tails[pipe] = Tail()
            ready = self._selector.select(IDLE_SECONDS)
            for key, _ in ready:
                self._read(cast(connection.Connection, key.fileobj))
            self._show_newest(asked)
            if asked:
                self._asked.clear()
                self._settled.set()
            if ready:
                time.sleep(PAUSE_SECONDS)

    def _read(self, pipe: connection.Connection) -> None:
        data = b""
        with suppress(OSError):
            data = os.read(pipe.fileno(), PIPE_BYTES)
        if data:
            self._tails[pipe].add(data)
            return
        self._selector.unregister(pipe)
        pipe.close()
        tail = self._tails.pop(pipe)
        tail.end(LINES_PER_SECOND if time.monotonic() >= self._due else FEW_LINES)
        self._emit([tail])

    def _show_newest(self, at_once: bool) -> None:
        tails = [tail for tail in self._tails.values() if tail.lines]
        if not tails or (time.monotonic() < self._due and not at_once):
            return
        if sum(len(tail.lines) for tail in tails) > LINES_PER_SECOND:
            for tail in tails:
                tail.keep(max(1, LINES_PER_SECOND // len(tails)))
        self._emit(tails)

    def _emit(self, tails: list[Tail]) -> None:
        lines = [line for tail in tails for line in tail.take()]
        lost = sum(tail.lost for tail in tails)
        for tail in tails:
            tail.lost = 0
        if lost and lines:
            lines.insert(0, f"{lost:,} printed lines dropped")
        for line in lines:
            self._show(line)
            if (also := self.also) is not None:
                also(line)
        self._due = max(self._due, time.monotonic()) + len(lines) / LINES_PER_SECOND


def print_into(pipe: connection.Connection | None) -> None:
    """Redirect stdout and stderr of this process, and of those that it starts, into a pipe."""
    if pipe is None:
        return
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        with suppress(OSError):
            stream.flush()
        os.dup2(pipe.fileno(), fd)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pipe.close()


prints = Prints(lambda line: console.print(Text(line), limit=QUEUE_LINES // 2))  # what is logged has the rest
