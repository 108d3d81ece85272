"""The console: log lines and a progress bar on stdout, written by threads of their own.

A terminal that is stopped (Ctrl-S, a pager) or a pipe that is not read blocks its writer. Here only the console's
threads wait; callers put lines into a queue, and lines that do not fit are dropped and counted.
"""

import errno
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

QUEUE_LINES = 1000  # that may wait to be written; further ones are dropped
DRAIN_SECONDS = 1.0  # longest wait at the end of a run until the queue is empty
GONE = {errno.EPIPE, errno.EIO, errno.EBADF}  # a closed pipe or terminal


class Stdout:
    """sys.stdout, except that an error loses output instead of being raised; `error` is the newest."""

    error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> None:
        self._attempt(lambda: sys.stdout.write(text))

    def flush(self) -> None:
        self._attempt(sys.stdout.flush)

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (OSError, ValueError) as error:
            self.error = error
            if isinstance(error, OSError) and error.errno in GONE:
                discard_output(sys.stdout)


class ConsoleThread:
    """Writes lines in order, and a progress bar below them, without delaying the caller."""

    def __init__(self, output: Console):
        self.output = output
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # signal handlers may use it, too
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self._bar: Progress | None = None

    def print(self, line: Text, limit: int = QUEUE_LINES) -> None:
        """Queue a line; drop it if `limit` lines wait already."""
        if self._waiting.qsize() >= limit:
            self._dropped += 1
            return
        self._report_dropped()
        self._put(lambda: self.output.print(line))

    def show(self, steps: int, total_steps: int, line: str, eta: str) -> None:
        """Set the state of the progress bar, which a thread of rich's draws four times a second."""
        if self._bar is None:
            columns: list[Any] = [SpinnerColumn(), TextColumn("{task.completed:,.0f} steps"), BarColumn(bar_width=8)]
            columns += [TextColumn("{task.percentage:.0f}%"), TextColumn("ETA {task.fields[eta]}", style="cyan")]
            columns.append(TextColumn("{task.fields[line]}", markup=False))
            self._bar = Progress(
                *columns, console=self.output, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
            )
            self._bar.add_task("", total=total_steps, line="", eta="-")
            self._put(self._bar.start)
        self._bar.update(self._bar.task_ids[0], completed=steps, line=line, eta=eta)

    def close_bar(self) -> None:
        """Draw the bar for the last time; later lines are printed below it."""
        if self._bar is not None:
            self._put(self._bar.stop)
            self._bar = None

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Wait until everything is written, for at most `seconds`. Returns whether it is."""
        if self._thread is None:
            return True
        self._report_dropped()
        is_written = threading.Event()
        self._put(is_written.set)
        return is_written.wait(seconds)

    def _report_dropped(self) -> None:
        if self._dropped:
            text = Text(f"{self._dropped:,} lines dropped here, as the output was not read", style="yellow")
            self._dropped = 0
            self._put(lambda: self.output.print(text))

    def _put(self, write: Callable[[], object]) -> None:
        self._waiting.put(write)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="console", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no further thread is allowed
                self._thread = None
                self._write_next()

    def _write_all(self) -> None:
        while True:
            self._write_next()

    def _write_next(self) -> None:
        write = self._waiting.get()
        with suppress(RuntimeError):  # of a bar, which cannot start its thread
            write()


def discard_output(stream: object) -> None:
    """Redirect a stream whose reader has gone to the null device, with what it still holds."""
    with suppress(OSError, ValueError, AttributeError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())  # type: ignore[attr-defined]


console = ConsoleThread(Console(file=cast(IO[str], Stdout()), highlight=False, soft_wrap=True))
