"""The TensorBoard event file of a run, and the points of its curves of single games."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from a3c_mp.data.episodes import Episode

T = TypeVar("T")

POINTS = 16
"""most points that one flush adds to the curve of episode returns"""
RETRY_SECONDS = 60.0
"""time after a failed write until the next attempt"""


class EventFile:
    """A TensorBoard event file, written by the calling thread.

    tensorboardX's `SummaryWriter` writes on a thread of its own; once that thread dies (disk full), `add_scalar` blocks
    for ever. The `EventsWriter` underneath raises instead. A failed write is logged and costs points of the curves,
    never the run; a new file is opened after `RETRY_SECONDS`.

    Args:
        folder: of the run.
        purge_step: on resume, TensorBoard hides events of earlier processes from this step on.
        log: where failed writes are reported.
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

    def text(self, name: str, markdown: str, step: int) -> None:
        """Write a text."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import text

        if self.writer is not None:
            with self._warn_on_failure():
                self.writer.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=text(name, markdown)))

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
                f"TensorBoard cannot be written ({error}); training continues without curves for {RETRY_SECONDS:.0f} s"
            )
            self.writer = None
            self.retry_at = time.monotonic() + RETRY_SECONDS


def episode_points(games: Sequence[tuple[int, Episode]]) -> list[tuple[str, float, int]]:
    """Points of the curves of episode return and length; more than `POINTS` games become means of consecutive ones.

    Args:
        games: (agent steps of the run when a game was counted, the game).

    Returns:
        (name, mean of a group, steps of the group's last game).
    """
    number = min(POINTS, len(games))
    bounds = [len(games) * i // number for i in range(number + 1)] if games else []
    points: list[tuple[str, float, int]] = []
    for start, end in pairwise(bounds):
        steps, group = games[end - 1][0], [game for _, game in games[start:end]]
        points.append(("charts/episodic_return", fmean(game.episode_return for game in group), steps))
        points.append(("charts/episodic_length", fmean(game.length for game in group), steps))
    return points
