"""The parts of gpu_check.py; each is a process of its own, and writes what it has found after every step.

python bench/gpu/parts.py PART FOLDER    # FOLDER/task.json says what to do; figures are in FOLDER/PART.json
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds only what lies beside it

from a3c_mp.errors import one_line
from bench import common
from bench.gpu.queueing import predict_sps
from bench.gpu.sharing import latency
from bench.gpu.task import (
    END_SECONDS,
    HERE,
    START_SECONDS,
    UNTIL_STOPPED,
    Figures,
    Part,
    Trainer,
    end,
    run,
    start,
    training,
)
from bench.outside import actors_among, command_of, processes_of, replaced_after

SPEED = {
    "a3c_data act-on=cuda": ["a3c_data", "--act-on=cuda"],
    "a3c_data act-on=cpu": ["a3c_data", "--act-on=cpu"],
    "a3c_data act-on=cuda num-actors=8": ["a3c_data", "--act-on=cuda", "--num-actors=8"],
    "a3c_grad act-on=cuda": ["a3c_grad", "--act-on=cuda"],
    "apex_dqn act-on=cuda": ["apex_dqn", "--act-on=cuda"],
    "impala act-on=cuda": ["impala", "--act-on=cuda"],
}
"""row of the part `speed` -> chapter and flags"""


def tests(part: Part) -> None:
    """The tests marked `cuda`, several at a time where pytest-xdist is there."""
    files = [
        path for path in sorted((common.ROOT / "tests").rglob("test_*.py"))
        if "mark.cuda" in path.read_text() and path.parent.name != "virtual_gpu"
    ]  # fmt: skip
    workers = min(8, max(1, part.cores // 2)) if find_spec("xdist") else 0
    several = ["-n", workers] if workers else []
    log = part.folder / "tests.txt"
    options = ["-m", "cuda", "-v", "-rfE", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    with log.open("w") as file:
        process = start("-m", "pytest", *options, *several, *files, stdout=file, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            time.sleep(1.0)
            part.record(workers=workers, **results_of(log.read_text(errors="replace")))
    finally:
        end(process)
    output = log.read_text(errors="replace")
    part.record(**results_of(output), exit_code=process.returncode, summary=output.strip().splitlines()[-1])
    if process.returncode:
        part.record(output=output[-6000:])


def results_of(output: str) -> Figures:
    """Numbers of results in the output of `pytest -v` so far, with the names of the tests that have failed."""
    found = re.findall(r"^(?:\[gw\d+\] \[ *\d+%\] )?(PASSED|FAILED|SKIPPED|ERROR) (\S+)", output, re.MULTILINE)
    found += [pair[::-1] for pair in re.findall(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b", output, re.MULTILINE)]
    results = {name: result for result, name in found if "::" in name}
    numbers = {state: [*results.values()].count(state.upper()) for state in ("passed", "failed", "skipped", "error")}
    return numbers | {"names_failed": [name for name, result in results.items() if result in ("FAILED", "ERROR")]}


def waits(part: Part) -> None:
    """Waits of the host by function: of actors for each step, of the learner for each update; and the budgets."""
    for chapter in ("a3c_data", "a3c_grad", "apex_dqn", "impala"):
        with part.guarded(chapter), tempfile.TemporaryDirectory(dir=part.folder) as folder:
            path = os.pathsep.join(filter(None, [str(HERE / "start"), os.environ.get("PYTHONPATH")]))
            env = {"PYTHONPATH": path, "GPU_WAITS": folder}
            seconds = max(4.0, part.seconds / 2)
            soon = ["--learning-starts=2000"] if chapter == "apex_dqn" else []
            trainer = run(part, chapter, *UNTIL_STOPPED, "--act-on=cuda", *soon, seconds=seconds, env=env)
            processes = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
            part.record(**{chapter: waits_of(processes, trainer)})


def waits_of(processes: Sequence[Figures], trainer: Trainer) -> Figures:
    """Rates of the waits that processes have counted, and what exceeds the budgets of the tests."""
    updates = common.read_summary(trainer.folder)["updates"]
    roles: dict[str, list[Figures]] = {"actors": [], "learner": []}
    for process in processes:
        if process["waits_by"] and process["process"].startswith(("worker", "collector")):
            roles["actors"].append(process)
        elif process["waits_by"] and process["process"].startswith(("python", "learner")):
            roles["learner"].append(process)
    units = {"actors": sum(process.get("replays", 0) for process in roles["actors"]), "learner": updates}
    found: Figures = {"updates": updates}
    for role, own in roles.items():
        by: dict[str, int] = {}
        for name, number in (pair for process in own for pair in process["waits_by"].items()):
            by[name] = by.get(name, 0) + number
        per = {name: round(number / max(units[role], 1), 4) for name, number in sorted(by.items(), key=lambda x: -x[1])}
        unit = "graph launch" if role == "actors" else "update"
        found[role] = {"processes": len(own), "units": units[role], "unit": unit, "all": round(sum(per.values()), 4)}
        found[role] |= {"by_function": per}
    try:
        found["beyond_budget"] = "no waits were counted"
        if all(roles.values()):
            found["beyond_budget"] = beyond_budgets(roles["actors"], roles["learner"], trainer)
    except Exception as error:  # the tests are not here, or have other budgets
        found["beyond_budget"] = one_line(error)
    return found


def beyond_budgets(actors: Sequence[Figures], learners: Sequence[Figures], trainer: Trainer) -> list[str]:
    """What is not in the budgets of waits of tests/virtual_gpu."""
    sys.path.insert(0, str(common.ROOT / "tests"))
    excess = importlib.import_module("virtual_gpu.test_gpu_chapters").excess
    for process in (*actors, *learners):
        by = process["waits_by"]
        loads, published = by.get("weights.Weights._wait_for_copies", 0), by.get("weights.Weights.publish", 0)
        process["launches_by"] = {"weights.Weights.load": loads, "weights.Weights.publish": published}
    config = json.loads((trainer.folder / "config.json").read_text())
    done = SimpleNamespace(summary=common.read_summary(trainer.folder), config=config)
    ran = SimpleNamespace(processes=[*actors, *learners], actors=actors, learners=learners, done=done)
    return list(excess(ran, SimpleNamespace(launches=(0, 0, 0), gpus=1)))


def speed(part: Part) -> None:
    """Steps a second of chapters, and what the model says."""
    for row, (chapter, *flags) in SPEED.items():
        with part.guarded(row):
            figures = run(part, chapter, *UNTIL_STOPPED, *flags, seconds=part.seconds, name=row).figures
            part.record(**{row: figures})
            figures["predicted_sps"] = predicted(part, row)
            part.record(**{row: figures})


def predicted(part: Part, row: str) -> float | str:
    """Steps a second by the model, of what `latency` and `launches` have measured; or why there is none."""
    chapter, *flags = SPEED[row]
    if chapter not in ("a3c_data", "impala"):
        return "none: actors compute gradients, or the replay decides when the learner learns"
    settings = common.trainer_settings(part.flags_of(chapter, *flags))
    try:
        calls, learner = part.earlier["latency"], part.earlier["launches"][chapter]
        most = max(map(int, calls["step"]))
        device, step_ms = "cpu" if settings.act_on == "cpu" else "cuda", calls["step"][str(most)]["mean_ms"]
        alone, together = (calls[device][str(number)]["mean_ms"] for number in (1, most))
        on_cpu = device == "cpu"
        found = predict_sps(
            actors=settings.num_actors, cores=max(1, part.cores - 1), unroll_length=settings.unroll_length,
            num_envs=settings.num_envs, slots_per_actor=settings.slots_per_actor,
            step_ms=step_ms * settings.num_envs / calls["num_envs"], act_ms=together if on_cpu else alone,
            gpu_ms=0.0 if on_cpu else min(alone, together / most), learner_ms=learner["ms_per_rollout"],
        )  # fmt: skip
        return round(found)
    except (LookupError, TypeError, AttributeError) as error:
        return f"none: {one_line(error)}"


def kill(part: Part) -> None:
    """An actor is killed in the middle of a run, which goes on."""
    seconds = max(12.0, part.seconds)
    with training(part, "a3c_data", *UNTIL_STOPPED, f"--max-seconds={seconds:g}") as trainer:
        trainer.wait_until_it_learns(min(part.left, START_SECONDS))
        actors = actors_among(processes_of(trainer.process.pid))
        part.record(actors=len(actors))
        actors[0].kill()
        part.record(replaced_seconds=replaced_after(trainer.process, actors))
        part.record(exit_code=trainer.wait(min(part.left, seconds + START_SECONDS)), **trainer.figures)
        lines = [line for line in trainer.output.splitlines() if "was killed" in line]
        part.record(said=lines[:3], goes_on=trainer.figures["worker_restarts"] == 1)


def learners(part: Part) -> None:
    """Two learners of chapter 4, of which one is killed: the run ends, and can be resumed."""
    import torch

    if (gpus := torch.cuda.device_count()) < 2:
        part.record(possible=False, why=f"two learners need two GPUs, {gpus} is here")
        return
    even = max(2, part.actors // 2 * 2)
    flags = [*UNTIL_STOPPED, f"--num-actors={even}", "--num-learners=2"]
    with training(part, "impala", *flags, "--max-seconds=300") as trainer:
        trainer.wait_until_it_learns(min(part.left, START_SECONDS))
        time.sleep(2.0)
        children = processes_of(trainer.process.pid)[1:]
        (other,) = (child for child in children if "spawn_main" in command_of(child) and child.children())
        other.kill()
        killed = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            trainer.process.wait(min(part.left, 90.0))
        said = [line for line in trainer.output.splitlines() if line.strip()][-5:]
        part.record(seconds_to_end=round(time.monotonic() - killed, 2), exit_code=trainer.process.poll(), said=said)
    resumed_from = common.read_summary(trainer.folder)["steps"]
    with (part.folder / "resumed.txt").open("w") as file:
        command = [common.CHAPTERS["impala"][0], "--resume", trainer.folder, "--max-seconds=5"]
        process = start(*command, stdout=file, stderr=subprocess.STDOUT)
    try:
        process.wait(min(part.left, START_SECONDS))
    finally:
        end(process)
    part.record(resumed_exit_code=process.returncode, resumed_from=resumed_from)


def pong(part: Part) -> None:
    """Chapter 1 with its preset until 18, or until the time is over."""
    seconds = max(5.0, part.left - START_SECONDS / 3)  # that much for its start and its end
    with training(part, "a3c_data", f"--max-seconds={seconds:g}") as trainer:
        while trainer.process.poll() is None and part.left > END_SECONDS:
            with suppress(subprocess.TimeoutExpired):
                trainer.process.wait(2.0)
            if games := common.read_games(trainer.folder):
                part.record(steps=games[-1].steps, seconds=games[-1].seconds, mean_return=common.mean_return(games))
        trainer.process.terminate()  # if it has not ended: it writes its summary
        part.record(exit_code=trainer.process.wait(max(1.0, part.left - 5.0)))
        summary = common.read_summary(trainer.folder)
        names = ("solved", "solved_at_seconds", "solved_at_steps", "sps", "updates", "mean_return_100", "exit_reason")
        curve = common.curve_of(common.read_games(trainer.folder), 40)
        part.record(**{name: summary.get(name) for name in names}, steps=summary["steps"], curve=curve)


def launches(part: Part) -> None:
    """A learner alone: time of an update and of a rollout, and what it launches, with graphs and without."""
    seconds = max(6.0, part.seconds / 2)
    for row in ("a3c_data", "impala", "a3c_data no-cuda-graph", "impala no-cuda-graph"):
        with part.guarded(row):
            chapter, *words = row.split()
            log, found = part.folder / f"{row}.txt", part.folder / f"alone {row}.json"
            flags = [
                *(f"--{word}" for word in words),
                *UNTIL_STOPPED,
                f"--max-seconds={seconds + 20:g}",
            ]  # 20 s for the profiler
            command = part.flags_of(chapter, *flags, f"--runs-dir={part.folder / 'runs'}")
            with log.open("w") as file:
                process = start(HERE / "alone.py", "learner", found, *command, stdout=file, stderr=subprocess.STDOUT)
            try:
                process.wait(min(part.left, seconds + START_SECONDS))
            finally:
                end(process)
                if found.exists():
                    part.record(**{row: json.loads(found.read_text())})
            if process.returncode:
                raise RuntimeError(f"exit code {process.returncode}: {log.read_text(errors='replace')[-700:]}")


PARTS = {part.__name__: part for part in (launches, latency, waits, speed, kill, learners, tests, pong)}


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    task = json.loads((folder / "task.json").read_text())
    part = Part(name, folder, **{**task, "runs_dir": Path(task["runs_dir"])})
    with contextlib.chdir(common.ROOT):
        PARTS[name](part)
    part.record()


if __name__ == "__main__":
    main()
