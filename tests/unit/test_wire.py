"""Encoding of messages: round trips of random values, and refusal of everything that `encode` did not make."""

import json
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
from a3c_mp.task.wire import Envelope, WireError, decode, decode_envelope, encode, encode_envelope

SHAPES = st.lists(st.integers(0, 4), max_size=4)
TENSORS = st.builds(
    lambda shape, name, seed: torch.from_numpy(np.random.default_rng(seed).integers(0, 2, shape)).to(wire.DTYPES[name]),
    SHAPES,
    st.sampled_from(sorted(wire.DTYPES)),
    st.integers(0, 9),
)
ARRAYS = TENSORS.filter(lambda tensor: tensor.dtype is not torch.bfloat16).map(torch.Tensor.numpy)
JSON = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    JSON | TENSORS | ARRAYS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


def same(a, b):
    if isinstance(a, list | dict):
        keys = range(len(a)) if isinstance(a, list) else a.keys()
        return type(a) is type(b) and len(a) == len(b) and all(same(a[key], b[key]) for key in keys)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return type(a) is type(b) and a == b


@given(VALUES, st.booleans())
def test_values_arrive_as_they_were(value, copy):
    frames = [zmq.Frame(frame.bytes) for frame in encode(value)]
    assert same(decode(frames, copy=copy), value)


def test_what_json_changes():
    assert decode(encode((1, {2: np.float32(0.5), "b": np.bool_(True)}))) == [1, {"2": 0.5, "b": True}]
    assert decode(encode([float("inf"), float("-inf")])) == [float("inf"), float("-inf")]


@pytest.mark.parametrize("strided", [torch.arange(12).view(3, 4).T, torch.arange(12)[::3], torch.ones(2).expand(3, 2)])
def test_tensors_of_any_memory_layout_are_sent(strided):
    assert same(decode(encode(strided)), strided.contiguous())
    assert same(decode(encode(strided.numpy())), strided.numpy())
    swapped = strided.numpy().astype(">i4")
    assert same(decode(encode(swapped)), swapped.astype("<i4"))


def test_a_message_keeps_the_values_that_tensors_had_when_it_was_made():
    weights = torch.ones(5, requires_grad=True)
    frames = encode(weights)
    weights.data.zero_()
    assert decode(frames).tolist() == [1] * 5


def test_received_tensors_can_be_written_and_copies_leave_the_frames_alone():
    frames = encode(torch.zeros(100_000))
    decode(frames, copy=True).fill_(1)
    received = decode(frames)
    assert received.sum() == 0
    received.fill_(2)
    assert decode(frames).sum() == 200_000, "it uses the frame's memory"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"bytes", TypeError),
        ({1, 2}, TypeError),
        (1j, TypeError),
        (np.array(["text"]), TypeError),
        (np.array([None]), TypeError),
        (torch.zeros(2, dtype=torch.complex64), TypeError),
        (torch.eye(2).to_sparse(), TypeError),
        ({"$tensor": 1}, ValueError),
        ([torch.zeros(2), {"$tensor": [0, "torch", "float32", [2]]}], ValueError),
        ("x" * wire.MAX_JSON, ValueError),
        ([torch.zeros(1)] * (wire.MAX_TENSORS + 1), ValueError),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_cannot_be_sent_is_refused(value, error):
    with pytest.raises(error):
        encode(value)


def test_text_that_looks_like_a_tensor_is_text():
    text = '{"$tensor": [0, "torch", "float32", [2]]}'
    assert decode(encode([text, torch.zeros(1)])) == [text, torch.zeros(1)]


def tensor(*fields):
    return json.dumps({"$tensor": fields}).encode()


BAD = {
    "no frame": [],
    "no JSON": [b"\x80\x04\x95"],
    "no UTF-8": [b"\xff\xfe"],
    "nested too deeply": [b"[" * 100_000],
    "huge integer": [b"1" * 5000],
    "too long": [b" " * (wire.MAX_JSON + 1)],
    "frames without tensors": [b"[]", b""],
    "too many frames": [b"[]", *[b""] * (wire.MAX_TENSORS + 1)],
    "no frame for a tensor": [tensor(0, "torch", "uint8", [1])],
    "a frame twice": [b"[%s, %s]" % (2 * (tensor(0, "torch", "uint8", [1]),)), b"1"],
    "negative number": [tensor(-1, "torch", "uint8", [1]), b"1"],
    "number that is a bool": [tensor(False, "torch", "uint8", [1]), b"1"],
    "other keys": [b'{"$tensor": [0, "torch", "uint8", [1]], "a": 1}', b"1"],
    "fields missing": [tensor(0, "torch", "uint8"), b"1"],
    "unknown kind": [tensor(0, "jax", "uint8", [1]), b"1"],
    "unknown dtype": [tensor(0, "torch", "complex64", [1]), b"12345678"],
    "dtype of objects": [tensor(0, "numpy", "object", [1]), b"12345678"],
    "dtype that is a list": [tensor(0, "torch", ["uint8"], [1]), b"1"],
    "too few bytes": [tensor(0, "torch", "float32", [2]), b"1234567"],
    "too many bytes": [tensor(0, "torch", "float32", [2]), b"123456789"],
    "negative size": [tensor(0, "torch", "uint8", [-1, -1]), b"1"],
    "size that is no integer": [tensor(0, "torch", "uint8", [1.0]), b"1"],
    "sizes beyond memory": [tensor(0, "torch", "uint8", [0, 2**63, 2**63]), b""],
    "too many dimensions": [tensor(0, "torch", "uint8", [1] * 33), b"1"],
}


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD.keys())
def test_malformed_frames_are_refused(frames):
    with pytest.raises(WireError, match=r"^(malformed message|a message without content)"):
        decode([zmq.Frame(frame) for frame in frames])


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_random_frames_are_refused_or_hold_json(frames):
    try:
        decode([zmq.Frame(frame) for frame in frames])
    except WireError:
        return
    json.loads(frames[0])
    assert len(frames) == 1


@given(st.builds(Envelope, st.text(), st.text(), st.text(), st.integers(0, 2**40)))
def test_envelopes_arrive_as_they_were(envelope):
    assert decode_envelope(encode_envelope(envelope)) == envelope


@pytest.mark.parametrize(
    "frame", [b"", b"[]", b'["event", "a", "b"', b'["event", "a", 1, 0]', b'["event", "a", "b", true]', b" " * 9999]
)
def test_malformed_envelopes_are_refused(frame):
    with pytest.raises(WireError, match="malformed envelope"):
        decode_envelope(frame)


def test_nothing_that_arrives_can_be_executed():
    """No file of the folder names a module or function that runs what it reads."""
    dangerous = re.compile(
        r"pickle|marshal|\beval\(|\bexec\(|torch\.load|recv_pyobj|recv_serialized|allow_pickle|shelve"
    )
    for path in Path(a3c_mp.task.__file__).parent.glob("*.py"):
        assert not dangerous.findall(path.read_text().replace("can be pickled", "")), path
