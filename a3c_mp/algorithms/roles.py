"""Roles of chapter 5: its settings, the nodes that it starts, and nodes that join it from other machines."""

from __future__ import annotations

import dataclasses
import math
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Protocol, TypeVar

import gymnasium
import torch
from torch import Tensor, nn

from a3c_mp.algorithms import actor_critic
from a3c_mp.algorithms.actor_critic import rollout_layout
from a3c_mp.algorithms.actor_critic_settings import PPOArgs
from a3c_mp.algorithms.node_evaluator import Evaluator, EvaluatorChannel, InlineEvaluator, NodeEvaluator
from a3c_mp.config import Between
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.games import make_envs
from a3c_mp.data.resume_states import ResumeStates
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.distributions import is_valid
from a3c_mp.nets.precision import acting_dtype
from a3c_mp.processes.channel import NICENESS
from a3c_mp.processes.slots import Slots, Spec
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import WorkerPool
from a3c_mp.run.actors import Actors
from a3c_mp.run.evaluator import NICENESS as EVALUATOR_NICENESS
from a3c_mp.run.evaluator import EvaluationGames
from a3c_mp.run.preflight import probe_env
from a3c_mp.run.run import Run
from a3c_mp.task.endpoint import Endpoint, check_tcp, is_tcp, node_name
from a3c_mp.task.exchange import CollectorChannel, NodeChannel, NodePool
from a3c_mp.task.node import Node
from a3c_mp.task.one_process import LocalChannel, LocalPool
from a3c_mp.task.parallel import Callbacks, Network, Nodes, Role, Supervision
from a3c_mp.task.remote import RemoteChannel, RemoteWeights, serve_weights
from a3c_mp.task.wire import MAX_TENSOR, WireError


@dataclass(frozen=True)
class RoleArgs(PPOArgs):
    """Settings of the nodes of chapter 5."""

    chapter = "task"
    actor_name = "collector"

    num_actors: Annotated[int, Between(0, 1024)] = 2
    """collectors on this machine, also with --attach-to; 0 with --listen: all of them join"""
    eval_every: Annotated[int, Between(0)] = 100_000
    """evaluation interval (agent steps): greedy games, by a remote evaluator if one has joined; 0: no evaluation"""
    standalone: bool = False
    """run all middleware in one process"""
    async_mode: bool = False
    """with --standalone: run the middleware of an iteration in threads, at the same time; at least 2 slots-per-actor"""
    print_per_step: Annotated[int, Between(0)] = 0
    """print the time of each middleware every N iterations; 0: never"""
    transport: Literal["ipc", "tcp"] = "ipc"
    """messages between the nodes of this machine: Unix sockets, or TCP on loopback with --key-file"""
    listen: str | None = None
    """address tcp://HOST:PORT at which nodes of other machines may join; needs --key-file"""
    remote_actors: Annotated[int, Between(0, 1024)] = 4
    """most collectors that may join at a time with --listen, besides num-actors"""
    attach_to: str | None = None
    """join the task that listens at this address, with its settings; needs --key-file and --role"""
    role: Literal["learner", "collector", "evaluator"] = "learner"
    """with --attach-to: join as num-actors collectors, or as an evaluator"""
    key_file: Path | None = None
    """secret key of a task on TCP; made at the first --listen, copy it to the other machines"""

    @property
    def max_actors(self) -> int:
        return self.num_actors + (self.remote_actors if self.listen is not None else 0)


class Memory(Protocol):
    """What the middleware of a node works on: `SharedMemory`, or `attach.OwnMemory` on another machine."""

    @property
    def slots(self) -> Slots: ...
    @property
    def weights(self) -> Weights | RemoteWeights: ...
    @property
    def states(self) -> ResumeStates: ...


class SharedMemory(NamedTuple):
    """What the learner and the collectors of its machine share."""

    slots: Slots
    weights: Weights
    states: ResumeStates


class Learner(NamedTuple):
    """What the learner's process has, and no other."""

    run: Run
    actors: Actors
    net: ActorCritic
    optimizer: torch.optim.Optimizer


class Collector(NamedTuple):
    """A collector with its end of the connection to the learner, and the net that it acts with."""

    channel: CollectorChannel
    net: ActorCritic
    collector: RolloutCollector


R = TypeVar("R", bound=RoleArgs)


