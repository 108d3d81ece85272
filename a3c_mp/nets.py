"""Networks: observations in, `(logits [B, A], baseline [B])` out, both in the dtype that the net computes in."""

from __future__ import annotations

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn


class ObsNorm(nn.Module):
    """Subtract from every input its running mean, divide by its running deviation, clip to [-5, 5].

    Burda et al. 2018 ("Exploration by random network distillation"), section 2.4. In Pong all but a few pixels are the
    same in every frame; what is left after this is the ball and the paddles.

    Args:
        shape: of one observation.
        image: the inputs are bytes; before the first update they are divided by 255.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...], image: bool):
        super().__init__()
        self.image = image
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(1, *shape))
        self.register_buffer("variance", torch.ones(1, *shape))
        self.register_buffer("shift", torch.zeros(1, *shape))
        self.register_buffer("scale", torch.full((1, *shape), 1 / 255 if image else 1.0))

    @torch.no_grad()
    def update(self, obs: Tensor) -> None:
        """Take in observations [N, *shape], merging moments as Chan, Golub & LeVeque 1979 do."""
        obs = obs.float()
        mean, variance, count = obs.mean(dim=0, keepdim=True), obs.var(dim=0, correction=0, keepdim=True), len(obs)
        total = self.count + count
        delta = mean - self.mean
        squares = self.variance * self.count + variance * count + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.variance.copy_(squares / total)
        self.count.copy_(total)
        # Whole grey levels are exact in bfloat16, so the actors' copies subtract exactly what the learner does. The
        # floor under the deviation, one grey level, keeps pixels that hardly ever change from drowning the rest.
        self.shift.copy_(self.mean.round() if self.image else self.mean)
        self.scale.copy_(1 / (self.variance.sqrt() + (1.0 if self.image else 1e-2)))

    def forward(self, obs: Tensor) -> Tensor:
        """Floating-point observations [N, *shape], overwritten."""
        return obs.sub_(self.shift.to(obs.dtype)).mul_(self.scale.to(obs.dtype)).clamp_(-5, 5)

    def image_inputs(self, obs: Tensor) -> Tensor:
        """uint8 [N, C, H, W], left as they are -> inputs of convolutions, in the format that is computed in."""
        device_type, dtype = obs.device.type, self.shift.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        return self(obs.to(dtype).contiguous(memory_format=torch.channels_last))

    def vector_inputs(self, obs: Tensor) -> Tensor:
        """float32 or uint8 [N, ...], left as they are -> [N, inputs] of linear layers."""
        return self(obs.to(self.shift.dtype, copy=True)).reshape(len(obs), -1)


def nature_convolutions(channels: int) -> nn.Sequential:
    """The convolutions of Mnih et al. 2015: [N, channels, H, W] -> [N, features], H and W at least 36."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, kernel_size=3, stride=1),
        nn.ReLU(),
        nn.Flatten(),
    )


class AtariA2C(nn.Module):
    """Convolutions shared by two heads of their own, policy and value, with 512 hidden units each.

    The convolutions are those of Mnih et al. 2015; the separate heads follow Lapan, "Deep Reinforcement Learning
    Hands-On", chapter 13.

    Args:
        obs_shape: [C, H, W] of uint8 images, at least 36 x 36.
        num_actions: size of the discrete action set (A).
    """

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, hidden: int = 512):
        super().__init__()
        self.norm = ObsNorm(obs_shape, image=True)
        self.conv = nature_convolutions(obs_shape[0])
        with torch.no_grad():
            features = self.conv(torch.zeros(1, *obs_shape)).shape[1]
        self.policy = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, num_actions))
        self.value = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        init_orthogonal(self)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs uint8 [B, C, H, W] -> (logits [B, A], baseline [B])."""
        features = self.conv(self.norm.image_inputs(obs))
        return self.policy(features), self.value(features).squeeze(-1)


class MLPA2C(nn.Module):
    """Two tanh layers for the policy and two for the value, for vector observations.

    Args:
        obs_shape: shape of float32 observations, flattened.
        num_actions: size of the discrete action set (A).
    """

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, hidden: int = 64):
        super().__init__()
        inputs = int(torch.Size(obs_shape).numel())
        self.norm = ObsNorm(obs_shape, image=False)
        self.policy = _mlp(inputs, hidden, num_actions)
        self.value = _mlp(inputs, hidden, 1)
        init_orthogonal(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs float32 or uint8 [B, ...] -> (logits [B, A], baseline [B])."""
        inputs = self.norm.vector_inputs(obs)
        return self.policy(inputs), self.value(inputs).squeeze(-1)


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


def init_orthogonal(net: AtariA2C | MLPA2C) -> None:
    """Orthogonal weights with gain sqrt(2), zero biases, and a nearly uniform first policy.

    Engstrom et al. 2020 ("Implementation matters") found both to help policy gradients.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(module.weight, gain=2**0.5)
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    nn.init.orthogonal_(net.policy[-1].weight, gain=0.01)  # type: ignore[arg-type]
    nn.init.orthogonal_(net.value[-1].weight, gain=1.0)  # type: ignore[arg-type]


def is_image(space: gymnasium.Space) -> bool:
    """Whether observations of this space go through convolutions: bytes [C, H, W], at least 36 x 36."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3 and min(space.shape[1:]) >= 36


def make_actor_critic(obs_space: gymnasium.Space, action_space: gymnasium.Space) -> AtariA2C | MLPA2C:
    """The net for these spaces. Raises ValueError where there is none: actions other than 0, 1, ..., A-1."""
    if not isinstance(action_space, Discrete) or action_space.start != 0:
        raise ValueError(f"needs discrete actions 0, 1, ..., not {action_space}")
    make_net = AtariA2C if is_image(obs_space) else MLPA2C
    return make_net(obs_space.shape, int(action_space.n))  # type: ignore[arg-type]
