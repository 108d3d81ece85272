"""The last lines of a run's log: why it has ended, what was saved, how to continue."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from a3c_mp.errors import A3CError, ConfigError
from a3c_mp.run.mean_return import short_return

if TYPE_CHECKING:
    from a3c_mp.run.run import Run

ENDINGS = {"total_steps": "--total-steps reached", "max_seconds": "--max-seconds reached"}
"""reason why a run has ended -> its name in the last line; others stay as they are"""


def end_lines(run: Run, error: BaseException | None) -> Iterator[tuple[int, str]]:
    """Yield (level, line) of the last lines of a run that an error ended, if one did."""
    if error is not None and run.failed and not isinstance(error, ConfigError):  # which `exit_with` prints
        yield logging.ERROR, f"error: {describe_error(error)}"
    if run.unsaved:
        yield logging.ERROR, f"error: the state at {run.steps:,} steps was not saved; see the warning above"
    newest = run.checkpointer.newest
    if (run.exit_code or run.exit_reason == "max_seconds") and newest is not None and newest.exists():
        level = logging.ERROR if run.exit_code == 1 else logging.INFO
        yield level, f"the last checkpoint is {newest}; continue with {resume_command(run.folder)}"
    progress = run.progress
    figures = [f"mean return {short_return(progress.window.mean)}"] if progress.window.returns else []
    figures = figures if run.metrics.headline is None else run.metrics.headline()
    figures += [f"{run.steps:,} steps", f"{run.metrics.sps:,.0f} sps; in {run.folder}"]
    reason = run.exit_reason or "ended"
    reason = "failed" if reason.startswith("error: ") else reason  # its text is a line of its own
    if reason == "solved" and progress.evals.is_solved:
        best = f"return {progress.evals.best_mean:.1f}, weights of {progress.evals.best['steps']:,} steps"
        reason = f"solved by evaluation ({best})"
    after = timedelta(seconds=int(progress.wall_seconds))
    yield logging.INFO, f"{ENDINGS.get(reason, reason)} after {after}: {', '.join(figures)}"


def resume_command(folder: Path) -> str:
    """The command that goes on with the run in a folder; for one of several ranks, what to add to their launcher's."""
    script, flag = sys.argv[0], f"--resume {shlex.quote(str(folder))}"
    if "WORLD_SIZE" in os.environ:
        return flag
    return f"python {shlex.quote(script)} {flag}" if script.endswith(".py") else f"{script} {flag}"


def describe_error(error: BaseException) -> str:
    """The text of an error for run.log."""
    return str(error) if isinstance(error, A3CError) and str(error) else f"{type(error).__name__}: {error}"


def error_summary(text: str) -> str:
    """First line of an error's text, for `exit_reason`; if a worker's traceback follows, with what was raised."""
    first, *rest = text.splitlines()
    frames = [number for number, line in enumerate(rest) if line.startswith('  File "')]
    raised = [line for line in rest[frames[-1] + 1 :] if not line.startswith(" ")][:1] if frames else []
    return " ".join([first if first.endswith(":") or not raised else f"{first}:", *raised])
