"""Roles of chapter 5: the nodes of a task that learn, collect and evaluate, here and on other machines."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from a3c_mp.algorithms.attach import join_task
from a3c_mp.algorithms.node_evaluator import Evaluator, EvaluatorChannel, InlineEvaluator, NodeEvaluator
from a3c_mp.algorithms.task_settings import RoleArgs, check_message_sizes, check_roles
from a3c_mp.data.actor import Fill, Memory
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.distributions import is_valid
from a3c_mp.processes.pool import NICENESS, WorkerPool
from a3c_mp.run.evaluate import NICENESS as EVALUATOR_NICENESS
from a3c_mp.run.learner import Learner, Processes, Setup
from a3c_mp.run.preflight import probe_env
from a3c_mp.run.run import Run
from a3c_mp.task.endpoint import is_tcp
from a3c_mp.task.exchange import NodeChannel, NodePool
from a3c_mp.task.node import Node
from a3c_mp.task.one_process import LocalChannel, LocalPool
from a3c_mp.task.parallel import Nodes, Role
from a3c_mp.task.wire import WireError


class Collector(NamedTuple):
    """A collector: its end of the connection to the learner, and what fills a slot."""

    channel: NodeChannel | LocalChannel
    fill: Fill


def run_task(
    args: RoleArgs, pipeline: Callable[..., None], make_actor: Callable[..., Fill], setup: Callable[..., Setup]
) -> int:
    """Run the nodes of a task, or join one that runs (`--attach-to`); returns the exit code.

    Args:
        args: of the chapter.
        pipeline: what every node runs, `pipeline(node, args, memory, learner)`.
        make_actor: the chapter's `actor(channel, args)`.
        setup: of the algorithm.

    Raises:
        ConfigError: settings contradict each other, or a rollout or the weights are too large for a message.
    """
    args = check_roles(args)
    if args.attach_to is not None:
        return join_task(pipeline, args)
    made = setup(args)
    check_message_sizes(args, made.net, made.slots.spec)
    with (  # a node, or a middleware, evaluates
        Run(args, args.chapter, made.net, made.optimizer, evaluates_elsewhere=True) as run,
        NodeGroup(pipeline, args, run, made, make_actor) as group,
    ):
        pipeline(group.node, args, group.learner.memory, group.learner)
    return run.exit_code


class NodeCarrier(Processes):
    """The carrier of a task: collectors are its nodes, or in a standalone task run in the learner's process."""

    def start(self, make_actor: Callable[..., Any], args: Any, memory: Memory, **pool: Any) -> WorkerPool:
        if args.standalone:
            return LocalPool(**pool)
        space = memory.states.layout.action_space

        def check(version: int, fields: Mapping[str, Tensor]) -> None:
            """Raise WireError for values that the learner cannot use; those that are not finite are skipped later."""
            if not 0 <= version <= memory.weights.version:
                raise WireError(f"there is no weights version {version}")
            if not is_valid(space, fields["action"]):
                raise WireError(f"actions are not of {space}")

        return NodePool(args.num_actors, memory.slots, memory.weights, check, **pool)


class NodeGroup:
    """The nodes of a run, seen from the learner; to be used in a `with` block.

    Args:
        pipeline: what every node runs, `pipeline(node, args, memory)`.
        args: of the chapter.
        run: of the learner.
        setup: of the algorithm.
        make_actor: the chapter's `actor(channel, args)`.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self, pipeline: Callable[..., None], args: RoleArgs, run: Run, setup: Setup, make_actor: Callable[..., Fill]
    ):
        self.run, self.args = run, args
        self.learner = Learner(args, run, setup, make_actor, carrier=NodeCarrier())
        self.evaluator: NodeEvaluator | InlineEvaluator = InlineEvaluator(args, run.is_interrupted)
        if not args.standalone:
            self.evaluator = NodeEvaluator(run, args.num_actors + 1, others=args.listen is not None)
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(args).items()}
        self.nodes = Nodes(
            pipeline, (args, self.learner.memory), self._roles(), args.listen, args.key_file,
            joining=("collector", "evaluator"), greeting={"args": settings, "run": secrets.token_hex(8)}, log=run.log,
            max_restarts=args.max_restarts, hang_seconds=args.hang_seconds, is_interrupted=run.is_interrupted,
        )  # fmt: skip

    def __enter__(self) -> NodeGroup:
        with ExitStack() as stack:
            stack.enter_context(self.learner)
            self.node = stack.enter_context(self.nodes)
            for end in (self.learner.pool, self.evaluator):
                if isinstance(end, NodePool | NodeEvaluator):
                    end.connect(self.node)
            self.run.evaluate_with(self.evaluator)
            if self.args.listen is not None:
                address, places = next(filter(is_tcp, self.node.router.addresses)), self.args.remote_actors
                self.run.log.info(f"listening at {address}, for at most {places} collectors")
            stack.push(lambda kind, error, trace: self.run.finish(error))  # while the evaluator can still answer
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def _roles(self) -> list[Role]:
        """Roles of the nodes of this machine: the learner, the collectors, the evaluator."""
        roles, pool, own = [Role("learner", ("learner",))], self.learner.pool, self.evaluator
        if isinstance(pool, NodePool):
            collector = partial(Role, labels=("collector",), flag="--num-actors", niceness=NICENESS, needs_result=True)
            for worker in range(self.args.num_actors):
                prepare, on_restart = partial(pool.prepare, worker), partial(pool.on_lost, worker)
                roles.append(collector(f"collector {worker}", prepare=prepare, on_restart=on_restart))
        if isinstance(own, NodeEvaluator) and self.args.eval_every:
            evaluator = partial(Role, "evaluator", ("evaluator",), "--eval-every", EVALUATOR_NICENESS, True)
            roles.append(evaluator(on_restart=own.on_restart, on_lost=own.on_lost))
        return roles


def collectors_of(
    node: Node, args: RoleArgs, memory: Memory, learner: Learner | None, make_actor: Callable[..., Fill]
) -> list[Collector]:
    """The collectors that run in this process: one in a node of its own, all of them in a standalone task."""
    channels: list[LocalChannel] | list[NodeChannel] = []
    if learner is not None:
        channels = learner.pool.channels if isinstance(learner.pool, LocalPool) else []
    elif "collector" in node.labels:
        channels = [NodeChannel(node, None if args.attach_to is None else memory)]
    collectors = []
    with torch.random.fork_rng(devices=[]):  # in a standalone task, a resume continues the learner's
        for channel in channels:
            channel.memory = memory
            collectors.append(Collector(channel, make_actor(channel, args)))
    return collectors


def evaluator_of(node: Node, args: RoleArgs, learner: Learner | None) -> Evaluator | None:
    """Where the evaluator of this process gets its weights; None if there is none."""
    if learner is not None:
        run: Any = learner.run
        evaluator = run.progress.evals.evaluator
        return evaluator if isinstance(evaluator, InlineEvaluator) else None
    if "evaluator" not in node.labels:
        return None
    return EvaluatorChannel(node, args, make_actor_critic(*probe_env(args.env_id), args.net_spec))
