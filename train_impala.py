"""Chapter 4. IMPALA: actors act with weights that have grown old, and V-trace corrects for it.

Each actor process steps a vector of environments with its own copy of the net and writes unrolls, with the policy that
chose every action, into a slot of shared memory. The learner takes the oldest filled slots and runs its own, newer net
over whole unrolls. Where the two policies differ, truncated importance weights make good for it.

    actor 0 --(slot 0)--> \\
    actor 1 --(slot 1)-->  held, oldest first --> learner --(weights, version)--> its actors
                                                      | gradients, averaged
                                                   learner 1, 2, ... each with actors of its own
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

from typing import NamedTuple

import gymnasium
import torch
from gymnasium.spaces import Discrete
from torch import nn

from a3c_mp.algorithms import impala
from a3c_mp.algorithms.actor_critic import allocate_slots, make_optimizer, obs_for_stats
from a3c_mp.algorithms.impala import PRESETS, DelayLine, UnrollReplay
from a3c_mp.algorithms.impala import ImpalaArgs as Args
from a3c_mp.cli import parse_args
from a3c_mp.data.actor_states import ActorStates
from a3c_mp.data.collector import RolloutCollector, carried_spec
from a3c_mp.data.rollout import Rollout, finished_episodes, is_finite, join, rollout_spec
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.actor_critic import ActorCritic, make_actor_critic
from a3c_mp.nets.precision import compute_dtype
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.learners import LearnerGroup, Learners
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import RestartMessage
from a3c_mp.run.device import set_up_torch
from a3c_mp.run.guard import FiniteGuard, update_norm
from a3c_mp.run.message_stats import MessageStats, log_restarts_on_exit, sync_counters
from a3c_mp.run.preflight import check_env, check_learners
from a3c_mp.run.replica import ReplicaRun
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with
from a3c_mp.seeds import derive_seeds
from wrappers import make_vec_env


class LearnerState(NamedTuple):
    """What a learner owns."""

    net: ActorCritic
    optimizer: torch.optim.Optimizer
    slots: Slots
    action_space: gymnasium.Space


def actor(channel: WorkerChannel, args: Args, slots: Slots, weights: Weights, states: ActorStates) -> None:
    """Spawned process: fill slots with unrolls until its learner ends it."""
    env_seed, _ = derive_seeds(args.seed, *channel.entropy)
    env = channel.closing(make_vec_env(args.env_id, args.num_envs, seed=env_seed, rebuildable=args.deterministic))
    net = make_actor_critic(env.single_observation_space, env.single_action_space, args.net, args.lstm)
    net.to(weights.buffers.device, weights.buffers.dtype)
    collector = RolloutCollector(args, env, net, channel)
    while True:
        slot, version = channel.take()
        version = weights.load(net, version if args.deterministic else None)
        collector.collect(rollout := Rollout(**slots[slot]))
        states.write(slot, collector.to_write, rollout)
        channel.send(slot, version)


def learn(
    args: Args, run: Run | ReplicaRun, group: LearnerGroup, net: ActorCritic, optimizer: torch.optim.Optimizer,
    unrolls: Rollout,
    replay: UnrollReplay, dtype: torch.dtype, guard: FiniteGuard,
) -> None:  # fmt: skip
    """A gradient step for every batch of new unrolls, filled up with replayed ones."""
    optimizer.param_groups[0]["lr"] = linear(args.learning_rate, 0.0, run.steps, args.total_steps)
    if args.normalize_obs:
        update_norm(run, net.norm, group.all_gather(obs_for_stats(unrolls.obs, net.norm.image)), "new unrolls")
    for batch in impala.batches(args, unrolls, replay, run.rng):
        loss, metrics = impala.loss(args, net, batch, dtype, group.all_reduce_mean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        group.all_reduce_gradients(net, loss)
        metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
        if guard.check(norm + loss.detach(), "the learners", f"gradient {run.updates + 1}"):
            optimizer.step()
            run.record_update(metrics)


def train(args: Args, run: Run | ReplicaRun, group: LearnerGroup, parts: LearnerState) -> None:
    """What every learner does: take unrolls from its own actors, and every gradient step together with the others."""
    net, optimizer, slots = parts.net, parts.optimizer, parts.slots
    device = next(net.parameters()).device
    dtype = compute_dtype(args.precision, device, net.norm.image)
    replay = UnrollReplay(slots.spec, args.replay_size if args.replay_proportion else 0, device)
    delayed = DelayLine(args.force_lag)
    weights = Weights(delayed(net), dtype)
    own = group.own_actors(args.num_actors)
    states = ActorStates(
        args, parts.action_space, args.unroll_length, carried_spec(args.num_envs, parts.action_space, net.core_size),
        start=run.steps, own=own, slots_per_actor=args.slots_per_actor,
    )  # fmt: skip
    run.keep(actors=states, weights=weights, delayed=delayed, replay=replay)
    if args.deterministic and run.steps and replay.capacity and group.size > 1:
        run.log.warning("replayed unrolls of learners 1, 2, ... are in no checkpoint: bits differ from here on")
    group.broadcast_state(net, optimizer, states, weights, delayed)
    restart_messages: list[RestartMessage] = []
    workers = states.workers(actor, (slots, weights), weights, restart_messages.append)
    rollout_guard, grad_guard = FiniteGuard(run, "rollouts_not_finite"), FiniteGuard(run, "grads_not_finite")
    with (
        log_restarts_on_exit(run, restart_messages),
        workers,
    ):  # a round is what a batch takes, oldest first, or in a deterministic run one unroll of every actor
        rounds = workers.rounds(run.should_stop, impala.rollouts_per_batch(args))
        for filled in run.timing.each("waiting", rounds):
            rollouts = [Rollout(**slots[slot]) for _, slot, _ in filled]
            news = [
                MessageStats(rollout.action.numel(), finished_episodes(rollout), own[worker],
                     weights.version - version + min(version, args.force_lag), is_finite(rollout))
                for (worker, _, version), rollout in zip(filled, rollouts, strict=True)
            ]  # fmt: skip
            with run.timing("waiting"):
                finite, _ = sync_counters(
                    group, run, rollout_guard, news, restart_messages, states, states.read(filled)
                )
            if finite:  # in every learner, or none learns: they take every step together
                with run.timing("learning"):
                    unrolls = join([Rollout(*(f.to(device, non_blocking=True) for f in r)) for r in rollouts])
                    learn(args, run, group, net, optimizer, unrolls, replay, dtype, grad_guard)
            with run.timing("publishing"):
                published = weights.publish(delayed(net))  # waits for the GPU: from here on the slots have been read
            run.end_round()
            workers.release(filled, published)


def build_learner(args: Args, rank: int = 0) -> LearnerState:
    """What a learner owns. Raises ConfigError for settings that do not go together."""
    check_learners(args.num_learners, args.num_actors, args.cuda)
    impala.rollouts_per_batch(args)
    obs_space, action_space = check_env(args.env_id, Discrete)
    impala.check_net(args, obs_space)
    device = set_up_torch(args, rank)
    net = make_actor_critic(obs_space, action_space, args.net, args.lstm).to(device)
    spec = rollout_spec(args.unroll_length, args.num_envs, obs_space, action_space, net.core_size)
    slots = allocate_slots(args, spec, args.num_actors // args.num_learners)
    return LearnerState(net, make_optimizer(args, net), slots, action_space)


def follow(group: LearnerGroup, args: Args, steps: int, updates: int) -> None:
    """Spawned process: a learner besides the first."""
    train(args, ReplicaRun(args, group.rank, steps, updates), group, build_learner(args, group.rank))


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    parts = build_learner(args)
    with (
        Run(args, "impala", parts.net, parts.optimizer) as run,
        Learners.of(run, args.num_learners, follow, args) as group,
    ):
        train(args, run, group, parts)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
