"""Checks rollouts, gradients and moments of observations for NaN and inf: these are skipped, counted and logged."""

from __future__ import annotations

import math
from collections import Counter

from torch import Tensor

from a3c_mp.errors import TrainingError
from a3c_mp.maths.schedules import passes_power_of_two
from a3c_mp.nets.obs_norm import OUTLIER, Moments, ObsNorm
from a3c_mp.run.replica import ReplicaRun
from a3c_mp.run.run import Run

BAD_IN_A_ROW = 5
"""pieces of data or gradients, where each that is not finite has a reason of its own"""


class FiniteGuard:
    """Says what may be learned from.

    Args:
        run: counts what may not, in its summary and as a curve, and names it in the log.
        counter: the name of the count.
        in_a_row: not finite, from one source, before the run gives up.
    """

    def __init__(self, run: Run | ReplicaRun, counter: str, in_a_row: int = BAD_IN_A_ROW):
        self.run, self.counter, self.in_a_row = run, counter, in_a_row
        self.bad_in_a_row: Counter[str] = Counter()  # by source
        run.counters.update({counter: 0})  # adds: there from the start, kept on resume

    def check(self, figure: bool | float | Tensor, source: str, what: str) -> bool:
        """Whether something is finite.

        Args:
            figure: a number that is finite if it is, or the answer itself.
            source: who it comes from; one that brings nothing else is given up.
            what: its name in the log.

        Raises:
            TrainingError: `self.in_a_row` of one source were not finite; none of them has been learned from.
        """
        if figure if isinstance(figure, bool) else math.isfinite(figure):
            self.bad_in_a_row[source] = 0
            return True
        self.bad_in_a_row[source] += 1
        self.run.counters[self.counter] += 1
        total = self.run.counters[self.counter]
        if self.bad_in_a_row[source] == self.in_a_row:
            fix = "lower --learning-rate, or look for such rewards and observations"
            raise TrainingError(f"{what} is not finite, the {self.in_a_row}th of {source} in a row; {fix}")
        if passes_power_of_two(total - 1, total):
            self.run.log.warning(f"{what} contains NaN or inf; skipped ({total} so far)")
        return False


def update_norm(run: Run | ReplicaRun, norm: ObsNorm, obs: Tensor, source: str) -> None:
    """Merge observations [N, *shape] into the running moments; count and log what was clipped, or left out of them.

    Args:
        run: has the counters and the log. Learners that call this with the same `obs` come to the same moments.
        norm: whose moments they are.
        obs: as the net is given them.
        source: who they come from, for the log.
    """
    merge_moments(run, norm, *norm.clipped_moments(obs), source)


def merge_moments(run: Run | ReplicaRun, norm: ObsNorm, moments: Moments, clipped: int, source: str) -> None:
    """The same for moments taken elsewhere, by `ObsNorm.clipped_moments`."""
    if norm.image:  # bytes have no outliers
        norm.merge(moments)
        return
    before = run.counters["obs_values_clipped"]
    run.counters.update(obs_values_clipped=clipped, obs_moments_not_finite=0)  # adds: there from the start
    if passes_power_of_two(before, before + clipped):
        text = f"{clipped} values more than {OUTLIER:g} deviations from the mean; clipped"
        run.log.warning(f"observations from {source}: {text} ({before + clipped} so far)")
    if not norm.merge(moments):
        run.counters["obs_moments_not_finite"] += 1
        total = run.counters["obs_moments_not_finite"]
        if passes_power_of_two(total - 1, total):
            text = "mean or variance is not finite; left out of the running moments"
            run.log.warning(f"observations from {source}: {text} ({total} so far)")
