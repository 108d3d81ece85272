"""What V-trace is good for: learning from actors that act with old weights, with the correction and without.

Trains chapter 4 with `--force-lag`, every seed with V-trace and with `--no-vtrace`, and draws the mean returns.
Flags that are not listed here are the trainer's.
"""

from __future__ import annotations

import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import numpy as np

from a3c_mp.config import Between, Count, check_ranges
from a3c_mp.run.episode_log import read_episodes
from a3c_mp.run.script import exit_with
from bench import common
from bench.solve import outcome

FLAGS = {"--env-id": "CartPole-v0", "--stop-return": "201", "--total-steps": "15_000"}
"""what the trainer is given unless told otherwise; one update for each publication, so that a lag is one in updates"""


@dataclass(frozen=True)
class Args:
    chapter: ClassVar[str] = "impala"  # the only one that corrects for a lag
    seeds: Count = 3
    """how many seeds: 1, 2, ..."""
    lag: Annotated[int, Between(0, 1000)] = 20
    """updates between the policy that acts and the one that learns"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    results: Path = common.RESULTS
    """folder of the result file and its picture"""


def late_return(folder: Path) -> float:
    """Mean return of the second half of a run's steps."""
    episodes = read_episodes(folder / "episodes.csv")
    late = [episode.episode_return for episode in episodes if episode.steps > episodes[-1].steps / 2]
    return round(float(np.mean(late)), 2)


def main() -> int:
    args, flags = common.cli(Args, __doc__)
    check_ranges(args)
    given = {token.partition("=")[0].replace("_", "-") for token in flags}
    defaults = [part for name, value in FLAGS.items() if name not in given for part in (name, value)]
    command = [*common.CHAPTERS[args.chapter], *defaults, *flags, f"--force-lag={args.lag}"]
    result = common.begin("lag", args, common.trainer_settings(command).env_id) | {"trainer": command, "runs": []}
    path = common.result_path(args.results, result, with_env=True)
    stamp = re.sub(r"\D", "", result["date"])
    for seed in range(1, args.seeds + 1):
        for vtrace in (True, False):
            name = f"lag-{stamp}-s{seed}-{'vtrace' if vtrace else 'none'}"
            flag = "--vtrace" if vtrace else "--no-vtrace"
            more = [flag, f"--seed={seed}", f"--runs-dir={args.runs_dir}", f"--run-name={name}"]
            if code := common.run_script([*command, *more]):
                return code
            folder = args.runs_dir / name
            run = outcome(folder, seed, "stop-return") | {"vtrace": vtrace, "late_return": late_return(folder)}
            result["runs"].append(run)
            common.save(path, result)
            curves = [("V-trace" if r["vtrace"] else "no correction", r["curve"]) for r in result["runs"]]
            title = f"{result['env_id']}, actors {args.lag} updates behind"
            common.draw_curves(path.with_suffix(".png"), title, curves)
    rows = []
    for vtrace, title in ((True, "V-trace"), (False, "no correction")):
        returns = [run["late_return"] for run in result["runs"] if run["vtrace"] == vtrace]
        rows.append([title, " ".join(f"{value:.1f}" for value in returns), f"{statistics.median(returns):.1f}"])
    print(common.markdown_table(["mean return, second half", "seeds", "median"], rows))
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
