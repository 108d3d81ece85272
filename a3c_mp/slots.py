"""Preallocated slots in shared memory: the road of everything big between processes.

A slot holds one rollout, gradient or block of transitions. Its number is all that travels through a queue: sending a
tensor costs about 0.4 ms for each file descriptor, a number 0.01 ms. All slots lie in one arena: one file descriptor.
"""

from __future__ import annotations

import math
import os
import shutil
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""bytes; fields start on a cache line"""

Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""name of a field -> (shape, dtype)"""


class Slots:
    """`num_slots` dictionaries of tensors of fixed shapes, the same memory in every process they are passed to.

    Args:
        spec: shape and dtype of each field of a slot.
        num_slots: how many there are.
        pin: page-lock the memory, in every process that holds it: copies to the GPU are faster and can be queued.
        device: where they lie; on CUDA they are shared GPU memory.

    Raises:
        MemoryError: /dev/shm is too small; says what is needed and what is free.
    """

    def __init__(self, spec: Spec, num_slots: int, pin: bool = False, device: torch.device | str = "cpu"):
        if num_slots < 1:
            raise ValueError(f"num_slots must be 1 or more, not {num_slots}")
        self.spec = spec
        self.num_slots = num_slots
        self.offsets, self.slot_bytes = layout(spec)
        num_bytes = self.slot_bytes * num_slots
        if torch.device(device).type == "cpu":
            self.arena = shared_bytes(num_bytes).view(num_slots, self.slot_bytes)
        else:
            self.arena = torch.zeros(num_slots, self.slot_bytes, dtype=torch.uint8, device=device)
        self.pinned_by = torch.cuda.current_device() if pin else None  # the GPU, the same one in every process
        self._pin()

    def __len__(self) -> int:
        return self.num_slots

    def __getitem__(self, slot: int) -> dict[str, Tensor]:
        """The fields of one slot, as views: writing to them writes to shared memory."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        return {name: self._view(slot, name) for name in self.spec}

    def _view(self, slot: int, name: str) -> Tensor:
        shape, dtype = self.spec[name]
        start = self.offsets[name]
        return self.arena[slot, start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _pin(self) -> None:
        if self.pinned_by is not None:
            with torch.cuda.device(self.pinned_by):
                address, size = self.arena.data_ptr(), self.arena.numel()
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pin()


def layout(spec: Spec) -> tuple[dict[str, int], int]:
    """Byte offset of each field, and the bytes of a whole slot."""
    offsets, end = {}, 0
    for name, (shape, dtype) in spec.items():
        offsets[name] = end
        end += math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
    return offsets, end


def shared_bytes(size: int) -> Tensor:
    """Zeros, uint8 [size], in shared memory that is there from now on.

    Torch only names a size. Nothing would stop two of its allocations from promising the same space, and the first
    write past what there is would kill a process with SIGBUS.

    Raises:
        MemoryError: /dev/shm is too small; says what is needed and what is free.
    """
    check_shared_memory(size)
    storage = torch.UntypedStorage._new_shared(size)
    descriptor, _ = storage._share_fd_cpu_()  # stays the storage's
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:  # somebody else took it meanwhile
        raise MemoryError(f"{size / 2**20:.0f} MiB of shared memory are not to be had ({error.strerror})") from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def check_shared_memory(needed: int) -> None:
    """Raise MemoryError if /dev/shm has less than `needed` bytes free; says what is needed and what is free."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return  # not Linux: shared memory lies elsewhere
    if needed > free:
        raise MemoryError(
            f"{needed / 2**20:.0f} MiB of shared memory are needed, /dev/shm has {free / 2**20:.0f} MiB free"
        )
