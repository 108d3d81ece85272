"""Kills at random moments: does a run lose, hang on or leave anything where one of its processes gets SIGKILL?

Each kill has a short run of its own, which has to end as it should within a time limit: a deterministic one with the
weights of an undisturbed one, others after all of their steps. Nothing may be left of it then: no process, no shared
memory, no temporary folder. Ends with code 1 if one did not.

    python bench/kills.py                                    # 20 kills of each kind
    python bench/kills.py --rows trainer shard --kills 50
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import psutil

from a3c_mp.cli import parse_own
from a3c_mp.config import Between
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with
from bench.attack import free_port
from bench.common import ROOT, read_summary
from bench.outside import POLL_SECONDS, command_of, processes_of
from bench.records import Result, begin, in_turns, markdown_table, measure

LEFT_SECONDS = 20.0
"""longest time from the end of a run to that of its last process, file and folder"""
EVERY = "--env-id=CartPole-v1 --stop-return=501 --num-envs=4 --checkpoint-steps=1000 --run-name=r"
IMPALA = f"train_ray.py {EVERY} --deterministic --num-actors=2 --unroll-length=8 --batch-unrolls=2 --total-steps=12000"
TWO = f"{IMPALA} --num-learners=2 --replay-proportion=0"
DQN = f"train_ray.py {EVERY} --algo=dqn --replay-size=8000 --learning-starts=400 --replay-ratio=1 --total-steps=20000"
POPULATION = (
    f"train_population.py {EVERY} --population=2 --units-range 16 64 --mutate-none=0 --generation-steps=1000 "
    "--learning-starts=100 --eval-episodes=4 --total-steps=10000"
)
RANKS = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]

Processes = list[psutil.Process]


class Kind(NamedTuple):
    """What is killed, and in which runs."""

    commands: tuple[str, ...]  # in turns
    victims: Callable[[Processes], Processes]  # among the processes of a run, or of a node
    launcher: tuple[str, ...] = ()
    is_deterministic: bool = True
    resumes: bool = False  # whether a kill ends the run, and it goes on with --resume
    kills_node: bool = False  # whether the run is on two nodes, the second of which is killed


def named(word: str) -> Callable[[Processes], Processes]:
    """Processes besides the first that have a word in their command line."""
    return lambda processes: [each for each in processes[1:] if word in command_of(each)]


def trainers(processes: Processes) -> Processes:
    """Trainer 0, which is the driver's child, and trainer 1."""
    first = [each for each in named("train_ray.py")(processes) if each.ppid() == processes[0].pid]
    return first + named("ray::RayLearner")(processes)


def but_guardian(processes: Processes) -> Processes:
    """All of a node but the process that removes the rest: where that is killed too, a folder stays."""
    return [each for each in processes if "guardian.py" not in command_of(each)]


KINDS = {
    "member": Kind((POPULATION,), named("spawn_main")),
    "rank": Kind((POPULATION,), named("train_population.py"), tuple(RANKS), resumes=True),
    "trainer": Kind((TWO,), trainers),
    "shard": Kind((DQN,), named("ray::ReplayShard"), is_deterministic=False),
    "node": Kind((f"{IMPALA} --placement=spread", TWO), but_guardian, kills_node=True),
}


@dataclass(frozen=True)
class Args:
    """Flags of this benchmark."""

    rows: tuple[str, ...] = ("member", "rank", "trainer", "shard", "node")
    """what is killed: a member of a population, one of its ranks, one of two trainers on Ray, a replay shard, a node"""
    kills: Annotated[int, Between(1)] = 20
    """of each kind, each in a run of its own"""
    limit: Annotated[float, Between(10)] = 600.0
    """longest time that a run may take (s)"""
    seed: int = 1
    """of the moments"""
    out: Path | None = None
    """result file; an existing one is continued with the kills that it lacks; default: a new one in bench/results"""


