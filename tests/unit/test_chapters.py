"""What every chapter promises: its size, and about bad numbers, full disks, damaged checkpoints and small machines.

Actors are threads.
The same with real processes is in tests/process; what the faults cost is in docs/reliability.md.
"""

import ast
import hashlib
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gymnasium.spaces import Discrete
from harness import (
    A3C_DATA,
    A3C_GRAD,
    APEX_DQN,
    EVERY_CHAPTER,
    EVERY_ONE_OF_ALL,
    IMPALA,
    ROOT,
    files_no_longer_than,
    row_id,
)
from torch import nn

from a3c_mp.algorithms import apex
from a3c_mp.config import check_ranges
from a3c_mp.errors import ConfigError
from a3c_mp.nets.obs_norm import ObsNorm, note_on_inputs
from a3c_mp.run import checkpoint, metrics
from a3c_mp.run import preflight as limits
from a3c_mp.run.run import Run

SLOW = pytest.mark.slow
EQUAL_SHARES = ("--deterministic",)  # without it, one thread may take all steps where cores are short


# ---- what a reader meets

SCRIPTS = sorted(ROOT.glob("train_*.py"))


def library_names(tree):
    """Names that a script takes from the library: what it imports, of a module the attributes that it uses."""
    names = set()
    attributes = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "a3c_mp":
            for alias in node.names:
                module = ROOT.joinpath(*node.module.split("."), alias.name)
                used = {a.attr for a in attributes if a.value.id == (alias.asname or alias.name)}
                is_module = module.is_dir() or module.with_suffix(".py").exists()
                names |= {f"{alias.name}.{name}" for name in used} if is_module and used else {alias.name}
    return names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_chapter_is_short_and_takes_little_from_the_library(path):
    tree = ast.parse(source := path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {
        "lines": len(source.splitlines()),
        "names of the library": len(library_names(tree)),
        "lines of a function": max(node.end_lineno - node.lineno + 1 for node in functions),
        "parameters": max(len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) for node in functions),
    }
    limits = {"lines": 110 if path.stem == "train_a3c_data" else 120, "names of the library": 16}
    limits |= {"lines of a function": 40, "parameters": 5}
    assert not {what: number for what, number in found.items() if number > limits[what]}


