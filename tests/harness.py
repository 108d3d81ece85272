"""One harness for all tests: the table of chapters, and scripts in processes of their own (in this one: see inline.py).

To add a chapter, add a row to `CHAPTERS`; the tests that hold for every chapter then run it too. `ALL_CHAPTERS` has the
population as well, which has members instead of actors and a learner, and shares only some promises:
1. `algorithm` as in its config.json, `script`, and `quick`: flags with which a run on `env_id` is over in a second;
2. `learners=True` where it has `--num-learners`, `metrics` for TensorBoard names that other chapters do not have,
   `actor` and `inline` where it has neither actors of that name nor `Workers`;
3. limits of its own in `TOO_LARGE` (unit/test_chapters.py), bad input in `SPECIAL` (unit/test_bad_input.py);
4. a run whose bits survive kills in `KINDS` (process/test_exact.py);
5. a run on the virtual GPU in `OTHERS` (virtual_gpu/test_gpu_chapters.py) if it has `--cuda`;
6. its first tests: `python -m pytest -k NAME` with the new algorithm's name.
"""

import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

from a3c_mp.run import checkpoint
from a3c_mp.run.episode_log import read_episodes

ROOT = Path(__file__).parent.parent
BUSY_SECONDS = 30
"""longest time for what takes a second where cores are free: tests also run where they are not"""


@dataclass(frozen=True)
class Chapter:
    """A row of the table of chapters."""

    algorithm: str
    script: str
    quick: tuple[str, ...]
    """flags of a run on `env_id` that is over soon"""
    env_id: str = "CartPole-v1"
    learners: bool = False
    """whether several learners can share the work"""
    metrics: frozenset[str] = frozenset()
    """names in TensorBoard that other chapters do not have"""
    actor: str = "actor"
    """what its actors are called in messages, before their number"""
    actors_flag: str = "num-actors"
    """the flag that says how many there are"""
    inline: tuple[str, ...] = ()
    """flags by which all of it runs in one process, where `InlineWorkers` has nothing to replace"""

    def __str__(self) -> str:
        return self.algorithm

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(Path(self.script).stem)

    @property
    def settings(self) -> tuple[type, Mapping[str, Mapping[str, object]]]:
        """The dataclass of its settings, and its presets."""
        main = self.module.main
        if hasattr(main, "presets") or not hasattr(self.module, "ALGORITHMS"):
            return self.module.Args, main.presets if hasattr(main, "presets") else self.module.PRESETS
        found = self.module.ALGORITHMS[self.algorithm.partition("_")[2]]
        return found.args_class, found.presets

    @property
    def args_class(self) -> type:
        return self.settings[0]

    @property
    def flags(self) -> list[str]:
        """Flags of a quick run that is never solved: a game of CartPole has 500 steps."""
        return ["--env-id", self.env_id, "--stop-return", "501", *self.quick]

    @property
    def two_learners(self) -> list[str]:
        return ["--num-learners", "2"] if self.learners else []


