"""The folder of a run: made, checked, locked, described in `config.json`; files written whole or not at all."""

import dataclasses
import errno
import fcntl
import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import gymnasium
import numpy as np
import torch

import a3c_mp
from a3c_mp.config import FORMAT, PLACE, CommonArgs, check_name, flag_name, has_checkpoint
from a3c_mp.errors import CheckpointError, ConfigError
from a3c_mp.processes.program import git_commit
from a3c_mp.run.followed import VARIABLE, tell

OF_A_START = (
    "config.json",
    "events.out.tfevents.*",
    "tracker_id",
    *(f"checkpoints/{kind}_{12 * '[0-9]'}.*" for kind in ("step", "best")),
)
"""files that another start does not replace"""
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # what file systems answer that cannot sync a folder


@contextmanager
def claim_folder(args: CommonArgs, algorithm: str) -> Iterator[tuple[Path, TextIO, str, ExitStack]]:
    """Make, check and lock the folder of a run; yield it, its lock file, a warning if there are no locks, and cleanup.

    `cleanup` closes the lock at the end of the `with` block, unless the caller takes it over (`pop_all`). Raises
    ConfigError if the folder is in use, or cannot be made or written, also inside the block.
    """
    warning, flag = "", "run-name" if args.resume is None else "resume"
    with refuse_unwritable(args, args.runs_dir):
        folder = new_folder(args, algorithm) if args.resume is None else args.resume
    with refuse_unwritable(args, folder), ExitStack() as cleanup:
        folder.mkdir(parents=True, exist_ok=True)
        lock = cleanup.enter_context((folder / ".lock").open("a+"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            why = f"{folder} is in use by {f'process {pid}' if (pid := lock.read()) else 'another process'}"
            raise ConfigError(flag, folder.name, why, "wait for it, or choose another") from None
        except OSError as error:  # a file system without locks, as some over a network
            warning = f"{folder} cannot be locked ({error.strerror}): see that no other run uses it"
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {platform.node()}")
        lock.flush()
        if os.path.lexists(checkpoints := folder / "checkpoints"):
            check_access(checkpoints)  # those in a folder that cannot be reached would count as none
        if args.resume is None:
            check_new(args, folder)
        checkpoints.mkdir(exist_ok=True)
        check_access(checkpoints)
        if not tell(folder=str(folder)) and VARIABLE in os.environ:
            why = "what a run tells the program that started it cannot be written there"
            temporary = Path(os.environ[VARIABLE]).parent
            raise ConfigError("TMPDIR", temporary, why, "free some space, or name another folder")
        yield folder, lock, warning, cleanup


def check_access(folder: Path) -> None:
    """Raise OSError unless the files of a folder can be listed, written and removed."""
    os.listdir(folder)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()


def check_owned(folder: Path, lock: TextIO) -> None:
    """Raise CheckpointError if the folder of a run was deleted, moved, or replaced by another run's, with its lock."""
    found = folder / ".lock"
    if lock.closed:
        return
    if not folder.is_dir():
        now = Path(os.readlink(f"/proc/self/fd/{lock.fileno()}"))
        why = f"is {now.parent} now: move it back" if now.exists() else "was deleted"
        raise CheckpointError(f"the run folder {folder} {why}")
    if found.exists() and not os.path.samestat(os.fstat(lock.fileno()), found.stat()):
        raise CheckpointError(f"{folder} belongs to another run now")


def write_summary(folder: Path, lock: TextIO, summary: dict[str, Any]) -> None:
    """Write `summary.json`; figures that are not finite, which JSON does not have, become null."""
    check_owned(folder, lock)
    lost = [name for name, value in summary.items() if isinstance(value, float) and not math.isfinite(value)]
    write_json(folder / "summary.json", summary | dict.fromkeys(lost))


def has_files(args: CommonArgs) -> bool:
    """Whether there is a folder of this run that is not empty; an empty one, a driver may have made."""
    folder = args.runs_dir / (args.run_name or "")
    return args.run_name is not None and os.path.isdir(folder) and any(folder.glob("*"))


def discard_folder(folder: Path, lock: TextIO, made_runs_dir: bool, made_folder: bool) -> None:
    """Remove the folder of a run, and the one for runs if empty, where this start made them."""
    with suppress(OSError, CheckpointError):
        check_owned(folder, lock)
        if made_folder:
            shutil.rmtree(folder, ignore_errors=True)
        if made_runs_dir:
            folder.parent.rmdir()


def check_new(args: CommonArgs, folder: Path) -> None:
    """Raise ConfigError for a folder that holds a run, unless it has no checkpoint and `--resume-or-start` is given."""
    if has_checkpoint(folder) or ((folder / "config.json").exists() and not args.resume_or_start):
        fix = f"choose another name, or --resume {folder}"
        fix += "" if has_checkpoint(folder) else "; it has no checkpoint: --resume-or-start starts it again"
        raise ConfigError("run-name", folder.name, f"{folder} holds a run already", fix)
    for pattern in OF_A_START:
        for path in folder.glob(pattern):
            path.unlink()


def new_folder(args: CommonArgs, algorithm: str) -> Path:
    """The folder of a new run. Raises ConfigError for a name that is no plain folder name, or of another folder.

    Without `--run-name` it is made here: of runs that start in the same second each gets a name of its own.
    """
    if args.run_name is None:
        env = re.sub(r"[^\w.-]", "_", args.env_id)[:100]
        name, number = f"{algorithm}-{env}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}", 1
        args.runs_dir.mkdir(parents=True, exist_ok=True)  # not below: that it cannot be made is no name that is taken
        while True:
            folder = args.runs_dir / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
            number += 1
    check_name(args.run_name)
    folder = args.runs_dir / args.run_name
    foreign = {path.name for path in folder.glob("*")}
    if foreign and ".lock" not in foreign and not _has_config(folder):
        why = f"{folder} is not a run folder: it holds {min(foreign)}"
        raise ConfigError("run-name", args.run_name, why, "choose another name")
    return folder


def _has_config(folder: Path) -> bool:
    """Whether there is a `config.json` of a run, or a damaged one."""
    try:
        content = json.loads((folder / "config.json").read_text())
        return isinstance(content, dict) and "format" in content
    except ValueError:
        return True
    except OSError:
        return False


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


def as_recorded(args: CommonArgs) -> dict[str, Any]:
    """Settings as files hold them: with lists and strings."""
    return json.loads(json.dumps(dataclasses.asdict(args), default=str))


def name_of(folder: Path) -> str:
    """The name of a run folder, also of one that is given as `.`"""
    return os.path.basename(os.path.abspath(folder))


def describe_run(args: CommonArgs, algorithm: str, folder: Path, steps: int) -> dict[str, Any]:
    """The content of `config.json`: settings, versions, machine, commit and command line of each start of the run."""
    place = {"resume": None, "resume_or_start": False, "run_name": name_of(folder)}
    place["runs_dir"] = os.path.normpath(folder / "..")
    versions = {"torch": torch.__version__, "gymnasium": gymnasium.__version__, "numpy": np.__version__}
    start = {
        "args": as_recorded(args) | place,
        "versions": {"a3c_mp": a3c_mp.__version__, "python": platform.python_version(), **versions},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "commit": git_commit(),
        "command": sys.argv,
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    path = folder / "config.json"
    earlier = json.loads(path.read_text()).get("starts", []) if path.exists() else []
    if not isinstance(earlier, list) or not all(isinstance(each, dict) and "args" in each for each in earlier):
        earlier = []  # edited by hand
    starts = [*earlier, {"time": now, "steps": steps, **start}]
    return {"format": FORMAT, "algorithm": algorithm, **start, "starts": starts}


def changed_settings(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the newest start of a run has changed, for the log: `--gamma 0.9 (0.99 before)`."""
    before, now = starts[-2:][0]["args"], starts[-1]["args"]
    names = [name for name in now if name not in PLACE and before.get(name, now[name]) != now[name]]
    return [f"--{flag_name(name)} {now[name]} ({before[name]} before)" for name in names]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; the previous one stays until the new one is complete. Raises OSError."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file (`.tmp`), sync it, rename it into place, sync the folder. Raises OSError."""
    write_together({path: lambda file: file.write(content)})


def write_together(files: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Write files of one folder so; none is renamed before all are on disk: a full disk leaves all as they were."""
    temporary = {path: path.with_suffix(path.suffix + ".tmp") for path in files}
    try:
        for path, write in files.items():
            with temporary[path].open("w+b") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for path in files:
            os.replace(temporary[path], path)
            _sync_folder(path.parent)  # the rename, too, must survive a power cut, and before the next one
    except BaseException:  # also a signal's
        for path in temporary.values():
            path.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)
