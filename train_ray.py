"""Chapter 7. The same on a cluster of machines, on Ray.

Ray starts actors on the nodes of a cluster and carries their results; the trainer requests each of them, learns, and
publishes the weights to a parameter server.

    actor 0 (node A) --(unroll)--> \\
    actor 1 (node B) --(unroll)-->  trainer --(weights, version)--> parameter server --> actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: it sets the number of threads before torch is imported)

import torch
from torch import Tensor, nn

from a3c_mp.algorithms import impala, on_ray
from a3c_mp.algorithms.actor_critic import obs_for_stats, rewards_and_discounts, rollout_layout
from a3c_mp.algorithms.impala import LearnerState
from a3c_mp.algorithms.on_ray import PRESETS, ImpalaArgs, OnRay
from a3c_mp.cli import parse_args
from a3c_mp.cluster.fleet import FleetChannel
from a3c_mp.cluster.parameters import Publisher, Reader
from a3c_mp.cluster.transport import Packer, Result
from a3c_mp.data.actor_states import ActorStates
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.games import make_envs
from a3c_mp.data.rollout import Rollout, empty_rollout, episode_starts, finished_episodes, is_finite, join
from a3c_mp.maths import losses
from a3c_mp.maths.losses import Metrics
from a3c_mp.maths.returns import vtrace
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.actor_critic import ActorCritic, make_actor_critic, unroll
from a3c_mp.nets.precision import acting_dtype, autocast
from a3c_mp.processes.channel import Token
from a3c_mp.run.actors import MessageStats
from a3c_mp.run.guard import FiniteGuard, update_norm
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with


class Actor:
    """Actor process, on any node: environments and a copy of the net, an unroll for each token."""

    def __init__(self, channel: FleetChannel, args: ImpalaArgs, packer: Packer, weights: Reader):
        env = make_envs(args, channel)
        net = make_actor_critic(env.single_observation_space, env.single_action_space, args.net, args.lstm)
        self.args, self.packer, self.weights, self.net = args, packer, weights, net.to(weights.dtype)
        self.collector = RolloutCollector(args, env, self.net, channel)
        self.rollout = empty_rollout(packer.spec)

    def __call__(self, token: Token) -> Result:
        version = self.weights.load(self.net, token.version if self.args.deterministic else None)
        self.collector.collect(self.rollout)
        state = on_ray.state_of(self.args, self.collector.state_fields, self.rollout)
        return Result(version, self.packer.pack(self.rollout._asdict()), state)


def loss(args: ImpalaArgs, net: ActorCritic, unrolls: Rollout) -> tuple[Tensor, Metrics]:
    """Compute (loss, metrics): IMPALA's loss on V-trace targets (Espeholt et al. 2018, section 4.2)."""
    rewards, discounts = rewards_and_discounts(args, unrolls)
    with autocast(args.precision, net):
        logits, values = unroll(net, unrolls.obs, unrolls.core_state[0], episode_starts(unrolls))
    logits, values, bootstrap_value = logits[:-1].float(), values[:-1].float(), values[-1].float()
    log_probs = losses.log_prob(logits, unrolls.action)
    log_rhos = log_probs.detach() - losses.log_prob(unrolls.behaviour_logits, unrolls.action)  # log(pi / mu)
    log_weights = log_rhos if args.vtrace else torch.zeros_like(log_rhos)
    clips = args.clip_rho, args.clip_c, args.clip_pg_rho
    vs, pg_advantages = vtrace(log_weights, discounts, rewards, values, bootstrap_value, *clips)
    if args.normalize_advantages:
        pg_advantages = losses.normalize(pg_advantages)
    policy_loss = losses.policy_gradient_loss(log_probs, pg_advantages)
    value_loss = losses.value_loss(values, vs)
    entropy_loss = losses.entropy_loss(logits)
    total = policy_loss + args.value_cost * value_loss + args.entropy_cost * entropy_loss
    metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": pg_advantages, "values/baseline": values, "values/target": vs}
    return total, metrics | {"losses/total": total, "values/rho": log_rhos.exp()}


def learn(args: ImpalaArgs, run: Run, learner: LearnerState, unrolls: Rollout, guard: FiniteGuard) -> None:
    """Take a gradient step on every batch of new unrolls, filled up with replayed ones."""
    net, optimizer = learner.net, learner.optimizer
    optimizer.param_groups[0]["lr"] = linear(args.learning_rate, 0.0, run.steps, args.total_steps)
    if args.normalize_obs:
        update_norm(run, net.norm, obs_for_stats(unrolls.obs, net.norm.image), "new unrolls")
    for batch in impala.batches(args, unrolls, learner.replay, run.rng):
        total, metrics = loss(args, net, batch)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
        if guard.check(norm + total.detach(), "the learner", f"gradient {run.updates + 1}"):
            optimizer.step()
            run.record_update(metrics)


def train(args: ImpalaArgs, run: Run, cluster: OnRay, learner: LearnerState) -> None:
    """Train: take unrolls in the order in which they arrive, learn, publish."""
    net, _, slots, replay, action_space = learner
    device = next(net.parameters()).device
    weights = Publisher(cluster.session, net, acting_dtype(args.precision, net))
    states = ActorStates(args, rollout_layout(args, action_space, net.core_size), start=run.steps)
    run.keep(actors=states, weights=weights, replay=replay)
    rollout_guard, grad_guard = FiniteGuard(run, "rollouts_not_finite"), FiniteGuard(run, "grads_not_finite")
    with cluster.start_actors(Actor, weights, states, (Reader(weights.buffers.dtype),)) as actors:
        for filled in actors.rounds(impala.rollouts_per_batch(args)):  # enough for a batch, oldest first
            rollouts = [Rollout(**slots[slot]) for _, slot, _ in filled]
            stats = [
                MessageStats(
                    rollout.num_steps, finished_episodes(rollout), weights.version - version, is_finite(rollout)
                )
                for rollout, (_, _, version) in zip(rollouts, filled, strict=True)
            ]
            finite, _ = actors.sync_counters(filled, stats, rollout_guard)
            if finite:
                with run.timing("learning"):
                    unrolls = join([rollout.to(device) for rollout in rollouts])
                    learn(args, run, learner, unrolls, grad_guard)
            with run.timing("publishing"):
                weights.publish(net)
            run.end_round()


def main() -> int:
    args = parse_args(ImpalaArgs, PRESETS, __doc__)
    on_ray.check(args)
    learner = impala.build_learner(args)
    with (
        Run(args, f"{args.chapter}_{args.algo}", learner.net, learner.optimizer) as run,
        OnRay(args, run, learner) as ray,
    ):
        train(args, run, ray, learner)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
