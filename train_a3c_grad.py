"""Chapter 2. A3C by gradients: actors compute the gradients, the learner averages them and steps.

Each actor process steps a vector of environments, computes the gradient of its own samples at the newest weights, and
writes it into a slot of shared memory as one flat vector. The learner owns the only optimizer: it takes a gradient,
or the mean of several, clips it, steps and publishes new weights. Only gradients and small statistics leave the actor.

    actor 0 --(gradient 0)--> \\
    actor 1 --(gradient 1)-->  learner --(weights, version)--> all actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from a3c_mp.algorithms import actor_critic, actor_critic_settings, gradients
from a3c_mp.algorithms.actor_critic import Samples, allocate, rollout_layout
from a3c_mp.algorithms.actor_critic_settings import ActorCriticArgs
from a3c_mp.algorithms.gradients import Gradient, GradientFilter, MeanGradient, RolloutStats
from a3c_mp.cli import parse_args
from a3c_mp.config import Between, Count
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.games import make_envs
from a3c_mp.data.resume_states import ResumeStates
from a3c_mp.data.rollout import empty_rollout, minibatches, rollout_spec
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import acting_dtype
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.run.actors import Actors, processes
from a3c_mp.run.device import set_up_torch
from a3c_mp.run.guard import merge_moments
from a3c_mp.run.preflight import probe_env
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with


@dataclass(frozen=True)
class Args(ActorCriticArgs):
    """Settings of chapter 2."""

    chapter = "a3c_grad"
    continuous: ClassVar = (
        ActorCriticArgs.continuous
    )  # repeated, as they change the batch size, a default of this class
    vectors: ClassVar = ActorCriticArgs.vectors
    changes: ClassVar[dict[str, dict[str, Any]]] = {
        "PongNoFrameskip-v4": {"explore_envs": 0.25},
        "CartPole-v0": {"batch_size": 32},
        "CartPole-v1": {"batch_size": 32},
        "Pendulum-v1": {"batch_size": 64},
        "HalfCheetah-v5": {"batch_size": 64},
        "Hopper-v5": {"batch_size": 64},
    }

    batch_size: Count = 256
    """samples in one gradient, at most T * B; sending a gradient costs the same for any batch size"""
    grads_per_step: Count = 1
    """gradients averaged in one optimizer step (K)"""
    max_lag: Annotated[int, Between(0)] | None = None
    """max policy lag: drop gradients computed at weights more than this many updates old"""
    sync: bool = False
    """synchronous A2C: one gradient of every actor in each step, all at the same weights; --deterministic implies it"""

    @property
    def in_order(self) -> bool:
        return self.sync


PRESETS = actor_critic_settings.PRESETS


def actor(
    channel: WorkerChannel, args: Args, slots: Slots, weights: Weights, acting_weights: Weights, states: ResumeStates
) -> None:
    """Actor process: collect rollouts and fill slots with their gradients until the learner stops it."""
    env = make_envs(args, channel)
    spaces, device = (env.single_observation_space, env.single_action_space), weights.buffers.device
    net = make_actor_critic(*spaces, args.net_spec).to(device)  # float32: gradients are computed here
    acting_net = deepcopy(net).to(acting_dtype(args.precision, net))
    collector = RolloutCollector(args, env, acting_net, channel)
    rollout = empty_rollout(rollout_spec(args.unroll_length, args.num_envs, *spaces), pin=args.cuda)
    rng, num_sent = torch.Generator(), collector.games.messages  # sent already by the actor that this one replaces

    slot, version = channel.take()  # with --sync, load weights only after it: it says that the last step is over
    while True:
        rng.manual_seed(collector.rollout_seeds()[0])  # so that a replacement draws the same minibatches
        acting_weights.load(acting_net)
        collector.collect(rollout)
        stats = RolloutStats.of(rollout, acting_net.norm if args.normalize_obs else None)
        samples = Samples.of(args, rollout.to(device))
        batches = minibatches(len(samples.obs), args.batch_size, 1, rng, device)
        for indices, counted in gradients.unsent(batches, stats, num_sent):
            version = weights.load(net, version if args.sync else None)
            total, metrics = actor_critic.loss(args, net, samples.select(indices))
            net.zero_grad(set_to_none=True)
            total.backward()
            gradient = Gradient(**slots[slot])  # the message: one flat vector, and what the learner counts
            gradients.copy_gradient(net, gradient.vector)
            gradient.write_stats(counted)
            states.write(slot, collector.state_fields, rollout)
            channel.send(slot, gradient.report(version, len(indices), counted, metrics))
            slot, version = channel.take()
        num_sent = 0


def main() -> int:
    args: Args = gradients.settle_sync(parse_args(Args, PRESETS, __doc__))
    obs_space, action_space = probe_env(args.env_id)
    device = set_up_torch(args)
    net = make_actor_critic(obs_space, action_space, args.net_spec).to(device)
    optimizer = actor_critic.make_optimizer(args, net)
    spec = gradients.gradient_spec(net, obs_space.shape or (), args.unroll_length * args.num_envs)
    slots = allocate(args, spec, device)

    with Run(args, args.chapter, net, optimizer) as run:
        weights = Weights(net)
        acting_weights = Weights(net) if args.sync else weights  # apart: a rollout has one version
        grads_per_rollout = -(-args.unroll_length * args.num_envs // args.batch_size)
        states = ResumeStates(args, rollout_layout(args, action_space, messages=grads_per_rollout), start=run.steps)
        run.keep(actors=states, weights=weights, acting_weights=acting_weights)
        mean, gradient_filter = MeanGradient(net), GradientFilter(run, args.max_lag, grads_per_rollout)
        start = processes(actor, args, slots, weights, acting_weights, states)
        with Actors(start, weights, states, run) as actors:
            for filled in actors.rounds():  # one gradient, or with --sync one of every actor, in order
                actor_critic.set_learning_rate(optimizer, args, run.steps)
                for worker, slot, report in filled:
                    gradient, lag = Gradient(**slots[slot]), weights.version - report.version
                    run.record_rollout(report.steps, gradient.finished_episodes(report), worker, lag)
                    with run.timing("learning"):
                        if gradient_filter.check(report, worker, lag):
                            if gradient.obs_num > 0:
                                merge_moments(run, net.norm, gradient.moments, report.clipped, f"actor {worker}")
                            mean.add(gradient.vector)  # waits for the GPU: after this the slot has been read
                            run.record_metrics(report.metrics)
                if mean.count >= (1 if args.sync else args.grads_per_step):
                    with run.timing("learning"):
                        grad_norm = mean.finish(args.max_grad_norm)
                        optimizer.step()
                        run.record_update({"losses/grad_norm": grad_norm})
                    with run.timing("publishing"):
                        weights.publish(net)
                if args.sync and states.completes_rollout(filled):  # the next rollout begins
                    acting_weights.publish(net)
                run.end_round()
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
