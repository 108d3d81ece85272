"""Q networks: dueling DQN for discrete actions, DDPG's and TD3's actor and critics for continuous ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from a3c_mp.nets.layers import image_torso, mlp, num_features
from a3c_mp.nets.obs_norm import ObsNorm

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU, "tanh": nn.Tanh}


class QNet(nn.Module):
    """Base of Q networks, whose `quantiles` of returns have Q as their mean (Dabney et al. 2018)."""

    def __init__(self, norm: ObsNorm):
        super().__init__()
        self.norm = norm
        self.register_buffer("reward_scale", torch.ones(()))  # the learner's: values are those of rewards times this

    def forward(self, obs: Tensor) -> tuple[Tensor]:
        """obs uint8 or float32 [B, ...] -> (q float32 [B, A],)."""
        return (self.quantiles(obs).mean(dim=2),)

    def quantiles(self, obs: Tensor) -> Tensor:
        """obs [B, ...] -> quantiles of returns, float32 [B, A, K]; with K = 1 they are Q itself."""
        return self.of_inputs(self.norm.convert(obs))

    def of_inputs(self, inputs: Tensor) -> Tensor:
        """Normalized observations [B, ...], which it does not change -> quantiles."""
        raise NotImplementedError


class OwnQ(QNet):
    """Q network around the user's own `body`: normalized observations [B, *obs_shape] -> Q [B, A], or K quantiles."""

    def __init__(self, norm: ObsNorm, body: nn.Module):
        super().__init__(norm)
        self.body = body

    def of_inputs(self, inputs: Tensor) -> Tensor:
        outputs = self.body(inputs.clone()).float()  # its first layer may work in place
        return outputs if outputs.dim() == 3 else outputs[..., None]


class DuelingQ(QNet):
    """Dueling Q network: Q(s, a) = V(s) + A(s, a) - mean_a A(s, a) (Wang et al. 2016, equation 9).

    Images go through the convolutions of Mnih et al. 2015, or others (see `layers.image_torso`), vectors through the
    first of the `hidden` layers. Value and advantage have the other layers each: by default 256 units on images, both
    as many as the net of Mnih et al., 128 after the common 128 on vectors. All have an `activation` of `ACTIVATIONS`;
    `image` is as in `ObsNorm`.
    """

    def __init__(
        self, obs_shape: tuple[int, ...], num_actions: int, image: bool | tuple[int, ...] | None,
        hidden: Sequence[int] | None = None, activation: str = "relu",
        convs: str | Sequence[tuple[int, ...]] = "nature", num_quantiles: int = 1,
    ):  # fmt: skip
        super().__init__(ObsNorm(obs_shape, image))
        sizes = list(hidden or ((256,) if image else (128, 128)))
        act = ACTIVATIONS[activation]
        if self.norm.image_shape:
            self.torso = image_torso(convs, obs_shape, self.norm.image_shape)
            features = num_features(self.torso, obs_shape)
        else:
            inputs, features = torch.Size(obs_shape).numel(), sizes.pop(0)
            self.torso = nn.Sequential(nn.Flatten(), nn.Linear(inputs, features), act())
        self.value = mlp([features, *sizes, num_quantiles], act)
        self.advantage = mlp([features, *sizes, num_actions * num_quantiles], act)
        if image:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def of_inputs(self, inputs: Tensor) -> Tensor:
        features = self.torso(inputs)
        value = self.value(features).float()[:, None]  # float32: in bfloat16 the sum would make actions equal
        advantage = self.advantage(features).float().unflatten(1, (-1, value.shape[2]))
        return value + advantage - advantage.mean(dim=1, keepdim=True)


class DDPGNet(nn.Module):
    """DDPG's actor mu(s) in [-1, 1]^D and critic Q(s, a), D numbers per action (Lillicrap et al. 2016, section 7)."""

    algo, has_twin = "ddpg", False

    def __init__(self, obs_shape: tuple[int, ...], action_shape: tuple[int, ...], hidden: Sequence[int] = (256, 256)):
        super().__init__()
        self.action_shape = action_shape
        inputs, outputs = torch.Size(obs_shape).numel(), torch.Size(action_shape).numel()
        self.norm = ObsNorm(obs_shape, None)
        self.register_buffer("reward_scale", torch.ones(()))
        self.actor = nn.Sequential(*mlp([inputs, *hidden, outputs], nn.ReLU), nn.Tanh())
        self.critic = mlp([inputs + outputs, *hidden, 1], nn.ReLU)
        near_zero(self.actor[-2])  # first actions near the middle, first values near zero
        near_zero(self.critic[-1])
        if self.has_twin:
            self.twin = mlp([inputs + outputs, *hidden, 1], nn.ReLU)
            near_zero(self.twin[-1])

    def forward(self, obs: Tensor) -> tuple[Tensor]:
        """obs float32 or uint8 [B, ...] -> (mu(s) [B, *action_shape],)."""
        return (self.actor(self.norm.convert(obs).flatten(1)).view(-1, *self.action_shape),)

    def q(self, obs: Tensor, action: Tensor) -> Tensor:
        """Q(s, a) [B] by the first critic, for obs [B, ...] and actions [B, *action_shape] in [-1, 1]."""
        return self.qs(obs, action, 1)[0]

    def qs(self, obs: Tensor, action: Tensor, num_critics: int | None = None) -> list[Tensor]:
        """Q(s, a) [B] of each critic, or of the first ones."""
        flat_obs = self.norm.convert(obs).flatten(1)
        inputs = torch.cat([flat_obs, action.reshape(len(action), -1).to(flat_obs.dtype)], dim=1)
        return [critic(inputs).squeeze(-1) for critic in self.critics()[:num_critics]]

    def critics(self) -> list[nn.Module]:
        """All nets of action values; the policy follows the first."""
        return [self.critic, self.twin] if self.has_twin else [self.critic]


class TD3Net(DDPGNet):
    """DDPG's net with a second critic (Fujimoto et al. 2018)."""

    algo, has_twin = "td3", True


def near_zero(layer: nn.Module) -> None:
    for tensor in layer.parameters():
        nn.init.uniform_(tensor, -3e-3, 3e-3)
