"""Sampling ahead of the learner, on a thread of its process."""

from __future__ import annotations

from a3c_mp.replay.replay import Batch, Replay


class Prefetch:
    """Draws and gathers batches ahead, to be used in a `with` block; the first `next()` starts it.

    Args:
        replay: what is drawn from.
        batch_size: N.
        ahead: batches that may lie ready; 0 draws each when it is asked for, without a thread (deterministic runs).
        pin: page-lock the batches' memory, for copies to a GPU.
    """

    def __init__(self, replay: Replay, batch_size: int, ahead: int = 2, pin: bool = False):
        raise NotImplementedError

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exc: object) -> None:
        raise NotImplementedError

    def next(self) -> Batch:
        """The next batch; its memory is filled again after the next call.

        Raises:
            what `Replay.sample` raises, also on the thread.
        """
        raise NotImplementedError
