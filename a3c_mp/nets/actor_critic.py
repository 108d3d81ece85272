"""Actor-critic networks: observations -> `(logits [B, P], value [B])`, float32 whatever the net computes in.

The logits are those of discrete actions; for continuous ones they are the parameters of a Gaussian (`distributions`).
A recurrent net has an LSTM core: it also takes the core's state [B, S] and returns the next one. S is its `lstm_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from a3c_mp.nets.distributions import ActionHead, Distribution
from a3c_mp.nets.layers import LSTMCore, ResidualBlock, mlp, nature_convolutions, num_features
from a3c_mp.nets.obs_norm import ObsNorm


class ActorCritic(nn.Module):
    """Base of actor-critic nets: observations -> (logits [B, P], value [B]).

    Args:
        norm: applied to the observations.
        head: applied to the outputs of the policy.
    """

    lstm_size = 0

    def __init__(self, norm: ObsNorm, head: ActionHead):
        super().__init__()
        self.norm, self.head = norm, head

    def distribution(self, logits: Tensor) -> Distribution:
        """Return the distribution of actions with logits [..., P]."""
        return self.head.distribution(logits)

    def distributions(self, logits: Tensor, behaviour_logits: Tensor) -> tuple[Distribution, Distribution]:
        """Return (policy, behaviour policy) of the same states: distributions with logits [..., P].

        An action that was not allowed when the behaviour policy acted has probability 0 and no gradient in both.
        """
        masked = self.head.masked_as(logits, behaviour_logits)
        return self.head.distribution(masked), self.head.distribution(behaviour_logits)


class ConvActorCritic(ActorCritic):
    """Convolutional actor-critic: shared convolutions, and separate policy and value heads of 512 hidden units.

    The convolutions are those of Mnih et al. 2015; the separate heads follow Lapan, "Deep Reinforcement Learning
    Hands-On", chapter 13.

    Args:
        obs_shape: [C, H, W] of uint8 images, at least 36 x 36.
        head: of the policy.
    """

    def __init__(self, obs_shape: tuple[int, ...], head: ActionHead, hidden: int = 512):
        super().__init__(ObsNorm(obs_shape, image=True), head)
        self.conv = nature_convolutions(obs_shape[0])
        features = num_features(self.conv, obs_shape)
        self.policy = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, head.num_outputs))
        self.value = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        init_orthogonal(self)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs uint8 [B, C, H, W] -> (logits [B, P], value [B])."""
        features = self.conv(self.norm.convert(obs))
        return self.head(self.policy(features)).float(), self.value(features).squeeze(-1).float()


class MLPActorCritic(ActorCritic):
    """MLP actor-critic for vector observations: tanh layers for the policy, and as many for the value.

    Args:
        obs_shape: shape of float32 observations, flattened.
        head: of the policy.
        hidden: units of each layer.
    """

    def __init__(self, obs_shape: tuple[int, ...], head: ActionHead, hidden: Sequence[int] = (64, 64)):
        super().__init__(ObsNorm(obs_shape, image=False), head)
        inputs = int(torch.Size(obs_shape).numel())
        self.policy = mlp(inputs, hidden, head.num_outputs)
        self.value = mlp(inputs, hidden, 1)
        init_orthogonal(self)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs float32 or uint8 [B, ...] -> (logits [B, P], value [B])."""
        inputs = self.norm.convert(obs)
        inputs = inputs.reshape(inputs.shape[0], -1)
        return self.head(self.policy(inputs)).float(), self.value(inputs).squeeze(-1).float()


class SharedActorCritic(ActorCritic):
    """Actor-critic of A3C and IMPALA: torso, hidden layer, optional LSTM, two linear heads; policy and value share all.

    Mnih et al. 2016, section 5.1; Espeholt et al. 2018, figure 3.

    Args:
        obs_shape: of images uint8 [C, H, W], or of vectors.
        head: of the policy.
        convolutions: channels -> torso for images [N, features]; None for vectors.
        lstm: add an LSTM core after the hidden layer.
    """

    def __init__(
        self, obs_shape: tuple[int, ...], head: ActionHead, convolutions: Callable[[int], nn.Module] | None, *,
        lstm: bool, hidden: int = 256,
    ):  # fmt: skip
        super().__init__(ObsNorm(obs_shape, image=convolutions is not None), head)
        torso = nn.Flatten() if convolutions is None else convolutions(obs_shape[0])
        self.torso = nn.Sequential(torso, nn.Linear(num_features(torso, obs_shape), hidden), nn.ReLU())
        self.core = LSTMCore(hidden, hidden) if lstm else None
        self.lstm_size = 2 * hidden if lstm else 0
        self.policy = nn.Sequential(nn.Linear(hidden, head.num_outputs))
        self.value = nn.Sequential(nn.Linear(hidden, 1))
        init_orthogonal(self)
        for module in self.modules():
            if isinstance(module, ResidualBlock):
                nn.init.zeros_(module.second.weight)  # starts as the identity: activations keep their scale
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        """obs [B, ...] -> (logits [B, P], value [B]); with an LSTM, also state [B, S] -> the next state."""
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
        return self.head(self.policy(features)).float(), self.value(features).squeeze(-1).float()


def initial_state(net: ActorCritic, num_envs: int) -> list[Tensor]:
    """Return the LSTM state at the start of B episodes, [zeros [B, S] float32]; [] for nets without an LSTM."""
    return [torch.zeros(num_envs, net.lstm_size, device=net.norm.shift.device)] if net.lstm_size else []


def unroll(net: ActorCritic, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Compute policy logits and values at every step of an unroll.

    Args:
        obs: [T, B, ...].
        state: [B, S], the LSTM's before obs[0].
        starts: bool [T, B], whether obs[t] is an episode's first.

    Returns:
        (logits [T, B, P], values [T, B]).
    """
    if isinstance(net, SharedActorCritic) and net.core is not None:
        logits, values, _ = net.unroll(obs, state, starts)
        return logits, values
    logits, values = net(obs.flatten(0, 1))
    return logits.unflatten(0, starts.shape), values.unflatten(0, starts.shape)


def init_orthogonal(net: ConvActorCritic | MLPActorCritic | SharedActorCritic) -> None:
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
