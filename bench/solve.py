"""Train a chapter once for each seed and row of settings: time and steps to solve, learning curves, medians.

Flags that are not listed here are the trainer's. `--rows` compares settings or chapters, in turns:

    python bench/solve.py --env-id CartPole-v1 --seeds 5
    python bench/solve.py --rows default entropy-coef=0.02 "optimizer=rmsprop no-normalize-obs" --steps 600_000
    python bench/solve.py --rows impala ray_impala --env-id CartPole-v1 --seeds 5 --out runs/cart.json
    python bench/solve.py --chapter population --rows default "no-evolve stop-return=1e9" --total-steps 300_000

The file is written after every run; the same command with `--out FILE` goes on where it was interrupted.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count
from a3c_mp.run.script import exit_with
from bench import common
from bench.records import Result, begin, in_turns, markdown_table, measure, median

COLUMNS = {
    "mean_return_100": "mean return", "late_return": "second half", "minutes": "minutes", "steps": "steps",
    "sps": "sps", "played_mean": "mean of the games played", "best_fitness": "best fitness",
    "last_median": "median member at the end",
}  # fmt: skip
"""figure of a run -> its title in the table"""
WHOLE = ("steps", "sps")
"""figures without decimals"""
RETURNS = ("mean_return_100", "late_return")
"""figures of which a missing one counts as the lowest, not as the highest, in a median"""


@dataclass(frozen=True)
class Args(common.RowArgs):
    seeds: Count = 3
    """how many seeds: 1, 2, ..."""
    steps: Count | None = None
    """end a run after this many agent steps; schedules still run to the trainer's --total-steps"""
    marks: tuple[float, ...] = ()
    """mean returns of the last 100 games; the table has the steps at which each was reached"""
    play: Annotated[int, Between(0)] = 0
    """whole games that every trained net plays afterwards, without exploring (play.py)"""


def outcome(folder: Path, steps: float = math.inf) -> Result:
    """Figures of a finished run; where it was stopped after `steps`, returns of the games that had ended by then."""
    summary = common.read_summary(folder)
    games = [game for game in common.read_games(folder) if game.steps <= steps]
    names = ("exit_reason", "solved", "wall_seconds", "steps", "sps", "mean_return_100", "episodes", "weights_sha256")
    run = {name: summary[name] for name in names} | {"late_return": late_return(games)}
    if summary["steps"] > steps:  # the rows of a comparison run on for different times
        run |= {"episodes": len(games), "mean_return_100": common.mean_return(games)}
    return run | {"curve": common.curve_of(games)}


def late_return(games: Sequence[common.Game]) -> float | None:
    """Mean return of the second half of a run's steps; None without a game."""
    late = [game.episode_return for game in games if game.steps > games[-1].steps / 2]
    return round(statistics.fmean(late), 2) if late else None


