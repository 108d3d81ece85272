"""Roles of chapter 5: its settings, the nodes that it starts, and nodes that join it from other machines."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

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
from a3c_mp.errors import ConfigError
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
from a3c_mp.run.preflight import allow_open_files, probe_env
from a3c_mp.run.run import Run
from a3c_mp.task.endpoint import Endpoint, is_tcp
from a3c_mp.task.exchange import NodeChannel, NodePool
from a3c_mp.task.node import Node
from a3c_mp.task.one_process import LocalChannel, LocalPool
from a3c_mp.task.parallel import Nodes, Role
from a3c_mp.task.router import Router
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

    @property
    def gpu_actors(self) -> int:
        return 0 if self.standalone else super().gpu_actors


class Memory(NamedTuple):
    """What the middleware of a node works on: shared with the learner, or of another machine's own."""

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

    channel: NodeChannel | LocalChannel
    net: ActorCritic
    collector: RolloutCollector


R = TypeVar("R", bound=RoleArgs)


def check_roles(args: R) -> R:
    """Return the settings with those that follow from the roles.

    Raises:
        ConfigError: settings contradict each other, or an address or a key is invalid.
    """
    listens, attaches = args.listen is not None, args.attach_to is not None

    def refuse(flag: str, why: str, fix: str) -> NoReturn:
        raise ConfigError(flag, getattr(args, flag.replace("-", "_")), why, fix)

    if attaches and args.role == "learner":
        refuse("role", "the task to join has its learner", "--role collector, or evaluator")
    if not attaches and args.role != "learner":
        refuse("role", "the task would have no learner", "add --attach-to, or leave --role out")
    if args.standalone and (listens or attaches):
        refuse("listen" if listens else "attach-to", "a standalone task is one process", "leave --standalone out")
    if listens and attaches:
        refuse("attach-to", "a node that joins does not listen", "leave --listen out")
    if args.num_actors == 0 and not (listens and args.remote_actors) and args.role != "evaluator":
        refuse("num-actors", "there would be no collector", "use 1 or more, or --listen for others")
    if args.resume is None and not listens:  # a resumed run may have listened before
        if args.key_file is not None and not attaches:
            refuse("key-file", "nothing is on TCP", "add --listen or --attach-to, or leave it out")
        if args.remote_actors != RoleArgs.remote_actors:
            refuse("remote-actors", "no node can join", "add --listen, or leave it out")
    if args.async_mode and not args.standalone:
        refuse("async-mode", "nodes run beside each other anyway", "add --standalone")
    if args.deterministic and args.async_mode:
        refuse("async-mode", "threads have no fixed order", "leave --deterministic out")
    if args.deterministic and listens:
        refuse("listen", "who joins, and when, has no fixed order", "leave --deterministic out")
    if args.listen is not None:
        with Router(Endpoint(binds=(args.listen,), key_file=args.key_file)):
            pass  # before anything else is started: it can be bound
    if args.attach_to is not None:
        Endpoint(dials=args.attach_to, key_file=args.key_file).load_key()
    # Collectors fill one slot while the learner has the other.
    return dataclasses.replace(args, slots_per_actor=max(args.slots_per_actor, 2)) if args.async_mode else args


def allocate(args: RoleArgs, net: nn.Module, spec: Spec) -> Slots:
    """Allocate the slots of all collectors, for rollouts of fields `spec`.

    Raises:
        ConfigError: as of `actor_critic.allocate`; or a rollout or the weights are too large for a message.
    """
    fields = {f"field {name} of a rollout": math.prod(shape) * dtype.itemsize for name, (shape, dtype) in spec.items()}
    weights = {f"the weight {name}": value.nbytes for name, value in net.state_dict().items()}
    rollouts_fix, weights_fix = "lower it or --unroll-length", "choose another, or use --standalone"
    if args.listen is not None:  # rollouts and all weights in one piece are sent to and from other machines only
        _check_sizes("num-envs", args.num_envs, fields, rollouts_fix)
        _check_sizes("env-id", args.env_id, {"the weights": sum(weights.values())}, weights_fix)
    if args.eval_every and not args.standalone:  # snapshots for the evaluator, to any node
        _check_sizes("env-id", args.env_id, weights, weights_fix)
    return actor_critic.allocate(args, spec)


def _check_sizes(setting: str, value: object, sizes: Mapping[str, int], fix: str) -> None:
    for what, size in sizes.items():
        if size > MAX_TENSOR:
            why = f"{what} would have {size:,} bytes, a message between nodes can have {MAX_TENSOR:,}"
            raise ConfigError(setting, value, why, fix)


def make_run(args: RoleArgs, net: ActorCritic, optimizer: torch.optim.Optimizer) -> Run:
    """Make the run, whose evaluator is a node or a middleware of the task."""
    return Run(args, args.chapter, net, optimizer, make_policy=None)


