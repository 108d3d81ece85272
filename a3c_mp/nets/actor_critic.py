"""Actor-critic networks: observations -> `(logits [B, P], value [B])`, float32 whatever the net computes in.

The logits are those of discrete actions; for continuous ones they are the parameters of a Gaussian (`distributions`).
A net with an LSTM also takes the LSTM's state [B, S] and returns the next one. S is its `lstm_size`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from a3c_mp.nets.distributions import MASKED, ActionHead, Distribution
from a3c_mp.nets.layers import LSTMCore, ResidualBlock, mlp, num_features
from a3c_mp.nets.obs_norm import ObsNorm


class ActorCritic(nn.Module):
    """Base of actor-critic nets: `norm` is applied to the observations, `head` to the outputs of the policy."""

    lstm_size = 0

    def __init__(self, norm: ObsNorm, head: ActionHead):
        super().__init__()
        self.norm, self.head = norm, head
        self.register_buffer("reward_scale", torch.ones(()))  # the learner's: values are those of rewards times this

    def distribution(self, logits: Tensor) -> Distribution:
        return self.head.distribution(logits)

    def distributions(self, logits: Tensor, behaviour_logits: Tensor) -> tuple[Distribution, Distribution]:
        """(Policy, behaviour policy) of the same states, with logits [..., P]."""
        if self.head.sizes:  # what was not allowed when the behaviour policy acted has probability 0 in both
            logits = logits.masked_fill(behaviour_logits == MASKED, MASKED)
        return self.distribution(logits), self.distribution(behaviour_logits)

    def initial_state(self, num_envs: int) -> list[Tensor]:
        """The LSTM state at the start of B episodes, [zeros [B, S] float32]; [] without an LSTM."""
        return [torch.zeros(num_envs, self.lstm_size, device=self.norm.shift.device)] if self.lstm_size else []

    def unroll(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (policy logits [T, B, P], values [T, B], next state [B, S]) at every step of an unroll.

        `state` [B, S] is the LSTM's before obs[0]; `starts`, bool [T, B], says whether obs[t] is an episode's first.
        """
        logits, values = self(obs.flatten(0, 1))
        return logits.unflatten(0, starts.shape), values.unflatten(0, starts.shape), state


class LayeredActorCritic(ActorCritic):
    """Actor-critic of a torso, normalized observations [N, *obs_shape] -> features [N, F], an optional LSTM with F
    outputs, and an MLP each for policy and value, with these `hidden` layers."""

    def __init__(
        self, norm: ObsNorm, head: ActionHead, torso: nn.Module, hidden: Sequence[int], activation: type[nn.Module],
        core: LSTMCore | None = None,
    ):  # fmt: skip
        super().__init__(norm, head)
        self.torso, self.core = torso, core
        features = num_features(torso, norm.shift.shape[1:])
        self.policy, self.value = (mlp([features, *hidden, num], activation) for num in (head.num_outputs, 1))
        self.lstm_size = 0 if core is None else 2 * core.from_output.in_features
        init_orthogonal(self)
        if norm.has_images:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor, state: Tensor | None = None) -> tuple[Tensor, ...]:
        """obs [B, *obs_shape] -> (logits [B, P], value [B]); with an LSTM, also state [B, S] -> the next state."""
        if self.core is None:
            return self._heads(self.torso(self.norm.convert(obs)))
        assert state is not None
        starts = torch.zeros(1, obs.shape[0], dtype=torch.bool, device=state.device)
        logits, values, state = self.unroll(obs[None], state, starts)
        return logits[0], values[0], state

    def unroll(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.core is None:
            return super().unroll(obs, state, starts)
        features = self.torso(self.norm.convert(obs.flatten(0, 1))).unflatten(0, starts.shape)
        outputs, state = self.core(features, state, starts)
        logits, values = self._heads(outputs)
        return logits, values, state

    def _heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.policy(features)).float(), self.value(features).squeeze(-1).float()


def init_orthogonal(net: LayeredActorCritic) -> None:
    """Orthogonal weights, zero biases, a nearly uniform policy (Engstrom et al. 2020, "Implementation matters")."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(module.weight, gain=2**0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.orthogonal_(net.policy[-1].weight, gain=0.01)  # type: ignore[arg-type]
    nn.init.orthogonal_(net.value[-1].weight, gain=1.0)  # type: ignore[arg-type]
    for module in net.modules():
        if isinstance(module, ResidualBlock):
            nn.init.zeros_(module.second.weight)  # starts as the identity: activations keep their scale
