"""Learners in parallel: processes that compute gradients on data of their own and take every step together.

Learner 0 is the process that the user started. The others are spawned by it, hold nothing worth saving, and end when it
does. They meet through a file, and what they say to each other goes over the loopback interface only.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from a3c_mp.children import SIGNALS, start_child
from a3c_mp.workers import POLL_SECONDS, START_SECONDS, WorkerError

PEER_SECONDS = 120.0
"""longest time that a learner waits for the others, besides the time that an actor of theirs may hang"""
DEATH_SECONDS = 2.0
"""from a broken connection to the end of the process behind it"""
STOP_SECONDS = 4.0
"""from a signal to the end of the wait for another learner"""
LOST_PEER = 3
"""exit code of a learner that ends because another one has"""
LOOPBACK = "lo"


class Books(Protocol):
    """What keeps count of a run."""

    steps: int
    updates: int

    def should_stop(self) -> bool: ...


class Stateful(Protocol):
    """What learners can share."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class PeerLost(WorkerError):
    """Another learner has died or does not answer."""


class Team:
    """A learner's place among `size` of them. Everything here must be called by all of them, in the same order.

    A team of one talks to nobody: averages are what they were.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the learners, in one exchange."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        with _losing_peers():
            dist.all_reduce(flat)
        parts = (flat / self.size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def average_gradients(self, net: nn.Module, loss: Tensor) -> None:
        """With batches of one size, gradient and value of the mean loss over the union of all learners' batches."""
        self.average([*(parameter.grad for parameter in net.parameters() if parameter.grad is not None), loss])

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors [N, ...] of all learners, one after the other: [size * N, ...]."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with _losing_peers():
            dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def exchange(self, message: Any) -> list[Any]:
        """What every learner has to tell, in the order of their ranks."""
        messages = [message] * self.size
        if self.size > 1:
            with _losing_peers():
                dist.all_gather_object(messages, message)
        return messages

    def synchronize(self, *parts: Stateful) -> None:
        """Have everyone go on from learner 0's state of these: weights, moments, actors."""
        buffer = io.BytesIO()  # as bytes: unpickled tensors would lie on learner 0's GPU
        if self.rank == 0 and self.size > 1:
            torch.save([part.state_dict() for part in parts], buffer)
        state = self.exchange(buffer.getvalue())[0]
        if self.rank != 0:
            states = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
            for part, saved in zip(parts, states, strict=True):
                part.load_state_dict(saved)

    def _connect(self, meeting_point: str, cuda: bool, seconds: float) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a lost peer raises; the default aborts the process
        with _losing_peers():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=dist.FileStore(meeting_point, self.size),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=seconds),
            )
        # Once this is through, everybody has met everybody, and the file that they met through may go.
        self.average([torch.zeros(1, device=f"cuda:{self.rank}" if cuda else "cpu")])


@contextmanager
def _losing_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed has no narrower class for a closed connection
        raise PeerLost(next(iter(str(error).splitlines()), "")) from error


