"""Processes that join a task of chapter 5 from another machine: `--attach-to`."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from a3c_mp.algorithms.actor_critic import spec_of_rollouts
from a3c_mp.algorithms.task_settings import RoleArgs
from a3c_mp.data.actor import Memory, OneSlot, SentStates
from a3c_mp.data.rollout import empty_rollout
from a3c_mp.errors import ConfigError, Stopped, WorkerError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import acting_dtype
from a3c_mp.processes.pool import NICENESS
from a3c_mp.processes.program import differences
from a3c_mp.processes.weights import Weights
from a3c_mp.run.display import open_log
from a3c_mp.run.evaluate import NICENESS as EVALUATOR_NICENESS
from a3c_mp.run.preflight import FOUND, check_processes, check_system, check_temporary_folder, probe_env
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.node import Node
from a3c_mp.task.parallel import Role, run_joined_nodes
from a3c_mp.task.router import Spoke


def join_task(pipeline: Callable[..., None], args: RoleArgs) -> int:
    """Join the task at `args.attach_to` with processes that run `pipeline(node, settings, memory)`, until it ends.

    Return the exit code: 0 where the task has ended, 1 where it was killed or its nodes here fail again and again.
    Raises ConfigError for a wrong address or key, and where node 0 does not answer or has no place.
    """
    assert args.attach_to is not None
    check_system()
    check_temporary_folder()
    log = open_log()
    is_collector = args.role == "collector"
    number = args.num_actors if is_collector else 1
    check_processes(number)
    how = ("--num-actors", NICENESS) if is_collector else ("--role", EVALUATOR_NICENESS)
    roles = [Role(args.role, (args.role,), *how, on_restart=log.warning)] * number
    try:
        with Spoke(Endpoint(dials=args.attach_to, key_file=args.key_file), log) as router:
            theirs = settings_of(args, router.greeting)
            net = make_actor_critic(*probe_env(theirs.env_id), theirs.net_spec)
            _, differs = differences(layout_of(theirs.env_id, net), router.greeting["layout"])
            if differs:
                router.report_unfit(f"it has {differs}")
            if router.differs:
                log.warning(f"this node has {router.differs}; as a rule that makes no difference")
            log.info(f"{number} {args.role}{'s' * (number > 1)} for the task on {theirs.env_id} at {args.attach_to}")
            limits = {"max_restarts": args.max_restarts, "hang_seconds": args.hang_seconds}
            run_joined_nodes(run_node_of_task, (pipeline, theirs), roles, router, log, **limits)
            log.info("the task has ended")
    except WorkerError as error:
        log.error(f"error: {error}")
        return 1
    except Stopped:
        log.info(f"left {args.attach_to}")
        raise
    return 0


def layout_of(env_id: str, net: nn.Module) -> dict[str, str]:
    """What an environment, which `probe_env` knows, and a net must have in common on all machines of a task."""
    obs_space: Any
    obs_space, action_space, parts = FOUND[env_id]
    shapes = [tuple(value.shape) for value in net.state_dict().values()]
    size = sum(map(math.prod, shapes))
    return {
        "observations": f"{obs_space.dtype} {list(obs_space.shape)} {parts or ''}".strip(),
        "actions": " ".join(str(action_space).split()),
        "a net": f"of {size:,} values ({zlib.crc32(str(shapes).encode()):08x})",
    }


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
        fields = empty_rollout(spec_of_rollouts(args, *spaces)).fields()
        states = SentStates(deterministic=False)  # such a task is refused with --listen
        memory = Memory(OneSlot(fields), Weights(net, dtype), states, dtype, args.in_order)
    try:
        pipeline(node, args, memory)
    except ConfigError as error:
        node.refuse(error)
