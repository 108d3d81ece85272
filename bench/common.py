"""What the benchmarks share: the chapters' command lines, the machine they run on, result files."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from a3c_mp.algorithms import ray_settings
from a3c_mp.cli import parse_algo, parse_args
from a3c_mp.run.run_dir import as_recorded, git_commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
FOLDERS = ("--runs-dir", "--results", "--go-on", "--environments", "--trees")
"""flags that name folders"""
PACKAGES = ("torch", "gymnasium", "ale-py", "mujoco", "numpy", "opencv-python-headless", "stable-baselines3", "cpprb")
"""those whose versions a result names, where they are installed"""
VECTOR_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
"""flag of /proc/cpuinfo -> name, the widest first"""

ChapterName = Literal[
    "a3c_data", "a3c_grad", "impala", "apex_dqn", "apex_ddpg", "task", "population", "ray_impala", "ray_dqn"
]
CHAPTERS: dict[ChapterName, list[str]] = {
    "a3c_data": ["train_a3c_data.py"],
    "a3c_grad": ["train_a3c_grad.py"],
    "impala": ["train_impala.py"],
    "apex_dqn": ["train_apex.py", "--algo", "dqn"],
    "apex_ddpg": ["train_apex.py", "--algo", "ddpg", "--env-id", "Pendulum-v1"],
    "task": ["train_task.py"],
    "population": ["train_population.py"],
    "ray_impala": ["train_ray.py", "--algo", "impala"],
    "ray_dqn": ["train_ray.py", "--algo", "dqn"],
}
"""name of a chapter -> its script and the flags that choose it"""


def defaults_for(flags: Sequence[str], defaults: dict[str, str]) -> list[str]:
    """Those of `defaults`, flag -> value, that are not among the given flags."""
    given = {token.partition("=")[0].replace("_", "-") for token in flags}
    return [f"{name}={value}" for name, value in defaults.items() if name not in given]


def trainer_settings(command: Sequence[str]) -> Any:
    """The settings that a chapter's script would run with. Raises ConfigError for bad flags."""
    if command[0] == "train_ray.py":  # its algorithm decides which settings there are
        return parse_algo(ray_settings.SETTINGS, "", command[1:])
    chapter = importlib.import_module(Path(command[0]).stem)
    return parse_args(chapter.Args, chapter.PRESETS, "", command[1:])


def settings_then(result: Mapping[str, Any], args_class: type) -> dict[str, Any]:
    """The settings of a result's runs, as a file has them; those that are newer had the defaults of their class."""
    return as_recorded(args_class()) | result["settings"]["default"]


def presets(command: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """Environment id -> what a chapter sets for it."""
    if command[0] == "train_ray.py":
        return ray_settings.SETTINGS[command[command.index("--algo") + 1]][1]
    chapter = importlib.import_module(Path(command[0]).stem)
    changes = getattr(chapter.Args, "changes", {})
    return {name: {**preset, **changes.get(name, {})} for name, preset in chapter.PRESETS.items()}


def run_script(command: Sequence[str], **popen: Any) -> int:
    """Run a Python script of this repository to its end; stopped together with this process, it is waited for."""
    with running_script(command, **popen) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 130


@contextmanager
def running_script(command: Sequence[str], **popen: Any) -> Iterator[subprocess.Popen]:
    """A Python script of this repository while it runs; what is left of it at the end of the block is ended."""
    script, *flags = command
    process = subprocess.Popen([sys.executable, str(ROOT / script), *flags], **popen)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()  # a trainer writes its checkpoint and summary, then ends
            process.wait()


def usable_cores() -> float:
    """Cores this process may use: its affinity, or the container's quota where that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2, or the quota "max"
        return cores


def machine() -> dict[str, Any]:
    """CPU model, cores, memory, GPU; `name` is for tables and file names.

    It has the widest vector instructions too: processors of very different speed call themselves "Intel Xeon".
    """
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
        cpu = re.findall(r"model name\s*: (.*)", cpuinfo)[0]
    except (OSError, IndexError):
        cpuinfo, cpu = "", platform.processor() or platform.machine()
    vectors = [name for flag, name in VECTOR_UNITS.items() if re.search(rf"\b{flag}\b", cpuinfo)][:1]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cores = usable_cores()
    short = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*|\d+-Core", "", cpu)
    return {
        "name": " ".join([*short.split(), *vectors, f"{cores:g} cores", *([f"+ {gpu}"] if gpu else [])]),
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that speed or learning depend on, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def begin(kind: str, args: Any, env_id: str) -> dict[str, Any]:
    """The head of a result: what is measured, where, with what. Warns if the machine is busy with something else."""
    here, load = machine(), os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load average is {load:.1f} on {here['cores']:g} cores; beside other work figures suffer")
    return {
        "kind": kind,
        "chapter": args.chapter,
        "env_id": env_id,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": git_commit(),
        "machine": here,
        "load_at_start": round(load, 2),
        "versions": versions(),
        "command": [Path(sys.argv[0]).name, *without_folders(sys.argv[1:])],
        "bench": {name: value for name, value in asdict(args).items() if not isinstance(value, Path)},
    }


def without_folders(flags: Sequence[str]) -> list[str]:
    """Flags without those that name folders of one machine; what is measured does not depend on them."""
    kept: list[str] = []
    of_a_folder = False
    for word in flags:
        if word.startswith("--"):
            of_a_folder = word.partition("=")[0].replace("_", "-") in FOLDERS
        if not of_a_folder:
            kept.append(word)
    return kept


def read_points(text: str) -> list[tuple[float, int, float | None]]:
    """(seconds, agent steps, mean return) that a script in bench/peers has printed; other lines are left out."""
    points = []
    for line in text.splitlines():
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, list) and len(found) == 3:
                points.append((float(found[0]), int(found[1]), found[2]))
    return points


def dated(result: dict[str, Any]) -> dict[str, Any]:
    """A result with the time of now, for names of run folders that no earlier start has used."""
    return {**result, "date": time.strftime("%Y-%m-%d %H:%M:%S")}


def run_name(result: dict[str, Any], *parts: str) -> str:
    """Name of a run folder: what is measured, on what, when, and which run of it."""
    stamp = re.sub(r"\D", "", result["date"])
    return "-".join([result["kind"], result["chapter"], result["env_id"].replace("/", "_"), stamp, *parts])


def result_path(folder: Path, result: dict[str, Any], *, with_env: bool) -> Path:
    """`<kind>_<chapter>[_<env>]_<machine>_<date>.json`; the date goes to the minute, so nothing is overwritten."""
    date = re.sub(r"\D", "", result["date"])[:12]
    env = [result["env_id"]] if with_env else []
    parts = [result["kind"], result["chapter"], *env, result["machine"]["name"].lower(), f"{date[:8]}-{date[8:]}"]
    return folder / ("_".join(re.sub(r"[^\w.]+", "-", part).strip("-") for part in parts) + ".json")


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result; whole or not at all, and refusing NaN, which is no JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1, allow_nan=False, default=str) + "\n")
    temporary.replace(path)


def pyplot() -> Any:
    """matplotlib's pyplot, for pictures without a screen."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns are also aligned in a terminal; all but the first are right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = [
        [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in [header, rule, *rows]
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
