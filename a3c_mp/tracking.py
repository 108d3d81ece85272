"""What a run shows: TensorBoard curves, `run.log`, a progress bar or plain lines, and where the time went."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text
from torch import Tensor

T = TypeVar("T")

FLUSH_SECONDS = 1.0
"""curves are averaged over so long"""
LINE_SECONDS = 10.0
"""time between progress lines where there is no terminal"""
RETRY_SECONDS = 60.0
"""pause after a failed write before TensorBoard is tried again"""


class EventFile:
    """TensorBoard scalars, written by the caller's own thread.

    tensorboardX's `SummaryWriter` writes on a thread of its own; once that thread dies (disk full), `add_scalar` blocks
    for ever. The `EventsWriter` underneath raises instead. A failed write costs curves, never the run: it is reported
    once, and a new file is begun after a pause.

    Args:
        folder: of the run.
        purge_step: on resume, events of the earlier process from this step on are hidden.
    """

    def __init__(self, folder: Path, purge_step: int | None, log: logging.Logger):
        self.folder, self.log = folder, log
        self.retry_at = 0.0
        self.writer: Any = None
        self._open(purge_step)

    def _open(self, purge_step: int | None = None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        with self._warn_on_failure():
            self.writer = EventsWriter(str(self.folder / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
            if purge_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self.writer.write_event(event_pb2.Event(wall_time=time.time(), step=purge_step, session_log=start))

    def scalars(self, values: list[tuple[str, float, int]]) -> None:
        """Write (name, value, step) triples and flush them."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        if self.writer is None and time.monotonic() > self.retry_at:
            self._open()
        if self.writer is None:
            return
        with self._warn_on_failure():
            now = time.time()
            for name, value, step in values:
                self.writer.write_event(event_pb2.Event(wall_time=now, step=step, summary=scalar(name, value)))
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            with self._warn_on_failure():
                self.writer.close()

    @contextmanager
    def _warn_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.log.warning(
                f"TensorBoard cannot be written ({error}); training goes on without curves for {RETRY_SECONDS:.0f} s"
            )
            self.writer = None
            self.retry_at = time.monotonic() + RETRY_SECONDS


class Timings:
    """Adds up the seconds spent in named sections; `shares()` says what part of all time each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.since = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Pass items through, counting the time it takes to get them."""
        iterator = iter(items)
        while True:
            with self(name):
                item = next(iterator, None)
            if item is None:
                return
            yield item

    def shares(self) -> dict[str, float]:
        now = time.perf_counter()
        shares = {name: seconds / (now - self.since) for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self.since = now
        return shares


class Means:
    """Means of named figures between flushes; tensors stay on their device until then."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor | float]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self.values[name].append(value.detach().float().mean() if isinstance(value, Tensor) else value)

    def pop(self) -> dict[str, float]:
        means = {
            name: torch.stack([torch.as_tensor(v) for v in values]).mean().item()
            for name, values in self.values.items()
        }
        self.values.clear()
        return means


class EtaColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"ETA {task.fields['eta']}", style="cyan")


class Display:
    """Progress on a terminal as a bar, elsewhere as a line every `LINE_SECONDS`."""

    def __init__(self, total_steps: int, log: logging.Logger):
        self.log = log
        self.last_line = time.monotonic()
        self.bar: Progress | None = None
        if sys.stdout.isatty():
            self.bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.completed:,.0f} steps"),
                BarColumn(bar_width=20),
                TextColumn("{task.percentage:.0f}%"),
                EtaColumn(),
                TextColumn("{task.fields[line]}"),
                console=console,
                refresh_per_second=4,
            )
            self.task = self.bar.add_task("", total=total_steps, line="starting actors", eta="-")
            self.bar.start()

    def show(self, steps: int, line: str, seconds_left: float) -> None:
        """Say how far a run is, and when its budget will be spent; a stop return may come first."""
        eta = hms(max(seconds_left, 0)) if math.isfinite(seconds_left) else "-"
        if self.bar is not None:
            self.bar.update(self.task, completed=steps, line=line, eta=eta)
        elif time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            self.log.info(f"{steps:,} steps  {line}  ETA {eta}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class LastingConsole(Console):
    """A console on stdout that does without its reader once that has gone (`| head`); rich would end the process."""

    def on_broken_pipe(self) -> None:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


console = LastingConsole(highlight=False, soft_wrap=True)


class ConsoleHandler(logging.Handler):
    """Log lines through rich, so that they do not tear the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno == logging.WARNING else "red" if record.levelno > logging.WARNING else None
        with suppress(OSError):  # a terminal that is gone must not end the run
            console.print(Text(self.format(record), style=style or ""))


def open_log(folder: Path) -> logging.Logger:
    """A logger to the console and to `run.log`; a full disk costs lines of the file, nothing else."""
    log = logging.getLogger(f"a3c_mp.{folder}")
    log.setLevel(logging.INFO)
    log.propagate = False
    file = QuietFileHandler(folder / "run.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers = [ConsoleHandler(), file]
    return log


class QuietFileHandler(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        pass  # the console has the line; a traceback for each would bury it


def hms(seconds: float) -> str:
    """0:01:05 for 65 seconds."""
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
