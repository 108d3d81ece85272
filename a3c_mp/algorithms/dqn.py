"""Ape-X DQN (Horgan et al. 2018): dueling double Q-learning on n-step transitions, epsilon-greedy actors.

With `--num-quantiles` its net learns the distribution of returns, as QR-DQN (Dabney et al. 2018).

A module of plain functions with the same names as in `ddpg` and `td3`; `--algo` picks one of them.
"""

import math
from collections.abc import Mapping

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn

from a3c_mp.algorithms.apex import ladder
from a3c_mp.algorithms.apex_settings import Args
from a3c_mp.errors import ConfigError
from a3c_mp.maths.losses import Metrics
from a3c_mp.nets.build import DEFAULT_NET, NetSpec, check_net
from a3c_mp.nets.layers import image_shape
from a3c_mp.nets.own import make_own_net
from a3c_mp.nets.precision import acting_forward
from a3c_mp.nets.q_values import DuelingQ, OwnQ, QNet
from a3c_mp.processes.slots import Spec
from a3c_mp.replay import Batch
from a3c_mp.run import evaluate

ACTIONS = Discrete


def make_net(obs_space: gymnasium.Space, action_space: gymnasium.Space, spec: NetSpec = DEFAULT_NET) -> QNet:
    assert isinstance(action_space, Discrete), action_space
    assert obs_space.shape is not None
    shape, image, num_actions = obs_space.shape, image_shape(obs_space), int(action_space.n)
    check_net(spec, shape, image is not None)
    if ":" in spec.net:
        if spec.hidden:
            hidden = " ".join(map(str, spec.hidden))
            raise ConfigError("hidden", hidden, "a net of your own has sizes of its own", "leave it out")
        outputs = (3, num_actions, spec.num_quantiles) if spec.num_quantiles > 1 else (3, num_actions)
        return make_own_net(spec.net, obs_space, action_space, OwnQ, (outputs,))
    return DuelingQ(shape, num_actions, image, spec.hidden, convs=spec.net, num_quantiles=spec.num_quantiles)


def stored(args: Args, action_space: gymnasium.Space) -> tuple[gymnasium.Space, Spec]:
    """Return the space of actions in the replay, and shapes and dtypes of `Policy.fields`."""
    return action_space, {}


def make_optimizer(args: Args, net: nn.Module) -> torch.optim.Optimizer:
    if args.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    return torch.optim.RMSprop(net.parameters(), lr=args.learning_rate, alpha=0.95, eps=args.adam_eps, centered=True)


class Policy:
    """Epsilon-greedy policy of an actor, with one epsilon for each environment; see `apex.ladder`.

    `net`, into which the caller loads new weights, is observations -> (q [B, A],); `example` are observations
    [B, *obs_shape], `action_space` is that of one environment. This policy has no state that would be `restored`.
    """

    def __init__(
        self, args: Args, net: nn.Module, action_space: gymnasium.Space, example: np.ndarray, actor: int,
        restored: Mapping[str, np.ndarray] | None = None,
    ):  # fmt: skip
        self.args, self.forward = args, acting_forward(args, net, torch.from_numpy(example))
        self.place(actor, args.num_actors)

    def place(self, actor: int, num_actors: int) -> None:
        """Take the epsilons of actor number `actor` of so many."""
        self.epsilons = ladder(self.args.epsilon, self.args.ladder_exponent, actor, self.args.num_envs, num_actors)

    def fields(self) -> dict[str, np.ndarray]:
        return {}

    def act(
        self, obs: np.ndarray, rng: np.random.Generator, mask: np.ndarray | None = None, warm_up: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Choose actions: (action int64 [B], Q(s, a) [B], max_a Q(s, a) [B]); in the warm-up, all are random.

        A mask, bool [B, A], says which actions are allowed.
        """
        q = self._q(obs, mask)
        is_random = rng.random(len(q)) < (1.0 if warm_up else self.epsilons)
        action = np.where(is_random, random_actions(rng, q.shape, mask), q.argmax(axis=1))
        return action, q[np.arange(len(q)), action], q.max(axis=1)

    def value(self, obs: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Return max_a Q(s, a) [B] over the allowed actions, for bootstrapping."""
        return self._q(obs, mask).max(axis=1)

    def to_env(self, action: np.ndarray) -> np.ndarray:
        return action

    @torch.inference_mode()
    def _q(self, obs: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        return allowed_q(self.forward(torch.from_numpy(obs))[0].numpy(), mask)


def allowed_q(q: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return Q values [B, A], minus infinity where a mask, bool [B, A], does not allow the action."""
    return q if mask is None else np.where(mask, q, -np.inf)


def random_actions(rng: np.random.Generator, shape: tuple[int, ...], mask: np.ndarray | None) -> np.ndarray:
    """Return uniformly random actions int64 [B] for Q values of shape [B, A], among those that a mask allows."""
    if mask is None:
        return rng.integers(shape[1], size=shape[0])
    return np.where(mask, rng.random(shape), -1.0).argmax(axis=1)


def q_values(net: QNet, batch: Batch) -> list[Tensor]:
    """Return the quantiles of Q(s, a), float32 [N, K], of the actions that were taken, for its one critic."""
    return [of_actions(net.quantiles(batch.obs), batch.action)]


def of_actions(quantiles: Tensor, action: Tensor) -> Tensor:
    """Return the quantiles [N, K] of one action each, int64 [N], among those of all, [N, A, K]."""
    return quantiles.gather(1, action[:, None, None].expand(-1, 1, quantiles.shape[2])).squeeze(1)


@torch.no_grad()
def bootstrap_values(args: Args, net: QNet, target_net: QNet, batch: Batch) -> Tensor:
    """Return the quantiles of Q_target(s', argmax_a Q(s', a)), float32 [N, K], s' being m <= n steps later.

    The argmax is over the actions that s' allows (van Hasselt et al. 2016). Both nets get inputs by the statistics of
    now: normalizing images twice would be a tenth of an update.
    """
    inputs = net.norm.convert(batch.next_obs)
    next_q, next_target = net.of_inputs(inputs).mean(dim=2), target_net.of_inputs(inputs)
    assert next_q.shape == next_target.shape[:2] == (*batch.reward.shape, next_q.shape[-1]), next_q.shape
    if batch.next_mask.shape[1]:
        next_q = next_q.masked_fill(~batch.next_mask, -math.inf)
    return of_actions(next_target, next_q.argmax(dim=1))


def policy_loss(net: nn.Module, batch: Batch) -> tuple[float, Metrics]:
    return 0.0, {}  # the policy is the argmax of Q


def make_policy(net: nn.Module, action_space: gymnasium.Space) -> evaluate.Policy:
    @torch.inference_mode()
    def act(obs: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        return allowed_q(net(torch.from_numpy(obs))[0].numpy(), mask).argmax(axis=1)

    return act