class Learners:
    """The learners besides this one, each running `target(team, *args)`; to be used in a `with` block.

    Args:
        num_learners: how many there are with this one; with 1 no process is started.
        target: a module-level function.
        args: passed on, pickled.
        cuda: whether gradients lie on GPUs, one for each learner.
        hang_seconds: how long an actor of another learner may hang before it is replaced.
        peer_seconds: a learner that lets the others wait longer than that besides is given up.
        should_stop: asked while the others start.

    Raises:
        PeerLost: another learner has died or gives no answer; says which, and why.
    """

    def __init__(
        self, num_learners: int, target: Callable[..., None], args: tuple, *, cuda: bool = False,
        hang_seconds: float = 0.0, peer_seconds: float = PEER_SECONDS, should_stop: Callable[[], bool] = lambda: False,
    ):  # fmt: skip
        self.team = Team(0, num_learners)
        self.target, self.args, self.cuda = target, args, cuda
        self.peer_seconds, self.should_stop = hang_seconds + peer_seconds, should_stop
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._signals_in: socket.socket | None = None
        self._leaving = threading.Event()

    @classmethod
    def of(cls, run: Books, num_learners: int, target: Callable[..., None], args: Any) -> Learners:
        """Learners that go on from where a run is, each with `target(team, args, steps, updates)`."""
        return cls(
            num_learners, target, (args, run.steps, run.updates), cuda=args.cuda, hang_seconds=args.hang_seconds,
            should_stop=run.should_stop,
        )  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Of learners 1, 2, ..."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> Team:
        if self.team.size == 1:
            return self.team
        signals, self._signals_in = socket.socketpair()
        self._signals_in.setblocking(False)
        signal.set_wakeup_fd(self._signals_in.fileno())
        threading.Thread(target=self._cut_short, args=(signals,), daemon=True).start()
        try:
            with tempfile.TemporaryDirectory(prefix="a3c_mp-") as folder:
                for rank in range(1, self.team.size):
                    self._start(rank, f"{folder}/learners")
                self._wait_until_ready()
                self.team._connect(f"{folder}/learners", self.cuda, self.peer_seconds)
        except PeerLost as error:
            self._await_deaths()
            lost = self._blame(error)
            self._stop()
            raise lost from None
        except BaseException:
            self._stop()
            raise
        return self.team

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        lost = None
        if isinstance(error, PeerLost):
            self._await_deaths()
            lost = self._blame(error)
        self._stop()
        if lost is not None:
            raise lost from None

    def _cut_short(self, signals: socket.socket) -> None:
        """A thread: Python heeds no signal while torch waits for another learner, so end what it waits for."""
        with signals:
            while (signum := signals.recv(1)) and signum[0] not in SIGNALS:
                pass
            if signum and not self._leaving.wait(STOP_SECONDS):
                for process in self._processes:
                    process.kill()
            while signals.recv(64):  # until `_stop` closes the other end: more of them must find it open
                pass

    def _start(self, rank: int, meeting_point: str) -> None:
        pipe, child_end = mp.get_context("spawn").Pipe(duplex=False)
        team = Team(rank, self.team.size)
        args = (self.target, team, self.args, child_end, meeting_point, self.cuda, self.peer_seconds)
        process = start_child(_main, args, name=f"learner-{rank}", daemon=False)
        child_end.close()
        self._processes.append(process)
        self._pipes.append(pipe)

    def _wait_until_ready(self) -> None:
        """Every learner says so once it runs; one that dies before closes its pipe."""
        deadline, waiting = time.monotonic() + START_SECONDS, list(self._pipes)
        while waiting:
            ready = [pipe for pipe in connection.wait(waiting, POLL_SECONDS) if isinstance(pipe, connection.Connection)]
            if self.should_stop():
                raise PeerLost("asked to stop before all learners had started")
            if not ready and time.monotonic() > deadline:
                raise PeerLost(f"not all learners have started within {START_SECONDS:.0f} s")
            for pipe in ready:
                waiting.remove(pipe)
                with suppress(EOFError, OSError):
                    if pipe.recv() is None:
                        continue
                raise PeerLost("a learner has ended before it began")

    def _await_deaths(self) -> None:
        """Let those that are about to die do so, until one is found that did not just follow another."""
        deadline, alive = time.monotonic() + DEATH_SECONDS, list(self._processes)
        while alive and not self.should_stop() and (left := deadline - time.monotonic()) > 0:
            connection.wait([process.sentinel for process in alive], left)
            if any(process.exitcode not in (None, LOST_PEER) for process in alive):
                return
            alive = [process for process in alive if process.exitcode is None]

    def _blame(self, error: BaseException) -> PeerLost:
        """The error that names who was lost, and why."""
        told, silent = [], []
        for rank, (process, pipe) in enumerate(zip(self._processes, self._pipes, strict=True), start=1):
            name, code, text = f"learner {rank} (pid {process.pid})", process.exitcode, None
            with suppress(EOFError, OSError):
                while pipe.poll():
                    text = pipe.recv() or text
            if text is not None:
                told.append(f"{name} failed:\n{text}")
            elif code is not None and code < 0:
                told.append(f"{name} was killed by {signal.Signals(-code).name}")
            elif code not in (None, LOST_PEER):
                told.append(f"{name} ended with exit code {code}")
            elif code is None:
                silent.append(name)
        why = told or [f"no answer from {', '.join(silent) or 'the other learners'} ({error})"]
        return PeerLost("; ".join(why) + "; the others cannot go on without it")

    def _stop(self) -> None:
        """End the other learners, and with them their actors. They hold nothing worth saving, so nobody asks them."""
        self._leaving.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self.team.size > 1 and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        if self._signals_in is not None:
            signal.set_wakeup_fd(-1)
            self._signals_in.close()  # and with it the thread ends


def _main(
    target: Callable[..., None], team: Team, args: tuple, pipe: connection.Connection, meeting_point: str, cuda: bool,
    seconds: float,
) -> None:  # fmt: skip
    """What a learner other than the first does."""
    try:
        pipe.send(None)  # ready
        team._connect(meeting_point, cuda, seconds)
        target(team, *args)
    except PeerLost:
        os._exit(LOST_PEER)  # at once: a process group that has lost a member may wait for it in its destructor
    except Exception:
        pipe.send(traceback.format_exc()[-2000:])
        os._exit(1)
