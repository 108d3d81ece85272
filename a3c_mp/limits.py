"""What this machine allows, held against what a run will need before it starts anything."""

from __future__ import annotations

import resource

from torch import nn

from a3c_mp.config import CommonArgs, ConfigError
from a3c_mp.memory import MIB, free_memory
from a3c_mp.slots import check_shared_memory

FILES = 64
"""open files of a trainer without actors, generously: it has about 15"""
FILES_PER_ACTOR = 3
"""two pipes and a sentinel"""
ACTOR_BYTES = 150 * MIB
"""memory that an actor shares with nobody once torch is loaded, environments not counted"""


def check_limits(args: CommonArgs, net: nn.Module) -> None:
    """Raise ConfigError where open files, memory or shared memory will not do for the actors and their weights."""
    needed = args.num_actors * ACTOR_BYTES
    if needed > (free := free_memory()):
        why = f"that takes {needed // MIB:,} MiB of memory at least, {free // MIB:,} MiB is free"
        raise ConfigError("num-actors", args.num_actors, why, "lower it")
    check_open_files(args.num_actors)
    try:
        if not args.cuda:
            check_shared_memory(2 * sum(4 * t.numel() for t in net.state_dict().values()))
    except MemoryError as error:
        raise ConfigError(
            "num-actors", args.num_actors, f"for the weights {error}", "lower it or --num-envs"
        ) from error


def check_open_files(num_actors: int) -> None:
    """Raise this process's own limit as far as it may and must. Raises ConfigError where that is not enough."""
    needed = FILES + FILES_PER_ACTOR * num_actors
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        why = f"that takes {needed} open files, {hard} are allowed"
        raise ConfigError("num-actors", num_actors, why, "lower it, or raise the limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