class Place:
    """A folder for runs and temporary files, which all processes have in their environment; gone after the block."""

    def __enter__(self) -> Place:
        self.folder = Path(tempfile.mkdtemp(prefix="k-", dir="/tmp"))  # short: Unix sockets lie in it
        self.shared = set(Path("/dev/shm").iterdir())
        self.started = list[subprocess.Popen]()
        names = "TMPDIR", "A3C_MP_HOME", "HF_HOME"
        self.env = {**os.environ, **dict.fromkeys(names, str(self.folder)), "PYTHONPATH": str(ROOT)}
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for each in self.started:
            each.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *words: str) -> subprocess.Popen:
        with (self.folder / "output.txt").open("a") as log:
            given = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen([sys.executable, *words], cwd=self.folder, env=self.env, **given)  # type: ignore[call-overload]
        self.started.append(process)
        return process

    def wait_for(self, text: str) -> None:
        """Wait until a process has printed something."""
        while text not in self.output:
            if self.has_ended(POLL_SECONDS):
                raise SystemExit(self.output)

    def has_ended(self, seconds: float) -> bool:
        """Wait until the newest process has ended, for so long at most. Returns whether it has."""
        with suppress(subprocess.TimeoutExpired):
            self.started[-1].wait(seconds)
        return self.started[-1].returncode is not None

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def processes(self) -> Processes:
        """Those with the folder in their environment, or with a file in it open: Ray's write over the former."""
        word, found = os.fsencode(self.folder), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, psutil.Error):
                is_ours = word in (path / "environ").read_bytes()
                if is_ours or any(os.readlink(fd).startswith(f"{self.folder}/") for fd in (path / "fd").iterdir()):
                    found.append(psutil.Process(int(path.name)))
        return [each for each in found if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    def left(self) -> list[str]:
        """What is left after a while: processes, shared memory that no process of this machine uses, folders."""
        deadline = time.monotonic() + LEFT_SECONDS
        while True:
            found = [command_of(process)[:80] or "a process" for process in self.processes()]
            new = [path for path in Path("/dev/shm").iterdir() if path not in self.shared]
            found += map(str, [*self.folder.glob("a3c-*"), *(path for path in new if not is_used(path))])
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(10 * POLL_SECONDS)


def is_used(path: Path) -> bool:
    """Whether a process has a file open, or in its memory."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_open = any(os.readlink(fd) == str(path) for fd in (process / "fd").iterdir())
            if is_open or str(path) in (process / "maps").read_text():
                return True
    return False


@contextmanager
def running(kind: Kind, command: str) -> Iterator[tuple[Place, list[str], Callable[[], Processes]]]:
    """Start a run, the newest process of its place; its command, and what can be killed of it."""
    script, *flags = command.split()
    with Place() as place:
        words, roots = [*kind.launcher, str(ROOT / script), *flags], place.started
        if kind.kills_node:
            port = free_port()
            place.start("-m", "a3c_mp.cluster", "head", f"--port={port}", "--num-cpus=2")
            place.wait_for("cluster at")
            roots = [place.start("-m", "a3c_mp.cluster", "join", f"127.0.0.1:{port}", "--num-cpus=1")]
            place.wait_for("joined the cluster at")
            words.append(f"--address=127.0.0.1:{port}")
        place.start(*words)
        while not (victims := lambda: kind.victims(processes_of(roots[0].pid)))() and not place.has_ended(POLL_SECONDS):
            pass
        yield place, words, victims


@cache
def undisturbed(kind: Kind, command: str, limit: float) -> tuple[float, str]:
    """How long a run lasts from the start of what can be killed to its end (s), and its weights."""
    with running(kind, command) as (place, *_):
        began = time.monotonic()
        if not place.has_ended(limit) or place.started[-1].returncode:
            raise SystemExit(place.output)
        return time.monotonic() - began, read_summary(place.folder / "runs/r")["weights_sha256"]


def kill_once(kind: Kind, command: str, rng: random.Random, limit: float) -> Result:
    """A run and a kill; `killed` is empty if the run ended before. `problems` is if all went as it should."""
    seconds, weights = undisturbed(kind, command, limit)
    with running(kind, command) as (place, words, victims):
        place.has_ended(moment := rng.uniform(0, seconds))
        found = [] if place.has_ended(0) else victims()
        chosen = rng.sample(found, len(found) if kind.kills_node else min(len(found), 1))
        killed, began = [command_of(each)[-60:] for each in chosen], time.monotonic()
        for each in chosen:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        has_ended, ended_after = place.has_ended(limit), time.monotonic() - began
        if kind.resumes and has_ended and place.started[-1].returncode:
            place.start(*words, "--resume-or-start")
            has_ended = place.has_ended(limit)
        code, problems = place.started[-1].returncode, [] if has_ended else ["it hangs"]
        for process in place.started:  # nodes
            process.terminate()
        with suppress(OSError):
            summary = read_summary(place.folder / "runs/r")
            problems += [summary["exit_reason"]] if summary["exit_reason"] != "total_steps" else []
            problems += ["other weights"] if kind.is_deterministic and summary["weights_sha256"] != weights else []
        problems += [f"exit code {code}"] if code != 0 else []
        problems += [f"left behind: {each}" for each in place.left()]
        return {
            "killed": killed, "moment": round(moment, 2), "ended_after": round(ended_after, 2),
            "problems": problems, "output": place.output[-4000:] if problems else "",
        }  # fmt: skip


def table(result: Result) -> str:
    """Of each kind: kills, how many runs ended as they should, and how long they took from the kill on (s)."""
    rows = []
    for kind in dict.fromkeys(run["row"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["row"] == kind]
        times = sorted(run["ended_after"] for run in runs)
        right = sum(not run["problems"] for run in runs)
        rows.append([kind, str(len(runs)), str(right), f"{times[len(times) // 2]:.0f}", f"{times[-1]:.0f}"])
    return markdown_table(["killed", "kills", "as it should", "ended after (s), median", "at most"], rows)


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    if flags or not set(args.rows) <= KINDS.keys():
        raise ConfigError("rows", " ".join([*args.rows, *flags]), f"must be of {', '.join(KINDS)}")
    settings = {row: {"commands": KINDS[row].commands} for row in args.rows}
    path, result = begin("kills", args, "CartPole-v1", settings)

    def run(row: str, seed: int) -> Result:
        rng, kind = random.Random(f"{args.seed} {row} {seed}"), KINDS[row]
        while True:
            found = kill_once(kind, kind.commands[seed % len(kind.commands)], rng, args.limit)
            if found["killed"]:
                return found

    result = measure(path, result, in_turns(args.rows, args.kills), run, table)
    return 1 if any(run["problems"] for run in result["runs"]) else 0


if __name__ == "__main__":
    exit_with(main)
