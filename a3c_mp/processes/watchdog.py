"""A small process that kills process groups and removes files of its parent, once that is gone, however it ended.

It runs this file as a script, without torch: `python -I -S watchdog.py PARENT_PID`. Standard input is a pipe; a line
`+PGID`, `+/FOLDER` or `+/PATTERN` (of files) adds one, a line with `-` takes it off. The parent is gone at end of file,
or when this process has another parent: a fork of the parent may still hold the pipe.
"""

import glob
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 0.5  # between two looks at the parent's id, in case the end of file does not come
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # of a scheduler that is about to end a job


class Watchdog:
    """The parent's side: starts the process, and tells it what to clear away."""

    def __init__(self) -> None:
        self.charges: set[int | Path] = set()
        self._process: subprocess.Popen | None = None

    def ensure_running(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())], cwd="/", start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        for charge in self.charges:
            self._send("+", charge)

    def add(self, charge: int | Path) -> None:
        self.charges.add(charge)
        self._send("+", charge)

    def discard(self, charge: int | Path) -> None:
        self.charges.discard(charge)
        self._send("-", charge)

    def _send(self, sign: str, charge: int | Path) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # it was killed; the next one gets all charges
            self._process.stdin.write(os.fsencode(f"{sign}{charge}\n"))


def watch(parent_pid: int) -> set[bytes]:
    """Wait until the parent is gone; returns the groups and paths that are left."""
    charges: set[bytes] = set()
    text = b""
    while True:
        is_alive = os.getppid() == parent_pid
        if select.select([0], [], [], LOOK_SECONDS if is_alive else 0.0)[0]:
            if not (received := os.read(0, 4096)):
                return charges
            *lines, text = (text + received).split(b"\n")
            for line in lines:
                (charges.add if line[:1] == b"+" else charges.discard)(line[1:])
        elif not is_alive:  # and all that it has sent is read
            return charges


def main() -> None:
    # Signals that may go to all processes of a run; the parent decides what they do.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *WARNINGS):
        signal.signal(signum, signal.SIG_IGN)
    for charge in watch(int(sys.argv[1])):
        if charge.startswith(b"/"):
            shutil.rmtree(charge, ignore_errors=True)
            for file in glob.glob(charge):
                with suppress(OSError):
                    os.unlink(file)
        else:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(int(charge), signal.SIGKILL)


if __name__ == "__main__":
    main()
