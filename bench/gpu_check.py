"""Measures what --cuda does on this machine's GPU, in ten minutes or more; docs/gpu.md says what each part is.

Writes one JSON file, which is worth sending back: results of the tests marked `cuda`, launches and waits of the host,
latencies and memory of processes that share the GPU, steps a second of the chapters beside a model's, and what a killed
actor or learner does. Each part runs in processes of its own with a time limit: one that fails is recorded, and the
next goes on. Flags that are not listed here are the trainers'.

    python bench/gpu_check.py
    python bench/gpu_check.py --parts latency speed --seconds 10
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import psutil
import torch

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.processes.spawn import PARENT_VARIABLE
from a3c_mp.run.script import exit_with
from bench import common
from bench.records import Result, begin, machine, markdown_table, measure

PONG = "PongNoFrameskip-v4"
SCRIPT = Path(__file__).resolve().parent / "gpu" / "parts.py"
LIMITS: dict[str, tuple[float, float]] = {
    "launches": (200, 2), "latency": (150, 4), "waits": (200, 4), "speed": (240, 9), "kill": (100, 2),
    "learners": (240, 0), "tests": (900, 0), "pong": (660, 0),
}  # fmt: skip
"""part -> its time limit (s): a constant, and how many times `--seconds` are added"""
MARK = "GPU_CHECK_PART"
"""environment variable that all processes of a part have"""
LEAST_SECONDS = 10.0
"""a part is not started if less time is left"""

PartName = Literal["launches", "latency", "waits", "speed", "kill", "learners", "tests", "pong"]


@dataclass(frozen=True)
class Args:
    parts: tuple[PartName, ...] = ("launches", "latency", "waits", "speed", "kill", "learners", "tests", "pong")
    """what to do, in this order: what a learner launches; latency and memory of processes that share the GPU; waits of
    the host; speed; a killed actor; a killed learner; the tests marked `cuda`; Pong to 18"""
    seconds: Annotated[float, Between(1)] = 20.0
    """length of a measured run; starting it takes about ten more"""
    limit: Annotated[float, Between(30)] = 3600.0
    """time limit of everything; parts for which no time is left are skipped"""
    num_actors: Count | None = None
    """actors, and processes that share the GPU; default: cores - 1"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    out: Path | None = None
    """result file; an existing one is continued with the parts that it lacks; default: a new one in bench/results"""


def run_part(name: str, task: dict[str, Any], limit: float) -> Result:
    """Run a part in a process of its own; returns its figures, and why it has failed if it has. Raises nothing."""
    started, error = time.monotonic(), None
    if limit < LEAST_SECONDS:
        return {"seconds": 0.0, "error": "skipped: no time is left", "figures": {}, "output": ""}
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        log, found = Path(folder, "output.txt"), Path(folder, f"{name}.json")
        Path(folder, "task.json").write_text(json.dumps({**task, "limit": limit}, default=str))
        env = {**os.environ, MARK: folder, PARENT_VARIABLE: str(os.getpid())}  # it ends if this process is killed
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), name, folder], env=env, cwd=common.ROOT, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            if code := process.wait(limit):
                error = f"ended with code {code}"
        except subprocess.TimeoutExpired:
            error = f"cut off after {limit:.0f} s"
        finally:
            kill_all(folder)
            process.wait()
        figures: Any = {}
        with suppress(OSError, ValueError):
            figures = finite(json.loads(found.read_text()))
        output = log.read_text(errors="replace")[-3000:] if error else ""
    return {"seconds": round(time.monotonic() - started, 1), "error": error, "figures": figures, "output": output}


