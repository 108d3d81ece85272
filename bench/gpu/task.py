"""What a part of gpu_check.py is asked for and finds, and the trainers that it runs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from a3c_mp.errors import one_line
from a3c_mp.processes.spawn import PARENT_VARIABLE
from bench import common

PONG = "PongNoFrameskip-v4"
UNTIL_STOPPED = ("--stop-return=None", "--total-steps=1e12")
START_SECONDS = 90.0
"""longest time from the start of a trainer to its first rollout"""
END_SECONDS = 20.0
"""longest time that a program may take to end once it is asked to"""
HERE = Path(__file__).resolve().parent

Figures = dict[str, Any]


@dataclass
class Part:
    """What a part is asked for, and what it has found."""

    name: str
    folder: Path
    seconds: float
    """length of a measured run (s)"""
    limit: float
    """the process is killed after so long (s)"""
    actors: int
    cores: int
    flags: list[str]
    """of all trainers"""
    runs_dir: Path
    earlier: dict[str, Figures]
    """figures of other parts"""
    figures: Figures = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return max(1.0, self.limit - (time.monotonic() - self.started))

    def record(self, **figures: Any) -> None:
        self.figures |= figures
        path = self.folder / f"{self.name}.json"
        path.with_suffix(".tmp").write_text(json.dumps(self.figures, default=str))
        path.with_suffix(".tmp").replace(path)

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """A step whose error is recorded, and the next one goes on."""
        try:
            yield
        except Exception as error:
            self.record(**{name: {**self.figures.get(name, {}), "error": one_line(error)[:2000]}})

    def flags_of(self, chapter: str, *flags: str) -> list[str]:
        found = [*common.CHAPTERS[chapter], f"--env-id={PONG}", "--cuda", f"--num-actors={self.actors}"]
        return [*found, *self.flags, *flags]


def start(*command: Any, env: Mapping[str, str] = {}, **popen: Any) -> subprocess.Popen:
    """A Python program, which ends with this process if it imports a3c_mp."""
    env = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **env}
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=common.ROOT, env=env, **popen)


def end(process: subprocess.Popen) -> None:
    """Have a program end, however it takes."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    process.kill()
    process.wait()


@dataclass
class Trainer:
    """A trainer that runs, or has ended."""

    process: subprocess.Popen
    folder: Path
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Wait for its end; returns its exit code. Raises RuntimeError with the end of its output."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end after {seconds:.0f} s: {self.output[-700:]}") from None
        if code:
            raise RuntimeError(f"exit code {code}: {self.output[-700:]}")
        return code

    def wait_until_it_learns(self, seconds: float) -> None:
        """Wait for the first point of its curves. Raises RuntimeError with the end of its output if there is none."""
        deadline = time.monotonic() + seconds
        while not (self.folder.exists() and common.scalars(self.folder, "time/elapsed_seconds")):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"it does not learn: {self.output[-700:]}")
            time.sleep(0.5)

    @property
    def figures(self) -> Figures:
        """Rates of the run, from its summary and its curves."""
        summary = common.read_summary(self.folder)
        updates_per_step = summary["updates"] / max(summary["steps"], 1)
        found = {"sps": summary["sps"], "updates_per_second": round(summary["sps"] * updates_per_step, 1)}
        names = ("steps", "updates", "policy_lag_mean", "mean_return_100", "worker_restarts", "exit_reason")
        found |= {name: summary.get(name) for name in names}
        for name in ("waiting", "learning", "publishing"):
            values = [point.value for point in common.scalars(self.folder, f"time/{name}")[1:]]
            found[f"share_{name}"] = round(statistics.fmean(values), 3) if values else None
        return found


@contextmanager
def training(part: Part, chapter: str, *flags: str, name: str = "", env: Mapping[str, str] = {}) -> Iterator[Trainer]:
    """A trainer while it runs; what is left of it at the end of the block is ended."""
    folder = common.run_folder(part, f"gpu-check-{part.name}-{name or chapter}")
    log = part.folder / f"{folder.name}.txt"
    place = [f"--runs-dir={folder.parent.absolute()}", f"--run-name={folder.name}"]
    with log.open("w") as file:
        command = [*part.flags_of(chapter, *flags), *place]
        process = start(*command, env=env, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield Trainer(process, folder.absolute(), log)
    finally:
        end(process)


def run(part: Part, chapter: str, *flags: str, seconds: float, **more: Any) -> Trainer:
    """A run of so many seconds, to its end. Raises RuntimeError for another end."""
    with training(part, chapter, *flags, f"--max-seconds={seconds:g}", **more) as trainer:
        trainer.wait(min(part.left, seconds + START_SECONDS))
        return trainer
