"""Chapter 7. The same on a cluster of machines, on Ray: a parameter server, actors, replay shards, a trainer.

Ray starts actors on the nodes of a cluster and carries what they send; the trainer decides what they do and when.

    impala:  actors --(unrolls)--> trainer                         trainer --(weights, version)--> parameter server
    dqn:     actors --(rows)--> replay shards --(batch)--> trainer            parameter server --> actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: it sets the number of threads before torch is imported)

from torch import Tensor, zeros_like

from a3c_mp.algorithms import apex, dqn, impala, ray_trainer
from a3c_mp.algorithms.actor_critic import obs_for_stats, rewards_and_discounts, set_learning_rate
from a3c_mp.algorithms.rate_limiter import RateLimiter
from a3c_mp.algorithms.ray_settings import SETTINGS, DqnArgs, ImpalaArgs
from a3c_mp.algorithms.ray_trainer import DqnLearner, RayTrainer
from a3c_mp.cli import parse_algo
from a3c_mp.cluster import FleetChannel, Outbox, Packer, Reader, ReplaySpec, Result, Rows, Token, all_finite
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.games import make_envs
from a3c_mp.data.rollout import Rollout, episode_starts, join
from a3c_mp.data.transitions import TransitionCollector
from a3c_mp.maths import losses
from a3c_mp.maths.returns import vtrace
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.actor_critic import ActorCritic, unroll
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import autocast
from a3c_mp.replay import Batch, importance_weights
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with


class ImpalaActor:
    """Actor process on some node: it sends an unroll for each token."""

    def __init__(self, channel: FleetChannel, args: ImpalaArgs, packer: Packer, weights: Reader):
        env = make_envs(args, channel)
        net = make_actor_critic(env.single_observation_space, env.single_action_space, args.net_spec)
        self.args, self.packer, self.weights, self.net = args, packer, weights, net.to(weights.dtype)
        self.collector, self.rollout = RolloutCollector(args, env, self.net, channel), Rollout(**packer.empty())

    def __call__(self, token: Token) -> tuple[Result, None]:
        version = self.weights.load(self.net, token.version if self.args.deterministic else None)
        self.collector.collect(self.rollout)
        state = ray_trainer.state_of(self.args, self.collector.state_fields, self.rollout)
        return Result(version, self.packer.pack(self.rollout._asdict()), state), None


class DqnActor:
    """Actor process on some node: it sends the transitions of a block of steps for each token, for a replay shard."""

    def __init__(self, channel: FleetChannel, args: DqnArgs, packer: Packer, weights: Reader, spec: ReplaySpec):
        env = make_envs(args, channel)
        net = dqn.make_net(env.single_observation_space, env.single_action_space)
        self.args, self.packer, self.weights, self.net = args, packer, weights, net.to(weights.dtype)
        self.outbox = Outbox(spec, args.block_length, args.n_step, channel.restored)
        self.collector = TransitionCollector(args, env, self.outbox.ring, args.n_step, channel)
        games, self.block = self.collector.games, packer.empty()
        self.policy = dqn.Policy(
            args, self.net, env.single_action_space, games.obs, channel.actor, games.successor_state
        )

    def __call__(self, token: Token) -> tuple[Result, Rows]:
        version = self.weights.load(self.net, token.version if self.args.deterministic else None)
        self.collector.collect(self.block, self.policy, warm_up=self.weights.untrained and version == 0)
        state = ray_trainer.state_of(self.args, self.collector.state_fields, self.block, self.policy)
        rows = self.outbox.take()
        return Result((version, all_finite(rows)), self.packer.pack(self.block), state), rows


def impala_loss(args: ImpalaArgs, net: ActorCritic, unrolls: Rollout) -> tuple[Tensor, losses.Metrics]:
    """Compute (loss, metrics): IMPALA's loss on V-trace targets (Espeholt et al. 2018, section 4.2)."""
    rewards, discounts = rewards_and_discounts(args, unrolls)
    with autocast(args.precision, net):
        logits, values = unroll(net, unrolls.obs, unrolls.lstm_state[0], episode_starts(unrolls))
    logits, values, bootstrap_value = logits[:-1].float(), values[:-1].float(), values[-1].float()
    policy, behaviour = net.distributions(logits, unrolls.behaviour_logits)
    log_probs = policy.log_prob(unrolls.action)
    log_rhos = log_probs.detach() - behaviour.log_prob(unrolls.action)  # log(pi / mu)
    log_weights = log_rhos if args.vtrace else zeros_like(log_rhos)
    vs, advantages, weights = vtrace(log_weights, discounts, rewards, values, bootstrap_value, *args.clips)
    advantages = weights * (losses.normalize(advantages, weights) if args.normalize_advantages else advantages)
    policy_loss, entropy_loss = losses.policy_gradient_loss(log_probs, advantages), -policy.entropy().mean()
    value_loss = losses.value_loss(values, vs)
    total = policy_loss + args.value_coef * value_loss + args.entropy_coef * entropy_loss
    metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": advantages, "values/value": values, "values/target": vs}
    return total, metrics | losses.rho_metrics(log_rhos, args.clip_rho)


