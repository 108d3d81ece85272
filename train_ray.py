"""Chapter 7. The same on a cluster of machines, on Ray: a parameter server, actors, replay shards, a trainer.

Ray starts actors on the nodes of a cluster and carries what they send; the trainer requests it, learns, and publishes
the weights to a parameter server. It replaces actors that are lost.

    impala:  actors --(unrolls)--> trainer                         trainer --(weights, version)--> parameter server
    dqn:     actors --(rows)--> replay shards --(batch)--> trainer            parameter server --> actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: it sets the number of threads before torch is imported)

import torch
from torch import Tensor, nn

from a3c_mp.algorithms import apex, dqn, impala, on_ray
from a3c_mp.algorithms.actor_critic import obs_for_stats, rewards_and_discounts
from a3c_mp.algorithms.on_ray import DqnArgs, DqnLearner, ImpalaArgs, OnRay
from a3c_mp.algorithms.rate_limiter import RateLimiter
from a3c_mp.cli import parse_algo
from a3c_mp.cluster.fleet import FleetChannel
from a3c_mp.cluster.parameters import Reader
from a3c_mp.cluster.shards import Outbox, RemoteReplay, ReplaySpec, Rows, all_finite
from a3c_mp.cluster.transport import Packer, Result
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.games import make_envs
from a3c_mp.data.rollout import Rollout, episode_starts, join
from a3c_mp.data.transitions import TransitionCollector
from a3c_mp.maths import losses
from a3c_mp.maths.returns import vtrace
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.actor_critic import ActorCritic, make_actor_critic, unroll
from a3c_mp.nets.precision import autocast
from a3c_mp.processes.channel import Token
from a3c_mp.replay import Batch, importance_weights
from a3c_mp.run.guard import FiniteGuard, update_norm
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with


class ImpalaActor:
    """Actor process on some node: it sends an unroll for each token."""

    def __init__(self, channel: FleetChannel, args: ImpalaArgs, packer: Packer, weights: Reader):
        env = make_envs(args, channel)
        net = make_actor_critic(env.single_observation_space, env.single_action_space, args.net, args.lstm)
        self.args, self.packer, self.weights, self.net = args, packer, weights, net.to(weights.dtype)
        self.collector, self.rollout = RolloutCollector(args, env, self.net, channel), Rollout(**packer.empty())

    def __call__(self, token: Token) -> tuple[Result, None]:
        version = self.weights.load(self.net, token.version if self.args.deterministic else None)
        self.collector.collect(self.rollout)
        state = on_ray.state_of(self.args, self.collector.state_fields, self.rollout)
        return Result(version, self.packer.pack(self.rollout._asdict()), state), None


class DqnActor:
    """Actor process on some node: it sends the transitions of a block of steps for each token, for a replay shard."""

    def __init__(self, channel: FleetChannel, args: DqnArgs, packer: Packer, weights: Reader, spec: ReplaySpec):
        env = make_envs(args, channel)
        net = dqn.make_net(env.single_observation_space, env.single_action_space)
        self.args, self.packer, self.weights, self.net = args, packer, weights, net.to(weights.dtype)
        self.outbox = Outbox(spec, args.block_length, args.n_step, channel.restored and channel.restored.carried)
        self.collector = TransitionCollector(args, env, self.outbox.ring, args.n_step, channel)
        games, self.block = self.collector.games, packer.empty()
        self.policy = dqn.Policy(args, self.net, env.single_action_space, games.obs, channel.actor, games.carried)

    def __call__(self, token: Token) -> tuple[Result, Rows]:
        version = self.weights.load(self.net, token.version if self.args.deterministic else None)
        self.collector.collect(self.block, self.policy, warm_up=self.weights.untrained and version == 0)
        state = on_ray.state_of(self.args, self.collector.state_fields, self.block, self.policy)
        rows = self.outbox.take()
        return Result((version, all_finite(rows)), self.packer.pack(self.block), state), rows


def impala_loss(args: ImpalaArgs, net: ActorCritic, unrolls: Rollout) -> tuple[Tensor, losses.Metrics]:
    """Compute (loss, metrics): IMPALA's loss on V-trace targets (Espeholt et al. 2018, section 4.2)."""
    rewards, discounts = rewards_and_discounts(args, unrolls)
    with autocast(args.precision, net):
        logits, values = unroll(net, unrolls.obs, unrolls.core_state[0], episode_starts(unrolls))
    logits, values, bootstrap_value = logits[:-1].float(), values[:-1].float(), values[-1].float()
    log_probs = losses.log_prob(logits, unrolls.action)
    log_rhos = log_probs.detach() - losses.log_prob(unrolls.behaviour_logits, unrolls.action)  # log(pi / mu)
    log_weights = log_rhos if args.vtrace else torch.zeros_like(log_rhos)
    clips = args.clip_rho, args.clip_c, args.clip_pg_rho
    vs, advantages = vtrace(log_weights, discounts, rewards, values, bootstrap_value, *clips)
    advantages = losses.normalize(advantages) if args.normalize_advantages else advantages
    policy_loss, value_loss = losses.policy_gradient_loss(log_probs, advantages), losses.value_loss(values, vs)
    entropy_loss = losses.entropy_loss(logits)
    total = policy_loss + args.value_cost * value_loss + args.entropy_cost * entropy_loss
    metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": advantages, "values/baseline": values, "values/target": vs}
    return total, metrics | {"losses/total": total, "values/rho": log_rhos.exp()}


