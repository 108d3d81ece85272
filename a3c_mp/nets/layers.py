"""Parts that nets are made of: convolutions, hidden layers, an LSTM."""

from collections.abc import Sequence
from itertools import pairwise

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box
from torch import Tensor, nn

from a3c_mp.wrappers import SMALLEST_IMAGE, ImageAndVector

CONVOLUTIONS = {  # name -> (channels, kernel size, stride) of each layer
    "a3c": [(16, 8, 4), (32, 4, 2)],  # Mnih et al. 2013 and 2016
    "nature": [(32, 8, 4), (64, 4, 2), (64, 3, 1)],  # Mnih et al. 2015
}
RESIDUAL = {"deep": ((3, 1, 1), 2), "resnet": ((4, 2, 1), 1)}  # first (kernel, stride, padding), blocks
VECTOR_UNITS = 64  # of the hidden layer of a vector beside an image


def image_shape(space: gymnasium.Space) -> tuple[int, ...] | None:
    """The shape [C, H, W] of images of at least 36 x 36, alone or beside a vector; None without any."""
    if isinstance(space, ImageAndVector):
        return space.image_shape
    is_image = isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3
    return space.shape if is_image and min(space.shape[1:]) >= SMALLEST_IMAGE else None  # type: ignore[index]


def is_image(space: gymnasium.Space) -> bool:
    """Whether there are images for convolutions in observations."""
    return image_shape(space) is not None


class JoinedTorso(nn.Module):
    """Features of an image, and of a vector beside it after a hidden layer: [N, pixels + numbers] -> [N, features]."""

    def __init__(self, image: nn.Module, image_shape: tuple[int, ...], numbers: int):
        super().__init__()
        self.image, self.image_shape, self.numbers = image, image_shape, numbers
        self.vector = nn.Sequential(nn.Linear(numbers, VECTOR_UNITS), nn.ReLU())

    def forward(self, obs: Tensor) -> Tensor:
        pixels, numbers = obs.split([obs.shape[1] - self.numbers, self.numbers], dim=1)
        images = pixels.unflatten(1, self.image_shape).contiguous(memory_format=torch.channels_last)
        return torch.cat([self.image(images), self.vector(numbers)], dim=1)


def image_torso(
    net: str | Sequence[tuple[int, ...]], obs_shape: tuple[int, ...], image_shape: tuple[int, ...]
) -> nn.Module:
    """Convolutions by name, or by (channels, kernel size, stride, padding): [N, *obs_shape] -> [N, features].

    A vector beside the images is joined with their features. "deep" has 3 sections of convolution, max-pooling and two
    residual blocks (Espeholt et al. 2018, figure 3, right), "resnet" a first stride of 2 and one block in each, for a
    fifth of the arithmetic. The last ReLU comes after Flatten: before it, its gradient would mix the memory formats of
    images and features, and take ten times as long.
    """
    modules, channels = list[nn.Module](), image_shape[0]
    if isinstance(net, str) and net in RESIDUAL:
        first, blocks = RESIDUAL[net]
        for outputs, geometry in ((16, first), (32, (3, 1, 1)), (32, (3, 1, 1))):
            modules += [nn.Conv2d(channels, outputs, *geometry), nn.MaxPool2d(3, stride=2, padding=1)]
            modules += [ResidualBlock(outputs) for _ in range(blocks)]
            channels = outputs
    else:
        for outputs, *sizes in CONVOLUTIONS[net] if isinstance(net, str) else net:
            modules += [nn.Conv2d(channels, outputs, *sizes), nn.ReLU()]  # type: ignore[arg-type]
            channels = outputs
        modules.pop()
    torso = nn.Sequential(*modules, nn.Flatten(), nn.ReLU())
    numbers = torch.Size(obs_shape).numel() - torch.Size(image_shape).numel()
    return JoinedTorso(torso, image_shape, numbers) if numbers else torso


@torch.no_grad()
def num_features(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    return module(torch.zeros(1, *input_shape)).shape[1]


class ResidualBlock(nn.Module):
    """Residual block: x + two convolutions of x, each after a ReLU (He et al. 2016, "Identity mappings")."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


def mlp(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers [N, sizes[0]] -> [N, sizes[-1]], with an activation between each two."""
    return nn.Sequential(*[part for size in pairwise(sizes) for part in (nn.Linear(*size), activation())][:-1])


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
    """The LSTM state [B, S], zeros where an episode starts, bool [B]."""
    return state.masked_fill(torch.as_tensor(starts, device=state.device)[:, None], 0.0)


def reset_acting_state(state: Tensor, starts: np.ndarray) -> Tensor:
    """As `reset_state`; also where a bad observation has left NaN or inf, which would stay to the episode's end."""
    return reset_state(state, torch.from_numpy(starts) | ~state.isfinite().all(dim=1))
