"""Processes that join a task of chapter 5 from another machine: `--attach-to`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from a3c_mp.algorithms.actor_critic import rollout_layout, spec_of_rollouts
from a3c_mp.algorithms.task_settings import RoleArgs
from a3c_mp.data.actor import Memory, OneSlot
from a3c_mp.data.resume_states import ResumeStates
from a3c_mp.data.rollout import empty_rollout
from a3c_mp.errors import ConfigError, Stopped, WorkerError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import acting_dtype
from a3c_mp.processes.pool import NICENESS
from a3c_mp.processes.weights import Weights
from a3c_mp.run.display import open_log
from a3c_mp.run.evaluator import NICENESS as EVALUATOR_NICENESS
from a3c_mp.run.preflight import check_processes, check_system, probe_env
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.node import REPORT_REFUSAL, Node
from a3c_mp.task.parallel import JoinedNodes, Role
from a3c_mp.task.router import Router


def join_task(pipeline: Callable[..., None], args: RoleArgs) -> int:
    """Join the task at `args.attach_to` with processes that run `pipeline(node, settings, memory)`, until it ends.

    Returns:
        exit code: 0 where the task has ended, 1 where it was killed or its nodes here fail again and again.

    Raises:
        ConfigError: the address or the key is wrong, node 0 does not answer, or has no place for these nodes.
    """
    assert args.attach_to is not None
    check_system()
    log = open_log()
    roles = [Role("evaluator", ("evaluator",), "--role", EVALUATOR_NICENESS, on_restart=log.warning)]
    if args.role == "collector":
        check_processes(args.num_actors)
        roles = [Role("collector", ("collector",), "--num-actors", NICENESS, on_restart=log.warning)] * args.num_actors
    try:
        with Router(Endpoint(dials=args.attach_to, key_file=args.key_file), log) as router:
            theirs = settings_of(args, router.links.greeting)
            probe_env(theirs.env_id)
            what = f"{len(roles)} {args.role}{'s' * (len(roles) > 1)}"
            log.info(f"{what} for the task on {theirs.env_id} at {args.attach_to}")
            supervision = args.max_restarts, args.hang_seconds
            with JoinedNodes(run_node_of_task, (pipeline, theirs), roles, router, log, *supervision) as nodes:
                nodes.wait()
            log.info("the task has ended")
    except WorkerError as error:
        log.error(f"error: {error}")
        return 1
    except Stopped:
        log.info(f"left {args.attach_to}")
        raise
    return 0


def settings_of(args: RoleArgs, greeting: Mapping[str, Any]) -> RoleArgs:
    """The settings of the task that sends a greeting, for a node of this machine. Raises ConfigError."""
    try:
        theirs = type(args)(**greeting["args"])
    except (KeyError, TypeError) as error:
        why = f"the node there runs another program ({error})"
        raise ConfigError("attach-to", args.attach_to, why, "install the same version here") from error
    if args.role == "evaluator" and not theirs.eval_every:
        raise ConfigError("role", args.role, "the task there has no evaluations", "start it with --eval-every")
    return replace(theirs, attach_to=args.attach_to, role=args.role, key_file=args.key_file, listen=None, cuda=False)


def run_node_of_task(node: Node, pipeline: Callable[..., None], args: RoleArgs) -> None:
    """A node that has joined: run the pipeline, as a collector with memory of its own."""
    memory = None
    if args.role == "collector":
        spaces = probe_env(args.env_id)
        net = make_actor_critic(*spaces, args.net_spec)
        dtype = acting_dtype(args.precision, net)
        states = ResumeStates(args, rollout_layout(args, spaces[1]), start=0)
        fields = empty_rollout(spec_of_rollouts(args, *spaces)).fields()
        memory = Memory(OneSlot(fields), Weights(net, dtype), states, dtype, args.in_order)
    try:
        pipeline(node, args, memory)
    except ConfigError as error:
        node.report(REPORT_REFUSAL, error.what, str(error.value), error.why, error.fix)
