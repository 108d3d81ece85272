"""What children print: the newest lines are shown at a limited pace, crashes whole."""

import os
import time

from hypothesis import given
from hypothesis import strategies as st

from a3c_mp.processes.prints import FEW_LINES, KEPT_LINES, LINE_BYTES, LINES_PER_SECOND, Prints, Tail


class Shown(list):
    """Lines, in the order in which they were shown."""

    def until(self, text):
        deadline = time.monotonic() + 20
        while not any(text in line for line in self):
            assert time.monotonic() < deadline, list(self)
            time.sleep(0.005)


def numbered(count, text="line"):
    return [f"{text} {i}" for i in range(count)]


def write(pipe, lines):
    os.write(pipe.fileno(), "".join(f"{line}\n" for line in lines).encode())


@given(st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), max_size=300), st.data())
def test_lines_are_put_together_from_whatever_pieces_they_come_in(lines, data):
    text = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    tail = Tail()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        if end > start:  # no bytes end the output
            tail.add(text[start:end])
    assert list(tail.lines) == lines[-KEPT_LINES:]
    assert tail.hidden == len(lines)


def test_a_line_without_end_is_cut():
    tail = Tail()
    for _ in range(5):
        tail.add(b"x" * (LINE_BYTES + 1))
    tail.add(b"the rest")
    tail.add(b"")
    assert [len(line) for line in tail.lines] == [LINE_BYTES] * 5 + [8]


def test_of_many_lines_the_newest_are_shown_and_the_others_counted():
    prints = Prints((shown := Shown()).append)
    few = numbered(LINES_PER_SECOND, "few")
    pipe, started = prints.open_pipe(), time.monotonic()
    write(pipe, few)
    shown.until(few[-1])
    assert shown == few, "soon, and whole"
    for _ in range(50):
        write(pipe, numbered(LINES_PER_SECOND * 10))
        time.sleep(0.005)
    write(pipe, ["the last"])
    shown.until("the last")
    seconds = time.monotonic() - started
    counts = [int(line.split()[0].replace(",", "")) for line in shown if line.endswith("printed lines dropped")]
    number = len(shown) - len(counts)
    assert number <= LINES_PER_SECOND * (seconds + 2)
    assert sum(counts) + number == len(few) + 50 * LINES_PER_SECOND * 10 + 1


def test_a_crash_of_which_only_the_start_has_come_is_shown_whole():
    crash = ["Fatal Python error: Aborted", *numbered(LINES_PER_SECOND * 2, "frame")]
    tail, shown = Tail(), []
    for part in ([*numbered(30), *crash[: LINES_PER_SECOND + 1]], crash[LINES_PER_SECOND + 1 :]):
        tail.add("".join(f"{line}\n" for line in part).encode())
        shown += tail.take(FEW_LINES)
    assert shown == [*numbered(30)[-FEW_LINES:], *crash]
    assert tail.hidden == 30 - FEW_LINES


def test_a_child_that_ends_among_many_lines_shows_few():
    prints = Prints((shown := Shown()).append)
    first, second = prints.open_pipe(), prints.open_pipe()
    for pipe in (first, second):
        write(pipe, numbered(10 * LINES_PER_SECOND))
    shown.until("dropped")
    write(second, [*numbered(10 * LINES_PER_SECOND, "more"), "the end"])
    second.close()
    shown.until("the end")
    assert len([line for line in shown if line.startswith("more")]) == FEW_LINES - 1
