"""CUDA graph of an actor's forward pass, and deterministic CUDA."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def acting_forward(net: nn.Module, *examples: Tensor, deterministic: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Return an actor's forward pass for observations on the CPU: for a net on the GPU a CUDA graph, else the net."""
    if next(net.parameters()).device.type == "cpu":
        return net
    if deterministic:
        make_deterministic()
    return GraphedForward(net, *examples)


class GraphedForward:
    """A net's forward pass as one CUDA graph: one launch instead of one for each of a dozen small kernels.

    The graph reads the parameters in place, so `Weights.load` into the same net takes effect without a new capture
    (pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Args:
        net: on the GPU, returns a tuple of tensors.
        examples: inputs of one call, on any device; later inputs must have the same shapes and dtypes.
    """

    def __init__(self, net: nn.Module, *examples: Tensor):
        device = next(net.parameters()).device
        self.inputs = [example.to(device, copy=True) for example in examples]
        self.graph = torch.cuda.CUDAGraph()
        warm_up = torch.cuda.Stream(device)
        warm_up.wait_stream(torch.cuda.current_stream(device))
        with torch.inference_mode(), torch.cuda.device(device):  # a capture records work of the current device
            with torch.cuda.stream(warm_up):  # libraries choose their algorithms before, not during, the capture
                for _ in range(3):
                    net(*self.inputs)
            torch.cuda.current_stream(device).wait_stream(warm_up)
            with torch.cuda.graph(self.graph, stream=warm_up):
                self.outputs: tuple[Tensor, ...] = net(*self.inputs)

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the graph on these inputs; from pinned memory, the copies are asynchronous."""
        for place, value in zip(self.inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


def make_deterministic() -> None:
    """Make CUDA results bit-identical between runs (pytorch.org/docs/stable/notes/randomness.html).

    An operation without a deterministic implementation warns instead of failing. `_bootstrap` sets cuBLAS's workspace.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
