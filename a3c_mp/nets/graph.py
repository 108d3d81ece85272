"""What a function launches on a GPU as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def as_graph(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Capture what a function launches as a CUDA graph; return what launches it again, on what its memory then holds.

    Parameters are read in place, so `Weights.load` into the same net takes effect without a new capture
    (pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
    """
    graph = torch.cuda.CUDAGraph()
    warm_up = torch.cuda.Stream(device)
    warm_up.wait_stream(torch.cuda.current_stream(device))
    with torch.inference_mode(), torch.cuda.device(device):  # a capture records work of the current device
        with torch.cuda.stream(warm_up):  # libraries choose their algorithms before, not during, the capture
            for _ in range(3):
                function()
        torch.cuda.current_stream(device).wait_stream(warm_up)
        with torch.cuda.graph(graph, stream=warm_up):
            output = function()

    def launch() -> Tensor:
        graph.replay()
        return output

    return launch
