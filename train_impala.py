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

import torch
from gymnasium.spaces import Discrete
from torch import nn

from a3c_mp import impala
from a3c_mp.actor_critic import allocate_slots, for_moments, make_optimizer
from a3c_mp.collect import Collector
from a3c_mp.config import check_env, exit_with, parse_args
from a3c_mp.device import check_learners, set_up_torch
from a3c_mp.follower import Follower
from a3c_mp.guard import Guard
from a3c_mp.impala import PRESETS, DelayLine, UnrollReplay
from a3c_mp.impala import ImpalaArgs as Args
from a3c_mp.learners import Learners, Team
from a3c_mp.nets import ActorCritic, make_actor_critic
from a3c_mp.news import News, tell
from a3c_mp.precision import compute_dtype
from a3c_mp.rollout import Rollout, finished_episodes, is_finite, join, rollout_spec
from a3c_mp.run import Run
from a3c_mp.schedules import linear
from a3c_mp.seeds import derive_seeds
from a3c_mp.slots import Slots
from a3c_mp.weights import Weights
from a3c_mp.workers import Filled, Link, Workers
from wrappers import make_vec_env


def actor(link: Link, args: Args, slots: Slots, weights: Weights, first: int) -> None:
    """Spawned process: fill slots with unrolls until its learner, whose actors are numbered from `first`, ends it."""
    env_seed, action_seed = derive_seeds(args.seed, link.start, first + link.worker, link.generation)
    env = link.closing(make_vec_env(args.env_id, args.num_envs, seed=env_seed))
    net = make_actor_critic(env.single_observation_space, env.single_action_space, args.net, args.lstm)
    net.to(weights.buffers.device, weights.buffers.dtype)
    collector = Collector(env, net, action_seed, args.deterministic, link.beat)
    while True:
        slot, version = link.take()
        version = weights.load(net, version if args.deterministic else None)
        collector.collect(Rollout(**slots[slot]))
        link.send(slot, version)


def learn(
    args: Args, run: Run | Follower, team: Team, net: ActorCritic, optimizer: torch.optim.Optimizer, unrolls: Rollout,
    replay: UnrollReplay | None, dtype: torch.dtype, guard: Guard,
) -> None:  # fmt: skip
    """A gradient step for every batch of new unrolls, filled up with replayed ones."""
    optimizer.param_groups[0]["lr"] = linear(args.learning_rate, 0.0, run.steps, args.total_steps)
    if args.normalize_obs:
        net.norm.update(team.gather(for_moments(unrolls.obs, net.norm.image)))
    for batch in impala.batches(args, unrolls, replay, run.rng):
        loss, curves = impala.loss(args, net, batch, dtype, team.average)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        team.average_gradients(net, loss)
        curves["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
        if guard.accepts(norm + loss.detach(), "the learners", f"gradient {run.updates + 1}"):
            optimizer.step()
            run.learned(curves)


def train(
    args: Args, run: Run | Follower, team: Team, net: ActorCritic, optimizer: torch.optim.Optimizer, slots: Slots
) -> None:
    """What every learner does: take unrolls from its own actors, and every gradient step together with the others."""
    team.synchronize(net, optimizer)
    device = next(net.parameters()).device
    dtype = compute_dtype(args.precision, device, net.norm.image)
    replay = UnrollReplay(slots.spec, args.replay_size, device) if args.replay_proportion else None
    delayed = DelayLine(args.force_lag)
    weights = Weights(delayed(net), dtype)
    num_actors = args.num_actors // team.size
    first = team.rank * num_actors
    begun = 0  # version that everyone began with
    incidents: list[str] = []
    workers = Workers(
        actor, num_actors, (args, slots, weights, first), start=run.steps, slots_per_worker=args.slots_per_actor,
        in_order=args.deterministic, max_restarts=args.max_restarts, hang_seconds=args.hang_seconds,
        on_restart=incidents.append, first_actor=first,
    )  # fmt: skip
    group_size = impala.rollouts_per_batch(args)
    held: list[Filled] = []  # oldest first; actors wait once their slots are full, so it cannot grow
    rollout_guard, grad_guard = Guard(run, "rollouts_not_finite"), Guard(run, "grads_not_finite")
    with workers:
        for filled in run.timing.each("waiting", workers.filled(run.should_stop)):
            held.append(filled)
            if len(held) < group_size:
                continue
            rollouts = [Rollout(**slots[slot]) for _, slot, _ in held]
            news = [
                News(rollout.action.numel(), finished_episodes(rollout), first + worker,
                     weights.version - version + min(version - begun, args.force_lag), is_finite(rollout))
                for (worker, _, version), rollout in zip(held, rollouts, strict=True)
            ]  # fmt: skip
            with run.timing("waiting"):
                finite, _ = tell(team, run, rollout_guard, news, incidents)
            if finite:  # in every learner, or none learns: they take every step together
                with run.timing("learning"):
                    unrolls = join([Rollout(*(f.to(device, non_blocking=True) for f in r)) for r in rollouts])
                    learn(args, run, team, net, optimizer, unrolls, replay, dtype, grad_guard)
            if anew := run.tick():  # a run resumed here knows neither old nets nor old unrolls
                delayed, begun = DelayLine(args.force_lag), weights.version + 1
                if replay is not None:
                    replay.clear()
            with run.timing("publishing"):
                published = weights.publish(delayed(net))  # waits for the GPU: from here on the slots have been read
            if anew:
                workers.start_anew(run.steps, published)
            for _, slot, _ in held:
                workers.release(slot, published)
            held.clear()


def set_up(args: Args, rank: int = 0) -> tuple[ActorCritic, torch.optim.Optimizer, Slots]:
    """(net, optimizer, slots) of a learner. Raises ConfigError for settings that do not go together."""
    check_learners(args.num_learners, args.num_actors, args.cuda)
    impala.rollouts_per_batch(args)
    obs_space, action_space = check_env(args.env_id, Discrete)
    impala.check_net(args, obs_space)
    device = set_up_torch(args, rank)
    net = make_actor_critic(obs_space, action_space, args.net, args.lstm).to(device)
    spec = rollout_spec(args.unroll_length, args.num_envs, obs_space, action_space, net.core_size)
    slots = allocate_slots(args, spec, args.num_actors // args.num_learners)
    return net, make_optimizer(args, net), slots


def follow(team: Team, args: Args, steps: int, updates: int) -> None:
    """Spawned process: a learner besides the first."""
    train(args, Follower(args, team.rank, steps, updates), team, *set_up(args, team.rank))


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    net, optimizer, slots = set_up(args)
    with Run(args, "impala", net, optimizer) as run, Learners.of(run, args.num_learners, follow, args) as team:
        train(args, run, team, net, optimizer, slots)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
