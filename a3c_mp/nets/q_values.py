"""Q networks: dueling DQN for discrete actions, DDPG's actor and critic for continuous ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from a3c_mp.nets.actor_critic import nature_convolutions, num_outputs
from a3c_mp.nets.obs_norm import ObsNorm


class DuelingQ(nn.Module):
    """Dueling Q network: Q(s, a) = V(s) + A(s, a) - mean_a A(s, a) (Wang et al. 2016, equation 9).

    Images go through the convolutions of Mnih et al. 2015, vectors through one linear layer; value and advantage then
    have a hidden layer each. On images the two have 512 units together, as many as the net of Mnih et al.

    Args:
        obs_shape: of one observation; images uint8 [C, H, W], at least 36 x 36.
        num_actions: size of the discrete action set (A).
        image: whether observations are images.
        hidden: units of each hidden layer; by default 256 for images and 128 for vectors.
    """

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, image: bool, hidden: int | None = None):
        super().__init__()
        hidden = hidden or (256 if image else 128)
        self.norm = ObsNorm(obs_shape, image)
        vector_torso = (nn.Flatten(), nn.Linear(torch.Size(obs_shape).numel(), hidden), nn.ReLU())
        self.torso = nature_convolutions(obs_shape[0]) if image else nn.Sequential(*vector_torso)
        features = num_outputs(self.torso, obs_shape)
        self.value = _mlp(features, hidden, 1)
        self.advantage = _mlp(features, hidden, num_actions)
        if image:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> tuple[Tensor]:
        """obs uint8 or float32 [B, ...] -> (q [B, A],)."""
        features = self.torso(self.norm.convert(obs))
        advantage = self.advantage(features)
        return (self.value(features) + advantage - advantage.mean(dim=1, keepdim=True),)


class DDPGNet(nn.Module):
    """DDPG's actor mu(s) in [-1, 1]^D and critic Q(s, a), for vector observations (Lillicrap et al. 2016, section 7).

    Args:
        obs_shape: of one observation, flattened.
        action_shape: of one action, flattened to D numbers.
        hidden: units of each of the two hidden layers, in actor and critic.
    """

    def __init__(self, obs_shape: tuple[int, ...], action_shape: tuple[int, ...], hidden: int = 256):
        super().__init__()
        self.action_shape = action_shape
        inputs, outputs = torch.Size(obs_shape).numel(), torch.Size(action_shape).numel()
        self.norm = ObsNorm(obs_shape, image=False)
        self.actor = nn.Sequential(_mlp(inputs, hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs), nn.Tanh())
        self.critic = nn.Sequential(_mlp(inputs + outputs, hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        for head in (self.actor[2], self.critic[2]):  # first actions near the middle, first values near zero
            nn.init.uniform_(head.weight, -3e-3, 3e-3)  # type: ignore[arg-type]
            nn.init.uniform_(head.bias, -3e-3, 3e-3)  # type: ignore[arg-type]

    def forward(self, obs: Tensor) -> tuple[Tensor]:
        """obs float32 or uint8 [B, ...] -> (mu(s) [B, *action_shape],)."""
        return (self.actor(self.norm.convert(obs).flatten(1)).view(-1, *self.action_shape),)

    def q(self, obs: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) [B] for obs [B, ...] and actions [B, *action_shape] in [-1, 1]."""
        inputs = torch.cat([self.norm.convert(obs).flatten(1), action.flatten(1).to(self.norm.shift.dtype)], dim=1)
        return self.critic(inputs).squeeze(-1)


ReplayNet = DuelingQ | DDPGNet


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
