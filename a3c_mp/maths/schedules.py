"""Schedules: linear annealing, that of learning rates, and whether a count has passed a power of two."""

from typing import Any


def linear(start: float, end: float, step: int, total: int) -> float:
    """Anneal linearly from `start` at step 0 to `end` at step `total`; stay at `end` afterwards."""
    share = min(max(step / total, 0.0), 1.0)
    return start + (end - start) * share


def set_learning_rate(learner: Any) -> None:
    """Anneal the learning rate to `--learning-rate-end`, if there is one: times the "lr_factor" of groups with one."""
    args = learner.args
    if args.learning_rate_end is not None:
        steps = getattr(args, "anneal_steps", 0) or args.total_steps
        rate = linear(args.learning_rate, args.learning_rate_end, learner.steps, steps)
        for group in learner.optimizer.param_groups:
            group["lr"] = group.get("lr_factor", 1.0) * rate


def passes_power_of_two(before: int, after: int) -> bool:
    """Whether a count has reached or passed a power of two (1, 2, 4, 8, ...), to log less and less often."""
    return before.bit_length() < after.bit_length()
