"""Whatever bytes lie where a checkpoint or the settings of a run should: only the documented errors come out.

In CI for seconds; with `-m slow` for `FUZZ_SECONDS` each, ten minutes unless the environment says otherwise.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import os
import time
import warnings

import pytest
import torch
from harness import APEX_DQN, IMPALA
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from a3c_mp.cli import parse_args
from a3c_mp.config import FORMAT, check_ranges
from a3c_mp.errors import CheckpointError, ConfigError
from a3c_mp.run import checkpoint

FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "600"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner), max_leaves=8)
FOR_LONG = [pytest.mark.slow, pytest.mark.timeout(2 * FUZZ_SECONDS + 600)]
HOW_LONG = pytest.mark.parametrize("seconds", [0, pytest.param(FUZZ_SECONDS, marks=FOR_LONG)])


def fuzz(test, examples, strategies, seconds):
    """Call `test` with examples of the strategies; with `seconds`, until they are over."""
    rounds, deadline = itertools.count(), time.monotonic() + seconds
    quick = settings(deadline=None, max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    while True:
        seed(next(rounds))(quick(given(**strategies)(test)))()
        if time.monotonic() >= deadline:
            return


# ---- checkpoints

ORIGIN = {"algorithm": "a3c_data", "env_id": "CartPole-v1"}
torch.save(
    {
        "net": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "steps": 7,
        "returns": [1.0],
    },
    file := io.BytesIO(),
)
WHOLE = file.getvalue()
"""a checkpoint as `save` writes it"""


@st.composite
def damaged(draw):
    """A checkpoint with some bytes changed, cut out, put in or moved, or no checkpoint at all."""
    content = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 6))):
        at, length = draw(st.integers(0, max(len(content) - 1, 0))), draw(st.integers(0, 40))
        kind = draw(st.sampled_from(["replace", "insert", "move", "truncate", "number"]))
        number = draw(st.sampled_from([0, 1, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        new = {"truncate": b"", "move": content[: length * 10], "number": number.to_bytes(8, "little")}
        end = {"insert": at, "move": at, "truncate": len(content), "number": at + 8}.get(kind, at + length)
        content[at:end] = new[kind] if kind in new else draw(st.binary(max_size=40))
    return bytes(content)


CHECKPOINTS = {
    "content": damaged() | st.binary(max_size=200),
    "changes": st.just({}) | st.dictionaries(st.sampled_from(["format", *ORIGIN, "sha256", "steps"]), JSON),
    "manifest": st.none() | st.none() | JSON | st.text() | st.sampled_from(["[" * 10**5, '{"format": ' + 5000 * "9"]),
}


@HOW_LONG
def test_bytes_in_the_place_of_a_checkpoint_are_read_or_refused(tmp_path, seconds):
    path = tmp_path / "step_7.pt"

    def read(content, changes, manifest):
        vouched = {"format": FORMAT, **ORIGIN, "steps": 7, "sha256": hashlib.sha256(content).hexdigest()} | changes
        manifest = vouched if manifest is None else manifest
        path.write_bytes(content)
        path.with_suffix(".json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
        try:
            state = checkpoint.load(path, **ORIGIN)
        except CheckpointError as error:
            refusal = str(error)
        else:
            refusal = f"{path}"
            assert all(torch.isfinite(tensor).all() for tensor in state["net"].values())
        assert str(path) in refusal

    read(WHOLE, {}, None)
    assert checkpoint.load(path, **ORIGIN)["steps"] == 7, "undamaged it can be read"
    with warnings.catch_warnings(action="ignore"):
        fuzz(read, 1000 if seconds else 150, CHECKPOINTS, seconds)


# ---- settings

CHAPTERS = {chapter.algorithm: chapter for chapter in (APEX_DQN, IMPALA)}
FLAGS = sorted({field.name for chapter in CHAPTERS.values() for field in dataclasses.fields(chapter.args_class)})
NUMBERS = st.integers(-5, 5000) | st.floats() | st.sampled_from(["1e6", "nan", "-1", "1_000", "inf", "0x10", ""])
PAIRS = st.lists(st.tuples(SCALARS, SCALARS), max_size=3).map(lambda pairs: json.dumps({"args": pairs}))
INSTEAD = st.binary(max_size=50) | JSON.map(json.dumps) | PAIRS | st.sampled_from(["[" * 10**5, '{"args": ' * 10**5])
CONFIGS = {
    "chapter": st.sampled_from(sorted(CHAPTERS)),
    "changed": st.dictionaries(st.sampled_from(FLAGS) | st.text(max_size=8), SCALARS | NUMBERS | JSON, max_size=5),
    "dropped": st.sets(st.sampled_from(FLAGS), max_size=5),
    "instead": st.none() | st.none() | INSTEAD,
}


@HOW_LONG
def test_whatever_stands_in_the_place_of_settings_is_taken_or_refused(tmp_path, seconds):
    def read(chapter, changed, dropped, instead):
        args_class, presets = CHAPTERS[chapter].settings
        saved = {**dataclasses.asdict(args_class()), **changed}
        saved = {name: value for name, value in saved.items() if name not in {"runs_dir", "resume", *dropped}}
        content = json.dumps({"format": FORMAT, "algorithm": chapter, "args": saved}) if instead is None else instead
        content = content if isinstance(content, bytes) else content.encode(errors="replace")
        (tmp_path / "config.json").write_bytes(content)
        refusal = ""
        try:
            check_ranges(parse_args(args_class, presets, "", ["--resume", str(tmp_path)]))
        except ConfigError as error:
            refusal = str(error)
        assert "\n" not in refusal
        assert not refusal or changed or dropped or instead is not None, "undamaged they are taken"

    for chapter in CHAPTERS:
        read(chapter, {}, set(), None)
    fuzz(read, 200 if seconds else 60, CONFIGS, seconds)
