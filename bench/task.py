"""What a task costs: time of a middleware and of its timer, waiting and computing side by side, messages between nodes.

Without reinforcement learning; `bench/pairs.py` compares chapter 5 with chapter 1.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import torch

from a3c_mp.cli import parse_plain
from a3c_mp.config import Count
from a3c_mp.run.script import exit_with
from a3c_mp.task.context import Context
from a3c_mp.task.node import Node
from a3c_mp.task.parallel import runner
from a3c_mp.task.task import Task
from a3c_mp.task.timing import StepTimer
from bench import common

MIDDLEWARE, ITERATIONS = 20, 2000
ROUND_TRIPS, MESSAGES, REQUESTS = 1000, 10_000, 20
WEIGHTS = 1_700_000
"""float32 values in a large message: about 7 MB, Pong's net"""


@dataclass(frozen=True)
class Args:
    chapter: ClassVar[str] = "task"
    repeat: Count = 5
    """repetitions; medians are reported"""
    results: Path = common.RESULTS
    """folder of the result file"""


def plain(ctx: Context) -> None:
    pass


def two_halves(ctx: Context) -> Any:
    yield


def microseconds(fn: Callable[[Context], Any], timed: bool) -> float:
    """Time of one middleware in an iteration (microseconds)."""
    with Task() as task:
        if timed:
            task.use_wrapper(StepTimer(0))
        for number in range(MIDDLEWARE):
            task.use(fn, name=f"middleware {number}")
        started = time.perf_counter()
        task.run(max_step=ITERATIONS)
        return (time.perf_counter() - started) / ITERATIONS / MIDDLEWARE * 1e6


def compute(seconds: float, ctx: Context) -> None:
    """Python code that holds the interpreter's lock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def iteration_seconds(middleware: Callable[..., Any], **settings: Any) -> float:
    """Time of an iteration with middleware of 0.2, 0.1 and 0.1 s."""
    with Task(**settings) as task:
        for seconds in (0.2, 0.1, 0.1):
            task.use(partial(middleware, seconds))
        started = time.perf_counter()
        task.run(max_step=1)
        return time.perf_counter() - started


def sleep(seconds: float, ctx: Context) -> None:
    time.sleep(seconds)


def talk(node: Node) -> dict[str, float]:
    """On node 0: microseconds of a round trip, messages a second, MB a second of large answers."""
    if node.name != "node.0":
        node.handle("ping", lambda sender: node.send("pong", to=sender))
        node.handle("wanted", lambda sender: node.send("weights", torch.zeros(WEIGHTS), to=sender))
        node.send("ready", to="node.0")
        while not node.finishing:
            node.wait()
        return {}
    seen: list[float] = []
    ready: list[str] = []
    node.handle("ready", ready.append)
    while not ready:
        node.wait()
    node.handle("pong", lambda sender: seen.append(time.perf_counter()))
    trips = []
    for number in range(ROUND_TRIPS):
        started = time.perf_counter()
        node.send("ping", to="node.1")
        while len(seen) <= number:
            node.wait()
        trips.append(seen[-1] - started)
    seen.clear()
    started = time.perf_counter()
    for _ in range(MESSAGES):
        node.send("ping", to="node.1")
    while len(seen) < MESSAGES:
        node.wait()
    pairs = time.perf_counter() - started
    started = time.perf_counter()
    arrived: list[torch.Tensor] = []
    node.handle("weights", lambda sender, weights: arrived.append(weights))
    for number in range(REQUESTS):
        node.send("wanted", to="node.1")
        while len(arrived) <= number:
            node.wait()
    large = time.perf_counter() - started
    return {
        "round trip (us)": statistics.median(trips) * 1e6,
        "messages a second, both ways": 2 * MESSAGES / pairs,
        "MB a second, answers of 7 MB": REQUESTS * WEIGHTS * 4 / 1e6 / large,
    }


def main() -> int:
    args = parse_plain(Args, __doc__)
    result = common.begin("task", args, "none")
    rows: list[dict[str, float]] = []
    for _ in range(args.repeat):
        row = {
            "middleware (us)": microseconds(plain, timed=False),
            "middleware with StepTimer (us)": microseconds(plain, timed=True),
            "generator (us)": microseconds(two_halves, timed=False),
            "generator with StepTimer (us)": microseconds(two_halves, timed=True),
        }
        for name, settings in {"in order": {}, "async, 3 workers": {"async_mode": True}}.items():
            row[f"sleeping 0.2, 0.1, 0.1 s, {name} (s)"] = iteration_seconds(sleep, **settings)
            row[f"computing 0.2, 0.1, 0.1 s, {name} (s)"] = iteration_seconds(compute, **settings)
        rows.append(row | {f"Unix socket: {name}": value for name, value in runner(2)(talk).items()})
    result["repetitions"] = rows
    result["medians"] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    path = common.result_path(args.results, result, with_env=False)
    common.save(path, result)
    for name, value in result["medians"].items():
        print(f"{name}: {value:,.2f}")
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
