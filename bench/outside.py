"""A run seen from outside: its processes and actors, what they hold, how soon an actor is replaced; slowing it down."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MIB = 2**20
RAY_ACTOR = "ray::RayWorker"
"""in the command line of an actor of chapter 7"""
REPLACED_SECONDS = 60.0
"""longest wait for the successor of an actor that was killed"""
POLL_SECONDS = 0.05
PULSE_SECONDS = 1.0
"""period in which a slowed trainer runs once"""


def processes_of(pid: int) -> list[psutil.Process]:
    """A process and everything that it has started."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Processor time that processes have used so far (s)."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def actors_among(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Actors: those of Ray, and spawned processes without children, as further learners have actors of their own.

    Without the evaluator, which has named itself.
    """
    found = []
    for process in processes:
        command = command_of(process)
        with suppress(psutil.Error):
            spawned = "spawn_main" in command and not process.children() and "evaluator" not in process.name()
            if RAY_ACTOR in command or spawned:
                found.append(process)
    return found


def command_of(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def sample(processes: Sequence[psutil.Process], shm_before: frozenset[str]) -> dict[str, float]:
    """What the processes hold together. Shared pages count once, by their proportional share.

    Raises:
        OSError, psutil.Error: one of them ends meanwhile.
    """
    found = dict.fromkeys(("memory_mib", "shm_mib", "fds", "threads"), 0.0)
    for process in processes:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        pss = {name: int(kib) * 1024 / MIB for name, kib in re.findall(r"^(Pss\w*):\s+(\d+) kB", rollup, re.MULTILINE)}
        found["shm_mib"] += pss["Pss_Shmem"]
        found["memory_mib"] += pss["Pss"] - pss["Pss_Shmem"]
        found["fds"] += process.num_fds()
        found["threads"] += process.num_threads()
    found["shm_files"] = len(frozenset(os.listdir("/dev/shm")) - shm_before)
    found["spilled_files"] = spilled_files(processes)
    found["queued_bytes"] = sum(map(queued_bytes, pipes_of(processes)))
    found["processes"] = len(processes)
    return found


def spilled_files(processes: Sequence[psutil.Process]) -> int:
    """Files into which Ray's object store has written what did not fit."""
    folders = {match for process in processes for match in re.findall(r"--session_dir=(\S+)", command_of(process))}
    return sum(1 for folder in folders for path in Path(folder).rglob("ray_spilled_objects*/**/*") if path.is_file())


def pipes_of(processes: Sequence[psutil.Process]) -> list[str]:
    """A path to each pipe between the processes, such as tokens and filled slots travel in."""
    pipes: dict[str, str] = {}
    for process in processes:
        for fd in os.listdir(f"/proc/{process.pid}/fd"):
            path = f"/proc/{process.pid}/fd/{fd}"
            with suppress(OSError):  # closed meanwhile
                if (name := os.readlink(path)).startswith("pipe:"):
                    pipes[name] = path
    return list(pipes.values())


def queued_bytes(pipe: str) -> int:
    """What has been written to a pipe and not been read."""
    fd = -1
    try:
        fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0
    finally:
        if fd >= 0:
            os.close(fd)


def replaced_after(process: subprocess.Popen, before: Sequence[psutil.Process]) -> float | None:
    """Seconds until a run has as many actors as before, one of them new: it may still be importing."""
    began, known = time.monotonic(), {actor.pid for actor in before}
    while process.poll() is None and time.monotonic() - began < REPLACED_SECONDS:
        now = {actor.pid for actor in actors_among(processes_of(process.pid))}
        if len(now) >= len(known) and now - known:
            return round(time.monotonic() - began, 2)
        time.sleep(POLL_SECONDS)
    return None


@contextmanager
def slowed(process: subprocess.Popen, factor: float, begins: Callable[[], bool]) -> Iterator[None]:
    """A process that is stopped most of the time, as soon as `begins()` says so; with a factor of 1 it never is."""
    over = threading.Event()

    def pulse() -> None:
        while not begins() and not over.wait(PULSE_SECONDS):
            pass
        with suppress(ProcessLookupError):
            while not over.wait(PULSE_SECONDS / factor):
                os.kill(process.pid, signal.SIGSTOP)
                over.wait(PULSE_SECONDS * (1 - 1 / factor))
                os.kill(process.pid, signal.SIGCONT)

    if factor == 1:
        yield
        return
    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