SMALL = ("--num-actors", "2", "--num-envs", "4", "--unroll-length", "8", "--batch-size", "32")
EVALUATED = ("--eval-every", "500", "--eval-episodes", "10")
UNROLLS = (*SMALL[:-2], "--batch-unrolls", "4")
REPLAY = ("--num-actors", "2", "--num-envs", "4", "--replay-size", "8000", "--learning-starts", "400")
DROPPED = frozenset({"counts/gradients_too_old", "counts/gradients_not_finite"})
A3C_DATA = Chapter("a3c_data", "train_a3c_data.py", SMALL)
A3C_GRAD = Chapter("a3c_grad", "train_a3c_grad.py", SMALL, metrics=DROPPED)
APEX_DQN = Chapter("apex_dqn", "train_apex.py", (*REPLAY, "--replay-ratio", "4", "--batch-size", "32"), learners=True)
APEX_DDPG = Chapter("apex_ddpg", "train_apex.py", (*REPLAY, "--replay-ratio", "1"), env_id="Pendulum-v1")
APEX_TD3 = Chapter("apex_td3", "train_apex.py", ("--algo", "td3", *REPLAY, "--replay-ratio", "1"), env_id="Pendulum-v1")
IMPALA = Chapter("impala", "train_impala.py", UNROLLS, learners=True)
TASK = Chapter(
    "task",
    "train_task.py",
    (*SMALL, "--eval-every", "0"),
    metrics=frozenset({"time/task/learner", "time/task/learner/take", "time/task/learner/learn"}),
    actor="collector",
    inline=("--standalone",),
)
CLUSTER = frozenset({"cluster/actors", "cluster/nodes", "cluster/object_store"})
RAY_IMPALA = Chapter("ray_impala", "train_ray.py", UNROLLS, metrics=CLUSTER)
RAY_DQN = Chapter("ray_dqn", "train_ray.py", ("--algo", "dqn", *APEX_DQN.quick), metrics=CLUSTER)
FEW_MEMBERS = ("--population", "2", "--num-envs", "4", "--units-range", "16", "64")
GENERATIONS = ("--generation-steps", "200", "--learning-starts", "100", "--eval-episodes", "4")
POPULATION = Chapter(
    "population_dqn", "train_population.py", (*FEW_MEMBERS, *GENERATIONS), actor="member", actors_flag="population"
)
POPULATION_PPO = Chapter(
    "population_ppo",
    "train_population.py",
    ("--algo", "ppo", *FEW_MEMBERS, *GENERATIONS[:2], *GENERATIONS[4:], "--unroll-length", "25"),
    actor="member",
    actors_flag="population",
)
CHAPTERS = (A3C_DATA, A3C_GRAD, APEX_DQN, IMPALA, TASK, RAY_IMPALA, RAY_DQN)
ALL_CHAPTERS = (*CHAPTERS, POPULATION)
CONTINUOUS = (APEX_DDPG, APEX_TD3)
SPAWNING = tuple(chapter for chapter in CHAPTERS if chapter not in (RAY_IMPALA, RAY_DQN))
"""chapters that spawn their actors themselves"""


def with_changes(script, page):
    """The text of a script with the changes of the first diff on a page of the documentation."""
    script, page = (ROOT / script).read_text(), (ROOT / "docs" / page).read_text()
    for hunk in re.search(r"```diff\n@@\n(.*?)\n```", page, re.DOTALL)[1].split("\n@@\n"):
        lines = [(line[:1], line[1:]) for line in hunk.split("\n")]
        old, new = ("\n".join(text for sign, text in lines if sign in ("", " ", own)) for own in "-+")
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def row_id(value: object) -> str | None:
    """The id of a parameter that is a row of the table; pytest names others itself."""
    return str(value) if isinstance(value, Chapter) else None


EVERY_CHAPTER = pytest.mark.parametrize("chapter", CHAPTERS, ids=row_id)
EVERY_ONE_OF_ALL = pytest.mark.parametrize("chapter", ALL_CHAPTERS, ids=row_id)


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

    @property
    def config(self) -> dict:
        return json.loads((self.folder / "config.json").read_text())

    @property
    def log(self) -> str:
        return (self.folder / "run.log").read_text()

    @property
    def evals(self) -> dict:
        """What the summary says of evaluations: "eval_count" is under "count"."""
        return {name[5:]: value for name, value in self.summary.items() if name.startswith("eval_")}

    @property
    def best(self) -> Path:
        return checkpoint.list_checkpoints(self.folder / "checkpoints", "best")[0]

    @property
    def not_finite(self) -> int:
        """Rollouts, gradients and batches that were skipped as not finite."""
        return sum(count for name, count in self.summary.items() if name.endswith("_not_finite"))

    @property
    def checkpoints(self) -> list[Path]:
        """Newest first."""
        return checkpoint.list_checkpoints(self.folder / "checkpoints")

    def load(self, path: Path) -> dict:
        config = self.config
        return checkpoint.load(path, algorithm=config["algorithm"], env_id=config["args"]["env_id"])

    @property
    def state(self) -> dict:
        """What a resume would take; raises where it cannot be read."""
        return self.load(self.checkpoints[0])


