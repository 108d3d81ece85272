"""Train a chapter once for each seed and row of settings: time and steps to solve, learning curves, medians.

Flags that are not listed here are the trainer's. `--rows` compares settings; a row is flags without their dashes, with
spaces between, and `default` changes nothing:

    python bench/solve.py --rows default entropy-coef=0.02 "optimizer=rmsprop no-normalize-obs" --steps 600_000
    python bench/solve.py --chapter impala --rows vtrace no-vtrace --env-id CartPole-v1 --force-lag 20

`--rule machin` judges the runs by the rule of the Machin library instead, in episodes; it was made for CartPole-v0.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import numpy as np

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import EpisodeRow, read_episodes
from a3c_mp.run.mean_return import MIN_EPISODES, WINDOW
from a3c_mp.run.script import exit_with
from bench import common

MACHIN_FLAGS = {"--env-id": "CartPole-v0", "--stop-return": "199.5", "--total-steps": "1_000_000"}
"""flags of the trainer under `--rule machin` if not given: its own stop rule must not come before Machin's"""
POINTS = 200
"""points of a saved curve"""


@dataclass(frozen=True)
class Args:
    chapter: common.ChapterName = "a3c_data"
    """what to train"""
    seeds: Count = 3
    """how many seeds: 1, 2, ..."""
    rows: tuple[str, ...] = ("default",)
    """settings to compare, on the same seeds"""
    steps: Count | None = None
    """end a run after this many agent steps; schedules still run to the trainer's --total-steps"""
    marks: tuple[float, ...] = ()
    """mean returns of the last 100 games; the table has the steps at which each was reached"""
    rule: Literal["stop-return", "machin"] = "stop-return"
    """solved by the trainer's own rule, or by Machin's"""
    games: Annotated[int, Between(0)] = 0
    """whole games that every trained net plays afterwards, without exploring (play.py)"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    results: Path = common.RESULTS
    """folder of the result file and its picture"""


def machin_episodes(episodes: Iterable[tuple[int, float]]) -> int | None:
    """Episodes over all actors when Machin's rule is first met; None if it never is.

    Each actor smooths its returns, s = 0.9 s + 0.1 return from s = 0. The rule is met when one actor has s > 190 for
    five of its episodes running (github.com/iffiX/machin, examples/framework_examples/a3c.py).

    Args:
        episodes: (actor, episode return), in the order they ended.
    """
    smoothed: dict[int, float] = defaultdict(float)
    streak: dict[int, int] = defaultdict(int)
    for count, (actor, episode_return) in enumerate(episodes, start=1):
        smoothed[actor] = 0.9 * smoothed[actor] + 0.1 * episode_return
        streak[actor] = streak[actor] + 1 if smoothed[actor] > 190 else 0
        if streak[actor] == 5:
            return count
    return None


def curve(episodes: Sequence[EpisodeRow], points: int = POINTS) -> list[tuple[int, float, float]]:
    """(steps, seconds, mean return of the last 100 games) at `points` episodes spread evenly, the last one included."""
    sums = np.cumsum([0.0] + [episode.episode_return for episode in episodes])
    ends = np.arange(MIN_EPISODES, len(episodes) + 1)
    if len(ends) > points:
        ends = ends[np.linspace(0, len(ends) - 1, points).round().astype(int)]
    means = (sums[ends] - sums[np.maximum(ends - WINDOW, 0)]) / np.minimum(ends, WINDOW)
    last = [episodes[end - 1] for end in ends.tolist()]
    return [(row.steps, row.seconds, round(float(mean), 3)) for row, mean in zip(last, means, strict=True)]


def outcome(folder: Path, seed: int, rule: str, steps: float = math.inf) -> dict[str, Any]:
    """Summary of a finished run; where it was stopped after `steps`, returns of the games that had ended by then."""
    summary = json.loads((folder / "summary.json").read_text())
    episodes = [episode for episode in read_episodes(folder / "episodes.csv") if episode.steps <= steps]
    names = ("exit_reason", "solved", "wall_seconds", "steps", "sps", "mean_return_100", "episodes", "weights_sha256")
    run = {"seed": seed, **{name: summary[name] for name in names}, "late_return": late_return(episodes)}
    if summary["steps"] > steps:  # the rows of a comparison run on for different times
        last = [episode.episode_return for episode in episodes[-WINDOW:]]
        run |= {"episodes": len(episodes), "mean_return_100": statistics.mean(last) if last else None}
    if rule == "machin":
        run["machin_episodes"] = machin_episodes((e.actor, e.episode_return) for e in episodes)
    return {**run, "curve": curve(episodes)}


def late_return(episodes: Sequence[EpisodeRow]) -> float | None:
    """Mean return of the second half of a run's steps; None without a game."""
    late = [episode.episode_return for episode in episodes if episode.steps > episodes[-1].steps / 2]
    return round(statistics.mean(late), 2) if late else None


