"""Spawned child processes that leave Ctrl-C to their parent and do not outlive it.

A worker leads a process group. Whatever an environment has started in it (a simulator, a browser) is killed when the
worker ends: by the parent, before it collects the worker's exit code, or by the watchdog when the parent itself is
gone. What an environment puts into a group or session of its own is left to its `close()`.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process, popen_spawn_posix, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from a3c_mp._bootstrap import PARENT_VARIABLE, end_with_parent
from a3c_mp.processes.prints import print_into, prints
from a3c_mp.processes.watchdog import Watchdog

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""signals by which a user, a shell or a machine that shuts down ends a script"""
_watchdog = Watchdog()


def start_child(main: Callable[..., None], args: tuple, *, name: str, daemon: bool, group: bool = False) -> Any:
    """Spawn a process that runs `main(*args)`; to be called from the main thread, as the child ends with its thread.

    Args:
        main: a module-level function.
        args: pickled; shared tensors stay shared.
        name: of the process.
        daemon: it is ended when this process exits, and may start no processes with `multiprocessing` itself.
        group: it leads a process group, which is killed with it.

    Raises:
        OSError, RuntimeError: the machine, or a limit of the user's, allows no further process or thread.
    """
    # The first child would start the resource tracker, and that unblocks the SIGINT that is blocked here.
    resource_tracker.ensure_running()
    if group:
        _watchdog.ensure_running()
    pipe = prints.open_pipe()
    kind = GroupLeader if group else SpawnProcess
    process = kind(target=_main, args=(os.getpid(), pipe, main, args, group), name=name, daemon=daemon)
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


def _main(parent_pid: int, pipe: Connection | None, main: Callable[..., None], args: tuple, group: bool) -> None:
    """Entry point of every child process."""
    if group:
        os.setpgid(0, 0)
        for signum in (signal.SIGTTOU, signal.SIGTTIN):  # a background group that uses the terminal would be stopped
            signal.signal(signum, signal.SIG_IGN)
    end_with_parent(parent_pid)
    if pipe is not None:
        print_into(pipe)
    faulthandler.enable()  # a crash in native code names the Python line that led to it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C does
    with suppress(OSError):  # no /proc
        Path("/proc/self/comm").write_text(current_process().name[:15])  # `top` shows "actor 3" instead of "python"
    main(*args)


class _Popen(popen_spawn_posix.Popen):
    """A child whose process group is killed when its exit code is collected, or by the watchdog."""

    def _launch(self, process_obj: Any) -> None:
        super()._launch(process_obj)  # type: ignore[misc]
        _watchdog.add(self.pid)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        was_running = self.returncode is None
        code = super().poll(flag)
        if was_running and code is not None:  # as long as the group has members, no other process gets its number
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            _watchdog.discard(self.pid)
        return code


class GroupLeader(SpawnProcess):
    """A spawned process that leads a process group."""

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)


@contextmanager
def temporary_folder(root: str) -> Iterator[Path]:
    """A new folder below `root`, with mode 0700; removed at the end, or once this process is gone, however it ended."""
    folder = Path(root, f"a3c-{secrets.token_hex(8)}")
    _watchdog.ensure_running()
    _watchdog.add(folder)  # first: this process may be killed in between
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _watchdog.discard(folder)