def test_the_first_chapter_loads_little_of_the_library():
    show = "import sys, train_a3c_data; print(*[vars(module).get('__file__') for module in sys.modules.values()])"
    loaded = subprocess.run([sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    own = (ROOT / "a3c_mp", ROOT / "train_a3c_data.py")
    paths = {Path(name) for name in loaded.split() if any(Path(name).is_relative_to(folder) for folder in own)}
    assert len(paths) <= 60
    assert sum(len(path.read_text().splitlines()) for path in paths) <= 7400


@EVERY_ONE_OF_ALL
def test_presets_are_settings_within_their_ranges(chapter):
    args_class, presets = chapter.settings
    for env_id, preset in presets.items():
        check_ranges(args_class(**{**preset, "env_id": env_id}))


# ---- numbers that are not finite


@EVERY_CHAPTER
@pytest.mark.parametrize(
    "env", ["NanReward", "InfiniteObs", *(pytest.param(name, marks=SLOW) for name in ("InfiniteReward", "NanObs"))]
)
def test_what_is_not_finite_is_skipped_counted_and_named(run_inline, chapter, env):
    env_id = f"envs:{env}-v0"
    done = run_inline.train(chapter, "--env-id", env_id, "--no-reward-clip", *EQUAL_SHARES, "--total-steps", "1500")
    assert done.code == 0, done.log
    assert 2 <= done.not_finite <= 8, "it happens to both actors, once"
    assert re.search(rf" (from|of) {chapter.actor} \d", done.log)
    assert "contains NaN or inf; skipped" in done.log
    assert math.isfinite(done.summary["mean_return_100"])
    assert done.summary["updates"] > 10
    assert done.config["args"]["env_id"] == env_id
    assert done.state


def test_impala_learns_from_the_rest_of_a_round_that_has_a_rollout_with_nan(run_inline):
    flags = "--deterministic --replay-proportion 0 --num-envs 2 --batch-unrolls 2 --unroll-length 8 --total-steps 960"
    bad = ["--env-id", "envs:NanReward-v0", "--env-kwargs", "at={20+100*actor}", "--no-reward-clip"]  # two rounds
    done = run_inline.train(IMPALA, *flags.split(), *bad)
    assert done.summary["rollouts_not_finite"] == 2
    assert done.summary["updates"] == 960 / 16 - 2


@pytest.mark.parametrize("chapter", [A3C_DATA, APEX_DQN], ids=row_id)
def test_a_run_that_ends_before_the_first_update_because_of_them_has_failed(run_inline, chapter):
    learning = ["--learning-starts", "32"] if "dqn" in chapter.algorithm else []
    done = run_inline.train(
        chapter, "--env-id", "envs:NanObsForEver-v0?at=4", *learning, *EQUAL_SHARES, "--total-steps", "128"
    )
    assert done.code == 1
    assert done.summary["updates"] == 0
    assert "no update, because of NaN or inf" in done.summary["exit_reason"]


@EVERY_CHAPTER
def test_one_huge_observation_is_left_out_and_the_net_goes_on_seeing_the_others(run_inline, chapter, monkeypatch):
    """As sentinels are, FLT_MAX for nothing in sight: finite, and its square is not."""
    monkeypatch.setattr(apex, "NORM_PERIOD", 1)  # so that none is overlooked
    done = run_inline.train(chapter, "--env-id", "envs:HugeObs-v0", *EQUAL_SHARES, "--total-steps", "1500")
    assert done.code == 0, done.log
    assert done.state["extra"]["obs_stats"]["moments"][0].sum() > 1000
    assert 1 / done.state["net"]["norm.scale"].min() < 100, "CartPole's own deviations are about 1"
    assert done.summary["obs_values_far"] > 0
    assert "more than 1e+06 standard deviations from the mean; left out" in done.log
    assert done.not_finite == 0, "the rest of that sample is learned from"


@EVERY_CHAPTER
@pytest.mark.parametrize("env", ["NanForEver", "NanObsForEver"])
def test_where_it_does_not_end_the_run_does_with_the_last_good_weights(run_inline, chapter, env):
    done = run_inline.train(chapter, "--env-id", f"envs:{env}-v0", "--total-steps", "100000")
    assert done.code == 1
    assert f"5 in a row from {chapter.actor}" in done.summary["exit_reason"]
    assert 5 <= done.not_finite <= 20
    assert done.state["updates"] == done.summary["updates"] > 0
    assert re.search(r"continue with \S+ \S+ --resume runs/r$", done.log, re.MULTILINE)


def test_one_bad_rollout_of_many_gradients_is_no_reason_to_give_up(run_inline):
    flags = ["--env-id", "envs:NanReward-v0", "--batch-size", "4", "--total-steps", "2000"]
    done = run_inline.train(A3C_GRAD, *flags)
    assert done.code == 0, done.log
    assert done.summary["gradients_not_finite"] == 16, "both actors, once, 8 * 4 samples in batches of 4"


@EVERY_CHAPTER
def test_learning_that_diverges_ends_the_run_and_saves_no_weights_that_are_not_finite(run_inline, chapter):
    done = run_inline.train(chapter, "--learning-rate", "1e36", "--total-steps", "100000")
    assert done.code == 1
    assert "in a row" in done.summary["exit_reason"]
    for path in done.checkpoints:
        done.load(path)


# ---- observations that look like images and are none to the net


@pytest.mark.parametrize(
    ("shape", "is_image", "noted"),
    [((3, 7, 7), False, True), ((84, 84), False, True), ((4,), False, False), ((3, 40, 40), True, False)],
)
def test_what_looks_like_an_image_and_is_treated_as_a_vector_is_in_the_log(shape, is_image, noted):
    net = nn.Module()
    net.norm = ObsNorm(shape, image=is_image)
    expected = (
        f"observations {shape} are treated as vectors; images have the same bounds everywhere, and 36 x 36 or more"
    )
    assert note_on_inputs(net) == (expected if noted else "")


# ---- a full disk


@EVERY_ONE_OF_ALL
def test_a_full_disk_costs_warnings_and_the_old_checkpoint_stays(run_inline, chapter, monkeypatch):
    """Between 500 and 1,000 steps no file can grow."""
    warnings, during, folder, end_round = [], [], run_inline.folder() / "checkpoints", Run.end_round

    def end_round_with_little_room(run):
        if not 500 <= run.steps < 1000:
            return end_round(run)
        with files_no_longer_than(1000):
            end_round(run)
        newest = checkpoint.list_checkpoints(folder)[0]
        during.append(checkpoint.load(newest, algorithm=chapter.algorithm, env_id=chapter.env_id)["steps"])

    monkeypatch.setattr(logging.Logger, "warning", lambda self, text: warnings.append(text))
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(Run, "end_round", end_round_with_little_room)
    done = run_inline.train(chapter, "--total-steps", "1250", "--checkpoint-steps", "200")
    assert done.code == 0
    assert during
    assert all(saved < 500 for saved in during), "the old one can be read, and there is no other"
    assert done.state["steps"] >= 1250
    assert [text for text in warnings if "checkpoint at " in text and "File too large" in text]
    assert [text for text in warnings if "TensorBoard cannot be written" in text]
    assert not list(done.folder.rglob("*.tmp"))


# ---- checkpoints that cannot be used


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def replace_state(path, **parts):
    """Another state, with a manifest that vouches for it."""
    torch.save({**torch.load(path, weights_only=True), **parts}, path)
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(manifest))


DAMAGE = {  # what the chapters themselves notice; the rest, the code that reads files: test_checkpoint.py
    "another net": (lambda path: replace_state(path, net={"weight": torch.ones(3)}), "does not fit these settings"),
    "half a state": (
        lambda path: replace_state(path, optimizer={}, extra={"population": {}}),
        "does not fit these settings",
    ),
    "a flipped bit": (flip_a_bit, "SHA-256"),
}


@EVERY_ONE_OF_ALL
def test_a_checkpoint_that_cannot_be_used_is_named_and_the_one_before_it_is(run_inline, chapter):
    done = run_inline.train(chapter, "--total-steps", "800", "--checkpoint-steps", "200")
    newest, previous, *_ = [path.relative_to(run_inline.runs_dir) for path in done.checkpoints]
    good = {path: path.read_bytes() for path in newest.parent.iterdir()}
    for damage, reason in DAMAGE.values():
        damage(newest)
        resumed = run_inline.resume(chapter)
        assert resumed.code == 0
        *_, skipped = [line for line in done.log.splitlines() if "checkpoint skipped" in line]
        assert f"{newest}" in skipped
        assert reason in skipped
        steps = int(previous.stem.removeprefix("step_"))
        assert f"{steps:,} steps" in resumed.out
        assert done.summary["steps"] == steps
        for path in newest.parent.iterdir():
            path.unlink()
        for path, content in good.items():
            path.write_bytes(content)

    for path in done.checkpoints:
        flip_a_bit(path)
    with pytest.raises(ConfigError, match=r"resume=runs/r: .* is damaged: .*; start a new run, restore the folder, or"):
        run_inline.resume(chapter)


# ---- small machines


@EVERY_ONE_OF_ALL
def test_too_little_memory_and_too_few_open_files_are_found_before_the_start(chapter, refused, monkeypatch):
    flags = [*chapter.flags, f"--{chapter.actors_flag}", "100"]
    flags += ["--replay-size", "1e6"] if "--replay-size" in flags else []
    monkeypatch.setattr(limits, "free_memory", lambda: 2**30)
    message = f"error: {chapter.actors_flag}=100: that takes 15,000 MiB of memory at least, 1,024 MiB is free; lower it"
    assert message in refused(chapter.module.main, flags)
    monkeypatch.setattr(limits, "free_memory", lambda: 2**40)
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (200, 300))
    needed = limits.FILES + 100 * limits.FILES_PER_ACTOR
    message = f"=100: that takes {needed} open files, 300 are allowed; lower it, or raise the limit"
    assert f"error: {chapter.actors_flag}{message}" in refused(chapter.module.main, flags)


