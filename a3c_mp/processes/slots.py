"""Slots: preallocated shared memory, through which everything large passes between processes.

A slot holds one rollout, gradient or block of transitions. Its number is all that travels through a pipe: sending a
tensor costs about 0.4 ms for each file descriptor, a number 0.01 ms. All slots lie in one arena: one file descriptor.
"""

import errno
import itertools
import math
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from a3c_mp._bootstrap import open_memory

MIB, GIB = 2**20, 2**30
MEMINFO, CGROUP, CONTAINER = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CGROUP_2 = "memory.max", "memory.current", "inactive_file"  # limit, memory in use, what of it caches files
CGROUP_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"  # the same in version 1
TIMES = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")  # processor time in each period, by version 2 and 1
ALIGNMENT = 64  # bytes; fields start on a cache line

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name of a field -> (shape, dtype)


class Slots:
    """`num_slots` dictionaries of tensors of fixed shapes, the same memory in every process they are passed to.

    It lies on the CPU, or for a CUDA `device` in shared GPU memory. With `pin_for`, a CUDA device, this process
    page-locks it for copies to that GPU (see `pin`); `everywhere`: the others do, too. Raises as `shared_bytes`.
    """

    def __init__(
        self, spec: Spec, num_slots: int, device: torch.device | str = "cpu",
        pin_for: torch.device | None = None, everywhere: bool = False,
    ):  # fmt: skip
        self.spec = spec
        self.offsets, self.slot_bytes = layout(spec)
        self.arena = shared_bytes(self.slot_bytes * num_slots, device).view(num_slots, self.slot_bytes)
        is_pinned = pin_for is not None and pin(self.arena, pin_for)
        self.pinned_elsewhere = pin_for if everywhere and is_pinned else None  # the GPU, the same one in every process

    def __getitem__(self, slot: int) -> dict[str, Tensor]:
        """The fields of one slot, as views of shared memory."""
        memory, fields = self.arena[slot], {}
        for name, (shape, dtype) in self.spec.items():
            start = self.offsets[name]
            fields[name] = memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return fields

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.pinned_elsewhere is not None:
            pin(self.arena, self.pinned_elsewhere)


def pin(memory: Tensor, device: torch.device) -> bool:
    """Page-lock memory of the CPU for copies to a GPU, which are faster then and can be queued.

    Returns whether that is done; if not, with a warning.
    """
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error != 0:
            text = f"memory of {memory.nbytes:,} bytes cannot be pinned (CUDA error {error}); copies are slower"
            warnings.warn(text, stacklevel=3)
            with suppress(RuntimeError):  # the error would be that of the next kernel
                torch.zeros(1, device=device)
    return error == 0


def page_locked(tensor: Tensor) -> Tensor:
    """A copy in page-locked memory, or the tensor itself where the machine allows no more of that."""
    with suppress(RuntimeError):
        return tensor.pin_memory()
    return tensor


def layout(spec: Spec) -> tuple[dict[str, int], int]:
    """Byte offset of each field, and the bytes of a whole slot."""
    offsets, end = {}, 0
    for name, (shape, dtype) in spec.items():
        offsets[name] = end
        end += math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
    return offsets, end


def shared_bytes(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Allocate shared memory: zeros, uint8 [size]; that of a GPU is shared by CUDA IPC.

    On the CPU it is an anonymous file (memfd_create), which needs no /dev/shm and is freed with the last process that
    holds it. All its blocks are allocated here: where memory is missing, the first write would kill a process (SIGBUS).
    Raises MemoryError, with both sizes, where too little is free; with the reason, where it cannot be allocated.
    """
    what = f"{math.ceil(size / MIB):,} MiB of shared memory"
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if size > (free := free_memory()):
        raise MemoryError(f"{what} is needed, {free // MIB:,} MiB of memory is free")
    try:
        with open(open_memory("a3c_mp"), "rb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            storage = torch.UntypedStorage._new_shared_fd_cpu(file.fileno(), size)  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:  # torch has no narrower class for a mapping that fails
        why = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
        hint = "; ulimit -f counts for shared memory, too" if getattr(error, "errno", None) == errno.EFBIG else ""
        raise MemoryError(f"{what} cannot be allocated ({why}{hint})") from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def shared_counters(count: int) -> Tensor:
    """Allocate counters in shared memory, as `shared_bytes` does: zeros, int64 [count]."""
    return shared_bytes(count * torch.int64.itemsize).view(torch.int64)


def free_memory() -> int:
    """Bytes of memory that are free, in the machine and below every limit; caches of files count as free."""
    free = [2**63]
    with suppress(OSError, KeyError, ValueError):  # not Linux
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free.append(1024 * int(fields["MemAvailable"].split()[0]))
    for folder, (limit_file, used_file, cache) in itertools.product(cgroups("memory"), (CGROUP_2, CGROUP_1)):
        with suppress(OSError, KeyError, ValueError):  # of the other version, or without a limit
            limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
            parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free.append(max(0, limit - used + int(parts[cache])))
    return min(free)


def cores() -> int:
    """Processor cores that this process may use: those of its affinity, or fewer by a quota of time (`--cpus`)."""
    found = [len(os.sched_getaffinity(0))]
    for folder, files in itertools.product(cgroups("cpu"), TIMES):
        with suppress(OSError, ValueError):  # of the other version, or without a limit
            quota, period = (int(word) for name in files for word in (folder / name).read_text().split())
            found += [math.ceil(quota / period)] if quota > 0 else []
    return min(found)


def cgroups(controller: str) -> set[Path]:
    """Folders of the control groups around this process; a container may show its own as the root, by another name."""
    found = {CONTAINER, CONTAINER / controller}
    with suppress(OSError, ValueError):
        for line in CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):  # version 2, or version 1
                root, inside = CONTAINER / (controller if controllers else ""), Path(path.lstrip("/"))
                found |= {root / each for each in (inside, *inside.parents) if ".." not in each.parts}
    return found
