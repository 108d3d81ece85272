"""Collective operations among learners, on torch.distributed: gloo on the CPU, NCCL on GPUs."""

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from a3c_mp.errors import PeerLost

NCCL_SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # a lost peer raises; by default it aborts the process
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # `LearnerGroup.abort` does that (see `_abort_process_group`)
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that kills or holds up a process which takes long to end
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""of torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, 2.13; not run on GPUs"""

MEETING_POLL_SECONDS = 0.02
IF_BUSY = "; if they were only busy, raise --hang-seconds"


class Stateful(Protocol):
    """An object whose state can be saved and restored, as nets and optimizers are."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class LearnerGroup:
    """This learner's rank among `size` of them, and their collective operations: all call each, in the same order.

    One learner alone has its own values back. All operations raise PeerLost if another learner has died, or gave no
    answer in time.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size, self._cuda, self._is_aborted = rank, size, False, False

    def connect(
        self, place: str | tuple[str, int], gpu: int | None, seconds: float, look: Callable[[], object] = lambda: None
    ) -> None:
        """Connect to the others, which meet at a file that all can open, or at host and port of a `dist.TCPStore`.

        With a file, only the loopback interface is used, else the one that reaches the host. Gradients lie on this
        machine's `gpu` of that number, one for each learner, or with None on CPUs. `seconds` is the timeout of a
        collective operation. Learner 0 calls `look`, which may raise PeerLost, while it waits for the others.
        """
        from a3c_mp.processes.interfaces import LOOPBACK, interface_towards  # here, as few runs have several learners

        interface = LOOPBACK if isinstance(place, str) else interface_towards(place[0])
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
        os.environ |= NCCL_SETTINGS
        # torch sets this in a process that is deterministic already, as only learner 0 is; all must have the same.
        os.environ.setdefault("NCCL_ALGO", "^NVLS")
        self._cuda, timeout = gpu is not None, timedelta(seconds=seconds)
        with losing_peers():
            store = dist.FileStore(place, self.size) if isinstance(place, str) else dist.TCPStore(*place)
            store.set(f"here {self.rank}", "")
        deadline = time.monotonic() + seconds
        while self.rank == 0 and not self._have_come(store):  # torch's own wait notices neither signals nor deaths
            if time.monotonic() > deadline:
                raise PeerLost(f"not all learners have connected within {seconds:.0f} s{IF_BUSY}")
            look()
            time.sleep(MEETING_POLL_SECONDS)
        with losing_peers():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._cuda else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
            )
        # Connections are made by the first operation. NCCL's waits without a limit, so others have to be ready for it.
        first = torch.zeros(1, device="cpu" if gpu is None else f"cuda:{gpu}")
        self.all_gather_bytes(b"")
        self.all_reduce_mean([first])

    def _have_come(self, store: dist.Store) -> bool:
        with losing_peers():
            return bool(store.check([f"here {rank}" for rank in range(self.size)]))

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the learners, all in one operation."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        with losing_peers():
            self._wait(dist.all_reduce(flat, async_op=True))
        parts = (flat / self.size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def all_reduce_gradients(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Replace gradients and loss by their means: those of the union of all batches, if these have one size."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.all_reduce_mean([*(parameter.grad for parameter in parameters if parameter.grad is not None), loss])

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors [N, ...] of all learners, whose N may differ, concatenated in the order of ranks."""
        if self.size == 1:
            return tensor
        nums = [torch.empty(1, dtype=torch.int64, device=tensor.device) for _ in range(self.size)]
        with losing_peers():
            self._wait(dist.all_gather(nums, torch.full_like(nums[0], len(tensor)), async_op=True))
            padded = tensor.new_zeros(int(max(nums)), *tensor.shape[1:])  # the operation needs equal shapes
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            self._wait(dist.all_gather(parts, padded, async_op=True))
        return torch.cat([part[: int(num)] for part, num in zip(parts, nums, strict=True)])

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The data of all learners, of any length, in the order of ranks; nothing is pickled."""
        return [self.broadcast_bytes(data, rank) for rank in range(self.size)]

    def broadcast_bytes(self, data: bytes, source: int = 0) -> bytes:
        """The data of one learner; nothing is pickled. The others' `data` is not used."""
        if self.size == 1:
            return data
        size = torch.tensor([len(data)])
        with losing_peers():
            self._wait(dist.broadcast(size, source, async_op=True))
            buffer = from_bytes(data) if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
            self._wait(dist.broadcast(buffer, source, async_op=True))
        return buffer.numpy().tobytes()

    def _wait(self, work: Any) -> None:
        """Wait for the end of an operation. NCCL's host waits here alone, and its timeout counts nowhere else."""
        work.wait()
        if self._is_aborted:  # an operation that is aborted meanwhile may seem complete
            raise PeerLost("another learner has died")

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """A copy of one learner's tensor on the CPU; the others' have its shape and dtype, and are not used."""
        data = self.broadcast_bytes(tensor.numpy().tobytes(), source)
        return from_bytes(data).view(tensor.dtype).view(tensor.shape)

    def all_gather_object(self, message: Any) -> list[Any]:
        """The messages of all learners, pickled, in the order of ranks."""
        messages = [message] * self.size
        if self.size > 1:
            with losing_peers():
                dist.all_gather_object(messages, message)
        return messages

    def broadcast_state(self, *parts: Stateful) -> None:
        """Load the state of learner 0's `parts` (nets, optimizers, ...) into those of all learners."""
        buffer = io.BytesIO()  # as bytes: unpickled tensors would lie on learner 0's GPU
        if self.rank == 0 and self.size > 1:
            torch.save([part.state_dict() for part in parts], buffer)
        state = self.broadcast_bytes(buffer.getvalue())
        if self.rank != 0:
            states = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
            for part, saved in zip(parts, states, strict=True):
                part.load_state_dict(saved)

    def own_share(self, num: int) -> range:
        """The numbers of this learner's part of `num` things, such as actors; shares differ by 1 at most."""
        return range(self.rank * num // self.size, (self.rank + 1) * num // self.size)

    def abort(self) -> None:
        """NCCL: abort what is queued on the GPU (ncclCommAbort), so that waiting for it raises (not run on GPUs)."""
        if self._cuda and dist.is_initialized():
            self._is_aborted = True
            with suppress(RuntimeError):  # aborted already
                dist.distributed_c10d._get_default_group().abort()

    def leave(self) -> None:
        """Close the connections. With NCCL, `destroy_process_group` would wait for learners that may be gone."""
        if self.size > 1 and dist.is_initialized():
            with suppress(RuntimeError):  # NCCL's: not run on GPUs
                (dist.distributed_c10d._abort_process_group if self._cuda else dist.destroy_process_group)()


def from_bytes(data: bytes) -> Tensor:
    """A copy of bytes as a tensor, uint8 [len(data)]."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


@contextmanager
def losing_peers() -> Iterator[None]:
    """Turn errors of torch.distributed into PeerLost."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):  # this learner's own
        raise
    except RuntimeError as error:  # torch.distributed has no narrower class for a closed connection
        text = next(iter(str(error).splitlines()), "")
        text += IF_BUSY if "Timed out waiting" in text else ""
        raise PeerLost(f"another process of the group has died or does not answer ({text})") from error
