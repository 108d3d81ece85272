"""`episodes.csv`: a line for each finished game, what `plot.py` and the benchmarks read."""

from __future__ import annotations

import csv
import logging
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from a3c_mp.rollout import Episode


class EpisodeRow(NamedTuple):
    """A line of a run's `episodes.csv`."""

    steps: int  # agent steps of the run when the episode was learned from
    seconds: float  # wall time of the run
    actor: int
    episode_return: float  # raw, whole game
    length: int  # agent steps


def read_episodes(path: Path) -> list[EpisodeRow]:
    """The episodes of a run, in the order they were learned from."""
    with path.open() as file:
        return [
            EpisodeRow(int(row["steps"]), float(row["seconds"]), int(row["actor"]), float(row["episode_return"]),
                       int(row["length"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip


class EpisodeLog:
    """`episodes.csv`: a line for each finished game, what `plot.py` and the benchmarks read.

    Args:
        path: of the file; begun anew, or on resume continued.
        steps: agent steps at which the run starts; lines beyond them are dropped, they will be lived again.
    """

    HEADER = "steps,seconds,actor,episode_return,length"

    def __init__(self, path: Path, steps: int, log: logging.Logger):
        self.log = log
        kept = [self.HEADER]
        if steps and path.exists():
            whole_lines = path.read_text().split("\n")[1:-1]  # what follows the last line break was torn by a crash
            kept += [line for line in whole_lines if int(line.split(",")[0]) <= steps]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("\n".join(kept) + "\n")
        temporary.replace(path)  # a crash right here loses nothing
        self.lines: list[str] = []
        self.file = path.open("a")

    def add(self, steps: int, seconds: float, actor: int, episode: Episode) -> None:
        self.lines.append(f"{steps},{seconds:.2f},{actor},{episode.episode_return:.9g},{episode.length}")

    def flush(self) -> None:
        """Write what has come together; a full disk costs these lines and a warning."""
        if not self.lines:
            return
        try:
            self.file.write("\n".join(self.lines) + "\n")
            self.file.flush()
        except OSError as error:
            self.log.warning(f"{self.file.name} cannot be written: {error}")
        self.lines = []

    def close(self) -> None:
        self.flush()
        with suppress(OSError):  # tried again by the file itself, and told by `flush`
            self.file.close()