@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, APEX_DQN], ids=row_id)
@pytest.mark.parametrize("free", [2**26, 2**32], ids=["before the net is made", "beside what is shared"])
def test_observations_too_wide_for_the_nets_of_learner_and_actors_are_refused(
    chapter, free, refused, register, monkeypatch
):
    """20,000 numbers: 80 KB for each state, 10 MB for the first layers, and the same for what an optimizer keeps."""
    env_id = register(changes={"observation_space": Discrete(20_000), "obs": 7})
    monkeypatch.setattr(limits, "ACTOR_BYTES", 0)
    monkeypatch.setattr(apex, "check_replay_memory", lambda *sizes: None)
    left = iter([free])
    monkeypatch.setattr(limits, "free_memory", lambda: next(left, 2**26))
    flags = [*chapter.flags, "--env-id", env_id, *["--replay-size", "1000"] * (chapter is APEX_DQN)]
    refusal = refused(chapter.module.main, flags)
    assert f"error: env-id={env_id}: observations (20000,) and nets of " in refusal
    assert re.search(r"take about [0-9.]+ GiB, 0\.0 GiB is free; make its observations smaller, or lower", refusal)


@EVERY_ONE_OF_ALL
def test_another_processor_or_system_is_refused_before_the_start(chapter, refused, monkeypatch):
    monkeypatch.setattr(limits.memory_order, "LIBRARY", "libmissing.so.1")
    for machine in ("riscv64", "aarch64"):
        monkeypatch.setattr(limits.platform, "machine", lambda name=machine: name)
        assert f"error: machine={machine}: processes share memory" in refused(chapter.module.main, chapter.flags)
    monkeypatch.setattr(limits.platform, "system", lambda: "Darwin")
    monkeypatch.delattr("a3c_mp.processes.slots.open_memory")
    assert "error: system=Darwin: " in refused(chapter.module.main, chapter.flags)
