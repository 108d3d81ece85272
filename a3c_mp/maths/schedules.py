"""Schedules: linear annealing, and whether a count has passed a power of two."""


def linear(start: float, end: float, step: int, total: int) -> float:
    """Anneal linearly from `start` at step 0 to `end` at step `total`; stay at `end` afterwards."""
    share = min(max(step / total, 0.0), 1.0)
    return start + (end - start) * share


def passes_power_of_two(before: int, after: int) -> bool:
    """Whether a count has reached or passed a power of two (1, 2, 4, 8, ...), to log less and less often."""
    return before.bit_length() < after.bit_length()
