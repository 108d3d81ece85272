"""What every chapter promises about bad numbers, full disks, damaged checkpoints and small machines; actors as threads.

The same with real processes is in tests/process; what the faults cost is in docs/reliability.md.
"""

import hashlib
import importlib
import json
import logging
import math
import os
import re
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from inline import InlineWorkers
from support import CARTPOLE, CHAPTERS, ROOT

from a3c_mp.algorithms import apex
from a3c_mp.errors import ConfigError
from a3c_mp.run import checkpoint, metrics
from a3c_mp.run import preflight as limits
from a3c_mp.run.checkpoint import list_checkpoints
from a3c_mp.run.run import Run

EVERY_CHAPTER = pytest.mark.parametrize("algorithm", CHAPTERS)


class Chapter:
    """Runs a chapter's `main` in this process, with run folders in the current one."""

    def __init__(self, algorithm, monkeypatch):
        self.monkeypatch, self.folder = monkeypatch, Path("runs/r")
        script, self.flags = CHAPTERS[algorithm]
        self.module = importlib.import_module(Path(script).stem)
        monkeypatch.setattr("a3c_mp.run.actors.Workers", InlineWorkers)
        self.origin = {"algorithm": algorithm, "env_id": "CartPole-v1"}

    def main(self, *flags):
        self.monkeypatch.setattr("sys.argv", ["train.py", *flags])
        return self.module.main()

    def train(self, *flags):
        return self.main(*CARTPOLE, *self.flags, "--run-name", "r", *flags)

    def resume(self, *flags):
        """Look whether it can be; a checkpoint from beyond the budget leaves nothing to do."""
        return self.main("--resume", "runs/r", "--total-steps", "1", *flags)

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def log(self):
        return (self.folder / "run.log").read_text()

    def checkpoints(self):
        return list_checkpoints(self.folder / "checkpoints")

    def newest(self):
        """The state that a resume would take; raises if it cannot be read."""
        return checkpoint.load(self.checkpoints()[0], **self.origin)


@pytest.fixture
def chapter(algorithm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "tests" / "process")
    return Chapter(algorithm, monkeypatch)


class Looks(gymnasium.Env):
    """Shows zeros."""

    action_space = Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


# ---- numbers that are not finite


@EVERY_CHAPTER
@pytest.mark.parametrize("env", ["NanReward", "InfiniteReward", "NanObs", "InfiniteObs"])
def test_what_is_not_finite_is_skipped_counted_and_named(chapter, env):
    env_id = f"fault_env:{env}-v0"
    code = chapter.train("--env-id", env_id, "--no-reward-clip", "--total-steps", "3000")
    assert code == 0, chapter.log
    summary = chapter.summary
    skipped = {name: count for name, count in summary.items() if name.endswith("_not_finite")}
    assert 2 <= sum(skipped.values()) <= 8, "it happens to both actors, once"
    assert re.search(r" (from|of) actor \d", chapter.log)
    assert "contains NaN or inf; skipped" in chapter.log
    assert math.isfinite(summary["mean_return_100"])
    assert summary["updates"] > 10
    assert json.loads((chapter.folder / "config.json").read_text())["args"]["env_id"] == env_id
    assert checkpoint.load(chapter.checkpoints()[0], algorithm=chapter.origin["algorithm"], env_id=env_id)


@EVERY_CHAPTER
def test_one_huge_observation_is_clipped_and_the_net_goes_on_seeing_the_others(chapter, monkeypatch):
    """As sentinels are, FLT_MAX for nothing in sight: finite, and its square is not."""
    monkeypatch.setattr(apex, "NORM_SAMPLES", 32)  # all transitions of a batch, so that none is overlooked
    env_id = "fault_env:HugeObs-v0"
    assert chapter.train("--env-id", env_id, "--total-steps", "3000") == 0, chapter.log
    state = checkpoint.load(chapter.checkpoints()[0], algorithm=chapter.origin["algorithm"], env_id=env_id)
    assert state["net"]["norm.count"] > 1000
    assert 1 / state["net"]["norm.scale"].min() < 100, "CartPole's own deviations are about 1"
    assert chapter.summary["obs_values_clipped"] > 0
    assert "more than 100 deviations from the mean; clipped" in chapter.log
    skipped = {name: count for name, count in chapter.summary.items() if name.endswith("_not_finite")}
    assert set(skipped.values()) == {0}, "the rest of that sample is learned from"


