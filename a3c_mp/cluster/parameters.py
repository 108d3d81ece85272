"""A parameter server: versioned weights in Ray's object store, published by the trainer, loaded by actors.

The server holds references to the two newest versions, never their bytes: Ray copies a version once to each node that
asks for it, and the processes there share it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

from a3c_mp.cluster.session import Session
from a3c_mp.processes.weights import Weights

SERVER = "parameter-server"
PULL_SECONDS = 5.0
"""longest wait for an answer of the server, after which an actor goes on with the weights that it has"""

RETRY_SECONDS = 0.1
"""pause of an actor that waits for another server"""


class ParameterServer:
    """Actor that holds references to the two newest versions of the weights."""

    def __init__(self) -> None:
        self.references: dict[int, list[Any]] = {}
        self.changed = asyncio.Condition()

    async def publish(self, version: int, reference: list[Any]) -> None:
        """Take a version; the one before the last is forgotten."""
        async with self.changed:
            self.references[version] = reference
            self.references = {v: self.references[v] for v in sorted(self.references)[-2:]}
            self.changed.notify_all()

    async def pull(self, known: int, exact: int | None = None) -> tuple[int, list[Any]] | None:
        """Return (version, its reference): the newest, or None if that is `known`; or `exact`, once it is there."""
        async with self.changed:
            await self.changed.wait_for(lambda: max(self.references, default=-1) >= max(exact or 0, 0))
            version = max(self.references) if exact is None else exact
            return None if version == known else (version, self.references[version])


class Publisher(Weights):
    """The trainer's end: weights that are published to a parameter server as well.

    Args:
        session: the connection to Ray; the server is started in it.
        net, dtype, untrained: as of `Weights`.
    """

    def __init__(self, session: Session, net: nn.Module, dtype: torch.dtype = torch.float32, untrained: bool = False):
        self.session = session
        self._references: dict[int, Any] = {}  # of the two newest versions
        self._server: Any = None
        self._sent: deque[tuple[Any, float]] = deque()  # references to answers of the server, when it was asked
        super().__init__(net, dtype, untrained)
        session.duties.append(self.look_after)

    def publish(self, net: nn.Module) -> int:
        """Publish the values of `net` as the next version, and return it."""
        version = super().publish(net)
        self._share(version)
        return version

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._references.clear()
        for version in range(max(self.version - 1, 0), self.version + 1):
            self._share(version)

    def _share(self, version: int) -> None:
        """Put a version into the object store, and send its reference to the server."""
        values = self.buffers[version % 2].cpu().view(torch.uint8).numpy()
        older = {v: ref for v, ref in self._references.items() if v == version - 1}
        self._references = {**older, version: self.session.ray.put(values)}
        if self._server is None:
            self._start_server()
        else:
            self._send(version)

    def _send(self, version: int) -> None:
        answer = self._server.publish.remote(version, [self._references[version]])
        self._sent.append((answer, time.monotonic()))

    def _start_server(self) -> None:
        """Start a server and send it both versions; while Ray still knows a lost one by its name, nothing happens."""
        ray = self.session.ray
        try:
            self._server = self.session.start_actor(ParameterServer, (), num_cpus=0, name=SERVER, max_concurrency=1000)
        except ray.exceptions.ActorAlreadyExistsError:
            return
        for version in self._references:
            self._send(version)

    def look_after(self) -> None:
        """Start another server if the one there was has died, or does not answer; called while the trainer waits."""
        ray = self.session.ray
        if self._server is None:
            self._start_server()
        while self._sent:
            answer, since = self._sent[0]
            if not ray.wait([answer], timeout=0)[0]:
                self.session.end_if_stuck(self._server, since)
                return
            try:
                ray.get(answer)
                self._sent.popleft()
                self.session.note_answer(self._server)
            except ray.exceptions.RayError:
                self.session.log.warning("the parameter server died; another one is started")
                self._server = None
                self._sent.clear()
                self._start_server()


class Reader:
    """An actor's end: loads the weights that the trainer publishes.

    Args:
        dtype: of the values.
        untrained: whether version 0 is that of a net before its first update.
    """

    def __init__(self, dtype: torch.dtype, untrained: bool = False):
        self.dtype, self.untrained, self.version = dtype, untrained, -1
        self._server: Any = None

    def load(self, net: nn.Module, exact: int | None = None) -> int:
        """Copy the newest version, or exactly that one, into `net`, and return it.

        While the server is gone, the net keeps the weights that it has, unless it has none or `exact` is asked for.
        """
        import ray

        while True:
            try:
                if self._server is None:
                    self._server = ray.get_actor(SERVER)
                found = ray.get(self._server.pull.remote(self.version, exact), timeout=PULL_SECONDS)
                if found is not None:
                    self.version, (reference,) = found
                    self._copy(net, ray.get(reference))
                return self.version
            except (ray.exceptions.RayError, ValueError):  # a ValueError: no server of that name
                self._server = None
                time.sleep(RETRY_SECONDS)
                if self.version >= 0 and exact in (None, self.version):
                    return self.version

    def _copy(self, net: nn.Module, values: np.ndarray) -> None:
        tensors = [tensor.detach() for tensor in net.state_dict().values()]
        flat = torch.from_numpy(values.copy()).view(self.dtype).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, flat, strict=True):
            tensor.copy_(part.view(tensor.shape))
