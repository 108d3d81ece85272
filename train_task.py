"""Chapter 5. A3C as a task: a pipeline of middleware, which runs in one process or is cut into roles.

Each iteration passes one context through all middleware, and back in reverse order. Standalone, one process runs all
of them; distributed, each node runs those that its labels select, and messages connect the nodes. What a collector
does and how the learner learns is chapter 1's.

    collector 0 --(slot)--> \\
    collector 1 --(slot)-->  learner --(weights)--> evaluator
"""

import a3c_mp  # noqa: F401  # isort: skip  (first: it prepares the process before torch is imported)

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from a3c_mp.algorithms.actor_critic import A3CSetup, rollouts
from a3c_mp.algorithms.actor_critic_settings import PPO_PRESETS
from a3c_mp.algorithms.roles import collectors_of, evaluator_of, run_task
from a3c_mp.algorithms.task_settings import RoleArgs
from a3c_mp.cli import parse_args
from a3c_mp.run.learner import Learner
from a3c_mp.run.script import exit_with
from a3c_mp.task.middleware import Context, Middleware, StepTimer
from a3c_mp.task.node import Node
from a3c_mp.task.task import Task
from train_a3c_data import actor
from train_a3c_data import learn as learn_from


@dataclass(frozen=True)
class Args(RoleArgs):
    """Settings of chapter 5."""


PRESETS = {name: {"eval_every": 20_000 if "CartPole" in name else 100_000} | p for name, p in PPO_PRESETS.items()}


def collect(collectors: list[Any]) -> Middleware:
    """Middleware: fill a slot with a rollout, for each collector of this process."""

    def _collect(ctx: Context) -> None:
        for channel, fill in collectors:
            if (token := channel.take()) is not None:
                channel.send(token.slot, fill(token))

    return _collect


def take(learner: Learner) -> Middleware:
    """Middleware: take filled slots, and give them back on the way back."""

    def _take(ctx: Context) -> Iterator[None]:
        ctx.filled = learner.take()
        yield
        learner.release(ctx.filled)

    return _take


def learn(args: Args, learner: Learner) -> Middleware:
    """Middleware: take gradient steps on the rollouts that were taken, and publish the weights."""

    def _learn(ctx: Context) -> None:
        for rollout in rollouts(learner, ctx.filled):
            learn_from(args, learner, rollout)
        if ctx.filled:
            learner.end_round()
        ctx.finish = ctx.finish or learner.run.should_stop()

    return _learn


def evaluate(evaluator: Any) -> Middleware:
    """Middleware: play whole games with each snapshot of the weights that the learner hands out."""

    def _evaluate(ctx: Context) -> None:
        if (net := evaluator.take()) is not None:
            evaluator.play(net)  # and send the learner their returns

    return _evaluate


def pipeline(node: Node, args: Args, memory: Any, learner: Learner | None = None) -> None:
    """Run the task of one node: its labels, and whether it is the learner, select the middleware that it uses."""
    with Task(router=node, async_mode=args.async_mode) as task:
        if collectors := collectors_of(node, args, memory, learner, actor):
            task.use(collect(collectors), filter_labels=["standalone", "collector"])
        if learner is not None:
            run = learner.run
            task.use_wrapper(StepTimer(args.print_per_step, run.log.info, run.record_metrics))
            task.use(task.serial(take(learner), learn(args, learner)), name="learner")
        if evaluator := evaluator_of(node, args, learner):
            task.use(evaluate(evaluator), filter_labels=["standalone", "evaluator"])
        task.run()


def main() -> int:
    return run_task(parse_args(Args, PRESETS, __doc__), pipeline, actor, A3CSetup)


if __name__ == "__main__":
    exit_with(main)
