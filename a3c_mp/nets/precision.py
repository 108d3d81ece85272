"""How nets compute on their device: bfloat16 or float32, deterministic, an actor's forward pass as one CUDA graph.

Master weights, returns and losses are always float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from a3c_mp.errors import ConfigError, one_line
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


def check_capture(net: Any, obs: Tensor, name: str) -> None:
    """Raise ConfigError if the forward pass of a net of the user's own, `name`, cannot be captured as a CUDA graph.

    What the host waits for cannot be in one. `obs` are observations [B, *obs_shape] on the CPU.
    """
    with torch.inference_mode():
        net(obs.to(next(net.parameters()).device))  # raises what is wrong without a graph, too
    try:
        acting_forward(net, obs, deterministic=False)
    except RuntimeError as error:
        first: BaseException = error
        while first.__context__ is not None:  # the end of the capture fails as well
            first = first.__context__
        why = f"actors launch it as a CUDA graph, which failed ({one_line(first).partition(' CUDA kernel errors')[0]})"
        fix = (
            "leave out what waits for the GPU (item, cpu, a tensor in an if, masks as indices), or give --no-cuda-graph"
        )
        raise ConfigError("net", name, why, fix) from error


def acting_forward(
    net: nn.Module, *examples: Tensor, deterministic: bool, use_graph: bool = True
) -> Callable[..., tuple[Tensor, ...]]:
    """Return an actor's forward pass for observations on the CPU: for a net on the GPU a CUDA graph, else the net.

    The graph has one launch instead of one for each of a dozen small kernels. It reads the parameters in place, so
    `Weights.load` into the same net takes effect without a new capture
    (pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). Later inputs must have the shapes and dtypes of `examples`.
    With `use_graph` false, the net is run as it is.
    """
    device = next(net.parameters()).device
    if device.type == "cpu":
        return net
    if deterministic:
        make_deterministic()
    if not use_graph:
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
