"""First and last code of a supervised process: how it ends, and what its parent hears of that."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from types import FrameType
from typing import Any

from a3c_mp.errors import Terminated

MAX_MESSAGE = 4096 - 4
"""bytes; PIPE_BUF on Linux, the most that a pipe takes in one piece, less the length that stands before a message"""
ERROR, DONE = "error", "done"
"""kinds of the last message of a process: `(ERROR, traceback)`, and `(DONE,)` of one that is not to be replaced"""
STARTING = "starting"
"""kind of the message `(STARTING,)`: what takes long at the start of a process, such as its environments, follows"""


def run_supervised(
    main: Callable[[], None],
    pipe: connection.Connection,
    *,
    on_sigterm: Callable[[int, FrameType | None], None] | None = None,
    close: Callable[[], None] = lambda: None,
    leave: Callable[[int], Any] = sys.exit,
) -> None:
    """Run `main()` and then `close()`, however `main` ends; send the traceback of an exception to the parent.

    Args:
        main: what the process does. SIGTERM raises `Terminated` in it.
        pipe: to the parent.
        on_sigterm: handler of SIGTERM instead of `raise_terminated`.
        close: closes what is open; a SIGTERM meanwhile changes nothing.
        leave: called with exit code 1 after an exception.
    """
    signal.signal(signal.SIGTERM, on_sigterm or raise_terminated)
    failed = terminated = False
    try:
        try:
            main()
        except Terminated:
            raise
        except BaseException:  # an environment's SystemExit too
            failed = True
            text = traceback.format_exc().encode(errors="backslashreplace")[-3 * MAX_MESSAGE // 4 :]
            with suppress(OSError):  # the parent is gone
                pipe.send((ERROR, text.decode(errors="replace")))
    except Terminated:  # also while the traceback is sent
        terminated = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if terminated:  # to the parent, and to the sender, it ends as any other program does
        os.kill(os.getpid(), signal.SIGTERM)
    if failed:
        leave(1)


def raise_terminated(signum: int, frame: FrameType | None) -> None:
    """Signal handler that unwinds the process; a second signal does not interrupt what is closed on the way."""
    signal.signal(signum, signal.SIG_IGN)
    raise Terminated
