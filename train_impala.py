"""Chapter 4. IMPALA: actors act with weights some versions old, and V-trace corrects for the policy lag.

Each actor process steps a vector of environments with its own copy of the net and writes unrolls, with the logits that
every action was sampled from, into slots of shared memory. The learner takes the oldest filled slots, adds unrolls
from a replay (`--replay-proportion`), and runs its own, newer net over them. V-trace corrects for the difference of the
two policies by truncated importance weights.

    actor 0 --(slot 0)--> \\
    actor 1 --(slot 1)--> pending, oldest first --> learner --(weights, version)--> its actors
                                                      | gradients, averaged
                                                   learner 1, 2, ... each with actors of its own
"""

import a3c_mp  # noqa: F401  # isort: skip  (first: it prepares the process before torch is imported)

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from a3c_mp.algorithms.actor_critic import rewards_and_discounts
from a3c_mp.algorithms.impala import PRESETS, Args, ImpalaSetup
from a3c_mp.chapter import Chapter
from a3c_mp.data.rollout import Rollout, episode_starts
from a3c_mp.maths.losses import normalize, policy_gradient_loss, rho_metrics, value_loss
from a3c_mp.maths.returns import vtrace
from a3c_mp.run.learner import Learner
from train_a3c_data import actor, gradient_step


def loss(args: Args, net: Any, unrolls: Rollout, all_reduce_mean: Callable[..., None]) -> tuple[Tensor, dict[str, Any]]:
    """Compute (loss, metrics): IMPALA's loss on V-trace targets (Espeholt et al. 2018, section 4.2)."""
    logits, values, _ = net.unroll(unrolls.obs, unrolls.lstm_state[0], episode_starts(unrolls))
    rewards, discounts = rewards_and_discounts(args, unrolls, net.reward_scale)
    logits, values, bootstrap_value = logits[:-1], values[:-1], values[-1]  # [T, B, P], [T, B], [B]
    policy, behaviour = net.distributions(logits, unrolls.behaviour_logits)
    log_probs = policy.log_prob(unrolls.action)
    log_rhos = log_probs.detach() - behaviour.log_prob(unrolls.action)  # log(pi / mu)
    log_weights = log_rhos if args.vtrace else torch.zeros_like(log_rhos)
    vs, advantages, weights = vtrace(
        log_weights, discounts, rewards, values, bootstrap_value, args.clip_rho, args.clip_c, args.clip_pg_rho
    )
    if args.normalize_advantages:
        advantages = normalize(advantages, weights, all_reduce_mean)
    policy_loss = policy_gradient_loss(log_probs, weights * advantages)
    critic_loss = value_loss(values, vs)
    entropy = policy.entropy().mean()
    total = policy_loss + args.value_coef * critic_loss - args.entropy_coef * entropy
    metrics = {"losses/policy": policy_loss, "losses/value": critic_loss, "policy/entropy": entropy}
    metrics |= {"values/advantage": weights * advantages, "values/value": values, "values/target": vs}
    return total, metrics | rho_metrics(log_rhos, args.clip_rho)


def train(args: Args, learner: Learner) -> None:
    """Learn from new unrolls, each once, in batches that are filled up with replayed ones; all learners together."""
    for batches in learner.rounds():
        for unrolls in batches:
            gradient_step(args, learner, loss, unrolls, learner.group.all_reduce_mean)


main = Chapter(Args, PRESETS, actor, train, ImpalaSetup)

if __name__ == "__main__":
    main.run_as_script()
