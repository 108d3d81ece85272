"""A parameter server: versioned weights in Ray's object store, published by the trainer, loaded by actors.

The server holds references to the two newest versions, never their bytes: Ray copies a version once to each node that
asks for it, and the processes there share it.
"""

import asyncio
import secrets
import time
from typing import Any

import torch
from torch import nn

from a3c_mp.cluster.session import ANSWER_SECONDS, STUCK_SECONDS, Session
from a3c_mp.processes.weights import Weights

PULL_SECONDS, RETRY_SECONDS = 5.0, 0.1  # longest wait of an actor for the server, and its pause where that fails
SEND_SECONDS = 1.0  # after which the trainer sends both versions again, in case the server is a new one
References = dict[int, Any]  # version -> reference to its values


class ParameterServer:
    """Ray actor that holds references to the two newest versions of the weights."""

    def __init__(self) -> None:
        self.references: References = {}
        self.changed = asyncio.Condition()
        self.start = secrets.token_hex(8)  # another one after a restart

    async def publish(self, references: References) -> str:
        """Add versions and keep the two newest; returns which start of the server it is."""
        async with self.changed:
            known = self.references | references
            self.references = {version: known[version] for version in sorted(known)[-2:]}
            self.changed.notify_all()
            return self.start

    async def pull(self, known: int, exact: int | None) -> tuple[int, Any] | None:
        """Return (version, reference): the newest, or None if that is `known`; or version `exact`, once it is there."""
        async with self.changed:
            await self.changed.wait_for(lambda: max(self.references, default=-1) >= max(exact or 0, 0))
            version = max(self.references) if exact is None else exact
            return None if version == known else (version, self.references[version])


class Publisher(Weights):
    """The trainer's end: weights that are published to a parameter server as well, and again once it was restarted."""

    def __init__(self, session: Session, net: nn.Module, dtype: torch.dtype, untrained: bool):
        self.session = session
        options = {"num_cpus": 0, "max_concurrency": 1000, "max_restarts": -1, "max_task_retries": -1}
        # Ray restarts a server that dies, and repeats calls that it has not answered.
        self.server = session.actor_class(ParameterServer, **options).remote()
        self._references: References = {}
        self._answer: Any = None  # reference to that of the latest call
        self._looked = time.monotonic()
        self._start = ""  # of the server, by its last answer
        super().__init__(net, dtype, untrained, torch.device("cpu"))
        session.duties.append(self.look_after)

    def publish(self, net: nn.Module) -> int:
        version = super().publish(net)
        self._share(version)
        return version

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for version in range(max(self.version - 1, 0), self.version + 1):
            self._share(version)

    def look_after(self) -> None:
        """Now and then, see which server answers, and send both versions again; called while the trainer waits."""
        silence = time.monotonic() - self._looked
        patience = ANSWER_SECONDS if silence > STUCK_SECONDS else 0.0  # the trainer itself may have been away
        if silence >= SEND_SECONDS and self.session.is_done(self._answer, patience):
            start = self.session.ray.get(self._answer)
            if self._start not in ("", start):
                self.session.warn("the parameter server died; another one is started")
            self._start, self._looked = start, time.monotonic()
            self._answer = self.server.publish.remote(self._references)
        elif silence > STUCK_SECONDS:
            self.session.kill(self.server)  # as a stopped process it would answer nothing more
            self._looked = time.monotonic()

    def _share(self, version: int) -> None:
        values = self.buffers[version % 2].view(torch.uint8).numpy()
        new = {version: self.session.ray.put(values)}
        self._references = {v: reference for v, reference in self._references.items() if v == version - 1} | new
        self._answer = self.server.publish.remote(new)


class Reader:
    """An actor's end: loads the weights that the trainer publishes."""

    def __init__(self, weights: Publisher):
        self.dtype, self.untrained, self.version = weights.buffers.dtype, weights.untrained, -1
        self.device = torch.device("cpu")  # of the net; another one where the actor has a GPU
        self._values: Any = None  # of that version; a copy, as what belongs to the store would stay there
        self._server = weights.server

    def load(self, net: nn.Module, exact: int | None = None) -> int:
        """Copy the newest version, or exactly that one, into `net`, and return it.

        While the server is gone, the net gets the weights that came last, unless there are none or `exact` is another.
        """
        import ray

        while True:
            try:
                found = ray.get(self._server.pull.remote(self.version, exact), timeout=PULL_SECONDS)
                if found is not None:
                    version, reference = found
                    self._values, self.version = ray.get(reference).copy(), version
                break
            except ray.exceptions.RayError:
                time.sleep(RETRY_SECONDS)
                if self.version >= 0 and exact in (None, self.version):
                    break
        tensors = [tensor.detach() for tensor in net.state_dict().values()]
        flat = torch.from_numpy(self._values).to(self.device).view(self.dtype)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
        return self.version
