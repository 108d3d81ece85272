"""The console: output that nobody reads costs lines, never time; lines and bar do not tear each other."""

import errno
import io
import re
import sys
import threading
import time
import warnings

import pytest
from rich.console import Console
from rich.text import Text

from a3c_mp.processes.console import QUEUE_LINES, ConsoleThread, Stdout, console
from a3c_mp.run.display import LINE_SECONDS, Display, open_log


class Stream(io.StringIO):
    """A stdout that is read only while `reading` is set, and fails where it has an `error`."""

    def __init__(self, error=None):
        super().__init__()
        self.error = error
        self.reading, self.stuck = threading.Event(), threading.Event()
        self.reading.set()

    def write(self, text):
        if self.error is not None:
            raise self.error
        if not self.reading.is_set():
            self.stuck.set()
        self.reading.wait()
        return super().write(text)


def stopped_reading(**options):
    """A console, and its stream, for whose reader it waits from the first line on."""
    stream = Stream()
    console = ConsoleThread(Console(file=stream, width=100, highlight=False, soft_wrap=True, **options))
    stream.reading.clear()
    console.print(Text("first"))
    assert stream.stuck.wait(10)
    return console, stream


def test_a_reader_that_stops_costs_lines_and_they_are_counted():
    (console, stream), started = stopped_reading(), time.perf_counter()
    for i in range(3 * QUEUE_LINES):
        console.print(Text(f"line {i}"))
    assert not console.drain(0.2)
    assert 0.2 <= time.perf_counter() - started < 4, "no call waits longer than it may"
    stream.reading.set()
    assert console.drain(10)
    _, *lines, last = stream.getvalue().splitlines()
    assert lines == [f"line {i}" for i in range(QUEUE_LINES)]
    assert last == f"{2 * QUEUE_LINES:,} lines dropped here, as the output was not read"
    console.print(Text("later"))
    assert console.drain(10)
    assert stream.getvalue().splitlines()[-1] == "later"


ERRORS = [
    *(OSError(number, "gone") for number in (errno.EPIPE, errno.EIO, errno.ENOSPC)),
    UnicodeEncodeError("ascii", "\udcff", 0, 1, "cannot be encoded"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_the_terminal_costs_output_only(error, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := Stream(error))
    console = ConsoleThread(Console(file=Stdout(), force_terminal=True))
    console.show(0, 10, "starting", "-")
    console.print(Text("lost"))
    console.show(5, 10, "half", "-")
    console.close_bar()
    assert console.drain(10)
    assert console.output.file.error is error
    stream.error = None
    console.print(Text("seen"))
    assert console.drain(10)
    assert "seen" in stream.getvalue()
    assert "lost" not in stream.getvalue()


def test_log_lines_stand_above_the_bar_and_leave_it_whole():
    """However many states of the bar there are: they do not wait in the queue."""
    console, stream = stopped_reading(force_terminal=True)
    console.show(0, 10_000, "starting actors", "-")
    for i in range(3 * QUEUE_LINES):
        console.show(i, 10_000, f"return {i}", "0:01:00")
        if i < 20:
            console.print(Text(f"line {i}"))
    stream.reading.set()
    console.show(10_000, 10_000, "return 20", "0:00:00")
    console.close_bar()
    console.print(Text("total_steps after 0:01:00"))
    assert console.drain(10)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "\n", stream.getvalue())  # movements of the cursor, colours
    lines = [line for line in text.splitlines() if line]
    assert [line for line in lines if line.startswith("line")] == [f"line {i}" for i in range(20)]
    assert lines[-1] == "total_steps after 0:01:00"
    bar = "".join(lines[lines.index("line 19") :])
    assert all(part in bar for part in ("10,000 steps", "100%", "ETA 0:00:00", "return 20"))


def test_without_a_terminal_progress_is_a_line_now_and_then(tmp_path, capsys):
    display = Display(100, open_log(tmp_path))
    display.show(10, "return 1", 5.0)
    display.last_line -= LINE_SECONDS
    display.show(20, "return 2", 5.0)
    display.last_line -= LINE_SECONDS
    display.show(30, "return 3", 1e18)
    display.close()
    assert console.drain(10)
    assert capsys.readouterr().out == "20 steps  return 2  ETA 0:00:05\n30 steps  return 3  ETA -\n"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_on_a_terminal_that_has_a_bar_progress_lines_go_to_run_log_only(term, tmp_path, monkeypatch):
    bars, printed = [], []
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(console, "show", lambda *shown: bars.append(shown[0]))
    monkeypatch.setattr(console, "print", printed.append)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    display = Display(100, open_log(tmp_path))
    for steps in (10, 20, 30):
        display.last_line -= LINE_SECONDS * (steps == 20)
        display.show(steps, f"return {steps}", 5.0)
    display.log.info("a checkpoint")
    display.close()
    progress = "20 steps  return 20  ETA 0:00:05"
    assert bars == ([0, 10, 20, 30] if term == "xterm" else [])
    assert [line.plain for line in printed] == ([] if bars else [progress]) + ["a checkpoint"]
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == [progress, "a checkpoint"]


def test_warnings_are_log_lines_while_progress_is_shown_and_run_log_escapes_what_cannot_be_encoded(tmp_path):
    before, log = warnings.showwarning, open_log(tmp_path)
    display = Display(100, log)
    warnings.warn("a kernel is slow", UserWarning, stacklevel=1)
    display.close()
    assert warnings.showwarning is before
    log.warning("ärger \udcff")
    text = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert ": UserWarning: a kernel is slow\n" in text
    assert text.endswith("WARNING ärger " + "\udcff".encode(errors="backslashreplace").decode() + "\n")
