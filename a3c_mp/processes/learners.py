"""Learners in parallel: processes that compute gradients on data of their own and take every step together.

Learner 0 is the process that the user started. The others are spawned by it, hold nothing worth saving, and end when it
does. They meet through a file, and what they say to each other goes over the loopback interface only.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from a3c_mp.errors import PeerLost, Terminated, WorkerError
from a3c_mp.processes.spawn import SIGNALS, refused, signal_name, start_child
from a3c_mp.processes.workers import POLL_SECONDS, START_SECONDS

PEER_SECONDS = 120.0
"""longest time that a learner waits for the others, besides the time that an actor of theirs may hang"""
GLOO_SECONDS = 0.5
"""from the end of a learner to the end of the wait for it, where no closed connection ends that"""
DEATH_SECONDS = 2.0
"""from a broken connection to the end of the process behind it"""
STOP_SECONDS = 4.0
"""from a signal to the end of the wait for another learner"""
LOST_PEER = 3
"""exit code of a learner that ends because another one has"""
END_SECONDS = 3.0
"""longest time in which the other learners end their actors, before they are killed"""
LOOPBACK = "lo"
NCCL_SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # a lost peer raises; by default it aborts the process
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # `LearnerGroup.abort` does that (see `_abort_process_group`)
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that kills or holds up a process which takes long to end
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""of torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, 2.13; not run on GPUs"""


class RunState(Protocol):
    """What keeps count of a run."""

    args: Any
    steps: int
    updates: int

    def should_stop(self) -> bool: ...


class Stateful(Protocol):
    """What learners can share."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class LearnerGroup:
    """A learner's place among `size` of them. Everything here must be called by all of them, in the same order.

    A group of one talks to nobody: averages are what they were.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size, self._cuda = rank, size, False

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the learners, in one exchange."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        with _losing_peers():
            dist.all_reduce(flat)
        parts = (flat / self.size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def all_reduce_gradients(self, net: nn.Module, loss: Tensor) -> None:
        """With batches of one size, gradient and value of the mean loss over the union of all learners' batches."""
        self.all_reduce_mean([*(parameter.grad for parameter in net.parameters() if parameter.grad is not None), loss])

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors [N, ...] of all learners, one after the other: [size * N, ...]."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with _losing_peers():
            dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def all_gather_object(self, message: Any) -> list[Any]:
        """What every learner has to tell, in the order of their ranks."""
        messages = [message] * self.size
        if self.size > 1:
            with _losing_peers():
                dist.all_gather_object(messages, message)
        return messages

    def own_actors(self, num_actors: int) -> range:
        """The numbers of this learner's actors, out of those of all."""
        own = num_actors // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def broadcast_state(self, *parts: Stateful) -> None:
        """Have everyone go on from learner 0's state of these: weights, moments, actors."""
        buffer = io.BytesIO()  # as bytes: unpickled tensors would lie on learner 0's GPU
        if self.rank == 0 and self.size > 1:
            torch.save([part.state_dict() for part in parts], buffer)
        state = self.all_gather_object(buffer.getvalue())[0]
        if self.rank != 0:
            states = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
            for part, saved in zip(parts, states, strict=True):
                part.load_state_dict(saved)

    def _connect(self, meeting_point: str, cuda: bool, seconds: float) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        os.environ |= NCCL_SETTINGS
        self._cuda = cuda
        with _losing_peers():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=dist.FileStore(meeting_point, self.size),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=seconds),
            )
        self.all_reduce_mean([torch.zeros(1, device=f"cuda:{self.rank}" if cuda else "cpu")])  # connects; may fail

    def abort(self) -> None:
        """NCCL: end what is queued on the GPU (ncclCommAbort), so that waiting for it raises (not run on GPUs)."""
        if self._cuda and dist.is_initialized():
            with suppress(RuntimeError):  # aborted already
                dist.distributed_c10d._get_default_group().abort()

    def leave(self) -> None:
        """End the connections. No collective call, as `destroy_process_group` is with NCCL: others may be gone."""
        if self.size > 1 and dist.is_initialized():
            with suppress(RuntimeError):  # NCCL's: not run on GPUs
                (dist.distributed_c10d._abort_process_group if self._cuda else dist.destroy_process_group)()


@contextmanager
def _losing_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed has no narrower class for a closed connection
        raise PeerLost(next(iter(str(error).splitlines()), "")) from error


