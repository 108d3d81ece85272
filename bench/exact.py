"""Whether the bits of a deterministic run survive: two left alone, one with a killed trainer, one with killed actors.

All four end after as many steps; one `weights_sha256` is what they must have. Flags that are not listed here are the
trainer's. The time that it takes to rebuild the games of the last checkpoint is measured as well.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import torch
import torch.multiprocessing as mp

from a3c_mp.cli import parse_own
from a3c_mp.config import Count
from a3c_mp.run.checkpoint import list_checkpoints
from a3c_mp.run.script import exit_with
from a3c_mp.seeds import derive_seeds
from bench import common
from bench.outside import actors_among, processes_of
from wrappers import make_vec_env

FIGURES = ("weights_sha256", "steps", "updates", "episodes", "mean_return_100")
"""what all runs must have in common"""


@dataclass(frozen=True)
class Args:
    chapter: Literal["a3c_data", "a3c_grad", "impala", "apex_dqn", "apex_ddpg", "task"] = "a3c_data"
    """what to train: a chapter whose checkpoints hold the games of its actors"""
    steps: Count = 150_000
    """agent steps of each run"""
    trainer_kills: Count = 3
    """times that the trainer of the third run is killed and resumed"""
    actor_kills: Count = 5
    """actors of the fourth run that are killed"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    results: Path = common.RESULTS
    """folder of the result file"""


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """A trainer as a process of its own, whose output goes to a file."""
    with log.open("a") as file, common.running_script(command, stdout=file, stderr=subprocess.STDOUT) as trainer:
        yield trainer


def finish(trainer: subprocess.Popen, log: Path) -> None:
    """Wait for the end of a trainer, which must be a good one."""
    assert trainer.wait() == 0, log.read_text()


def steps_of(folder: Path) -> int:
    """Agent steps at the newest checkpoint of a run."""
    found = list_checkpoints(folder / "checkpoints")
    return int(found[0].stem[len("step_") :]) if found else 0


def killed_trainer(args: Args, command: list[str], folder: Path, log: Path) -> int:
    """Kill a trainer at random moments of its run and resume it each time; returns how often."""
    rng = random.Random(0)
    for part in range(args.trainer_kills):
        with started(command, log) as trainer:
            goal = args.steps * (part + rng.uniform(0.3, 0.9)) / args.trainer_kills
            while steps_of(folder) < goal and trainer.poll() is None:
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 5))  # somewhere between two checkpoints
            if trainer.poll() is not None:
                return part
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
        command = [command[0], "--resume", str(folder)]
    with started(command, log) as trainer:
        finish(trainer, log)
    return args.trainer_kills


def killed_actors(args: Args, command: list[str], folder: Path, log: Path) -> int:
    """Kill actors at random moments of a run; returns how many."""
    rng, kills = random.Random(0), 0
    with started(command, log) as trainer:
        for part in range(args.actor_kills):
            goal = args.steps * (part + rng.uniform(0.2, 0.8)) / args.actor_kills
            while steps_of(folder) < goal and trainer.poll() is None:
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 3))
            if trainer.poll() is None and (alive := actors_among(processes_of(trainer.pid))):
                rng.choice(alive).send_signal(signal.SIGKILL)
                kills += 1
        finish(trainer, log)
    return kills


def rebuild(settings: Any, start_steps: int, job: tuple[int, dict[str, Any]]) -> tuple[float, int]:
    """Rebuild the games of one actor: (seconds, steps that were repeated)."""
    actor, games = job
    seed, _ = derive_seeds(settings.seed, start_steps, actor, 0)
    env = make_vec_env(settings.env_id, settings.num_envs, seed=seed, rebuildable=True)
    began = time.perf_counter()
    env.rebuild({"actions": None, **games})  # type: ignore[attr-defined]
    seconds = time.perf_counter() - began
    env.close()
    return seconds, int(games["now"]) - int(games["start"].min())


def rebuild_seconds(settings: Any, folder: Path) -> dict[str, Any]:
    """How long the games of a run's last checkpoint take to rebuild, all actors at once."""
    saved = torch.load(list_checkpoints(folder / "checkpoints")[0], weights_only=True)["extra"]["actors"]
    games = [{name: field.numpy() for name, field in actor["games"].items()} for actor in saved["actors"]]
    began = time.perf_counter()
    with mp.get_context("spawn").Pool(settings.num_actors) as pool:
        found = pool.map(partial(rebuild, settings, saved["start"]), enumerate(games))
    return {
        "environments": settings.num_actors * settings.num_envs,
        "seconds_each_actor": [round(seconds, 1) for seconds, _ in found],
        "steps_repeated": [steps for _, steps in found],
        "seconds_with_the_start_of_processes": round(time.perf_counter() - began, 1),
    }


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    base = [*common.CHAPTERS[args.chapter], *flags, "--deterministic", f"--total-steps={args.steps}"]
    settings = common.trainer_settings(base)
    result = common.begin("exact", args, settings.env_id) | {"runs": {}}
    path = common.result_path(args.results, result, with_env=True)
    args.runs_dir.mkdir(parents=True, exist_ok=True)
    kinds = {"left alone": None, "repeated": None, "trainer killed": killed_trainer, "actors killed": killed_actors}
    for kind, disturb in kinds.items():
        name = common.run_name(result, kind.replace(" ", "-"))
        folder, log = args.runs_dir / name, args.runs_dir / f"{name}.log"
        command = [*base, f"--runs-dir={args.runs_dir}", f"--run-name={name}"]
        if disturb is None:
            kills = 0
            with started(command, log) as trainer:
                finish(trainer, log)
        else:
            # For more moments to kill at; when checkpoints are written changes no bit.
            kills = disturb(args, [*command, "--checkpoint-seconds=5"], folder, log)
        summary = json.loads((folder / "summary.json").read_text())
        figures = {name: summary[name] for name in (*FIGURES, "worker_restarts", "wall_seconds")}
        wanted = {"trainer killed": args.trainer_kills, "actors killed": args.actor_kills}.get(kind, 0)
        assert kills == wanted, f"{kills} of {wanted} kills: the run was over before; raise --steps"
        result["runs"][kind] = figures | {"kills": kills}
        print(kind, result["runs"][kind], flush=True)
    common.save(path, result)
    result["rebuilding"] = rebuild_seconds(settings, folder)
    result["identical"] = len({tuple(run[name] for name in FIGURES) for run in result["runs"].values()}) == 1
    common.save(path, result)
    print(result["rebuilding"])
    print("identical" if result["identical"] else "NOT identical", path)
    return 0 if result["identical"] else 1


if __name__ == "__main__":
    exit_with(main)
