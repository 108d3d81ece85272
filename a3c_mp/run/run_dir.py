"""The folder of a run: made, checked, locked, and described in `config.json`."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import gymnasium
import numpy as np
import torch

import a3c_mp
from a3c_mp.config import FORMAT, CommonArgs, flag_name
from a3c_mp.errors import ConfigError

LEFT_BY_FAILED_START = {".lock", "run.log"}
"""files in a folder whose run failed to start, besides an empty folder for checkpoints"""
PLACE = ("resume", "run_name", "runs_dir")
"""settings that say where a run is, not what it does"""


def claim_folder(args: CommonArgs, algorithm: str) -> tuple[Path, TextIO]:
    """Make, check and lock the folder that `--resume` or `--run-name` names.

    Returns:
        the folder, and its lock file, which releases the lock when it is closed.

    Raises:
        ConfigError: it cannot be made or written, another process holds it, or there is a run in it already.
    """
    with refuse_unwritable(args, args.runs_dir):
        folder = new_folder(args, algorithm) if args.resume is None else args.resume
    with refuse_unwritable(args, folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
        try:
            hold(lock, folder, args.resume is not None)
            if args.resume is None and (folder / "config.json").exists():
                fix = f"choose another name, or --resume {folder}"
                raise ConfigError("run-name", folder.name, f"{folder} holds a run already", fix)
            (folder / "checkpoints").mkdir(exist_ok=True)
            probe = folder / "checkpoints/.writable"
            probe.touch()
            probe.unlink()
        except BaseException:
            lock.close()
            raise
    return folder, lock


def new_folder(args: CommonArgs, algorithm: str) -> Path:
    """The folder of a new run. Raises ConfigError for a name that is no plain folder name, or of another folder."""
    if (name := args.run_name) is None:
        env = re.sub(r"[/:?&=%]", "_", args.env_id)
        name = f"{algorithm}-{env}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not name.strip(". ") or "/" in name or not name.isprintable() or len(name.encode()) > 255:
        raise ConfigError("run-name", name, "must be a plain folder name", "choose a short one without / or ..")
    folder = args.runs_dir / name
    foreign = {path.name for path in folder.glob("*")} - LEFT_BY_FAILED_START
    if not any((folder / "checkpoints").glob("*")):
        foreign.discard("checkpoints")
    if foreign and not (folder / "config.json").exists():
        why = f"{folder} is not a run folder: it holds {min(foreign)}"
        raise ConfigError("run-name", name, why, "choose another name")
    return folder


@contextmanager
def refuse_unwritable(args: CommonArgs, folder: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the file."""
    try:
        yield
    except OSError as error:
        named = str(error.filename).startswith(f"{folder}/")  # else it is above the folder, or a file without its name
        why = f"{error.filename if named else folder} cannot be written ({error.strerror})"
        if args.resume is not None:
            raise ConfigError("resume", folder, why, "make it writable, or resume a copy of it") from error
        raise ConfigError("runs-dir", args.runs_dir, why, "choose another --runs-dir") from error


def hold(lock: TextIO, folder: Path, resumed: bool) -> None:
    """Lock a folder's lock file and write this process's pid into it. Raises ConfigError if another holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        flag, why = "resume" if resumed else "run-name", f"{folder} is in use by process {lock.read()}"
        raise ConfigError(flag, folder.name, why, "wait for it, or choose another") from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def changed_settings(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Flags of settings, as files hold them, that two starts of a run do not share -> (value before, value now)."""
    names = [name for name in before if name not in PLACE and now.get(name, before[name]) != before[name]]
    return {f"--{flag_name(name)}": (before[name], now[name]) for name in names}


def as_recorded(args: CommonArgs) -> dict[str, Any]:
    """Settings as files hold them: with lists and strings."""
    return json.loads(json.dumps(dataclasses.asdict(args), default=str))


def name_of(folder: Path) -> str:
    """The name of a run folder, also of one that is given as `.`"""
    return os.path.basename(os.path.abspath(folder))


def describe_run(args: CommonArgs, algorithm: str, folder: Path, steps: int) -> dict[str, Any]:
    """The content of `config.json`: settings, versions, machine, commit and command line of each start of the run."""
    place = {"resume": None, "run_name": name_of(folder), "runs_dir": os.path.normpath(folder / "..")}
    versions = {"torch": torch.__version__, "gymnasium": gymnasium.__version__, "numpy": np.__version__}
    start = {
        "args": as_recorded(args) | place,
        "versions": {"a3c_mp": a3c_mp.__version__, "python": platform.python_version(), **versions},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "commit": git_commit(),
        "command": sys.argv,
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    starts = [*starts_of(folder), {"time": now, "steps": steps, **start}]
    return {"format": FORMAT, "algorithm": algorithm, **start, "starts": starts}


def starts_of(folder: Path) -> list[dict[str, Any]]:
    """The starts in the `config.json` of a run folder, oldest first; none where it cannot be read."""
    try:
        return list(json.loads((folder / "config.json").read_text())["starts"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def end_of(folder: Path) -> tuple[str | None, int] | None:
    """(why, after how many agent steps) the run in a folder has ended; None without a readable `summary.json`."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        return summary["exit_reason"], summary["steps"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def git_commit() -> str | None:
    """Commit of the source tree, with "+" when it differs from the commit; None if git does not track it."""
    here = Path(__file__)

    def git(*command: str) -> str:
        run = subprocess.run(["git", *command], cwd=here.parent, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # installed packages may lie in a repository of the user's own
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return None
