"""A small process that kills the process groups of its parent once the parent is gone, however that ended.

Run as a script, without torch: `python -I -S watchdog.py PARENT_PID`. Standard input is a socket; a line `+PGID` adds
a group to those to kill, a line `-PGID` removes it. The parent is gone at end of file, or when this process has
another parent: a fork of the parent may still hold the socket.
"""

import os
import select
import signal
import sys
from contextlib import suppress

LOOK_SECONDS = 0.5
"""between two looks at the parent's id, in case the end of file does not come"""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""signals that may go to all processes of a run; its parent decides what they do"""


def watch(parent_pid: int) -> set[int]:
    """Wait until the parent is gone; returns the groups that are left."""
    groups: set[int] = set()
    text = b""
    while os.getppid() == parent_pid:
        if not select.select([0], [], [], LOOK_SECONDS)[0]:
            continue
        received = os.read(0, 4096)
        if not received:
            break
        *lines, text = (text + received).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    return groups


def main() -> None:
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    for group in watch(int(sys.argv[1])):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
