"""Chapter 2. A3C by gradients: actors compute the gradients, the learner averages them and steps.

Each actor process steps a vector of environments, computes the gradient of its own samples at the newest weights, and
writes it into a slot of shared memory as one flat vector. The learner owns the only optimizer: it takes the mean of a
few gradients, clips it, steps and publishes new weights. Observations never leave the actor.

    actor 0 --(gradient 0)--> \\
    actor 1 --(gradient 1)-->  learner --(weights, version)--> all actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from gymnasium.spaces import Discrete

from a3c_mp import actor_critic
from a3c_mp.actor_critic import ActorCriticArgs, allocate
from a3c_mp.collect import Collector
from a3c_mp.config import Between, ConfigError, Count, check_env, exit_with, parse_args
from a3c_mp.device import set_up_torch
from a3c_mp.gradients import Gradient, Inspector, MeanGradient, Report, episodes_of, gradient_spec, write_gradient
from a3c_mp.nets import Moments, is_image, make_actor_critic
from a3c_mp.precision import compute_dtype
from a3c_mp.rollout import Rollout, empty_rollout, finished_episodes, is_finite, minibatches, rollout_spec
from a3c_mp.run import Run
from a3c_mp.schedules import linear
from a3c_mp.seeds import derive_seeds
from a3c_mp.slots import Slots
from a3c_mp.weights import Weights
from a3c_mp.workers import Link, Workers
from wrappers import make_vec_env


@dataclass(frozen=True)
class Args(ActorCriticArgs):
    batch_size: Count = 256
    """samples in one gradient: sending it costs the same for few as for many; at most those of a rollout, T * B"""
    grads_per_step: Count = 1
    """gradients averaged in one step of the optimizer (K)"""
    max_lag: Annotated[int, Between(0)] | None = None
    """drop gradients taken at weights more than this many updates old"""
    sync: bool = False
    """synchronous A2C: in each step one gradient of every actor, all at the same weights; --deterministic implies it"""


CARTPOLES = {name: actor_critic.PRESETS[name] | {"batch_size": 32} for name in ("CartPole-v0", "CartPole-v1")}
PRESETS = actor_critic.PRESETS | CARTPOLES


def settle(args: Args) -> Args:
    """Settings with what follows from others. Raises ConfigError where --sync leaves no choice."""
    if not (args.sync or args.deterministic):
        return args
    if args.grads_per_step not in (1, args.num_actors):
        why = f"with --sync or --deterministic a step takes one gradient of each of {args.num_actors} actors"
        raise ConfigError("grads-per-step", args.grads_per_step, why, "leave it out")
    return replace(args, sync=True, slots_per_actor=1)


def actor(link: Link, args: Args, slots: Slots, weights: Weights) -> None:
    """Spawned process: collect rollouts and fill slots with gradients until the learner ends it."""
    env_seed, action_seed = derive_seeds(args.seed, link.start, link.worker, link.generation)
    env = link.closing(make_vec_env(args.env_id, args.num_envs, seed=env_seed))
    spaces, device = (env.single_observation_space, env.single_action_space), weights.buffers.device
    dtype = compute_dtype(args.precision, device, is_image(spaces[0]))
    net = make_actor_critic(*spaces).to(device)  # float32: gradients are taken here
    acting_net = deepcopy(net).to(dtype)
    collector = Collector(env, acting_net, action_seed, args.deterministic, link.beat)
    rollout = empty_rollout(rollout_spec(args.unroll_length, args.num_envs, *spaces), pin=args.cuda)
    rng = torch.Generator().manual_seed(derive_seeds(action_seed)[0])

    slot, version = link.take()
    while True:
        weights.load(acting_net, version if args.sync else None)
        collector.collect(rollout)
        episodes: list = finished_episodes(rollout)
        rollout_is_finite = is_finite(rollout)
        on_device = Rollout(*(field.to(device, non_blocking=True) for field in rollout))
        moments = None
        if args.normalize_obs:
            moments = Moments.of(actor_critic.for_moments(on_device.obs, net.norm.image))
        samples = actor_critic.to_samples(args, on_device)
        for indices in minibatches(len(samples[0]), args.batch_size, 1, rng, device):
            version = weights.load(net, version if args.sync else None)
            loss, curves = actor_critic.loss(args, net, [field.index_select(0, indices) for field in samples], dtype)
            net.zero_grad(set_to_none=True)
            loss.backward()
            finite, means = write_gradient(Gradient(**slots[slot]), net, moments, episodes, curves)
            link.send(slot, Report(version, len(indices), len(episodes), finite and rollout_is_finite, means))
            moments, episodes = None, []  # told once for each rollout
            slot, version = link.take()


def main() -> int:
    args = settle(parse_args(Args, PRESETS, __doc__))
    obs_space, action_space = check_env(args.env_id, Discrete)
    device = set_up_torch(args)
    net = make_actor_critic(obs_space, action_space).to(device)
    optimizer = actor_critic.make_optimizer(args, net)
    slots = allocate(args, gradient_spec(net, obs_space.shape, args.unroll_length * args.num_envs), device)

    with Run(args, "a3c_grad", net, optimizer) as run:
        weights = Weights(net)
        workers = Workers(
            actor, args.num_actors, (args, slots, weights), start=run.steps, slots_per_worker=args.slots_per_actor,
            in_order=args.sync, max_restarts=args.max_restarts, hang_seconds=args.hang_seconds,
            on_restart=run.worker_restarted,
        )  # fmt: skip
        grads_per_rollout = -(-args.unroll_length * args.num_envs // args.batch_size)
        mean, inspector = MeanGradient(net), Inspector(run, args.max_lag, grads_per_rollout)
        held: list[int] = []
        with workers:
            for worker, slot, report in run.timing.each("waiting", workers.filled(run.should_stop)):
                gradient, lag = Gradient(**slots[slot]), weights.version - report.version
                run.consumed(report.steps, episodes_of(gradient, report.num_episodes), worker, lag)
                with run.timing("learning"):
                    if inspector.accepts(report, worker, lag):
                        if gradient.obs_num > 0:
                            net.norm.merge(gradient.moments)
                        mean.add(gradient.vector)  # waits for the GPU: from here on the slot has been read
                        run.observed(report.curves)
                held.append(slot)
                complete = len(held) == args.num_actors if args.sync else mean.count == args.grads_per_step
                if complete and mean.count > 0:
                    with run.timing("learning"):
                        optimizer.param_groups[0]["lr"] = linear(args.learning_rate, 0.0, run.steps, args.total_steps)
                        grad_norm = mean.finish(args.clip_grad)
                        optimizer.step()
                        run.learned({"losses/grad_norm": grad_norm})
                    with run.timing("publishing"):
                        weights.publish(net)
                if complete or not args.sync:  # in step with the others, an actor waits for the new weights
                    if run.tick():
                        workers.start_anew(run.steps, weights.version)
                    for slot in held:
                        workers.release(slot, weights.version)
                    held.clear()
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
