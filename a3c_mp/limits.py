"""What this machine allows, held against what a run will need before it starts anything."""

from __future__ import annotations

import platform
import resource

import torch
from torch import nn

from a3c_mp.config import CommonArgs, ConfigError
from a3c_mp.memory import MIB, free_memory
from a3c_mp.slots import check_shared_memory

FILES = 64
"""open files of a trainer without actors, generously: it has about 15"""
FILES_PER_ACTOR = 4
"""three pipes and a sentinel"""
ACTOR_BYTES = 150 * MIB
"""memory that an actor shares with nobody once torch is loaded, environments not counted"""
CONTEXT_BYTES = 300 * MIB
"""host memory of a CUDA context: an estimate, as NVIDIA and PyTorch document none; not measured on a GPU"""
CONTEXT_GPU_BYTES = 270 * MIB
"""GPU memory of one with a small tensor: 287,047,680 bytes in github.com/pytorch/pytorch/pull/86509; not measured"""
ORDERED_STORES = ("x86_64", "amd64")
"""processors on which others see what one writes in the order in which it was written"""


def check_limits(args: CommonArgs, net: nn.Module) -> None:
    """Raise ConfigError where processor, open files or memory will not do for the processes and their weights."""
    check_processor()
    check_memory(args.num_actors, getattr(args, "num_learners", 1), args.cuda)
    check_open_files(args.num_actors)
    try:
        if not args.cuda:
            check_shared_memory(2 * sum(4 * t.numel() for t in net.state_dict().values()))
    except MemoryError as error:
        raise ConfigError(
            "num-actors", args.num_actors, f"for the weights {error}", "lower it or --num-envs"
        ) from error


def check_processor() -> None:
    """Raise ConfigError where a counter in shared memory may be seen before what it speaks for.

    `Weights` and `Shards` write data, then a counter, without a lock or a memory barrier.
    """
    machine = platform.machine()
    if machine.lower() not in ORDERED_STORES:
        why = "weights and replay are shared without locks, which relies on the memory order of x86-64"
        raise ConfigError("machine", machine, why, "use a machine with an Intel or AMD processor")


def check_memory(num_actors: int, num_learners: int, cuda: bool) -> None:
    """Raise ConfigError where memory, or that of the GPU, will not do for the processes besides the first learner."""
    needed = (num_actors + num_learners - 1) * (ACTOR_BYTES + cuda * CONTEXT_BYTES)
    if needed > (free := free_memory()):
        why = f"that takes {needed // MIB:,} MiB of memory at least, {free // MIB:,} MiB is free"
        raise ConfigError("num-actors", num_actors, why, "lower it")
    if not cuda:
        return
    needed = num_actors // num_learners * CONTEXT_GPU_BYTES  # the learner has its own already
    if needed > (free := torch.cuda.mem_get_info()[0]):
        why = f"that takes {needed // MIB:,} MiB of a GPU's memory at least, {free // MIB:,} MiB is free"
        raise ConfigError("num-actors", num_actors, why, "lower it, or leave --cuda out")


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
