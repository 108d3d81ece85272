"""What an evaluator that is stopped for a minute costs the learner of chapter 5: steps a second, and memory.

Runs with and without an evaluator take turns. Where there is one, it is stopped (SIGSTOP) after its first evaluation.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import psutil

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count
from a3c_mp.run.script import exit_with
from bench import common
from bench.solve import steps_taken

SETTLED = 20.0
"""seconds that a run has before it is watched"""


@dataclass(frozen=True)
class Args:
    chapter: ClassVar[str] = "task"
    seconds: Annotated[float, Between(1)] = 60.0
    """how long the evaluator is stopped (s)"""
    repeat: Count = 3
    """repetitions, in which the two kinds of run take turns"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    results: Path = common.RESULTS
    """folder of the result file"""


def evaluator_of(pid: int) -> psutil.Process:
    """The evaluator's process among the children of a trainer; it has named itself."""
    return next(child for child in psutil.Process(pid).children(recursive=True) if "evaluator" in child.name())


def has_evaluated(folder: Path) -> bool:
    log = folder / "run.log"
    return log.exists() and "evaluation 1:" in log.read_text()


def watched_run(name: str, stopped: bool, args: Args, flags: list[str]) -> dict[str, Any]:
    """Steps a second of a run while its evaluator is stopped, or while it has none; growth of the learner's memory."""
    folder = args.runs_dir / name
    evaluate = ["--eval-every=20000"] if stopped else ["--eval-every=0"]
    command = ["train_task.py", f"--runs-dir={args.runs_dir}", f"--run-name={name}", "--hang-seconds=600", *evaluate]
    with common.running_script([*command, *flags]) as process:
        time.sleep(SETTLED)
        while stopped and not has_evaluated(folder):
            if process.poll() is not None:
                raise SystemExit(f"{folder} ended before its first evaluation; raise --total-steps")
            time.sleep(0.1)
        learner = psutil.Process(process.pid)
        evaluator = evaluator_of(process.pid) if stopped else None
        if evaluator:
            os.kill(evaluator.pid, signal.SIGSTOP)
        memory, steps, started = learner.memory_info().rss, steps_taken(folder / "episodes.csv"), time.monotonic()
        time.sleep(args.seconds)
        steps = steps_taken(folder / "episodes.csv") - steps
        sps = steps / (time.monotonic() - started)
        grown = (learner.memory_info().rss - memory) / 2**20
        if evaluator:
            os.kill(evaluator.pid, signal.SIGCONT)
    summary = json.loads((folder / "summary.json").read_text())
    own = {"exit_reason": summary["exit_reason"], "evaluator_restarts": summary.get("evaluator_restarts", 0)}
    return {"stopped": stopped, "sps": round(sps, 1), "learner_grew_mib": round(grown, 2), **own}


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    flags = [*flags, *common.defaults_for(flags, {"--env-id": "CartPole-v1", "--stop-return": "501"})]
    flags = [*flags, *common.defaults_for(flags, {"--total-steps": "10_000_000"})]
    env_id = common.trainer_settings(["train_task.py", *flags]).env_id
    result = common.begin("frozen", args, env_id)
    stamp = time.strftime("%Y%m%d%H%M%S")
    runs = []
    for number in range(args.repeat):
        for stopped in (False, True):
            runs.append(watched_run(f"frozen-{stamp}-{number}-{int(stopped)}", stopped, args, flags))
            print(runs[-1], flush=True)
    rate = {kind: statistics.median(run["sps"] for run in runs if run["stopped"] == kind) for kind in (False, True)}
    result |= {"runs": runs, "sps_without": rate[False], "sps_stopped": rate[True]}
    result["ratio"] = round(rate[True] / rate[False], 3)
    print(
        f"with a stopped evaluator {rate[True]:,.0f} steps a second, without one {rate[False]:,.0f}: {result['ratio']}"
    )
    path = common.result_path(args.results, result, with_env=True)
    common.save(path, result)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(exit_with(main))
