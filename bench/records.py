"""Result files: where and with what something was measured, run by run; an interrupted benchmark goes on."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from a3c_mp.errors import ConfigError
from bench.common import PLACES, ROOT

RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "gymnasium", "ale-py", "mujoco", "numpy", "opencv-python-headless", "ray")
"""those whose versions a result names, where they are installed"""
MAY_CHANGE = ("seeds", "repeat", "games", "marks")
"""flags by which a benchmark may differ from the earlier start that it continues"""
LATER = {"eval_envs": 8}
"""settings that older files lack, with the values that their runs had"""
CODE = ("a3c_mp", "wrappers", "train_*.py", "bench/peers")
"""files of a checkout on which figures depend"""
VECTOR_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
"""flag of /proc/cpuinfo -> name, the widest first"""

Result = dict[str, Any]
"""content of a result file, or one of its runs"""


def before_run(result: Result, missing: Sequence[tuple[str, int]]) -> Result:
    """Called before each run of `measure`: returns what its record has too. `bench/campaign.py` puts its own here."""
    return {}


def machine() -> Result:
    """CPU model, usable cores, memory, GPU; `name` is for tables and file names.

    It has the widest vector instructions too: processors of very different speed call themselves "Intel Xeon".
    """
    cores, cpuinfo, cpu = float(len(os.sched_getaffinity(0))), "", platform.processor() or platform.machine()
    with suppress(OSError, ValueError):  # no cgroup v2, or the quota "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, int(quota) / int(period))
    with suppress(OSError, IndexError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
        cpu = re.findall(r"model name\s*: (.*)", cpuinfo)[0]
    vectors = [name for flag, name in VECTOR_UNITS.items() if re.search(rf"\b{flag}\b", cpuinfo)][:1]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    short = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*|\d+-Core", "", cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = " ".join([*short.split(), *vectors, f"{cores:g} cores", *([f"+ {gpu}"] if gpu else [])])
    found = {"name": name, "cpu": cpu, "cores": cores, "memory_gib": round(memory, 1), "gpu": gpu}
    return found | {"system": platform.platform()}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that speed or learning depend on, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def commit_of(tree: Path = ROOT) -> str | None:
    """The commit of a checkout, with "+" if the code that is measured differs from it; None without git."""
    with suppress(OSError):  # there is no git
        head = ["git", "-C", str(tree), "rev-parse", "--verify", "--quiet", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
        return commit + "+" * code_differs(commit, tree) if commit else None
    return None


def code_differs(commit: str | None, tree: Path = ROOT) -> bool:
    """Whether the code that is measured differs from a commit's, or may: results and pages are no code."""
    if commit is None or commit.endswith("+"):
        return True
    diff = ["git", "-C", str(tree), "diff", "--quiet", commit, "--", *CODE]
    with suppress(OSError):  # there is no git
        return subprocess.run(diff, capture_output=True).returncode != 0
    return True


# ---- result files


def begin(kind: str, args: Any, env_id: str, settings: dict[str, Any], **more: Any) -> tuple[Path, Result]:
    """The result file of a benchmark and its content: where it runs, with what, and the runs that it has already.

    Args:
        kind: of benchmark.
        args: its flags.
        settings: row -> settings of what is measured.

    Raises:
        ConfigError: the file that `--out` names has other settings, or is of another machine.
    """
    here, load = machine(), os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load average is {load:.1f} on {here['cores']:g} cores; beside other work figures suffer")
    flags = {name: value for name, value in asdict(args).items() if name not in PLACES}
    result = {
        "kind": kind, "chapter": getattr(args, "chapter", kind), "env_id": env_id,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"), "commit": commit_of() or "none", "machine": here,
        "load_at_start": round(load, 2), "versions": versions(), "bench": flags, "settings": settings,
        **more, "runs": [],
    }  # fmt: skip
    path = args.out or default_path(result)
    return path, continued(path, result) if path.exists() else result


