"""Schedules: pure functions of progress."""


def linear(start: float, end: float, step: int, total: int) -> float:
    """From `start` at step 0 to `end` at `total`, and `end` from there on."""
    share = min(max(step / total, 0.0), 1.0)
    return start + (end - start) * share
