"""Losses: value, policy gradient, quantile Huber; their metrics, and normalized advantages. Pure functions."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Metrics = dict[str, Tensor | float]
"""TensorBoard tag -> values of any shape, of which the mean is logged; `with_diagnostics` replaces policy/log_ratio and
policy/clip_ratio"""
LARGEST_LOG_RATIO = 20.0  # of a sample's policies, in metrics: one that is larger would make a mean infinite


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of V(s) [B] to its targets [B], halved: the gradient is the error."""
    assert values.shape == targets.shape, (values.shape, targets.shape)
    return 0.5 * F.mse_loss(values, targets)


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Policy gradient loss -E[A log pi(a|s)] (REINFORCE, Williams 1992); both are [...], A is constant."""
    assert log_probs.shape == advantages.shape, (log_probs.shape, advantages.shape)
    return -(log_probs * advantages.detach()).mean()


def normalize(
    advantages: Tensor,
    weights: Tensor | None = None,
    all_reduce_mean: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
) -> Tensor:
    """Normalize advantages to mean 0 and variance 1.

    With importance weights w the moments are weighted: sum(w A) / sum(w) is a baseline, which changes the mean of
    w (A - b) grad log pi little, and nothing of samples whose weight is 0. The mean of w A, subtracted from w A, would
    push the policy towards or away from all old actions, those of weight 0 included.

    Weights are not negative; None: all 1. `all_reduce_mean` replaces tensors by their means over all learners.
    """
    weights = torch.ones_like(advantages) if weights is None else weights
    mean, total = (weights * advantages).mean(), weights.mean()
    all_reduce_mean([mean, total])
    total = total.clamp(min=1e-8)
    centred = advantages - mean / total
    variance = (weights * centred.square()).mean()
    all_reduce_mean([variance])
    if advantages.numel() == 1:  # not before: another learner may have more, and waits for these means
        return advantages  # minus its mean, nothing would be left
    return centred / ((variance / total).sqrt() + 1e-8)


def quantile_huber(quantiles: Tensor, targets: Tensor, weights: Tensor, width: float = 1.0) -> Tensor:
    """Weighted quantile Huber loss (Dabney et al. 2018, equation 10) of quantiles [N, K] for targets [N, L].

    Sum over quantiles, mean over samples and targets of w 2 |tau - 1{e < 0}| h(e), where e = target - quantile, h(e) =
    e^2 / 2 if |e| <= 1, else |e| - 1/2, tau = 1/2K, 3/2K, ... With K = 1 it is Huber's loss, which clips the gradient
    of an error to [-1, 1] (Mnih et al. 2015, methods); `width` takes the place of 1 in h. w [N] are importance weights
    (Schaul et al. 2016, section 3.4).
    """
    assert quantiles.shape[:1] == targets.shape[:1] == weights.shape, (quantiles.shape, targets.shape, weights.shape)
    k, errors = quantiles.shape[1], targets[:, None] - quantiles[:, :, None]  # [N, K, L]
    taus = torch.linspace(0.5 / k, 1 - 0.5 / k, k, device=errors.device)[:, None]
    slopes = 2 * k * (taus - (errors < 0).float()).abs()
    losses = F.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=width)
    return (weights[:, None, None] * slopes * losses).mean()


@torch.no_grad()
def rho_metrics(log_rhos: Tensor, clip_rho: float) -> Metrics:
    """V-trace's ratios rho, the share that `clip_rho` truncates, and what the KL divergence is derived from."""
    rhos = log_rhos.clamp(max=LARGEST_LOG_RATIO).exp()
    return {"values/rho": rhos, "values/rho_clipped": (rhos > clip_rho).float(), "policy/log_ratio": log_rhos}


@torch.no_grad()
def with_diagnostics(metrics: Mapping[str, Tensor | float]) -> Metrics:
    """The metrics of a loss and those derived from them, which only updates that are recorded need.

    They are the explained variance 1 - Var(target - V) / Var(target), and in place of policy/log_ratio and
    policy/clip_ratio the approximate KL divergence E_mu[log mu - log pi] from the policy that acted, and PPO's share of
    clipped samples. This estimator of the divergence has less variance than the mean of log mu - log pi, and is never
    negative (Schulman 2020, "Approximating KL divergence").
    """
    found = dict(metrics)
    if isinstance(log_ratios := found.pop("policy/log_ratio", None), Tensor):
        near = log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        found["policy/approx_kl"] = near.expm1() - near
        if (clip_ratio := found.pop("policy/clip_ratio", None)) is not None:
            found["policy/clip_fraction"] = (log_ratios.expm1().abs() > clip_ratio).float()
    values, targets = metrics.get("values/value"), metrics.get("values/target")
    if isinstance(values, Tensor) and isinstance(targets, Tensor):
        variance = targets.var(correction=0)
        explained = 1 - (targets - values).var(correction=0) / variance
        found["values/explained_variance"] = torch.where(variance > 0, explained, torch.zeros_like(variance))
    return found
