"""Starts a node of Ray and ends it with its parent, however that ends: a killed process cannot clean up.

Run as a script, without torch and Ray: `python -I -S guardian.py FOLDER COMMAND ...`. The command is `ray start`, whose
processes become children of this one; a line on stdout is its exit code. At the end of stdin, all processes are killed
and the folder is removed.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.05
REMOVE_SECONDS = 1.0  # longest time to remove the folder, into which the parent may still write
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
LOG = "start.log"  # with the output of the command


def children() -> list[int]:
    """This process's children, also those whose exit codes are not collected yet."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = path.read_text().rpartition(")")[2].split()[1]
            found += [int(path.parent.name)] if int(parent) == os.getpid() else []
    return found


def parent_has_ended(seconds: float | None) -> bool:
    """Wait for the end of stdin; nothing else arrives there."""
    return bool(select.select([0], [], [], seconds)[0])


def main(folder: Path, command: list[str]) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)  # the node would inherit SIG_IGN
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with open(folder / LOG, "wb") as log:
        start = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    while start.poll() is None and not parent_has_ended(POLL_SECONDS):
        pass
    with suppress(OSError):
        print(start.returncode, flush=True)
    parent_has_ended(None)
    while left := children():  # those of the killed ones are next
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for _ in left:
            os.wait()
    deadline = time.monotonic() + REMOVE_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
