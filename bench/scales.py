"""Learning on the scales that users bring: rare features, small units, bounds of actions, large rewards, phases.

    python bench/scales.py --rows "1 rewards x 10,000" "4 rewards x 10,000" --seeds 1 2 3 --out runs/scales.json

Settings are those without a preset. Each run ends at its goal, or after its budget. Without `--rows`, all of `ROWS`;
the file is written after every run, and the same command with `--out` goes on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_own
from a3c_mp.run.script import exit_with
from bench import common
from bench.records import Result, begin, markdown_table, measure

CASES = {
    "rare cue": ("Cue-v0", 3.5, {"1": 300_000, "3": 60_000, "4": 300_000}),
    "observations x 1e-5": ("CartPoleUnits-v0?observations=1e-5", 475, {"1": 300_000, "3": 150_000, "4": 300_000}),
    "rewards x 1": ("CartPoleUnits-v0?rewards=1.0", 475, {"1": 300_000, "3": 150_000, "4": 300_000}),
    "rewards x 100": ("CartPoleUnits-v0?rewards=100.0", 47_500, {"1": 300_000, "3": 150_000, "4": 300_000}),
    "rewards x 10,000": (
        "CartPoleUnits-v0?rewards=10000.0",
        4_750_000,
        {"1": 300_000, "2": 500_000, "3": 150_000, "4": 300_000, "5": 300_000, "7": 300_000},
    ),
    "bounds 0 to 1,000": ("PendulumUnits-v0?low=0.0&high=1000.0", -200, {"1": 300_000, "3": 40_000, "4": 600_000}),
    "bounds +-0.01": ("PendulumUnits-v0?low=-0.01&high=0.01", -200, {"1": 300_000, "3": 40_000, "4": 600_000}),
    "images, +-1": ("Catch-v0?size=1.0", 0.9, {"1": 400_000, "4": 400_000}),
    "images, +-100": ("Catch-v0?size=100.0", 90, {"1": 400_000, "4": 400_000}),
    "images, +-1,000": ("Catch-v0?size=1000.0", 900, {"1": 400_000, "4": 400_000}),
    "games as long as rollouts": ("Phases-v0?length=32", 28, {"1": 200_000}),
    "games half as long": ("Phases-v0?length=16", 13, {"1": 200_000}),
}
"""name -> (environment of `bench.units`, mean return that counts as learned, chapter -> most steps)"""
CHAPTERS = {"1": "a3c_data", "2": "a3c_grad", "3": "apex_dqn", "4": "impala", "5": "task", "7": "ray_impala"}
ROWS = {f"{chapter} {name}": (chapter, *case) for name, case in CASES.items() for chapter in case[2]}


@dataclass(frozen=True)
class Args(common.Args):
    rows: tuple[str, ...] = tuple(ROWS)
    """chapter and name of a case of `CASES`"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the runs of each row"""


def command(row: str) -> list[str]:
    chapter, env, goal, budgets = ROWS[row]
    name = "apex_ddpg" if chapter == "3" and env.startswith("Pendulum") else CHAPTERS[chapter]
    script, *flags = common.CHAPTERS[name]
    return [
        script, *flags, f"--env-id=bench.units:{env}", f"--total-steps={budgets[chapter]}", f"--stop-return={goal}",
    ]  # fmt: skip


def table(result: Result) -> str:
    """A line for each row: steps to the goal of each run, or the mean return at the end."""
    lines = []
    for row in dict.fromkeys(run["row"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["row"] == row]
        found = [f"{run['steps']:,}" if run["solved"] else f"not: {run['mean_return_100']:,.4g}" for run in runs]
        lines.append([row, f"{ROWS[row][2]:,}", ", ".join(found)])
    return markdown_table(["chapter, scale", "goal", "steps to it, or mean return at the end"], lines)


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    common.check_rows(args.rows, ROWS)
    commands = {row: [*command(row), *flags] for row in args.rows}
    common.refuse_seed([flags])
    settings = {row: common.as_recorded(common.trainer_settings(words)) for row, words in commands.items()}
    path, result = begin("scales", args, "", settings)

    def run(row: str, seed: int) -> Result:
        summary = common.read_summary(common.train([*commands[row], f"--seed={seed}"], args, f"scales-{row}-{seed}"))
        return {name: summary[name] for name in ("solved", "steps", "mean_return_100", "wall_seconds", "exit_reason")}

    measure(path, result, [(row, seed) for seed in args.seeds for row in args.rows], run, table)
    return 0


if __name__ == "__main__":
    exit_with(main)