def check_roles(args: R) -> R:
    """Return the settings with those that follow from the roles.

    Raises:
        ConfigError: settings contradict each other, or an address or a key is invalid.
    """
    if args.attach_to is not None and args.role == "learner":
        raise ConfigError("role", args.role, "the task to join has its learner", "--role collector, or evaluator")
    if args.attach_to is None and args.role != "learner":
        raise ConfigError("role", args.role, "the task would have no learner", "add --attach-to, or leave --role out")
    for flag, address in (("listen", args.listen), ("attach-to", args.attach_to)):
        if address is not None and args.standalone:
            raise ConfigError(flag, address, "a standalone task is one process", "leave --standalone out")
    if args.listen is not None and args.attach_to is not None:
        raise ConfigError("attach-to", args.attach_to, "a node that joins does not listen", "leave --listen out")
    if args.num_actors == 0 and (args.listen is None or args.remote_actors == 0) and args.role != "evaluator":
        raise ConfigError("num-actors", 0, "there would be no collector", "use 1 or more, or --listen for others")
    if args.transport == "tcp" and args.standalone:
        raise ConfigError("transport", "tcp", "a standalone task is one process", "leave --standalone out")
    if args.resume is None and args.listen is None:  # a resumed run may have listened before
        if args.key_file is not None and args.transport != "tcp" and args.attach_to is None:
            fix = "leave it out" if args.standalone else "add --listen or --attach-to, or leave it out"
            raise ConfigError("key-file", args.key_file, "nothing is on TCP", fix)
        if args.remote_actors != RoleArgs.remote_actors:
            raise ConfigError("remote-actors", args.remote_actors, "no node can join", "add --listen, or leave it out")
    if args.async_mode and not args.standalone:
        raise ConfigError("async-mode", True, "nodes run beside each other anyway", "add --standalone")
    if args.deterministic and args.async_mode:
        raise ConfigError("async-mode", True, "threads have no fixed order", "leave --deterministic out")
    if args.deterministic and args.listen is not None:
        raise ConfigError("listen", args.listen, "who joins, and when, has no fixed order", "leave --deterministic out")
    if args.transport == "tcp" and args.key_file is None:
        raise ConfigError("transport", "tcp", "TCP needs a key", "add --key-file FILE")
    if args.transport == "tcp":
        Endpoint(0, "star", binds=("tcp://127.0.0.1:0",), key_file=args.key_file).load_key()
    if args.listen is not None:
        Endpoint(0, "star", binds=(args.listen,), key_file=args.key_file).load_key()
        _check_bind(args.listen)
    if args.attach_to is not None:
        Endpoint(None, "star", dials=(args.attach_to,), key_file=args.key_file).load_key()
    # Collectors fill one slot while the learner has the other.
    return dataclasses.replace(args, slots_per_actor=max(args.slots_per_actor, 2)) if args.async_mode else args


def _check_bind(address: str) -> None:
    """Raise ConfigError if an address cannot be bound, before anything is started."""
    host, port = check_tcp("listen", address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.removeprefix("*"), port), family=family).close()
    except OSError as error:
        why, fix = str(error.strerror).partition(" (")[0], "choose another port, or an address of this machine"
        raise ConfigError("listen", address, f"cannot be bound ({why})", fix) from error


def allocate(args: RoleArgs, net: nn.Module, spec: Spec) -> Slots:
    """Allocate the slots of all collectors.

    Args:
        args: of the chapter.
        net: of the learner.
        spec: of a rollout.

    Raises:
        ConfigError: as of `actor_critic.allocate`; or a rollout or the weights are too large for a message.
    """
    _check_message_sizes(args, net, spec)
    return actor_critic.allocate(args, spec)


def _check_message_sizes(args: RoleArgs, net: nn.Module, spec: Spec) -> None:
    """Rollouts and weights are sent to and from other machines only, snapshots for the evaluator to any node."""
    sizes: list[tuple[str, str, int]] = []  # setting, what it makes large, bytes
    if args.listen is not None:
        fields = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in spec.items()}
        sizes += [("num-envs", f"field {name} of a rollout", size) for name, size in fields.items()]
        num_values = sum(tensor.numel() for tensor in net.state_dict().values())
        sizes.append(("env-id", "the weights", num_values * acting_dtype(args.precision, net).itemsize))
    if args.eval_every and not args.standalone:
        sizes += [("env-id", f"the weight {name}", value.nbytes) for name, value in net.state_dict().items()]
    fixes = {"num-envs": "lower it or --unroll-length", "env-id": "choose another, or use --standalone"}
    for setting, what, size in sizes:
        if size > MAX_TENSOR:
            why = f"{what} would have {size:,} bytes, a message between nodes can have {MAX_TENSOR:,}"
            raise ConfigError(setting, getattr(args, setting.replace("-", "_")), why, fixes[setting])


def make_run(args: RoleArgs, net: ActorCritic, optimizer: torch.optim.Optimizer) -> Run:
    """Make the run, whose evaluator is a node or a middleware of the task."""
    return Run(args, args.chapter, net, optimizer, evaluates_elsewhere=True)


def _share_memory(args: RoleArgs, run: Run, slots: Slots, action_space: gymnasium.Space) -> SharedMemory:
    """Make what the learner shares with its collectors."""
    weights = Weights(run.net, acting_dtype(args.precision, run.net))
    states = ResumeStates(args, rollout_layout(args, action_space), start=run.steps)
    run.keep(actors=states, weights=weights)
    return SharedMemory(slots, weights, states)


def _roles_of(args: RoleArgs) -> list[Role]:
    """Roles of the nodes of this machine: the learner, the collectors, the evaluator."""
    roles = [Role("learner", ("learner",))]
    if not args.standalone:
        collector = partial(Role, labels=("collector",), flag="--num-actors", niceness=NICENESS, needs_result=True)
        roles += [collector(f"collector {number}") for number in range(args.num_actors)]
        if args.eval_every:
            roles.append(Role("evaluator", ("evaluator",), "--eval-every", EVALUATOR_NICENESS, needs_result=True))
    return roles


