"""Checkpoints are whole or not there; what cannot be trusted is refused by name, and nothing in it is executed."""

import hashlib
import io
import json
import os
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from a3c_mp.errors import CheckpointError, ConfigError
from a3c_mp.run import checkpoint
from a3c_mp.run.checkpoint import list_checkpoints, set_aside_newer, sha256_of_weights
from a3c_mp.run.checkpointer import check_parts

ORIGIN = {"algorithm": "a3c_data", "env_id": "CartPole-v1"}


def a_state(steps=0):
    return {"net": {"weight": torch.full((3,), float(steps)), "bias": torch.zeros(2)}, "steps": steps}


def save(folder, steps, best=False):
    """As a run does: the best one first."""
    if best:
        checkpoint.save(folder, a_state(steps), "best", **ORIGIN)
    return checkpoint.save(folder, a_state(steps), **ORIGIN)


def load(path):
    return checkpoint.load(path, **ORIGIN)


def load_newest(folder, warn=pytest.fail):
    return checkpoint.load_newest(folder, lambda state, path: None, warn, **ORIGIN)


def name_of(steps):
    return f"step_{steps:012d}.pt"


def steps_of(folder, kind="step"):
    return [load(path)["steps"] for path in list_checkpoints(folder, kind)]


def forge(path, content, **changes):
    """Put bytes in the place of a checkpoint, with a manifest that vouches for them."""
    path.write_bytes(content)
    manifest = json.loads(path.with_suffix(".json").read_text())
    manifest |= {"sha256": hashlib.sha256(content).hexdigest(), **changes}
    path.with_suffix(".json").write_text(json.dumps(manifest))


def torch_bytes(state):
    torch.save(state, buffer := io.BytesIO())
    return buffer.getvalue()


# ---- what is saved is loaded


def test_the_hash_is_that_of_the_file_also_where_the_state_changes_meanwhile(tmp_path, monkeypatch):
    """Actors append to a replay while it is saved."""
    state, write = a_state(7), torch.save

    def save_and_change(state, file):
        write(state, file)
        state["net"]["weight"].add_(1)

    monkeypatch.setattr(torch, "save", save_and_change)
    path = checkpoint.save(tmp_path, state, **ORIGIN)
    assert load(path)["net"]["weight"].tolist() == [7.0] * 3


@pytest.mark.parametrize("value", [np.zeros(2), np.float64(1.0), Path("a")], ids=str)
def test_a_part_that_could_not_be_read_again_is_refused_by_name(value):
    check_parts({"plain": {"a": [torch.ones(2), (1, "b")], "c": OrderedDict(d=None)}})
    with pytest.raises(ConfigError, match=r"^saved=mine: its state_dict has \S+ that a checkpoint could not give back"):
        check_parts({"mine": {"a": [value]}})


def test_a_restored_optimizer_keeps_no_file_mapped(tmp_path):
    """Else the gigabytes of a pruned checkpoint with a replay would stay on the disk until the run ends."""
    net = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters())
    torch.optim.lr_scheduler.LinearLR(optimizer)  # it adds a name to the settings
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "steps": 3}
    state = load(path := checkpoint.save(tmp_path, state, **ORIGIN))
    assert str(path) in Path("/proc/self/maps").read_text(), "a loaded file is mapped"
    restored = torch.optim.Adam(nn.Linear(4, 3).parameters())
    restored.param_groups[0]["lr_factor"] = 0.5  # which the saved one did not have
    checkpoint.restore_optimizer(restored, state["optimizer"])
    del state
    assert str(path) not in Path("/proc/self/maps").read_text()
    for own, theirs in zip(restored.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(own[name], theirs[name]) for name in theirs)


# ---- which are kept


def test_the_last_three_are_kept_and_the_best_as_of_each_of_them(tmp_path):
    for steps in (1, 2, 5, 40, 300, 2_000):  # in order of steps, not of letters
        save(tmp_path, steps, best=steps in (1, 2, 40))
    assert (steps_of(tmp_path), steps_of(tmp_path, "best")) == ([2_000, 300, 40], [40])
    for steps in (10_000, 10_001):
        save(tmp_path, steps, best=steps == 10_000)
    assert (steps_of(tmp_path), steps_of(tmp_path, "best")) == ([10_001, 10_000, 2_000], [10_000, 40])
    assert len(list(tmp_path.iterdir())) == 10
    set_aside_newer(tmp_path / name_of(2_000))
    assert steps_of(tmp_path, "best") == [40]


def test_files_that_a_user_has_put_beside_checkpoints_are_neither_resumed_from_nor_deleted(tmp_path):
    digits = f"{9:012d}"
    names = [f"{kind}_{middle}" for kind in ("step", "best") for middle in ("keep", f"{digits}0", f"{digits}_copy")]
    theirs = [f"{name}.{end}" for name in names for end in ("pt", "json")]
    theirs += ["notes.tmp", "step_keep.pt.tmp", "old.unused", f"net_{digits}.pt", f"step_{digits}.bak"]
    path = save(tmp_path, 1, best=True)
    for name in theirs:
        (tmp_path / name).write_bytes((path.with_suffix(".json") if name.endswith(".json") else path).read_bytes())
    for steps in range(2, 7):
        save(tmp_path, steps, best=True)
    assert load_newest(tmp_path).name == name_of(6)
    (tmp_path / f"{name_of(5)}.tmp").touch()  # a killed attempt has left it; it goes with what is set aside
    for left in (8, 0):  # the second time deletes what the first has set aside: two steps, the best as of each
        set_aside_newer(tmp_path / name_of(4))
        assert len({path.name for path in tmp_path.glob("*.unused")} - set(theirs)) == left
    assert {path.name for path in tmp_path.iterdir()} >= set(theirs)
    assert len(list(tmp_path.iterdir())) == len(theirs) + 4, "a step, the best as of it, and their manifests"


