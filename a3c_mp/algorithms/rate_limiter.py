"""Rate limiter between a replay's actors and its learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from a3c_mp.replay import Batch
from a3c_mp.run.progress import RunState


class Batches(Protocol):
    """Source of batches: a `Prefetch`, or the shards of a cluster."""

    batch_size: int

    def next(self) -> Batch | None: ...


class RateLimiter:
    """Rate limiter: a fixed ratio of samples to inserts (Cassirer et al. 2021, "Reverb", section 3.3).

    Args:
        samples_per_insert: samples to learn for each inserted step.
        min_size_to_sample: transitions in the replays of all learners before the first sample.
    """

    def __init__(self, samples_per_insert: float, min_size_to_sample: int):
        self.samples_per_insert, self.min_size_to_sample = samples_per_insert, min_size_to_sample
        self.samples_allowed = 0.0

    def insert(self, steps: int, sizes: Sequence[int]) -> None:
        """Count inserted steps, once all replays together, of these `sizes`, hold enough and none is empty."""
        if sum(sizes) >= self.min_size_to_sample and min(sizes) > 0:
            self.samples_allowed += self.samples_per_insert * steps

    def allowed(self, batches: Batches, run: RunState) -> Iterator[Batch]:
        """Yield as many batches as the ratio allows; fewer if the run should stop, unless it is deterministic."""
        while self.samples_allowed >= batches.batch_size and (run.args.deterministic or not run.should_stop()):
            with run.timing("drawing"):
                batch = batches.next()
            if batch is None:  # there are none at the moment
                return
            yield batch
            self.samples_allowed -= batches.batch_size

    def state_dict(self) -> dict[str, Any]:
        return {"allowed": self.samples_allowed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples_allowed = state["allowed"]
