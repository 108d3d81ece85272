"""Output of child processes: read through pipes, and shown at a limited rate.

An actor that writes to the terminal itself waits for it at every line: an environment that prints in each step slows
training to the terminal's rate. So children print into pipes. A thread of the trainer reads these promptly, shows the
newest lines of each child, at most `LINES_PER_SECOND` in all, and counts the others.
"""

import fcntl
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import Pipe, connection, parent_process

from rich.text import Text

from a3c_mp.processes.console import QUEUE_LINES, console

LINES_PER_SECOND = 20
FEW_LINES = 2  # shown of a child that ends while the limit is reached
KEPT_LINES = 100  # newest lines of a child that are kept until they can be shown
CRASHES = (b"Fatal Python error", b"Traceback (most recent call last)")
"""how the output of a crash starts; up to `KEPT_LINES` from there on are shown together"""
PIPE_BYTES, LINE_BYTES = 2**20, 2**12
"""capacity of a child's pipe, if the system allows it; longest line, the rest is cut off"""
PAUSE_SECONDS, IDLE_SECONDS = 0.02, 0.1
"""between two reads, each of which takes Python's lock from the learner; longest wait for something to read"""
SETTLE_SECONDS = 0.3  # longest wait for the lines that children have printed last


class Tail:
    """The newest lines of a child that are not shown yet; `hidden` counts all that are not."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self.hidden = 0
        self._rest = b""  # a line that has not ended
        self._has_crashed = False  # all further lines belong to a crash

    def add(self, data: bytes) -> None:
        """Add bytes that were read, in pieces of any length; none at the end of the output."""
        *lines, self._rest = (self._rest + data).rsplit(b"\n", KEPT_LINES)
        if self._rest and (not data or len(self._rest) > LINE_BYTES):
            lines, self._rest = [*lines, self._rest], b""
        if lines:
            self.hidden += len(lines) + lines[0].count(b"\n")  # rsplit leaves earlier lines in one piece
            lines[0] = lines[0].rsplit(b"\n", 1)[-1]
        self.lines.extend(line[:LINE_BYTES] for line in lines)

    def take(self, number: int) -> list[str]:
        """Remove all lines; return the newest `number`, or as many before a crash and all of it."""
        crash = next((i for i, line in enumerate(self.lines) if line.startswith(CRASHES)), len(self.lines))
        first = 0 if self._has_crashed else max(0, crash - number)
        self._has_crashed |= crash < len(self.lines)
        lines = [line.decode(errors="backslashreplace").rstrip("\r") for line in [*self.lines][first:]]
        self.hidden -= len(lines)
        self.lines.clear()
        return lines


class Prints:
    """Reads the output of children on a thread, which calls `show`, and then `also`, with the lines that are shown."""

    def __init__(self, show: Callable[[str], None]):
        self.show = show
        self.also: Callable[[str], None] = lambda line: None
        self._tails: dict[connection.Connection, Tail] = {}
        self._thread: threading.Thread | None = None
        self._due = 0.0  # when more lines may be shown
        self._asked, self._settled = threading.Event(), threading.Event()

    def open_pipe(self) -> connection.Connection | None:
        """The end of a pipe for a child to print into; None in a child, as its own children inherit its pipe.

        Raises OSError or RuntimeError where the machine, or a limit of the user's, allows no further pipe or thread.
        """
        if parent_process() is not None:
            return None
        reader, writer = Pipe(duplex=False)
        with suppress(OSError, AttributeError):  # more than the user may have, or not Linux
            fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._tails[reader] = Tail()
        if self._thread is None:
            thread = threading.Thread(target=self._read_all, name="prints", daemon=True)
            thread.start()  # if this fails, the next child tries again
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
            ready = connection.wait([*self._tails], 0 if asked else IDLE_SECONDS)
            for pipe in ready:
                self._read(pipe)  # type: ignore[arg-type]
            tails = [tail for tail in [*self._tails.values()] if tail.lines]  # a copy: pipes are opened meanwhile
            if tails and (asked or time.monotonic() >= self._due):
                is_few = sum(len(tail.lines) for tail in tails) <= LINES_PER_SECOND
                self._emit(tails, KEPT_LINES if is_few else max(1, LINES_PER_SECOND // len(tails)))
            if asked:
                self._asked.clear()
                self._settled.set()
            if ready:
                time.sleep(PAUSE_SECONDS)

    def _read(self, pipe: connection.Connection) -> None:
        data = b""
        with suppress(OSError):
            data = os.read(pipe.fileno(), PIPE_BYTES)
        self._tails[pipe].add(data)
        if not data:
            pipe.close()
            self._emit([self._tails.pop(pipe)], LINES_PER_SECOND if time.monotonic() >= self._due else FEW_LINES)

    def _emit(self, tails: Collection[Tail], number: int) -> None:
        """Show the newest `number` lines of each child."""
        lines = [line for tail in tails for line in tail.take(number)]
        if dropped := sum(tail.hidden for tail in tails):
            lines.insert(0, f"{dropped:,} printed lines dropped")
        for tail in tails:
            tail.hidden = 0
        for line in lines:
            self.show(line)
            self.also(line)
        self._due = max(self._due, time.monotonic()) + len(lines) / LINES_PER_SECOND


def print_into(pipe: connection.Connection) -> None:
    """Redirect stdout and stderr of this process, and of those that it starts, into a pipe."""
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        with suppress(OSError):
            stream.flush()
        os.dup2(pipe.fileno(), fd)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pipe.close()


prints = Prints(lambda line: console.print(Text(line), limit=QUEUE_LINES // 2))  # what is logged has the rest