def kill_all(folder: str) -> None:
    """Kill what a part has started, in whatever process group it is: by the variable that all of it has inherited."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == folder:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=2)


def finite(value: Any) -> Any:
    """A JSON value without NaN and infinity, which are no JSON: None instead."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def about_gpus() -> Result:
    """GPUs, driver, CUDA, and what else of the system decides how processes share a GPU."""
    found: Result = {"cuda": torch.version.cuda, "mps": shutil.which("nvidia-cuda-mps-control"), "number": 0}
    found["variables"] = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "PYTORCH_"))}
    try:
        found["number"] = torch.cuda.device_count()
        properties = torch.cuda.get_device_properties(0)
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["capability"] = f"{properties.major}.{properties.minor}"
        query = "driver_version,compute_mode,mig.mode.current,power.limit,clocks.max.sm,pcie.link.gen.current"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except Exception as error:
        found["error"] = one_line(error)
    return found


def in_short(run: Result) -> str:
    """What a part has found, in one line."""
    figures = run["figures"]
    if run["row"] == "speed":
        cells = {row: found.get("sps", "error") for row, found in figures.items()}
        return ", ".join(f"{row.replace(' act-on=', ' ')} {sps}" for row, sps in cells.items())
    if run["row"] == "latency":
        found = {what: figures[what] for what in ("cuda", "mps", "cpu", "step") if isinstance(figures.get(what), dict)}
        times = [(what, number, each) for what, all_ in found.items() for number, each in all_.items()]
        return ", ".join(f"{what} {n}: {each['median_ms']} ms" for what, n, each in times if n.isdigit())
    if run["row"] == "waits":
        return ", ".join(f"{name} {found.get('beyond_budget', 'error')}" for name, found in figures.items())[:160]
    if run["row"] == "launches":
        return ", ".join(
            f"{name}: {found.get('ms_per_update', 'error')} ms an update" for name, found in figures.items()
        )
    plain = {
        name: value for name, value in figures.items() if isinstance(value, int | float | str) and name != "output"
    }
    return ", ".join(f"{name} {value}" for name, value in plain.items())[:160]


def table(result: Result) -> str:
    rows = []
    for run in result["runs"]:
        short = ""
        with suppress(LookupError, TypeError, AttributeError):  # of a part that was cut off, or has failed
            short = in_short(run)
        rows.append([run["row"], f"{run['seconds']:.0f}", "; ".join(filter(None, [run["error"], short]))])
    return markdown_table(["part", "seconds", "found"], rows)


def main() -> int:
    args, flags = parse_own(Args, __doc__ or "")
    if not torch.cuda.is_available():
        raise ConfigError("cuda", True, "torch sees no GPU that it can use", "see nvidia-smi and docs/gpu.md")
    started, cores = time.monotonic(), int(machine()["cores"])
    actors = args.num_actors or max(1, cores - 1)
    place = ["--cuda", f"--env-id={PONG}", f"--num-actors={actors}"]
    chapters = ("a3c_data", "a3c_grad", "apex_dqn", "impala")
    commands = {chapter: [*common.CHAPTERS[chapter], *place, *flags] for chapter in chapters}
    settings = {chapter: common.as_recorded(common.trainer_settings(each)) for chapter, each in commands.items()}
    path, result = begin("gpu_check", args, PONG, settings, gpus=about_gpus())
    result["runs"] = [run for run in result["runs"] if not (run["error"] or "").startswith("skipped")]
    task = {
        "seconds": args.seconds,
        "actors": actors,
        "cores": cores,
        "flags": flags,
        "runs_dir": args.runs_dir.absolute(),
    }

    def run(name: str, _: int) -> Result:
        print(f"{time.strftime('%H:%M:%S')} {name} ...", flush=True)
        constant, times = LIMITS[name]
        left = args.limit - (time.monotonic() - started)
        earlier = {each["row"]: each["figures"] for each in result["runs"]}
        return run_part(name, {**task, "earlier": earlier}, min(constant + times * args.seconds, left))

    plan = [(name, 1) for name in dict.fromkeys(args.parts)]
    measure(path, result, plan, run, table)
    return 0


if __name__ == "__main__":
    exit_with(main)
