"""Roles of chapter 5: its settings, the nodes that it starts, and nodes that join it from other machines."""

from __future__ import annotations

import dataclasses
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import gymnasium
from torch import nn

from a3c_mp.algorithms.actor_critic import ActorCriticArgs, allocate, rollout_layout
from a3c_mp.config import Between
from a3c_mp.data.actor_states import ActorStates
from a3c_mp.data.rollout import rollout_spec
from a3c_mp.errors import ConfigError
from a3c_mp.nets.precision import acting_dtype
from a3c_mp.processes.channel import NICENESS
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import WorkerPool
from a3c_mp.run.actors import Actors
from a3c_mp.run.run import Run
from a3c_mp.task.endpoint import Endpoint, check_tcp
from a3c_mp.task.exchange import Intake, LocalChannel, OneProcess, Outlet, RemoteOutlet, RemoteWeights, serve_weights
from a3c_mp.task.parallel import FirstNode, Node, Nodes, Role, join


@dataclass(frozen=True)
class RoleArgs(ActorCriticArgs):
    """Settings of the nodes of chapter 5."""

    standalone: bool = False
    """run all middleware in one process"""
    async_mode: bool = False
    """with --standalone: run the middleware of an iteration at the same time, in threads"""
    print_per_step: Annotated[int, Between(0)] = 0
    """print the time of each middleware every so many iterations; 0 prints none"""
    transport: Literal["ipc", "tcp"] = "ipc"
    """messages between the nodes of this machine: Unix sockets, or TCP on loopback with --key-file"""
    listen: str | None = None
    """address tcp://HOST:PORT at which nodes of other machines may join; needs --key-file"""
    remote_actors: Annotated[int, Between(0, 1024)] = 4
    """collectors that may join with --listen, besides num-actors"""
    attach_to: str | None = None
    """join the task that listens at this address, with its settings; needs --key-file and --role"""
    role: Literal["learner", "collector", "evaluator"] = "learner"
    """with --attach-to: what this process does there"""
    key_file: Path | None = None
    """secret key of a task on TCP; made at the first --listen, copy it to the other machines"""

    @property
    def max_actors(self) -> int:
        return self.num_actors + (self.remote_actors if self.listen is not None else 0)


class Memory(NamedTuple):
    """What the learner and the collectors share."""

    slots: Slots
    weights: Weights | RemoteWeights
    states: ActorStates


def check_roles(args: RoleArgs) -> None:
    """Raise ConfigError for settings that contradict each other, and for addresses and keys that are of no use."""
    alone = "it runs in one process"
    if args.attach_to is not None and args.role == "learner":
        raise ConfigError("role", args.role, "the task to join has its learner", "--role collector, or evaluator")
    if args.attach_to is None and args.role != "learner":
        raise ConfigError("role", args.role, "the task would have no learner", "add --attach-to, or leave --role out")
    for flag, value in (("listen", args.listen), ("attach-to", args.attach_to)):
        if value is not None:
            check_tcp(flag, value)
            if args.standalone:
                raise ConfigError(flag, value, alone, "leave --standalone out")
    if args.listen is not None and args.attach_to is not None:
        raise ConfigError("attach-to", args.attach_to, "a node that joins does not listen", "leave --listen out")
    if args.async_mode and not args.standalone:
        raise ConfigError("async-mode", True, "nodes run beside each other anyway", "add --standalone")
    if args.deterministic and args.async_mode:
        raise ConfigError("async-mode", True, "threads have no fixed order", "leave --deterministic out")
    if args.deterministic and args.listen is not None:
        raise ConfigError("listen", args.listen, "who joins, and when, has no fixed order", "leave --deterministic out")
    if args.transport == "tcp" and args.key_file is None:
        raise ConfigError("transport", "tcp", "TCP needs a key", "add --key-file FILE")
    if args.listen is not None:
        Endpoint(0, "star", binds=(args.listen,), key_file=args.key_file).load_key()
        _check_bind(args.listen)
    if args.attach_to is not None:
        Endpoint(None, "star", dials=(args.attach_to,), key_file=args.key_file).load_key()


