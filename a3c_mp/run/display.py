"""The console output of a run: the progress bar, and log lines, which also go to `run.log`."""

import itertools
import logging
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from rich.text import Text

from a3c_mp.errors import shown
from a3c_mp.processes.console import console
from a3c_mp.processes.prints import prints

PRINTED_LINES = 1_000
"""lines in `run.log` of what child processes print: an environment that prints in each step would fill the disk"""
LINE_SECONDS = 10.0  # time between progress lines in `run.log`, and on the console where there is no terminal
FOREVER = 1e10  # seconds, of which a `timedelta` cannot hold as many as one likes
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red"}


class Display:
    """The progress of a run: a bar on a terminal, elsewhere and in `run.log` a line every `LINE_SECONDS`."""

    def __init__(self, total_steps: int, log: logging.Logger, steps: int = 0):
        self.log, self.total_steps, self.last_line = log, total_steps, time.monotonic()
        logging.getLogger("py.warnings").handlers = log.handlers
        logging.captureWarnings(True)  # on stderr they would break the bar, or block
        self.has_bar = sys.stdout.isatty() and not console.output.is_dumb_terminal
        if self.has_bar:
            console.show(steps, total_steps, "starting actors", "-")

    def show(self, steps: int, line: str, seconds_left: float) -> None:
        """Show the steps, a line of figures, and the time until the budget is spent (s; inf if unknown)."""
        eta = str(timedelta(seconds=max(int(seconds_left), 0))) if seconds_left < FOREVER else "-"
        if self.has_bar:
            console.show(steps, self.total_steps, line, eta)
        if time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            self.log.info(f"{steps:,} steps  {line}  ETA {eta}", extra={"is_on_bar": self.has_bar})

    def close(self) -> None:
        console.close_bar()
        logging.captureWarnings(False)


class ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "is_on_bar", False):
            console.print(Text(self.format(record), style=STYLES.get(record.levelno, "")))


def _shorten_paths(record: logging.LogRecord) -> bool:
    record.msg, record.args = shown(record.getMessage()), None
    return True


def open_log(folder: Path | None = None) -> logging.Logger:
    """Open a logger to the console, and in a run folder to `run.log`, which child processes' prints go to as well."""
    log = logging.getLogger(f"a3c_mp.{folder or 'terminal'}")
    log.setLevel(logging.INFO)
    log.manager = logging.Manager(log)  # type: ignore[arg-type]  # it ignores an environment's `logging.disable`
    log.propagate, log.handlers, log.filters = False, [ConsoleHandler()], [_shorten_paths]
    if folder is None:
        return log
    file = logging.FileHandler(folder / "run.log", encoding="utf-8", errors="backslashreplace")
    file.handleError = lambda record: None  # type: ignore[method-assign]  # the console has lines that do not fit
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(file)
    numbers = itertools.count(1)

    def write_print(line: str) -> None:
        if (number := next(numbers)) == PRINTED_LINES:
            line = "further lines that child processes print are shown on the console only"
        if number <= PRINTED_LINES:
            file.handle(logging.makeLogRecord({"levelname": "PRINTED", "msg": line}))

    prints.also = write_print
    return log


def close_log(log: logging.Logger) -> None:
    """Close `run.log`: what comes later is shown on the console only."""
    prints.also = lambda line: None
    with suppress(OSError):  # it retries a failed write
        log.handlers.pop().close()
