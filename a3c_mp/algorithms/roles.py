"""Roles of chapter 5: the nodes of a task that learn, collect and evaluate, here and on machines that join it."""

import math
import secrets
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from a3c_mp.algorithms.node_evaluator import FROM_EVALUATORS, EvaluatorChannel, InlineEvaluator, NodeEvaluator
from a3c_mp.algorithms.task_settings import RoleArgs, check_roles
from a3c_mp.data.actor import Fill, Memory, SentStates
from a3c_mp.data.rollout import empty_rollout, rollout_spec
from a3c_mp.errors import ConfigError, Stopped, WorkerError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.distributions import is_valid
from a3c_mp.nets.precision import acting_dtype
from a3c_mp.processes.pool import NICENESS
from a3c_mp.processes.program import differences
from a3c_mp.processes.weights import Weights
from a3c_mp.run.display import open_log
from a3c_mp.run.evaluate import NICENESS as EVALUATOR_NICENESS
from a3c_mp.run.learner import Learner, Processes, Setup
from a3c_mp.run.preflight import FOUND, check_processes, check_system, probe_env
from a3c_mp.run.run import Run
from a3c_mp.task.endpoint import Endpoint, is_tcp
from a3c_mp.task.exchange import FROM_COLLECTORS, LocalChannel, LocalPool, NodeChannel, NodePool
from a3c_mp.task.limits import STRANGERS
from a3c_mp.task.node import Node
from a3c_mp.task.parallel import Role, join_nodes, start_nodes
from a3c_mp.task.router import UNFIT, Spoke
from a3c_mp.task.wire import FINISH, MAX_TENSOR, MAX_TENSORS, STARTED, WireError


