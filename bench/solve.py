"""How long a chapter takes to solve a game: it is trained to its stop rule, once for each seed.

Flags that are not listed here are the trainer's. `--rule machin` judges the finished runs by the rule of the Machin
library instead, in episodes; it was made for CartPole-v0, whose episodes end after 200 steps.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import numpy as np

from a3c_mp.config import Between, Count, check_ranges
from a3c_mp.run.episode_log import EpisodeRow, read_episodes
from a3c_mp.run.script import exit_with
from a3c_mp.run.start_order import MIN_EPISODES, WINDOW
from bench import common

MACHIN_FLAGS = {"--env-id": "CartPole-v0", "--stop-return": "199.5", "--total-steps": "1_000_000"}
"""what `--rule machin` gives the trainer unless told otherwise: the stop rule must not come before Machin's"""
POINTS = 200
"""points of a saved curve"""


@dataclass(frozen=True)
class Args:
    chapter: common.ChapterName = "a3c_data"
    """what to train"""
    seeds: Count = 3
    """how many seeds: 1, 2, ..."""
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
    return [
        (episodes[end - 1].steps, episodes[end - 1].seconds, round(float(mean), 3))
        for end, mean in zip(ends, means, strict=True)
    ]


def outcome(folder: Path, seed: int, rule: str) -> dict[str, Any]:
    """What a finished run came to."""
    summary = json.loads((folder / "summary.json").read_text())
    episodes = read_episodes(folder / "episodes.csv")
    names = ("exit_reason", "solved", "wall_seconds", "steps", "sps", "mean_return_100", "episodes", "weights_sha256")
    run = {"seed": seed, **{name: summary[name] for name in names}}
    if rule == "machin":
        run["machin_episodes"] = machin_episodes((e.actor, e.episode_return) for e in episodes)
    return {**run, "curve": curve(episodes)}


def scores_of(folder: Path, games: int) -> list[float]:
    """Raw scores of whole games that a run's best net plays, with its likeliest actions."""
    with tempfile.TemporaryFile("w+") as output:
        code = common.run_script(["play.py", str(folder), f"--episodes={games}", f"--num-envs={games}"], stdout=output)
        if code != 0:
            raise SystemExit(code)  # play.py has said why
        output.seek(0)
        line = next(line for line in output if line.startswith("raw scores:"))
    return [float(score) for score in line.split()[2:]]


def medians(runs: Sequence[dict[str, Any]], rule: str) -> dict[str, float | None]:
    """Medians over the seeds; a seed that was not solved took for ever, and None stands for a median that did."""

    def median(name: str, solved_only: bool) -> float | None:
        values = [math.inf if run[name] is None or (solved_only and not run["solved"]) else run[name] for run in runs]
        found = statistics.median(values)
        return found if math.isfinite(found) else None

    found = {name: median(name, rule == "stop-return") for name in ("wall_seconds", "steps")}
    found["sps"] = median("sps", False)
    if rule == "machin":
        found["machin_episodes"] = median("machin_episodes", False)
    return found


def table(runs: Sequence[dict[str, Any]], middle: dict[str, float | None], rule: str) -> str:
    """A line for each seed and one for the medians."""

    def cells(run: dict[str, Any]) -> list[str]:
        seconds = run["wall_seconds"]
        figures = ["-" if seconds is None else f"{seconds / 60:.1f}"]
        figures += ["-" if run[name] is None else f"{run[name]:,.0f}" for name in ("steps", "sps")]
        if rule == "machin":
            figures.append("-" if run["machin_episodes"] is None else f"{run['machin_episodes']:,.0f}")
        return figures

    header = ["seed", "ended by", "mean return", "minutes", "steps", "sps"] + ["Machin's episodes"] * (rule == "machin")
    rows = [[str(r["seed"]), r["exit_reason"], _return(r["mean_return_100"]), *cells(r)] for r in runs]
    rows.append(["median", "", "", *cells(middle)])
    if "played_mean" in runs[0]:
        header.append("mean of the games played")
        rows = [[*row, _return(run.get("played_mean"))] for row, run in zip(rows, [*runs, {}], strict=True)]
    return common.markdown_table(header, rows)


def _return(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def draw(path: Path, result: dict[str, Any]) -> None:
    """Mean return over minutes and over steps, a line for each seed."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for run in result["runs"]:
        steps, seconds, means = zip(*run["curve"], strict=True) if run["curve"] else ((), (), ())
        axes[0].plot([s / 60 for s in seconds], means, label=f"seed {run['seed']}")
        axes[1].plot([s / 1e6 for s in steps], means)
    axes[0].set(xlabel="minutes", ylabel=f"mean return of the last {WINDOW} games")
    axes[1].set(xlabel="million agent steps")
    axes[0].legend()
    figure.suptitle(f"{result['chapter']} on {result['env_id']}, {result['machine']['name']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    args, flags = common.cli(Args, __doc__)
    check_ranges(args)
    command = [*common.CHAPTERS[args.chapter], *flags]
    if args.rule == "machin":
        given = {token.partition("=")[0].replace("_", "-") for token in flags}
        command += [part for name, value in MACHIN_FLAGS.items() if name not in given for part in (name, value)]
    settings = common.trainer_settings(command)
    result = common.begin("solve", args, settings.env_id) | {"rule": args.rule, "runs": []}
    path = common.result_path(args.results, result, with_env=True)
    stamp = re.sub(r"\D", "", result["date"])
    for seed in range(1, args.seeds + 1):
        name = f"solve-{args.chapter}-{settings.env_id.replace('/', '_')}-{stamp}-s{seed}"
        code = common.run_script([*command, f"--seed={seed}", f"--runs-dir={args.runs_dir}", f"--run-name={name}"])
        if code not in (0, 1):
            return code
        result["runs"].append(outcome(args.runs_dir / name, seed, args.rule))
        if args.games:
            scores = scores_of(args.runs_dir / name, args.games)
            result["runs"][-1] |= {"played": scores, "played_mean": statistics.mean(scores)}
        result["medians"] = medians(result["runs"], args.rule)
        common.save(path, result)  # after every seed: the next one may take hours
        draw(path.with_suffix(".png"), result)
    print(table(result["runs"], result["medians"], args.rule))
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