@EVERY_CHAPTER
@pytest.mark.parametrize("env", ["NanForEver", "NanObsForEver"])
def test_where_it_does_not_end_the_run_does_with_the_last_good_weights(chapter, env):
    env_id = f"fault_env:{env}-v0"
    assert chapter.train("--env-id", env_id, "--total-steps", "100000") == 1
    assert "the 5th of actor" in chapter.summary["exit_reason"]
    skipped = {name: n for name, n in chapter.summary.items() if name.endswith("_not_finite")}
    assert 5 <= sum(skipped.values()) <= 20, skipped
    state = checkpoint.load(chapter.checkpoints()[0], algorithm=chapter.origin["algorithm"], env_id=env_id)
    assert state["updates"] == chapter.summary["updates"] > 0
    assert "go on with --resume" in chapter.log


@pytest.mark.parametrize("algorithm", ["a3c_grad"])
def test_one_bad_rollout_of_many_gradients_is_no_reason_to_give_up(chapter):
    code = chapter.train("--env-id", "fault_env:NanReward-v0", "--batch-size", "4", "--total-steps", "3000")
    assert code == 0, chapter.log
    assert chapter.summary["grads_not_finite"] == 16, "both actors, once, 8 * 4 samples in batches of 4"


@EVERY_CHAPTER
def test_learning_that_diverges_ends_the_run_and_saves_no_weights_that_are_not_finite(chapter):
    assert chapter.train("--learning-rate", "1e36", "--total-steps", "100000") == 1
    assert "in a row" in chapter.summary["exit_reason"]
    for path in chapter.checkpoints():
        checkpoint.load(path, **chapter.origin)


# ---- observations that look like images and are none to the net


LOOKS = {
    "SmallImage": ((7, 7, 3), np.uint8, "(3, 7, 7)"),
    "Screen": ((84, 84), np.uint8, "(84, 84)"),
    "Floats": ((3, 84, 84), np.float32, "(3, 84, 84)"),
    "Vector": ((4,), np.float32, None),
    "Image": ((40, 40, 3), np.uint8, None),
}


@EVERY_CHAPTER
@pytest.mark.parametrize(("shape", "dtype", "named"), LOOKS.values(), ids=LOOKS)
def test_what_looks_like_an_image_and_is_treated_as_a_vector_is_in_the_log(chapter, shape, dtype, named, monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry.copy())
    gymnasium.register("Looks-v0", entry_point=Looks, kwargs={"space": Box(0, 255, shape, dtype)})
    assert chapter.train("--env-id", "Looks-v0", "--total-steps", "1") == 0
    lines = [line for line in chapter.log.splitlines() if "treated as vectors" in line]
    assert len(lines) == (named is not None)
    assert all(f"observations {named} are treated as vectors" in line for line in lines)


# ---- a full disk


@EVERY_CHAPTER
def test_a_full_disk_costs_warnings_and_the_old_checkpoint_stays(chapter, monkeypatch):
    """Between 1,000 and 2,000 steps no file can grow."""
    warnings, during = [], []
    monkeypatch.setattr(logging.Logger, "warning", lambda self, text: warnings.append(text))
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.02)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tick = Run.end_round

    def tick_with_little_room(run):
        full = 1000 <= run.steps < 2000
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if full else soft, hard))
        tick(run)
        if full:
            during.append((run.steps, chapter.newest()["steps"]))

    monkeypatch.setattr(Run, "end_round", tick_with_little_room)
    try:
        code = chapter.train("--total-steps", "4000", "--checkpoint-seconds", "0.1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 0
    assert during
    assert all(saved < 1000 for _, saved in during), "the old one can be read, and there is no other"
    assert chapter.newest()["steps"] >= 4000
    assert [text for text in warnings if "no checkpoint at 1," in text and "File too large" in text]
    assert [text for text in warnings if "TensorBoard cannot be written" in text]
    assert not list(chapter.folder.rglob("*.tmp"))


# ---- checkpoints that cannot be used


def replace_content(path, content, **changes):
    """Other bytes, with a manifest that vouches for them."""
    path.write_bytes(content)
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest |= {"sha256": hashlib.sha256(content).hexdigest(), **changes}
    path.with_suffix(".json").write_text(json.dumps(manifest))


def replace_state(path, **parts):
    torch.save({**torch.load(path, weights_only=True), **parts}, path)
    replace_content(path, path.read_bytes())


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


class Malice:
    def __reduce__(self):
        return os.mkdir, ("executed",)


DAMAGE = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-500]), "SHA-256"),
    "empty": (lambda path: path.write_bytes(b""), "SHA-256"),
    "text": (lambda path: replace_content(path, b"not a checkpoint"), "cannot be read"),
    "a flipped bit": (flip_a_bit, "SHA-256"),
    "NaN": (lambda path: replace_state(path, net={"weight": torch.tensor(math.nan)}), "holds NaN or infinity"),
    "another net": (lambda path: replace_state(path, net={"weight": torch.ones(3)}), "does not fit these settings"),
    "half a state": (lambda path: replace_state(path, optimizer={}), "does not fit these settings"),
    "odd counters": (lambda path: replace_state(path, returns=7), "does not fit these settings"),
    "another algorithm": (lambda path: replace_content(path, path.read_bytes(), algorithm="ppo"), "algorithm ppo"),
    "a newer format": (lambda path: replace_content(path, path.read_bytes(), format=2), "reads up to 1"),
    "a malicious pickle": (lambda path: replace_state(path, extra=Malice()), "cannot be read"),
}


