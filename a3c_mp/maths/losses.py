"""Losses of actor-critic methods: pure functions, means over the batch, to be minimised."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Metrics = dict[str, Tensor]
"""names of TensorBoard's curves -> what is averaged for them, of any shape"""


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


def clipped_policy_loss(
    log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor, clip_ratio: float
) -> Tensor:
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


def normalize(advantages: Tensor, all_reduce_mean: Callable[[Sequence[Tensor]], None] = lambda tensors: None) -> Tensor:
    """Advantages scaled to mean 0 and variance 1; with `all_reduce_mean`, over those of all learners."""
    mean = advantages.mean()
    all_reduce_mean([mean])
    centred = advantages - mean
    variance = centred.square().mean()
    all_reduce_mean([variance])
    return centred / (variance.sqrt() + 1e-8)


def huber(errors: Tensor, weights: Tensor) -> Tensor:
    """Mean of w * e^2 / 2 where |e| <= 1 and of w * (|e| - 1/2) elsewhere: large errors [B] push no harder than 1.

    Mnih et al. 2015, methods; the weights [B] are the importance weights of Schaul et al. 2016, section 3.4.
    """
    assert errors.shape == weights.shape, (errors.shape, weights.shape)
    return (weights * F.huber_loss(errors, torch.zeros_like(errors), reduction="none")).mean()
