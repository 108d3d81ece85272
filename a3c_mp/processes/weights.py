"""Versioned weights in shared memory: published by the learner, loaded by actors, each version whole.

There are two buffers. Version v is written to buffer v % 2 while readers still find version v - 1 in the other one.
A reader copies, then checks whether the learner has started to overwrite what it copied; if so it copies the newer
version. There is no lock, so a process killed at any instant leaves nothing locked. What the counters announce is seen
in its order, see `memory_order`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from a3c_mp.processes.memory_order import publish_counters, read_counters
from a3c_mp.processes.slots import pin, shared_bytes, shared_counters

PUBLISHED, WRITING = 0, 1


class Weights:
    """The two newest versions of the parameters and buffers of `net`, in shared memory.

    Version 0 has the values of `net`, which is `untrained` before its first update. The values are of `dtype`, bfloat16
    where actors compute in it. The memory is on `device`, by default that of `net`: a GPU's is shared by CUDA IPC; for
    a net on a GPU, that of the CPU is page-locked in this process.
    """

    def __init__(
        self, net: nn.Module, dtype: torch.dtype = torch.float32, untrained: bool = False,
        device: torch.device | None = None,
    ):  # fmt: skip
        self.untrained = untrained
        tensors = _tensors(net)
        assert all(t.is_floating_point() for t in tensors), "weights hold floating-point tensors only"
        self.shapes, self.sizes = [t.shape for t in tensors], [t.numel() for t in tensors]
        self.device, num = device or tensors[0].device, sum(self.sizes)
        memory = shared_bytes(2 * num * dtype.itemsize, self.device)
        if tensors[0].is_cuda and not memory.is_cuda:
            pin(memory, tensors[0].device)
        self.buffers = memory.view(dtype).view(2, num)
        self.versions = shared_counters(2).fill_(-1)
        self.publish(net)

    @property
    def version(self) -> int:
        """The newest version that is complete, from 0."""
        return int(read_counters(self.versions[PUBLISHED]))

    @property
    def _writing(self) -> int:
        """The version that is being written, or was last."""
        return int(read_counters(self.versions[WRITING]))

    def publish(self, net: nn.Module) -> int:
        """Write the values of `net` as the next version, and return its number; only the learner calls this."""
        version = self.version + 1
        publish_counters(self.versions[WRITING], version)
        tensors = _tensors(net)
        if tensors[0].device == self.buffers.device:
            torch._foreach_copy_(self._views(version), tensors)
        else:  # as one copy to the CPU instead of one for each tensor
            values = torch.cat([tensor.flatten() for tensor in tensors]).to(self.buffers.dtype)
            self.buffers[version % 2].copy_(values)  # waits for the GPU
        self._wait_for_copies()
        publish_counters(self.versions[PUBLISHED], version)
        return version

    def load(self, net: nn.Module, version: int | None = None) -> int:
        """Copy the newest version, or a given one, into `net`, and return its number.

        Raises LookupError if `version` is not among the two newest.
        """
        while True:
            found = self.version if version is None else version
            if version is not None and not max(self._writing - 1, 0) <= version <= self.version:
                raise LookupError(f"weights version {version} asked for, {self.version} is the newest of two")
            torch._foreach_copy_(_tensors(net), self._views(found))
            self._wait_for_copies()
            if self._writing < found + 2:  # otherwise the learner started to overwrite it meanwhile
                return found

    def read(self) -> tuple[int, Tensor]:
        """The newest version and its values, flat, in the order of the net's state_dict; for who publishes it."""
        return self.version, self.buffers[self.version % 2]

    def versions_in_flight(self, rollouts: int) -> list[int]:
        """Versions for the next rollouts of an actor that got one slot back after each of the latest versions."""
        return [max(self.version - rollouts + 1 + i, 0) for i in range(rollouts)]

    def state_dict(self) -> dict[str, Any]:
        """Both versions: after a resume, a deterministic actor acts with the older one where it did before."""
        return {"buffers": self.buffers.clone(), "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. Raises RuntimeError for a net of another size."""
        self.buffers.copy_(state["buffers"])
        self._wait_for_copies()
        self.versions[:] = state["version"]

    def _views(self, version: int) -> list[Tensor]:
        flat = self.buffers[version % 2].split(self.sizes)
        return [part.view(shape) for part, shape in zip(flat, self.shapes, strict=True)]

    def _wait_for_copies(self) -> None:
        if self.buffers.is_cuda:  # a version is written, or read, once the GPU has finished
            torch.cuda.current_stream(self.buffers.device).synchronize()


def _tensors(net: nn.Module) -> list[Tensor]:
    return [t.detach() for t in net.state_dict().values()]
