"""Compare the steady rates of one command in several checkouts, on a host whose speed changes within seconds.

The trainers of all checkouts are started, then take turns: one runs for `--window` seconds while the others are stopped
(SIGSTOP, SIGCONT). On a shared host single runs differ by a third, these rates by a few per cent:

    python bench/alternate.py --trees ../before . --env-id CartPole-v1

Flags that are not listed here are the trainer's.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with
from bench import common
from bench.throughput import UNTIL_STOPPED, elapsed_events


@dataclass(frozen=True)
class Args:
    trees: tuple[Path, ...] = ()
    """checkouts, at least two; the rates of the others are divided by the first one's"""
    chapter: common.ChapterName = "a3c_data"
    """which chapter"""
    warm_up: Annotated[float, Between(1)] = 15.0
    """how long each runs before the others start, starting up included (s)"""
    window: Annotated[float, Between(0.5)] = 2.0
    """length of a turn (s)"""
    windows: Count = 30
    """turns of each"""
    repeat: Count = 5
    """repetitions, with new processes"""
    results: Path = common.RESULTS
    """folder of the result file"""


@dataclass
class Turns:
    """A trainer, and when it ran: (start, end) in seconds of the clock."""

    tree: Path
    trainer: subprocess.Popen
    folder: Path
    times: list[tuple[float, float]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Let the trainer run for so long, from a stop to a stop."""
        start = time.time()
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        self.times.append((start, time.time()))
        if (code := self.trainer.poll()) is not None:
            raise ConfigError(
                "trees",
                self.tree,
                f"its trainer ended with code {code}",
                "its error is above, or in a run started there",
            )

    def send(self, signum: int) -> None:
        """Send a signal to the trainer and all its processes."""
        processes = []
        with suppress(psutil.NoSuchProcess):
            trainer = psutil.Process(self.trainer.pid)
            processes = [trainer, *trainer.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def rate(self) -> float:
        """Agent steps a second, from the last point of the warm-up to the last one of all."""
        events, (warm_up, *_, turn) = elapsed_events(self.folder), self.times
        first, last = ([event for event in events if event.wall_time <= end][-1:] for _, end in (warm_up, turn))
        if not first:
            raise ConfigError("warm-up", round(warm_up[1] - warm_up[0]), "nothing was learned in it", "raise it")
        start, end = first[0].wall_time, last[0].wall_time
        if start == end:
            raise ConfigError(
                "windows", len(self.times) - 1, "nothing was learned in the turns", "raise it, or --window"
            )
        return (last[0].step - first[0].step) / sum(max(0.0, min(b, end) - max(a, start)) for a, b in self.times)


@contextmanager
def started(tree: Path, command: Sequence[str], folder: Path) -> Iterator[Turns]:
    """The trainer of a checkout; at the end of the block it is ended by SIGTERM, and waited for."""
    flags = [*UNTIL_STOPPED, "--runs-dir", str(folder), "--run-name", "run"]
    trainer = subprocess.Popen([sys.executable, *command, *flags], cwd=tree, stdout=subprocess.DEVNULL)
    turns = Turns(tree, trainer, folder / "run")
    try:
        yield turns
    finally:
        turns.send(signal.SIGCONT)
        if trainer.poll() is None:
            trainer.terminate()
            trainer.wait()


def rates_of(args: Args, command: Sequence[str], trees: Sequence[Path]) -> list[float]:
    """Agent steps a second of each checkout, side by side."""
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as stack:
            trainers = []
            for number, tree in enumerate(trees):
                trainers.append(stack.enter_context(started(tree, command, Path(folder) / str(number))))
                trainers[-1].run(args.warm_up)
            for number in range(args.windows):
                for turns in trainers if number % 2 else reversed(trainers):
                    turns.run(args.window)
        return [turns.rate() for turns in trainers]


def commit_of(tree: Path) -> str:
    """The commit of a checkout, with "+" if files have been changed since."""
    command = ["git", "-C", str(tree), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "no commit"


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    command = [*common.CHAPTERS[args.chapter], *flags]
    if len(args.trees) < 2:
        raise ConfigError("trees", " ".join(map(str, args.trees)), "name two checkouts or more", "--trees ../before .")
    result = common.begin("alternate", args, common.trainer_settings(command).env_id)
    del result["bench"]["trees"]  # folders of this machine
    for tree in args.trees:
        if not (tree / command[0]).is_file():
            raise ConfigError("trees", tree, f"there is no {command[0]} in it", "name checkouts of this project")
    commits = [commit_of(tree) for tree in args.trees]
    rates: list[list[float]] = []
    for number in range(args.repeat):
        turn = -1 if number % 2 else 1
        rates.append(rates_of(args, command, args.trees[::turn])[::turn])
        print("  ".join(f"{commit} {rate:,.0f}" for commit, rate in zip(commits, rates[-1], strict=True)), flush=True)
    ratios = [[rate / each[0] for rate in each] for each in rates]
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    result |= {"commits": commits, "rates": rates, "ratios": ratios, "median_ratios": medians}
    path = common.result_path(args.results, result, with_env=True)
    common.save(path, result)
    for commit, ratio in zip(commits, medians, strict=True):
        print(f"{commit}: {ratio:.3f} times {commits[0]} (median of {args.repeat})")
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
