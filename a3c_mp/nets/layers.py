"""Parts that nets are made of: convolutions, hidden layers, an LSTM.

The last ReLU of convolutions comes after Flatten: before it, its gradient would mix two memory formats, that of
channels_last activations and that of flat features, and take over ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def a3c_convolutions(channels: int) -> nn.Sequential:
    """Make the convolutions of Mnih et al. 2013 and 2016 (A3C): [N, channels, H, W] -> [N, features]."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Flatten(),
        nn.ReLU(),
    )


def nature_convolutions(channels: int) -> nn.Sequential:
    """Make the convolutions of Mnih et al. 2015: [N, channels, H, W] -> [N, features], H and W at least 36."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, kernel_size=3, stride=1),
        nn.Flatten(),
        nn.ReLU(),
    )


@torch.no_grad()
def num_features(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the number of features that a module outputs for one input."""
    return module(torch.zeros(1, *input_shape)).shape[1]


def residual_convolutions(channels: int) -> nn.Sequential:
    """Make 3 sections of convolution, max-pooling and two residual blocks (Espeholt et al. 2018, figure 3, right)."""
    sections: list[nn.Module] = []
    for inputs, outputs in [(channels, 16), (16, 32), (32, 32)]:
        sections += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        sections += [ResidualBlock(outputs), ResidualBlock(outputs)]
    return nn.Sequential(*sections, nn.Flatten(), nn.ReLU())


class ResidualBlock(nn.Module):
    """Residual block: x + two convolutions of x, each after a ReLU (He et al. 2016, "Identity mappings")."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


def mlp(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Make tanh layers of so many hidden units each, and a linear layer: [N, inputs] -> [N, outputs]."""
    sizes = [inputs, *hidden]
    layers = [module for pair in pairwise(sizes) for module in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


class LSTMCore(nn.Module):
    """LSTM (Hochreiter & Schmidhuber 1997), forget gates open at first; its state [B, 2 * hidden] is (output, cell).

    The state is float32 in every compute dtype: rounded at each step, it would drift away from the learner's within an
    unroll, and V-trace would take the difference for policy lag.
    """

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.from_input = nn.Linear(inputs, 4 * hidden)
        self.from_output = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, inputs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """inputs [T, B, I] -> (outputs [T, B, hidden], next state [B, S]); reset where `starts`, bool [T, B]."""
        from_input = self.from_input(inputs)  # for all steps at once: only the recurrent part goes step by step
        outputs = []
        for t in range(len(inputs)):
            output, cell = reset_state(state, starts[t]).chunk(2, dim=-1)
            i, f, g, o = (from_input[t] + self.from_output(output.to(inputs.dtype))).float().chunk(4, dim=-1)
            cell = (f + 1).sigmoid() * cell + i.sigmoid() * g.tanh()
            output = o.sigmoid() * cell.tanh()
            outputs.append(output)
            state = torch.cat([output, cell], dim=-1)
        return torch.stack(outputs).to(inputs.dtype), state


def reset_state(state: Tensor, starts: Tensor | np.ndarray) -> Tensor:
    """Reset the LSTM state [B, S] to zeros where an episode starts, bool [B]."""
    return state.masked_fill(torch.as_tensor(starts, device=state.device)[:, None], 0.0)
