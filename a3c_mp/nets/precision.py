"""How nets compute on their device: bfloat16 or float32, deterministic, an actor's forward pass as one CUDA graph.

Master weights, returns and losses are always float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from a3c_mp.nets.obs_norm import ObsNorm


def compute_dtype(precision: str, device: torch.device, image: bool) -> torch.dtype:
    """Return bfloat16 or float32, for `--precision {auto,fp32,bf16}`.

    bfloat16 is for nets on images. Vectors stay in float32: a bfloat16 has 8 bits, enough for a pixel, but not for a
    position far from 0, and small nets are bound by call overhead. `auto` uses it where the hardware supports it
    natively (AMX, AVX-512 BF16, CUDA capability 8.0 and newer). `fp32` leaves torch's own setting of TF32 as it is.
    """
    bf16 = precision == "bf16" or (precision == "auto" and has_native_bf16(device))
    return torch.bfloat16 if image and bf16 else torch.float32


def acting_dtype(precision: str, net: nn.Module) -> torch.dtype:
    """Return the `compute_dtype` of a net with an `ObsNorm` as `net.norm`; actors hold their weights in it."""
    assert isinstance(net.norm, ObsNorm), net
    return compute_dtype(precision, net.norm.shift.device, net.norm.image)


def autocast(precision: str, net: nn.Module) -> AbstractContextManager:
    """Return a context in which the learner's net, whose weights stay float32, computes in `acting_dtype`."""
    dtype = acting_dtype(precision, net)
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(next(net.parameters()).device.type, dtype)


def has_native_bf16(device: torch.device) -> bool:
    """Whether this device has bfloat16 matrix instructions; elsewhere it is emulated, and slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def make_deterministic() -> None:
    """Make CUDA results bit-identical between runs (pytorch.org/docs/stable/notes/randomness.html).

    An operation without a deterministic implementation warns instead of failing. `_bootstrap` sets cuBLAS's workspace.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def acting_forward(args: Any, net: nn.Module, *examples: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Return an actor's forward pass for observations on the CPU: a net on the GPU is a CUDA graph with `--cuda-graph`.

    The graph has one launch instead of one for each of a dozen small kernels. It reads the parameters in place, so
    `Weights.load` into the same net takes effect without a new capture
    (pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). Later inputs must have the shapes and dtypes of `examples`.
    """
    device = next(net.parameters()).device
    if device.type == "cpu":
        return net
    if args.deterministic:
        make_deterministic()
    if not args.cuda_graph:
        return lambda *inputs: net(*(value.to(device, non_blocking=True) for value in inputs))
    places = [example.to(device, copy=True) for example in examples]
    graph = torch.cuda.CUDAGraph()
    warm_up = torch.cuda.Stream(device)
    warm_up.wait_stream(torch.cuda.current_stream(device))
    with torch.inference_mode(), torch.cuda.device(device):  # a capture records work of the current device
        with torch.cuda.stream(warm_up):  # libraries choose their algorithms before, not during, the capture
            for _ in range(3):
                net(*places)
        torch.cuda.current_stream(device).wait_stream(warm_up)
        with torch.cuda.graph(graph, stream=warm_up):
            outputs: tuple[Tensor, ...] = net(*places)

    @torch.inference_mode()
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        for place, value in zip(places, inputs, strict=True):
            place.copy_(value, non_blocking=True)  # asynchronous from pinned memory
        graph.replay()
        return tuple(output.clone() for output in outputs)

    return forward
