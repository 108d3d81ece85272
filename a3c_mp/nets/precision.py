"""How nets compute on their device: bfloat16 or float32, deterministic, an actor's forward pass as one CUDA graph.

Master weights, returns and losses are always float32.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from a3c_mp.nets.obs_norm import ObsNorm


def acting_dtype(precision: str, net: nn.Module, device: torch.device | None = None) -> torch.dtype:
    """Return bfloat16 or float32, for `--precision {auto,fp32,bf16}`: what actors hold the weights of a net in.

    `device` is that of the actors, by default the net's. bfloat16 is for nets on images. Vectors stay in float32: a
    bfloat16 has 8 bits, enough for a pixel, but not for a position far from 0, and small nets are bound by call
    overhead. `auto` uses it where the hardware supports it natively (AMX, AVX-512 BF16, CUDA capability 8.0 and newer).
    `fp32` leaves torch's own setting of TF32 as it is.
    """
    assert isinstance(net.norm, ObsNorm), net
    bf16 = precision == "bf16" or (precision == "auto" and has_native_bf16(device or net.norm.shift.device))
    return torch.bfloat16 if net.norm.image and bf16 else torch.float32


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


def acting_forward(
    args: Any, net: nn.Module, *examples: Tensor, function: Callable[..., tuple[Tensor, ...]] | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """Return an actor's forward pass, or another `function` of the net, with inputs and outputs on the CPU.

    Of a net on the GPU, with `--cuda-graph`, it is a CUDA graph: one launch instead of one for each of a dozen small
    kernels. The host waits once, for all outputs together, which are float32 then. Later inputs must have the shapes
    and dtypes of `examples`.
    """
    device, function = next(net.parameters()).device, function or net
    if device.type == "cpu":
        return function
    if args.deterministic:
        make_deterministic()
    places = [example.to(device, copy=True) for example in examples]
    with torch.inference_mode():
        shapes = [output.shape for output in function(*places)]

    def packed() -> Tensor:
        return torch.cat([output.flatten().float() for output in function(*places)])

    launch = as_graph(packed, device) if args.cuda_graph else packed

    @torch.inference_mode()
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        for place, value in zip(places, inputs, strict=True):
            place.copy_(value, non_blocking=True)  # asynchronous from pinned memory
        parts = launch().cpu().split([shape.numel() for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    return forward


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs of acting in a process: cuBLAS keeps memory for each stream that it has seen, 32 MiB."""
    return torch.cuda.Stream(device)


def as_graph(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Capture what a function launches as a CUDA graph; return what launches it again, on what its memory then holds.

    Parameters are read in place, so `Weights.load` into the same net takes effect without a new capture
    (pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
    """
    graph, warm_up = torch.cuda.CUDAGraph(), _capture_stream(device)
    warm_up.wait_stream(torch.cuda.current_stream(device))
    with torch.inference_mode(), torch.cuda.device(device):  # a capture records work of the current device
        with torch.cuda.stream(warm_up):  # libraries choose their algorithms before, not during, the capture
            for _ in range(3):
                function()
        torch.cuda.current_stream(device).wait_stream(warm_up)
        with torch.cuda.graph(graph, stream=warm_up, capture_error_mode="thread_local"):  # environments use GPUs, too
            output = function()

    def launch() -> Tensor:
        graph.replay()
        return output

    return launch
