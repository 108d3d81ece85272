"""The folder of a run: made, locked, and described in `config.json`; files in it are whole or not there."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import gymnasium
import numpy as np
import torch

import a3c_mp
from a3c_mp.config import CommonArgs, ConfigError

MAX_NAME = 255
"""bytes in the name of a folder, on the file systems of Linux"""
LEFT_BY_REFUSED = {".lock", ".writable", "run.log"}
"""what may lie in a folder whose run never began"""


def claim_folder(args: CommonArgs, algorithm: str) -> tuple[Path, TextIO]:
    """The folder that `--resume` or `--run-name` names, made, found writable, and held until the file is closed.

    Raises:
        ConfigError: it cannot be made or written, another process holds it, or there is a run in it already.
    """
    if args.resume is not None:
        folder = args.resume
    else:
        env = args.env_id.replace("/", "_").replace(":", "_")
        name = args.run_name
        if name is None:
            name = f"{algorithm}-{env}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        if not name.strip(". ") or "/" in name or not name.isprintable() or len(name.encode()) > MAX_NAME:
            raise ConfigError("run-name", name, "must be a plain folder name", "choose a short one without / or ..")
        folder = args.runs_dir / name
        foreign = sorted({path.name for path in folder.glob("*")} - LEFT_BY_REFUSED)
        if foreign and not (folder / "config.json").exists():
            raise ConfigError("run-name", name, f"{folder} holds other things ({foreign[0]})", "choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror})"
        if args.resume is not None:
            raise ConfigError("resume", folder, why, "make it writable, or resume a copy of it") from error
        raise ConfigError("runs-dir", args.runs_dir, why, "choose another --runs-dir") from error
    hold(lock, folder, args.resume is not None)
    if args.resume is None and (folder / "config.json").exists():
        lock.close()
        fix = f"choose another name, or --resume {folder}"
        raise ConfigError("run-name", folder.name, f"{folder} holds a run already", fix)
    return folder, lock


def hold(lock: TextIO, folder: Path, resumed: bool) -> None:
    """Lock a folder's lock file, and write into it by whom: two writers would tear each other's files."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        why = f"{folder} is in use by process {lock.read()}"
        if resumed:
            raise ConfigError("resume", folder, why, "wait for it to end") from None
        raise ConfigError("run-name", folder.name, why, "wait for it, or choose another name") from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def describe_run(args: CommonArgs, algorithm: str, folder: Path) -> dict[str, Any]:
    """What `config.json` holds: every setting, versions, machine, commit, command line."""
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(args).items()}
    return {
        "algorithm": algorithm,
        "args": {**settings, "resume": None, "run_name": folder.name, "runs_dir": str(folder.parent)},
        "versions": {
            "a3c_mp": a3c_mp.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
            "numpy": np.__version__,
        },
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "commit": git_commit(),
        "command": sys.argv,
    }


def git_commit() -> str | None:
    """Commit of the source tree, with "+" when it differs from the commit; None outside git."""

    def git(*command: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; the one before it stays until the new one is whole. Raises OSError."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write to a temporary file, sync it, rename it into place, sync the folder. Raises OSError.

    What is too large to be held as bytes is written by a function that is given the file.
    """
    temporary = path.with_suffix(path.suffix + ".tmp")
    try:
        with temporary.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename, too, must survive a power cut
    finally:
        os.close(folder)
