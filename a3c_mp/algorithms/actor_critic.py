"""Optimizer, slots, advantages (GAE, n-step returns), samples and epochs of the actor-critics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import gymnasium
import torch
from torch import Tensor, nn

from a3c_mp.algorithms.actor_critic_settings import ActorCriticArgs, PPOArgs, RolloutArgs
from a3c_mp.data.collector import acting_state_spec
from a3c_mp.data.resume_states import ActorLayout
from a3c_mp.data.rollout import Rollout, minibatches
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.maths import losses, returns
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.precision import autocast
from a3c_mp.processes.slots import Slots, Spec
from a3c_mp.run.guard import NonFiniteFilter, update_norm
from a3c_mp.run.progress import RunState

NORM_STEPS = 2
"""steps of an image rollout that update the observation statistics: enough samples, at low cost"""

A = TypeVar("A", bound=PPOArgs)


def obs_for_stats(obs: Tensor, image: bool) -> Tensor:
    """Select the observations of a rollout that update the running mean and variance.

    Images: those of the last `NORM_STEPS` steps. Vectors: all that are new. Games that started together are in the same
    phase, so with the last vectors alone the mean and variance would oscillate, and the policy with them.

    Args:
        obs: [T + 1, B, *obs_shape]; returned are [N, *obs_shape].
    """
    return obs[-NORM_STEPS if image else 1 :].flatten(0, 1)


def rollout_layout(
    args: RolloutArgs, action_space: gymnasium.Space, lstm_size: int = 0, messages: int = 1
) -> ActorLayout:
    """Return the layout of the states that actors send with rollouts, in `messages` messages for each rollout."""
    successor_state = acting_state_spec(args.num_envs, action_space, lstm_size)
    return ActorLayout(action_space, args.unroll_length, successor_state, args.slots_per_actor, messages)


def allocate(args: ActorCriticArgs, spec: Spec, device: torch.device | str = "cpu") -> Slots:
    """Allocate the slots of all actors, one arena on `device`; on the CPU it is pinned if the nets are on a GPU.

    Raises:
        ConfigError: inconsistent sizes, or too little shared memory.
    """
    if args.batch_size > args.unroll_length * args.num_envs:
        why = f"a rollout has only {args.unroll_length} * {args.num_envs} samples"
        raise ConfigError("batch-size", args.batch_size, why, "lower it, or raise --unroll-length or --num-envs")
    return allocate_slots(args, spec, args.max_actors, device)


def make_optimizer(args: RolloutArgs, net: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer that the settings name; `set_learning_rate` anneals its learning rate."""
    if args.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    return torch.optim.RMSprop(net.parameters(), lr=args.learning_rate, alpha=0.99, eps=args.rmsprop_eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, args: RolloutArgs, steps: int) -> None:
    """Set the learning rate of all parameters: from `--learning-rate` to its end, linear over `--anneal-steps`."""
    for group in optimizer.param_groups:
        group["lr"] = linear(*args.learning_rates, steps, args.anneal_steps or args.total_steps)


def anneal_entropy_coef(args: A, steps: int) -> A:
    """Return the settings with the entropy coefficient after `steps`: linear to its end over `--entropy-steps`."""
    if args.entropy_coef_end is None:
        return args
    total = args.entropy_steps or args.total_steps
    return replace(args, entropy_coef=linear(args.entropy_coef, args.entropy_coef_end, steps, total))


def allocate_slots(args: RolloutArgs, spec: Spec, num_actors: int, device: torch.device | str = "cpu") -> Slots:
    """Allocate the slots of `num_actors` actors, one arena. Raises ConfigError as `allocate` does."""
    if args.deterministic and args.slots_per_actor > 2:
        why = "--deterministic keeps two versions of the weights, so at most two rollouts can be in flight"
        raise ConfigError("slots-per-actor", args.slots_per_actor, why, "use 1 or 2")
    try:
        on_cpu = torch.device(device).type == "cpu"
        return Slots(spec, num_actors * args.slots_per_actor, pin=args.cuda and on_cpu, device=device)
    except (MemoryError, torch.OutOfMemoryError) as error:  # of the machine, or of its GPU
        why, fix = one_line(error), "lower --num-actors, --num-envs or --unroll-length"
        raise ConfigError("num-envs", args.num_envs, why, fix) from error


