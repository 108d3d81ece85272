"""`episodes.csv`: one line for each finished game; `plot.py` and the benchmarks read it."""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from a3c_mp.data.episodes import Episode
from a3c_mp.run.run_dir import write_atomically


class EpisodeRow(NamedTuple):
    """A line of `episodes.csv`."""

    steps: int  # agent steps of the run when the episode was counted
    seconds: float  # wall time of the run
    actor: int
    episode_return: float  # raw, whole game
    length: int  # agent steps

    @property
    def line(self) -> str:
        return f"{self.steps},{self.seconds:.2f},{self.actor},{self.episode_return:.9g},{self.length}\n"


HEADER = ",".join(EpisodeRow._fields) + "\n"


def read_episodes(path: Path) -> list[EpisodeRow]:
    """The episodes of a run in the order in which they were counted, without damaged lines.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has lines, and all are damaged.
    """
    rows, damaged = _read(path)
    if damaged and not rows:
        raise ValueError(f"{path}: none of its {damaged} lines can be read")
    return rows


def _read(path: Path) -> tuple[list[EpisodeRow], int]:
    """The rows of a file, and the number of damaged lines."""
    rows, damaged = [], 0
    # Text after the last line break is still being written, or was cut off by a crash.
    lines = path.read_bytes().decode("ascii", errors="replace").split("\n")[:-1]
    for line in lines[lines[:1] == [HEADER.rstrip()] :]:
        try:
            rows.append(_parse(line))
        except ValueError:
            damaged += 1
    return rows, damaged


def _parse(line: str) -> EpisodeRow:
    """A line as a row. Raises ValueError for a line that `EpisodeLog` cannot have written."""
    steps, seconds, actor, episode_return, length = line.split(",")
    row = EpisodeRow(int(steps), float(seconds), int(actor), float(episode_return), int(length))
    if not math.isfinite(row.seconds) or not math.isfinite(row.episode_return):
        raise ValueError("not finite")
    if not all(0 <= count < 2**63 for count in (row.steps, row.actor, row.length)):  # an int64 array can hold it
        raise ValueError("out of range")
    return row


class EpisodeLog:
    """The writer of `episodes.csv`: a new run replaces the file, a resumed one appends to it.

    Args:
        steps: agent steps at which the run starts; later lines are removed, as those games are played again.
        log: where damaged lines, which are removed too, and failed writes are reported.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, steps: int, log: logging.Logger):
        self.log, self.lines = log, list[str]()
        rows, damaged = _read(path) if steps and path.exists() else ([], 0)
        if damaged:
            log.warning(f"{path}: {damaged} damaged lines removed")
        write_atomically(path, "".join([HEADER, *(row.line for row in rows if row.steps <= steps)]).encode())
        self.file = path.open("a")

    def add(self, steps: int, seconds: float, actor: int, episode: Episode) -> None:
        self.lines.append(EpisodeRow(steps, seconds, actor, episode.episode_return, episode.length).line)

    def flush(self, sync: bool = False) -> None:
        """Write the lines added since the last call, and `sync` them; if that fails, they are lost, with a warning."""
        try:
            if self.lines:
                self.file.write("".join(self.lines))
                self.file.flush()
            if sync:
                os.fsync(self.file.fileno())
        except OSError as error:
            self.log.warning(f"{self.file.name} cannot be written: {error}")
        self.lines = []

    def close(self) -> None:
        self.flush()
        with suppress(OSError):  # it retries a failed write; `flush` has warned
            self.file.close()
