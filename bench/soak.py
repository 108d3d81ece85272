"""Soak test: run a chapter for long, kill its actors at intervals, check that memory, files and rate stay flat.

Samples memory, shared memory, file descriptors, threads and what waits in pipes, over all processes of the run, and the
rate of learning. Fits a line to each once the run has warmed up, and ends with code 1 if one of them leaves its bounds.
Flags that are not listed here are the trainer's.

    python bench/soak.py --chapter ray_dqn                                          # 45 minutes, a kill a minute
    python bench/soak.py --chapter ray_impala --minutes 6 --warm-up 60 --kill-every 15     # 20 kills and more
    python bench/soak.py --chapter ray_impala --minutes 6 --warm-up 60 --kill-every 0 --slow-trainer 10
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import numpy as np
import psutil

from a3c_mp.cli import parse_own
from a3c_mp.config import Between
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with
from bench import common
from bench.outside import actors_among, processes_of, replaced_after, sample, slowed
from bench.records import Result, begin, markdown_table, measure, pyplot

SETTLE_SECONDS = 20.0
"""from the kill of an actor until its successor has loaded everything, on a busy machine"""


class Limit(NamedTuple):
    """How much a curve may drift in an hour: a share of its level, plus so many units."""

    share: float
    units: float
    sign: int = 1  # the direction that is bad


LIMITS = {
    "memory_mib": Limit(0.03, 10.0),
    "shm_mib": Limit(0.01, 1.0),
    "shm_files": Limit(0.0, 0.5),
    "spilled_files": Limit(0.0, 0.5),
    "fds": Limit(0.0, 2.0),
    "threads": Limit(0.0, 2.0),
    "queued_bytes": Limit(0.1, 200.0),
    "sps": Limit(0.05, 0.0, sign=-1),
}


@dataclass(frozen=True)
class Args(common.Args):
    minutes: Annotated[float, Between(0.5)] = 45.0
    """length of the run"""
    kill_every: Annotated[float, Between(0)] = 60.0
    """time between two kills of an actor (s); 0 kills none"""
    slow_trainer: Annotated[float, Between(1, 1000)] = 1.0
    """let the trainer run for only one part in so many of the time, as if it were that much slower"""
    sample_every: Annotated[float, Between(0.5)] = 5.0
    """time between two samples (s)"""
    warm_up: Annotated[float, Between(0)] = 600.0
    """time that is left out of the fits (s): replays fill, allocators find their size"""


# ---- the verdict


class Drift(NamedTuple):
    """A line fitted to a curve."""

    level: float  # mean
    per_hour: float  # slope
    error: float  # standard error of the slope
    allowed: float
    flat: bool


def drift(points: Sequence[tuple[float, float]], limit: Limit) -> Drift:
    """Least squares over points of (seconds, value).

    Neighbours in time resemble each other, so the error counts fewer samples than there are. A curve is flat unless its
    slope is beyond what is allowed by more than twice its error.
    """
    seconds, y = np.array(points, dtype=np.float64).T
    hours = seconds / 3600
    x, level = hours - hours.mean(), float(y.mean())
    slope = float((x * y).sum() / (x * x).sum())
    rest = y - level - slope * x
    variance = float((rest * rest).sum())
    alike = float((rest[1:] * rest[:-1]).sum()) / variance if variance else 0.0
    alike = min(max(alike, 0.0), 0.99)
    error = math.sqrt(variance / (len(y) - 2) / float((x * x).sum()) * (1 + alike) / (1 - alike))
    allowed = limit.share * abs(level) + limit.units
    return Drift(level, slope, error, allowed, limit.sign * slope - 2 * error <= allowed)


def judge(samples: Sequence[dict[str, float]], kills: Sequence[float], args: Args) -> dict[str, Drift]:
    """The drift of every curve after the warm-up, if it has three points there.

    Samples in which an actor is missing or just starting count for the rate only.
    """
    late = [s for s in samples if s["seconds"] >= args.warm_up]
    full = max((s["processes"] for s in late), default=0)
    settle = min(SETTLE_SECONDS, args.kill_every / 2)
    starting = [s for s in late if any(0 <= s["seconds"] - kill < settle for kill in kills)]
    settled = [s for s in late if s["processes"] == full and s not in starting]
    drifts = {}
    for name, limit in LIMITS.items():
        points = [(s["seconds"], s[name]) for s in (late if name == "sps" else settled) if s.get(name) is not None]
        if len(points) >= 3:
            drifts[name] = drift(points, limit)
    return drifts


def add_rates(samples: list[dict[str, float]], progress: Sequence[tuple[float, int]]) -> None:
    """Add to each sample the agent steps a second since the previous one, from the run's (seconds, steps)."""
    times, steps = zip(*progress, strict=True) if progress else ((), ())
    for before, now in pairwise(samples):
        if times and times[0] <= before["seconds"] and now["seconds"] <= times[-1]:
            done = np.diff(np.interp([before["seconds"], now["seconds"]], times, steps))[0]
            now["sps"] = round(float(done) / (now["seconds"] - before["seconds"]), 1)


# ---- the run


class Kill(NamedTuple):
    """An actor that was killed."""

    at: float  # seconds since the start of the run
    replaced_after: float | None  # seconds, until there were as many actors as before; None: they were not


