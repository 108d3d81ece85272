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

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

import torch
from torch import Tensor, nn

from a3c_mp.algorithms import impala
from a3c_mp.algorithms.actor_critic import obs_for_stats, rewards_and_discounts, rollout_layout, set_learning_rate
from a3c_mp.algorithms.impala import PRESETS, Args, DelayLine, LearnerState
from a3c_mp.cli import parse_args
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.games import make_envs
from a3c_mp.data.resume_states import ResumeStates
from a3c_mp.data.rollout import Rollout, episode_starts, finished_episodes, is_finite, join
from a3c_mp.maths import losses
from a3c_mp.maths.losses import Metrics
from a3c_mp.maths.returns import vtrace
from a3c_mp.nets.actor_critic import ActorCritic, unroll
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import acting_dtype, autocast
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.learners import Learners
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.run.actors import Actors, MessageStats, processes
from a3c_mp.run.guard import NonFiniteFilter, update_norm
from a3c_mp.run.progress import RunState
from a3c_mp.run.replica import ReplicaRun
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with


def actor(channel: WorkerChannel, args: Args, slots: Slots, weights: Weights, states: ResumeStates) -> None:
    """Actor process: fill slots with unrolls until its learner stops it."""
    env = make_envs(args, channel)
    net = make_actor_critic(env.single_observation_space, env.single_action_space, args.net_spec)
    collector = RolloutCollector(args, env, net.to(weights.buffers), channel)
    for slot, version in channel.tokens():
        version = weights.load(net, version if args.deterministic else None)
        collector.collect(rollout := Rollout(**slots[slot]))
        states.write(slot, collector.state_fields, rollout)
        channel.send(slot, version)


def loss(args: Args, net: ActorCritic, unrolls: Rollout, group: LearnerGroup) -> tuple[Tensor, Metrics]:
    """Compute (loss, metrics): IMPALA's loss on V-trace targets (Espeholt et al. 2018, section 4.2)."""
    rewards, discounts = rewards_and_discounts(args, unrolls)
    with autocast(args.precision, net):
        logits, values = unroll(net, unrolls.obs, unrolls.lstm_state[0], episode_starts(unrolls))
    logits, values, bootstrap_value = logits[:-1].float(), values[:-1].float(), values[-1].float()
    policy, behaviour = net.distributions(logits, unrolls.behaviour_logits)
    log_probs = policy.log_prob(unrolls.action)
    log_rhos = log_probs.detach() - behaviour.log_prob(unrolls.action)  # log(pi / mu)
    log_weights = log_rhos if args.vtrace else torch.zeros_like(log_rhos)
    vs, advantages, weights = vtrace(log_weights, discounts, rewards, values, bootstrap_value, *args.clips)
    if args.normalize_advantages:
        advantages = losses.normalize(advantages, weights, group.all_reduce_mean)
    policy_loss = losses.policy_gradient_loss(log_probs, weights * advantages)
    value_loss = losses.value_loss(values, vs)
    entropy_loss = -policy.entropy().mean()
    total = policy_loss + args.value_coef * value_loss + args.entropy_coef * entropy_loss
    metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": weights * advantages, "values/value": values, "values/target": vs}
    return total, metrics | losses.rho_metrics(log_rhos, args.clip_rho) | {"losses/total": total}


def learn(
    args: Args, run: RunState, group: LearnerGroup, learner: LearnerState, unrolls: Rollout, guard: NonFiniteFilter
) -> None:
    """Take a gradient step on every batch of new unrolls, filled up with replayed ones."""
    net, optimizer = learner.net, learner.optimizer
    if args.normalize_obs:
        update_norm(run, net.norm, group.all_gather(obs_for_stats(unrolls.obs, net.norm.image)), "new unrolls")
    for batch in impala.batches(args, unrolls, learner.replay, run.rng):
        total, metrics = loss(args, net, batch, group)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        group.all_reduce_gradients(net, total)
        metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm)
        if guard.check(norm + total.detach(), "the learners", f"gradient {run.updates + 1}"):
            optimizer.step()
            run.record_update(metrics)


def train(args: Args, run: RunState, group: LearnerGroup, learner: LearnerState) -> None:
    """Train one learner: take unrolls from its own actors, and every gradient step together with the others."""
    net, optimizer, slots, replay, action_space = learner
    device = next(net.parameters()).device
    delayed = DelayLine(args.force_lag)
    weights = Weights(delayed(net), acting_dtype(args.precision, net))
    states = ResumeStates(args, rollout_layout(args, action_space, net.lstm_size), start=run.steps, group=group)
    run.keep(actors=states, weights=weights, delayed=delayed, replay=replay)
    impala.warn_of_lost_unrolls(args, run)
    group.broadcast_state(net, optimizer, states, weights, delayed)
    rollout_guard, grad_guard = NonFiniteFilter(run, "rollouts_not_finite"), NonFiniteFilter(run, "grads_not_finite")
    with Actors(processes(actor, args, slots, weights, states), weights, states, run) as actors:
        for filled in actors.rounds(impala.rollouts_per_round(args)):  # enough for a batch, oldest first
            rollouts = [Rollout(**slots[slot]) for _, slot, _ in filled]
            # With --force-lag N, version v holds the net of N publications before.
            lags = [weights.version - version + min(version, args.force_lag) for _, _, version in filled]
            stats = [
                MessageStats(rollout.num_steps, finished_episodes(rollout), lag, is_finite(rollout))
                for rollout, lag in zip(rollouts, lags, strict=True)
            ]
            set_learning_rate(optimizer, args, run.steps)
            if actors.record_round(filled, stats, rollout_guard).finite:  # in all learners, which take steps together
                with run.timing("learning"):
                    unrolls = join([rollout.to(device) for rollout in rollouts])
                    learn(args, run, group, learner, unrolls, grad_guard)
            with run.timing("publishing"):
                weights.publish(delayed(net))  # waits for the GPU: after this the slots have been read
            run.end_round()


def peer(group: LearnerGroup, args: Args, steps: int, updates: int) -> None:
    """Learner process of rank 1, 2, ..."""
    train(args, ReplicaRun(args, group.rank, steps, updates), group, impala.build_learner(args, group.rank))


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    learner = impala.build_learner(args)
    with Run(args, args.chapter, learner.net, learner.optimizer) as run, Learners.of(run, peer) as group:
        train(args, run, group, learner)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
