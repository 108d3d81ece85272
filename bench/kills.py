"""Kills at random moments: does a run lose, hang on or leave anything where one of its processes gets SIGKILL?

A short run, some of whose processes are killed, has to end as it should within a time limit: a deterministic one with
the weights of an undisturbed one, others after all of their steps. Nothing may be left of it then: no process, no
shared memory, no temporary folder. Ends with code 1 if one did not.

    python bench/kills.py                                    # 20 kills of each kind
    python bench/kills.py --rows trainer shard --kills 50 --per-run 1
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
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
from bench.records import Result, begin, markdown_table, measure

SHARE = 0.5
"""longest time to a kill, as a share of an undisturbed run's"""
LEFT_SECONDS = 20.0
"""longest time from the end of a run to that of its last process, file and folder"""
EVERY = "--env-id=CartPole-v1 --stop-return=501 --num-envs=4 --checkpoint-steps=1000 --run-name=r --max-restarts=100"
IMPALA = f"train_ray.py {EVERY} --deterministic --num-actors=2 --unroll-length=8 --batch-unrolls=2 --total-steps=12000"
TWO = f"{IMPALA} --num-learners=2 --replay-proportion=0"
REPLAY = "--replay-size=8000 --learning-starts=400 --replay-ratio=1 --total-steps=20000"
DQN = f"train_ray.py {EVERY} --algo=dqn --num-actors=2 {REPLAY}"
POPULATION = (
    f"train_population.py {EVERY} --population=2 --units-range 16 64 --mutate-none=0 --generation-steps=1000 "
    "--learning-starts=100 --eval-episodes=4 --total-steps=10000"
)
RANKS = "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"
Processes = list[psutil.Process]


class Kind(NamedTuple):
    """What is killed, and in which runs."""

    commands: tuple[str, ...]  # in turns
    victims: tuple[Callable[[Processes], Processes], ...]  # among the processes of a run, or of a node; one by chance
    launcher: tuple[str, ...] = ()
    is_deterministic: bool = True
    resumes: bool = False  # whether a kill ends the run, and it goes on with --resume
    kills_node: bool = False  # whether the run is on two nodes, the second of which is killed


def named(word: str) -> Callable[[Processes], Processes]:
    """Processes besides the first that have a word in their command line."""
    return lambda processes: [each for each in processes[1:] if word in command_of(each)]


def child(processes: Processes) -> Processes:
    """Trainer 0: the driver's child."""
    return [each for each in named("train_ray.py")(processes) if each.ppid() == processes[0].pid]


def node(processes: Processes) -> Processes:
    """All of a node but the process that removes the rest: where that is killed too, a folder stays."""
    return [each for each in processes if "guardian.py" not in command_of(each)]


KINDS = {
    "member": Kind((POPULATION,), (named("spawn_main"),)),
    "rank": Kind((POPULATION,), (named("train_population.py"),), RANKS, resumes=True),
    "trainer": Kind((TWO,), (child, named("ray::RayLearner"))),
    "shard": Kind((DQN,), (named("ray::ReplayShard"),), is_deterministic=False),
    "node": Kind((f"{IMPALA} --placement=spread", TWO), (node,), kills_node=True),
}


@dataclass(frozen=True)
class Args:
    """Flags of this benchmark."""

    rows: tuple[str, ...] = ("member", "rank", "trainer", "shard", "node")
    """what is killed: a member of a population, one of its ranks, one of two trainers on Ray, a replay shard, a node"""
    kills: Annotated[int, Between(1)] = 20
    """of each kind"""
    per_run: Annotated[int, Between(1)] = 4
    """kills of one run; fewer, where it ends before"""
    limit: Annotated[float, Between(10)] = 600.0
    """longest time from the last kill to the end of a run (s)"""
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
        for process in (*self.processes(), *self.started):
            with suppress(psutil.Error):
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *words: str) -> subprocess.Popen:
        with (self.folder / "output.txt").open("a") as log:
            given = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen([sys.executable, *words], cwd=self.folder, env=self.env, **given)  # type: ignore[call-overload]
        self.started.append(process)
        return process

    def wait_for(self, text: str) -> None:
        """Wait until a process has printed something."""
        while text not in self.output():
            if any(process.poll() is not None for process in self.started):
                raise SystemExit(self.output())
            time.sleep(POLL_SECONDS)

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


