"""How close a chapter comes to what the hardware allows.

Each stage is measured alone on one core, with the trainer's own settings and code: stepping environments, acting,
learning. Together they give a bound on agent steps a second. Then the trainer itself runs, and its steady rate is set
against the bound. Cores that all have work slow each other down (caches, memory, clock): how much shows the bound from
stages that run on all cores at once. Flags not listed here are the trainer's, for instance --env-id or --cuda.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import gymnasium

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count, flag_name
from a3c_mp.errors import ConfigError
from a3c_mp.nets.layers import is_image
from a3c_mp.nets.precision import compute_dtype
from a3c_mp.run.preflight import check_device, probe_env
from a3c_mp.run.script import exit_with
from bench import common
from bench.stages import Setup, bound, learning_threads, measure, measure_on_all_cores

UNTIL_STOPPED = ["--stop-return", "1e6", "--total-steps", "1_000_000_000"]
SB3_STEPS = 5
"""what Stable-Baselines3's A2C takes of each environment in one gradient by default"""
LIKE_SB3 = {"net": "nature", "update_epochs": "1"}
"""settings of chapters for a fair comparison: run_sb3.py has that net, and A2C takes one pass"""
TRIAL_SECONDS = 15.0
"""how long each way to run Stable-Baselines3's environments is tried (s)"""


@dataclass(frozen=True)
class Args:
    chapter: common.ChapterName = "a3c_data"
    """what to measure"""
    seconds: Annotated[float, Between(1)] = 40.0
    """how long the trainer runs, starting up included; the second half of its curve counts (s)"""
    stage_seconds: Annotated[float, Between(0.1)] = 5.0
    """how long each stage is measured (s)"""
    repeat: Count = 3
    """repetitions; stages, trainer and comparison take turns, and medians are reported"""
    compare: Literal["none", "sb3"] = "none"
    """also run Stable-Baselines3's A2C, with as many environments; both with the book's net and one pass"""
    results: Path = common.RESULTS
    """folder of the result file"""


def steady_sps(points: list[tuple[float, int]]) -> float:
    """Steps a second over the second half of (seconds, steps) pairs; the first half is for starting up."""
    middle = (points[0][0] + points[-1][0]) / 2 if points else 0.0
    points = [point for point in points if point[0] >= middle]
    if len(points) < 2:
        raise ConfigError("seconds", "too short", "too little was learned to take a rate from", "raise --seconds")
    (start, steps), (end, more_steps) = points[0], points[-1]
    return (more_steps - steps) / (end - start)


def trainer_sps(command: list[str], seconds: float) -> float:
    """Run a trainer for so long, without a stop rule; its steady rate."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*UNTIL_STOPPED, "--max-seconds", str(seconds), "--runs-dir", folder, "--run-name", "run"]
        _run([*command, *flags], subprocess.DEVNULL)
        events = elapsed_events(Path(folder) / "run")
    return steady_sps([(event.value, event.step) for event in events[:-1]])  # the last one is of the shutdown


def elapsed_events(folder: Path) -> list[Any]:
    """TensorBoard's events of a run about the time that has passed, each with its agent step and wall time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    name = "time/elapsed_seconds"
    return events.Scalars(name) if name in events.Tags()["scalars"] else []


def sb3_sps(flags: list[str]) -> float:
    """Run Stable-Baselines3's A2C in a process of its own; its steady rate."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # set to 1 by a3c_mp
    with tempfile.TemporaryFile("w+") as output:
        _run(["bench/peers/run_sb3.py", "--net", "matched", *flags], output, env=env)
        output.seek(0)
        return steady_sps([(seconds, steps) for seconds, steps, _ in common.read_points(output.read())])


def _run(command: list[str], stdout: Any, **popen: Any) -> None:
    if code := common.run_script(command, stdout=stdout, **popen):
        print(f"error: {command[0]} ended with code {code}; start it alone to see why", file=sys.stderr)
        sys.exit(code)


def sb3_flags(settings: Any, cores: float) -> list[str]:
    """Settings for `bench/peers/run_sb3.py` that match the trainer's."""
    if "NoFrameskip" not in settings.env_id:
        why = f"{settings.env_id} is not an Atari game with frame skip 1"
        raise ConfigError("compare", "sb3", why, "choose an id with NoFrameskip, or --compare none")
    if importlib.util.find_spec("stable_baselines3") is None:
        fix = "pip install 'stable-baselines3>=2.7', or --compare none"
        raise ConfigError("compare", "sb3", "stable-baselines3 is not installed", fix)
    num_envs = settings.num_actors * settings.num_envs
    n_steps = max(SB3_STEPS, math.ceil(settings.batch_size / num_envs))  # no smaller a batch than the trainer's
    flags = ["--env-id", settings.env_id, "--num-envs", str(num_envs), "--n-steps", str(n_steps)]
    return [*flags, "--threads", str(max(1, int(cores))), *(["--cuda"] if settings.cuda else [])]


