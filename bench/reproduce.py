"""Run again what made a row of the results' tables, and compare.

    python bench/reproduce.py a3c_data CartPole-v1        a row is a chapter and a game
    python bench/reproduce.py bench/results/solve_....json

It names the row's file, repeats its command (bench/solve.py with the same seeds and settings), and prints what was
recorded beside what came out. Deterministic runs must have the same weights to the last bit; of others, as many seeds
must be solved, in at most twice the steps. Exit code 1 says that they are not.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_plain
from a3c_mp.cli.flags import unused
from a3c_mp.config import Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with
from bench import common, report
from bench.records import RESULTS, Result, markdown_table

MORE_STEPS = 2.0
"""a row is reproduced if its median of steps is at most so many times the recorded one"""


@dataclass(frozen=True)
class Args:
    row: tuple[str, ...]
    """chapter and game, or a result file"""
    seeds: Count | None = None
    """fewer seeds than were recorded"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""


def find(row: Sequence[str]) -> Path:
    """The file of a row of the README's table, else the newest of a chapter and a game. Raises ConfigError if none."""
    if len(row) == 1 and row[0].endswith(".json"):
        return Path(row[0])
    files = [json.loads(path.read_text()) | {"file": path.name} for path in RESULTS.glob("solve_*.json")]
    rows = sorted((each for each in report.rows_of(files) if not each.settings), key=lambda each: each.date)
    found = {(each.chapter, each.env_id): each for each in (*rows, *report.presets_of(rows)[0])}
    if tuple(row) not in found:
        known = ", ".join(sorted(" ".join(key) for key in found))
        raise ConfigError("row", " ".join(row), "no such row", f"choose one of: {known}")
    return RESULTS / found[row[0], row[1]].file


def command_of(recorded: Result, row: str, seeds: int) -> list[str]:
    """Flags for bench/solve.py by which it does again what was recorded, whatever the presets are today."""
    chapter = common.split_row(row, common.CHAPTERS)[0] or recorded["chapter"]
    then = recorded["settings"][row]
    flags = [f"--env-id={then['env_id']}"]
    differing = report.difference(chapter, then) | {"max_seconds": then["max_seconds"]}
    for name in sorted(differing.keys() - unused(then).keys()):
        flags += common.flag_of(name, differing[name])
    return [f"--chapter={chapter}", f"--seeds={seeds}", *flags]


def compare(recorded: Sequence[Result], again: Sequence[Result], deterministic: bool) -> tuple[str, bool]:
    """(table of the recorded runs and those that came out, whether the row is reproduced)."""
    lines, before = [], {run["seed"]: run for run in recorded}
    olds = [before[run["seed"]] for run in again]
    for pair in zip(olds, again, strict=True):
        for what, run in zip(("recorded", "again"), pair, strict=True):
            mean = "-" if run["mean_return_100"] is None else f"{run['mean_return_100']:.1f}"
            figures = [f"{run['steps']:,}", f"{run['wall_seconds']:.0f} s", mean, run["weights_sha256"][:8]]
            lines.append([f"seed {run['seed']}, {what}", "yes" if run["solved"] else "no", *figures])
    table = markdown_table(["run", "solved", "steps", "time", "mean return", "weights"], lines)
    if deterministic:
        return table, all(old["weights_sha256"] == new["weights_sha256"] for old, new in zip(olds, again, strict=True))
    then, now = (statistics.median_high(run["steps"] for run in runs) for runs in (olds, again))
    as_many = sum(run["solved"] for run in again) >= sum(run["solved"] for run in olds)
    return table, as_many and now <= MORE_STEPS * then


def main() -> int:
    args = parse_plain(Args, __doc__)
    path = find(args.row)
    try:
        recorded = json.loads(path.read_text())
        _ = recorded["kind"], recorded["settings"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError("row", path, f"it is no result ({error})", "name a chapter and a game") from error
    if recorded["kind"] != "solve" or len(recorded["settings"]) > 1:
        raise ConfigError("row", path, "it compares several rows", "repeat its command with --out")
    ((row, settings),) = recorded["settings"].items()
    seeds = min(args.seeds or len(recorded["runs"]), len(recorded["runs"]))
    command = ["bench/solve.py", *command_of(recorded, row, seeds)]
    print(f"{path.name}: commit {recorded['commit']}, {recorded['machine']['name']}, load {recorded['load_at_start']}")
    print(f"python {' '.join(command)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "again.json"
        with common.running_script([*command, f"--runs-dir={args.runs_dir}", f"--out={out}"]) as process:
            if code := process.wait():
                return code
        again = json.loads(out.read_text())
    table, is_reproduced = compare(recorded["runs"], again["runs"], settings["deterministic"])
    print(table)
    kind = "the same weights to the last bit" if settings["deterministic"] else "as many seeds solved, in similar steps"
    print(f"{'reproduced' if is_reproduced else 'NOT reproduced'} ({kind})")
    return 0 if is_reproduced else 1


if __name__ == "__main__":
    exit_with(main)
