"""The console: log lines and a progress bar on stdout, written by a thread of its own.

A terminal that is stopped (Ctrl-S, a pager) or a pipe that is not read blocks its writer. Here only the
console's thread waits; callers put lines into a queue, and lines that do not fit are dropped and counted.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

QUEUE_LINES = 1000
"""lines that may wait to be written; further ones are dropped"""
DRAIN_SECONDS = 1.0
"""longest wait at the end of a run until the queue is empty"""
REFRESH_SECONDS = 0.25
"""time between two drawings of the progress bar"""
GONE = {errno.EPIPE, errno.EIO, errno.EBADF}
"""errors that mean a closed pipe or terminal"""


class Status(NamedTuple):
    """State of the progress bar."""

    steps: int
    total_steps: int
    line: str
    eta: str
    final: bool = False  # the bar stays as it is


class Stdout(Console):
    """rich's console on stdout; when the reader has gone (`| head`), rich would end the process."""

    def on_broken_pipe(self) -> None:
        discard_output(sys.stdout)


class ConsoleThread:
    """Writes lines in order, and a progress bar below them, without delaying the caller.

    Only the thread, started by the first line, writes to stdout; an error there loses output, and the run continues.

    Attributes:
        error: the newest that lost output.
    """

    def __init__(self, output: Console):
        self.error: Exception | None = None
        self._output = output
        self._changed = threading.Condition()  # reentrant, as a signal handler may run while it is held
        self._waiting: deque[Text | Status] = deque()
        self._dropped = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None
        self._bar: Progress | None = None  # used by the thread alone, as are the methods that follow `_put`

    def print(self, line: Text, limit: int = QUEUE_LINES) -> None:
        """Queue a line; drop it if `limit` lines wait already."""
        with self._changed:
            if len(self._waiting) < limit:
                self._put(line)
            else:
                self._dropped += 1

    def show(self, status: Status) -> None:
        """Queue a state of the progress bar; it replaces one that waits directly before it."""
        with self._changed:
            if self._waiting and isinstance(self._waiting[-1], Status):
                self._waiting.pop()
            self._put(status)

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Wait until everything is written, for at most `seconds`. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_writing, seconds)

    def _put(self, item: Text | Status) -> None:
        self._waiting.append(item)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
            with suppress(RuntimeError):  # no further thread is allowed; `run.log` has the line
                self._thread.start()
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting, None if self._bar is None else REFRESH_SECONDS)
                items, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._dropped, self._is_writing = 0, True
            if dropped:
                items.append(Text(f"{dropped:,} lines dropped here, as the output was not read", style="yellow"))
            for item in items:
                self._attempt(item)
            if not items:
                self._attempt(None)

    def _attempt(self, item: Text | Status | None) -> None:
        try:
            if isinstance(item, Text):
                self._output.print(item)
            elif isinstance(item, Status):
                self._draw(item)
            elif self._bar is not None:
                self._bar.refresh()
        except Exception as error:
            self.error = error
            self._output.begin_capture()
            with suppress(Exception):
                self._output.end_capture()  # discards what failed, or rich would write it again before each later line
            if isinstance(error, OSError) and error.errno in GONE:
                discard_output(sys.stdout)

    def _draw(self, status: Status) -> None:
        if self._bar is None:
            self._bar = progress_bar(self._output)
            self._bar.add_task("", total=status.total_steps, line="", eta="-")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=status.steps, line=status.line, eta=status.eta)
        if status.final:
            bar, self._bar = self._bar, None
            bar.stop()
        else:
            self._bar.refresh()


class EtaColumn(ProgressColumn):
    """The estimated time to the end of the run."""

    def render(self, task: Task) -> Text:
        return Text(f"ETA {task.fields['eta']}", style="cyan")


def progress_bar(output: Console) -> Progress:
    """A progress bar that is drawn by `refresh` alone; it does not replace sys.stdout and sys.stderr."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:,.0f} steps"),
        BarColumn(bar_width=8),
        TextColumn("{task.percentage:.0f}%"),
        EtaColumn(),
        TextColumn("{task.fields[line]}", markup=False),
        console=output,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def discard_output(stream: object) -> None:
    """Redirect a stream whose reader has gone to the null device, with what it still holds."""
    with suppress(OSError, ValueError, AttributeError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())  # type: ignore[attr-defined]


console = ConsoleThread(Stdout(highlight=False, soft_wrap=True))