def rewards_and_discounts(args: RolloutArgs, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Return (clipped and scaled rewards, discounts), both [T, B]; discounts are 0 where a return ends.

    At truncated steps, the reward includes the bootstrap value (see `cut_truncated`).
    """
    rewards = args.reward_scale * (rollout.reward.sign() if args.reward_clip else rollout.reward)
    ended = rollout.terminated | rollout.life_lost if args.life_loss_terminal else rollout.terminated
    discounts = args.gamma * (~ended).float()
    return returns.cut_truncated(rewards, discounts, rollout.truncated, rollout.truncation_value)


def advantages_and_targets(args: ActorCriticArgs, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Compute (advantages, value targets), both [T, B], by GAE or n-step returns from the values of the acting pass.

    They are computed on the CPU: on a GPU, the recurrence over T small steps would be hundreds of kernels.
    """
    device, rewards_discounts = rollout.value.device, rewards_and_discounts(args, rollout)
    rewards, discounts, values = (part.cpu() for part in (*rewards_discounts, rollout.value))
    if args.returns == "gae":
        advantages, value_targets = returns.gae(rewards, discounts, values[:-1], values[-1], args.gae_lambda)
    else:
        value_targets = returns.n_step_returns(rewards, discounts, values[:-1], values[-1], args.n_step)
        advantages = value_targets - values[:-1]
    return advantages.to(device), value_targets.to(device)


class Samples(NamedTuple):
    """A batch of N steps with advantages and value targets, in any order."""

    obs: Tensor  # [N, *obs_shape]
    action: Tensor  # [N, *action_shape], as sampled
    behaviour_logits: Tensor  # [N, P] float32, of the policy that acted
    advantages: Tensor  # [N] float32, constants
    value_targets: Tensor  # [N] float32, constants

    @classmethod
    def of(cls, args: ActorCriticArgs, rollout: Rollout) -> Samples:
        """Compute advantages and value targets of a rollout, and flatten its steps into samples."""
        advantages, value_targets = advantages_and_targets(args, rollout)
        if args.normalize_advantages:
            advantages = losses.normalize(advantages)
        return cls.flat(rollout, advantages, value_targets)

    @classmethod
    def flat(cls, rollout: Rollout, advantages: Tensor, value_targets: Tensor) -> Samples:
        """Flatten the steps of a rollout, with advantages and value targets [T, B], into samples."""
        fields = (rollout.obs[:-1], rollout.action, rollout.behaviour_logits, advantages, value_targets)
        return cls(*(field.flatten(0, 1) for field in fields))

    def select(self, indices: Tensor) -> Samples:
        """Return the samples at int64 indices [M]."""
        return Samples(*(field.index_select(0, indices) for field in self))


def epoch_minibatches(args: PPOArgs, advantages: Tensor, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield indices of shuffled minibatches, int64 [M], for all PPO epochs of a rollout.

    The first epoch takes every sample once; each later one repeats the `--repeat-fraction` of them with the largest
    absolute advantage, to which the policy gradient is proportional. Where the mean advantage is near 0 it is also the
    error of the value, whose target is value + advantage. Prioritized replay chooses by such an error (Schaul et al.
    2016).

    Args:
        args: of the chapter.
        advantages: [N], of all samples of the rollout, normalized with `--normalize-advantages`.
        rng: shuffles.
    """
    num, device = len(advantages), advantages.device
    repeated = round(args.repeat_fraction * num)
    # Sorted again, because then a fraction of 1 gives plain passes, bit for bit.
    largest = advantages.abs().argsort(descending=True, stable=True)[:repeated].sort().values
    yield from minibatches(num, args.batch_size, 1, rng, device)
    if repeated == 0:
        return
    for chosen in minibatches(repeated, args.batch_size, args.update_epochs - 1, rng, device):
        yield largest.index_select(0, chosen)


class GradientSteps:
    """Takes gradient steps on samples, in shuffled minibatches, with gradients clipped to `--max-grad-norm`.

    Args:
        args: of the chapter.
        run: counts updates and gradients that are not finite, which are skipped.
        net, optimizer: of the learner.
        loss: the chapter's: (args, net, samples) -> (loss, metrics).
    """

    def __init__(
        self, args: PPOArgs, run: RunState, net: nn.Module, optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any, Samples], tuple[Tensor, losses.Metrics]],
    ):  # fmt: skip
        self.args, self.run, self.net, self.optimizer, self.loss = args, run, net, optimizer, loss
        self.parameters = list(net.parameters())
        self.guard = NonFiniteFilter(run, "grads_not_finite")

    def take(self, samples: Samples) -> None:
        """Learn from all samples in `--update-epochs` epochs."""
        run, args = self.run, anneal_entropy_coef(self.args, self.run.steps)
        for indices in epoch_minibatches(args, samples.advantages, run.rng):
            total, metrics = self.loss(args, self.net, samples.select(indices))
            self.optimizer.zero_grad(set_to_none=True)
            total.backward()
            metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(self.parameters, args.max_grad_norm)
            if self.guard.check(norm + total.detach(), "the learner", f"gradient {run.updates + 1}"):
                self.optimizer.step()
                run.record_update(metrics)


def update_obs_stats(args: ActorCriticArgs, run: RunState, net: ActorCritic, rollout: Rollout, source: str) -> None:
    """Update the net's mean and variance of observations from a rollout, with `--normalize-obs`."""
    if args.normalize_obs:
        update_norm(run, net.norm, obs_for_stats(rollout.obs, net.norm.image), source)


def loss(args: ActorCriticArgs, net: ActorCritic, samples: Samples) -> tuple[Tensor, losses.Metrics]:
    """Compute A3C's loss as in chapter 1: (loss, metrics for TensorBoard)."""
    obs, action, behaviour_logits, advantages, value_targets = samples
    with autocast(args.precision, net):
        logits, values = (output.float() for output in net(obs))
    policy, behaviour = net.distributions(logits, behaviour_logits)
    log_probs, behaviour_log_probs = policy.log_prob(action), behaviour.log_prob(action)
    policy_loss = losses.clipped_policy_loss(log_probs, behaviour_log_probs, advantages, args.clip_ratio)
    value_loss = losses.value_loss(values, value_targets)
    entropy_loss = -policy.entropy().mean()
    total = policy_loss + args.value_coef * value_loss + args.entropy_coef * entropy_loss
    metrics: losses.Metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": advantages, "values/value": values, "values/target": value_targets}
    metrics |= {"policy/log_ratio": log_probs - behaviour_log_probs, "policy/clip_ratio": args.clip_ratio}
    return total, metrics | {"losses/total": total}
