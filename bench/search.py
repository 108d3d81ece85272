"""Which settings learn a game in the fewest steps: every row of settings on the same seeds, one run at a time.

A row names what it changes: flags without their dashes, with spaces between; `default` changes nothing. A run ends once
it is solved or has taken `--steps`; schedules still run to the trainer's `--total-steps`. Flags not listed here are the
trainer's.

    python bench/search.py --rows default entropy-cost=0.02 "optimizer=rmsprop no-normalize-obs" --seeds 3
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.config import Count, check_ranges
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with
from bench import common
from bench.solve import outcome


@dataclass(frozen=True)
class Args:
    chapter: common.ChapterName = "a3c_data"
    """what to train"""
    rows: tuple[str, ...] = ("default",)
    """the settings to compare"""
    seeds: Count = 2
    """how many seeds: 1, 2, ..."""
    steps: Count = 600_000
    """agent steps after which a run is ended"""
    marks: tuple[float, ...] = (-15.0, 0.0, 10.0, 18.0)
    """mean returns of the last 100 games; the table says after how many steps each was reached"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    results: Path = common.RESULTS
    """folder of the result file and its picture"""


def flags_of(row: str) -> list[str]:
    """`lr=1 no-clip` -> ["--lr=1", "--no-clip"]. Raises ConfigError for what is neither name=value nor a switch."""
    if row == "default":
        return []
    for word in row.split():
        if not re.fullmatch(r"[a-z][\w-]*(=\S+)?", word):
            fix = 'write "entropy-cost=0.02 no-normalize-obs"'
            raise ConfigError("rows", word, "a row is made of flags without their dashes", fix)
    return [f"--{word}" for word in row.split()]


def train(command: Sequence[str], folder: Path, steps: int) -> int:
    """Train until solved or until so many agent steps; the script's exit code, or 0 where it was ended here."""
    with common.running_script(command) as process:
        while process.poll() is None:
            time.sleep(1.0)
            if steps_taken(folder / "episodes.csv") >= steps:
                return 0
        return process.returncode


def steps_taken(episodes: Path) -> int:
    """Agent steps when the last game of a run ended, 0 before the first; its file is being written."""
    whole_lines = episodes.read_text().split("\n")[1:-1] if episodes.exists() else []
    return int(whole_lines[-1].split(",")[0]) if whole_lines else 0


def reached(curve: Sequence[Sequence[float]], mark: float) -> float | None:
    """Steps after which a curve of (steps, seconds, mean return) was first at `mark`."""
    return next((steps for steps, _, mean in curve if mean >= mark), None)


def table(runs: Sequence[dict[str, Any]], marks: Sequence[float]) -> str:
    """A line for each run, the rows together, then the median of each row; steps are in millions."""
    lines = []
    for row in dict.fromkeys(run["row"] for run in runs):
        mine = [run for run in runs if run["row"] == row]
        found = [[reached(run["curve"], mark) for mark in marks] for run in mine]
        ends = [run["mean_return_100"] for run in mine]
        for run, end, steps in zip(mine, ends, found, strict=True):
            reason = "steps" if run["exit_reason"] == "SIGTERM" else run["exit_reason"]
            lines.append([row, str(run["seed"]), reason, _millions(run["steps"]), _mean(end), *map(_millions, steps)])
        middle = [
            statistics.median(math.inf if s is None else s for s in column) for column in zip(*found, strict=True)
        ]
        end = statistics.median(-math.inf if e is None else e for e in ends)
        lines.append([row, "median", "", "", _mean(end), *map(_millions, middle)])
    header = ["settings", "seed", "ended by", "million steps", "mean return", *(f"to {mark:g}" for mark in marks)]
    return common.markdown_table(header, lines)


def _millions(steps: float | None) -> str:
    return "-" if steps is None or math.isinf(steps) else f"{steps / 1e6:.2f}"


def _mean(value: float | None) -> str:
    return "-" if value is None or math.isinf(value) else f"{value:.1f}"


def main() -> int:
    args, flags = common.cli(Args, __doc__)
    check_ranges(args)
    commands = {row: [*common.CHAPTERS[args.chapter], *flags, *flags_of(row)] for row in args.rows}
    settings = {row: asdict(common.trainer_settings(command)) for row, command in commands.items()}
    env_ids = {row["env_id"] for row in settings.values()}
    if len(env_ids) > 1 or len(commands) < len(args.rows):
        raise ConfigError("rows", args.rows, "all must differ, and be of one environment", "run one search for each")
    result = common.begin("search", args, env_ids.pop()) | {"settings": settings, "runs": []}
    path = common.result_path(args.results, result, with_env=True)
    stamp = re.sub(r"\D", "", result["date"])
    for seed in range(1, args.seeds + 1):
        for index, (row, command) in enumerate(commands.items()):
            name = f"search-{args.chapter}-{stamp}-r{index}-s{seed}"
            folder = args.runs_dir / name
            more = [f"--seed={seed}", f"--runs-dir={args.runs_dir}", f"--run-name={name}"]
            if (code := train([*command, *more], folder, args.steps)) not in (0, 1):
                return code
            result["runs"].append({"row": row} | outcome(folder, seed, "stop-return"))
            common.save(path, result)
            curves = [(run["row"], run["curve"]) for run in result["runs"]]
            common.draw_curves(path.with_suffix(".png"), f"{args.chapter} on {result['env_id']}", curves)
    print(table(result["runs"], args.marks))
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
