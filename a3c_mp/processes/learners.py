"""Several learners: processes that compute gradients on data of their own and take every step together.

Learner 0 is the process that the user started (on Ray: a child of the driver). It spawns the others, which hold nothing
worth saving and end when it does. They connect through a file, and communicate over the loopback interface only.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from typing import Any

import torch.multiprocessing as mp

from a3c_mp._bootstrap import open_memory
from a3c_mp.errors import PeerLost, WorkerError
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.spawn import ERROR, SIGNALS, run_supervised, start_child
from a3c_mp.processes.supervisor import START_SECONDS, WAIT_SECONDS, Child, await_end, how_ended, start_seconds

GLOO_SECONDS = 0.5  # from the end of a learner to the end of the wait for it, where no closed connection ends that
DEATH_SECONDS = 2.0  # from a broken connection to the end of the process behind it
SIGNAL_SECONDS = 4.0  # from a signal to the end of the wait for another learner
LEARNER_CLOSE_SECONDS = 3.0  # longest time in which the other learners end their actors, before they are killed
LOST_PEER = 3  # exit code of a learner that ends because another one has
READY = "ready"  # kind of the message `(READY,)`, the first one of a learner


class Learners:
    """Learners 1, 2, ... of a run, which continue from its progress: `target(group, args, steps, updates, *parts)`.

    To be used in a `with` block of learner 0, which gives its group. At the end `run.finish` saves what is to be saved,
    before the others are ended. `target` is a module-level function, `parts` are pickled. PeerLost is raised where
    another learner has died or gives no answer, and says which, and why.
    """

    def __init__(self, run: Any, target: Callable[..., None], *parts: Any):
        self.run, self.target, self.parts = run, target, parts
        args, size = run.args, run.args.num_learners
        self.group = LearnerGroup(0, size)
        self.peer_seconds = args.hang_seconds + start_seconds(args.num_actors // size)
        """a learner that keeps the others waiting for longer ends the run: an actor may hang, its successor starts"""
        ranks = range(1, size)
        self._others = [Child(f"learner {rank}", partial(self._launch, rank), "--num-learners") for rank in ranks]
        self._leaving = threading.Event()
        self._lost: WorkerError | None = None
        self._first_errors: dict[str, list[str]] = {}  # of learners that failed before they were ready

    @property
    def processes(self) -> list[Any]:
        """Of learners 1, 2, ..., as far as they have been started."""
        return [child.process for child in self._others if child.process is not None]

    def __enter__(self) -> LearnerGroup:
        # Python writes the numbers of signals into this pipe, also while torch waits.
        reader, self._signals = os.pipe2(os.O_NONBLOCK)
        os.set_blocking(reader, True)
        self._wakeup_before = -1
        with suppress(ValueError):  # not on the main thread, which gets the signals
            self._wakeup_before = signal.set_wakeup_fd(self._signals)
        threading.Thread(target=self._kill_after_signal, args=(reader,), daemon=True).start()
        try:
            self._place = self._meeting_place()
            for child in self._others:
                child.start()
            self._wait_until_ready()
            threading.Thread(target=self._abort_after_death, daemon=True).start()
            self.group.connect(*self._rendezvous(0), self._check_meeting)
            return self.group
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Find out who was lost, save, end the others. Raises PeerLost where one was, with its name."""
        try:
            self.run.finish(self.explain(error))
        finally:
            self._stop()
        if self._lost is not None:
            raise self._lost from None

    def explain(self, error: BaseException | None) -> BaseException | None:
        """The error that names the learner that was lost, if all that an error says is that one was."""
        self._leaving.set()
        if isinstance(error, PeerLost) and self._lost is None:
            self.group.abort()  # what waits on the GPU for a lost learner would hold up the saving
            self._await_deaths()
            self._lost = self._name_lost(error)
        return self._lost or error

    def _meeting_place(self) -> Any:
        # Nothing is left of this file when the process ends. Open until then: torch's destructors use the path.
        return f"/proc/{os.getpid()}/fd/{open_memory('a3c_mp-learners')}"

    def _rendezvous(self, rank: int) -> tuple[Any, int | None, float]:
        """Arguments of `LearnerGroup.connect`."""
        args = self.run.args
        return self._place, args.gpu_of(rank) if args.cuda else None, self.peer_seconds

    def _launch(self, rank: int) -> tuple[Any, Any]:
        pipe, child_end = mp.Pipe(duplex=False)
        group = LearnerGroup(rank, self.group.size)
        args = self.run.args, self.run.steps, self.run.updates, *self.parts
        with child_end:
            main_args = (self.target, group, args, child_end, self._rendezvous(rank))
            return start_child(run_learner, main_args, name=f"learner-{rank}", daemon=False), pipe

    def _wait_until_ready(self) -> None:
        """Wait for the first message of every learner; the pipe of one that dies before is closed."""
        deadline = time.monotonic() + START_SECONDS
        for child in self._others:
            while not child.pipe.poll(WAIT_SECONDS):
                if self.run.should_stop():
                    raise PeerLost("asked to stop before all learners had started")
                if self._waits_for_place(child):
                    deadline = time.monotonic() + START_SECONDS
                if time.monotonic() > deadline:
                    raise PeerLost(f"not all learners have started within {START_SECONDS:.0f} s")
            if (first := next(child.messages(), (None, ""))) != (READY,):
                self._first_errors[child.name] = [first[1]] if first[0] == ERROR else []
                raise PeerLost(f"{child} ended before it was ready")

    def _check_meeting(self) -> None:
        """Raise PeerLost if learners that have started, but are not connected, cannot be waited for."""
        if self.run.should_stop():
            raise PeerLost("asked to stop before all learners had connected")
        if any(not process.is_alive() for process in self.processes):
            raise PeerLost("a learner ended before it had connected")

    def _waits_for_place(self, child: Child) -> bool:
        return False

    def _await_deaths(self) -> None:
        """Wait for the processes that are about to die, until one is found that did not just follow another."""
        deadline, alive = time.monotonic() + DEATH_SECONDS, self.processes
        while alive and not self.run.should_stop() and (left := deadline - time.monotonic()) > 0:
            connection.wait([process.sentinel for process in alive], left)
            if any(process.exitcode not in (None, LOST_PEER) for process in alive):
                return
            alive = [process for process in alive if process.exitcode is None]

    def _name_lost(self, error: BaseException) -> WorkerError:
        """The error that names who was lost, and why."""
        reasons, silent = [], []
        for child in self._others:
            texts = [message[1] for message in child.messages() if message[0] == ERROR]
            texts = texts or self._first_errors.get(child.name, [])
            if texts:
                reasons.append(f"{child} failed:\n{texts[-1]}")
            elif child.process.exitcode is None:
                silent.append(str(child))
            elif child.process.exitcode != LOST_PEER:
                reasons.append(f"{child} {self._how_ended(child.process)}")
        reasons = reasons or [f"no answer from {', '.join(silent) or 'the other learners'} ({error})"]
        return PeerLost(f"{'; '.join(reasons)}; all learners end, because they take every step together")

    def _how_ended(self, process: Any) -> str:
        return how_ended(process.exitcode)

    def _stop(self) -> None:
        """End the other learners, and with them their actors."""
        for process in self.processes:
            process.terminate()
        self.group.leave()  # with gloo, the closed connections end what others wait for
        await_end(self.processes, LEARNER_CLOSE_SECONDS)
        with suppress(ValueError):
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._signals)  # and with it the thread ends

    # ---- threads: Python runs no signal handler, and notices no death, while torch waits for another learner

    def _abort_after_death(self) -> None:
        """Abort the wait for a learner that has died; with gloo, a closed connection has done that before."""
        sentinels = [process.sentinel for process in self.processes]
        while not self._leaving.is_set() and not connection.wait(sentinels, WAIT_SECONDS):
            pass
        if not self._leaving.wait(GLOO_SECONDS):
            self.group.abort()

    def _kill_after_signal(self, signals: int) -> None:
        """Kill the others once a signal has come and this process still waits for them."""
        while number := os.read(signals, 1):  # until `_stop` closes the other end
            if number[0] in SIGNALS and not self._leaving.wait(SIGNAL_SECONDS):
                for process in self.processes:
                    process.kill()
        os.close(signals)


def run_learner(
    target: Callable[..., None], group: LearnerGroup, args: tuple, pipe: connection.Connection, rendezvous: tuple
) -> None:
    """Entry point of the process of a learner besides the first."""

    def main() -> None:
        try:
            pipe.send((READY,))
            group.connect(*rendezvous)
            target(group, *args)
        except PeerLost:
            os._exit(LOST_PEER)  # at once: a process group that has lost a member may wait for it in its destructor

    run_supervised(main, pipe, leave=os._exit)