def dqn_loss(
    args: DqnArgs, learner: DqnLearner, batch: Batch, importance: Tensor
) -> tuple[Tensor, Tensor, losses.Metrics]:
    """Compute (loss, TD errors [N], metrics): n-step double Q-learning (Horgan et al. 2018); importance [N]."""
    with autocast(args.precision, learner.net):
        q = dqn.q_values(learner.net, batch)
        target = batch.reward + batch.discount * dqn.bootstrap_values(learner.net, learner.target_net, batch)
    td_error = target - q
    return losses.huber(td_error, importance), td_error.detach(), {"values/q": q, "values/target": target}


def train_impala(args: ImpalaArgs, run: Run, trainer: RayTrainer, learner: impala.LearnerState) -> None:
    """Train on unrolls in the order in which they arrive."""
    with trainer.start_actors(ImpalaActor, replay=learner.replay) as actors:
        for filled in actors.rounds(impala.rollouts_per_round(args)):  # enough for a batch, oldest first
            rollouts, stats = trainer.read_rollouts(filled, actors.weights.version)
            set_learning_rate(learner.optimizer, args, run.steps)
            if actors.record_round(filled, stats, trainer.data_guard).finite:
                unrolls = join([rollout.to(trainer.device) for rollout in rollouts])
                trainer.update_norm(obs_for_stats(unrolls.obs, learner.net.norm.image))
                for batch in impala.batches(args, unrolls, learner.replay, run.rng):
                    trainer.step(*impala_loss(args, learner.net, batch))
            trainer.publish()
            run.end_round()


def train_dqn(args: DqnArgs, run: Run, trainer: RayTrainer, learner: DqnLearner) -> None:
    """Train on batches from all replay shards, `--replay-ratio` samples for each step of the actors."""
    net, replay, limiter = learner.net, trainer.start_replay(), RateLimiter(args.replay_ratio, args.learning_starts)
    with trainer.start_actors(DqnActor, learner.spec) as actors:
        for filled in actors.rounds():
            updates, stats = run.updates, trainer.insert_blocks(replay, filled, actors.weights.version)
            actors.record_round(filled, stats, trainer.data_guard)
            limiter.insert(sum(block.steps for block in stats), [replay.size])
            for batch in limiter.allowed(replay, run):
                trainer.update_norm(apex.obs_for_stats(batch))
                exponent = linear(args.importance_exponent, 1.0, run.steps, args.total_steps)
                importance = importance_weights(batch.probability, exponent)
                total, td_error, metrics = dqn_loss(args, learner, batch, importance)
                if trainer.step(total, metrics, samples=args.batch_size):
                    replay.update(batch.ids, td_error.abs())
                    if run.updates % args.target_period == 0:
                        apex.move_target(learner.target_net, net, args.target_rate)
            if run.updates > updates:
                trainer.publish()
            run.end_round()


def main() -> int:
    args = parse_algo(SETTINGS, __doc__)
    learner = ray_trainer.build_learner(args)
    with ray_trainer.make_run(args, learner) as run, RayTrainer(args, run, learner) as trainer:
        trainer.pick(impala=train_impala, dqn=train_dqn)(args, run, trainer, learner)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
