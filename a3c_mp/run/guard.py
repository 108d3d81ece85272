"""Checks for NaN and inf in rollouts, gradients and observation statistics; what has them is skipped and counted."""

from __future__ import annotations

import math
from collections import Counter

from torch import Tensor

from a3c_mp.errors import TrainingError
from a3c_mp.maths.schedules import passes_power_of_two
from a3c_mp.nets.obs_norm import OUTLIER, Moments, ObsNorm
from a3c_mp.run.progress import RunState

BAD_IN_A_ROW = 5
"""rollouts or gradients with NaN or inf after which a run fails, where each has a cause of its own"""


class NonFiniteFilter:
    """Check for NaN and inf: counts what is not finite, logs it, and fails if it does not stop.

    Args:
        run: its counters and log are used.
        counter: name of the counter, in the summary and as charts/<counter>.
        in_a_row: how many from one source in a row end the run.
    """

    def __init__(self, run: RunState, counter: str, in_a_row: int = BAD_IN_A_ROW):
        self.run, self.counter, self.in_a_row = run, counter, in_a_row
        self.bad_in_a_row: Counter[str] = Counter()  # by source
        run.counters.update({counter: 0})  # adds: there from the start, kept on resume

    def check(self, value: bool | float | Tensor, source: str, what: str) -> bool:
        """Return whether a rollout or gradient is finite; count and log one that is not, which the caller skips.

        Args:
            value: the norm or loss to check, finite only if all of it is; or the answer itself.
            source: the actor or learner that it comes from.
            what: its name in the log.

        Raises:
            TrainingError: `self.in_a_row` from one source in a row were not finite; none of them was learned from.
        """
        if value if isinstance(value, bool) else math.isfinite(value):
            self.bad_in_a_row[source] = 0
            return True
        self.bad_in_a_row[source] += 1
        self.run.counters[self.counter] += 1
        total = self.run.counters[self.counter]
        if self.bad_in_a_row[source] == self.in_a_row:
            fix = "lower --learning-rate, or look for NaN or inf in rewards and observations"
            raise TrainingError(f"{what} contains NaN or inf, {self.in_a_row} in a row from {source}; {fix}")
        if passes_power_of_two(total - 1, total):
            self.run.log.warning(f"{what} contains NaN or inf; skipped ({total} so far)")
        return False


def update_norm(run: RunState, norm: ObsNorm, obs: Tensor, source: str) -> None:
    """Update the running mean and variance with observations; count and log outliers.

    Args:
        run: its counters and log are used.
        norm: has the mean and variance. In learners that pass the same `obs` they stay equal.
        obs: [N, *shape], as the net receives them.
        source: the actor or buffer that they come from, for the log.
    """
    merge_moments(run, norm, *norm.clipped_moments(obs), source)


def merge_moments(run: RunState, norm: ObsNorm, moments: Moments, clipped: int, source: str) -> None:
    """The same for moments computed elsewhere, by `ObsNorm.clipped_moments`."""
    if norm.image:  # bytes have no outliers
        norm.merge(moments)
        return
    before = run.counters["obs_values_clipped"]
    run.counters.update(obs_values_clipped=clipped, obs_moments_not_finite=0)  # adds: there from the start
    if passes_power_of_two(before, before + clipped):
        text = f"{clipped} values more than {OUTLIER:g} standard deviations from the mean; clipped"
        run.log.warning(f"observations from {source}: {text} ({before + clipped} so far)")
    if not norm.merge(moments):
        run.counters["obs_moments_not_finite"] += 1
        total = run.counters["obs_moments_not_finite"]
        if passes_power_of_two(total - 1, total):
            text = "mean or variance is not finite; left out of the running moments"
            run.log.warning(f"observations from {source}: {text} ({total} so far)")
