"""Chapter 5. A2C as a task: a pipeline of middleware, which runs in one process or is cut into roles.

Each iteration of the loop passes one context through all middleware, and back in reverse order. Alone, a process runs
all of them. Cut into roles, every node runs those that its labels select, and messages connect them: collectors fill
slots with rollouts, the learner takes gradient steps, the evaluator plays whole games with weights that it pulls.

    standalone:   collect -> take -> learn -> evaluate
    distributed:  collector 0 --(slot)--> \\
                  collector 1 --(slot)--> learner --(weights)--> evaluator
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned node ends with its parent even while it imports torch)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gymnasium.spaces import Discrete
from torch import Tensor, nn

from a3c_mp.algorithms import actor_critic
from a3c_mp.algorithms.actor_critic import Samples, obs_for_stats
from a3c_mp.algorithms.node_evaluator import EvaluatorEnd, InlineEvaluator
from a3c_mp.algorithms.roles import (
    Cluster,
    Learner,
    Memory,
    RoleArgs,
    channels_of,
    check_roles,
    evaluator_of,
    join_task,
    share_memory,
)  # fmt: skip
from a3c_mp.cli import parse_args
from a3c_mp.config import Count
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.games import make_envs
from a3c_mp.data.rollout import Rollout, finished_episodes, is_finite, minibatches
from a3c_mp.maths import losses
from a3c_mp.maths.losses import Metrics
from a3c_mp.maths.schedules import linear
from a3c_mp.nets.actor_critic import make_actor_critic
from a3c_mp.nets.precision import autocast
from a3c_mp.run.device import set_up_torch
from a3c_mp.run.evaluate import make_policy
from a3c_mp.run.evaluator import Games
from a3c_mp.run.guard import FiniteGuard, update_norm
from a3c_mp.run.preflight import check_env
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with
from a3c_mp.task.context import Context
from a3c_mp.task.exchange import CollectorChannel
from a3c_mp.task.middleware import Middleware
from a3c_mp.task.parallel import Node
from a3c_mp.task.task import Task
from a3c_mp.task.timing import StepTimer


@dataclass(frozen=True)
class Args(RoleArgs):
    """Settings of chapter 5."""

    update_epochs: Count = 1
    """PPO epochs: times that every sample of a rollout is learned from"""


CARTPOLE = {"update_epochs": 4, "eval_every": 20_000}
CARTPOLES = {name: actor_critic.PRESETS[name] | CARTPOLE for name in ("CartPole-v0", "CartPole-v1")}
PRESETS = actor_critic.PRESETS | CARTPOLES


def collect(args: Args, memory: Memory, channels: Sequence[CollectorChannel]) -> Middleware:
    """Middleware: fill a slot with a rollout, for each collector of this process."""
    collectors = []
    for channel in channels:
        env = make_envs(args, channel)
        net = make_actor_critic(env.single_observation_space, env.single_action_space).to(memory.weights.buffers)
        collectors.append((channel, net, RolloutCollector(args, env, net, channel)))

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


def loss(args: Args, net: nn.Module, samples: Samples) -> tuple[Tensor, Metrics]:
    """Compute (loss, metrics): A2C's loss (Mnih et al. 2016, section 4) with PPO's clipped ratio in place of log pi."""
    obs, action, behaviour_logits, advantages, value_targets = samples
    with autocast(args.precision, net):
        logits, values = (output.float() for output in net(obs))
    log_probs, behaviour_log_probs = losses.log_prob(logits, action), losses.log_prob(behaviour_logits, action)
    policy_loss = losses.clipped_policy_loss(log_probs, behaviour_log_probs, advantages, args.clip_ratio)
    value_loss = losses.value_loss(values, value_targets)
    entropy_loss = losses.entropy_loss(logits)
    total = policy_loss + args.value_cost * value_loss + args.entropy_cost * entropy_loss
    metrics = {"losses/policy": policy_loss, "losses/value": value_loss, "losses/entropy": entropy_loss}
    metrics |= {"values/advantage": advantages, "values/baseline": values, "values/target": value_targets}
    return total, metrics | {"losses/total": total}


def learn(args: Args, memory: Memory, learner: Learner) -> Middleware:
    """Middleware: take gradient steps on the rollouts that were taken, and publish the weights."""
    run, _, net, optimizer = learner
    rollout_guard, grad_guard = FiniteGuard(run, "rollouts_not_finite"), FiniteGuard(run, "grads_not_finite")

    def _learn(ctx: Context) -> None:
        for worker, slot, version in ctx.filled:
            rollout, source = Rollout(**memory.slots[slot]), f"collector {worker}"
            optimizer.param_groups[0]["lr"] = linear(args.learning_rate, 0.0, run.steps, args.total_steps)
            run.record_rollout(
                rollout.num_steps, finished_episodes(rollout), worker, policy_lag=memory.weights.version - version
            )
            if rollout_guard.check(is_finite(rollout), source, f"rollout from {source}"):
                with run.timing("learning"):
                    take_gradient_steps(rollout.to(memory.weights.device), source)
        if ctx.filled:
            memory.weights.publish(net)
            run.end_round()
        ctx.finish = ctx.finish or run.should_stop()

    def take_gradient_steps(rollout: Rollout, source: str) -> None:
        if args.normalize_obs:
            update_norm(run, net.norm, obs_for_stats(rollout.obs, net.norm.image), source)
        samples = Samples.of(args, rollout)
        for indices in minibatches(len(samples.obs), args.batch_size, args.update_epochs, run.rng, rollout.obs.device):
            total, metrics = loss(args, net, samples.select(indices))
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
            if grad_guard.check(norm + total.detach(), "the learner", f"gradient {run.updates + 1}"):
                optimizer.step()
                run.record_update(metrics)

    return _learn


def evaluate(args: Args, evaluator: EvaluatorEnd | InlineEvaluator | None, node: Node) -> Middleware:
    """Middleware: play whole games with each snapshot of the weights that the learner hands out."""
    games = Games.of(args)

    def _evaluate(ctx: Context) -> None:
        if evaluator is not None and (net := evaluator.take()) is not None:
            evaluator.send(games.play(net, make_policy, node))
            node.close()  # each evaluation makes new environments, so that all of them play the same games

    return _evaluate


def pipeline(node: Node, args: Args, memory: Memory, learner: Learner | None = None) -> None:
    """Every node runs this; its labels select the middleware that it uses."""
    with Task(router=node, labels=node.labels, known_labels=node.known_labels, async_mode=args.async_mode) as task:
        task.use(collect(args, memory, channels_of(node, memory, learner)), filter_labels=["standalone", "collector"])
        if learner is not None:
            task.use_wrapper(
                StepTimer(args.print_per_step, log=learner.run.log.info, record=learner.run.record_metrics)
            )
            # One middleware after the other also in --async-mode, where they learn while collectors collect.
            task.use(task.serial(take(learner), learn(args, memory, learner)))
        task.use(evaluate(args, evaluator_of(node, args, learner), node), filter_labels=["standalone", "evaluator"])
        task.run()


def main() -> int:
    args = parse_args(Args, PRESETS, __doc__)
    check_roles(args)
    if args.attach_to is not None:
        return join_task(pipeline, args)
    spaces, device = check_env(args.env_id, Discrete), set_up_torch(args)
    net = make_actor_critic(*spaces).to(device)
    optimizer = actor_critic.make_optimizer(args, net)
    with Run(args, "task", net, optimizer) as run:
        memory = share_memory(args, run, net, spaces)
        with Cluster(pipeline, args, run, memory) as (node, actors):
            pipeline(node, args, memory, Learner(run, actors, net, optimizer))
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
