"""Encoding of messages between nodes: JSON, then the bytes of each tensor in a frame of its own.

A message is a list of frames [content, tensor 0, tensor 1, ...]. In the content, which is [event, arguments], a tensor
stands as {"$tensor": [number, dtype, shape]}. What arrives is checked, and nothing in it is ever executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import zmq

JOINED, LEFT = "node.joined", "node.left"  # events of the nodes themselves: one is connected, or no longer
FINISH = "task.finish"  # event between tasks

MAX_JSON = 4 * 2**20  # bytes of the content of a message; larger things are tensors
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

    Raises TypeError for values of other types, ValueError if they are too large or hold the reserved key "$tensor".
    """
    tensors: list[zmq.Frame] = []

    def pack(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise TypeError(f"{type(value).__name__} cannot be sent to another node")
        if (name := str(value.dtype).removeprefix("torch.")) not in DTYPES:
            raise TypeError(f"tensors of {name} cannot be sent to another node")
        if value.nbytes > MAX_TENSOR:
            raise ValueError(f"a tensor of {value.nbytes:,} bytes is too large for one message; split it")
        flat = value.detach().cpu().reshape(-1).contiguous()
        data = flat.view(torch.uint8).numpy().data if len(flat) else b""  # an empty tensor has no view
        tensors.append(zmq.Frame(data, copy=True))
        return {TENSOR: [len(tensors) - 1, name, list(value.shape)]}

    text = json.dumps([event, args], default=pack).encode()
    if len(text) > MAX_JSON or len(tensors) > MAX_TENSORS:
        raise ValueError(
            f"{len(text):,} bytes of JSON and {len(tensors)} tensors are too much for one message; split it"
        )
    if text.count(f'"{TENSOR}":'.encode()) != len(tensors):
        raise ValueError(f"the key {TENSOR!r} is reserved")
    return [zmq.Frame(text, copy=True), *tensors]


def decode(frames: Sequence[zmq.Frame]) -> tuple[str, list]:
    """The event and the arguments that `encode` made the frames of; tensors use the memory of the frames.

    Raises WireError for frames that are not from `encode`.
    """
    content, *tensors = frames
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
        event, args = json.loads(content.bytes, object_hook=unpack)
        if missing or not isinstance(event, str) or not isinstance(args, list):
            raise ValueError("more frames than tensors, or not [event, arguments]")
        return event, args
    except PARSE_ERRORS as error:
        raise WireError(f"malformed message ({type(error).__name__}: {error})"[:300]) from error


def _tensor(frame: zmq.Frame, dtype: torch.dtype, shape: list) -> torch.Tensor:
    if len(shape) > MAX_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(frame):
        raise ValueError(f"{len(frame)} bytes for shape {shape} of {dtype}")
    if not len(frame):
        return torch.empty(shape, dtype=dtype)
    data = torch.frombuffer(frame.buffer, dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:  # parts of a larger network buffer may start anywhere
        data = data.clone()
    return data.view(dtype).reshape(shape)