def _network_of(args: RoleArgs, run: Run) -> Network:
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(args).items()}
    return Network(
        "star", args.transport, args.listen, args.key_file, joining=("collector", "evaluator"),
        greeting={"args": settings, "run": secrets.token_hex(8)}, log=run.log,
    )  # fmt: skip


class NodeGroup:
    """The nodes of a run, seen from the learner; to be used in a `with` block.

    Args:
        pipeline: what every node runs, `pipeline(node, args, memory)`.
        args: of the chapter.
        run: of the learner.
        slots: for rollouts, shared.
        action_space: of the environment.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self, pipeline: Callable[..., None], args: RoleArgs, run: Run, slots: Slots, action_space: gymnasium.Space
    ):
        memory = _share_memory(args, run, slots, action_space)
        self.run, self.args, self.memory, self.action_space = run, args, memory, action_space
        roles, callbacks = _roles_of(args), dict[int, Callbacks]()
        if roles[-1].name == "evaluator":
            callbacks[len(roles) - 1] = Callbacks(
                on_restart=self._on_evaluator_restart, on_lost=self._on_evaluator_lost
            )
        supervision = Supervision(
            args.max_restarts, args.hang_seconds, is_interrupted=run.is_interrupted, callbacks=callbacks
        )
        self.nodes = Nodes(pipeline, (args, memory), roles, _network_of(args, run), supervision)
        self._evaluator_error: WorkerError | None = None
        start: Callable[..., WorkerPool] = LocalPool
        if not args.standalone:
            start = partial(NodePool, callbacks, range(1, args.num_actors + 1), memory.slots)
        self.actors = Actors(start, memory.weights, memory.states, run)

    def __enter__(self) -> NodeGroup:
        self.node = self.nodes.__enter__()
        if isinstance(self.actors.workers, NodePool):
            self.actors.workers.check = self._check_rollout
            self.actors.workers.connect(self.node)
            serve_weights(self.node, self.actors.weights)
            own = node_name(self.args.num_actors + 1)
            others, error = self.args.listen is not None, lambda: self._evaluator_error
            self.run.evaluate_with(NodeEvaluator(self.node, own, self.run, error, others))
        else:
            self.run.evaluate_with(InlineEvaluator(self.node, EvaluationGames.of(self.args), self.run.is_interrupted))
        if self.args.listen is not None:
            address, places = next(filter(is_tcp, self.node.router.addresses)), self.args.remote_actors
            self.run.log.info(f"listening at {address}, for at most {places} collectors")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with ExitStack() as cleanup:
            cleanup.push(self.actors)
            cleanup.push(self.nodes)
            self.run.finish(error)  # while the evaluator can still answer

    def _check_rollout(self, version: int, fields: Mapping[str, Tensor]) -> None:
        """Raise WireError for values that the learner cannot use; those that are not finite are skipped later."""
        if not 0 <= version <= self.actors.weights.version:
            raise WireError(f"there is no weights version {version}")
        if not is_valid(self.action_space, fields["action"]):
            raise WireError(f"actions are not of {self.action_space}")

    def _on_evaluator_restart(self, text: str) -> None:
        self.run.progress.evals.restarts += 1
        self.run.log.warning(text)

    def _on_evaluator_lost(self, error: WorkerError) -> None:
        self._evaluator_error = error


def collectors_of(node: Node, args: RoleArgs, memory: Memory, learner: Learner | None) -> list[Collector]:
    """The collectors that run in this process: one in a node of its own, all of them in a standalone task."""
    channels: list[LocalChannel] | list[NodeChannel] = []
    if learner is not None:
        workers = learner.actors.workers
        channels = workers.channels if isinstance(workers, LocalPool) else []
    elif "collector" in node.labels:
        channels = [NodeChannel(node, node.setup) if node.setup is not None else RemoteChannel(node, memory.slots)]
    return [_make_collector(args, memory, channel) for channel in channels]


def _make_collector(args: RoleArgs, memory: Memory, channel: CollectorChannel) -> Collector:
    env = make_envs(args, channel)
    spaces = env.single_observation_space, env.single_action_space
    with torch.random.fork_rng(devices=[]):  # in a standalone task, a resume continues the learner's
        net = make_actor_critic(*spaces, args.net_spec).to(memory.weights.buffers)
    return Collector(channel, net, RolloutCollector(args, env, net, channel))


def evaluator_of(node: Node, args: RoleArgs, learner: Learner | None) -> Evaluator | None:
    """Where the evaluator of this process gets its weights; None if there is none."""
    if learner is not None:
        evaluator = learner.run.progress.evals.evaluator
        return evaluator if isinstance(evaluator, InlineEvaluator) else None
    return EvaluatorChannel(node, EvaluationGames.of(args), make_net(args)) if "evaluator" in node.labels else None


def make_net(args: RoleArgs) -> ActorCritic:
    return make_actor_critic(*probe_env(args.env_id), args.net_spec)
