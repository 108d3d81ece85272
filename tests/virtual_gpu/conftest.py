"""Runs of the project's scripts on a virtual GPU, and what each of their processes did there."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from harness import ROOT, Chapter, Finished, Scripts

from virtual_gpu import library

START = Path(__file__).parent / "start"


@dataclass
class Ran:
    """A run that has ended."""

    done: Finished
    processes: list[dict[str, Any]]
    """of each process that used the GPU, what it counted (see ledger.py)"""

    def role(self, *names: str) -> list[dict[str, Any]]:
        """The processes whose names begin so."""
        return [process for process in self.processes if process["process"].startswith(names)]

    @property
    def learners(self) -> list[dict[str, Any]]:
        return self.role("python", "learner")

    @property
    def actors(self) -> list[dict[str, Any]]:
        return self.role("worker", "collector")


class VirtualGPU:
    """Starts runs in whose processes torch has virtual GPUs."""

    def __init__(self, scripts: Scripts, monkeypatch: pytest.MonkeyPatch):
        self.scripts, self.monkeypatch = scripts, monkeypatch
        self.log = scripts.runs_dir / "virtual_gpu.jsonl"
        monkeypatch.setenv("PYTHONPATH", str(START))
        monkeypatch.setenv("VIRTUAL_GPU_LOG", str(self.log))

    def start(self, chapter: Chapter, *flags: str, root: Path = ROOT, gpus: int = 1, **settings: str) -> Popen:
        """Start a chapter of the checkout `root`; settings are the variables VIRTUAL_GPU_NAME."""
        self.monkeypatch.setenv("VIRTUAL_GPUS", str(gpus))
        for name, value in {"root": str(root), **settings}.items():
            self.monkeypatch.setenv(f"VIRTUAL_GPU_{name.upper()}", value)
        names = {field.name for field in dataclasses.fields(chapter.args_class)}
        on_gpu = ["--cuda", *(["--act-on", "cuda"] if "act_on" in names else [])]  # vectors, too
        chapter = dataclasses.replace(chapter, script=str(root / chapter.script))
        return self.scripts.train(chapter, *on_gpu, "--max-restarts", "0", *flags)

    def finish(self, trainer: Popen) -> Ran:
        done = self.scripts.finish(trainer, "r")
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return Ran(done, [json.loads(line) for line in lines])

    def run(self, chapter: Chapter, *flags: str, **settings: Any) -> Ran:
        return self.finish(self.start(chapter, *flags, **settings))


@pytest.fixture
def gpu(scripts, monkeypatch):
    if why := library.missing():
        pytest.skip(why)
    library.built()
    return VirtualGPU(scripts, monkeypatch)


@pytest.fixture
def checkout(tmp_path):
    """A copy of the project's code, to be changed: a function (file, old text, new text) -> its folder."""

    def change(file: str, old: str, new: str) -> Path:
        root = tmp_path / "checkout"
        for package in ("a3c_mp", "wrappers"):
            if (ROOT / package).is_dir():
                shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
        for script in ROOT.glob("train_*.py"):
            shutil.copy(script, root)
        text = (root / file).read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
        (root / file).write_text(text.replace(old, new))
        return root

    return change
