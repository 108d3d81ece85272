"""What every peer's script has in common: its flags, and the lines that it prints while it trains.

A line is JSON, at most one a second: [seconds since the start, agent steps, mean return of the last 100 games or null].
These scripts run in environments of their own and import nothing of a3c_mp, which would limit OpenMP to one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable

WINDOW, MIN_GAMES = 100, 20
"""games in a mean return, and the fewest that there must be"""
STEPS = 10**9
"""a budget that no run here reaches: time or the return ends it"""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the flags that every peer has."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--env-id", default="PongNoFrameskip-v4", help="Atari id with frame skip 1")
    found.add_argument("--seconds", type=float, default=60.0, help="how long to train (s)")
    found.add_argument("--stop-return", type=float, default=math.inf, help="end once the mean return is this")
    found.add_argument("--seed", type=int, default=1, help="seed of weights, environments and sampling")
    found.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU cores to use")
    return found


class Points:
    """Prints the points of a learning curve, and says when the run is over.

    Args:
        args: from `parser`.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.started, self.printed = args, time.perf_counter(), -math.inf

    def add(self, steps: int, returns: Iterable[float]) -> bool:
        """Record agent steps and the raw returns of the latest whole games. Returns whether training goes on."""
        seconds = time.perf_counter() - self.started
        latest = list(returns)[-WINDOW:]
        mean = sum(latest) / len(latest) if len(latest) >= MIN_GAMES else None
        is_over = seconds >= self.args.seconds or (mean is not None and mean >= self.args.stop_return)
        if is_over or seconds - self.printed >= 1.0:
            self.printed = seconds
            print(json.dumps([round(seconds, 3), int(steps), mean]), flush=True)
        return not is_over
