"""Chapter 1. A3C by data: actors send rollouts, the learner computes the gradients.

Actors step vectors of environments and fill slots of shared memory with rollouts. The learner takes gradient steps on
A3C's loss, in which PPO's clipped ratio corrects for the updates since the policy acted, and publishes new weights.

    actor 0 --(slot 0)--> \\
    actor 1 --(slot 1)-->  learner --(weights, version)--> all actors
"""

import a3c_mp  # noqa: F401  # isort: skip  (first: it prepares the process before torch is imported)

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from a3c_mp.algorithms.actor_critic import A3CSetup, Samples, advantages_and_targets, anneal_entropy_coef
from a3c_mp.algorithms.actor_critic_settings import PPO_PRESETS, PPOArgs, RolloutArgs
from a3c_mp.chapter import Chapter
from a3c_mp.data.actor import make_envs
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.rollout import Rollout, minibatches
from a3c_mp.maths.losses import normalize, value_loss
from a3c_mp.nets.precision import autocast
from a3c_mp.run.learner import Learner


@dataclass(frozen=True)
class Args(PPOArgs):
    chapter = "a3c_data"


def actor(channel: Any, args: RolloutArgs) -> Callable[..., int]:
    """An actor's process: environments, and a copy of the net that acts; each call of what it returns fills a slot."""
    return RolloutCollector(args, make_envs(args, channel), channel).fill  # newest weights, T steps of B environments


def loss(args: Any, net: Any, samples: Samples) -> tuple[Tensor, dict[str, Any]]:
    """Compute (loss, metrics): A3C's loss (Mnih et al. 2016, section 4) with PPO's clipped ratio in place of log pi."""
    logits, values = net(samples.obs)  # [N, P], [N]
    policy, behaviour = net.distributions(logits, samples.behaviour_logits)
    log_ratio = policy.log_prob(samples.action) - behaviour.log_prob(samples.action)
    ratio = log_ratio.exp()  # pi(a|s) / mu(a|s), [N]
    clipped = ratio.clamp(1 - args.clip_ratio, 1 + args.clip_ratio)
    policy_loss = -torch.min(ratio * samples.advantages, clipped * samples.advantages).mean()  # PPO, equation 7
    critic_loss = value_loss(values, samples.value_targets)
    entropy = policy.entropy().mean()
    total = policy_loss + args.value_coef * critic_loss - args.entropy_coef * entropy
    metrics = {"losses/policy": policy_loss, "losses/value": critic_loss, "policy/entropy": entropy}
    metrics |= {"values/advantage": samples.advantages, "values/value": values, "values/target": samples.value_targets}
    return total, metrics | {"policy/log_ratio": log_ratio, "policy/clip_ratio": args.clip_ratio}


def backward(args: Any, net: Any, loss: Callable[..., Any], *batch: Any) -> tuple[Tensor, dict[str, Any]]:
    """Add the gradient of the loss of one batch to `.grad` of the parameters; return (loss, metrics)."""
    with torch.enable_grad(), autocast(args.precision, net):  # an environment with nets may have turned gradients off
        total, metrics = loss(args, net, *batch)
    total.backward()
    return total.detach(), metrics | {"losses/total": total.detach()}


def gradients(args: Any, learner: Learner, loss: Callable[..., Any], *batch: Any) -> dict[str, Any]:
    """Put the clipped gradient of the loss of one batch into `.grad` of the parameters; return the metrics."""
    learner.optimizer.zero_grad(set_to_none=True)
    total, metrics = backward(args, learner.net, loss, *batch)
    # Several learners, as chapters 3 and 4 may have, average their gradients.
    learner.group.all_reduce_gradients(learner.optimizer, total)
    groups = [group["params"] for group in learner.optimizer.param_groups]
    learning = [group for group in groups if any(p.grad is not None for p in group)]  # TD3's policy: not always
    norms = [nn.utils.clip_grad_norm_(group, args.max_grad_norm) for group in learning]
    return metrics | {"losses/grad_norm": torch.stack(norms).norm()}


def gradient_step(args: Any, learner: Learner, loss: Callable[..., Any], *batch: Any) -> dict[str, Any] | None:
    """Take a gradient step on one batch; return metrics, valid until the next step, or None if it had NaN or inf."""
    return learner.take_step(gradients, args, loss, *batch)  # with the optimizer's step; on a GPU, as one CUDA graph


def epochs(args: PPOArgs, samples: Samples, rng: torch.Generator) -> Iterator[Samples]:
    """Yield shuffled minibatches: all samples once, in later epochs the share with the largest absolute advantages."""
    largest = samples.advantages.abs().argsort(descending=True, stable=True)
    for epoch in range(args.update_epochs):
        num = round(args.repeat_fraction * len(largest)) if epoch else len(largest)
        chosen = largest[:num].sort().values  # in order of time: a share of 1 is a plain shuffled pass
        for indices in minibatches(num, args.batch_size, rng, chosen.device):
            yield samples.select(chosen.index_select(0, indices))


def learn(args: PPOArgs, learner: Learner, rollout: Rollout) -> None:
    """Take gradient steps on the minibatches of a rollout."""
    args = anneal_entropy_coef(args, learner.steps)
    advantages, value_targets = advantages_and_targets(args, rollout, learner.reward_scale)  # by GAE, or n-step
    advantages = normalize(advantages) if args.normalize_advantages else advantages
    samples = Samples.of(rollout, advantages, value_targets).to(learner.device)
    for batch in epochs(args, samples, learner.rng):
        gradient_step(args, learner, loss, batch)


def train(args: PPOArgs, learner: Learner) -> None:
    """Learn from rollouts. `rounds` skips those with NaN or inf, counts steps, publishes weights, gives slots back."""
    for rollout in learner.rounds():
        learn(args, learner, rollout)


main = Chapter(Args, PPO_PRESETS, actor, train, A3CSetup)

if __name__ == "__main__":
    main.run_as_script()