def run_task(
    args: RoleArgs, pipeline: Callable[..., None], make_actor: Callable[..., Fill], setup: Callable[..., Setup]
) -> int:
    """Run the nodes of a task, or join one that runs (`--attach-to`); return the exit code.

    Every node runs `pipeline(node, args, memory, learner)`; only node 0 has a learner. Raises ConfigError if settings
    contradict each other, or an address cannot be bound.
    """
    args = check_roles(args)
    if args.attach_to is not None:
        return join_task(pipeline, args)
    made = setup(args)
    check_message_sizes(args, made)
    with Run(args, args.chapter, made.net, made.optimizer, made.saved) as run, ExitStack() as stack:
        learner = Learner(args, run, made, make_actor, carrier=NodeCarrier(run.is_interrupted))
        evaluator: Any = InlineEvaluator(args, run.is_interrupted)
        if not args.standalone:
            evaluator = NodeEvaluator(run, args.num_actors + 1, others=args.listen is not None)
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(args).items()}
        nodes = start_nodes(
            roles_of(args, pipeline, learner, evaluator),
            limits={"max_restarts": args.max_restarts, "hang_seconds": args.hang_seconds},
            listen=args.listen, log=run.log, is_interrupted=run.is_interrupted, key_file=args.key_file,
            greeting={"args": settings, "run": secrets.token_hex(8), "layout": layout_of(args.env_id, made.net)},
            accepts=(*FROM_COLLECTORS, *FROM_EVALUATORS, FINISH, STARTED),
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
        try:
            pipeline(node, args, learner.memory, learner)
        except SystemExit as error:  # of what plays in this process: `Stopped` after a signal, or an environment's own
            if not isinstance(error, Stopped):
                raise WorkerError(f"an environment ended the process, with sys.exit({error.code!r})") from error
    return run.exit_code


def check_message_sizes(args: RoleArgs, made: Setup) -> None:
    """Raise ConfigError if a rollout or the net is too large for a message between nodes."""
    for name, (shape, dtype) in made.slots.spec.items() if args.listen is not None else ():
        if (size := math.prod(shape) * dtype.itemsize) > MAX_TENSOR:
            why = f"{name} of a rollout has {size:,} bytes, a message between nodes may have {MAX_TENSOR:,}"
            raise ConfigError("num-envs", args.num_envs, why, "lower it, or --unroll-length")
    sizes = [tensor.nbytes for tensor in made.net.state_dict().values()]
    if args.listen is not None and (size := sum(sizes)) > MAX_TENSOR:
        why = f"its weights have {size:,} bytes, a message between nodes may have {MAX_TENSOR:,}"
        raise ConfigError("net", args.net, why, "use a smaller one, smaller observations, or no --listen")
    if args.eval_every and not args.standalone and len(sizes) > MAX_TENSORS:
        why = f"it has {len(sizes):,} tensors, a message to the evaluator may have {MAX_TENSORS:,}"
        raise ConfigError("net", args.net, why, "use a smaller one, --standalone or --eval-every 0")
    if args.eval_every and not args.standalone and (size := max(sizes)) > MAX_TENSOR:
        why = f"one of its layers has {size:,} bytes, a message to the evaluator may have {MAX_TENSOR:,}"
        raise ConfigError("net", args.net, why, "use a smaller one, --frame-size 84, --standalone or --eval-every 0")


def roles_of(args: RoleArgs, pipeline: Callable[..., None], learner: Learner, evaluator: Any) -> list[Role]:
    """Return the roles of the nodes of this machine: the learner, its collectors, its evaluator.

    The evaluator gets no shared memory: with --cuda its process would open the GPU for weights and slots it never uses.
    """
    roles, pool = [Role("learner", ("learner",))], learner.pool
    if args.standalone:
        return roles
    for worker in range(args.num_actors):
        runs = pipeline, (args, learner.memory), "--num-actors", NICENESS
        prepare, on_restart = partial(pool.prepare, worker), partial(pool.on_lost, worker)
        roles.append(Role(f"collector {worker}", ("collector",), *runs, prepare=prepare, on_restart=on_restart))
    if args.eval_every:
        calls = {"on_restart": evaluator.run.progress.evals.record_restart, "on_lost": evaluator.on_lost}
        roles.append(
            Role("evaluator", ("evaluator",), pipeline, (args, None), "--eval-every", EVALUATOR_NICENESS, **calls)
        )
    return roles


class NodeCarrier(Processes):
    """The carrier of a task: collectors are its nodes, or in a standalone task run in the learner's process."""

    def __init__(self, is_interrupted: Callable[[], bool]):
        self.is_interrupted = is_interrupted

    def start(self, make_actor: Callable[..., Any], args: Any, memory: Memory, **pool: Any) -> Any:
        if args.standalone:
            return LocalPool(is_interrupted=self.is_interrupted, **pool)
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
    channels: list[Any] = learner.pool.channels if learner is not None and args.standalone else []
    if "collector" in node.labels:
        channels = [NodeChannel(node, None if args.attach_to is None else memory)]
    with torch.random.fork_rng(devices=[]):  # in a standalone task, a resume continues the learner's
        for channel in channels:
            channel.memory = memory
        return [(channel, make_actor(channel, args)) for channel in channels]


def evaluator_of(node: Node, args: RoleArgs, learner: Any) -> EvaluatorChannel | InlineEvaluator | None:
    """The evaluator of this process, or None."""
    if learner is not None:
        return learner.run.progress.evals.evaluator if args.standalone else None
    if "evaluator" not in node.labels:
        return None
    return EvaluatorChannel(node, args, make_actor_critic(*probe_env(args.env_id, heartbeats=node), args.net_spec))


# ---- nodes that join from another machine: `--attach-to`


def join_task(pipeline: Callable[..., None], args: RoleArgs) -> int:
    """Join the task at `args.attach_to` with processes that run `pipeline(node, settings, memory)`, until it ends.

    Return the exit code: 0 where the task has ended, 1 where it was killed or its nodes here fail again and again.
    Raises ConfigError for a wrong address or key, and where node 0 does not answer or has no place.
    """
    assert args.attach_to is not None
    check_system()
    log = open_log()
    is_collector = args.role == "collector"
    number = args.num_actors if is_collector else 1
    check_processes(number)
    how = ("--num-actors", NICENESS) if is_collector else ("--role", EVALUATOR_NICENESS)
    try:
        with Spoke(Endpoint(dials=args.attach_to, key_file=args.key_file), log) as router:
            theirs = settings_of(args, router.greeting)
            net = make_actor_critic(*probe_env(theirs.env_id), theirs.net_spec)
            _, differs = differences(layout_of(theirs.env_id, net), router.greeting["layout"])
            if differs:
                router.send(UNFIT, f"it has {differs}")
                why, fix = f"this node is refused: it has {differs}", "install the same versions"
                raise ConfigError("attach-to", args.attach_to, why, fix)
            if router.differs:
                log.warning(f"this node has {router.differs}; as a rule that makes no difference")
            log.info(f"{number} {args.role}{'s' * (number > 1)} for the task on {theirs.env_id} at {args.attach_to}")
            limits = {"max_restarts": args.max_restarts, "hang_seconds": args.hang_seconds}
            role = Role(args.role, (args.role,), run_node_of_task, (pipeline, theirs), *how, on_restart=log.warning)
            with join_nodes([role] * number, router, limits, log):
                pass  # this process only looks after them
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
        spaces = probe_env(args.env_id, heartbeats=node)
        net = make_actor_critic(*spaces, args.net_spec)
        dtype = acting_dtype(args.precision, net)
        spec = rollout_spec(args.unroll_length, args.num_envs, *spaces, extra=args.rollout_fields)
        fields = empty_rollout(spec).fields()
        states = SentStates(deterministic=False)  # such a task is refused with --listen
        slots = defaultdict[int, Any](lambda: fields)  # one stands for all of the learner's
        memory = Memory(slots, Weights(net, dtype), states, dtype, args.in_order)
    try:
        pipeline(node, args, memory)
    except ConfigError as error:
        node.refuse(error)
