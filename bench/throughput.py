"""Steady agent steps a second of chapters, settings and checkouts side by side, on a host whose speed changes.

The trainers of all rows are started, then take turns: one runs for `--window` seconds while the others are stopped
(SIGSTOP, SIGCONT). On a shared host the rates of single runs differ by a third, these by a few per cent:

    python bench/throughput.py --rows a3c_data "task eval-every=0" task --env-id CartPole-v1
    python bench/throughput.py --trees ../before . --repeat 5

A row's cost is the processor time of a step in the learner's process and in all others. The most that this code can do
here ("at most") is the cores divided by their sum, or the rate of a learner that never waits for data if that is less:
its time has what it waits for a GPU. Flags that are not listed here are the trainer's.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import psutil

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError
from a3c_mp.processes.spawn import PARENT_VARIABLE
from a3c_mp.run.script import exit_with
from bench import common
from bench.outside import cpu_seconds, processes_of
from bench.records import Result, begin, commit_of, markdown_table, measure

UNTIL_STOPPED = ["--stop-return=None", "--total-steps=1e12", "--hang-seconds=600"]


@dataclass(frozen=True)
class Args(common.RowArgs):
    trees: tuple[Path, ...] = (common.ROOT,)
    """checkouts in which each row is run; rates are divided by those of the first row in the first one"""
    warm_up: Annotated[float, Between(1)] = 20.0
    """how long each runs before the others start, starting up included (s)"""
    window: Annotated[float, Between(0.5)] = 2.0
    """length of a turn (s)"""
    windows: Count = 20
    """turns of each"""
    repeat: Count = 3
    """repetitions, with new processes; medians are reported"""


@dataclass
class Contestant:
    """A trainer, and when it ran: (start, end) in seconds of the clock."""

    trainer: subprocess.Popen
    folder: Path
    turns: list[tuple[float, float]] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)  # learner's and others' processor time after each (s)

    def run(self, seconds: float) -> None:
        """Let the trainer run for so long, from a stop to a stop."""
        start = time.time()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        self.turns.append((start, time.time()))
        if (code := self.trainer.poll()) is not None:
            raise ConfigError("trees", self.folder, f"its trainer ended with code {code}", "start it alone to see why")
        learner, *others = processes_of(self.trainer.pid)
        self.cpu.append((cpu_seconds([learner]), cpu_seconds(others)))

    def send(self, signum: int) -> None:
        """Send a signal to the trainer and all its processes."""
        for process in processes_of(self.trainer.pid):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def figures(self) -> Result:
        """Agent steps a second of its own time, after the warm-up; processor time of a step (ms); learner_busy.

        That is the share of the learner's time in which it does not wait for data; 0 where a chapter does not say.
        """
        warm, end = self.turns[0][1], self.turns[-1][1]
        points = [point for point in common.scalars(self.folder, "time/elapsed_seconds") if point.wall_time <= end]
        before = [point for point in points if point.wall_time <= warm]
        if not before or before[-1].step == points[-1].step:
            why = "nothing was learned in the warm-up, or nothing after it"
            raise ConfigError("warm-up", round(warm - self.turns[0][0]), why, "raise it, or --windows")
        first, last = before[-1], points[-1]
        own = sum(max(0.0, min(b, last.wall_time) - max(a, first.wall_time)) for a, b in self.turns)
        sps = (last.step - first.step) / own
        steps = sps * sum(b - a for a, b in self.turns[1:])
        learner, others = (1000 * (b - a) / steps for a, b in zip(self.cpu[0], self.cpu[-1], strict=True))
        waiting = [
            point for point in common.scalars(self.folder, "time/waiting") if first.step < point.step <= last.step
        ]
        busy = 1 - statistics.fmean(point.value for point in waiting) if waiting else 0.0
        return {"sps": sps, "learner_ms": learner, "others_ms": others, "learner_busy": busy}


@contextmanager
def started(tree: Path, command: Sequence[str], folder: Path) -> Iterator[Contestant]:
    """The trainer of a checkout; at the end of the block it is ended by SIGTERM, and waited for."""
    place = [f"--runs-dir={folder.parent.absolute()}", f"--run-name={folder.name}"]
    env = {**os.environ, PARENT_VARIABLE: str(os.getpid())}  # killed with this process: it may be stopped then
    trainer = subprocess.Popen([sys.executable, *command, *place], cwd=tree, env=env, stdout=subprocess.DEVNULL)
    contestant = Contestant(trainer, folder)
    try:
        yield contestant
    finally:
        contestant.send(signal.SIGCONT)
        if trainer.poll() is None:
            trainer.terminate()
            trainer.wait()


def repetition(args: Args, commands: Mapping[str, tuple[Path, list[str]]], number: int) -> dict[str, Result]:
    """Figures of all rows, which take turns; every second repetition goes through them backwards."""
    names = list(commands)[:: 1 if number % 2 else -1]
    with ExitStack() as stack:
        contestants = {}
        for name in names:
            folder = common.run_folder(args, f"throughput-{name}")
            contestants[name] = stack.enter_context(started(*commands[name], folder))
            contestants[name].run(args.warm_up)
        for turn in range(args.windows):
            for name in names[:: 1 if turn % 2 else -1]:
                contestants[name].run(args.window)
    return {name: contestants[name].figures() for name in commands}


def medians(runs: Sequence[Result]) -> dict[str, Result]:
    """Medians of each row's figures, and of its rate relative to the first row's in the same repetition."""
    found = {}
    first = next(iter(runs[0]["figures"]))
    for name in runs[0]["figures"]:
        mine = [run["figures"][name] for run in runs]
        found[name] = {figure: statistics.median(each[figure] for each in mine) for figure in mine[0]}
        ratios = [run["figures"][name]["sps"] / run["figures"][first]["sps"] for run in runs]
        found[name] |= {"ratio": statistics.median(ratios), "ratios": ratios}
    return found


def at_most(cores: int, figures: Result) -> float:
    """Agent steps a second that neither the cores nor the learner's process can exceed."""
    busy = figures.get("learner_busy", 0.0)
    return min(
        1000 * cores / (figures["learner_ms"] + figures["others_ms"]), figures["sps"] / busy if busy else math.inf
    )