class NodeGroup:
    """The nodes of a run, which run `pipeline(node, args, memory)`, seen from the learner; used in a `with` block."""

    def __init__(
        self, pipeline: Callable[..., None], args: RoleArgs, run: Run, slots: Slots, action_space: gymnasium.Space
    ):
        if args.listen is not None:
            allow_open_files()
        self.run, self.args, self.action_space = run, args, action_space
        self.weights = Weights(run.state.net, acting_dtype(args.precision, run.state.net))
        states = ResumeStates(args, rollout_layout(args, action_space), start=run.steps)
        run.keep(actors=states, weights=self.weights)
        self.memory = Memory(slots, self.weights, states)
        start: Callable[..., WorkerPool] = LocalPool
        self.evaluator: NodeEvaluator | InlineEvaluator = InlineEvaluator(EvaluationGames.of(args), run.is_interrupted)
        if not args.standalone:
            start = partial(NodePool, args.num_actors, slots, self.weights, self._check_rollout)
            self.evaluator = NodeEvaluator(run, args.num_actors + 1, others=args.listen is not None)
        self.actors = Actors(start, self.weights, states, run)
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(args).items()}
        self.nodes = Nodes(
            pipeline, (args, self.memory), self._roles(), args.listen, args.key_file,
            joining=("collector", "evaluator"), greeting={"args": settings, "run": secrets.token_hex(8)}, log=run.log,
            max_restarts=args.max_restarts, hang_seconds=args.hang_seconds, is_interrupted=run.is_interrupted,
        )  # fmt: skip

    def __enter__(self) -> NodeGroup:
        with ExitStack() as stack:
            stack.enter_context(self.actors)
            self.node = stack.enter_context(self.nodes)
            for end in (self.actors.workers, self.evaluator):
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
        roles, pool, own = [Role("learner", ("learner",))], self.actors.workers, self.evaluator
        if isinstance(pool, NodePool):
            collector = partial(Role, labels=("collector",), flag="--num-actors", niceness=NICENESS, needs_result=True)
            for worker in range(self.args.num_actors):
                prepare, on_restart = partial(pool.prepare, worker), partial(pool.on_lost, worker)
                roles.append(collector(f"collector {worker}", prepare=prepare, on_restart=on_restart))
        if isinstance(own, NodeEvaluator) and self.args.eval_every:
            evaluator = partial(Role, "evaluator", ("evaluator",), "--eval-every", EVALUATOR_NICENESS, True)
            roles.append(evaluator(on_restart=own.on_restart, on_lost=own.on_lost))
        return roles

    def _check_rollout(self, version: int, fields: Mapping[str, Tensor]) -> None:
        """Raise WireError for values that the learner cannot use; those that are not finite are skipped later."""
        if not 0 <= version <= self.weights.version:
            raise WireError(f"there is no weights version {version}")
        if not is_valid(self.action_space, fields["action"]):
            raise WireError(f"actions are not of {self.action_space}")


def collectors_of(node: Node, args: RoleArgs, memory: Memory, learner: Learner | None) -> list[Collector]:
    """The collectors that run in this process: one in a node of its own, all of them in a standalone task."""
    channels: list[LocalChannel] | list[NodeChannel] = []
    if learner is not None:
        workers = learner.actors.workers
        channels = workers.channels if isinstance(workers, LocalPool) else []
    elif "collector" in node.labels:
        own = () if args.attach_to is None else (memory.slots, memory.weights)
        channels = [NodeChannel(node, *own)]
    return [_make_collector(args, memory, channel) for channel in channels]


def _make_collector(args: RoleArgs, memory: Memory, channel: NodeChannel | LocalChannel) -> Collector:
    env = make_envs(args, channel)
    spaces = env.single_observation_space, env.single_action_space
    with torch.random.fork_rng(devices=[]):  # in a standalone task, a resume continues the learner's
        net = make_actor_critic(*spaces, args.net_spec).to(memory.weights.buffers)
    return Collector(channel, net, RolloutCollector(args, env, net, channel))


def evaluator_of(node: Node, args: RoleArgs, learner: Learner | None) -> Evaluator | None:
    """Where the evaluator of this process gets its weights; None if there is none."""
    if learner is not None:
        evaluator = learner.run.evaluations and learner.run.evaluations.evaluator
        return evaluator if isinstance(evaluator, InlineEvaluator) else None
    return EvaluatorChannel(node, EvaluationGames.of(args), make_net(args)) if "evaluator" in node.labels else None


def make_net(args: RoleArgs) -> ActorCritic:
    return make_actor_critic(*probe_env(args.env_id), args.net_spec)
