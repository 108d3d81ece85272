"""CUDA graph of an actor's forward pass, and deterministic CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def acting_forward(net: nn.Module, *examples: Tensor, deterministic: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Return an actor's forward pass for observations on the CPU: for a net on the GPU a CUDA graph, else the net.

    The graph has one launch instead of one for each of a dozen small kernels. It reads the parameters in place, so
    `Weights.load` into the same net takes effect without a new capture
    (pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Args:
        net: returns a tuple of tensors.
        examples: inputs of one call, on any device; later inputs must have the same shapes and dtypes.
        deterministic: results must be bit-identical between runs.
    """
    device = next(net.parameters()).device
    if device.type == "cpu":
        return net
    if deterministic:
        make_deterministic()
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


def make_deterministic() -> None:
    """Make CUDA results bit-identical between runs (pytorch.org/docs/stable/notes/randomness.html).

    An operation without a deterministic implementation warns instead of failing. `_bootstrap` sets cuBLAS's workspace.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
