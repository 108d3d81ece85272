"""Ends the games that the trainer plays in its own process: at a signal, or when an environment hangs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.processes.supervisor import START_SECONDS


class Interrupted(Exception):
    """A signal has arrived, or the time is over."""


@contextmanager
def ends_at_signals(is_interrupted: Callable[[], bool], hang_seconds: float) -> Iterator[Callable[[], None]]:
    """Raise in the main thread, also within a step that never returns; yields what to call after each step.

    Python runs signal handlers between its own instructions: a step that hangs in compiled code is not ended.

    Args:
        is_interrupted: whether a signal has arrived, as the handlers found at the start record it, or the time is over.
        hang_seconds: longest time between two steps (s); the first may take `START_SECONDS`, as environments are made
            before it.

    Raises:
        Interrupted: `is_interrupted` says so.
        TimeoutError: a step took longer than `hang_seconds`, or the first one did not come in time.
    """

    def end() -> None:
        if is_interrupted():
            raise Interrupted

    def then_end(handler: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def on_signal(signum: int, frame: FrameType | None) -> None:
            handler(signum, frame)
            end()

        return on_signal

    start_seconds = max(START_SECONDS, hang_seconds)
    late = f"no first step within {start_seconds:g} s"

    def on_step() -> None:
        nonlocal late
        end()  # an environment may have caught what a handler raised
        late = f"a step took longer than --hang-seconds {hang_seconds:g}"
        signal.setitimer(signal.ITIMER_REAL, hang_seconds)

    def on_timeout(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(late)

    with ExitStack() as cleanup:
        for signum in SIGNALS:
            if callable(old := signal.getsignal(signum)):
                signal.signal(signum, then_end(old))
                cleanup.callback(signal.signal, signum, old)
        cleanup.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, on_timeout))
        cleanup.callback(signal.setitimer, signal.ITIMER_REAL, 0)  # first: callbacks run in reverse
        signal.setitimer(signal.ITIMER_REAL, start_seconds)
        yield on_step
