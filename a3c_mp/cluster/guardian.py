"""Ends what Ray has started, once the process that it was started for is gone: killed ones cannot clean up.

Run as a script, it reads lines from stdin: the folder of a cluster, and process ids. When stdin ends without the line
"done", its parent was killed: it ends those processes, what they have started, and what belongs to the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

DONE = "done"
END_SECONDS = 1.0


class Guardian:
    """The parent's end: a process that cleans up if this one is killed.

    Args:
        folder: of the cluster, to be removed then; None if others use it too.
    """

    def __init__(self, folder: Path | None):
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._write(f"{folder or ''}\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pids: Iterable[int]) -> None:
        """Have these processes ended too, and what they have started."""
        self._write("".join(f"{pid}\n" for pid in pids))

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def close(self) -> None:
        """End the guardian: there is nothing left to guard."""
        with suppress(OSError):
            self._process.communicate(DONE)


def parents() -> dict[int, int]:
    """Process -> its parent, of all processes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def descendants(pids: Iterable[int]) -> list[int]:
    """Processes and all that descend from them."""
    found, family = list(pids), parents()
    for pid in found:  # it grows meanwhile
        found += [child for child, parent in family.items() if parent == pid and child not in found]
    return [pid for pid in found if pid in family]


def processes_of(folder: Path) -> list[int]:
    """Processes that have a folder in their arguments or a file of it open, and all that descend from them."""
    own = {os.getpid(), os.getppid()}  # a trainer has log files open there too
    return descendants(
        pid for pid in parents() if pid not in own and (str(folder) in command_line(pid) or has_open(pid, folder))
    )


def has_open(pid: int, folder: Path) -> bool:
    """Whether a process has a file below a folder open; Ray's agents do not keep their arguments."""
    with suppress(OSError):
        return any(os.readlink(link).startswith(f"{folder}/") for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def end_processes(pids: Iterable[int]) -> None:
    """Kill processes, and wait until they are gone or only wait for their exit code to be collected."""
    pids = list(pids)
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and any(command_line(pid) for pid in pids):
        time.sleep(0.02)


def end_cluster(folder: Path) -> None:
    """End the processes of a cluster's folder."""
    end_processes(processes_of(folder))


def remove_folder(folder: Path) -> None:
    """Remove a folder, into which a process that is just ending may still write."""
    deadline = time.monotonic() + END_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    folder, *rest = sys.stdin.read().splitlines()
    if DONE not in rest:
        end_processes(descendants(int(line) for line in rest))
        if folder:
            end_cluster(Path(folder))
            remove_folder(Path(folder))


if __name__ == "__main__":
    main()
