"""Slots are one memory for all processes, laid out so that no field touches another."""

import contextlib
import gc
import math
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from harness import files_no_longer_than, open_files
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.processes import slots as slots_module
from a3c_mp.processes.slots import ALIGNMENT, Slots, shared_bytes, shared_counters

MEGABYTE = {"block": ((2**20,), torch.uint8)}
DTYPES = [torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16]
specs = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.tuples(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=5,
)


def byte_range(tensor):
    start = tensor.data_ptr()
    return range(start, start + tensor.numel() * tensor.element_size())


@settings(deadline=None, max_examples=50)
@given(specs, st.integers(1, 3))
def test_fields_have_their_shapes_are_zero_and_aligned_and_never_overlap(spec, num_slots):
    slots = Slots(spec, num_slots)
    fields = []
    for slot in range(num_slots):
        for name, (shape, dtype) in spec.items():
            tensor = slots[slot][name]
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert not tensor.any()
            fields.append(byte_range(tensor))
    fields.sort(key=lambda field: field.start)
    assert all(one.stop <= following.start for one, following in pairwise(fields))
    arena = byte_range(slots.arena)
    assert arena.start <= fields[0].start
    assert fields[-1].stop <= arena.stop


def test_memory_that_cuda_does_not_pin_is_used_as_it_is(monkeypatch):
    """Where CUDA refuses to register it, as in a container with little of such memory."""
    cudart = Mock(**{"cudaHostRegister.return_value": 2})
    cuda = Mock(device=lambda number: contextlib.nullcontext(), cudart=lambda: cudart)
    monkeypatch.setattr(torch, "cuda", cuda)
    next_kernel = Mock(side_effect=RuntimeError("out of memory"))  # which gets the error that is left
    monkeypatch.setattr(torch, "zeros", next_kernel)
    with pytest.warns(UserWarning, match=r"memory of 64 bytes cannot be pinned \(CUDA error 2\)"):
        slots = Slots({"x": ((3,), torch.float32)}, 1, pin_for=torch.device("cuda", 1), everywhere=True)
    next_kernel.assert_called_once_with(1, device=torch.device("cuda", 1))
    slots.__setstate__(dict(vars(slots)))  # as in another process, which does not try again
    cudart.cudaHostRegister.assert_called_once()
    slots[0]["x"].fill_(1.0)
    assert slots[0]["x"].tolist() == [1.0] * 3


@pytest.mark.parametrize("missing", [0, 1, 2**20 - 1])
def test_memory_that_does_not_suffice_is_refused(missing, monkeypatch):
    """What is needed is rounded up, and what is free down."""
    monkeypatch.setattr(slots_module, "free_memory", lambda: 2**20 - 1)
    shared_bytes(2**20 - 1)
    needed = 2**20 + missing
    with pytest.raises(MemoryError, match=f"^{math.ceil(needed / 2**20)} MiB of shared memory is needed, 0 MiB of"):
        shared_bytes(needed)


@pytest.mark.parametrize("has_call", [True, False])
def test_shared_memory_is_all_there_needs_no_dev_shm_and_goes_with_its_tensors(has_call, monkeypatch):
    """In a container /dev/shm is often small, and may be read-only. Conda's Python lacks `os.memfd_create`."""
    if not has_call:
        monkeypatch.delattr("os.memfd_create")
    gc.collect()  # files that other tests have left open
    before, files = open_files(), set(os.listdir("/dev/shm"))
    mapped = Path("/proc/self/maps").read_text().count("memfd:a3c_mp")
    slots, counters = Slots(MEGABYTE, 2), shared_counters(3)
    descriptor, size = slots.arena.untyped_storage()._share_fd_cpu_()
    assert os.fstat(descriptor).st_blocks * 512 >= size == 2 * 2**20, "not just a size, as of an empty file"
    assert set(os.listdir("/dev/shm")) <= files
    mine = list((Counter(open_files()) - Counter(before)).elements())
    assert mine
    assert all("memfd:" in name for name in mine), mine
    assert Path("/proc/self/maps").read_text().count("memfd:a3c_mp") > mapped
    assert (counters.tolist(), counters.dtype) == ([0, 0, 0], torch.int64)
    del slots, counters
    gc.collect()
    assert open_files() == before
    assert Path("/proc/self/maps").read_text().count("memfd:a3c_mp") == mapped


def test_a_limit_of_file_sizes_is_one_line_and_leaves_nothing_behind():
    before = open_files()
    with files_no_longer_than(2**20), pytest.raises(MemoryError, match=r"cannot be allocated .*ulimit -f") as error:
        Slots(MEGABYTE, 2)
    assert "\n" not in str(error.value)
    assert open_files() == before
