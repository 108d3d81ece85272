"""Settings of chapter 5 and their checks: roles, addresses and keys."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from a3c_mp.algorithms.actor_critic_settings import PPOArgs
from a3c_mp.config import Between
from a3c_mp.errors import ConfigError
from a3c_mp.task.endpoint import Endpoint
from a3c_mp.task.router import Hub


@dataclass(frozen=True)
class RoleArgs(PPOArgs):
    """Settings of the nodes of chapter 5."""

    chapter = "task"
    actor_name = "collector"
    evaluates_elsewhere = True

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


def check_roles(args: RoleArgs) -> RoleArgs:
    """Add settings that follow from others. Raises ConfigError if they contradict, or an address or key is invalid."""
    listens, attaches, is_learner = args.listen is not None, args.attach_to is not None, args.role == "learner"
    nothing_joins = args.resume is None and not listens  # a resumed run may have listened before
    no_collector = args.num_actors == 0 and not (listens and args.remote_actors) and args.role != "evaluator"
    has_key, has_places = args.key_file is not None and not attaches, args.remote_actors != RoleArgs.remote_actors
    alone, in_order, threads = "a standalone task is one process", args.deterministic, args.async_mode
    for flag, is_refused, why, fix in (
        ("role", attaches and is_learner, "the task to join has its learner", "use collector, or evaluator"),
        ("role", not attaches and not is_learner, "the task would have no learner", "add --attach-to"),
        ("listen", args.standalone and listens, alone, "leave --standalone out"),
        ("attach-to", args.standalone and attaches, alone, "leave --standalone out"),
        ("attach-to", listens and attaches, "a node that joins does not listen", "leave --listen out"),
        ("num-actors", no_collector, "there would be no collector", "use 1 or more, or --listen for others"),
        ("key-file", nothing_joins and has_key, "nothing is on TCP", "add --listen or --attach-to, or leave it out"),
        ("remote-actors", nothing_joins and has_places, "no node can join", "add --listen, or leave it out"),
        ("async-mode", threads and not args.standalone, "nodes run beside each other anyway", "add --standalone"),
        ("async-mode", threads and in_order, "threads have no fixed order", "leave --deterministic out"),
        ("listen", in_order and listens, "who joins, and when, has no fixed order", "leave --deterministic out"),
    ):
        if is_refused:
            raise ConfigError(flag, getattr(args, flag.replace("-", "_")), why, fix)
    if args.listen is not None:
        with Hub(Endpoint(binds=(args.listen,), key_file=args.key_file)):
            pass  # before anything else is started: it can be bound
    if args.attach_to is not None:
        Endpoint(dials=args.attach_to, key_file=args.key_file).load_key()
    # Collectors fill one slot while the learner has the other.
    return dataclasses.replace(args, slots_per_actor=max(args.slots_per_actor, 2)) if args.async_mode else args