def default_path(result: Result) -> Path:
    """`<kind>_<chapter>_<env>_<machine>_<date>.json`, the date to the second."""
    stamp = re.sub(r"\D", "", result["date"])
    parts = [result["kind"], result["chapter"], result["env_id"], result["machine"]["name"].lower()]
    parts = [re.sub(r"[^\w.]+", "-", part).strip("-") for part in parts if part]
    return RESULTS / f"{'_'.join(dict.fromkeys(parts))}_{stamp[:8]}-{stamp[8:]}.json"


def continued(path: Path, new: Result) -> Result:
    """The content of an interrupted benchmark's file. Raises ConfigError if what is to be run differs from it."""
    try:
        old = json.loads(path.read_text())
        then, now = (identity(each) for each in (old, json.loads(json.dumps(new, default=str))))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError("out", path, f"it is not a result file ({error})", "name another file") from error
    if others := [name for name in then if then[name] != now[name]]:
        raise ConfigError("out", path, f"its runs have other {others[0]}", "name another file")
    if old["commit"] != new["commit"]:
        print(f"warning: {path.name} has runs of commit {old['commit']}; each run names its own")
    return old | {"bench": new["bench"]}


def identity(result: Result) -> Result:
    """What all starts of a benchmark that share a file have in common."""
    flags = {name: value for name, value in result["bench"].items() if name not in MAY_CHANGE}
    given = {  # a setting that came later is missing in older files; None does without it, and so do those of LATER
        row: {name: value for name, value in settings.items() if value is not None and LATER.get(name) != value}
        for row, settings in result["settings"].items()
    }
    return {
        "kind": result["kind"],
        "settings": given,
        "machine": result["machine"]["name"],
        "versions": [result.get("versions"), result.get("peer_versions")],  # the oldest files have none
        "flags": flags,
        "commits": trees if len(trees := result.get("commits") or []) > 1 else [],  # rows are named by them
    }


def measure(
    path: Path, result: Result, plan: Iterable[tuple[str, int]], run: Callable[[str, int], Result],
    table: Callable[[Result], str],
) -> Result:  # fmt: skip
    """Run what a result lacks of a plan, and save it after every run: the next one may take hours.

    Args:
        plan: (row, seed or repetition) of each run, in turns.
        run: (row, seed) -> figures of the run.
        table: what to print of a result, after every run.
    """
    done = {(each["row"], each["seed"]) for each in result["runs"]}
    missing = [each for each in plan if each not in done]
    for number, (row, seed) in enumerate(missing):
        own = before_run(result, missing[number:])  # which may wait for hours
        about = {"row": row, "seed": seed, "commit": commit_of() or "none", "load": round(os.getloadavg()[0], 2)} | own
        result["runs"].append(about | run(row, seed))
        save(path, result)
        print(table(result), flush=True)
    if not missing:
        print(table(result))
    print(path)
    return result


def in_turns(rows: Iterable[str], count: int) -> list[tuple[str, int]]:
    """Every row with 1, with 2, ...; every second round goes backwards, as the speed of a machine drifts."""
    rows = list(dict.fromkeys(rows))
    return [(row, number) for number in range(1, count + 1) for row in rows[:: 1 if number % 2 else -1]]


def save(path: Path, result: Result) -> None:
    """Write a result; whole or not at all, and refusing NaN, which is no JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1, allow_nan=False, default=str) + "\n")
    temporary.replace(path)


# ---- tables and pictures


def median(values: Iterable[float | None], missing: float = math.inf) -> float | None:
    """Median with None counted as `missing`; None if the median itself is missing."""
    found = statistics.median(missing if value is None else value for value in values)
    return found if math.isfinite(found) else None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table whose columns are also aligned in a terminal; all but the first are right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    lines = []
    for first, *others in [header, rule, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(f"| {' | '.join([first.ljust(widths[0]), *cells])} |")
    return "\n".join(lines)


def pyplot() -> Any:
    """matplotlib's pyplot, for pictures without a screen."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt
