"""Where the points of all curves go: TensorBoard's event file, and Weights & Biases or trackio (`--track`)."""

import importlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import custom_scalars, scalar, text

from a3c_mp.config import CommonArgs
from a3c_mp.errors import one_line
from a3c_mp.run.run_dir import as_recorded, name_of, write_atomically
from a3c_mp.run.script import in_time

logging.getLogger("tensorboardX").addHandler(logging.NullHandler())  # it would name no curve that is NaN
RETRY_SECONDS = 60.0  # time after a failed write of the event file until the next attempt
MAIN_CURVES = {
    "mean return": ["charts/mean_return_100", "eval/return_mean"],
    "agent steps per second": ["charts/sps"],
    "policy lag": ["charts/policy_lag"],
    "entropy of the policy": ["policy/entropy"],
    "values": ["values/(value|q|target)"],
    "loss of the value": ["losses/value"],
}
"""title -> tags, or regular expressions, of each plot of TensorBoard's Custom Scalars, in this order"""
FINISH_SECONDS = 30.0  # longest wait, at the end of a run, for a tracker to send what it has


class EventFile:
    """A TensorBoard event file, written by the calling thread.

    tensorboardX's `SummaryWriter` writes on a thread; once that dies (disk full), `add_scalar` blocks for ever. The
    `EventsWriter` underneath raises instead: a failed write costs a warning, and points of the curves until a new file
    is opened after `RETRY_SECONDS`. TensorBoard hides events of earlier processes from `purge_step` on.
    """

    def __init__(self, folder: Path, purge_step: int | None, log: logging.Logger):
        self.folder, self.log, self.retry_at = folder, log, 0.0
        self.writer: Any = None
        if purge_step is not None:
            self._write([{"step": purge_step, "session_log": SessionLog(status=SessionLog.START)}])

    def scalars(self, steps: int, points: Mapping[str, float]) -> None:
        self._write([{"step": steps, "summary": scalar(name, value)} for name, value in points.items()])

    def describe(self, steps: int, settings: Mapping[str, Any]) -> None:
        """Write a table of settings, and which curves are plotted first."""
        rows = [f"|{name}|{value}|" for name, value in settings.items()]
        lines = "\n".join(["|setting|value|", "|-|-|", *rows])
        table = text("hyperparameters", lines.encode(errors="backslashreplace").decode())  # of a path, any bytes
        plots = custom_scalars({"main curves": {title: ["Multiline", tags] for title, tags in MAIN_CURVES.items()}})
        self._write([{"step": steps, "summary": table}, {"step": steps, "summary": plots}])

    def _write(self, events: list[dict[str, Any]]) -> None:
        if time.monotonic() < self.retry_at:
            return
        try:
            if self.writer is None:
                self.writer = EventsWriter(str(self.folder / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
            for event in events:
                self.writer.write_event(Event(wall_time=time.time(), **event))
            self.writer.flush()
        except OSError as error:
            pause = f"training continues without curves for {RETRY_SECONDS:.0f} s"
            self.log.warning(f"TensorBoard cannot be written ({error}); {pause}")
            with suppress(OSError, AttributeError):  # else its end, in Python 3.13, prints that it cannot be written
                self.writer._py_recordio_writer.close()
            self.writer, self.retry_at = None, time.monotonic() + RETRY_SECONDS

    def close(self) -> None:
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()


class Tracker:
    """A run in an experiment tracker (`init`, `log`, `finish`); a failure costs a warning and all further points."""

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

    def scalars(self, steps: int, points: Mapping[str, float]) -> None:
        # wandb takes no earlier step than the last one, trackio has no other axis.
        self._call("log", {**points, "steps": steps}, **({} if self.name == "wandb" else {"step": steps}))

    def close(self) -> None:
        """Have everything sent, for at most `FINISH_SECONDS`: signals do not end the process meanwhile."""
        if not in_time(lambda: self._call("finish"), FINISH_SECONDS):
            late = f"{self.name} has not sent everything after {FINISH_SECONDS:.0f} s"
            self.log.warning(f"{late}; TensorBoard has all curves")

    def _call(self, function: str, *args: Any, **named: Any) -> None:
        if self.module is not None:
            try:
                getattr(self.module, function)(*args, **named)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.module = None
        failure = f"{self.name} fails ({one_line(error)})"
        self.log.warning(f"{failure}; the run goes on without it, TensorBoard has all curves")


def run_id(folder: Path) -> str:
    """The id of a run in a tracker, kept for a resume: names of folders are not unique."""
    file = folder / "tracker_id"
    if not file.exists():
        write_atomically(file, secrets.token_hex(8).encode())
    return file.read_text()
