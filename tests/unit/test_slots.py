"""Slots are one memory for all processes, laid out so that no field touches another."""

import errno
import math
import os
import shutil
from collections import namedtuple
from itertools import pairwise

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.slots import ALIGNMENT, Slots, check_shared_memory

SPEC = {"image": ((3, 5, 7), torch.uint8), "reward": ((3,), torch.float32), "done": ((), torch.bool)}

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
def test_fields_have_their_shapes_are_aligned_and_never_overlap(spec, num_slots):
    slots = Slots(spec, num_slots)
    fields = []
    for slot in range(num_slots):
        assert list(slots[slot]) == list(spec)
        for name, (shape, dtype) in spec.items():
            tensor = slots[slot][name]
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % ALIGNMENT == 0
            fields.append(byte_range(tensor))
    fields.sort(key=lambda field: field.start)
    for one, next_one in pairwise(fields):
        assert one.stop <= next_one.start
    arena = byte_range(slots.arena)
    assert arena.start <= fields[0].start
    assert fields[-1].stop <= arena.stop


def test_views_are_the_same_memory_every_time():
    slots = Slots(SPEC, 2)
    slots[1]["reward"].fill_(2.5)
    assert slots[1]["reward"].tolist() == [2.5] * 3
    assert not slots[0]["reward"].any()
    assert not slots[1]["image"].any()
    assert slots.arena.is_shared()


def test_slots_start_out_zero():
    assert not any(field.any() for slot in Slots(SPEC, 3) for field in slot.values())


def test_a_slot_that_does_not_exist_is_an_index_error():
    slots = Slots(SPEC, 2)
    assert len(slots) == 2
    for wrong in (2, 99, -1):
        with pytest.raises(IndexError, match=f"slot {wrong} of 2"):
            slots[wrong]


@pytest.mark.parametrize("num_slots", [0, -1])
def test_there_is_at_least_one_slot(num_slots):
    with pytest.raises(ValueError, match=str(num_slots)):
        Slots(SPEC, num_slots)


@pytest.fixture
def dev_shm_with(monkeypatch):
    """A function that makes /dev/shm look as if it had so many bytes free."""

    def pretend(free):
        usage = namedtuple("usage", "total used free")(2 * free, free, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return pretend


def test_a_dev_shm_that_is_too_small_is_told_before_anything_is_written(dev_shm_with):
    dev_shm_with(3 * 2**20)
    spec = {"block": ((2**20,), torch.uint8)}
    assert len(Slots(spec, 3)) == 3, "just enough"
    with pytest.raises(MemoryError, match=r"4 MiB.* needed.*3 MiB free"):
        Slots(spec, 4)


def test_what_is_handed_out_is_there():
    """Torch alone would only name a size: no block of it is anybody's until it is written to."""
    slots = Slots({"block": ((3 * 2**20,), torch.uint8)}, 1)
    descriptor, size = slots.arena.untyped_storage()._share_fd_cpu_()
    assert size == 3 * 2**20
    assert os.fstat(descriptor).st_blocks * 512 >= size
    assert not slots.arena.any()


def test_space_that_somebody_else_takes_meanwhile_is_missed_before_it_is_written_to(monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match="4 MiB of shared memory are not to be had"):
        Slots({"block": ((2**20,), torch.uint8)}, 4)


def test_where_there_is_no_dev_shm_nothing_is_checked(monkeypatch):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", missing)
    check_shared_memory(2**60)


def copy_twice_as_much(slots):
    """Spawned: read what the parent wrote to slot 0, write to slot 1."""
    for name, field in slots[0].items():
        slots[1][name].copy_(2 * field)


def test_a_spawned_process_sees_and_writes_the_same_memory():
    spec = {"count": ((2, 3), torch.int64), "reward": ((4,), torch.float32)}
    slots = Slots(spec, 2)
    for shape, field in zip([(2, 3), (4,)], slots[0].values(), strict=True):
        field.copy_(torch.arange(1, math.prod(shape) + 1).view(shape))
    view = slots[1]["count"]  # taken before the other process writes
    child = mp.get_context("spawn").Process(target=copy_twice_as_much, args=(slots,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert view.tolist() == [[2, 4, 6], [8, 10, 12]]
    assert slots[1]["reward"].tolist() == [2.0, 4.0, 6.0, 8.0]
