"""The console: output that nobody reads costs lines, never time; lines and bar do not tear each other."""

import errno
import io
import threading
import time
import warnings

import pytest
from rich.console import Console
from rich.text import Text

from a3c_mp.processes import console as module
from a3c_mp.processes.console import QUEUE_LINES, ConsoleThread, Status
from a3c_mp.run.display import LINE_SECONDS, Display, open_log

WIDTH = 100
SOON = 0.2  # far longer than a call that does not wait, far shorter than a wait


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


@pytest.fixture
def stream():
    stream = Stream()
    yield stream
    stream.reading.set()


@pytest.fixture
def plain(stream):
    return ConsoleThread(Console(file=stream, width=WIDTH, highlight=False, soft_wrap=True))


@pytest.fixture
def terminal(stream):
    return ConsoleThread(Console(file=stream, width=WIDTH, force_terminal=True, soft_wrap=True))


def stop_reading(console, stream):
    """From the first line on, the console's thread waits for its reader."""
    stream.reading.clear()
    console.print(Text("first"))
    assert stream.stuck.wait(10)


def test_lines_come_out_in_order(plain, stream):
    lines = [f"line {i}" for i in range(QUEUE_LINES // 2)]
    for line in lines:
        plain.print(Text(line))
    assert plain.drain()
    assert stream.getvalue().splitlines() == lines


def test_a_reader_that_stops_costs_lines_and_they_are_counted(plain, stream):
    stop_reading(plain, stream)
    started = time.perf_counter()
    for i in range(3 * QUEUE_LINES):
        plain.print(Text(f"line {i}"))
    assert not plain.drain(0.01)
    assert time.perf_counter() - started < SOON * 10, "nobody waits"
    stream.reading.set()
    assert plain.drain(10)
    _, *lines, last = stream.getvalue().splitlines()
    assert lines == [f"line {i}" for i in range(QUEUE_LINES)]
    assert last == f"{2 * QUEUE_LINES:,} lines dropped here, as the output was not read"
    plain.print(Text("later"))
    assert plain.drain(10)
    assert stream.getvalue().splitlines()[-1] == "later"


def test_the_end_waits_for_a_stuck_reader_for_a_limited_time(plain, stream):
    stop_reading(plain, stream)
    started = time.perf_counter()
    assert not plain.drain(SOON)
    assert SOON <= time.perf_counter() - started < 10 * SOON


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_an_error_of_the_terminal_costs_output_only(number):
    stream = Stream(OSError(number, "gone"))
    console = ConsoleThread(module.Stdout(file=stream, force_terminal=True))
    console.show(Status(0, 10, "starting", "-"))
    console.print(Text("lost"))
    console.show(Status(5, 10, "half", "-", final=True))
    assert console.drain(10)
    stream.error = None
    console.print(Text("seen"))
    assert console.drain(10)
    assert "seen" in stream.getvalue()
    if number != errno.EPIPE:  # where stdout becomes the null device
        assert "lost" not in stream.getvalue()


def test_text_that_cannot_be_encoded_costs_no_other_line():
    bytes_written = io.BytesIO()
    console = ConsoleThread(module.Stdout(file=io.TextIOWrapper(bytes_written, encoding="utf-8")))
    for line in ("before", "broken \udcff", "after"):
        console.print(Text(line))
        assert console.drain(10)
    assert bytes_written.getvalue() == b"before\nafter\n"
    assert isinstance(console.error, UnicodeEncodeError)


def screen(text):
    """What a terminal shows after `text`: lines, with rich's cursor movements (up, erase line, return) carried out."""
    lines, row = [""], 0
    i = 0
    while i < len(text):
        if text[i] == "\x1b":
            end = next(j for j in range(i + 2, len(text)) if text[j].isalpha())
            number = text[i + 2 : end]
            if text[end] == "A":
                row -= int(number or 1)
            elif text[end] == "K":
                lines[row] = ""
            i = end + 1
            continue
        if text[i] == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif text[i] != "\r":
            lines[row] += text[i]
        i += 1
    return [line.rstrip() for line in lines]


def test_log_lines_stand_above_the_bar_and_leave_it_whole(terminal, stream):
    terminal.show(Status(0, 10_000, "starting actors", "-"))
    for i in range(20):
        terminal.print(Text(f"line {i}"))
        terminal.show(Status(500 * i, 10_000, f"return {i}", "0:01:00"))
    assert terminal.drain(10)
    *lines, bar = [line for line in screen(stream.getvalue()) if line]
    assert lines == [f"line {i}" for i in range(20)]
    assert "9,500 steps" in bar
    assert "95%" in bar
    assert "ETA 0:01:00" in bar
    assert "return 19" in bar
    terminal.show(Status(10_000, 10_000, "return 20", "0:00:00", final=True))
    terminal.print(Text("total_steps after 0:01:00"))
    assert terminal.drain(10)
    *_, bar, last = [line for line in screen(stream.getvalue()) if line]
    assert "10,000 steps" in bar
    assert last == "total_steps after 0:01:00"


def test_states_of_the_bar_do_not_fill_the_queue(terminal, stream):
    stop_reading(terminal, stream)
    for i in range(3 * QUEUE_LINES):
        terminal.show(Status(i, 3 * QUEUE_LINES, "", "-"))
    terminal.print(Text("line"))
    stream.reading.set()
    assert terminal.drain(10)
    assert "dropped" not in stream.getvalue()
    assert f"{3 * QUEUE_LINES - 1:,} steps" in stream.getvalue()


def test_without_a_terminal_progress_is_a_line_now_and_then(tmp_path, monkeypatch, capsys):
    log = open_log(tmp_path)
    display = Display(100, log)
    display.show(10, "return 1", 5.0)
    display.last_line -= LINE_SECONDS
    display.show(20, "return 2", 5.0)
    display.close()
    assert module.console.drain(10)
    assert capsys.readouterr().out == "20 steps  return 2  ETA 0:00:05\n"


def test_warnings_are_log_lines_while_progress_is_shown(tmp_path):
    before = warnings.showwarning
    display = Display(100, open_log(tmp_path))
    warnings.warn("a kernel is slow", UserWarning, stacklevel=1)
    display.close()
    assert warnings.showwarning is before
    assert ": UserWarning: a kernel is slow\n" in (tmp_path / "run.log").read_text()


def test_text_that_cannot_be_encoded_is_escaped_in_run_log(tmp_path):
    log = open_log(tmp_path)
    log.warning("ärger \udcff")
    (line,) = (tmp_path / "run.log").read_text(encoding="utf-8").splitlines()
    assert line.endswith("WARNING ärger " + "\udcff".encode(errors="backslashreplace").decode())
