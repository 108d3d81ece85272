"""Whatever bytes lie where a checkpoint or the settings of a run should: only the documented errors come out.

In CI for seconds; with `-m slow` for `FUZZ_SECONDS` each, ten minutes unless the environment says otherwise.
"""

import dataclasses
import hashlib
import io
import json
import os
import time
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import train_apex
import train_impala
from a3c_mp.cli import parse_args
from a3c_mp.config import check_ranges
from a3c_mp.errors import CheckpointError, ConfigError
from a3c_mp.run import checkpoint

FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "600"))
ORIGIN = {"algorithm": "a3c_data", "env_id": "CartPole-v1"}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner), max_leaves=8)


def fuzz(test, examples, strategies, seconds=0.0):
    """Call `test` with examples of the strategies; with `seconds`, until they are over. Returns how many there were."""
    calls, deadline = [], time.monotonic() + seconds

    def count(**drawn):
        calls.append(1)
        test(**drawn)

    while True:
        quick = settings(deadline=None, max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
        seed(len(calls))(quick(given(**strategies)(count)))()
        if time.monotonic() >= deadline:
            return len(calls)


# ---- checkpoints


def a_checkpoint():
    """Bytes as `save` writes them."""
    file = io.BytesIO()
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    net = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2, dtype=torch.bfloat16)}
    torch.save({"net": net, "optimizer": optimizer, "steps": 7, "returns": [1.0]}, file)
    return file.getvalue()


WHOLE = a_checkpoint()


@st.composite
def damaged(draw):
    """A checkpoint with some bytes changed, cut out, put in or moved, or no checkpoint at all."""
    content = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 6))):
        at, length = draw(st.integers(0, max(len(content) - 1, 0))), draw(st.integers(0, 40))
        match draw(st.sampled_from(["change", "cut", "insert", "move", "truncate", "number"])):
            case "change" if content:
                content[at] ^= draw(st.integers(1, 255))
            case "cut":
                del content[at : at + length]
            case "insert":
                content[at:at] = draw(st.binary(max_size=40))
            case "move":
                content[at:at] = content[: length * 10]
            case "truncate":
                del content[at:]
            case "number":  # sizes and offsets
                number = draw(st.sampled_from([0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
                content[at : at + 8] = number.to_bytes(8, "little")
    return bytes(content)


def write(path, content, manifest):
    path.write_bytes(content)
    path.with_suffix(".json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))


def reads_checkpoint(path):
    def test(content, changes, manifest):
        vouched = {"format": checkpoint.FORMAT, **ORIGIN, "steps": 7, "sha256": hashlib.sha256(content).hexdigest()}
        write(path, content, vouched | changes if manifest is None else manifest)
        try:
            state = checkpoint.load(path, **ORIGIN)
        except CheckpointError as error:
            refusal = str(error)
        else:
            refusal = str(path)
            assert all(torch.isfinite(tensor).all() for tensor in state["net"].values())
        assert str(path) in refusal

    return test


CHANGES = st.just({}) | st.dictionaries(st.sampled_from(["format", "algorithm", "env_id", "sha256", "steps"]), JSON)
MANIFESTS = (
    st.none() | st.none() | st.none() | JSON | st.text() | st.sampled_from(["[" * 10**5, '{"format": ' + 5000 * "9"])
)
CHECKPOINTS = {"content": damaged() | st.binary(max_size=200), "changes": CHANGES, "manifest": MANIFESTS}


def test_bytes_in_the_place_of_a_checkpoint_are_read_or_refused(tmp_path):
    write(
        tmp_path / "step_7.pt",
        WHOLE,
        {"format": checkpoint.FORMAT, **ORIGIN, "sha256": hashlib.sha256(WHOLE).hexdigest()},
    )
    assert checkpoint.load(tmp_path / "step_7.pt", **ORIGIN)["steps"] == 7, "undamaged it can be read"
    with warnings.catch_warnings(action="ignore"):
        fuzz(reads_checkpoint(tmp_path / "step_7.pt"), 150, CHECKPOINTS)


@pytest.mark.slow
@pytest.mark.timeout(2 * FUZZ_SECONDS + 600)
def test_bytes_in_the_place_of_a_checkpoint_for_long(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        print(fuzz(reads_checkpoint(tmp_path / "step_7.pt"), 1000, CHECKPOINTS, FUZZ_SECONDS), "checkpoints")


# ---- settings

FLAGS = sorted({field.name for args in (train_apex.Args, train_impala.Args) for field in dataclasses.fields(args)})
NUMBERS = st.integers(-5, 5000) | st.floats() | st.sampled_from(["1e6", "nan", "-1", "1_000", "inf", "0x10", ""])
SETTINGS = st.dictionaries(st.sampled_from(FLAGS) | st.text(max_size=8), SCALARS | NUMBERS | JSON, max_size=5)


def reads_settings(folder, chapters):
    def test(chapter, changed, dropped, instead):
        module, good = chapters[chapter]
        saved = {name: value for name, value in {**good, **changed}.items() if name not in dropped}
        content = json.dumps({"algorithm": chapter, "args": saved}) if instead is None else instead
        (folder / "config.json").write_bytes(
            content if isinstance(content, bytes) else content.encode(errors="replace")
        )
        try:
            args = parse_args(module.Args, module.PRESETS, "", ["--resume", str(folder)])
        except ConfigError as error:
            refusal = str(error)
        else:
            refusal = "none"
            check_ranges(args)
        assert refusal
        assert "\n" not in refusal

    return test


def settings_of_chapters():
    """chapter -> (module, settings as config.json holds them)"""
    modules = {"apex_dqn": train_apex, "impala": train_impala}
    return {
        name: (module, {k: v for k, v in dataclasses.asdict(module.Args()).items() if k not in ("runs_dir", "resume")})
        for name, module in modules.items()
    }


INSTEAD = st.none() | st.none() | st.none() | st.binary(max_size=50) | JSON.map(json.dumps)
PAIRS = st.lists(st.tuples(SCALARS, SCALARS), max_size=3).map(lambda pairs: json.dumps({"args": pairs}))
CONFIGS = {
    "chapter": st.sampled_from(["apex_dqn", "impala"]),
    "changed": SETTINGS,
    "dropped": st.sets(st.sampled_from(FLAGS), max_size=5),
    "instead": INSTEAD | PAIRS | st.sampled_from(["[" * 10**5, '{"args": ' * 10**5]),
}


def test_whatever_stands_in_the_place_of_settings_is_taken_or_refused(tmp_path):
    chapters = settings_of_chapters()
    for chapter in chapters:
        reads_settings(tmp_path, chapters)(chapter, {}, set(), None)
    fuzz(reads_settings(tmp_path, chapters), 60, CONFIGS)


@pytest.mark.slow
@pytest.mark.timeout(2 * FUZZ_SECONDS + 600)
def test_whatever_stands_in_the_place_of_settings_for_long(tmp_path):
    print(fuzz(reads_settings(tmp_path, settings_of_chapters()), 200, CONFIGS, FUZZ_SECONDS), "settings")
