"""What this machine allows, held against what a run will need before it starts anything."""

from __future__ import annotations

import resource
import shutil
from contextlib import suppress
from pathlib import Path

from torch import nn

from a3c_mp.config import CommonArgs, ConfigError
from a3c_mp.slots import check_shared_memory

MIB = 2**20
FILES = 64
"""open files of a trainer without actors, generously: it has about 15"""
FILES_PER_ACTOR = 4
"""three pipes and a sentinel"""
ACTOR_BYTES = 150 * MIB
"""memory that an actor shares with nobody once torch is loaded, environments not counted"""
MEMINFO, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


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
        fix = "enlarge /dev/shm (docker run --shm-size=1g), or lower --num-envs"
        raise ConfigError("num-actors", args.num_actors, f"for the weights {error}", fix) from error


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


def free_memory() -> int:
    """Bytes that are left of the machine's memory and of the container's; what only caches files is as good as free."""
    free = [2**63]
    with suppress(OSError, KeyError, ValueError):  # not Linux
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free.append(1024 * int(fields["MemAvailable"].split()[0]))
    with suppress(OSError, KeyError, ValueError):  # no container, or one without a limit
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        free.append(max(0, limit - used + int(parts["inactive_file"])))
    return min(free)


def free_shared_memory() -> int:
    """Bytes that shared memory can still take: it is memory, and /dev/shm has a limit of its own."""
    free = [free_memory()]
    with suppress(OSError):  # not Linux
        free.append(shutil.disk_usage("/dev/shm").free)
    return min(free)
