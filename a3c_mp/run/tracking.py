"""Experiment trackers (`--track`): the points of all curves, sent to Weights & Biases or trackio as well."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from a3c_mp.config import CommonArgs
from a3c_mp.errors import one_line
from a3c_mp.run.run_dir import as_recorded, name_of, write_atomically
from a3c_mp.run.script import in_time

FINISH_SECONDS = 30.0
"""longest wait, at the end of a run, for a tracker to send what it has"""


class Tracker:
    """A run in an experiment tracker; what it fails at costs a warning and all further points, never the run.

    Both trackers have the interface of wandb: `init`, `log`, `finish`. Offline modes are set by their environment
    variables (`WANDB_MODE=offline`; trackio is local by default). The folder keeps the id of the run for a resume.
    """

    def __init__(self, args: CommonArgs, folder: Path, log: logging.Logger):
        self.name, self.log = args.track, log
        self.module: Any = None
        project, resume = os.environ.get("WANDB_PROJECT", "a3c-mp"), "allow" if args.resume else "never"
        try:
            own: dict[str, Any] = {"dir": str(folder), "id": run_id(folder)} if args.track == "wandb" else {}
            module = importlib.import_module(args.track)
            with ExitStack() as stack:  # a tracker without a login fails, instead of asking for one
                stack.callback(setattr, sys, "stdin", sys.stdin)
                sys.stdin = stack.enter_context(open(os.devnull))
                module.init(project=project, name=name_of(folder), config=as_recorded(args), resume=resume, **own)
            if args.track == "wandb":
                module.define_metric("*", step_metric="steps")  # evaluations come late, with the steps of their weights
            self.module = module
        except Exception as error:  # whatever a network, a server or an account can cause
            self._give_up(error)

    def scalars(self, values: list[tuple[str, float, int]]) -> None:
        """Send (name, value, step) triples."""
        by_step: dict[int, dict[str, float]] = defaultdict(dict)
        for name, value, step in values:
            by_step[step][name] = value
        for step, metrics in by_step.items():
            self._call("log", {**metrics, "steps": step})

    def close(self) -> None:
        """Have everything sent, for at most `FINISH_SECONDS`: signals do not end the process meanwhile."""
        if not in_time(lambda: self._call("finish"), FINISH_SECONDS):
            late = f"{self.name} has not sent everything after {FINISH_SECONDS:.0f} s"
            self.log.warning(f"{late}; TensorBoard has all curves")

    def _call(self, function: str, *args: Any) -> None:
        if self.module is not None:
            try:
                getattr(self.module, function)(*args)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.module = None
        failure = f"{self.name} fails ({one_line(error)})"
        self.log.warning(f"{failure}; the run goes on without it, TensorBoard has all curves")


def run_id(folder: Path) -> str:
    """The id of a run in a tracker, made at its first start: names of folders are not unique."""
    file = folder / "tracker_id"
    if not file.exists():
        write_atomically(file, secrets.token_hex(8).encode())
    return file.read_text()
