"""Running the scripts as a user does, in processes of their own, and reading what they leave."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

from a3c_mp.run.episode_log import read_episodes

ROOT = Path(__file__).parent.parent
SMALL = ["--num-actors", "2", "--num-envs", "4", "--unroll-length", "8", "--batch-size", "32"]
"""settings of a run that is over soon"""
SMALL_REPLAY = ["--num-actors", "2", "--num-envs", "4", "--replay-size", "8000", "--learning-starts", "400"]
CHAPTERS = {
    "a3c_data": ("train_a3c_data.py", SMALL),
    "a3c_grad": ("train_a3c_grad.py", SMALL),
    "apex_dqn": ("train_apex.py", [*SMALL_REPLAY, "--replay-ratio", "4", "--batch-size", "32"]),
    "impala": ("train_impala.py", [*SMALL[:-2], "--batch-unrolls", "4", "--replay-size", "100"]),
}
"""algorithm -> script, flags for CartPole that make a run quick"""
CARTPOLE = ["--env-id", "CartPole-v1", "--stop-return", "501"]
"""never solved, the game has 500 steps"""


@dataclass
class Finished:
    """A script that has ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())


class Scripts:
    """Starts scripts of the project with run folders below `runs_dir`."""

    def __init__(self, runs_dir: Path):
        self.runs_dir = runs_dir
        self.started: list[subprocess.Popen] = []

    def start(self, script: str, *flags: str, prefix: Sequence[str] = (), **popen) -> subprocess.Popen:
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": _heed_signals, **popen}
        process = subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / script), *flags],
            cwd=self.runs_dir,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "process")])},
            **settings,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen, name: str, timeout: float = 120) -> Finished:
        out, err = process.communicate(timeout=timeout)
        return Finished(process.returncode, out, err, self.runs_dir / "runs" / name)

    def train(self, name: str, *flags: str, script: str = "train_a3c_data.py", **popen) -> subprocess.Popen:
        return self.start(script, "--run-name", name, *flags, **popen)

    def run(self, name: str, *flags: str, script: str = "train_a3c_data.py") -> Finished:
        return self.finish(self.train(name, *flags, script=script), name)

    def wait_for(self, name: str, what: str, process: subprocess.Popen, timeout: float = 150) -> str:
        """Wait until `what` stands in a file of the run, given as file:text; returns what else does."""
        file, text = what.split(":", 1)
        path = self.runs_dir / "runs" / name / file
        self.wait_until(lambda: path.exists() and text in path.read_text(), process, timeout)
        return path.read_text()

    def wait_until(
        self, happened: Callable[[], object], process: subprocess.Popen, timeout: float = 150, pause: float = 0.05
    ) -> None:
        """Wait for something that a running script brings about."""
        deadline = time.monotonic() + timeout
        while not happened():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"it did not happen within {timeout} s"
            time.sleep(pause)


def _heed_signals() -> None:
    """Begin as a program in a terminal does, also where the tests themselves run in the background (nohup, some CI)."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def scalars(folder: Path) -> dict[str, list[ScalarEvent]]:
    """The curves that TensorBoard shows of a run."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def episode_steps(folder: Path) -> list[int]:
    """Steps at which the episodes of a run ended, in the order of its file."""
    return [episode.steps for episode in read_episodes(folder / "episodes.csv")]


def actors_of(pid: int) -> list[psutil.Process]:
    """The spawned actors of a trainer, without the resource tracker."""
    return [child for child in psutil.Process(pid).children() if "spawn_main" in _command_line(child)]


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # it has ended, perhaps just now
        return " ".join(process.cmdline())
    return ""


def family_of(pid: int) -> list[psutil.Process]:
    """The spawned processes of a trainer, and those that they have spawned."""
    children = actors_of(pid)
    return children + [grandchild for child in children for grandchild in actors_of(child.pid)]


def still_alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; one that only waits for its exit code to be collected has."""
    return [process for process in processes if _status(process) not in (None, psutil.STATUS_ZOMBIE)]


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


@contextmanager
def files_no_longer_than(size):
    """Writes beyond `size` bytes fail with an OSError in this process, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
