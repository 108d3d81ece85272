"""Sampling batches ahead on a thread of the learner."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from a3c_mp.replay.replay import Batch, Replay


class Prefetch:
    """Samples batches ahead on a thread; use it in a `with` block. The first `next()` starts the thread.

    Args:
        replay: the replay to sample.
        batch_size: N.
        ahead: batches sampled ahead; 0 samples on demand, without a thread (deterministic runs).
        pin: page-lock the batches' memory, for copies to a GPU.
    """

    def __init__(self, replay: Replay, batch_size: int, ahead: int = 2, pin: bool = False):
        self.replay, self.batch_size = replay, batch_size
        self._held, *free = (Batch.empty(replay.shards, batch_size, pin) for _ in range(ahead + 1))  # the caller's
        self._free: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()  # memory to fill; None ends the thread
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        for batch in free:
            self._free.put(batch)
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True) if ahead else None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None and self._thread.ident is not None:
            with suppress(queue.Empty):  # take back empty batches; the thread may take the last one meanwhile
                while True:
                    self._free.get_nowait()
            self._free.put(None)
            self._thread.join()

    def next(self) -> Batch:
        """The next batch; its memory is reused after the next call. Raises whatever `Replay.sample` raised."""
        if self._thread is None:
            return self.replay.sample(self.batch_size, self._held)
        if self._thread.ident is None:
            self._thread.start()
        self._free.put(self._held)
        found = self._ready.get()
        if isinstance(found, BaseException):
            self._ready.put(found)  # the thread has ended: without this, the next call would wait forever
            raise found
        self._held = found
        return found

    def _run(self) -> None:
        try:
            while (batch := self._free.get()) is not None:
                self._ready.put(self.replay.sample(self.batch_size, batch))
        except BaseException as error:
            self._ready.put(error)
