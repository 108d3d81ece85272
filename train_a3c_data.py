"""Chapter 1. A3C by data: actors send rollouts, the learner computes the gradients.

Each actor process steps a vector of environments with its own copy of the net and writes what it sees into a slot of
shared memory. The learner takes filled slots, computes returns, takes gradient steps and publishes new weights. What it
minimises is A3C's loss on advantages by GAE, with PPO's clipped ratio where the policy that acted has grown old.

    actor 0 --(slot 0)--> \\
    actor 1 --(slot 1)-->  learner --(weights, version)--> all actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

from dataclasses import dataclass

import torch
from gymnasium.spaces import Discrete
from torch import nn

from a3c_mp.algorithms import actor_critic
from a3c_mp.algorithms.actor_critic import ActorCriticArgs, allocate
from a3c_mp.cli import parse_args
from a3c_mp.config import Count
from a3c_mp.data.actor_states import ActorStates
from a3c_mp.data.collector import RolloutCollector, carried_spec
from a3c_mp.data.rollout import Rollout, finished_episodes, is_finite, minibatches, rollout_spec
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.actor_critic import is_image, make_actor_critic
from a3c_mp.nets.precision import compute_dtype
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.run.device import set_up_torch
from a3c_mp.run.guard import FiniteGuard, update_norm
from a3c_mp.run.preflight import check_env
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with
from a3c_mp.seeds import derive_seeds
from wrappers import make_vec_env


@dataclass(frozen=True)
class Args(ActorCriticArgs):
    update_epochs: Count = 1
    """times that every sample is learned from"""


CARTPOLES = {name: actor_critic.PRESETS[name] | {"update_epochs": 4} for name in ("CartPole-v0", "CartPole-v1")}
PRESETS = actor_critic.PRESETS | CARTPOLES


def actor(channel: WorkerChannel, args: Args, slots: Slots, weights: Weights, states: ActorStates) -> None:
    """Spawned process: fill slots with rollouts until the learner ends it."""
    env_seed, _ = derive_seeds(args.seed, *channel.entropy)
    env = channel.closing(make_vec_env(args.env_id, args.num_envs, seed=env_seed, rebuildable=args.deterministic))
    net = make_actor_critic(env.single_observation_space, env.single_action_space)
    net.to(weights.buffers.device, weights.buffers.dtype)
    collector = RolloutCollector(args, env, net, channel)
    while True:
        slot, version = channel.take()
        version = weights.load(net, version if args.deterministic else None)
        collector.collect(rollout := Rollout(**slots[slot]))
        states.write(slot, collector.to_write, rollout)
        channel.send(slot, version)


def learn(
    args: Args, run: Run, net: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout, dtype: torch.dtype,
    guard: FiniteGuard,
) -> None:  # fmt: skip
    """Gradient steps on every sample of a rollout, in shuffled minibatches, `args.update_epochs` times."""
    samples = actor_critic.to_samples(args, rollout)
    obs = samples[0]
    for indices in minibatches(len(obs), args.batch_size, args.update_epochs, run.rng, obs.device):
        loss, metrics = actor_critic.loss(args, net, [field.index_select(0, indices) for field in samples], dtype)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
        if guard.check(norm + loss.detach(), "the learner", f"gradient {run.updates + 1}"):
            optimizer.step()
            run.record_update(metrics)


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    obs_space, action_space = check_env(args.env_id, Discrete)
    device = set_up_torch(args)
    net = make_actor_critic(obs_space, action_space).to(device)
    optimizer = actor_critic.make_optimizer(args, net)
    dtype = compute_dtype(args.precision, device, is_image(obs_space))

    spec = rollout_spec(args.unroll_length, args.num_envs, obs_space, action_space)
    slots = allocate(args, spec)

    with Run(args, "a3c_data", net, optimizer) as run:
        weights = Weights(net, dtype)
        states = ActorStates(
            args, action_space, args.unroll_length, carried_spec(args.num_envs, action_space), start=run.steps,
            slots_per_actor=args.slots_per_actor,
        )  # fmt: skip
        run.keep(actors=states, weights=weights)
        workers = states.workers(actor, (slots, weights), weights, run.on_restart)
        rollout_guard, grad_guard = FiniteGuard(run, "rollouts_not_finite"), FiniteGuard(run, "grads_not_finite")
        with workers:  # a round is one rollout, or in a deterministic run one of every actor, in order
            for filled in run.timing.each("waiting", workers.rounds(run.should_stop)):
                for worker, slot, version in filled:
                    rollout = Rollout(**slots[slot])
                    optimizer.param_groups[0]["lr"] = linear(args.learning_rate, 0.0, run.steps, args.total_steps)
                    run.record_rollout(
                        rollout.action.numel(), finished_episodes(rollout), worker, weights.version - version
                    )
                    if rollout_guard.check(is_finite(rollout), f"actor {worker}", f"rollout from actor {worker}"):
                        with run.timing("learning"):
                            rollout = Rollout(*(field.to(device, non_blocking=True) for field in rollout))
                            if args.normalize_obs:
                                obs = actor_critic.obs_for_stats(rollout.obs, net.norm.image)
                                update_norm(run, net.norm, obs, f"actor {worker}")
                            learn(args, run, net, optimizer, rollout, dtype, grad_guard)
                states.take(filled)
                with run.timing("publishing"):
                    published = weights.publish(net)  # waits for the GPU: from here on the slots have been read
                run.end_round()
                workers.release(filled, published)
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