def rounds(workers, should_stop, size=1):
    """Yield rounds of filled slots, as the loop of a learner takes them."""
    while filled := workers.take(should_stop, size):
        yield filled


def left_in_shm(before: set[Path], seconds: float = BUSY_SECONDS) -> set[Path]:
    """Files that are new in /dev/shm and stay there: those of other tests, run at the same time, go when they end."""
    deadline, left = time.monotonic() + seconds, set(Path("/dev/shm").iterdir()) - before
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= set(Path("/dev/shm").iterdir())
    return left


class Scripts:
    """Starts scripts of the project with run folders below `runs_dir`; a `with` block at whose end none is left."""

    def __init__(self, runs_dir: Path):
        self.runs_dir = runs_dir
        self.started: list[subprocess.Popen] = []
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))  # short: it has Unix sockets

    def __enter__(self) -> "Scripts":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def files(self) -> set[Path]:
        """Folders of Unix sockets, and all shared memory."""
        return {*self.temporary.glob("a3c-*"), *Path("/dev/shm").iterdir()}

    def left(self, before: set[Path], seconds: float = 60) -> set[Path]:
        """New files that stay there; other tests, run at the same time, remove their shared memory when they end."""
        deadline, left = time.monotonic() + seconds, self.files() - before
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left &= self.files()
        return left

    def start(self, script: str, *flags: str, prefix: Sequence[str] = (), **popen) -> subprocess.Popen:
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": default_signals, **popen}
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        program = [str(ROOT / script)] if script.endswith(".py") else ["-m", script]
        process = subprocess.Popen(
            [*prefix, sys.executable, *program, *flags],
            cwd=self.runs_dir,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(self.temporary)},
            **settings,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen, name: str, timeout: float = 120) -> Finished:
        out, err = process.communicate(timeout=timeout)
        return Finished(process.returncode, out, err, self.runs_dir / "runs" / name)

    def train(self, chapter: Chapter, *flags: str, name: str = "r", **popen) -> subprocess.Popen:
        """Start a quick run of a chapter."""
        return self.start(chapter.script, "--run-name", name, *chapter.flags, *flags, **popen)

    def run(self, chapter: Chapter, *flags: str, name: str = "r", **popen) -> Finished:
        """A quick run of a chapter, from beginning to end."""
        return self.finish(self.train(chapter, *flags, name=name, **popen), name)

    def resume(self, chapter: Chapter, *flags: str, name: str = "r") -> Finished:
        return self.finish(self.start(chapter.script, "--resume", f"runs/{name}", *flags), name)

    def wait_for(self, name: str, what: str, process: subprocess.Popen, timeout: float = 150) -> str:
        """Wait until `what` stands in a file of the run, given as file:text; returns what else does."""
        file, text = what.split(":", 1)
        path = self.runs_dir / "runs" / name / file
        self.wait_until(lambda: path.exists() and text in path.read_text(), process, timeout)
        return path.read_text()

    def wait_for_game(self, process: subprocess.Popen) -> None:
        """Wait until the last actor of the run `r`, that of the last learner, has finished a game."""
        folder = self.runs_dir / "runs/r"
        self.wait_until((folder / "config.json").exists, process)
        args = json.loads((folder / "config.json").read_text())["args"]
        last = args.get("num_actors", args.get("population")) - 1
        self.wait_until(lambda: any(e.actor == last for e in read_episodes(folder / "episodes.csv")), process)

    def wait_until(
        self, happened: Callable[[], object], process: subprocess.Popen, timeout: float = 150, pause: float = 0.05
    ) -> None:
        """Wait for something that a running script brings about."""
        deadline = time.monotonic() + timeout
        while not happened():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"it did not happen within {timeout} s"
            time.sleep(pause)


def default_signals() -> None:
    """Start as a program in a terminal does, also where the tests themselves run in the background (nohup, some CI)."""
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


def open_files() -> list[str]:
    """What the open files of this process are, sorted."""
    return sorted(os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path))
