"""Whatever bytes lie where a checkpoint or the settings of a run should: only the documented errors come out.

With `FUZZ_EXAMPLES=100` in the environment, 100 times as many examples are tried, and other ones each time.
"""

import dataclasses
import hashlib
import io
import json
import os

import pytest
import torch
from harness import APEX_DQN, IMPALA
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from a3c_mp.cli import parse_args
from a3c_mp.config import FORMAT, check_ranges
from a3c_mp.errors import CheckpointError, ConfigError
from a3c_mp.run import checkpoint

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner), max_leaves=8)
TIMES = int(os.environ.get("FUZZ_EXAMPLES", "1"))
QUICK = settings(deadline=None, database=None, derandomize=TIMES == 1, suppress_health_check=list(HealthCheck))


# ---- checkpoints

ORIGIN = {"algorithm": "a3c_data", "env_id": "CartPole-v1"}
STATE = {
    "net": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2, dtype=torch.bfloat16)},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    "steps": 7,
}
torch.save(STATE, file := io.BytesIO())
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


def read(path, content, changes=(), manifest=None):
    vouched = {"format": FORMAT, **ORIGIN, "steps": 7, "sha256": hashlib.sha256(content).hexdigest(), **dict(changes)}
    manifest = vouched if manifest is None else manifest
    path.write_bytes(content)
    path.with_suffix(".json").write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    return checkpoint.load(path, **ORIGIN)


@settings(QUICK, max_examples=150 * TIMES)
@given(**CHECKPOINTS)
@pytest.mark.filterwarnings("ignore")
def test_bytes_in_the_place_of_a_checkpoint_are_read_or_refused(tmp_path, content, changes, manifest):
    path, refusal = tmp_path / "step_7.pt", None
    try:
        state = read(path, content, changes, manifest)
        assert all(torch.isfinite(tensor).all() for tensor in state["net"].values())
    except CheckpointError as error:
        refusal = str(error)
    assert refusal is None or str(path) in refusal


def test_an_undamaged_checkpoint_is_read(tmp_path):
    assert read(tmp_path / "step_7.pt", WHOLE)["steps"] == 7


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


@settings(QUICK, max_examples=60 * TIMES)
@given(**CONFIGS)
@example("apex_dqn", {}, set(), None)
@example("impala", {}, set(), None)
def test_whatever_stands_in_the_place_of_settings_is_taken_or_refused(tmp_path, chapter, changed, dropped, instead):
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
