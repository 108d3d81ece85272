"""A small process that clears away what its parent leaves once the parent is gone, however that ended.

That is process groups, which it kills, and temporary folders, which it removes. Run as a script, without torch:
`python -I -S watchdog.py PARENT_PID`. Standard input is a socket; a line `+PGID` or `+/FOLDER` adds one, a line with
`-` takes it off. The parent is gone at end of file, or when this process has another parent: a fork of the parent may
still hold the socket.
"""

import os
import select
import shutil
import signal
import sys
from contextlib import suppress

LOOK_SECONDS = 0.5
"""between two looks at the parent's id, in case the end of file does not come"""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""signals that may go to all processes of a run; its parent decides what they do"""


def watch(parent_pid: int) -> set[bytes]:
    """Wait until the parent is gone; returns the groups and folders that are left."""
    charges: set[bytes] = set()
    text = b""
    while True:
        is_alive = os.getppid() == parent_pid
        if not select.select([0], [], [], LOOK_SECONDS if is_alive else 0.0)[0]:
            if is_alive:
                continue
            break  # all that it has sent is read
        received = os.read(0, 4096)
        if not received:
            break
        *lines, text = (text + received).split(b"\n")
        for line in lines:
            (charges.add if line[:1] == b"+" else charges.discard)(line[1:])
    return charges


def main() -> None:
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    charges = watch(int(sys.argv[1]))
    folders = {charge for charge in charges if charge.startswith(b"/")}
    for group in charges - folders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(int(group), signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
