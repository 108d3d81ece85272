"""Actor-critic networks: observations -> `(logits [B, A], baseline [B])`, in the dtype that the net computes in.

A recurrent net has an LSTM core: it also takes the core's state [B, S] and returns the next one. S is its `core_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Discrete
from torch import Tensor, nn

from a3c_mp.errors import ConfigError
from a3c_mp.nets.obs_norm import ObsNorm


class ConvActorCritic(nn.Module):
    """Convolutional actor-critic: shared convolutions, and separate policy and value heads of 512 hidden units.

    The convolutions are those of Mnih et al. 2015; the separate heads follow Lapan, "Deep Reinforcement Learning
    Hands-On", chapter 13.

    Args:
        obs_shape: [C, H, W] of uint8 images, at least 36 x 36.
        num_actions: size of the discrete action set (A).
    """

    core_size = 0

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, hidden: int = 512):
        super().__init__()
        self.norm = ObsNorm(obs_shape, image=True)
        self.conv = nature_convolutions(obs_shape[0])
        features = num_outputs(self.conv, obs_shape)
        self.policy = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, num_actions))
        self.value = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        init_orthogonal(self)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs uint8 [B, C, H, W] -> (logits [B, A], baseline [B])."""
        features = self.conv(self.norm.convert(obs))
        return self.policy(features), self.value(features).squeeze(-1)


def a3c_convolutions(channels: int) -> nn.Sequential:
    """Make the convolutions of Mnih et al. 2013 and 2016 (A3C): [N, channels, H, W] -> [N, features]."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=8, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
    )


def nature_convolutions(channels: int) -> nn.Sequential:
    """Make the convolutions of Mnih et al. 2015: [N, channels, H, W] -> [N, features], H and W at least 36."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, kernel_size=3, stride=1),
        nn.ReLU(),
        nn.Flatten(),
    )


