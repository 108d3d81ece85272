"""Chapter 7's settings, presets and checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch

from a3c_mp.algorithms import apex_settings, impala
from a3c_mp.cluster.node import check_installed
from a3c_mp.config import Between, Fraction
from a3c_mp.errors import ConfigError


@dataclass(frozen=True)
class RayArgs:
    """Settings of the connection to a Ray cluster: the first base class of an algorithm's settings."""

    chapter = "ray"
    act_on: ClassVar = "cpu"  # of this machine; elsewhere `actor_gpus` decides

    address: str | None = None
    """join a running Ray cluster: HOST:PORT of its head, or auto on one of its machines; default: one of its own"""
    token_file: Path | None = None
    """with --address: the secret of that cluster; default: the one of a node on this machine, in ~/.a3c_mp"""
    insecure_cluster: bool = False
    """with --address: join a cluster that has no token"""
    trainer_gpus: Fraction = 0.0
    """with --cuda: the GPU of the trainer, or the share of it, that Ray reserves, so that no actor takes it"""
    actor_gpus: Fraction = 0.0
    """share of a GPU that each actor takes, on which its net acts: with 0.1, up to ten act on one GPU; 0: on CPUs"""
    placement: Literal["auto", "spread", "pack"] = "auto"
    """with --address: spread actors and replay shards over all nodes, or pack a node, the trainer's first, before the
    next one is used; auto: Ray's choice"""

    @property
    def local_actors(self: Any) -> int:
        return self.num_actors if self.address is None else 0

    @property
    def local_learners(self: Any) -> int:
        return getattr(self, "num_learners", 1) if self.address is None else 1

    def gpu_of(self, rank: int) -> int:
        return 0  # Ray gives each trainer one


@dataclass(frozen=True)
class ImpalaArgs(RayArgs, impala.Args):
    """Settings of IMPALA on Ray."""

    fixed = (*impala.Args.fixed, "algo")

    algo: Literal["impala", "dqn"] = "impala"
    """impala: actors send unrolls to the trainer; dqn: actors fill replay shards"""


@dataclass(frozen=True)
class DqnArgs(RayArgs, apex_settings.Args):
    """Settings of DQN on Ray."""

    continuous: ClassVar = {}  # only chapter 3 has ddpg

    algo: Literal["impala", "dqn"] = "dqn"  # type: ignore[assignment]
    """impala: actors send unrolls to the trainer; dqn: actors fill replay shards"""
    num_shards: Annotated[int, Between(1, 64)] = 2
    """replay shards, each a Ray actor on some node; shard i holds the transitions of actors i, i + num-shards, ..."""


DQN_PRESETS = {
    name: {**preset, "block_length": 16}
    for name, preset in apex_settings.PRESETS.items()
    if preset.get("algo", "dqn") == "dqn"
}
SETTINGS = {"impala": (ImpalaArgs, impala.PRESETS), "dqn": (DqnArgs, DQN_PRESETS)}
"""algorithm -> (settings, presets)"""


def check(args: Any) -> None:
    """Raise ConfigError for settings of any algorithm that contradict each other, and for a machine without Ray."""
    check_installed()
    for name, value in (("token-file", args.token_file), ("insecure-cluster", args.insecure_cluster)):
        if value and args.address is None:
            why = "it is for a running cluster, and this run starts one of its own"
            raise ConfigError(name, value, why, "add --address, or leave it out")
    if args.token_file and args.insecure_cluster:
        why = "a cluster that --insecure-cluster joins has no token"
        raise ConfigError("token-file", args.token_file, why, "leave one of them out")
    if args.trainer_gpus and not args.cuda:
        raise ConfigError("trainer-gpus", args.trainer_gpus, "its net is on the CPU", "add --cuda, or set it to 0")
    learners = getattr(args, "num_learners", 1)
    if learners > 1 and args.cuda and args.trainer_gpus <= 0.5:
        why = f"each of {learners} trainers needs a GPU to itself, which Ray has to reserve"
        raise ConfigError("trainer-gpus", args.trainer_gpus, why, "add --trainer-gpus 1, or leave --cuda out")
    gpus, found = learners * args.trainer_gpus + args.num_actors * args.actor_gpus, torch.cuda.device_count()
    if args.address is None and round(gpus, 4) > found and (found or not args.cuda):  # Ray counts in ten-thousandths
        trainers = "trainer" if learners == 1 else f"{learners} trainers"
        why = f"{trainers} and {args.num_actors} actors need {gpus:g} GPUs in all, this machine has {found}"
        flag, value = ("actor-gpus", args.actor_gpus) if args.actor_gpus else ("trainer-gpus", args.trainer_gpus)
        what = "it" if args.actor_gpus or learners == 1 else "--num-learners"
        raise ConfigError(flag, value, why, f"lower {what}, or join a cluster (--address)")


def check_shards(args: DqnArgs) -> None:
    """Raise ConfigError for replay shards that cannot be filled, divided or saved."""
    if args.num_shards < args.num_learners:
        why = f"each of {args.num_learners} trainers has shards of its own"
        raise ConfigError("num-shards", args.num_shards, why, "raise it, or lower --num-learners")
    if args.num_shards > args.num_actors:
        why = f"only {args.num_actors} actors fill them"
        raise ConfigError("num-shards", args.num_shards, why, "lower it, or raise --num-actors")
    if args.save_replay:
        why = "shards are not saved: a resumed run fills them again"
        raise ConfigError("save-replay", True, why, "leave it out, or use chapter 3")
