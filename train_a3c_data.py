"""Chapter 1. A3C by data: actors send rollouts, the learner computes the gradients.

Each actor process steps a vector of environments with its own copy of the net and writes rollouts into slots of shared
memory. The learner takes filled slots, estimates advantages by GAE, takes gradient steps on A3C's loss and publishes
new weights. PPO's clipped ratio corrects for the updates since the policy acted. Actors that die or hang are replaced.

    actor 0 --(slot 0)--> \\
    actor 1 --(slot 1)-->  learner --(weights, version)--> all actors
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned actor ends with its parent even while it imports torch)

from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from a3c_mp.algorithms import actor_critic
from a3c_mp.algorithms.actor_critic import (
    Samples,
    advantages_and_targets,
    allocate,
    anneal_entropy_coef,
    epoch_minibatches,
    rollout_layout,
    update_obs_stats,
)
from a3c_mp.algorithms.actor_critic_settings import PPO_PRESETS, PPOArgs
from a3c_mp.cli import parse_args
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.games import make_envs
from a3c_mp.data.resume_states import ResumeStates
from a3c_mp.data.rollout import Rollout, finished_episodes, is_finite, rollout_spec
from a3c_mp.maths import losses
from a3c_mp.maths.losses import Metrics
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import acting_dtype, autocast
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.run.actors import Actors, processes
from a3c_mp.run.guard import NonFiniteFilter
from a3c_mp.run.preflight import probe_env, set_up_torch
from a3c_mp.run.progress import RunState
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with


@dataclass(frozen=True)
class Args(PPOArgs):
    """Settings of chapter 1."""

    chapter = "a3c_data"


PRESETS = PPO_PRESETS


def actor(channel: WorkerChannel, args: Args, slots: Slots, weights: Weights, states: ResumeStates) -> None:
    """Actor process: fill slots with rollouts until the learner stops it."""
    env = make_envs(args, channel)
    net = make_actor_critic(env.single_observation_space, env.single_action_space, args.net_spec).to(weights.buffers)
    collector = RolloutCollector(args, env, net, channel)
    for slot, version in channel.tokens():
        version = weights.load(net, version if args.deterministic else None)  # None: the newest weights
        collector.collect(rollout := Rollout(**slots[slot]))
        states.write(slot, collector.state_fields, rollout)
        channel.send(slot, version)


def loss(args: Args, net: ActorCritic, samples: Samples) -> tuple[Tensor, Metrics]:
    """Compute (loss, metrics): A3C's loss (Mnih et al. 2016, section 4) with PPO's clipped ratio in place of log pi."""
    obs, action, behaviour_logits, advantages, value_targets = samples
    with autocast(args.precision, net):
        logits, values = (output.float() for output in net(obs))
    policy, behaviour = net.distributions(logits, behaviour_logits)
    log_probs, behaviour_log_probs = policy.log_prob(action), behaviour.log_prob(action)
    policy_loss = losses.clipped_policy_loss(log_probs, behaviour_log_probs, advantages, args.clip_ratio)
    value_loss = losses.value_loss(values, value_targets)
    entropy_loss = -policy.entropy().mean()
    total = policy_loss + args.value_coef * value_loss + args.entropy_coef * entropy_loss
    metrics: Metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": advantages, "values/value": values, "values/target": value_targets}
    metrics |= {"policy/log_ratio": log_probs - behaviour_log_probs, "policy/clip_ratio": args.clip_ratio}
    return total, metrics | {"losses/total": total}


def learn(
    args: Args, run: RunState, net: ActorCritic, optimizer: Optimizer, rollout: Rollout, guard: NonFiniteFilter
) -> None:
    """Take gradient steps on shuffled minibatches of a rollout, in `--update-epochs` epochs."""
    args = anneal_entropy_coef(args, run.steps)  # entropy coefficient after this rollout
    advantages, value_targets = advantages_and_targets(args, rollout)  # by GAE, or --returns nstep
    if args.normalize_advantages:
        advantages = losses.normalize(advantages)
    samples = Samples.flat(rollout, advantages, value_targets)
    parameters = list(net.parameters())
    for indices in epoch_minibatches(args, samples.advantages, run.rng):
        total, metrics = loss(args, net, samples.select(indices))
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        # The sum is finite only if both are.
        if guard.check(norm + total.detach(), "the learner", f"gradient {run.updates + 1}"):
            optimizer.step()
            run.record_update(metrics)


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    obs_space, action_space = probe_env(args.env_id)
    device = set_up_torch(args)
    net = make_actor_critic(obs_space, action_space, args.net_spec).to(device)
    optimizer = actor_critic.make_optimizer(args, net)
    slots = allocate(args, rollout_spec(args.unroll_length, args.num_envs, obs_space, action_space))

    with Run(args, args.chapter, net, optimizer) as run:
        weights = Weights(net, acting_dtype(args.precision, net))
        # What deterministic runs rebuild actors from, bit for bit; in others nothing is written to it.
        states = ResumeStates(args, rollout_layout(args, action_space), start=run.steps)
        run.keep(actors=states, weights=weights)
        rollout_guard, grad_guard = (
            NonFiniteFilter(run, "rollouts_not_finite"),
            NonFiniteFilter(run, "grads_not_finite"),
        )
        with Actors(processes(actor, args, slots, weights, states), weights, states, run) as actors:
            # A round is one rollout, or with --deterministic one of every actor. Its slots go back after the loop body.
            for filled in actors.rounds():
                for worker, slot, version in filled:
                    rollout, source = Rollout(**slots[slot]), f"actor {worker}"
                    actor_critic.set_learning_rate(optimizer, args, run.steps)  # of the steps before this rollout
                    run.record_rollout(
                        rollout.num_steps, finished_episodes(rollout), worker, policy_lag=weights.version - version
                    )
                    if rollout_guard.check(is_finite(rollout), source, f"rollout from {source}"):
                        with run.timing("learning"):
                            rollout = rollout.to(device)
                            update_obs_stats(args, run, net, rollout, source)
                            learn(args, run, net, optimizer, rollout, grad_guard)
                with run.timing("publishing"):
                    weights.publish(net)  # waits for the GPU: after this the slots have been read
                run.end_round()
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
