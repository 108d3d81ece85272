"""The end of a script: exit codes, and an exit that threads and processes of an environment cannot delay."""

import atexit
import errno
import importlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist

from a3c_mp._bootstrap import IGNORED_AT_START
from a3c_mp.errors import ConfigError, NothingToDo, Stopped
from a3c_mp.processes.console import console, discard_output
from a3c_mp.processes.spawn import SIGNALS

RECEIVED: list[int] = []  # signals that have arrived outside a run: their exception is lost in a weakref's callback
RUNNING: list[Callable[[], int]] = []  # the `main` that `exit_with` runs: this process does nothing else
PATIENCE_SECONDS = 2.0  # after a signal, until a further one ends the process at once
FULL = errno.ENOSPC, errno.EDQUOT  # errors of full disks
END_SECONDS = 1.0  # longest wait for each of output, other threads and processes, and exit functions


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main` and end the process with its exit code, whatever an environment has left running.

    A ConfigError becomes one line and code 2, NothingToDo one line and code 0, a signal that `main` does not handle
    code 128 + its number, output whose reader has gone 128 + SIGPIPE, any other error a traceback and code 1.
    """
    threads = threading.enumerate()
    handle_signals(_on_signal)
    RUNNING.append(main)
    code: Any = 1
    report: Callable[[], object] | None = None
    try:
        code = _importable(main)()
    except ConfigError as error:
        from a3c_mp.run.followed import report_error  # here, as few runs have one

        code, report = 2, partial(report_error, error)
    except NothingToDo as reason:
        code, report = 0, partial(print, reason)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and is_unread(sys.stdout):  # as in `python play.py ... | head -1`
            end_process(128 + signal.SIGPIPE, threads)
        report = partial(sys.excepthook, type(error), error, error.__traceback__)
        if isinstance(error, OSError) and error.errno in FULL:
            what, last = error.filename or "the output", traceback.extract_tb(error.__traceback__)[-1]
            what = f"error: {what} cannot be written ({error.strerror}; {Path(last.filename).name}:{last.lineno})"
            report = partial(print, what, file=sys.stderr)
    RECEIVED.clear()
    RUNNING.clear()
    if report is not None:
        console.drain()
        in_time(report)
    handle_signals(signal.SIG_IGN)
    end_process(code, threads)


def _importable(main: Callable[[], int]) -> Callable[[], int]:
    """`main`, or that of the script as a module if `__main__` is a profiler, so that children can import it."""
    function: Any = getattr(main, "train", main)  # of a `Chapter`
    if function.__module__ != "__main__" or function.__globals__ is vars(sys.modules["__main__"]):
        return main
    module = importlib.import_module(Path(function.__code__.co_filename).stem)
    return getattr(module, "main" if function is not main else function.__name__, main)


def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for signum in {*SIGNALS} - {*IGNORED_AT_START}:  # nohup ignores SIGHUP
        signal.signal(signum, handler)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    since = time.monotonic()  # what ends may itself wait without limit, for a simulator that the signal has ended, say
    handle_signals(lambda later, _: time.monotonic() < since + PATIENCE_SECONDS or os._exit(128 + later))
    RECEIVED.append(signum)
    raise Stopped(128 + signum)


def raise_received() -> None:
    """Raise `Stopped` again, for a signal whose exception an environment has swallowed."""
    if RECEIVED:
        raise Stopped(128 + RECEIVED.pop())


def end_process(code: Any, own_threads: Collection[threading.Thread]) -> NoReturn:
    """Raise SystemExit, or end at once where the interpreter could wait without limit for threads not of its own."""
    is_clear = console.drain() and in_time(lambda: (flush(sys.stdout), flush(sys.stderr)))
    is_clear &= in_time(partial(end_others, own_threads))
    is_clear &= not (dist.is_available() and dist.is_initialized())  # its destructor may wait for peers
    number = code if isinstance(code, int) else int(code is not None)
    if is_clear and torch.cuda.is_initialized():  # torch would warn of memory that processes have shared
        in_time(atexit._run_exitfuncs)
        atexit.register(os._exit, number)
    if is_clear:
        sys.exit(code)
    in_time(atexit._run_exitfuncs)
    os._exit(number)


def in_time(function: Callable[[], object], seconds: float = END_SECONDS) -> bool:
    """Run a function on a thread and wait for it for at most `seconds`. Returns whether it has ended."""
    thread = threading.Thread(target=function, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no further thread is allowed
        function()
        return True
    thread.join(seconds)
    return not thread.is_alive()


def flush(stream: TextIO) -> bool:
    """Flush a stream. Returns whether it can be written: its reader may have gone."""
    try:
        stream.flush()
    except (OSError, ValueError):
        discard_output(stream)  # else it would change the exit code
        return False
    return True


def is_unread(stream: TextIO) -> bool:
    """Whether the reader of a pipe has gone; the write that has failed may have left nothing to flush."""
    poll = select.poll()
    with suppress(OSError, ValueError):  # it is no file, or closed
        poll.register(stream.fileno(), 0)
    return not stream.closed and (not flush(stream) or any(event & select.POLLERR for _, event in poll.poll(0)))


def end_others(own_threads: Collection[threading.Thread]) -> None:
    """Terminate child processes and wait for threads, as the interpreter would wait for both."""
    for child in multiprocessing.active_children():
        if not child.daemon:
            child.terminate()
            child.join()
    for thread in threading.enumerate():
        if not thread.daemon and thread not in own_threads:
            thread.join()
