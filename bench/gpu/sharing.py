"""How processes share a GPU: time of acting passes with several contexts, with and without MPS, and their memory."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench import common
from bench.gpu.task import END_SECONDS, HERE, Figures, Part, start
from bench.outside import processes_of


class Caller:
    """A process that makes calls as an actor does, as long as it is asked to; see alone.py."""

    def __init__(self, number: int, part: Part, env: Mapping[str, str] = {}):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        script = HERE / "alone.py"
        self.process = start(script, "calls", number, *part.flags_of("a3c_data"), env=env, **pipes)

    def ask(self, *words: Any) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def answer(self) -> Figures:
        """Raises RuntimeError if it has none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: Figures = json.loads(line)
                if "error" in found:
                    raise RuntimeError(found["error"])
                return found
        raise RuntimeError(f"a process ended with code {self.process.wait(END_SECONDS)} instead of an answer")


@contextmanager
def callers(part: Part, env: Mapping[str, str] = {}) -> Iterator[list[Caller]]:
    """As many processes as there are actors."""
    with ExitStack() as stack:
        made = []
        for number in range(part.actors):
            made.append(Caller(number, part, env))
            stack.callback(made[-1].process.wait)
            stack.callback(made[-1].process.kill)
        yield made


def called(made: Sequence[Caller], what: str, seconds: float) -> Figures:
    """Times of calls (ms) of several processes at once: the mean of their means, and of medians, and the slowest."""
    answers = list[Figures]()
    for words in (("prepare", what), ("call", what, seconds)):  # all begin together
        for each in made:
            each.ask(*words)
        answers = [each.answer() for each in made]
    found = {name: round(statistics.fmean(answer[name] for answer in answers), 4) for name in ("mean_ms", "median_ms")}
    return found | {"p99_ms": round(max(answer["p99_ms"] for answer in answers), 4)}


def latency(part: Part) -> None:
    """One acting pass with 1, 8 and all actors at once, each with a context of its own; memory of contexts; MPS."""
    import torch

    seconds = max(1.0, part.seconds / 8)
    numbers = sorted({1, min(8, part.actors), part.actors})
    torch.zeros(1, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    part.record(num_envs=common.trainer_settings(part.flags_of("a3c_data")).num_envs, actors=part.actors)
    with callers(part) as made:
        for what in ("cuda", "cpu", "step"):
            with part.guarded(what):
                for number in numbers:
                    part.figures.setdefault(what, {})[str(number)] = called(made[:number], what, seconds)
                    part.record()
                    if what == "cuda" and number == numbers[-1]:
                        used = before - torch.cuda.mem_get_info()[0]
                        part.record(context_mib=round(used / 2**20 / number, 1))
    with part.guarded("mps"), mps(part) as env, callers(part, env) as made:
        before = torch.cuda.mem_get_info()[0]
        found: Figures = {}
        for number in numbers:
            found[str(number)] = called(made[:number], "cuda", seconds)
            part.record(mps=found)
        found["context_mib"] = round((before - torch.cuda.mem_get_info()[0]) / 2**20 / numbers[-1], 1)
        part.record(mps=found)


@contextmanager
def mps(part: Part) -> Iterator[dict[str, str]]:
    """CUDA's Multi-Process Service, for clients with these variables. Raises RuntimeError where it does not start."""
    program = "nvidia-cuda-mps-control"
    if shutil.which(program) is None:
        raise RuntimeError(f"MPS: not available: {program} is not on the PATH")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # a short path, as sockets need
        names = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
        env = {name: str(Path(folder, place)) for name, place in names.items()}
        for path in env.values():
            Path(path).mkdir()
        log = Path(folder, "control.txt")
        with log.open("w") as file:
            output = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            control = subprocess.Popen([program, "-f"], env={**os.environ, **env}, **output)  # type: ignore[call-overload]
        try:
            time.sleep(3.0)
            if control.poll() is not None:
                raise RuntimeError(f"MPS: not available: its control ended at once: {log.read_text()[-500:]}")
            yield env
        except RuntimeError as error:
            logs = " ".join(path.read_text(errors="replace")[-500:] for path in [log, *Path(folder).glob("log/*.log")])
            raise RuntimeError(f"{error}; MPS says: {logs}") from error
        finally:
            servers = processes_of(control.pid)[1:]
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run([program], input="quit\n", text=True, env={**os.environ, **env}, timeout=END_SECONDS)
            for process in (control, *servers):
                with suppress(OSError, psutil.Error):
                    process.kill()
            control.wait()
