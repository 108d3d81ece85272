"""The driver of a run with several trainers: the process that the user started, which is none of them.

It runs its own command again as a child, trainer 0, which starts the others. If any trainer is lost, it starts all of
them again, from the newest checkpoint. Terminal, process group and signals are the same for both processes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from a3c_mp._bootstrap import PARENT_VARIABLE
from a3c_mp.config import CommonArgs, has_checkpoint
from a3c_mp.errors import STARTED_IN, ConfigError, PeerLost
from a3c_mp.processes.learners import LOST_PEER
from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.processes.supervisor import how_ended
from a3c_mp.run import script
from a3c_mp.run.banner import resume_command
from a3c_mp.run.display import open_log
from a3c_mp.run.preflight import check_learners
from a3c_mp.run.run import Run
from a3c_mp.run.run_dir import new_folder, refuse_unwritable

FAILED = 4  # exit code of trainer 0, to its driver, where its run has failed and no trainer is lost
VARIABLE = "A3C_MP_START"  # environment variable of trainer 0: its `Start` as JSON


class Start(NamedTuple):
    """How this process, trainer 0, was started."""

    has_driver: bool = False
    restarts: int = 0  # of the run so far
    since: float | None = None  # of a restart: when the first start was (`time.monotonic`)


def run_driven(args: CommonArgs, train: Callable[[Start], Run]) -> int:
    """Run `train(start)`, or be the driver of a child that does; returns the exit code.

    One trainer needs no driver. Nor is there one where a program calls `main` itself: its command does something else.
    """
    start = Start(*json.loads(os.environ.pop(VARIABLE, "[]")))
    if not start.has_driver and script.RUNNING and getattr(args, "num_learners", 1) > 1:
        return drive(args)
    run = train(start)
    if start.has_driver and run.failed and isinstance(run.error, PeerLost):
        return LOST_PEER  # the driver starts it again
    return FAILED if start.has_driver and run.exit_code == 1 else run.exit_code


def drive(args: CommonArgs) -> int:
    """Start trainer 0, and again where a trainer is lost, at most `--max-restarts` times; returns its exit code.

    Raises ConfigError if so many trainers cannot be.
    """
    check_learners(args)
    received: list[int] = []
    trainer: subprocess.Popen | None = None

    def forward(signum: int, frame: object) -> None:
        received.append(signum)
        if trainer is not None:
            trainer.send_signal(signum)

    script.handle_signals(forward)
    with refuse_unwritable(args, args.runs_dir):
        folder = args.resume or new_folder(args, args.algorithm)
    place = [] if args.resume else [f"--run-name={folder.name}"]
    restarts, since = 0, time.monotonic()
    while not received:
        before = begun_at(folder)
        command = [sys.executable, *sys.orig_argv[1:], *place]
        start = Start(True, restarts, since if restarts else None)
        cwd = STARTED_IN[0] if os.path.isdir(STARTED_IN[0]) else "/"
        variables = {PARENT_VARIABLE: str(os.getpid()), VARIABLE: json.dumps(start)}
        try:
            trainer = subprocess.Popen(command, env={**os.environ, **variables}, cwd=cwd)
        except OSError as error:
            why = f"the machine refuses another process ({error.strerror})"
            fix = f"continue with {resume_command(folder)}" if has_checkpoint(folder) else "free memory"
            raise ConfigError("num-learners", "", why, fix) from error
        for number in received:  # while it was started
            trainer.send_signal(number)
        code = trainer.wait()
        with suppress(OSError):
            os.rmdir(folder if place else "")  # if it is empty: the trainer was refused
        lost = how_lost(trainer, folder, before)
        if restarts and code == 2:  # a machine that has just lost a process may be too busy for what a start asks
            lost = f"learner 0 (pid {trainer.pid}) was refused where it started again"
        if not lost:
            return 1 if code == FAILED else code if code >= 0 else 128 - code
        if received:
            break
        log = open_log(folder if folder.is_dir() else None)
        if restarts == args.max_restarts:
            rest = f"; continue with {resume_command(folder)}" if has_checkpoint(folder) else ""
            log.error(f"error: {lost}; restart budget of {restarts} spent{rest}")
            return 1
        restarts += 1
        log.warning(f"{lost}; restart {restarts} of {args.max_restarts}")
        place = place and [place[0], "--resume-or-start"]
    return 128 + received[-1]


def begun_at(folder: Path) -> int | None:
    """When the newest start of a run wrote `config.json`, by the clock of its file system (ns); None: none has."""
    with suppress(OSError):
        return (folder / "config.json").stat().st_mtime_ns
    return None


def how_lost(trainer: subprocess.Popen, folder: Path, before: int | None) -> str:
    """How a run has lost a trainer; "" if trainer 0 has ended by itself, or by a signal that ends a script.

    `before` is what `begun_at` returned before this trainer was started.
    """
    summary: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        summary = json.loads((folder / "summary.json").read_text())
    if (code := trainer.returncode) == LOST_PEER:
        return str(summary.get("exit_reason", "another learner was lost")).removeprefix("error: ")
    was_killed = code < 0 and -code not in SIGNALS
    is_begun = begun_at(folder) not in (None, before)  # each start writes it again
    was_ended = code == 1 and not summary and is_begun  # by Ray: its node has failed
    return f"learner 0 (pid {trainer.pid}) {how_ended(code)}" if was_killed or was_ended else ""