class Running:
    """A run in a place of its own, and of some kinds the two nodes that it is on."""

    def __init__(self, kind: Kind, command: str, place: Place):
        self.kind, self.place, self.address = kind, place, f"127.0.0.1:{free_port()}"
        self.words = [*kind.launcher, *f"{ROOT}/{command}".split()]
        if kind.kills_node:
            place.start("-m", "a3c_mp.cluster", "head", f"--port={self.address.partition(':')[2]}", "--num-cpus=2")
            place.wait_for("cluster at")
            self.join()
            place.wait_for("joined the cluster at")
            self.words.append(f"--address={self.address}")
        self.process = place.start(*self.words)

    def join(self) -> None:
        """Start a second node."""
        self.node = self.place.start("-m", "a3c_mp.cluster", "join", self.address, "--num-cpus=1")

    def has_ended(self, seconds: float) -> bool:
        """Wait for the end of the run, for so long at most. Returns whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def victims(self, which: int) -> Processes:
        return self.kind.victims[which](processes_of((self.node if self.kind.kills_node else self.process).pid))

    def wait_for_victims(self, which: int) -> bool:
        """Wait until there is something to kill. Returns whether there is, or the run has ended."""
        while not (found := self.victims(which)) and not self.has_ended(0.5):
            pass
        return bool(found)

    def kill(self, rng: random.Random, which: int) -> list[str]:
        """Kill one of the processes that are to be killed, or a whole node; returns their command lines."""
        found = self.victims(which)
        chosen = rng.sample(found, len(found) if self.kind.kills_node else min(len(found), 1))
        killed = [command_of(each).strip()[-60:] for each in chosen]
        for each in chosen:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        return killed

    def replace(self, limit: float) -> None:
        """Start what a user would start again after a kill."""
        if self.kind.kills_node:
            self.join()
        if self.kind.resumes and self.has_ended(limit) and self.process.returncode:
            self.process = self.place.start(*self.words, "--resume-or-start")


@cache
def undisturbed(kind: Kind, command: str, limit: float) -> tuple[float, str]:
    """How long a run lasts from the start of what can be killed to its end (s), and its weights."""
    with Place() as place:
        run = Running(kind, command, place)
        run.wait_for_victims(0)
        began = time.monotonic()
        if not run.has_ended(limit) or run.process.returncode:
            raise SystemExit(place.output())
        return time.monotonic() - began, read_summary(place.folder / "runs/r")["weights_sha256"]


def kill_some(kind: Kind, command: str, rng: random.Random, number: int, limit: float) -> Result:
    """A run and so many kills, or fewer if it ends before; `problems` is empty if all went as it should."""
    seconds, weights = undisturbed(kind, command, limit)
    kills = list[list[str]]()
    with Place() as place:
        run, began = Running(kind, command, place), time.monotonic()
        while len(kills) < number and run.wait_for_victims(which := rng.randrange(len(kind.victims))):
            if not run.has_ended(rng.uniform(0, SHARE * seconds)) and (killed := run.kill(rng, which)):
                kills.append(killed)
                run.replace(limit)
        problems = [] if run.has_ended(limit) else [f"it has not ended {limit:.0f} s after the last kill"]
        code, passed = run.process.returncode, time.monotonic() - began
        for process in place.started:  # nodes
            process.terminate()
        with suppress(OSError):
            summary = read_summary(place.folder / "runs/r")
            problems += [summary["exit_reason"]] if summary["exit_reason"] != "total_steps" else []
            problems += ["other weights"] if kind.is_deterministic and summary["weights_sha256"] != weights else []
        problems += [f"exit code {code}"] if code != 0 else []
        problems += [f"left behind: {each}" for each in place.left()]
        output = place.output()[-6000:] if problems else ""
    return {"kills": kills, "seconds": round(passed, 1), "problems": problems, "output": output}


def table(result: Result) -> str:
    """Of each kind: kills, in how many runs, how many of these ended as they should, and how long they took (s)."""
    rows = []
    for kind in dict.fromkeys(run["row"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["row"] == kind]
        counts = sum(len(run["kills"]) for run in runs), len(runs), sum(not run["problems"] for run in runs)
        rows.append([kind, *map(str, counts), f"{max(run['seconds'] for run in runs):.0f}"])
    return markdown_table(["killed", "kills", "runs", "as they should", "seconds at most"], rows)


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    if flags or not set(args.rows) <= KINDS.keys():
        raise ConfigError("rows", " ".join([*args.rows, *flags]), f"must be of {', '.join(KINDS)}")
    settings = {row: {"commands": KINDS[row].commands} for row in args.rows}
    path, result = begin("kills", args, "CartPole-v1", settings)

    def missing(row: str) -> int:
        return args.kills - sum(len(run["kills"]) for run in result["runs"] if run["row"] == row)

    def run(row: str, seed: int) -> Result:
        rng, kind = random.Random(f"{args.seed} {row} {seed}"), KINDS[row]
        command, number = kind.commands[seed % len(kind.commands)], min(args.per_run, missing(row))
        while not (found := kill_some(kind, command, rng, number, args.limit))["kills"]:
            if found["problems"]:
                raise SystemExit(found["output"])
        return found

    number = 0
    while rows := [row for row in args.rows if missing(row) > 0]:
        number += 1
        measure(path, result, [(row, number) for row in rows], run, table)
    return 1 if any(run["problems"] for run in result["runs"]) else 0


if __name__ == "__main__":
    exit_with(main)
