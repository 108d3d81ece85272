"""Roles of chapter 5: the nodes of a task that learn, collect and evaluate, here and on other machines."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from a3c_mp.algorithms.attach import join_task, layout_of
from a3c_mp.algorithms.node_evaluator import FROM_EVALUATORS, EvaluatorChannel, InlineEvaluator, NodeEvaluator
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
from a3c_mp.task.exchange import FROM_COLLECTORS, LocalChannel, LocalPool, NodeChannel, NodePool
from a3c_mp.task.limits import STRANGERS
from a3c_mp.task.node import Node
from a3c_mp.task.parallel import Role, start_nodes
from a3c_mp.task.wire import FINISH, WireError


def run_task(
    args: RoleArgs, pipeline: Callable[..., None], make_actor: Callable[..., Fill], setup: Callable[..., Setup]
) -> int:
    """Run the nodes of a task, or join one that runs (`--attach-to`); return the exit code.

    Every node runs `pipeline(node, args, memory, learner)`; only node 0 has a learner.

    Raises:
        ConfigError: settings contradict each other, an address cannot be bound, or a message would be too large.
    """
    args = check_roles(args)
    if args.attach_to is not None:
        return join_task(pipeline, args)
    made = setup(args)
    check_message_sizes(args, made.net, made.slots.spec)
    parts = made.net, made.optimizer, made.saved
    with Run(args, args.chapter, *parts) as run, ExitStack() as stack:
        learner = Learner(args, run, made, make_actor, carrier=NodeCarrier())
        evaluator: Any
        if args.standalone:
            evaluator = InlineEvaluator(args, run.is_interrupted)
        else:
            evaluator = NodeEvaluator(run, args.num_actors + 1, others=args.listen is not None)
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(args).items()}
        layout = layout_of(args.env_id, made.net)
        nodes = start_nodes(
            pipeline, (args,), roles_of(args, learner, evaluator),
            limits={"max_restarts": args.max_restarts, "hang_seconds": args.hang_seconds},
            listen=args.listen, log=run.log, is_interrupted=run.is_interrupted,
            joining=("collector", "evaluator"), key_file=args.key_file,
            greeting={"args": settings, "run": secrets.token_hex(8), "layout": layout},
            accepts=(*FROM_COLLECTORS, *FROM_EVALUATORS, FINISH),
            max_connections=STRANGERS + 2 * args.remote_actors + 16,  # as many machines as collectors, and evaluators
        )  # fmt: skip
        stack.enter_context(learner)
        node = stack.enter_context(nodes)
        if not args.standalone:
            learner.pool.connect(node)
            evaluator.connect(node)
        run.progress.evals.evaluator = evaluator if args.eval_every else None
        if args.listen is not None:
            address = next(filter(is_tcp, node.router.addresses))
            run.log.info(f"listening at {address}, for at most {args.remote_actors} collectors")
        stack.push(lambda kind, error, trace: run.finish(error))  # while the evaluator can still answer
        pipeline(node, args, learner.memory, learner)
    return run.exit_code


def roles_of(args: RoleArgs, learner: Learner, evaluator: Any) -> list[Role]:
    """Return the roles of the nodes of this machine: the learner, its collectors, its evaluator.

    The evaluator gets no shared memory: with --cuda its process would open the GPU for weights and slots it never uses.
    """
    roles = [Role("learner", ("learner",))]
    if args.standalone:
        return roles
    pool = learner.pool
    for worker in range(args.num_actors):
        settings: dict[str, Any] = {"prepare": partial(pool.prepare, worker), "args": (learner.memory,)}
        settings["on_restart"] = partial(pool.on_lost, worker)
        roles.append(Role(f"collector {worker}", ("collector",), "--num-actors", NICENESS, True, **settings))
    if args.eval_every:
        settings = {"on_restart": evaluator.on_restart, "on_lost": evaluator.on_lost, "args": (None,)}
        roles.append(Role("evaluator", ("evaluator",), "--eval-every", EVALUATOR_NICENESS, True, **settings))
    return roles


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


def collectors_of(
    node: Node, args: RoleArgs, memory: Memory, learner: Learner | None, make_actor: Callable[..., Fill]
) -> list[tuple[NodeChannel | LocalChannel, Fill]]:
    """The collectors that run in this process, each with what fills a slot: one in a node, all in a standalone task."""
    channels: list[Any] = []
    if learner is not None:
        channels = learner.pool.channels if args.standalone else []
    elif "collector" in node.labels:
        channels = [NodeChannel(node, None if args.attach_to is None else memory)]
    collectors = []
    with torch.random.fork_rng(devices=[]):  # in a standalone task, a resume continues the learner's
        for channel in channels:
            channel.memory = memory
            collectors.append((channel, make_actor(channel, args)))
    return collectors


def evaluator_of(node: Node, args: RoleArgs, learner: Any) -> EvaluatorChannel | InlineEvaluator | None:
    """The evaluator of this process, or None."""
    if learner is not None:
        return learner.run.progress.evals.evaluator if args.standalone else None
    if "evaluator" not in node.labels:
        return None
    return EvaluatorChannel(node, args, make_actor_critic(*probe_env(args.env_id), args.net_spec))
