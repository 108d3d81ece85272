"""What evolution is worth: a population that breeds against the same members without evolution (random search).

    python bench/population.py --task spread --seeds 5

Tasks: `cartpole` (the preset), `spread` (learning rates from 1e-5 to 1e-1), `slow` (all members start at 3e-5 and only
hyperparameters mutate), `lander` (LunarLander-v3). Flags that are not listed here are the trainer's.

Fixed members see the same transitions of all others as those that evolve. They are not stopped when one is good, so
that the median of them is known too. `bench/agilerl_dqn.py` is the same for AgileRL, in an environment of its own.

The result file is written after every run; `--go-on FILE`, with the same flags, adds the runs that it lacks.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_own
from a3c_mp.config import Count
from a3c_mp.errors import ConfigError
from a3c_mp.population.report import read_lineage
from a3c_mp.run.script import exit_with
from bench import common

NEVER = "1e9"
"""a return that no game has"""
Task = Literal["cartpole", "spread", "slow", "lander"]


class Comparison(NamedTuple):
    """What a task compares."""

    flags: list[str]
    rows: tuple[str, ...] = ("evolution", "fixed")


TASKS: dict[Task, Comparison] = {
    "cartpole": Comparison(["--total-steps=200_000"], ("evolution",)),
    "spread": Comparison(["--total-steps=300_000"]),
    "slow": Comparison(
        [
            "--init=same", "--learning-rate=3e-5", "--total-steps=400_000",
            "--mutate-none=0", "--mutate-architecture=0", "--mutate-parameters=0",
        ]
    ),
    "lander": Comparison(["--env-id=LunarLander-v3", "--total-steps=600_000"], ("evolution",)),
}  # fmt: skip
ROWS: dict[str, list[str]] = {"evolution": [], "fixed": ["--no-evolve", f"--stop-return={NEVER}"]}


@dataclass(frozen=True)
class Args:
    task: Task = "cartpole"
    """what to compare"""
    seeds: Count = 5
    """how many seeds: 1, 2, ..."""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    results: Path = common.RESULTS
    """folder of the result file"""
    go_on: Path | None = None
    """result file of a start that was interrupted; its runs are not run again"""

    @property
    def chapter(self) -> str:
        return f"population_{self.task}"


def outcome(folder: Path, goal: float) -> dict[str, Any]:
    """Results of a run; `first_*` is when the fitness of any member, not confirmed, first reached the goal."""
    summary = json.loads((folder / "summary.json").read_text())
    names = ("solved", "steps", "wall_seconds", "sps", "updates", "evaluation_steps", "exit_reason", "weights_sha256")
    rows = read_lineage(folder / "lineage.csv")
    last = sorted(_fitness(row) for row in rows if row["generation"] == rows[-1]["generation"])
    best = {row["generation"]: -math.inf for row in rows}
    for row in rows:
        best[row["generation"]] = max(best[row["generation"]], _fitness(row))
    steps = {row["generation"]: int(row["steps"]) for row in rows}
    return {
        **{name: summary[name] for name in names},
        "first_steps": next((steps[generation] for generation in best if best[generation] >= goal), None),
        "best_fitness": round(max(best.values()), 2),
        "last_fitnesses": [round(fitness, 2) for fitness in last],
        "last_median": round(statistics.median(last), 2),
    }


def _fitness(row: dict[str, str]) -> float:
    """A member's fitness; that of broken weights is the lowest possible one."""
    value = float(row["fitness"])
    return value if math.isfinite(value) else -1e9


def table(runs: Sequence[dict[str, Any]]) -> str:
    header = ["row", "seed", "confirmed", "steps", "seconds", "evaluation steps", "best", "median member at the end"]
    lines = [
        [
            run["row"], str(run["seed"]), "yes" if run["solved"] else "no", f"{run['steps']:,}",
            f"{run['wall_seconds']:.0f}", f"{run['evaluation_steps']:,}", f"{run['best_fitness']:.1f}",
            f"{run['last_median']:.1f}",
        ]
        for run in runs
    ]  # fmt: skip
    return common.markdown_table(header, lines)


def read_interrupted(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """Read the result of an interrupted start, with the commit of each run in it.

    Raises:
        ConfigError: it cannot be read, or has other settings, or is of another machine.
    """
    try:
        old = json.loads(path.read_text())
        other_settings = old["settings"] != json.loads(json.dumps(new["settings"], default=str))
        other_machine = old["machine"]["name"] != new["machine"]["name"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError("go-on", path, f"it is no result file ({error})", "leave it out") from error
    if other_settings:
        raise ConfigError("go-on", path, "its runs have other settings", "give the same flags, or leave it out")
    if other_machine:
        raise ConfigError("go-on", path, f"its runs are of another machine, {old['machine']['name']}", "leave it out")
    return old | {"bench": new["bench"]}


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    task = TASKS[args.task]
    commands = {row: ["train_population.py", *task.flags, *ROWS[row], *flags] for row in task.rows}
    settings = {row: common.trainer_settings(command) for row, command in commands.items()}
    goal = settings["evolution"].stop_return
    result = common.begin("population", args, settings["evolution"].env_id)
    result |= {"goal": goal, "settings": {row: asdict(own) for row, own in settings.items()}, "runs": []}
    path = common.result_path(args.results, result, with_env=True)
    if args.go_on is not None:
        path, result = args.go_on, read_interrupted(args.go_on, result)
    done = {(run["row"], run["seed"]) for run in result["runs"]}
    for seed in range(1, args.seeds + 1):
        for row, command in commands.items():
            if (row, seed) in done:
                continue
            name = common.run_name(common.dated(result), row, f"s{seed}")
            more = [f"--seed={seed}", f"--runs-dir={args.runs_dir}", f"--run-name={name}"]
            if (code := common.run_script([*command, *more])) not in (0, 1):
                return code
            run = {"row": row, "seed": seed, "commit": common.git_commit()}
            result["runs"].append(run | outcome(args.runs_dir / name, goal))
            common.save(path, result)  # after every run: the next one may take long
    print(table(result["runs"]))
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
