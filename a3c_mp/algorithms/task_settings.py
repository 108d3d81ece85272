"""Settings of chapter 5 and their checks: roles, addresses, keys, and the sizes of messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar

from torch import nn

from a3c_mp.algorithms.actor_critic_settings import PPOArgs
from a3c_mp.config import Between
from a3c_mp.errors import ConfigError
from a3c_mp.processes.slots import Spec
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.router import Hub
from a3c_mp.task.wire import MAX_TENSOR


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
        with Hub(Endpoint(binds=(args.listen,), key_file=args.key_file)):
            pass  # before anything else is started: it can be bound
    if args.attach_to is not None:
        Endpoint(dials=args.attach_to, key_file=args.key_file).load_key()
    # Collectors fill one slot while the learner has the other.
    return dataclasses.replace(args, slots_per_actor=max(args.slots_per_actor, 2)) if args.async_mode else args


def check_message_sizes(args: RoleArgs, net: nn.Module, spec: Spec) -> None:
    """Raise ConfigError if a rollout of fields `spec`, or the weights, are too large for a message."""
    fields = {f"field {name} of a rollout": math.prod(shape) * dtype.itemsize for name, (shape, dtype) in spec.items()}
    weights = {f"the weight {name}": value.nbytes for name, value in net.state_dict().items()}
    rollouts_fix, weights_fix = "lower it or --unroll-length", "choose another, or use --standalone"
    if args.listen is not None:  # rollouts and all weights in one piece are sent to and from other machines only
        _check_sizes("num-envs", args.num_envs, fields, rollouts_fix)
        _check_sizes("env-id", args.env_id, {"the weights": sum(weights.values())}, weights_fix)
    if args.eval_every and not args.standalone:  # snapshots for the evaluator, to any node
        _check_sizes("env-id", args.env_id, weights, weights_fix)


def _check_sizes(setting: str, value: object, sizes: Mapping[str, int], fix: str) -> None:
    for what, size in sizes.items():
        if size > MAX_TENSOR:
            why = f"{what} would have {size:,} bytes, a message between nodes can have {MAX_TENSOR:,}"
            raise ConfigError(setting, value, why, fix)
