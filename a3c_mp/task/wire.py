"""Encoding of messages between nodes: JSON, then the bytes of each tensor.

A message is a list of blocks [content, tensor 0, tensor 1, ...]. In the content, which is [event, arguments], a tensor
stands as {"$tensor": [number, dtype, shape]}. A block is sent as frames of `PART` bytes, of which the last is shorter,
so that a socket can refuse larger frames. What arrives is checked, and nothing in it is ever executed.
"""

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import zmq

JOINED, LEFT = "node.joined", "node.left"  # events of the nodes themselves: one is connected, or no longer
FINISH, OVER = "task.finish", "task.over"  # events between tasks; the latter goes to a node that joins
STARTED = "task.started"  # of a further task of a node, which gets what is shared as if it had joined

PART = 64 * 2**10  # bytes of a frame; one for each stranger is all that a hub may have to hold
MAX_JSON = 2**20  # bytes of the content of a message; larger things are tensors
MAX_TENSOR = 128 * 2**20  # bytes of a tensor; a slot of Pong has 20 MiB
MAX_TENSORS = 1024  # in a message; the nets of this library have tens of parameters
MAX_DIMS = 32  # dimensions of a tensor

DTYPES = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
TENSOR = "$tensor"
PARSE_ERRORS = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, RuntimeError, MemoryError)


class WireError(Exception):
    """Frames that are no message, or not the one that is expected."""


class Message(NamedTuple):
    """An event that a node has sent."""

    sender: str  # name of the node, "node.1"
    event: str
    args: list  # JSON values and tensors


def encode(event: str, args: Sequence[Any]) -> list[zmq.Frame]:
    """Frames of an event and its arguments, JSON values and tensors, nested in lists and dicts; all are copied.

    Raises TypeError for values of other types and keys that are no strings, ValueError if they are too large or hold
    the reserved key "$tensor".
    """
    tensors: list[list[zmq.Frame]] = []

    def pack(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise TypeError(f"{type(value).__name__} cannot be sent to another node")
        if (name := str(value.dtype).removeprefix("torch.")) not in DTYPES:
            raise TypeError(f"tensors of {name} cannot be sent to another node")
        if value.nbytes > MAX_TENSOR:
            raise ValueError(f"a tensor of {value.nbytes:,} bytes is too large for one message; split it")
        flat = value.detach().cpu().reshape(-1).contiguous()
        tensors.append(_cut(flat.view(torch.uint8).numpy().data if len(flat) else b""))  # an empty one has no view
        return {TENSOR: [len(tensors) - 1, name, list(value.shape)]}

    text = json.dumps([event, args], default=pack).encode()
    _check_keys(args)  # after it, as it refuses what has no end
    if len(text) > MAX_JSON or len(tensors) > MAX_TENSORS:
        size = f"{len(text):,} bytes of JSON and {len(tensors)} tensors"
        raise ValueError(f"{size} are too much for one message; split it")
    if text.count(f'"{TENSOR}":'.encode()) != len(tensors):
        raise ValueError(f"the key {TENSOR!r} is reserved")
    return [*_cut(text), *itertools.chain.from_iterable(tensors)]


def decode(frames: Sequence[zmq.Frame]) -> tuple[str, list]:
    """Event and arguments of frames, whose memory the tensors use. Raises WireError for any not from `encode`."""
    content, *tensors = _join(frames)
    missing = set(range(len(tensors)))

    def unpack(mapping: dict) -> Any:
        if TENSOR not in mapping:
            return mapping
        (number, name, shape), *others = mapping.values()
        if others or type(number) is not int or number not in missing:
            raise ValueError("a tensor without a frame of its own")
        missing.remove(number)
        return _tensor(tensors[number], DTYPES[name], shape)

    try:
        if len(content) > MAX_JSON or len(tensors) > MAX_TENSORS:
            raise ValueError(f"{len(content):,} bytes of JSON and {len(tensors)} tensors")
        event, args = json.loads(bytes(content), object_hook=unpack)
        if missing or not isinstance(event, str) or not isinstance(args, list):
            raise ValueError("more frames than tensors, or not [event, arguments]")
        return event, args
    except PARSE_ERRORS as error:
        raise WireError(f"malformed message ({type(error).__name__}: {error})"[:300]) from error


def _check_keys(value: Any) -> None:
    """Raise TypeError if a dict has keys that are no strings: JSON would make some of other keys."""
    if isinstance(value, dict) and (others := [key for key in value if not isinstance(key, str)]):
        raise TypeError(f"the key {others[0]!r} of a dict is no string, and cannot be sent to another node")
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list | tuple):
            _check_keys(each)


def _cut(data: Any) -> list[zmq.Frame]:
    """The frames of a block; one whose size is a multiple of `PART` ends with an empty frame."""
    return [zmq.Frame(data[start : start + PART], copy=True) for start in range(0, len(data) + 1, PART)]


def _join(frames: Sequence[zmq.Frame]) -> list[Any]:
    """The blocks of frames, with the memory of the frame if it is only one. Raises WireError if one has no end."""
    blocks: list[Any] = []
    parts: list[Any] = []
    for frame in frames:
        parts.append(frame.buffer)
        if len(frame) < PART:
            blocks.append(parts[0] if len(parts) == 1 else bytearray().join(parts))
            parts = []
    if parts or not blocks:
        raise WireError("malformed message (a block without an end)")
    return blocks


def _tensor(block: Any, dtype: torch.dtype, shape: list) -> torch.Tensor:
    if len(shape) > MAX_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(block):
        raise ValueError(f"{len(block)} bytes for shape {shape} of {dtype}")
    if not len(block):
        return torch.empty(shape, dtype=dtype)
    data = torch.frombuffer(block, dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:  # parts of a larger network buffer may start anywhere
        data = data.clone()
    return data.view(dtype).reshape(shape)
