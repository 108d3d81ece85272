"""Chapter 5. A2C as a task: a pipeline of middleware, which runs in one process or is cut into roles.

Each iteration passes one context through all middleware, and back in reverse order. Standalone, one process runs all
of them; distributed, each node runs those that its labels select, and messages connect the nodes.

    collector 0 --(slot)--> \\
    collector 1 --(slot)-->  learner --(weights)--> evaluator
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned node ends with its parent even while it imports torch)

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from a3c_mp.algorithms import actor_critic, attach, roles
from a3c_mp.algorithms.actor_critic import GradientSteps, Samples, update_obs_stats
from a3c_mp.algorithms.actor_critic_settings import PPO_PRESETS
from a3c_mp.algorithms.roles import Learner, Memory, NodeGroup, RoleArgs
from a3c_mp.cli import parse_args
from a3c_mp.data.rollout import Rollout, finished_episodes, is_finite, rollout_spec
from a3c_mp.maths import losses
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import autocast
from a3c_mp.run.guard import NonFiniteFilter
from a3c_mp.run.preflight import probe_env, set_up_torch
from a3c_mp.run.script import exit_with
from a3c_mp.task.context import Context
from a3c_mp.task.middleware import Middleware
from a3c_mp.task.node import Node
from a3c_mp.task.task import Task
from a3c_mp.task.timing import StepTimer


@dataclass(frozen=True)
class Args(RoleArgs):
    """Settings of chapter 5."""


PRESETS = {name: {"eval_every": 20_000 if "CartPole" in name else 100_000} | p for name, p in PPO_PRESETS.items()}


def collect(args: Args, memory: Memory, collectors: list[roles.Collector]) -> Middleware:
    """Middleware: fill a slot with a rollout, for each collector of this process."""

    def _collect(ctx: Context) -> None:
        for channel, net, collector in collectors:
            if (token := channel.take()) is not None:
                version = memory.weights.load(net, token.version if args.deterministic else None)
                collector.collect(rollout := Rollout(**channel.fields(memory.slots, token.slot)))
                memory.states.write(token.slot, collector.state_fields, rollout)
                channel.send(token.slot, version)

    return _collect


def take(learner: Learner) -> Middleware:
    """Middleware: take filled slots, and give them back on the way back."""

    def _take(ctx: Context) -> Iterator[None]:
        ctx.filled = learner.actors.take()
        yield
        learner.actors.release(ctx.filled)

    return _take


def loss(args: Args, net: ActorCritic, samples: Samples) -> tuple[Tensor, losses.Metrics]:
    """Compute (loss, metrics): A2C's loss (Mnih et al. 2016, section 4) with PPO's clipped ratio in place of log pi."""
    obs, action, behaviour_logits, advantages, value_targets = samples
    with autocast(args.precision, net):
        logits, values = (output.float() for output in net(obs))
    policy, behaviour = net.distributions(logits, behaviour_logits)
    log_probs, behaviour_log_probs = policy.log_prob(action), behaviour.log_prob(action)
    policy_loss = losses.clipped_policy_loss(log_probs, behaviour_log_probs, advantages, args.clip_ratio)
    value_loss, entropy_loss = losses.value_loss(values, value_targets), -policy.entropy().mean()
    total = policy_loss + args.value_coef * value_loss + args.entropy_coef * entropy_loss
    metrics: losses.Metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": advantages, "values/value": values, "values/target": value_targets}
    metrics |= {"policy/log_ratio": log_probs - behaviour_log_probs, "policy/clip_ratio": args.clip_ratio}
    return total, metrics | {"losses/total": total}


def learn(args: Args, memory: Memory, learner: Learner) -> Middleware:
    """Middleware: take gradient steps on the rollouts that were taken, and publish the weights."""
    run, weights, net, optimizer = learner.run, learner.actors.weights, learner.net, learner.optimizer
    guard, steps = NonFiniteFilter(run, "rollouts_not_finite"), GradientSteps(args, run, net, optimizer, loss)

    def _learn(ctx: Context) -> None:
        for worker, slot, version in ctx.filled:
            rollout, source, lag = Rollout(**memory.slots[slot]), f"collector {worker}", weights.version - version
            actor_critic.set_learning_rate(optimizer, args, run.steps)
            run.record_rollout(rollout.num_steps, finished_episodes(rollout), worker, policy_lag=lag)
            if guard.check(is_finite(rollout), source, f"rollout from {source}"):
                with run.timing("learning"):
                    rollout = rollout.to(weights.device)
                    update_obs_stats(args, run, net, rollout, source)
                    steps.take(Samples.of(args, rollout))
        if ctx.filled:
            with run.timing("publishing"):
                weights.publish(net)
            run.end_round()
        ctx.finish = ctx.finish or run.should_stop()

    return _learn


def evaluate(evaluator: roles.Evaluator) -> Middleware:
    """Middleware: play whole games with each snapshot of the weights that the learner hands out."""

    def _evaluate(ctx: Context) -> None:
        if (net := evaluator.take()) is not None and (played := evaluator.play(net)) is not None:
            evaluator.send(played)

    return _evaluate


def pipeline(node: Node, args: Args, memory: Memory, learner: Learner | None = None) -> None:
    """Run the task of one node: its labels, and whether it is the learner, select the middleware that it uses."""
    with Task(router=node, labels=node.labels, known_labels=node.known_labels, async_mode=args.async_mode) as task:
        if collectors := roles.collectors_of(node, args, memory, learner):
            task.use(collect(args, memory, collectors), filter_labels=["standalone", "collector"])
        if learner is not None:
            task.use_wrapper(StepTimer(args.print_per_step, learner.run.log.info, learner.run.record_metrics))
            task.use(task.serial(take(learner), learn(args, memory, learner)), name="learner")
        if evaluator := roles.evaluator_of(node, args, learner):
            task.use(evaluate(evaluator), filter_labels=["standalone", "evaluator"])
        task.run()


def main() -> int:
    args = roles.check_roles(parse_args(Args, PRESETS, __doc__))
    if args.attach_to is not None:
        return attach.join_task(pipeline, args)
    spaces, device = probe_env(args.env_id), set_up_torch(args)
    net = make_actor_critic(*spaces, args.net_spec).to(device)
    optimizer = actor_critic.make_optimizer(args, net)
    slots = roles.allocate(args, net, rollout_spec(args.unroll_length, args.num_envs, *spaces))
    with roles.make_run(args, net, optimizer) as run, NodeGroup(pipeline, args, run, slots, spaces[1]) as cluster:
        pipeline(cluster.node, args, cluster.memory, Learner(run, cluster.actors, net, optimizer))
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
