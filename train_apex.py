"""Chapter 3. Ape-X: actors fill a prioritized replay buffer, the learner samples from all of it.

Each actor process steps a vector of environments, each with its own epsilon or action noise, and writes transitions
with initial priorities into its own shard of a replay in shared memory. The learner samples transitions in proportion
to priority, learns from them off policy, and updates their priorities with its own TD errors.

    actor 0 --(rows)--> shard 0 \\
    actor 1 --(rows)--> shard 1 --(batch)--> learner --(priorities)--> replay
                                               |--(weights, version)--> its actors
                                               | gradients, averaged
                                            learner 1, 2, ... each with actors and shards of its own
"""

import a3c_mp  # noqa: F401  # isort: skip  (first: it prepares the process before torch is imported)

from collections.abc import Callable
from typing import Any

from torch import Tensor

from a3c_mp.algorithms import ddpg, dqn, td3
from a3c_mp.algorithms.apex import ApexSetup, move_target
from a3c_mp.algorithms.apex_settings import PRESETS, Args
from a3c_mp.chapter import Chapter
from a3c_mp.data.actor import make_envs
from a3c_mp.data.transitions import TransitionCollector
from a3c_mp.maths.losses import quantile_huber
from a3c_mp.maths.schedules import linear
from a3c_mp.replay import Batch, importance_weights
from a3c_mp.run.learner import Learner
from train_a3c_data import gradient_step

ALGORITHMS: dict[str, Any] = {"dqn": dqn, "ddpg": ddpg, "td3": td3}


def actor(channel: Any, args: Any) -> Callable[..., int]:
    """An actor's process: each call of what it returns appends a block of steps to the actor's shard of the replay."""
    env, algo = make_envs(args, channel), ALGORITHMS[args.algo]
    net = algo.make_net(env.single_observation_space, env.single_action_space, args.net_spec)
    return TransitionCollector(args, env, net, algo.Policy, channel).fill


def critic_loss(
    args: Any, net: Any, target_net: Any, batch: Batch, importance: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Compute (loss, metrics) of the values of n-step transitions (Horgan et al. 2018); importance weights [N]."""
    algo = ALGORITHMS[args.algo]
    bootstrap = algo.bootstrap_values(args, net, target_net, batch)  # [N, K] quantiles
    target = net.reward_scale * batch.reward[:, None] + batch.discount[:, None] * bootstrap
    q, *others = algo.q_values(net, batch)  # [N, K] of each critic: td3 has two
    losses = [quantile_huber(each, target, importance, args.error_width) for each in (q, *others)]
    value_loss = sum(losses[1:], losses[0])
    td_error = (target - q).mean(dim=1)  # of the expected returns
    metrics = {"values/q": q, "values/target": target, "values/td_error": td_error.detach().abs()}
    return value_loss, metrics | {"losses/value": value_loss}


def loss(args: Any, net: Any, target_net: Any, batch: Batch, importance: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Compute (loss, metrics) of values and policy."""
    value_loss, metrics = critic_loss(args, net, target_net, batch, importance)
    policy_loss, more = ALGORITHMS[args.algo].policy_loss(net, batch)  # ddpg's and td3's; 0 for dqn
    return value_loss + policy_loss, metrics | more


def learn(args: Any, learner: Learner, batch: Batch) -> None:
    """Take a gradient step on a batch, and update its transitions' priorities to their absolute TD errors."""
    replay, target_net = learner.setup.replay, learner.setup.target_net
    exponent = linear(args.importance_exponent, 1.0, learner.steps, args.total_steps)
    # Weights are relative to the largest one of all learners, that of the smallest probability.
    smallest = learner.group.all_gather(batch.probability.min()[None]).min()
    importance = importance_weights(batch.probability, exponent, smallest)
    if args.algo == "td3":
        batch = td3.with_noise(batch, learner.rng)
    learns_policy = args.algo != "td3" or (learner.updates + 1) % args.policy_delay == 0
    step_loss = loss if learns_policy else critic_loss
    if metrics := gradient_step(args, learner, step_loss, target_net, batch, importance):
        if learner.updates % args.target_period == 0:
            move_target(target_net, learner.net, args.target_rate)
        errors = metrics["values/td_error"].cpu()
        if errors.isfinite().all():  # else a GPU has skipped the step
            replay.update(batch.ids, errors.clamp(max=args.largest_error))


def train(args: Any, learner: Learner) -> None:
    """Learn from the batches that are due: `--replay-ratio` samples for each step of the actors."""
    for batch in learner.rounds():
        learn(args, learner, batch)


def setup(args: Any, rank: int = 0) -> ApexSetup:
    """Make online and target net, optimizer and replay of learner `rank`."""
    return ApexSetup(args, ALGORITHMS[args.algo], rank)


main = Chapter(Args, PRESETS, actor, train, setup)

if __name__ == "__main__":
    main.run_as_script()
