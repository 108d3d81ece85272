"""Free memory of this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MIB, GIB = 2**20, 2**30
MEMINFO, CONTAINER = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes of memory that are free, in the machine and in its container; caches of files count as free."""
    free = [2**63]
    with suppress(OSError, KeyError, ValueError):  # not Linux
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free.append(1024 * int(fields["MemAvailable"].split()[0]))
    with suppress(OSError, KeyError, ValueError):  # no container, or one without a limit
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        free.append(max(0, limit - used + int(parts["inactive_file"])))
    return min(free)
