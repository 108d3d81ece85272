"""Ape-X DPG (Horgan et al. 2018): DDPG for continuous actions, with exploration noise in the actors.

Nets and replay use actions in [-1, 1]; environments get them scaled to their own bounds. A module of plain
functions with the same names as in `dqn` and `td3`; `--algo` picks one of them.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from a3c_mp.algorithms.apex import ladder
from a3c_mp.algorithms.apex_settings import Args
from a3c_mp.errors import ConfigError
from a3c_mp.maths.losses import Metrics
from a3c_mp.nets.build import DEFAULT_NET, NetSpec, check_net
from a3c_mp.nets.layers import image_shape
from a3c_mp.nets.precision import acting_forward
from a3c_mp.nets.q_values import DDPGNet
from a3c_mp.processes.slots import Spec
from a3c_mp.replay import Batch
from a3c_mp.run import evaluate
from a3c_mp.wrappers import ActionScaling

ACTIONS = Box
AT_BOUND = 0.99  # absolute action from which on it is counted as one at its bound


def make_net(
    obs_space: gymnasium.Space, action_space: gymnasium.Space, spec: NetSpec = DEFAULT_NET,
    net_class: type[DDPGNet] = DDPGNet,
) -> DDPGNet:  # fmt: skip
    """Make actor and critic. Raises ConfigError for image observations and for actions without bounds."""
    assert isinstance(action_space, Box), action_space
    fix = "use train_a3c_data.py"
    if (shape := image_shape(obs_space)) is not None:
        raise ConfigError("algo", net_class.algo, f"observations have images {shape}, it needs vectors", fix)
    if not ActionScaling(action_space).is_bounded.all():
        why = f"the bounds of {action_space} are not finite, or too far apart"
        raise ConfigError("algo", net_class.algo, why, fix)
    if spec.net != DEFAULT_NET.net:
        why = f"--algo {net_class.algo} has a net of its own"
        raise ConfigError("net", spec.net, why, "leave it out, or use --hidden")
    check_net(spec, obs_space.shape or (), image=False)
    return net_class(obs_space.shape or (), action_space.shape, spec.hidden or (256, 256))


def stored(args: Args, action_space: gymnasium.Space) -> tuple[gymnasium.Space, Spec]:
    shape = action_space.shape or ()
    return Box(-1.0, 1.0, shape, np.float32), {"noise": ((args.num_envs, *shape), torch.float64)}


def make_optimizer(args: Args, net: DDPGNet) -> torch.optim.Optimizer:
    if args.optimizer != "adam":
        why = f"{args.algo} supports only adam"
        raise ConfigError("optimizer", args.optimizer, why, "leave it out, or use --algo dqn")
    factor = args.policy_learning_rate / (args.learning_rate or 1.0)  # both are annealed in proportion
    groups = [
        {"params": [p for critic in net.critics() for p in critic.parameters()], "lr": args.learning_rate},
        {"params": list(net.actor.parameters()), "lr": args.policy_learning_rate, "lr_factor": factor},
    ]
    return torch.optim.Adam(groups, eps=args.adam_eps, fused=True)


class Policy:
    """Deterministic policy of an actor plus exploration noise, with one standard deviation for each environment.

    The noise x of an environment is an Ornstein-Uhlenbeck process (Lillicrap et al. 2016) with standard deviation
    sigma: the next x is m x + sqrt(1 - m^2) sigma N(0, 1), where m is `--noise-memory`. m = 0 gives white noise.

    Arguments are those of `dqn.Policy`; `restored` are the `fields()` of a predecessor.
    """

    def __init__(
        self, args: Args, net: DDPGNet, action_space: gymnasium.Space, example: np.ndarray, actor: int,
        restored: Mapping[str, np.ndarray] | None = None,
    ):  # fmt: skip
        self.args, self.net, self.to_env, self.memory = args, net, ActionScaling(action_space), args.noise_memory
        noise, states = np.zeros((len(example), *action_space.shape)), torch.from_numpy(example)  # type: ignore[misc]
        self._act = acting_forward(args, net, states, torch.from_numpy(noise), function=self._choose)
        self._value = acting_forward(args, net, states, function=lambda states: (net.q(states, net(states)[0]),))
        self.place(actor, args.num_actors)
        self.noise: Any = restored["noise"].copy() if restored else None  # [B, ...] float64, drawn at the first step

    def place(self, actor: int, num_actors: int) -> None:
        """Take the standard deviations of actor number `actor` of so many."""
        sigmas = ladder(self.args.noise, self.args.noise_exponent, actor, self.args.num_envs, num_actors)
        self.sigmas = sigmas.reshape(-1, *[1] * self.to_env.center.ndim)

    def fields(self) -> dict[str, np.ndarray]:
        """Return the state for a successor: the noise, which is correlated between steps."""
        return {"noise": self.noise}

    @torch.inference_mode()
    def act(
        self, obs: np.ndarray, rng: np.random.Generator, mask: np.ndarray | None = None, warm_up: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Choose noisy actions: (action float32 [B, ...] in [-1, 1], Q(s, a) [B], Q(s, mu(s)) [B])."""
        shape = len(obs), *self.to_env.center.shape
        if self.noise is None:
            self.noise = self.sigmas * rng.standard_normal(shape)
        self.noise = self.memory * self.noise + (1 - self.memory**2) ** 0.5 * self.sigmas * rng.standard_normal(shape)
        action, q = (part.numpy() for part in self._act(torch.from_numpy(obs), torch.from_numpy(self.noise)))
        return action, q[: len(obs)], q[len(obs) :]

    def _choose(self, states: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy actions float32 [B, ...] in [-1, 1]; Q of these and of those without noise, [2 B]."""
        best = self.net(states)[0].float()
        action = (best + noise).clamp(-1.0, 1.0).float().nan_to_num()  # for observations with NaN any action will do
        return action, self.net.q(torch.cat([states, states]), torch.cat([action, best])).float()

    @torch.inference_mode()
    def value(self, obs: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Compute Q(s, mu(s)) [B], for bootstrapping."""
        return self._value(torch.from_numpy(obs))[0].float().numpy()


def q_values(net: DDPGNet, batch: Batch) -> list[Tensor]:
    """Return Q(s, a) [N, 1] float32 of the actions that were taken, for each critic."""
    return [q.float()[:, None] for q in net.qs(batch.obs, batch.action)]


@torch.no_grad()
def bootstrap_values(args: Args, net: DDPGNet, target_net: DDPGNet, batch: Batch) -> Tensor:
    """Return Q_target(s', mu_target(s')) [N, 1] float32, s' being m <= n steps later (Lillicrap et al. 2016)."""
    return target_net.q(batch.next_obs, target_net(batch.next_obs)[0]).float()[:, None]


def policy_loss(net: DDPGNet, batch: Batch) -> tuple[Tensor, Metrics]:
    """Compute (loss, metrics) of the policy mu, by the deterministic policy gradient (Silver et al. 2014, theorem 1).

    The gradient of the loss is that of mu: -dQ(s, a)/da dmu(s)/dtheta at a = mu(s); there is none for the critic.
    """
    best = net(batch.obs)[0]
    point = best.detach().requires_grad_()
    value = net.q(batch.obs, point)
    (action_gradient,) = torch.autograd.grad(value.sum(), point)
    return -(best * action_gradient).sum() / len(best), {
        "losses/policy": -value.detach(),
        "policy/at_bounds": best.detach().abs() > AT_BOUND,
    }


def make_policy(net: nn.Module, action_space: gymnasium.Space) -> evaluate.Policy:
    to_env = ActionScaling(action_space)

    @torch.inference_mode()
    def act(obs: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        return to_env(net(torch.from_numpy(obs))[0].float().nan_to_num().numpy())  # of NaN any action will do

    return act
