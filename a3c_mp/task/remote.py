"""A collector of another machine: it fills a slot of its own, and requests the weights from the learner."""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch import Tensor, nn

from a3c_mp.errors import ConfigError, RequestError
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.task.exchange import JOIN, NO_PLACE, SETUP, NodeChannel, Setup
from a3c_mp.task.joining import REPORT_NAME, REPORT_RESULT
from a3c_mp.task.node import Node

WEIGHTS = "slots.weights"
"""request (version that the asking node has): (newest version, its values or None if it is the same)"""


class RemoteChannel(NodeChannel):
    """The end of a collector of another machine: it fills a slot of its own, whose fields travel with the message.

    Args:
        node: of this process.
        slots: one slot.

    Raises:
        ConfigError: the learner has no place for another collector; also from later looks at messages, where another
            one has taken its place while the connection was lost.
    """

    def __init__(self, node: Node, slots: Slots):
        self._has_place = False
        node.handle(SETUP, self._on_setup, [int, list], sender="node.0")
        node.handle(NO_PLACE, self._on_no_place, [int], sender="node.0")
        super().__init__(node, None, slots)
        self._ask_again()
        while not self._has_place:
            node.wait()
        node.starting()  # its first heartbeat was long ago; its environments are not made yet

    def send(self, slot: int, payload: Any) -> None:
        super().send(slot, payload)
        self.node.report(REPORT_RESULT)

    def _ask_again(self) -> None:
        self.node.send(JOIN, socket.gethostname(), to="node.0")

    def _on_setup(self, sender: str, worker: int, seed_key: list[int]) -> None:
        self._has_place = True
        self.node.report(REPORT_NAME, f"collector {worker}")
        self._set_up(Setup(worker, tuple(seed_key)))

    def _on_no_place(self, sender: str, number: int) -> None:
        why = f"its {number} places for collectors of other machines are taken"
        fix = "start it with more --remote-actors, or attach fewer (--num-actors)"
        raise ConfigError("attach-to", self.node.router.endpoint.dials[0], why, fix)


class RemoteWeights:
    """The learner's newest weights, requested by a node of another machine; used as `Weights` is.

    Args:
        node: of this process.
        dtype: that its actors compute in; the learner's may be another.
        timeout: longest wait for an answer, before the next request (s).
    """

    def __init__(self, node: Node, dtype: torch.dtype = torch.float32, timeout: float = 60.0):
        self.node, self.timeout = node, timeout
        self.buffers = torch.empty(0, dtype=dtype)  # of the dtype and on the device that actors compute in
        self.device = self.buffers.device
        self._version, self._values = -1, torch.empty(0)

    def load(self, net: nn.Module, version: int | None = None) -> int:
        """Copy the newest version into `net`, and return it. Waits while the learner cannot be reached.

        When the task ends meanwhile, the weights stay those of the last call.
        """
        while not self.node.finishing:
            try:
                newest, values = self.node.router.request(
                    WEIGHTS, self._version, to="node.0", timeout=self.timeout, beat=self.node.beat
                )
            except (RequestError, TimeoutError):  # it was lost, or has just started
                self.node.wait()
                continue
            if values is not None:
                self._version, self._values = newest, values
                self._copy_to(net)
            break
        return self._version

    def _copy_to(self, net: nn.Module) -> None:
        tensors = [tensor.detach() for tensor in net.state_dict().values()]
        parts = self._values.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])


def serve_weights(node: Node, weights: Weights) -> None:
    """Answer the requests of `RemoteWeights`, on the router's thread."""

    def answer(has_version: int) -> tuple[int, Tensor | None]:
        version = weights.version
        return (version, None) if version == has_version else weights.read()

    node.router.serve(WEIGHTS, answer)