@EVERY_CHAPTER
def test_a_checkpoint_that_cannot_be_used_is_named_and_the_one_before_it_is(chapter):
    assert chapter.train("--total-steps", "2500", "--checkpoint-seconds", "0.1") == 0
    newest, previous, *_ = chapter.checkpoints()
    good = {path: path.read_bytes() for path in (chapter.folder / "checkpoints").iterdir()}
    for damage, reason in DAMAGE.values():
        damage(newest)
        assert chapter.resume() == 0
        *_, skipped, resumed = [line for line in chapter.log.splitlines() if "checkpoint" in line and "/step_" in line]
        assert f"{newest}" in skipped
        assert reason in skipped
        assert f"resumed from {previous} at " in resumed
        assert chapter.summary["steps"] == int(previous.stem.removeprefix("step_"))
        for path in (chapter.folder / "checkpoints").iterdir():
            path.unlink()
        for path, content in good.items():
            path.write_bytes(content)
    assert not Path("executed").exists()
    with suppress(FileExistsError):
        torch.load(newest, weights_only=False)

    for path in chapter.checkpoints():
        flip_a_bit(path)
    with pytest.raises(ConfigError, match=r"resume=runs/r: .* is damaged"):
        chapter.resume()


# ---- small machines


TOO_LARGE = {
    "apex_dqn": ["--replay-size", "1e12"],
    "impala": ["--num-envs", "4096", "--unroll-length", "1e7", "--replay-proportion", "0"],
}


@EVERY_CHAPTER
def test_too_little_shared_memory_is_found_before_the_start(chapter, refused, algorithm):
    flags = TOO_LARGE.get(algorithm, ["--num-envs", "4096", "--unroll-length", "1e7"])
    message = refused(chapter.module.main, [*CARTPOLE, *flags])
    assert " free" in message
    assert "; lower --" in message


@EVERY_CHAPTER
def test_too_little_memory_and_too_few_open_files_are_found_before_the_start(chapter, refused, monkeypatch):
    flags = [*CARTPOLE, *chapter.flags, "--num-actors", "100"]
    flags += ["--replay-size", "1e6"] if "--replay-size" in flags else []
    monkeypatch.setattr(limits, "free_memory", lambda: 2**30)
    message = "num-actors=100: that takes 15,000 MiB of memory at least, 1,024 MiB is free; lower it"
    assert message in refused(chapter.module.main, flags)
    monkeypatch.setattr(limits, "free_memory", lambda: 2**40)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (200, 300))
    needed = limits.FILES + 100 * limits.FILES_PER_ACTOR
    message = f"num-actors=100: that takes {needed} open files, 300 are allowed; lower it, or raise the limit"
    assert message in refused(chapter.module.main, flags)


@EVERY_CHAPTER
def test_another_processor_is_refused_before_the_start(chapter, refused, monkeypatch):
    monkeypatch.setattr(limits.platform, "machine", lambda: "aarch64")
    assert "error: machine=aarch64: " in refused(chapter.module.main, [*CARTPOLE, *chapter.flags])


# ---- two runs in one folder


@EVERY_CHAPTER
@pytest.mark.parametrize("flag", ["--run-name", "--resume"])
def test_a_folder_in_use_is_refused_with_the_name_of_the_holder(chapter, flag):
    assert chapter.train("--total-steps", "200") == 0
    take = "import fcntl; file = open('runs/r/.lock', 'w'); fcntl.flock(file, fcntl.LOCK_EX)"
    say = "import os; file.write(str(os.getpid())); file.flush(); print(os.getpid(), flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", f"{take}; {say}"], stdin=-1, stdout=-1)
    pid = int(holder.stdout.readline())
    before = chapter.log
    try:
        with pytest.raises(ConfigError, match=f"runs/r is in use by process {pid}; wait for it"):
            chapter.main(*CARTPOLE, *chapter.flags, flag, "r" if flag == "--run-name" else "runs/r")
        assert chapter.log == before, "nothing in it is touched"
    finally:
        holder.communicate(b"\n")
    assert chapter.resume() == 0, "it is free again"
