"""Child processes that leave Ctrl-C to their parent and do not outlive it; what actors and learners have in common."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

from a3c_mp import PARENT_VARIABLE, end_with_parent
from a3c_mp.prints import print_into, prints

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""what a user, a shell or a machine that shuts down ends a script with"""


def start_child(main: Callable[..., None], args: tuple, *, name: str, daemon: bool) -> Any:
    """Spawn a process that runs `main(*args)`; call it from the main thread, whose end would be the child's too.

    A daemon is ended when this process exits, and may have no children itself.
    """
    context = mp.get_context("spawn")
    pipe = prints.open_pipe()
    process = context.Process(target=_main, args=(os.getpid(), pipe, main, args), name=name, daemon=daemon)
    # The first child would start the resource tracker, and that unblocks the SIGINT that is blocked here.
    resource_tracker.ensure_running()
    # A blocked SIGINT stays blocked in the child from its first instruction on, through all its imports.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    try:
        process.start()
    finally:
        del os.environ[PARENT_VARIABLE]
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        if pipe is not None:
            pipe.close()  # the child has its own copy; with this one closed, its end reads as an end of file
    return process


def _main(parent_pid: int, pipe: Connection | None, main: Callable[..., None], args: tuple) -> None:
    """First code of a child."""
    end_with_parent(parent_pid)
    print_into(pipe)
    faulthandler.enable()  # a crash in native code names the Python line that led to it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    main(*args)