def dqn_loss(learner: DqnLearner, batch: Batch, importance: Tensor) -> tuple[Tensor, Tensor, losses.Metrics]:
    """Compute (loss, TD errors [N], metrics): n-step double Q-learning (Horgan et al. 2018); importance [N]."""
    q = dqn.q_values(learner.net, batch)
    target = batch.reward + batch.discount * dqn.bootstrap_values(learner.net, learner.target_net, batch)
    td_error, total = (target - q).detach(), losses.huber(target - q, importance)
    return total, td_error, {"losses/total": total, "values/q": q, "values/target": target}


def step(cluster: OnRay, total: Tensor, metrics: losses.Metrics, samples: int = 0) -> bool:
    """Take a gradient step on a loss, unless it is not finite; returns whether it did."""
    run, net, optimizer = cluster.run, cluster.learner.net, cluster.learner.optimizer
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(net.parameters(), cluster.args.clip_grad)
    if finite := cluster.guard.check(norm + total.detach(), "the trainer", f"gradient {run.updates + 1}"):
        optimizer.step()
        run.record_update(metrics, samples)
    return finite


def train_impala(args: ImpalaArgs, run: Run, cluster: OnRay, learner: impala.LearnerState) -> None:
    """Train on unrolls in the order in which they arrive."""
    net, slots, device = learner.net, learner.slots, next(learner.net.parameters()).device
    rollout_guard = FiniteGuard(run, "rollouts_not_finite")
    with cluster.start_actors(ImpalaActor, replay=learner.replay) as actors:
        for filled in actors.rounds(impala.rollouts_per_batch(args)):  # enough for a batch, oldest first
            rollouts = [Rollout(**slots[slot]) for _, slot, _ in filled]
            stats = on_ray.rollout_stats(rollouts, filled, actors.weights.version)
            if actors.sync_counters(filled, stats, rollout_guard)[0]:
                unrolls = join([rollout.to(device) for rollout in rollouts])
                learner.optimizer.param_groups[0]["lr"] = linear(args.learning_rate, 0.0, run.steps, args.total_steps)
                if args.normalize_obs:
                    update_norm(run, net.norm, obs_for_stats(unrolls.obs, net.norm.image), "new unrolls")
                for batch in impala.batches(args, unrolls, learner.replay, run.rng):
                    with run.timing("learning"):
                        step(cluster, *impala_loss(args, net, batch))
            with run.timing("publishing"):
                actors.weights.publish(net)
            run.end_round()


def train_dqn(args: DqnArgs, run: Run, cluster: OnRay, learner: DqnLearner) -> None:
    """Train on batches from all replay shards, `--replay-ratio` samples for each step of the actors."""
    net, replay, limiter = learner.net, cluster.start_replay(), RateLimiter(args.replay_ratio, args.learning_starts)
    block_guard = FiniteGuard(run, "blocks_not_finite", in_a_row=apex.bad_blocks_in_a_row(args))
    with cluster.start_actors(DqnActor, learner.spec) as actors:
        for filled in actors.rounds():
            stats = cluster.insert_blocks(replay, filled, actors.weights.version)
            actors.sync_counters(filled, stats, block_guard)
            limiter.insert(sum(block.steps for block in stats), [replay.size])
            updates = run.updates
            for batch in limiter.allowed(replay, run):
                with run.timing("learning"):
                    learn_dqn(args, cluster, replay, batch)
            if run.updates > updates:
                actors.weights.publish(net)
            run.end_round()


def learn_dqn(args: DqnArgs, cluster: OnRay, replay: RemoteReplay, drawn: Batch) -> None:
    """Take a gradient step on a batch, and set its transitions' priorities to their absolute TD errors."""
    run, net, batch = cluster.run, cluster.learner.net, drawn.to(next(cluster.learner.net.parameters()).device)
    importance_exponent = linear(args.importance_exponent, 1.0, run.steps, args.total_steps)
    if args.normalize_obs:
        update_norm(run, net.norm, apex.obs_for_stats(batch), "the replay")
    importance = importance_weights(batch.probability, importance_exponent)
    total, td_error, metrics = dqn_loss(cluster.learner, batch, importance)
    if step(cluster, total, metrics, samples=args.batch_size):
        replay.update(drawn.ids, td_error.abs().cpu())
        if run.updates % args.target_period == 0:
            apex.move_target(cluster.learner.target_net, net, args.target_rate)


def main() -> int:
    args = parse_algo(on_ray.SETTINGS, __doc__)
    learner = on_ray.build_learner(args)
    train = {"impala": train_impala, "dqn": train_dqn}[args.algo]
    with on_ray.make_run(args, learner) as run, OnRay(args, run, learner) as cluster:
        train(args, run, cluster, learner)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
