"""Encoding of messages between nodes: JSON, then the bytes of each tensor in a frame of its own.

A message is a list of frames [envelope, content, tensor 0, tensor 1, ...]. The envelope says what the message is for,
from whom and to whom; a hub that relays reads nothing else. In the content a tensor stands as
{"$tensor": [number, kind, dtype, shape]}. What arrives is checked, and nothing in it is ever executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq

MAX_JSON = 4 * 2**20
"""bytes of the content of a message; larger things are tensors"""
MAX_TENSOR = 128 * 2**20
"""bytes of a tensor; a slot of Pong has 20 MiB"""
MAX_TENSORS = 1024
"""tensors in a message; the nets of this library have tens of parameters"""
MAX_DIMS = 32
"""dimensions of a tensor"""
MAX_ENVELOPE = 4096
"""bytes"""

DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
TENSOR, TORCH, NUMPY = "$tensor", "torch", "numpy"
PARSE_ERRORS = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, RuntimeError, MemoryError)
"""what parsers raise on malformed input"""


class WireError(Exception):
    """Frames that are no message; the text says what is wrong with them."""


class Message(NamedTuple):
    """An event that another node has sent."""

    sender: str  # name of the node, "node.1"
    event: str
    args: list  # JSON values, torch tensors and numpy arrays


class Envelope(NamedTuple):
    """First frame of a message."""

    kind: str
    sender: str  # name of a node
    to: str  # a pattern for names and labels of nodes
    request: int = 0  # number of a request, in itself and in its answer


def encode_envelope(envelope: Envelope) -> bytes:
    return json.dumps(envelope).encode()


def decode_envelope(frame: Any) -> Envelope:
    """Raises WireError."""
    try:
        if len(frame) > MAX_ENVELOPE:
            raise ValueError(f"{len(frame)} bytes")
        envelope = Envelope(*json.loads(bytes(frame)))
        if [type(field) for field in envelope] != [str, str, str, int]:
            raise ValueError("fields of other types")
        return envelope
    except PARSE_ERRORS as error:
        raise WireError(f"malformed envelope ({error})") from error


def encode(content: Any) -> list[zmq.Frame]:
    """Frames of JSON values, torch tensors and numpy arrays, nested in lists and dicts; all values are copied.

    As in JSON, tuples arrive as lists and keys as strings.

    Raises:
        TypeError: a value of another type.
        ValueError: too large, or a dict with the reserved key "$tensor".
    """
    tensors: list[zmq.Frame] = []

    def pack(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        kind, name, data = _raw(value)
        if len(data) > MAX_TENSOR:
            raise ValueError(f"a tensor of {len(data):,} bytes is too large for one message; split it")
        tensors.append(zmq.Frame(data, copy=True))
        return {TENSOR: [len(tensors) - 1, kind, name, list(value.shape)]}

    text = json.dumps(content, default=pack).encode()
    if len(text) > MAX_JSON or len(tensors) > MAX_TENSORS:
        raise ValueError(f"a message of {len(text):,} bytes of JSON and {len(tensors)} tensors is too large; split it")
    if text.count(f'"{TENSOR}":'.encode()) != len(tensors):
        raise ValueError(f"the key {TENSOR!r} is reserved")
    return [zmq.Frame(text, copy=True), *tensors]


def decode(frames: Sequence[zmq.Frame], copy: bool = False) -> Any:
    """The values that `encode` made the frames of.

    Args:
        frames: tensors use their memory.
        copy: tensors get memory of their own, where the frames are also sent on to other nodes.

    Raises:
        WireError: not from `encode`: no JSON, a dtype not in `DTYPES`, sizes that do not match, too many frames.
    """
    if not frames:
        raise WireError("a message without content")
    content, *tensors = frames
    missing = set(range(len(tensors)))

    def unpack(mapping: dict) -> Any:
        if TENSOR not in mapping:
            return mapping
        (number, kind, name, shape), *others = mapping.values()
        if others or type(number) is not int or number not in missing:
            raise ValueError("a tensor without a frame of its own")
        missing.remove(number)
        return _tensor(tensors[number], kind, name, shape, copy)

    try:
        if len(content) > MAX_JSON or len(tensors) > MAX_TENSORS:
            raise ValueError(f"{len(content):,} bytes of JSON and {len(tensors)} tensors")
        values = json.loads(content.bytes, object_hook=unpack)
        if missing:
            raise ValueError("more frames than tensors")
        return values
    except PARSE_ERRORS as error:
        raise WireError(f"malformed message ({type(error).__name__}: {error})"[:300]) from error


def num_bytes(frames: Sequence[Any]) -> int:
    return sum(map(len, frames))


def _raw(value: Any) -> tuple[str, str, Any]:
    """Kind, dtype and bytes of a tensor or array."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        kind, name = TORCH, str(value.dtype).removeprefix("torch.")
    elif isinstance(value, np.ndarray):
        kind, name = NUMPY, value.dtype.name
    else:
        raise TypeError(f"{type(value).__name__} cannot be sent to another node")
    if name not in DTYPES:
        raise TypeError(f"{kind} dtype {name} cannot be sent to another node")
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).contiguous()
        return kind, name, flat.view(torch.uint8).numpy().data if len(flat) else b""  # no view of an empty tensor
    native = value.astype(value.dtype.newbyteorder("="), copy=False)
    return kind, name, np.ascontiguousarray(native).reshape(-1).view(np.uint8).data


def _tensor(frame: zmq.Frame, kind: str, name: str, shape: list, copy: bool) -> torch.Tensor | np.ndarray:
    dtype = DTYPES[name]
    if len(shape) > MAX_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise ValueError(f"{len(frame)} bytes for shape {shape} of {name}")
    data = np.frombuffer(frame.buffer, np.uint8)
    if copy or data.ctypes.data % dtype.itemsize:  # parts of a larger network buffer may start anywhere
        data = data.copy()
    if kind == NUMPY:
        return data.view(name).reshape(shape)
    if kind != TORCH:
        raise ValueError(f"kind {kind!r}")
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)