def flags_of(row: str) -> list[str]:
    """`lr=1 no-clip` -> ["--lr=1", "--no-clip"]. Raises ConfigError for what is neither name=value nor a switch."""
    if row == "default":
        return []
    for word in row.split():
        if not re.fullmatch(r"[a-z][\w-]*(=\S+)?", word):
            fix = 'write "entropy-coef=0.02 no-normalize-obs"'
            raise ConfigError("rows", word, "a row is made of flags without their dashes", fix)
    return [f"--{word}" for word in row.split()]


def train(command: Sequence[str], folder: Path, steps: float = math.inf) -> int:
    """Train until the trainer ends or has taken `steps`; the script's exit code, or 0 if stopped here."""
    with common.running_script(command) as process:
        while steps == math.inf or steps_taken(folder / "episodes.csv") < steps:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(1.0)
        return 0


def steps_taken(episodes: Path) -> int:
    """Agent steps when the last game of a run ended, 0 before the first; the file may end in half a line."""
    whole_lines = episodes.read_text().split("\n")[1:-1] if episodes.exists() else []
    return int(whole_lines[-1].split(",")[0]) if whole_lines else 0


def scores_of(folder: Path, games: int) -> list[float]:
    """Raw scores of whole games that a run's best net plays, with its likeliest actions."""
    with tempfile.TemporaryFile("w+") as output:
        code = common.run_script(["play.py", str(folder), f"--episodes={games}", f"--num-envs={games}"], stdout=output)
        if code != 0:
            raise SystemExit(code)  # play.py has said why
        output.seek(0)
        line = next(line for line in output if line.startswith("raw scores:"))
    return [float(score) for score in line.split()[2:]]


def median(values: Iterable[float | None], missing: float = math.inf) -> float | None:
    """Median with None counted as `missing`; None if the median itself is missing."""
    found = statistics.median(missing if value is None else value for value in values)
    return found if math.isfinite(found) else None


def unsolved_as_missing(run: dict[str, Any], rule: str) -> dict[str, Any]:
    """A run for medians: if it was not solved, its time and steps to solve are missing."""
    return run if run["solved"] or rule == "machin" else {**run, "wall_seconds": None, "steps": None}


def medians(runs: Sequence[dict[str, Any]], rule: str) -> dict[str, float | None]:
    """Medians over the seeds; None where most seeds were not solved."""
    names = ["wall_seconds", "steps", "sps"] + ["machin_episodes"] * (rule == "machin")
    return {name: median(unsolved_as_missing(run, rule)[name] for run in runs) for name in names}


def figures(run: dict[str, Any], marks: Sequence[float]) -> dict[str, float | None]:
    """Columns of the table for one run."""
    seconds = run["wall_seconds"]
    found = {
        "mean return": run["mean_return_100"],
        "second half": run["late_return"],
        "minutes": None if seconds is None else seconds / 60,
        "steps": run["steps"],
        "sps": run["sps"],
        **{f"to {mark:g}": reached(run["curve"], mark) for mark in marks},
    }
    optional = {"machin_episodes": "Machin's episodes", "played_mean": "mean of the games played"}
    return found | {title: run[name] for name, title in optional.items() if name in run}


def reached(curve: Sequence[Sequence[float]], mark: float) -> float | None:
    """Steps after which a curve of (steps, seconds, mean return) was first at `mark`."""
    return next((steps for steps, _, mean in curve if mean >= mark), None)


