"""Checkpoints are whole or not there; what cannot be trusted is refused by name, and nothing in it is executed."""

import hashlib
import io
import json
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from a3c_mp.errors import CheckpointError
from a3c_mp.run import checkpoint

IDENTITY = {"algorithm": "a3c_data", "env_id": "CartPole-v1"}


def a_state(steps=0):
    return {"net": {"weight": torch.full((3,), float(steps)), "bias": torch.zeros(2)}, "steps": steps}


def save(folder, steps, best=False):
    return checkpoint.save(folder, a_state(steps), best=best, **IDENTITY)


def load(path):
    return checkpoint.load(path, **IDENTITY)


def forge(path, content, **changes):
    """Put bytes in the place of a checkpoint, with a manifest that vouches for them."""
    path.write_bytes(content)
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest |= {"sha256": hashlib.sha256(content).hexdigest(), **changes}
    path.with_suffix(".json").write_text(json.dumps(manifest))


def torch_bytes(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.fixture
def warnings():
    return []


# ---- what is saved is loaded


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    torch.manual_seed(0)
    state = {
        **a_state(7),
        "rng": torch.Generator().manual_seed(5).get_state(),
        "returns": [1.5, -2.0],
        "best_mean": float("-inf"),
        "reason": None,
    }
    path = checkpoint.save(tmp_path / "made if missing", state, **IDENTITY)
    loaded = load(path)
    for name, tensor in state["net"].items():
        assert torch.equal(loaded["net"][name], tensor)
    assert torch.equal(loaded["rng"], state["rng"])
    for name in ("steps", "returns", "best_mean", "reason"):
        assert loaded[name] == state[name]


def test_the_hash_is_that_of_the_file_also_where_the_state_changes_meanwhile(tmp_path, warnings):
    """Actors append to a replay while it is saved."""
    frames, over = torch.zeros(2**25, dtype=torch.uint8), threading.Event()

    def write():
        while not over.is_set():
            frames.add_(1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        paths = [checkpoint.save(tmp_path, {**a_state(n), "frame": frames}, **IDENTITY) for n in range(3)]
    finally:
        over.set()
        writer.join()
    for path in paths:
        assert (
            hashlib.sha256(path.read_bytes()).hexdigest() == json.loads(path.with_suffix(".json").read_text())["sha256"]
        )


def test_a_restored_optimizer_does_not_keep_its_file_mapped(tmp_path):
    """Else the gigabytes of a pruned checkpoint with a replay would stay on the disk until the run ends."""
    net = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "steps": 3}
    path = checkpoint.save(tmp_path, state, **IDENTITY)
    loaded = load(path)
    assert str(path) in Path("/proc/self/maps").read_text(), "a loaded file is mapped"
    checkpoint.restore_optimizer(optimizer, loaded["optimizer"])
    del loaded
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_net_and_its_optimizer_go_on_as_if_never_interrupted(tmp_path):
    def trainer():
        torch.manual_seed(1)
        net = nn.Linear(4, 3)
        return net, torch.optim.Adam(net.parameters(), lr=0.01)

    def train(net, optimizer):
        for i in range(3):
            optimizer.zero_grad()
            net(torch.full((2, 4), float(i))).square().sum().backward()
            optimizer.step()

    net, optimizer = trainer()
    train(net, optimizer)
    path = checkpoint.save(
        tmp_path, {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "steps": 3}, **IDENTITY
    )
    train(net, optimizer)

    resumed, resumed_optimizer = trainer()
    state = load(path)
    resumed.load_state_dict(state["net"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    train(resumed, resumed_optimizer)
    assert checkpoint.sha256_of_weights(resumed.state_dict()) == checkpoint.sha256_of_weights(net.state_dict())


def test_the_last_three_are_kept_in_order_of_steps_not_of_letters(tmp_path):
    for steps in (5, 40, 300, 2_000, 10_000):
        save(tmp_path, steps)
    kept = checkpoint.list_checkpoints(tmp_path)
    assert [load(path)["steps"] for path in kept] == [10_000, 2_000, 300]
    assert set(tmp_path.iterdir()) == {*kept, *(path.with_suffix(".json") for path in kept)}


def test_the_best_stays_when_newer_ones_are_worse(tmp_path):
    save(tmp_path, 1, best=True)
    save(tmp_path, 2, best=True)
    for steps in range(3, 9):
        save(tmp_path, steps)
    (best,) = checkpoint.list_checkpoints(tmp_path, "best")
    assert load(best)["steps"] == 2
    assert [load(path)["steps"] for path in checkpoint.list_checkpoints(tmp_path)] == [8, 7, 6]


def test_whichever_a_run_goes_on_from_the_best_before_it_is_still_there(tmp_path):
    for steps in range(1, 9):
        save(tmp_path, steps, best=steps in (1, 3, 5, 8))
    assert [load(path)["steps"] for path in checkpoint.list_checkpoints(tmp_path, "best")] == [8, 5]
    checkpoint.set_aside_newer(tmp_path / f"step_{7:012d}.pt")
    assert [load(path)["steps"] for path in checkpoint.list_checkpoints(tmp_path, "best")] == [5]


def save_evaluated(folder, steps, mean):
    evaluation = {"steps": steps, "return_mean": mean}
    return checkpoint.save_best(folder, a_state(steps)["net"], evaluation, **IDENTITY)


def test_the_best_by_evaluation_holds_the_weights_that_played_and_is_nothing_to_resume_from(tmp_path, warnings):
    save(tmp_path, 10)
    path = save_evaluated(tmp_path, 8, mean=3.5)
    assert checkpoint.list_checkpoints(tmp_path, "best") == [path]
    assert load(path)["steps"] == 8
    assert load(path)["net"]["weight"].tolist() == [8.0] * 3
    assert checkpoint.best_evaluation(tmp_path) == {"steps": 8, "return_mean": 3.5}
    state, _ = checkpoint.load_newest(tmp_path, warn=warnings.append, **IDENTITY)
    assert state["steps"] == 10


def test_the_best_by_evaluation_stays_where_it_is_newer_than_every_checkpoint_and_where_a_run_resumes_before_it(
    tmp_path,
):
    save(tmp_path, 10)
    for steps in (8, 12, 14):
        save_evaluated(tmp_path, steps, mean=steps)
    assert [load(path)["steps"] for path in checkpoint.list_checkpoints(tmp_path, "best")] == [14, 8]
    checkpoint.set_aside_newer(tmp_path / f"step_{10:012d}.pt")
    assert checkpoint.best_evaluation(tmp_path)["return_mean"] == 8


def test_a_best_checkpoint_that_no_evaluation_chose_or_that_is_damaged_has_no_result(tmp_path):
    assert checkpoint.best_evaluation(tmp_path) is None
    save(tmp_path, 10, best=True)
    assert checkpoint.best_evaluation(tmp_path) is None
    path = save_evaluated(tmp_path, 12, mean=3.5)
    path.with_suffix(".json").write_text('{"evaluation": ["return_mean"]}')
    assert checkpoint.best_evaluation(tmp_path) is None


def test_weights_that_are_not_finite_are_never_the_best(tmp_path):
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match="the weights to be saved: weight holds NaN"):
        checkpoint.save_best(tmp_path, {"weight": torch.tensor(float("nan"))}, {"steps": 12}, **IDENTITY)
    assert checkpoint.list_checkpoints(tmp_path, "best") == []


def test_what_was_set_aside_is_kept_until_the_next_time(tmp_path):
    for steps in (1, 2, 3):
        save(tmp_path, steps)
    checkpoint.set_aside_newer(tmp_path / f"step_{2:012d}.pt")
    assert {path.name for path in tmp_path.glob("*.unused")} == {
        f"step_{3:012d}.{kind}.unused" for kind in ("pt", "json")
    }
    checkpoint.set_aside_newer(tmp_path / f"step_{2:012d}.pt")
    assert not list(tmp_path.glob("*.unused"))


def test_files_that_a_user_has_put_beside_checkpoints_are_neither_resumed_from_nor_deleted(tmp_path, warnings):
    digits = f"{9:012d}"
    names = [f"{kind}_{middle}" for kind in ("step", "best") for middle in ("keep", f"{digits}0", f"{digits}_copy")]
    theirs = [f"{name}.{end}" for name in names for end in ("pt", "json")]
    theirs += ["notes.tmp", "step_keep.pt.tmp", "old.unused", f"net_{digits}.pt", f"step_{digits}.bak"]
    save(tmp_path, 1, best=True)
    content = (tmp_path / f"step_{1:012d}.pt").read_bytes()
    manifest = (tmp_path / f"step_{1:012d}.json").read_bytes()
    for name in theirs:
        (tmp_path / name).write_bytes(manifest if name.endswith(".json") else content)
    for steps in range(2, 7):
        save(tmp_path, steps, best=True)
    state, path = checkpoint.load_newest(tmp_path, warn=warnings.append, **IDENTITY)
    assert (state["steps"], path.name) == (6, f"step_{6:012d}.pt")
    for _ in range(2):  # the second time deletes what the first has set aside
        checkpoint.set_aside_newer(tmp_path / f"step_{4:012d}.pt")
    assert {path.name for path in tmp_path.iterdir()} >= set(theirs)
    assert len(list(tmp_path.iterdir())) == len(theirs) + 4, "a step, the best as of it, and their manifests"


# ---- a crash or a full disk at any moment


def test_the_content_is_on_disk_before_its_name_and_its_name_before_its_manifest(tmp_path, monkeypatch):
    tape = []
    fsync, replace = os.fsync, os.replace

    def taped_fsync(descriptor):
        tape.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def taped_replace(source, target):
        tape.append(f"rename to {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", taped_fsync)
    monkeypatch.setattr(os, "replace", taped_replace)
    folder = tmp_path / "checkpoints"
    save(folder, 7)
    name = "step_000000000007"
    assert tape == [
        f"sync {tmp_path.name}",
        *(f"sync {name}.pt.tmp", f"sync {name}.json.tmp"),
        *(f"rename to {name}.pt", "sync checkpoints", f"rename to {name}.json", "sync checkpoints"),
    ]


@pytest.mark.parametrize(
    ("function", "calls_before"), [("fsync", 0), ("fsync", 1), ("fsync", 2), ("replace", 0), ("replace", 1)]
)
def test_a_save_that_fails_leaves_the_older_ones_and_no_litter(function, calls_before, tmp_path, monkeypatch, warnings):
    for steps in (1, 2, 3):
        save(tmp_path, steps, best=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, calls = getattr(os, function), []

    def disk_full(*args):
        calls.append(args)
        if len(calls) > calls_before:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, function, disk_full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 4, best=True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.items() <= after.items()
    assert not [name for name in after if name.endswith(".tmp")]
    state, _ = checkpoint.load_newest(tmp_path, warn=warnings.append, **IDENTITY)
    assert state["steps"] == 3
    assert not warnings


@pytest.mark.parametrize("calls_before", [0, 1])
def test_saving_again_at_the_same_step_on_a_full_disk_leaves_the_one_that_is_there(calls_before, tmp_path, monkeypatch):
    save(tmp_path, 4)
    real, calls = os.fsync, []

    def disk_full(descriptor):
        calls.append(descriptor)
        if len(calls) > calls_before:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, a_state(4) | {"reason": "other bytes"}, **IDENTITY)
    (path,) = checkpoint.list_checkpoints(tmp_path)
    assert "reason" not in load(path)


def test_a_disk_that_fills_up_in_the_middle_is_an_error_of_the_disk(tmp_path, monkeypatch):
    save(tmp_path, 1)
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    monkeypatch.setattr(Path, "open", lambda self, mode: full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [path.stem for path in checkpoint.list_checkpoints(tmp_path)] == ["step_000000000001"]


def test_the_best_is_kept_without_what_only_learning_needs(tmp_path):
    state = {**a_state(1), "extra": {"replay": {"frame": torch.zeros(1000)}}}
    path = checkpoint.save(tmp_path, state, best=True, **IDENTITY)
    (best,) = checkpoint.list_checkpoints(tmp_path, "best")
    assert set(load(path)) - set(load(best)) == {"extra"}


def test_what_a_killed_save_leaves_behind_is_no_checkpoint(tmp_path, warnings):
    """Temporary files, or content whose manifest was never written."""
    save(tmp_path, 1)
    for name in ("step_000000000002.pt.tmp", "step_000000000002.json.tmp", "step_000000000002.pt"):
        (tmp_path / name).write_bytes(b"half of ")
    state, path = checkpoint.load_newest(tmp_path, warn=warnings.append, **IDENTITY)
    assert (state["steps"], path.name) == (1, "step_000000000001.pt")
    assert not warnings, "nothing was lost that had been promised"
    save(tmp_path, 2)
    assert load(tmp_path / "step_000000000002.pt")["steps"] == 2, "it does not stand in the way either"


# ---- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit_of_a_weight(path):
    """The file stays a readable zip archive with a different number in it."""
    content = bytearray(path.read_bytes())
    weight = struct.pack("<3f", 7, 7, 7)
    position = content.index(weight)
    content[position] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "missing": Path.unlink,
    "truncated": truncate,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("these are not the weights you are looking for\n"),
    "a flipped bit": flip_a_bit_of_a_weight,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "no manifest": lambda path: path.with_suffix(".json").unlink(),
    "an empty manifest": lambda path: path.with_suffix(".json").write_bytes(b""),
    "a binary manifest": lambda path: path.with_suffix(".json").write_bytes(b"\xff\xfe\x00"),
    "a manifest of another kind": lambda path: path.with_suffix(".json").write_text("[1, 2]"),
    "a manifest without a sum": lambda path: path.with_suffix(".json").write_text('{"format": 1}'),
    "vouched for, empty": lambda path: forge(path, b""),
    "vouched for, text": lambda path: forge(path, b"these are not the weights you are looking for\n"),
    "vouched for, truncated": lambda path: forge(path, path.read_bytes()[:-100]),
    "vouched for, no net": lambda path: forge(path, torch_bytes({"steps": 7})),
    "vouched for, no dictionary": lambda path: forge(path, torch_bytes([1, 2])),
    "vouched for, no tensors": lambda path: forge(path, torch_bytes({"net": {"weight": "heavy"}})),
    "vouched for, NaN": lambda path: forge(path, torch_bytes({"net": {"weight": torch.tensor(float("nan"))}})),
    "vouched for, infinity": lambda path: forge(path, torch_bytes({"net": {"weight": torch.tensor(-torch.inf)}})),
    "a newer format": lambda path: forge(path, path.read_bytes(), format=checkpoint.FORMAT + 1),
    "no number for a format": lambda path: forge(path, path.read_bytes(), format="one"),
    "another algorithm": lambda path: forge(path, path.read_bytes(), algorithm="apex_dqn"),
    "another environment": lambda path: forge(path, path.read_bytes(), env_id="PongNoFrameskip-v4"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(damage, tmp_path):
    path = save(tmp_path, 7)
    assert load(path)["steps"] == 7
    damage(path)
    with pytest.raises(CheckpointError, match=path.stem):
        load(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_whatever_the_bytes_are_there_is_one_kind_of_error(tmp_path, content):
    path = save(tmp_path, 7)
    forge(path, content)
    with pytest.raises(CheckpointError, match=path.name):
        load(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("a flipped bit", "SHA-256"),
        ("a newer format", "written by another version of a3c-mp, in format 3; this version reads format 2"),
        ("another algorithm", "algorithm apex_dqn, not a3c_data"),
        ("another environment", "env_id PongNoFrameskip-v4, not CartPole-v1"),
        ("vouched for, NaN", "weight holds NaN or infinity"),
    ],
)
def test_the_refusal_says_why(damage, reason, tmp_path):
    path = save(tmp_path, 7)
    DAMAGE[damage](path)
    with pytest.raises(CheckpointError, match=reason):
        load(path)


class Malice:
    """Unpickled the usual way, it makes a file."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    trace = tmp_path / "executed"
    path = save(tmp_path / "checkpoints", 7)
    forge(path, torch_bytes({**a_state(7), "extra": Malice(trace)}))
    with pytest.raises(CheckpointError, match=path.name):
        load(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists(), "it would have been, read without care"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_never_saved(bad, tmp_path):
    save(tmp_path, 1)
    state = a_state(2)
    state["net"]["bias"][1] = bad
    with pytest.raises(CheckpointError, match="bias holds NaN or infinity"):
        checkpoint.save(tmp_path, state, **IDENTITY)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_000000000001.pt"]


# ---- the newest that can be read


@pytest.mark.parametrize("num_damaged", [0, 1, 2])
def test_the_newest_readable_one_is_taken_and_each_skipped_one_named(num_damaged, tmp_path, warnings):
    paths = [save(tmp_path, steps) for steps in (3, 2, 1)]
    for path in paths[:num_damaged]:
        truncate(path)
    state, path = checkpoint.load_newest(tmp_path, warn=warnings.append, **IDENTITY)
    assert (state["steps"], path) == (3 - num_damaged, paths[num_damaged])
    assert len(warnings) == num_damaged
    for warning, damaged in zip(warnings, paths, strict=False):
        assert str(damaged) in warning


def test_when_none_can_be_read_there_is_an_error_never_a_fresh_start(tmp_path, warnings):
    paths = [save(tmp_path, steps) for steps in (3, 2, 1)]
    for path in paths:
        truncate(path)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_newest(tmp_path, warn=warnings.append, **IDENTITY)
    assert str(paths[0]) in str(error.value), "the newest is named, in the one line that bad input has"
    assert str(error.value).endswith("; 2 older skipped too")
    assert warnings == []


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_checkpoints_is_an_error_that_names_it(folder, tmp_path, warnings):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=folder):
        checkpoint.load_newest(tmp_path / folder, warn=warnings.append, **IDENTITY)


# ---- the hash in the summary


def test_the_hash_of_weights_is_over_their_bytes_in_order():
    weights = {"b": torch.tensor([1.5, 2.5]), "a": torch.tensor(3.0), "half": torch.tensor([1.0]).bfloat16()}
    expected = np.array([1.5, 2.5, 3.0], np.float32).tobytes() + b"\x80\x3f"  # the upper half of float32's 1.0
    assert checkpoint.sha256_of_weights(weights) == hashlib.sha256(expected).hexdigest()


def test_the_hash_of_weights_sees_a_single_bit_and_not_the_memory_format():
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    weight[0, 0, 0, 0] = 0.0
    digest = checkpoint.sha256_of_weights({"weight": weight})
    assert checkpoint.sha256_of_weights({"weight": weight.to(memory_format=torch.channels_last)}) == digest
    weight[0, 0, 0, 0] = -0.0
    assert checkpoint.sha256_of_weights({"weight": weight}) != digest
