"""What the actor-critic chapters share: settings, presets, and the way from a rollout to a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from a3c_mp.config import Between, Count, Fraction, LearningArgs, NonNegative
from a3c_mp.data.actor_states import ActorLayout
from a3c_mp.data.collector import acting_state_spec
from a3c_mp.data.rollout import Rollout
from a3c_mp.errors import ConfigError
from a3c_mp.maths import losses, returns
from a3c_mp.nets.precision import autocast
from a3c_mp.processes.slots import Slots, Spec

NORM_STEPS = 2
"""steps of a rollout of images that the statistics of observations are taken from: plenty, and cheap"""


@dataclass(frozen=True)
class RolloutArgs(LearningArgs):
    """Settings of every chapter whose actors send rollouts."""

    unroll_length: Count = 32
    """agent steps in one rollout (T)"""
    slots_per_actor: Annotated[int, Between(1, 64)] = 1
    """rollouts of an actor in flight: with 1 it waits while its rollout is learned from, with 2 it goes on"""
    learning_rate: NonNegative = 5e-4
    """step size at the start, falling linearly to 0 at total-steps"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """rmsprop is that of the A3C and IMPALA papers"""
    adam_eps: Annotated[float, Between(1e-12)] = 1e-5
    """epsilon of Adam"""
    rmsprop_eps: Annotated[float, Between(1e-12)] = 1e-5
    """epsilon of RMSProp (decay 0.99); the papers' 0.01 and 0.1 go with losses that are sums, those here are means"""
    clip_grad: NonNegative = 1.0
    """largest norm of a gradient"""
    entropy_cost: NonNegative = 0.01
    """weight of the entropy bonus"""
    value_cost: NonNegative = 2.0
    """weight of the value loss"""
    normalize_advantages: bool = True
    """scale the advantages that are learned from together to mean 0 and variance 1"""


@dataclass(frozen=True)
class ActorCriticArgs(RolloutArgs):
    batch_size: Count = 128
    """samples in one gradient; at most those of a rollout, T * B"""
    returns: Literal["gae", "nstep"] = "gae"
    """estimator of returns"""
    gae_lambda: Fraction = 0.95
    """lambda of --returns gae"""
    n_step: Count = 4
    """rewards in a return of --returns nstep"""
    clip_ratio: NonNegative = 0.2
    """PPO clip range: ratios beyond 1 +- this give no gradient"""


CARTPOLE: dict[str, Any] = {"total_steps": 1_000_000, "num_envs": 8, "batch_size": 64, "learning_rate": 1e-3}
PRESETS: dict[str, dict[str, Any]] = {
    "PongNoFrameskip-v4": {"stop_return": 18.0, "total_steps": 2_000_000},
    "BreakoutNoFrameskip-v4": {"stop_return": 400.0},
    "CartPole-v0": {**CARTPOLE, "stop_return": 195.0},
    "CartPole-v1": {**CARTPOLE, "stop_return": 475.0},
}


def obs_for_stats(obs: Tensor, image: bool) -> Tensor:
    """[N, *obs_shape]: the observations of a rollout [T + 1, B, *obs_shape] that the running moments take in.

    Vectors: all that are new. The last ones alone would show games that began together in one and the same phase, and
    the moments would swing with it, and with them a policy that has learned nothing new.
    """
    return obs[-NORM_STEPS if image else 1 :].flatten(0, 1)


def rollout_layout(
    args: RolloutArgs, action_space: gymnasium.Space, core_size: int = 0, messages: int = 1
) -> ActorLayout:
    """What actors that collect rollouts send beside them; `messages` for each rollout."""
    carried = acting_state_spec(args.num_envs, action_space, core_size)
    return ActorLayout(action_space, args.unroll_length, carried, args.slots_per_actor, messages)


def allocate(args: ActorCriticArgs, spec: Spec, device: torch.device | str = "cpu") -> Slots:
    """The slots of all actors, one arena on `device`; on the CPU it is pinned where the nets are on a GPU.

    Raises:
        ConfigError: sizes that do not go together, or need more shared memory than there is.
    """
    if args.batch_size > args.unroll_length * args.num_envs:
        why = f"a rollout has only {args.unroll_length} * {args.num_envs} samples"
        raise ConfigError("batch-size", args.batch_size, why, "lower it, or raise --unroll-length or --num-envs")
    return allocate_slots(args, spec, args.num_actors, device)