class Learners:
    """The learners besides this one, each running `target(group, *args)`; to be used in a `with` block.

    Args:
        num_learners: how many there are with this one; with 1 no process is started.
        target: a module-level function.
        args: passed on, pickled.
        cuda: whether gradients lie on GPUs, one for each learner.
        hang_seconds: how long an actor of another learner may hang before it is replaced.
        peer_seconds: a learner that lets the others wait longer than that besides is given up.
        should_stop: asked while the others start.
        finish: called at the end with the error, if any, before the others are ended: saves what is to be saved.

    Raises:
        PeerLost: another learner has died or gives no answer; says which, and why.
    """

    def __init__(
        self, num_learners: int, target: Callable[..., None], args: tuple, *, cuda: bool = False,
        hang_seconds: float = 0.0, peer_seconds: float = PEER_SECONDS, should_stop: Callable[[], bool] = lambda: False,
        finish: Callable[[BaseException | None], None] = lambda error: None,
    ):  # fmt: skip
        self.group = LearnerGroup(0, num_learners)
        self.target, self.args, self.cuda = target, args, cuda
        self.peer_seconds, self.should_stop, self.finish = hang_seconds + peer_seconds, should_stop, finish
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._signals_in: socket.socket | None = None
        self._leaving = threading.Event()

    @classmethod
    def of(cls, run: RunState, target: Callable[..., None]) -> Learners:
        """Learners that go on from where a run is, each with `target(group, args, steps, updates)`."""
        args = run.args
        return cls(
            args.num_learners, target, (args, run.steps, run.updates), cuda=args.cuda, hang_seconds=args.hang_seconds,
            should_stop=run.should_stop, finish=getattr(run, "finish", lambda error: None),
        )  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Of learners 1, 2, ..."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> LearnerGroup:
        if self.group.size == 1:
            return self.group
        signals, self._signals_in = socket.socketpair()
        self._signals_in.setblocking(False)
        signal.set_wakeup_fd(self._signals_in.fileno())
        threading.Thread(target=self._cut_short, args=(signals,), daemon=True).start()
        try:
            # Nothing is left of this file when the process ends. Open until then: torch's destructors use the path.
            meeting_point = f"/proc/{os.getpid()}/fd/{os.memfd_create('a3c_mp-learners')}"
            for rank in range(1, self.group.size):
                self._start(rank, meeting_point)
            self._wait_until_ready()
            threading.Thread(target=self._watch, args=(self.group.abort,), daemon=True).start()
            self.group._connect(meeting_point, self.cuda, self.peer_seconds)
            return self.group
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Find out who was lost, save, end the others. Raises PeerLost where one was, with its name."""
        self._leaving.set()
        lost = None
        try:
            if isinstance(error, PeerLost):
                self.group.abort()  # what waits on the GPU for a lost learner would hold up the saving
                self._await_deaths()
                lost = self._blame(error)
            if self.group.size > 1:
                self.finish(lost or error)
        finally:
            self._stop()
        if lost is not None:
            raise lost from None

    def _watch(self, abort: Callable[[], None]) -> None:
        """A thread: with NCCL nothing else tells this process, while it waits for a learner, that it has died."""
        sentinels = [process.sentinel for process in self._processes]
        while not self._leaving.is_set() and not connection.wait(sentinels, POLL_SECONDS):
            pass
        if not self._leaving.wait(GLOO_SECONDS):
            abort()

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
        group = LearnerGroup(rank, self.group.size)
        args = (self.target, group, self.args, child_end, meeting_point, self.cuda, self.peer_seconds)
        with child_end:
            try:
                process = start_child(_main, args, name=f"learner-{rank}", daemon=False)
            except OSError as error:  # EAGAIN, ENOMEM
                raise WorkerError(refused(f"learner {rank}", "--num-learners", error)) from error
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
                told.append(f"{name} was killed by {signal_name(-code)}")
            elif code not in (None, LOST_PEER):
                told.append(f"{name} ended with exit code {code}")
            elif code is None:
                silent.append(name)
        why = told or [f"no answer from {', '.join(silent) or 'the other learners'} ({error})"]
        return PeerLost("; ".join(why) + "; the others cannot go on without it")

    def _stop(self) -> None:
        """End the other learners, and with them their actors; those that do not end are killed."""
        for process in self._processes:
            process.terminate()
        self.group.leave()  # with gloo, the closed connections end what others wait for
        deadline, alive = time.monotonic() + END_SECONDS, self._processes
        while (alive := [process for process in alive if process.exitcode is None]) and time.monotonic() < deadline:
            connection.wait([process.sentinel for process in alive], POLL_SECONDS)
        for process in alive:
            process.kill()
        for process in self._processes:
            process.join()
        if self._signals_in is not None:
            signal.set_wakeup_fd(-1)
            self._signals_in.close()  # and with it the thread ends


def _unwind(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_IGN)
    raise Terminated


def _main(
    target: Callable[..., None], group: LearnerGroup, args: tuple, pipe: connection.Connection, meeting_point: str,
    cuda: bool, seconds: float,
) -> None:  # fmt: skip
    """What a learner other than the first does."""
    signal.signal(signal.SIGTERM, _unwind)
    try:
        pipe.send(None)  # ready
        group._connect(meeting_point, cuda, seconds)
        target(group, *args)
    except PeerLost:
        os._exit(LOST_PEER)  # at once: a process group that has lost a member may wait for it in its destructor
    except Terminated:  # its actors are gone by now
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        pipe.send(traceback.format_exc()[-2000:])
        os._exit(1)
