"""Experiment trackers (`--track`): the points of all curves, sent to Weights & Biases or trackio as well."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import os
import secrets
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from a3c_mp.config import CommonArgs
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.run.files import write_atomically
from a3c_mp.run.run_dir import name_of
from a3c_mp.run.script import in_time

PROJECT = "a3c-mp"
"""project that runs are grouped in, unless WANDB_PROJECT names another"""
STEPS = "steps"
"""metric that is the x axis: agent steps"""
FINISH_SECONDS = 30.0
"""longest wait, at the end of a run, for a tracker to send what it has"""


def check_tracker(args: CommonArgs) -> None:
    """Raise ConfigError if the tracker is not installed."""
    if args.track != "none" and importlib.util.find_spec(args.track) is None:
        raise ConfigError("track", args.track, f"{args.track} is not installed", f"pip install {args.track}")


def run_id(folder: Path) -> str:
    """The id of a run in a tracker, made at its first start: names of folders are not unique."""
    file = folder / "tracker_id"
    if not file.exists():
        write_atomically(file, secrets.token_hex(8).encode())
    return file.read_text()


@contextmanager
def no_input() -> Iterator[None]:
    """Context without standard input: a tracker without a login fails in it, instead of asking for one."""
    with open(os.devnull) as empty:
        stdin, sys.stdin = sys.stdin, empty
        try:
            yield
        finally:
            sys.stdin = stdin


class Tracker:
    """A run in an experiment tracker; what it fails at costs a warning and all further points, never the run.

    Both trackers have the interface of wandb: `init`, `log`, `finish`. Offline modes are set by their environment
    variables (`WANDB_MODE=offline`; trackio is local by default).

    Args:
        args: of the run; `track` names the module.
        folder: of the run; it keeps the id of the run there, with which a resumed run continues.
        log: where failures are reported.
    """

    def __init__(self, args: CommonArgs, folder: Path, log: logging.Logger):
        self.name, self.log = args.track, log
        self.module: Any = None
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(args).items()}
        project, resume = os.environ.get("WANDB_PROJECT", PROJECT), "allow" if args.resume else "never"
        try:
            own: dict[str, Any] = {"dir": str(folder), "id": run_id(folder)} if args.track == "wandb" else {}
            module = importlib.import_module(args.track)
            with no_input():
                module.init(project=project, name=name_of(folder), config=settings, resume=resume, **own)
            if args.track == "wandb":
                module.define_metric("*", step_metric=STEPS)  # evaluations come late, with the steps of their weights
            self.module = module
        except Exception as error:  # whatever a network, a server or an account can cause
            self._give_up(error)

    def scalars(self, values: list[tuple[str, float, int]]) -> None:
        """Send (name, value, step) triples."""
        by_step: dict[int, dict[str, float]] = defaultdict(dict)
        for name, value, step in values:
            by_step[step][name] = value
        for step, metrics in by_step.items():
            self._call("log", {**metrics, STEPS: step})

    def close(self) -> None:
        """Have everything sent, for at most `FINISH_SECONDS`: signals do not end the process meanwhile."""
        if self.module is not None and not in_time(lambda: self._call("finish"), FINISH_SECONDS):
            self.log.warning(
                f"{self.name} has not sent everything after {FINISH_SECONDS:.0f} s; TensorBoard has all curves"
            )

    def _call(self, function: str, *args: Any) -> None:
        if self.module is not None:
            try:
                getattr(self.module, function)(*args)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.module = None
        self.log.warning(
            f"{self.name} fails ({one_line(error)}); the run goes on without it, TensorBoard has all curves"
        )