def make_optimizer(args: RolloutArgs, net: nn.Module) -> torch.optim.Optimizer:
    """What the settings ask for; the chapters lower its step size as they go on."""
    if args.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    return torch.optim.RMSprop(net.parameters(), lr=args.learning_rate, alpha=0.99, eps=args.rmsprop_eps)


def allocate_slots(args: RolloutArgs, spec: Spec, num_actors: int, device: torch.device | str = "cpu") -> Slots:
    """The slots of so many actors, one arena. Raises ConfigError as `allocate` does."""
    if args.deterministic and args.slots_per_actor > 2:
        why = "--deterministic acts with one of two published versions, so two rollouts can be in flight"
        raise ConfigError("slots-per-actor", args.slots_per_actor, why, "use 1 or 2")
    try:
        on_cpu = torch.device(device).type == "cpu"
        return Slots(spec, num_actors * args.slots_per_actor, pin=args.cuda and on_cpu, device=device)
    except MemoryError as error:
        fix = "lower --num-actors, --num-envs or --unroll-length"
        raise ConfigError("num-envs", args.num_envs, str(error), fix) from error


def rewards_and_discounts(args: RolloutArgs, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Rewards as they are learned from, and discounts, 0 wherever a return ends; both [T, B]."""
    rewards = args.reward_scale * (rollout.reward.sign() if args.reward_clip else rollout.reward)
    ended = rollout.terminated | rollout.life_lost if args.life_loss_terminal else rollout.terminated
    discounts = args.gamma * (~ended).float()
    return returns.cut_truncated(rewards, discounts, rollout.truncated, rollout.final_baseline)


def targets(args: ActorCriticArgs, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """(advantages, targets of the value function), both [T, B], from the values of the acting pass."""
    rewards, discounts = rewards_and_discounts(args, rollout)
    values, bootstrap_value = rollout.baseline[:-1], rollout.baseline[-1]
    if args.returns == "gae":
        return returns.gae(rewards, discounts, values, bootstrap_value, args.gae_lambda)
    value_targets = returns.n_step_returns(rewards, discounts, values, bootstrap_value, args.n_step)
    return value_targets - values, value_targets


class Samples(NamedTuple):
    """N steps as the learner takes them, in any order."""

    obs: Tensor  # [N, *obs_shape]
    action: Tensor  # [N] int64
    behaviour_logits: Tensor  # [N, A] float32, of the policy that acted
    advantages: Tensor  # [N] float32, constants
    value_targets: Tensor  # [N] float32, constants

    @classmethod
    def of(cls, args: ActorCriticArgs, rollout: Rollout) -> Samples:
        """Every step of a rollout, with advantages and value targets as the settings want them."""
        advantages, value_targets = targets(args, rollout)
        if args.normalize_advantages:
            advantages = losses.normalize(advantages)
        fields = (rollout.obs[:-1], rollout.action, rollout.behaviour_logits, advantages, value_targets)
        return cls(*(field.flatten(0, 1) for field in fields))

    def select(self, indices: Tensor) -> Samples:
        """Some of the samples, by int64 indices [M]."""
        return Samples(*(field.index_select(0, indices) for field in self))


def loss(args: ActorCriticArgs, net: nn.Module, samples: Samples) -> tuple[Tensor, dict[str, Tensor]]:
    """(A3C's loss as chapter 1 has it, metrics for TensorBoard)."""
    obs, action, behaviour_logits, advantages, value_targets = samples
    with autocast(args.precision, net):
        logits, values = (output.float() for output in net(obs))
    log_probs, behaviour_log_probs = losses.log_prob(logits, action), losses.log_prob(behaviour_logits, action)
    policy_loss = losses.clipped_policy_loss(log_probs, behaviour_log_probs, advantages, args.clip_ratio)
    value_loss = losses.value_loss(values, value_targets)
    entropy_loss = losses.entropy_loss(logits)
    total = policy_loss + args.value_cost * value_loss + args.entropy_cost * entropy_loss
    metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": advantages, "values/baseline": values, "values/target": value_targets}
    return total, metrics | {"losses/total": total}
