"""Encoding of messages: round trips of random values, and refusal of everything that `encode` did not make."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

import a3c_mp.task
from a3c_mp.task import wire
from a3c_mp.task.wire import WireError, decode, encode

SHAPES = st.lists(st.integers(0, 4), max_size=4)
TENSORS = st.builds(
    lambda shape, name: torch.arange(math.prod(shape)).reshape(shape).to(wire.DTYPES[name]),
    SHAPES, st.sampled_from(sorted(wire.DTYPES)),
)  # fmt: skip
JSON = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    JSON | TENSORS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


def same(a, b):
    if isinstance(a, list | dict):
        keys = range(len(a)) if isinstance(a, list) else a.keys()
        return type(a) is type(b) and len(a) == len(b) and all(same(a[key], b[key]) for key in keys)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a == b


def received(event, args):
    """Event and arguments as they arrive."""
    return decode([zmq.Frame(frame.bytes) for frame in encode(event, args)])


@given(st.text(), st.lists(VALUES, max_size=3))
def test_events_arrive_as_they_were(event, args):
    assert same(list(received(event, args)), [event, args])


TEXT = '{"$tensor": [0, "float32", [2]]}'


@pytest.mark.parametrize(
    ("sent", "arrived"),
    [
        ((1, {"2": 0.5}, math.inf), [1, {"2": 0.5}, math.inf]),
        ([TEXT, torch.zeros(1)], [TEXT, torch.zeros(1)]),
        *((strided, strided.contiguous()) for strided in (torch.arange(12).view(3, 4).T, torch.ones(2).expand(3, 2))),
    ],
    ids=["as in JSON", "text that looks like a tensor", "columns", "expanded"],
)
def test_what_changes_on_its_way_and_what_does_not(sent, arrived):
    assert same(received("event", [sent])[1], [arrived])


OF_NO_TYPE = [
    b"bytes", {1, 2}, np.zeros(2), torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse(),
    *({2: 0.5}, [({"a": {None: 1}},)]),  # JSON would make strings of these keys
]  # fmt: skip
TOO_LARGE = ["x" * wire.MAX_JSON, [torch.zeros(1)] * (wire.MAX_TENSORS + 1), torch.zeros(1).expand(wire.MAX_TENSOR)]
RESERVED = [{"$tensor": 1}, [torch.zeros(2), {"$tensor": [0, "float32", [2]]}]]


@pytest.mark.parametrize(("error", "values"), [(TypeError, OF_NO_TYPE), (ValueError, TOO_LARGE + RESERVED)])
def test_what_cannot_be_sent_is_refused(error, values):
    for value in values:
        with pytest.raises(error):
            encode("event", [value])


def tensor(*fields):
    return json.dumps(["event", [{"$tensor": fields}]]).encode()


BAD = {
    "no event": [b"[1, []]"],
    "no arguments": [b'["event", {}]'],
    "no JSON": [b"\x80\x04\x95"],
    "no UTF-8": [b"\xff\xfe"],
    "nested too deeply": [b"[" * 100_000],
    "huge integer": [b"1" * 5000],
    "too long": [b" " * (wire.MAX_JSON + 1)],
    "frames without tensors": [b'["event", []]', b""],
    "too many frames": [b'["event", []]', *[b""] * (wire.MAX_TENSORS + 1)],
    "no frame for a tensor": [tensor(0, "uint8", [1])],
    "a frame twice": [b'["event", [%s]]' % b", ".join([b'{"$tensor": [0, "uint8", [1]]}'] * 2), b"1"],
    "negative number": [tensor(-1, "uint8", [1]), b"1"],
    "number that is a bool": [tensor(False, "uint8", [1]), b"1"],
    "other keys": [b'["event", [{"$tensor": [0, "uint8", [1]], "a": 1}]]', b"1"],
    "fields missing": [tensor(0, "uint8"), b"1"],
    "unknown dtype": [tensor(0, "complex64", [1]), b"12345678"],
    "dtype of objects": [tensor(0, "object", [1]), b"12345678"],
    "dtype that is a list": [tensor(0, ["uint8"], [1]), b"1"],
    "too few bytes": [tensor(0, "float32", [2]), b"1234567"],
    "too many bytes": [tensor(0, "float32", [2]), b"123456789"],
    "negative size": [tensor(0, "uint8", [-1, -1]), b"1"],
    "size that is no integer": [tensor(0, "uint8", [1.0]), b"1"],
    "sizes beyond memory": [tensor(0, "uint8", [0, 2**63, 2**63]), b""],
    "too many dimensions": [tensor(0, "uint8", [1] * 33), b"1"],
}


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD.keys())
def test_malformed_frames_are_refused(frames):
    with pytest.raises(WireError, match=r"^malformed message"):
        decode([zmq.Frame(frame) for frame in frames])


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_random_frames_are_refused_or_hold_json(frames):
    try:
        decode([zmq.Frame(frame) for frame in frames])
    except WireError:
        return
    assert type(json.loads(frames[0])[0]) is str


def test_nothing_that_arrives_can_be_executed():
    """No file of the folder names a module or function that runs what it reads."""
    dangerous = re.compile(r"pickle|marshal|shelve|\beval\(|\bexec\(|torch\.load|recv_pyobj|recv_serialized")
    for path in Path(a3c_mp.task.__file__).parent.glob("*.py"):
        assert not dangerous.findall(path.read_text()), path