def table(runs: Sequence[dict[str, Any]], rule: str, marks: Sequence[float]) -> str:
    """A line for each run, grouped by row of settings, and the medians of each row."""
    titles = list(figures(runs[0], marks))
    lines = []
    for row in dict.fromkeys(run["row"] for run in runs):
        mine = [run for run in runs if run["row"] == row]
        for run in mine:
            ended_by = "steps" if run["exit_reason"] == "SIGTERM" else run["exit_reason"]
            lines.append([row, str(run["seed"]), ended_by, *cells(figures(run, marks))])
        columns = [figures(unsolved_as_missing(run, rule), marks) for run in mine]
        worst = {"mean return": -math.inf, "second half": -math.inf}
        middle = {title: median((found[title] for found in columns), worst.get(title, math.inf)) for title in titles}
        lines.append([row, "median", "", *cells(middle)])
    return common.markdown_table(["settings", "seed", "ended by", *titles], lines)


def cells(figures: dict[str, float | None]) -> list[str]:
    """Formatted figures: steps and counts whole, the rest with one decimal."""
    one_decimal = ("mean return", "second half", "minutes", "mean of the games played")
    return ["-" if v is None else f"{v:,.{int(title in one_decimal)}f}" for title, v in figures.items()]


def draw(path: Path, result: dict[str, Any]) -> None:
    """Mean return over minutes and over steps: a colour for each row of settings, or for each seed of one row."""
    plt = common.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    rows = list(dict.fromkeys(run["row"] for run in result["runs"]))
    labelled = set()
    for run in result["runs"]:
        steps, seconds, means = zip(*run["curve"], strict=True) if run["curve"] else ((), (), ())
        label = run["row"] if len(rows) > 1 else f"seed {run['seed']}"
        colour = f"C{rows.index(label) if len(rows) > 1 else run['seed'] - 1}"
        axes[0].plot([s / 60 for s in seconds], means, color=colour, label=None if label in labelled else label)
        axes[1].plot([s / 1e6 for s in steps], means, color=colour)
        labelled.add(label)
    axes[0].set(xlabel="minutes", ylabel=f"mean return of the last {WINDOW} games")
    axes[1].set(xlabel="million agent steps")
    axes[0].legend()
    figure.suptitle(f"{result['chapter']} on {result['env_id']}, {result['machine']['name']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def commands_of(args: Args, flags: Sequence[str]) -> dict[str, list[str]]:
    """The trainer's command line for each row. Raises ConfigError if a row occurs twice."""
    if len(set(args.rows)) < len(args.rows):
        raise ConfigError("rows", args.rows, "a row occurs twice", "raise --seeds for more runs of a row")
    machin = common.defaults_for(flags, MACHIN_FLAGS) if args.rule == "machin" else []
    return {row: [*common.CHAPTERS[args.chapter], *machin, *flags, *flags_of(row)] for row in args.rows}


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    commands = commands_of(args, flags)
    settings = {row: asdict(common.trainer_settings(command)) for row, command in commands.items()}
    env_id, *others = {row["env_id"] for row in settings.values()}
    if others:
        raise ConfigError("rows", args.rows, "all rows must have the same environment", "run one comparison for each")
    kind = "solve" if args.rows == ("default",) and args.steps is None else "search"
    result = common.begin(kind, args, env_id) | {"rule": args.rule, "settings": settings, "runs": []}
    path = common.result_path(args.results, result, with_env=True)
    for seed in range(1, args.seeds + 1):
        for index, (row, command) in enumerate(commands.items()):
            name = common.run_name(result, *(f"r{index}",) * (len(commands) > 1), f"s{seed}")
            folder = args.runs_dir / name
            more = [f"--seed={seed}", f"--runs-dir={args.runs_dir}", f"--run-name={name}"]
            if (code := train([*command, *more], folder, args.steps or math.inf)) not in (0, 1):
                return code
            result["runs"].append({"row": row} | outcome(folder, seed, args.rule, args.steps or math.inf))
            if args.games:
                scores = scores_of(folder, args.games)
                result["runs"][-1] |= {"played": scores, "played_mean": statistics.mean(scores)}
            if kind == "solve":
                result["medians"] = medians(result["runs"], args.rule)
            common.save(path, result)  # after every run: the next one may take hours
            draw(path.with_suffix(".png"), result)
    print(table(result["runs"], args.rule, args.marks))
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
