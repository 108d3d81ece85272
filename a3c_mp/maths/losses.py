"""Losses of actor-critic methods: pure functions, means over the batch, to be minimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """log pi(a|s) of categorical policies: logits [..., A], action int64 [...] -> [...]."""
    return -F.cross_entropy(logits.flatten(0, -2), action.flatten(), reduction="none").view_as(action)


def entropy_loss(logits: Tensor) -> Tensor:
    """Negative mean entropy of categorical policies, logits [..., A]; minimised, it keeps them exploring.

    Williams & Peng 1991; Mnih et al. 2016, section 4.
    """
    log_probs = F.log_softmax(logits, dim=-1)
    return (log_probs.exp() * log_probs).sum(dim=-1).mean()


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of V(s) [B] to its targets [B], halved so that its gradient is the plain error."""
    assert values.shape == targets.shape, (values.shape, targets.shape)
    return 0.5 * (values - targets).square().mean()


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-E[A log pi(a|s)] (Williams 1992): log_probs [...] of the actions taken, advantages [...] constants."""
    assert log_probs.shape == advantages.shape, (log_probs.shape, advantages.shape)
    return -(log_probs * advantages.detach()).mean()


def policy_loss(log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor, clip_ratio: float) -> Tensor:
    """Clipped surrogate policy loss (Schulman et al. 2017, equation 7).

    At ratio 1 its gradient is that of A2C, -A grad log pi(a|s). The ratio to the policy that chose the action corrects
    for the updates in between, and the clip stops a sample from pushing once it has moved far enough.

    Args:
        log_probs: [B], log pi(a|s) of the policy that learns.
        behaviour_log_probs: [B], log mu(a|s) of the policy that acted.
        advantages: [B], constants.
        clip_ratio: epsilon; `inf` for the unclipped importance-weighted gradient.
    """
    assert log_probs.shape == behaviour_log_probs.shape == advantages.shape, (log_probs.shape, advantages.shape)
    ratio = (log_probs - behaviour_log_probs).exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def actor_critic(
    logits: Tensor,
    values: Tensor,
    action: Tensor,
    behaviour_logits: Tensor,
    advantages: Tensor,
    value_targets: Tensor,
    *,
    clip_ratio: float,
    value_cost: float,
    entropy_cost: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy, value and entropy losses of a batch, added up with their costs.

    Args:
        logits, values: [B, A] and [B], of the net that learns; any floating-point dtype.
        action: [B] int64.
        behaviour_logits: [B, A], of the net that acted.
        advantages, value_targets: [B], constants.

    Returns:
        (total loss, metrics for TensorBoard).
    """
    logits, values = logits.float(), values.float()
    policy = policy_loss(log_prob(logits, action), log_prob(behaviour_logits, action), advantages, clip_ratio)
    value = value_loss(values, value_targets)
    entropy = entropy_loss(logits)
    return total(policy, value, entropy, advantages, values, value_targets, value_cost, entropy_cost)


def total(
    policy: Tensor,
    value: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    values: Tensor,
    value_targets: Tensor,
    value_cost: float,
    entropy_cost: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Three losses added up with their costs, and the metrics that every actor-critic shows."""
    loss = policy + value_cost * value + entropy_cost * entropy
    return loss, {
        "losses/policy": policy,
        "losses/value": value,
        "losses/entropy": entropy,
        "losses/total": loss,
        "values/advantage": advantages,
        "values/baseline": values,
        "values/target": value_targets,
    }


def normalize(advantages: Tensor, average: Callable[[Sequence[Tensor]], None] = lambda tensors: None) -> Tensor:
    """Mean 0 and variance 1 over all entries; with `average` over those of all learners, each with as many."""
    mean = advantages.mean()
    average([mean])
    centred = advantages - mean
    variance = centred.square().mean()
    average([variance])
    return centred / (variance.sqrt() + 1e-8)


def huber(errors: Tensor, weights: Tensor) -> Tensor:
    """Mean of w * e^2 / 2 where |e| <= 1 and of w * (|e| - 1/2) elsewhere: large errors [B] push no harder than 1.

    Mnih et al. 2015, methods; the weights [B] are the importance weights of Schaul et al. 2016, section 3.4.
    """
    assert errors.shape == weights.shape, (errors.shape, weights.shape)
    return (weights * F.huber_loss(errors, torch.zeros_like(errors), reduction="none")).mean()
