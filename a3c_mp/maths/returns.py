"""Returns and advantages (n-step returns, GAE, V-trace): pure functions of float32 tensors, time first.

In all of them `rewards`, `discounts` and `values` are [T, B]; `values[t]` is V(s_t), `bootstrap_value` [B] is V(s_T),
and `discounts[t]` is gamma * (1 - terminated[t]), the factor of what follows step t. A truncated episode needs a
bootstrap from its final observation: `cut_truncated` adds it to the reward and zeroes the discount, so the other
functions handle termination only.
"""

import torch
from torch import Tensor


def cut_truncated(rewards: Tensor, discounts: Tensor, truncated: Tensor, final_values: Tensor) -> tuple[Tensor, Tensor]:
    """End returns at truncated steps and bootstrap there from the value of the final observation.

    Partial-episode bootstrapping (Pardo et al. 2018, "Time limits in reinforcement learning"): the target of a
    truncated step is r + gamma V(s_final), never r + gamma V(s_reset).

    `final_values` [T, B] are V(s_final) at truncated steps, ignored elsewhere. Returns (rewards, discounts).
    """
    assert rewards.shape == discounts.shape == truncated.shape == final_values.shape, (rewards.shape, truncated.shape)
    bootstrap = discounts * final_values
    return torch.where(truncated, rewards + bootstrap, rewards), torch.where(truncated, 0.0, discounts)


def n_step_returns(rewards: Tensor, discounts: Tensor, values: Tensor, bootstrap_value: Tensor, n: int) -> Tensor:
    """Compute n-step returns r_t + d_t r_{t+1} + ... + d_t ... d_{t+n-1} V(s_{t+n}), [T, B] (Mnih et al. 2016, sec. 4).

    Fewer than n steps before the end of the rollout, returns are shorter and bootstrap from V(s_T).
    """
    assert rewards.shape == discounts.shape == values.shape, (rewards.shape, discounts.shape, values.shape)
    assert bootstrap_value.shape == rewards.shape[1:], (bootstrap_value.shape, rewards.shape)
    assert n >= 1, n
    targets = torch.cat([values, bootstrap_value[None]])  # the 0-step return of s_t is V(s_t)
    for _ in range(min(n, len(rewards))):  # G^k_t = r_t + d_t G^{k-1}_{t+1}
        targets[:-1] = rewards + discounts * targets[1:]
    return targets[:-1]


def gae(
    rewards: Tensor, discounts: Tensor, values: Tensor, bootstrap_value: Tensor, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute (advantages, returns) by generalized advantage estimation (Schulman et al. 2016, equation 16).

    `lam` is lambda, 0 (one-step TD errors) to 1 (Monte Carlo up to the bootstrap). Returns = advantages + values are
    the value targets (TD(lambda) returns).
    """
    assert rewards.shape == discounts.shape == values.shape, (rewards.shape, discounts.shape, values.shape)
    assert bootstrap_value.shape == rewards.shape[1:], (bootstrap_value.shape, rewards.shape)
    next_values = torch.cat([values[1:], bootstrap_value[None]])
    advantages = _discounted_sums(rewards + discounts * next_values - values, discounts * lam)
    return advantages, advantages + values


@torch.no_grad()
def vtrace(
    log_rhos: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor, bootstrap_value: Tensor,
    clip_rho: float = 1.0, clip_c: float = 1.0, clip_pg_rho: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """V-trace's value targets, and advantages with their weights (Espeholt et al. 2018, eq. 1, section 4.2).

    Returns (vs, advantages, weights), all [T, B], without gradient. The policy gradient is the mean of
    weight * advantage * grad log pi. A zero discount ends return and trace.

    Args:
        log_rhos: [T, B], log pi(a_t|s_t) - log mu(a_t|s_t), log importance weights: learner's over behaviour policy.
        clip_rho: rho-bar, max importance weight of a TD error; it sets which policy's value function is learned.
        clip_c: c-bar, max importance weight of the trace; it trades speed of convergence for variance.
        clip_pg_rho: max importance weight of an advantage.
    """
    assert log_rhos.shape == discounts.shape == rewards.shape == values.shape, (log_rhos.shape, values.shape)
    assert bootstrap_value.shape == rewards.shape[1:], (bootstrap_value.shape, rewards.shape)
    rhos = log_rhos.exp()
    next_values = torch.cat([values[1:], bootstrap_value[None]])
    deltas = rhos.clamp(max=clip_rho) * (rewards + discounts * next_values - values)
    vs = values + _discounted_sums(deltas, discounts * rhos.clamp(max=clip_c))  # remark 1, walked backwards
    next_vs = torch.cat([vs[1:], bootstrap_value[None]])
    return vs, rewards + discounts * next_vs - values, rhos.clamp(max=clip_pg_rho)


def _discounted_sums(deltas: Tensor, factors: Tensor) -> Tensor:
    """Sums x_t = delta_t + factor_t x_{t+1}, [T, B], from the last step backwards."""
    sums, acc = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        sums[t] = acc = deltas[t] + factors[t] * acc
    return sums