def _check_bind(address: str) -> None:
    """Raise ConfigError if an address cannot be bound, before anything is started."""
    host, port = check_tcp("listen", address)
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        fix = "choose another port, or an address of this machine"
        raise ConfigError("listen", address, f"cannot be bound ({error.strerror})", fix) from error


def share_memory(args: RoleArgs, run: Run, net: nn.Module, spaces: tuple[gymnasium.Space, gymnasium.Space]) -> Memory:
    """Allocate what the learner shares with its collectors. Raises ConfigError: too little shared memory."""
    slots = allocate(args, rollout_spec(args.unroll_length, args.num_envs, *spaces))
    weights = Weights(net, acting_dtype(args.precision, net))
    states = ActorStates(args, rollout_layout(args, spaces[1]), start=run.steps)
    run.keep(actors=states, weights=weights)
    return Memory(slots, weights, states)


class Pipeline:
    """The nodes of a run, and the learner's actors among them; to be used in a `with` block.

    Args:
        main: what every node runs, `main(node, args, memory)`.
        args: of the chapter.
        run, memory: of the learner.
    """

    def __init__(self, main: Callable[..., None], args: RoleArgs, run: Run, memory: Memory):
        roles = [Role("learner", ("learner",))]
        if not args.standalone:
            roles += [Role(f"collector {n}", ("collector",), "--num-actors", NICENESS) for n in range(args.num_actors)]
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(args).items()}
        self.nodes = Nodes(
            main, (args, memory), roles, listen=args.listen, key_file=args.key_file, greeting={"args": settings},
            joining=("collector", "evaluator") if args.listen else (), max_restarts=args.max_restarts,
            transport=args.transport, hang_seconds=args.hang_seconds,
        )  # fmt: skip
        start: Callable[..., WorkerPool]
        start = OneProcess if args.standalone else partial(Intake, self.nodes, range(1, len(roles)), memory.slots)
        assert isinstance(memory.weights, Weights)
        self.actors = Actors(None, (), memory.weights, memory.states, run, start=start)
        self.weights = memory.weights
        self.node: FirstNode | None = None

    def __enter__(self) -> Pipeline:
        self.actors.__enter__()
        try:
            self.node = self.nodes.__enter__()
        except BaseException:
            self.actors.__exit__()
            raise
        if isinstance(self.actors.workers, Intake):
            self.actors.workers.connect(self.node)
            serve_weights(self.node, self.weights)
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            self.nodes.__exit__(*exc)
        finally:
            self.actors.__exit__(*exc)


def channels_of(node: Node, memory: Memory, pipeline: Pipeline | None) -> list[LocalChannel] | list[Outlet]:
    """The channels of the collectors that run in this process."""
    if pipeline is not None:
        return pipeline.actors.workers.channels if isinstance(pipeline.actors.workers, OneProcess) else []
    if "collector" not in node.labels:
        return []
    if node.setup is not None:
        return [Outlet(node, node.setup)]
    return [RemoteOutlet(node, memory.slots)]


def join_task(main: Callable[..., None], args: RoleArgs, spaces: Callable[..., tuple], make_net: Callable) -> int:
    """Run `main(node, args, memory)` as a node of a task elsewhere, with that task's settings; returns the exit code."""
    assert args.attach_to is not None

    def joined(node: Node) -> None:
        saved = node.router.greeting["args"]
        kept = {name: getattr(args, name) for name in ("attach_to", "role", "key_file", "cuda")}
        theirs = type(args)(**{**saved, **kept, "deterministic": False, "listen": None})
        obs_space, action_space = spaces(theirs.env_id)
        spec = rollout_spec(theirs.unroll_length, theirs.num_envs, obs_space, action_space)
        weights = RemoteWeights(node, acting_dtype(theirs.precision, make_net(obs_space, action_space)))
        states = ActorStates(theirs, rollout_layout(theirs, action_space), start=0)
        main(node, theirs, Memory(Slots(spec, 1), weights, states))

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    join(joined, (), args.attach_to, (args.role,), args.key_file)
    return 0

