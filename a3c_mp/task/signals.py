"""Signals of a task: Ctrl-C and SIGTERM finish its iteration."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def finish_on_signal(finish: Callable[[], None], is_finishing: Callable[[], bool]) -> Iterator[None]:
    """Call `finish` at SIGINT and SIGTERM, where nobody else has a handler; one that comes later ends the process.

    Args:
        finish: asks the task to finish.
        is_finishing: whether that has been asked before.
    """

    def on_signal(signum: int, frame: object) -> None:
        if is_finishing():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        finish()

    with ExitStack() as cleanup:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                old = signal.getsignal(signum)
                if old in (signal.default_int_handler, signal.SIG_DFL):
                    signal.signal(signum, on_signal)
                    cleanup.callback(signal.signal, signum, old)
        yield