def table(result: Result) -> str:
    lines = []
    for name, found in medians(result["runs"]).items():
        ratios = ", ".join(f"{ratio:.3f}" for ratio in found["ratios"])
        cells = [f"{found['sps']:,.0f}", f"{found['ratio']:.3f}", ratios, f"{found['learner_ms']:.3f}"]
        lines.append([name, *cells, f"{found['others_ms']:.3f}", f"{at_most(result['machine']['cores'], found):,.0f}"])
    titles = ["steps/s", "ratio", "ratios", "learner (ms)", "others (ms)", "at most"]
    return markdown_table(["row", *titles], lines)


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    commands = common.commands_of(args, [*UNTIL_STOPPED, *flags])
    for command in commands.values():
        if "--standalone" in command:  # one process, which nothing watches
            command.remove(UNTIL_STOPPED[-1])
    settings = common.settings_of(commands)
    for tree in args.trees:
        if not (tree / next(iter(commands.values()))[0]).is_file():
            raise ConfigError("trees", tree, "it has no such chapter", "name checkouts of this project")
    full = [commit_of(tree) or f"tree-{number}" for number, tree in enumerate(args.trees)]
    commits = [name[:9] + "+" * name.endswith("+") for name in full]
    if len(set(commits)) < len(commits):
        raise ConfigError("trees", " ".join(commits), "two checkouts are of the same commit", "change one of them")
    prefixes = [f"{commit} " if len(commits) > 1 else "" for commit in commits]
    contestants = {
        prefix + row: (tree, command)
        for row, command in commands.items()
        for prefix, tree in zip(prefixes, args.trees, strict=True)
    }
    env_id = next(iter(settings.values()))["env_id"]
    path, result = begin("throughput", args, env_id, settings, commits=commits)
    plan = [("all", number) for number in range(1, args.repeat + 1)]
    measure(path, result, plan, lambda _, number: {"figures": repetition(args, contestants, number)}, table)
    return 0


if __name__ == "__main__":
    exit_with(main)