def faster_sb3(flags: list[str], seconds: float) -> tuple[list[str], dict[str, float]]:
    """(flags with the faster kind of vector environment, the rates of both)."""
    trials = {}
    for kind in ("dummy", "subproc"):
        trials[kind] = sb3_sps([*flags, "--vec-env", kind, "--seconds", str(min(seconds, TRIAL_SECONDS))])
    return [*flags, "--vec-env", max(trials, key=trials.__getitem__), "--seconds", str(seconds)], trials


def line(rates: dict[str, float]) -> str:
    """One repetition, or the medians, for the terminal."""
    stages = "  ".join(f"{name} {rates[name]:,.0f}" for name in ("env", "act", "learn", "bound", "trainer"))
    sb3 = f"  sb3 {rates['sb3']:,.0f}, {rates['times_sb3']:.2f} times" if "sb3" in rates else ""
    busy = f" ({rates['ratio_busy']:.1%} of {rates['bound_busy']:,.0f} with all cores at work)"
    return f"{stages}  {rates['ratio']:.1%} of the bound{busy}{sb3}"


def repetition(setup: Setup, cores: float, command: list[str], seconds: float) -> tuple[dict[str, float], str]:
    """(rates of the stages, of the bound and of the trainer, what limits the bound), measured one after the other."""
    settings = setup.settings
    rates = measure(setup)
    busy = rates if settings.cuda or cores < 2 else measure_on_all_cores(setup, int(cores))
    repeated = (getattr(settings, "update_epochs", 1) - 1) * getattr(settings, "repeat_fraction", 1.0)
    passes = getattr(settings, "replay_ratio", 1 + repeated)
    threads = learning_threads(setup.chapter, settings)
    (most, limit), (most_busy, _) = (
        bound(found, cores=cores, passes=passes, learner_threads=threads, cuda=settings.cuda) for found in (rates, busy)
    )
    sps = trainer_sps(command, seconds)
    ratios = {
        "bound": most,
        "bound_busy": most_busy,
        "trainer": sps,
        "ratio": sps / most,
        "ratio_busy": sps / most_busy,
    }
    return {**rates, **{f"{name}_busy": rate for name, rate in busy.items()}, **ratios}, limit


def main() -> int:
    args, trainer_flags = parse_own(Args, __doc__)
    command = [*common.CHAPTERS[args.chapter], *trainer_flags]
    settings = common.trainer_settings(command)
    if args.compare == "sb3":
        alike = {f"--{flag_name(name)}": value for name, value in LIKE_SB3.items() if name in vars(settings)}
        trainer_flags += common.defaults_for(trainer_flags, alike)
        command = [*common.CHAPTERS[args.chapter], *trainer_flags]
        settings = common.trainer_settings(command)
    obs_space, _ = probe_env(settings.env_id, gymnasium.Space)
    device = check_device(settings.cuda)
    dtype = compute_dtype(settings.precision, device, is_image(obs_space))
    cores = common.usable_cores()
    comparison = sb3_flags(settings, cores) if args.compare == "sb3" else []
    result = common.begin("throughput", args, settings.env_id)
    result |= {"flags": trainer_flags, "settings": dataclasses.asdict(settings), "dtype": str(dtype)}

    if comparison:
        comparison, trials = faster_sb3(comparison, args.seconds)
        result["sb3"] = {"flags": comparison, "trials": trials}
        print("  ".join(f"sb3 with {kind} environments {sps:,.0f}" for kind, sps in trials.items()), flush=True)

    setup = Setup(args.chapter, settings, device, dtype, args.stage_seconds)
    repetitions: list[dict[str, float]] = []
    for i in range(args.repeat):
        rates, limit = repetition(setup, cores, command, args.seconds)
        if comparison:
            rates["sb3"] = sb3_sps(comparison)
            rates["times_sb3"] = rates["trainer"] / rates["sb3"]
        repetitions.append(rates)
        print(f"{i + 1}/{args.repeat}  {line(rates)} ({limit})", flush=True)
    medians = {name: statistics.median(rates[name] for rates in repetitions) for name in repetitions[0]}
    result |= {"limit": limit, "repetitions": repetitions, "medians": medians}

    path = common.result_path(args.results, result, with_env=False)
    common.save(path, result)
    where = f"{settings.env_id} on {result['machine']['name']}"
    print(f"{where}, agent steps or samples a second, medians of {args.repeat}")
    print(line(medians))
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
