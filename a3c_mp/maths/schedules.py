"""Schedules: what depends on progress."""


def linear(start: float, end: float, step: int, total: int) -> float:
    """From `start` at step 0 to `end` at `total`, and `end` from there on."""
    share = min(max(step / total, 0.0), 1.0)
    return start + (end - start) * share


class Every:
    """Tells, of a count that grows, when it has reached or passed a multiple of `period` since the last call.

    Args:
        period: 1 or more; None for never.
        count: where it begins.
    """

    def __init__(self, period: int | None, count: int = 0):
        self.period = period
        self.multiple = 0 if period is None else count // period

    def __call__(self, count: int) -> bool:
        if self.period is None:
            return False
        before, self.multiple = self.multiple, count // self.period
        return self.multiple > before


def passes_power_of_two(before: int, after: int) -> bool:
    """Whether a count has reached or passed 1, 2, 4, 8, ...: what is logged then stays readable."""
    return before.bit_length() < after.bit_length()
