"""`episodes.csv`: one line for each finished game; `plot.py` and the benchmarks read it."""

import logging
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from a3c_mp.data.episodes import Episode
from a3c_mp.run.run_dir import write_atomically


class EpisodeRow(NamedTuple):
    steps: int  # agent steps of the run when the episode was counted
    seconds: float  # wall time of the run
    actor: int
    episode_return: float  # raw, whole game
    length: int  # agent steps

    @property
    def line(self) -> str:
        return f"{self.steps},{self.seconds:.2f},{self.actor},{self.episode_return:.9g},{self.length}\n"


WARN_SECONDS = 60.0  # from one warning of a full disk to the next
HEADER = ",".join(EpisodeRow._fields) + "\n"
NUMBER, COUNT = r"(-?\d+(?:\.\d+)?(?:e[+-]\d{2,3})?)", r"(\d{1,18})"
LINE = re.compile(",".join([COUNT, NUMBER, COUNT, NUMBER, COUNT]))
"""what is not damaged: finite, and counts fit into an int64"""


def read_episodes(path: Path) -> list[EpisodeRow]:
    """Read the undamaged lines. Raises OSError if the file cannot be read, ValueError if all its lines are damaged."""
    rows, damaged = _read(path)
    if damaged and not rows:
        raise ValueError(f"{path}: none of its {damaged} lines can be read")
    return rows


def _read(path: Path) -> tuple[list[EpisodeRow], int]:
    """The rows of a file, and the number of damaged lines."""
    # Text after the last line break is still being written, or was cut off by a crash.
    lines = path.read_bytes().decode("ascii", errors="replace").split("\n")[:-1]
    found = [LINE.fullmatch(line) for line in lines[lines[:1] == [HEADER.rstrip()] :]]
    rows = [EpisodeRow(int(m[1]), float(m[2]), int(m[3]), float(m[4]), int(m[5])) for m in found if m]
    rows = [row for row in rows if math.isfinite(row.episode_return)]
    return rows, len(found) - len(rows)


class EpisodeLog:
    """The writer of `episodes.csv`. Raises OSError if the file cannot be read or written.

    A new run replaces the file; one that is resumed at `steps` removes later lines, as it plays those games again, and
    damaged ones.
    """

    def __init__(self, path: Path, steps: int, log: logging.Logger):
        self.log, self.lines, self.warn_at = log, list[str](), 0.0
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
            if time.monotonic() >= self.warn_at:
                self.log.warning(f"{self.file.name} cannot be written: {error}")
                self.warn_at = time.monotonic() + WARN_SECONDS
        self.lines = []

    def close(self) -> None:
        self.flush()
        with suppress(OSError):  # it retries a failed write; `flush` has warned
            self.file.close()
