"""Schedules: linear annealing, and triggers for every so many steps."""


def linear(start: float, end: float, step: int, total: int) -> float:
    """Anneal linearly from `start` at step 0 to `end` at step `total`; stay at `end` afterwards."""
    share = min(max(step / total, 0.0), 1.0)
    return start + (end - start) * share


class Every:
    """Periodic trigger: true when a count has reached or passed a multiple of `period` since the last call.

    Args:
        period: 1 or more; None for never.
        count: its value at the start.
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
    """Whether a count has reached or passed a power of two (1, 2, 4, 8, ...), to log less and less often."""
    return before.bit_length() < after.bit_length()
