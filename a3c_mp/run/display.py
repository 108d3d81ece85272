"""What a run shows: progress, log lines on the console and in `run.log`."""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from pathlib import Path

from rich.text import Text

from a3c_mp.processes.console import Status, console

LINE_SECONDS = 10.0
"""time between progress lines where there is no terminal"""


class Display:
    """Progress on a terminal as a bar, elsewhere as a line every `LINE_SECONDS`.

    While it is shown, Python's warnings are log lines: on stderr they would tear the bar, and wait for the terminal.
    """

    def __init__(self, total_steps: int, log: logging.Logger):
        self.log = log
        self._showwarning, warnings.showwarning = warnings.showwarning, self._log_warning  # type: ignore[assignment]
        self.last_line = time.monotonic()
        self.status: Status | None = None
        if sys.stdout.isatty():
            self.status = Status(0, total_steps, "starting actors", "-")
            console.show(self.status)

    def show(self, steps: int, line: str, seconds_left: float) -> None:
        """Say how far a run is, and when its budget will be spent; a stop return may come first."""
        eta = hms(max(seconds_left, 0)) if math.isfinite(seconds_left) else "-"
        if self.status is not None:
            self.status = self.status._replace(steps=steps, line=line, eta=eta)
            console.show(self.status)
        elif time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            self.log.info(f"{steps:,} steps  {line}  ETA {eta}")

    def close(self) -> None:
        """Leave the bar as it is; lines that follow stand below it."""
        if self.status is not None:
            console.show(self.status._replace(final=True))
            self.status = None
        warnings.showwarning = self._showwarning

    def _log_warning(
        self, message: Warning | str, category: type[Warning], filename: str, line: int, *_: object
    ) -> None:
        self.log.warning(f"{category.__name__}: {message} ({filename}:{line})")


class ConsoleHandler(logging.Handler):
    """Log lines to the console, above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno == logging.WARNING else "red" if record.levelno > logging.WARNING else ""
        console.print(Text(self.format(record), style=style))


def open_log(folder: Path) -> logging.Logger:
    """A logger to the console and to `run.log`; a full disk costs lines of the file, nothing else."""
    log = logging.getLogger(f"a3c_mp.{folder}")
    log.setLevel(logging.INFO)
    log.propagate = False
    file = QuietFileHandler(folder / "run.log", encoding="utf-8", errors="backslashreplace")
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
