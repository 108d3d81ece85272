"""`torch.cuda` for the virtual GPU: devices, streams, events, graphs, pinning, memory of other processes, NCCL."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from virtual_gpu import ledger, operations

CAPABILITY = tuple(int(number) for number in os.environ.get("VIRTUAL_GPU_CAPABILITY", "9.0").split("."))
NUM_GPUS = int(os.environ.get("VIRTUAL_GPUS", "1"))
GIB = 2**30
library: Any = None
_registered: Any = None  # which ends with its last reference


class Stream:
    """There is one stream: work is done in the order of its launches."""

    def __init__(self, device: Any = None, priority: int = 0):
        self.device = operations.full_device("cuda" if device is None else device)
        self.device_index, self.device_type, self.stream_id = self.device.index, 1, 0

    def synchronize(self) -> None:
        ledger.wait("Stream.synchronize")

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        ledger.wait("Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.seconds - self.seconds)


class Graph:
    """A CUDA graph: the operations that were launched in its capture, which a replay runs again on the same memory.

    The virtual GPU computes in a capture, too, as shapes and views need it; at its end, memory is as it was before.
    """

    def __init__(self, keep_graph: bool = False):
        self.nodes: list[tuple[Any, list, dict, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # what was written in the capture, and its values before that
        self.is_complete = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        if ledger.capturing:
            raise RuntimeError("CUDA error: a capture is under way already")
        if ledger.copies_under_way():
            raise ledger.Overwritten("a capture starts while copies are under way")
        self.thread = threading.current_thread() if capture_error_mode == "thread_local" else None
        ledger.capturing.append(self)

    def capture_end(self) -> None:
        ledger.capturing.clear()
        for place, values in reversed(self.before):
            place.copy_(values)
        self.before.clear()
        self.is_complete = True
        ledger.COUNTS["captures"] += 1

    def keep(self, written: list[Tensor]) -> None:
        """Remember what these hold, before they are written."""
        self.before += [(tensor, tensor.clone()) for tensor in written]

    def record(self, func: Any, args: list, kwargs: dict, found: Any) -> None:
        self.nodes.append((func, args, kwargs, found))

    def replay(self) -> None:
        if not self.is_complete:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if ledger.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (replay)")
        ledger.COUNTS["replays"] += 1
        with torch.inference_mode():
            for func, args, kwargs, found in self.nodes:
                _write_again(found, func(*args, **kwargs))

    def reset(self) -> None:
        self.nodes, self.is_complete = [], False

    def pool(self) -> tuple[int, int]:
        return 0, 0


def _write_again(before: Any, after: Any) -> None:
    """Put the results of an operation where they were before, unless it has written there itself."""
    if isinstance(before, Tensor):
        if before is not after and before.numel():
            before.copy_(after)
    elif isinstance(before, list | tuple):
        for old, new in zip(before, after, strict=True):
            _write_again(old, new)


class Runtime:
    """`torch.cuda.cudart`; `VIRTUAL_GPU_PIN_ERROR` is the code with which memory is not pinned."""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        if code := int(os.environ.get("VIRTUAL_GPU_PIN_ERROR", "0")):
            ledger.COUNTS["pins_refused"] += 1
            return code
        if library.virtual_gpu_is_pinned(address):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        library.virtual_gpu_pin(address, size)
        ledger.COUNTS["pinned_bytes"] += size
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return 0


# ---- memory of other processes

SHARED: dict[int, Tensor] = {}  # by address: shared memory of the host that a tensor's memory was moved to


def reduce_tensor(tensor: Tensor) -> Any:
    """Send a tensor to another process, which gets the same memory (CUDA IPC)."""
    if not tensor.is_cuda:
        return reductions.reduce_tensor(tensor)
    if torch.ops.virtual_gpu.is_received(tensor):
        raise RuntimeError("Attempted to send CUDA tensor received from another process; this is not supported")
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError("Cowardly refusing to serialize non-leaf tensor which requires_grad")
    ledger.wait("CUDA IPC")
    ledger.COUNTS["handles_sent"] += 1
    storage = tensor.untyped_storage()
    if (memory := SHARED.get(storage.data_ptr())) is None:
        memory = torch.empty(storage.nbytes(), dtype=torch.uint8)
        memory.untyped_storage().share_memory_()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        memory.copy_(torch.ops.virtual_gpu.host(whole))
        torch.ops.virtual_gpu.move_memory(tensor.detach(), memory)
        SHARED[memory.data_ptr()] = memory
    place = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
    return receive_tensor, (memory, place, tensor.device.index, type(tensor), tensor.requires_grad, os.getpid())


def receive_tensor(memory: Tensor, place: Any, gpu: int, kind: type, requires_grad: bool, sender: int) -> Tensor:
    if sender == os.getpid():
        raise RuntimeError("CUDA error: invalid device context (a handle is opened by the process that made it)")
    if text := os.environ.get("VIRTUAL_GPU_IPC_ERROR"):
        raise RuntimeError(text)
    ledger.COUNTS["handles_received"] += 1
    dtype, *layout = place
    host = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), *layout)
    tensor = torch.ops.virtual_gpu.device(host, gpu, True)
    return kind(tensor, requires_grad) if kind is torch.nn.Parameter else tensor.requires_grad_(requires_grad)


def clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage().copy_(storage)


# ---- torch.cuda


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else operations.full_device(device).index
    if not 0 <= index < NUM_GPUS:
        raise RuntimeError("CUDA error: invalid device ordinal")
    library.virtual_gpu_set_current(index)


def _exchange_device(index: int) -> int:
    before = library.virtual_gpu_current()
    if index >= 0:
        _set_device(index)
    return before


FUNCTIONS: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "is_initialized": lambda: True,
    "is_available": lambda: True,
    "device_count": lambda: NUM_GPUS,
    "current_device": lambda: library.virtual_gpu_current(),
    "set_device": _set_device,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": _exchange_device,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: "virtual GPU",
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="virtual GPU", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=80 * GIB, multi_processor_count=132
    ),
    "get_arch_list": lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    "mem_get_info": lambda device=None: (70 * GIB, 80 * GIB),
    "is_bf16_supported": lambda including_emulation=True: CAPABILITY >= (8, 0),
    "synchronize": lambda device=None: ledger.wait("torch.cuda.synchronize"),
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "current_stream": Stream,
    "default_stream": Stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "is_current_stream_capturing": lambda: bool(ledger.capturing),
    "cudart": lambda: Runtime,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
}


def install(compiled: Any) -> None:
    """Give this process `VIRTUAL_GPUS` virtual GPUs (1); called once, after torch is imported."""
    global library, _registered
    library = compiled
    _registered = operations.register(compiled)
    for name, function in FUNCTIONS.items():
        setattr(torch.cuda, name, function)
    torch.cuda._initialized = True
    torch.cuda.graphs.CUDAGraph = Graph
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    torch._C._host_emptyCache = lambda: None
    torch.UntypedStorage.clone = clone_storage
    ForkingPickler.register(Tensor, reduce_tensor)
    ForkingPickler.register(torch.nn.Parameter, reduce_tensor)
    use_gloo_for_nccl()
    ledger.report_at_the_end()


def use_gloo_for_nccl() -> None:
    """Collective operations on the GPU's tensors are those of gloo, on the same memory."""
    dist = torch.distributed
    init = dist.init_process_group

    def init_process_group(backend: str | None = None, **kwargs: Any) -> Any:
        return init("gloo" if backend and "nccl" in backend else backend, **kwargs)

    def on_host(collective: Any) -> Any:
        def to_host(value: Any) -> Any:
            if isinstance(value, list):
                return [to_host(item) for item in value]
            if not (isinstance(value, Tensor) and value.is_cuda):
                return value
            assert value.is_contiguous(), "NCCL takes contiguous tensors"
            ledger.COUNTS["nccl"] += 1
            return torch.ops.virtual_gpu.host(value)

        def call(*args: Any, **kwargs: Any) -> Any:
            return collective(*map(to_host, args), **{key: to_host(value) for key, value in kwargs.items()})

        return call

    dist.init_process_group = init_process_group
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter"):
        setattr(dist, name, on_host(getattr(dist, name)))
