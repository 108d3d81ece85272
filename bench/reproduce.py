"""Run again what made a row of the README's table, and compare.

    python bench/reproduce.py a3c_data CartPole-v1        a row is a chapter and a game
    python bench/reproduce.py bench/results/solve_....json

It names the row's file, repeats its command (bench/solve.py with the same seeds and settings), and prints what was
recorded beside what came out. Deterministic runs must have the same weights to the last bit; of others, as many seeds
must be solved, in at most twice the steps. Exit code 1 says that they are not.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it


from a3c_mp.cli import parse_own, parse_plain
from a3c_mp.cli.unused_flags import unused
from a3c_mp.config import Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.run_dir import PLACE, as_recorded
from a3c_mp.run.script import exit_with
from bench import common, report, solve

SAME = {"env_id", "seed", *PLACE}
"""settings that are given again anyway, or say where a run is"""
MORE_STEPS = 2.0
"""a row is reproduced if its median of steps is at most so many times the recorded one"""


@dataclass(frozen=True)
class Args:
    row: tuple[str, ...]
    """chapter and game, or a result file"""
    seeds: Count | None = None
    """fewer seeds than were recorded"""
    results: Path = common.RESULTS
    """folder of result files"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""


def find(row: Sequence[str], results: Path) -> Path:
    """The file of a row, as report.py chooses it. Raises ConfigError for a row that there is not."""
    if len(row) == 1 and row[0].endswith(".json"):
        return Path(row[0])
    files = {path: json.loads(path.read_text()) for path in sorted(results.glob("solve_*.json"))}
    rows = report.chosen(files.values())
    if tuple(row) not in rows:
        known = ", ".join(" ".join(key) for key in sorted(rows))
        raise ConfigError("row", " ".join(row), "no such row", f"choose one of: {known}")
    return next(path for path, result in files.items() if result is rows[row[0], row[1]])


def command_of(result: dict[str, Any], seeds: int) -> list[str]:
    """Flags for bench/solve.py by which it does what was recorded.

    Settings that the recorded flags would give other values today become flags too.
    """
    flags = [*common.without_folders(result["command"][1:]), f"--seeds={seeds}"]
    if "default" not in result.get("settings", {}):  # an old file: the flags are all that is known
        return flags
    _, trainer_flags = parse_own(solve.Args, "", flags)
    settings = common.trainer_settings([*common.CHAPTERS[result["chapter"]], *trainer_flags])
    today, then = as_recorded(settings), common.settings_then(result, type(settings))
    changed = {name for name in today.keys() - SAME - unused(then).keys() if then[name] != today[name]}
    return [*flags, *(word for name in sorted(changed) for word in flag_of(name, then[name]))]


def flag_of(name: str, value: Any) -> list[str]:
    """`--name=value`, `--name`, `--no-name`, or `--name` and each of several values."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]


def is_deterministic(result: dict[str, Any]) -> bool:
    return "--deterministic" in result["command"] or bool(
        result.get("settings", {}).get("default", {}).get("deterministic")
    )


def compare(recorded: dict[str, Any], again: dict[str, Any]) -> tuple[str, bool]:
    """(table of what was recorded and what came out, whether the row is reproduced)."""
    lines, same = [], True
    before = {run["seed"]: run for run in recorded["runs"]}
    for run in again["runs"]:
        old = before[run["seed"]]
        hashes = [each["weights_sha256"][:8] for each in (old, run)] if "weights_sha256" in old else ["-", "-"]
        same &= hashes[0] == hashes[1]
        for what, each, sha256 in (("recorded", old, hashes[0]), ("again", run, hashes[1])):
            figures = [f"{each['steps']:,}", f"{each['wall_seconds']:.0f} s", f"{each['mean_return_100']:.1f}", sha256]
            lines.append([f"seed {run['seed']}, {what}", "yes" if each["solved"] else "no", *figures])
    if is_deterministic(recorded):
        is_reproduced = same
    else:
        olds = [before[run["seed"]] for run in again["runs"]]
        is_reproduced = sum(run["solved"] for run in again["runs"]) >= sum(run["solved"] for run in olds)
        steps = [sorted(run["steps"] for run in runs)[len(runs) // 2] for runs in (olds, again["runs"])]
        is_reproduced &= steps[1] <= MORE_STEPS * steps[0]
    return common.markdown_table(["run", "solved", "steps", "time", "mean return", "weights"], lines), is_reproduced


def main() -> int:
    args = parse_plain(Args, __doc__)
    path = find(args.row, args.results)
    recorded = json.loads(path.read_text())
    if rows := {run.get("row", "default") for run in recorded["runs"]} - {"default"}:
        why = f"{path.name} compares settings: {', '.join(sorted(rows))}"
        raise ConfigError("row", " ".join(args.row), why, "repeat it with bench/solve.py and the same --rows")
    seeds = min(args.seeds or len(recorded["runs"]), len(recorded["runs"]))
    flags = command_of(recorded, seeds)
    print(f"{path.name}: commit {recorded['commit']}, {recorded['machine']['name']}, load {recorded['load_at_start']}")
    print(f"python bench/solve.py {' '.join(flags)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if code := common.run_script(["bench/solve.py", *flags, f"--runs-dir={args.runs_dir}", f"--results={folder}"]):
            return code
        again = json.loads(next(Path(folder).glob("*.json")).read_text())
    text, is_reproduced = compare(recorded, again)
    print(text)
    kind = (
        "the same weights to the last bit" if is_deterministic(recorded) else "as many seeds solved, in similar steps"
    )
    print(f"{'reproduced' if is_reproduced else 'NOT reproduced'} ({kind})")
    return 0 if is_reproduced else 1


if __name__ == "__main__":
    exit_with(main)
