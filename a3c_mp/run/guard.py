"""Checks for NaN and inf in rollouts and gradients; what has them is skipped and counted."""

import math
from collections import Counter

from torch import Tensor

from a3c_mp.errors import TrainingError
from a3c_mp.maths.schedules import passes_power_of_two
from a3c_mp.run.progress import RunState

BAD_IN_A_ROW = 5  # rollouts or gradients with NaN or inf after which a run fails, where each has a cause of its own


class NonFiniteFilter:
    """Checks for NaN and inf; counts what is not finite as `counter`, and fails after `in_a_row` from one source."""

    def __init__(self, run: RunState, counter: str, in_a_row: int = BAD_IN_A_ROW):
        self.run, self.counter, self.in_a_row = run, counter, in_a_row
        self.bad_in_a_row: Counter[str] = Counter()  # by source
        run.counters.update({counter: 0})  # adds: there from the start, kept on resume

    def check(self, value: bool | float | Tensor, source: str, what: str) -> bool:
        """Return whether a rollout or gradient is finite; count and log one that is not, which the caller skips.

        `value` is a norm or loss that is finite only if all of it is, or the answer itself; `source` is the actor or
        learner that it comes from, `what` its name in the log. Raises TrainingError after `in_a_row` of one source that
        were not finite.
        """
        if value if isinstance(value, bool) else math.isfinite(value):
            self.bad_in_a_row[source] = 0
            return True
        self.bad_in_a_row[source] += 1
        self.count_skipped(1, self.bad_in_a_row[source], source, what)
        return False

    def count_skipped(self, number: int, in_a_row: int, source: str, what: str) -> None:
        """Count and log so many that were not finite, the last of them `what`. Raises as `check` does."""
        if in_a_row >= self.in_a_row:
            self.run.counters[self.counter] += number
            fix = "lower --learning-rate, or look for NaN or inf in rewards, observations and fields of infos"
            raise TrainingError(f"{what} contains NaN or inf, {in_a_row} in a row from {source}; {fix}")
        count(self.run, self.counter, number, f"{what} contains NaN or inf; skipped", repeated=True)


def count(run: RunState, name: str, number: int, warning: str, repeated: bool = False) -> None:
    """Add to a counter, which is there from now on, and warn the first time; the last lines of a run have the total.

    With `repeated`, warn whenever the total passes a power of two.
    """
    before = run.counters[name]
    run.counters[name] = total = before + number
    if passes_power_of_two(before, total) and (repeated or before == 0):
        run.log.warning(f"{warning} ({total:,} so far)")