def population_outcome(folder: Path, goal: float | None) -> Result:
    """Figures of chapter 6; `first_steps` is when a member's fitness, not yet confirmed, first reached the goal.

    `best_curve` has (steps, seconds, fitness of the best member) at the end of each generation.
    """
    generations: dict[str, list[float]] = {}
    steps = {}
    with (folder / "lineage.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            fitness = float(row["fitness"])
            generations.setdefault(row["generation"], []).append(fitness if math.isfinite(fitness) else -1e9)
            steps[row["generation"]] = int(row["steps"])
    best = {generation: max(members) for generation, members in generations.items()}
    games = common.read_games(folder)
    ends = {name: max((game.seconds for game in games if game.steps <= at), default=0.0) for name, at in steps.items()}
    reached = (steps[generation] for generation, fitness in best.items() if goal is not None and fitness >= goal)
    return {
        "evaluation_steps": common.read_summary(folder)["evaluation_steps"],
        "first_steps": next(reached, None),
        "best_fitness": round(max(best.values()), 2),
        "last_median": round(statistics.median([*generations.values()][-1]), 2),
        "best_curve": [(steps[name], ends[name], fitness) for name, fitness in best.items()],
    }


def play(folder: Path, games: int) -> Result:
    """Raw scores of whole games that a run's best net plays, with its likeliest actions."""
    with tempfile.TemporaryFile("w+") as output:
        command = ["play.py", str(folder), f"--episodes={games}", f"--num-envs={games}"]
        with common.running_script(command, stdout=output) as process:
            if code := process.wait():
                raise SystemExit(code)  # play.py has said why
        output.seek(0)
        line = next(line for line in output if line.startswith("raw scores:"))
    scores = [float(score) for score in line.split()[2:]]
    return {"played": scores, "played_mean": statistics.fmean(scores)}


def solved_or_missing(run: Result) -> Result:
    """A run for medians: if it was not solved, its time and steps to solve are missing."""
    return run if run["solved"] else {**run, "wall_seconds": None, "steps": None}


def medians(runs: Sequence[Result]) -> dict[str, float | None]:
    """Medians over the seeds; None where most seeds were not solved."""
    return {name: median(solved_or_missing(run)[name] for run in runs) for name in ("wall_seconds", "steps", "sps")}


def reached(curve: Sequence[Sequence[float]], mark: float) -> float | None:
    """Steps after which a curve of (steps, seconds, mean return) was first at `mark`."""
    return next((steps for steps, _, mean in curve if mean >= mark), None)


def table(result: Result) -> str:
    """A line for each run, grouped by row of settings, and the medians of each row."""
    runs, marks = result["runs"], result["bench"]["marks"]
    names = [name for name in COLUMNS if name == "minutes" or any(name in run for run in runs)]
    lines = []
    for row in dict.fromkeys(run["row"] for run in runs):
        mine = sorted((run for run in runs if run["row"] == row), key=lambda run: run["seed"])
        columns = []
        for run in mine:
            ended_by = "steps" if run["exit_reason"] == "SIGTERM" else run["exit_reason"]
            lines.append([row, str(run["seed"]), ended_by, *cells(figures(run, names, marks))])
            columns.append(figures(solved_or_missing(run), names, marks))
        middle = {
            name: median((column[name] for column in columns), -math.inf if name in RETURNS else math.inf)
            for name in columns[0]
        }
        lines.append([row, "median", "", *cells(middle)])
    titles = [*(COLUMNS[name] for name in names), *(f"to {mark:g}" for mark in marks)]
    return markdown_table(["settings", "seed", "ended by", *titles], lines)


def figures(run: Result, names: Sequence[str], marks: Sequence[float]) -> dict[str, float | None]:
    """Columns of the table for one run."""
    seconds = run["wall_seconds"]
    run = {**run, "minutes": None if seconds is None else seconds / 60}
    return {name: run.get(name) for name in names} | {f"to {mark:g}": reached(run["curve"], mark) for mark in marks}


def cells(found: dict[str, float | None]) -> list[str]:
    """Formatted figures: steps and rates whole, the rest with one decimal."""
    decimals = {name: int(name not in WHOLE and not name.startswith("to ")) for name in found}
    return ["-" if value is None else f"{value:,.{decimals[name]}f}" for name, value in found.items()]


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    commands = common.commands_of(args, flags)
    common.refuse_seed(commands.values())
    settings = common.settings_of(commands)
    env_id = next(iter(settings.values()))["env_id"]
    path, result = begin("solve" if args.steps is None else "search", args, env_id, settings)
    steps = args.steps or math.inf

    def run(row: str, seed: int) -> dict[str, Any]:
        name = f"solve-{args.chapter}-{env_id}-{row}-s{seed}"
        folder = common.train([*commands[row], f"--seed={seed}"], args, name, steps)
        found = outcome(folder, steps)
        if found.get("steps") and (folder / "lineage.csv").exists():  # a generation has ended
            found |= population_outcome(folder, settings[row]["stop_return"])
        return found | (play(folder, args.play) if args.play else {})

    measure(path, result, in_turns(commands, args.seeds), run, table)
    return 0


if __name__ == "__main__":
    exit_with(main)