# ---- a crash or a full disk at any moment


def test_the_content_is_on_disk_before_its_name_and_its_name_before_its_manifest(tmp_path, monkeypatch):
    tape, fsync, replace = [], os.fsync, os.replace

    def taped_fsync(descriptor):
        tape.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def taped_replace(source, target):
        tape.append(f"rename to {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", taped_fsync)
    monkeypatch.setattr(os, "replace", taped_replace)
    name = save(tmp_path / "checkpoints", 7).stem
    assert tape == [
        *(f"sync {name}.pt.tmp", f"sync {name}.json.tmp"),
        *(f"rename to {name}.pt", "sync checkpoints", f"rename to {name}.json", "sync checkpoints"),
    ]


@pytest.mark.parametrize(
    ("function", "calls"), [("fsync", 0), ("fsync", 1), ("fsync", 2), ("replace", 0), ("replace", 1)]
)
def test_a_save_that_fails_leaves_the_older_ones_and_no_litter(function, calls, tmp_path, monkeypatch):
    for old in (1, 2, 3):
        save(tmp_path, old, best=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, made = getattr(os, function), []

    def disk_full(*args):
        made.append(args)
        if len(made) > calls:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, function, disk_full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 4)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert not [name for name in after if name.endswith(".tmp")]
    assert before.items() <= after.items()
    assert load_newest(tmp_path).name == name_of(3)


# ---- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit_of_a_weight(path):
    """The file stays a readable zip archive with a different number in it."""
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<3f", 7, 7, 7))] ^= 1
    path.write_bytes(content)


def vouched(state):
    return lambda path: forge(path, state if isinstance(state, bytes) else torch_bytes(state))


def changed(**manifest):
    return lambda path: forge(path, path.read_bytes(), **manifest)


DAMAGE = {
    "missing": (Path.unlink, "cannot be read"),
    "truncated": (truncate, "SHA-256"),
    "empty": (lambda path: path.write_bytes(b""), "SHA-256"),
    "text": (lambda path: path.write_text("these are not the weights you are looking for\n"), "SHA-256"),
    "a flipped bit": (flip_a_bit_of_a_weight, "SHA-256"),
    "no manifest": (lambda path: path.with_suffix(".json").unlink(), "cannot be read"),
    "vouched for, truncated": (lambda path: forge(path, path.read_bytes()[:-100]), "cannot be read"),
    "vouched for, NaN": (vouched({"net": {"weight": torch.tensor(float("nan"))}}), "weight holds NaN or infinity"),
    "the format of a3c-mp 0.1": (changed(format=1), "written by a3c-mp 0.1, in format 1; this version reads format 3"),
    "a newer format": (changed(format=4), "written by another version of a3c-mp, in format 4"),
    "another algorithm": (changed(algorithm="apex_dqn"), "algorithm apex_dqn, not a3c_data"),
    "another environment": (changed(env_id="PongNoFrameskip-v4"), "env_id PongNoFrameskip-v4, not CartPole-v1"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(damage, reason, tmp_path):
    path = save(tmp_path, 7)
    assert load(path)["steps"] == 7
    damage(path)
    with pytest.raises(CheckpointError, match=rf"{path.stem}.*{reason}"):
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


@pytest.mark.parametrize("kind", ["step", "best"])
def test_weights_that_are_not_finite_are_never_saved(kind, tmp_path):
    save(tmp_path, 1, best=True)
    state = a_state(2)
    state["net"]["bias"][1] = -torch.inf
    with pytest.raises(CheckpointError, match="the weights to be saved: bias holds NaN or infinity"):
        checkpoint.save(tmp_path, state, kind, **ORIGIN)
    assert steps_of(tmp_path, kind) == [1]


# ---- the newest that can be read


@pytest.mark.parametrize("num_damaged", [0, 1, 2])
def test_the_newest_readable_one_is_taken_and_each_skipped_one_named(num_damaged, tmp_path):
    paths, warnings = [save(tmp_path, steps) for steps in (3, 2, 1)], []
    for path in paths[:num_damaged]:
        truncate(path)
    assert load_newest(tmp_path, warnings.append) == paths[num_damaged]
    assert len(warnings) == num_damaged
    assert all(str(path) in warning for path, warning in zip(paths, warnings, strict=False))


@pytest.mark.parametrize("folder", ["damaged", "missing"])
def test_there_is_never_a_fresh_start(folder, tmp_path):
    for steps in (3, 2, 1):
        truncate(save(tmp_path / "damaged", steps))
    why = rf"{name_of(3)} is damaged.*; 2 older skipped too$" if folder == "damaged" else "missing holds no checkpoint"
    with pytest.raises(CheckpointError, match=why):
        load_newest(tmp_path / folder)


# ---- the hash in the summary


def test_the_hash_of_weights_is_over_their_bytes_in_order_and_not_over_the_memory_format():
    weights = {"b": torch.tensor([1.5, 2.5]), "a": torch.tensor(3.0), "half": torch.tensor([1.0]).bfloat16()}
    expected = np.array([1.5, 2.5, 3.0], np.float32).tobytes() + b"\x80\x3f"  # the upper half of float32's 1.0
    assert sha256_of_weights(weights) == hashlib.sha256(expected).hexdigest()
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    digest = sha256_of_weights({"weight": weight})
    assert sha256_of_weights({"weight": weight.to(memory_format=torch.channels_last)}) == digest
