"""Threads of a task: the forward halves of several middleware at the same time."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from a3c_mp.task.context import Context
from a3c_mp.task.events import Events
from a3c_mp.task.middleware import Step


class Threads:
    """Runs forward halves at the same time; to be used in a `with` block.

    Args:
        number: of threads; further halves wait for one.
        events: of the task. Waits for one end when a half fails.
        name: of the threads.
    """

    def __init__(self, number: int, events: Events, name: str):
        self._events, self._pool = events, ThreadPoolExecutor(number, name)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown()

    def forward(self, steps: Sequence[Step], ctx: Context, stack: ExitStack) -> None:
        """Run the forward halves. What they suspend goes on the stack in their order, not in time's.

        The first error ends the waits of the others, and those that have not started are not run.
        """
        stacks = [ExitStack() for _ in steps]
        errors: list[BaseException] = []  # in the order of time

        def run(step: Step, own: ExitStack) -> None:
            if not errors:
                step.forward(ctx, own)

        def ended(future: Future[None]) -> None:
            if (error := future.exception()) is not None:
                errors.append(error)
                self._events.fail(error)
            self._events.wake()

        futures = []
        for step, own in zip(steps, stacks, strict=True):
            futures.append(self._pool.submit(contextvars.copy_context().run, run, step, own))
            futures[-1].add_done_callback(ended)
        try:
            self._events.wait_until(lambda: all(future.done() for future in futures))
        except BaseException as error:  # of a listener: nothing is to run while the way back is gone
            errors.append(error)
            self._events.fail(error)
            wait(futures)
            raise
        finally:
            for own in stacks:
                stack.push(own)
        if errors:
            self._events.error = None  # waits have ended
            raise errors[0]
