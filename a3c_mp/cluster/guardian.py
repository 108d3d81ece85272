"""Starts a node of Ray and ends it with its parent, however that ends: a killed process cannot clean up.

Run as a script, without torch and Ray: `python -I -S guardian.py FOLDER COMMAND ...`. The command is `ray start`, whose
processes become children of this one. A line on stdout is its exit code, a further one says that a main process of the
node has ended. At the end of stdin, all processes are killed and the folder is removed.
"""

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

START_POLL_SECONDS, POLL_SECONDS = 0.05, 0.5
REMOVE_SECONDS = 1.0  # longest time to remove the folder, into which the parent may still write
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
MAIN_PROCESSES = ("gcs_server", "raylet")
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of a scheduler; the trainer decides what they do
LOG = "start.log"  # with the output of the command
NICENESS = 10  # of the node's session, with whose sum a trainer's session competes where autogroups are on (sched(7))


def children() -> dict[int, str]:
    """Process -> its name, of this one's children, also those whose exit codes are not collected yet."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text(errors="replace").rpartition(")")
            if int(rest.split()[1]) == os.getpid():
                found[int(path.parent.name)] = name.partition("(")[2]
    return found


def parent_has_ended(seconds: float) -> bool:
    """Wait for the end of stdin; nothing else arrives there."""
    return bool(select.select([0], [], [], seconds)[0])


def report(line: object) -> None:
    with suppress(OSError):
        print(line, flush=True)


def main(folder: Path, command: list[str]) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)  # the node would inherit SIG_IGN
    for signum in WARNINGS:
        signal.signal(signum, signal.SIG_IGN)  # the node inherits it
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with open(folder / LOG, "wb") as log:
        start = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    while start.poll() is None and not parent_has_ended(START_POLL_SECONDS):
        pass
    with suppress(OSError):  # a kernel without autogroups; not before, as a busy machine makes the start slow anyway
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    node = {pid for pid, name in children().items() if name in MAIN_PROCESSES}
    report(start.returncode)
    while not parent_has_ended(POLL_SECONDS):
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid in node:
                    report("ended")
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