@torch.no_grad()
def num_outputs(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the number of features that a module outputs for one input."""
    return module(torch.zeros(1, *input_shape)).shape[1]


class MLPActorCritic(nn.Module):
    """MLP actor-critic for vector observations: two tanh layers for the policy, and two for the value.

    Args:
        obs_shape: shape of float32 observations, flattened.
        num_actions: size of the discrete action set (A).
    """

    core_size = 0

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, hidden: int = 64):
        super().__init__()
        inputs = int(torch.Size(obs_shape).numel())
        self.norm = ObsNorm(obs_shape, image=False)
        self.policy = _mlp(inputs, hidden, num_actions)
        self.value = _mlp(inputs, hidden, 1)
        init_orthogonal(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs float32 or uint8 [B, ...] -> (logits [B, A], baseline [B])."""
        inputs = self.norm.convert(obs).flatten(1)
        return self.policy(inputs), self.value(inputs).squeeze(-1)


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


class SharedActorCritic(nn.Module):
    """Actor-critic of A3C and IMPALA: torso, hidden layer, optional LSTM, two linear heads; policy and value share all.

    Mnih et al. 2016, section 5.1; Espeholt et al. 2018, figure 3.

    Args:
        obs_shape: of images uint8 [C, H, W], or of vectors.
        num_actions: size of the discrete action set (A).
        convolutions: channels -> torso for images [N, features]; None for vectors.
        lstm: add an LSTM core after the hidden layer.
    """

    def __init__(
        self, obs_shape: tuple[int, ...], num_actions: int, convolutions: Callable[[int], nn.Module] | None, *,
        lstm: bool, hidden: int = 256,
    ):  # fmt: skip
        super().__init__()
        self.norm = ObsNorm(obs_shape, image=convolutions is not None)
        torso = nn.Flatten() if convolutions is None else convolutions(obs_shape[0])
        self.torso = nn.Sequential(torso, nn.Linear(num_outputs(torso, obs_shape), hidden), nn.ReLU())
        self.core = LSTMCore(hidden, hidden) if lstm else None
        self.core_size = 2 * hidden if lstm else 0
        self.policy = nn.Sequential(nn.Linear(hidden, num_actions))
        self.value = nn.Sequential(nn.Linear(hidden, 1))
        init_orthogonal(self)
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                nn.init.zeros_(module.second.weight)  # starts as the identity: activations keep their scale
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        """obs [B, ...] -> (logits [B, A], baseline [B]); with an LSTM, also state [B, S] -> the next state."""
        if self.core is None:
            return self._heads(self.torso(self.norm.convert(obs)))
        assert state is not None
        starts = torch.zeros(1, obs.shape[0], dtype=torch.bool, device=state.device)
        logits, values, state = self.unroll(obs[None], state, starts)
        return logits[0], values[0], state

    def unroll(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """obs [T, B, ...], state [B, S] before obs[0], episode starts bool [T, B] -> (logits, values, next state)."""
        assert self.core is not None
        features = self.torso(self.norm.convert(obs.flatten(0, 1))).unflatten(0, starts.shape)
        outputs, state = self.core(features, state, starts)
        logits, values = self._heads(outputs)
        return logits, values, state

    def _heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(features), self.value(features).squeeze(-1)


class LSTMCore(nn.Module):
    """LSTM (Hochreiter & Schmidhuber 1997), forget gates open at first; its state [B, 2 * hidden] is (output, cell)."""

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
            i, f, g, o = (from_input[t] + self.from_output(output)).chunk(4, dim=-1)
            cell = (f + 1).sigmoid() * cell + i.sigmoid() * g.tanh()
            output = o.sigmoid() * cell.tanh()
            outputs.append(output)
            state = torch.cat([output, cell], dim=-1)
        return torch.stack(outputs), state


def residual_convolutions(channels: int) -> nn.Sequential:
    """Make 3 sections of convolution, max-pooling and two residual blocks (Espeholt et al. 2018, figure 3, right)."""
    sections: list[nn.Module] = []
    for inputs, outputs in [(channels, 16), (16, 32), (32, 32)]:
        sections += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        sections += [ResidualBlock(outputs), ResidualBlock(outputs)]
    return nn.Sequential(*sections, nn.ReLU(), nn.Flatten())


class ResidualBlock(nn.Module):
    """Residual block: x + two convolutions of x, each after a ReLU (He et al. 2016, "Identity mappings")."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


CONVOLUTIONS = {"paper": a3c_convolutions, "book": nature_convolutions, "deep": residual_convolutions}
"""`--net` -> convolutions"""
ActorCritic = ConvActorCritic | MLPActorCritic | SharedActorCritic


def initial_state(net: ActorCritic, num_envs: int) -> list[Tensor]:
    """Return the LSTM state at the start of B episodes, [zeros [B, S]]; an empty list for nets without an LSTM."""
    like = net.norm.shift
    return [torch.zeros(num_envs, net.core_size, dtype=like.dtype, device=like.device)] if net.core_size else []


def reset_state(state: Tensor, starts: Tensor | np.ndarray) -> Tensor:
    """Reset the LSTM state [B, S] to zeros where an episode starts, bool [B]."""
    return state.masked_fill(torch.as_tensor(starts, device=state.device)[:, None], 0.0)


def unroll(net: ActorCritic, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Compute policy logits and values at every step of an unroll.

    Args:
        obs: [T, B, ...].
        state: [B, S], the LSTM's before obs[0].
        starts: bool [T, B], whether obs[t] is an episode's first.

    Returns:
        (logits [T, B, A], values [T, B]).
    """
    if isinstance(net, SharedActorCritic) and net.core is not None:
        logits, values, _ = net.unroll(obs, state, starts)
        return logits, values
    logits, values = net(obs.flatten(0, 1))
    return logits.unflatten(0, starts.shape), values.unflatten(0, starts.shape)


def init_orthogonal(net: ActorCritic) -> None:
    """Initialise with orthogonal weights of gain sqrt(2), zero biases, and a nearly uniform policy.

    Engstrom et al. 2020 ("Implementation matters") found both to help policy gradients.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(module.weight, gain=2**0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.orthogonal_(net.policy[-1].weight, gain=0.01)  # type: ignore[arg-type]
    nn.init.orthogonal_(net.value[-1].weight, gain=1.0)  # type: ignore[arg-type]


def is_image(space: gymnasium.Space) -> bool:
    """Whether observations of this space are images for convolutions: uint8 [C, H, W], at least 36 x 36."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3 and min(space.shape[1:]) >= 36


class NetSpec(NamedTuple):
    """Which net, as the flags of these names say."""

    net: str = "book"
    lstm: bool = False

    @classmethod
    def of_run(cls, saved: Mapping[str, Any]) -> NetSpec:
        """Read the settings in a run's config.json."""
        return cls(**{name: saved[name] for name in cls._fields if name in saved})


DEFAULT_NET = NetSpec()


def make_actor_critic(
    obs_space: gymnasium.Space, action_space: gymnasium.Space, spec: NetSpec = DEFAULT_NET
) -> ActorCritic:
    """Make the actor-critic net for these spaces.

    Raises:
        ValueError: actions are not discrete 0, 1, ..., A-1.
        ConfigError: there is no such net, or it is for images and observations are vectors.
    """
    if not isinstance(action_space, Discrete) or action_space.start != 0:
        raise ValueError(f"needs discrete actions 0, 1, ..., not {action_space}")
    assert obs_space.shape is not None
    shape, num_actions = obs_space.shape, int(action_space.n)
    name = "book" if spec.net == "shallow" else spec.net  # its name in older versions
    if name not in CONVOLUTIONS:
        raise ConfigError("net", spec.net, f"must be one of {', '.join(map(repr, CONVOLUTIONS))}")
    if not is_image(obs_space):
        if name != "book":
            why = f"observations are of shape {shape}, it needs images (uint8, 36 x 36 or more)"
            raise ConfigError("net", spec.net, why, "leave it out")
        return (
            SharedActorCritic(shape, num_actions, None, lstm=True) if spec.lstm else MLPActorCritic(shape, num_actions)
        )
    if name == "book" and not spec.lstm:
        return ConvActorCritic(shape, num_actions)
    return SharedActorCritic(shape, num_actions, CONVOLUTIONS[name], lstm=spec.lstm)