def watch(process: subprocess.Popen, args: Args, folder: Path) -> tuple[list[dict[str, float]], list[Kill]]:
    """Look at a run until it ends, and kill its actors: (samples, kills). The first kill waits until it learns."""
    samples, kills, started = list[dict[str, float]](), list[Kill](), time.time()
    shm_before, next_kill = frozenset(os.listdir("/dev/shm")), math.inf
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(args.sample_every)
        now, processes = time.time() - started, processes_of(process.pid)
        with suppress(OSError, psutil.Error):
            samples.append({"seconds": round(now, 2), **sample(processes, shm_before)})
        if next_kill == math.inf and args.kill_every and is_learning(folder):
            next_kill = now + args.kill_every
        if now >= next_kill and (actors := actors_among(processes)):
            with suppress(psutil.NoSuchProcess):
                min(actors, key=psutil.Process.create_time).kill()  # the one that has lived longest
                kills.append(Kill(round(now, 2), replaced_after(process, actors)))
            next_kill += args.kill_every
    add_rates(samples, [(point.wall_time - started, point.step) for point in common.scalars(folder, "charts/sps")])
    return samples, kills


COUNTS = ("replaced", "replaced_after_median", "replaced_after_max", "samples_per_step", "object_store_mib_max")
"""results of `counted` that are printed; for a run's `--replay-ratio` see its settings"""


def counted(kills: Sequence[Kill], settings: Result, folder: Path) -> Result:
    """How many actors were replaced, and how soon (s); samples a step; the most that Ray's object stores held."""
    found: Result = {"kills": [kill.at for kill in kills]}
    times = sorted(kill.replaced_after for kill in kills if kill.replaced_after is not None)
    if kills:
        found |= {"replaced": len(times), "replaced_after": [kill.replaced_after for kill in kills]}
    if times:
        found |= {"replaced_after_median": statistics.median(times), "replaced_after_max": times[-1]}
    summary = common.read_summary(folder)
    if "replay_ratio" in settings and summary["steps"] > settings["learning_starts"]:
        learned = summary["updates"] * settings["batch_size"]
        found["samples_per_step"] = learned / (summary["steps"] - settings["learning_starts"])
    if used := [point.value for point in common.scalars(folder, "cluster/object_store")]:
        found["object_store_mib_max"] = max(used)
    return found


def is_learning(folder: Path) -> bool:
    """Whether the first games of a run have ended."""
    return common.steps_taken(folder) > 0


def table(result: Result) -> str:
    """The drift of each curve, and how many actors were replaced."""
    (run,) = result["runs"]
    rows = []
    for name, found in run["drifts"].items():
        figures = [f"{found['level']:,.1f}", f"{found['per_hour']:+,.2f}", f"{found['error']:,.2f}"]
        rows.append([name, *figures, f"{found['allowed']:,.1f}", "yes" if found["flat"] else "NO"])
    lines = [markdown_table(["", "level", "drift an hour", "error", "allowed", "flat"], rows)] if rows else []
    lines += [f"{name}: {run[name]:.3f}" for name in COUNTS if name in run]
    lines.append(f"{len(run['kills'])} kills, {run['summary']['worker_restarts']} restarts, code {run['exit_code']}")
    return "\n".join(lines)


def draw(path: Path, run: Result, args: Args) -> None:
    """Every curve over minutes, with its fit, and a tick for each kill."""
    plt = pyplot()
    drifts = run["drifts"]
    size = (9, 1.7 * len(drifts))
    figure, axes = plt.subplots(len(drifts), 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for axis, (name, fit) in zip(axes[:, 0], drifts.items(), strict=True):
        points = [(s["seconds"] / 60, s[name]) for s in run["samples"] if s.get(name) is not None]
        axis.plot(*zip(*points, strict=True), ".", markersize=3)
        ends = np.array([min(args.warm_up / 60, points[-1][0]), points[-1][0]])
        axis.plot(ends, fit.level + fit.per_hour * (ends - ends.mean()) / 60, color="C0" if fit.flat else "C3")
        axis.plot([t / 60 for t in run["kills"]], [0] * len(run["kills"]), "|", color="grey", markersize=4)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    axes[-1, 0].set_xlabel("minutes; a tick for each kill")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    if not Path("/proc/self/smaps_rollup").exists():
        raise ConfigError("bench", "soak", "it reads /proc as Linux has it", "run it on Linux")
    if args.warm_up >= args.minutes * 60:
        raise ConfigError("warm-up", args.warm_up, f"the run lasts {args.minutes * 60:g} s", "lower it")
    unlimited = ["--stop-return=None", "--total-steps=1e12", "--max-restarts=100_000"]
    command = [*common.CHAPTERS[args.chapter], *unlimited, f"--max-seconds={args.minutes * 60}", *flags]
    settings = common.settings_of({"default": command})
    path, result = begin("soak", args, settings["default"]["env_id"], settings)

    def run(row: str, seed: int) -> Result:
        folder = common.run_folder(args, f"soak-{args.chapter}")
        place = [f"--seed={seed}", f"--runs-dir={folder.parent}", f"--run-name={folder.name}"]
        with common.running_script([*command, *place], stdout=subprocess.DEVNULL) as process:  # noqa: SIM117
            with slowed(process, args.slow_trainer, lambda: is_learning(folder)):
                samples, kills = watch(process, args, folder)
        summary, drifts = common.read_summary(folder), judge(samples, [kill.at for kill in kills], args)
        found = {"summary": summary, "exit_code": process.returncode, "samples": samples, "drifts": drifts}
        found |= counted(kills, settings[row], folder)
        if drifts:  # none of a run that ended while it warmed up
            draw(path.with_suffix(".png"), found, args)
        found["drifts"] = {name: fit._asdict() for name, fit in drifts.items()}
        found["survived"] = process.returncode == 0 and summary["worker_restarts"] == len(kills)
        return found | {"flat": len(drifts) == len(LIMITS) and all(fit.flat for fit in drifts.values())}

    (last,) = measure(path, result, [("default", settings["default"]["seed"])], run, table)["runs"]
    return 0 if last["flat"] and last["survived"] else 1


if __name__ == "__main__":
    exit_with(main)
