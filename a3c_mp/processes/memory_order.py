"""Counters in shared memory that announce data without a lock, in an order that every processor keeps.

x86-64 makes stores visible in their order and loads in theirs. Arm's processors do neither without a memory barrier, so
`publish_counters` and `read_counters` have one on both sides of each counter, which on x86-64 does nothing. On a
processor that may take any order, `test_memory_order.py` explores them all.
"""

import ctypes
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

LIBRARY = "libatomic.so.1"
SEQ_CST = 5  # memory_order_seq_cst of C11: a full barrier


def full_barrier(machine: str) -> Callable[[], object] | None:
    """A function that is a full memory barrier, or nothing where the processor needs none; None if it is not known."""
    if machine.lower() in ("x86_64", "amd64"):
        return lambda: None
    if machine.lower() in ("aarch64", "arm64"):
        with suppress(OSError, AttributeError):
            return partial(ctypes.PyDLL(LIBRARY).atomic_thread_fence, SEQ_CST)  # keeps the GIL, as it takes nanoseconds
    return None


barrier: Any = full_barrier(platform.machine())  # with None, `preflight.check_system` refuses a run


def publish_counters(counters: Any, values: Any) -> None:
    """Store counters (int64, a view of shared memory), after all before it and before all that follows."""
    barrier()
    counters[...] = values
    barrier()


def read_counters(counters: Any) -> np.ndarray:
    """Load counters, after all before it and before all that follows; returns a copy."""
    barrier()
    values = np.array(counters)
    barrier()
    return values
