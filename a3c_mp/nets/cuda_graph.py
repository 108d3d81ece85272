"""An actor's forward pass as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def acting_forward(net: nn.Module, *examples: Tensor, deterministic: bool) -> Callable[..., tuple[Tensor, ...]]:
    """How an actor calls its net, with observations on the CPU: on the GPU as a graph, on the CPU as it is."""
    if next(net.parameters()).device.type == "cpu":
        return net
    if deterministic:
        make_deterministic()
    return GraphedForward(net, *examples)


class GraphedForward:
    """A net's forward pass as one CUDA graph: a single launch where each of a dozen small kernels cost one.

    The graph reads the parameters where they lie, so `Weights.load` into the same net takes effect without a new
    capture (pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Args:
        net: on the GPU, returns a tuple of tensors.
        examples: one call's inputs, on any device; those of every later call have their shapes and dtypes.
    """

    def __init__(self, net: nn.Module, *examples: Tensor):
        device = next(net.parameters()).device
        self.inputs = [example.to(device, copy=True) for example in examples]
        self.graph = torch.cuda.CUDAGraph()
        warm_up = torch.cuda.Stream(device)
        warm_up.wait_stream(torch.cuda.current_stream(device))
        with torch.inference_mode(), torch.cuda.device(device):  # a capture takes what the current device is given
            with torch.cuda.stream(warm_up):  # libraries choose their algorithms before, not during, the capture
                for _ in range(3):
                    net(*self.inputs)
            torch.cuda.current_stream(device).wait_stream(warm_up)
            with torch.cuda.graph(self.graph, stream=warm_up):
                self.outputs: tuple[Tensor, ...] = net(*self.inputs)

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Outputs for these inputs; where they lie in pinned memory, the copies wait for nothing."""
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


def make_deterministic() -> None:
    """Have CUDA compute the same bits every time (pytorch.org/docs/stable/notes/randomness.html).

    Warns, rather than fails, where an operation knows no deterministic way. `a3c_mp` sets the workspace of cuBLAS.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
