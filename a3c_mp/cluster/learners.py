"""Learners 1, 2, ... of a run on the nodes of a Ray cluster; learner 0 is a child of the run's driver.

Gradients go from learner to learner, by gloo or NCCL, over the network interfaces of their nodes, not through Ray.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from typing import Any

import torch.multiprocessing as mp
from torch.distributed import TCPStore

from a3c_mp.cluster.placement import Resources
from a3c_mp.cluster.session import KILL_SECONDS, Session
from a3c_mp.errors import A3CError, PeerLost, WorkerError
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.learners import LOST_PEER, READY, Learners
from a3c_mp.processes.spawn import ERROR
from a3c_mp.processes.supervisor import START_SECONDS, Child


class ActorSession(Session):
    """The connection that the process of a Ray actor has already."""

    def _connect(self) -> None:
        import ray

        self.ray, self._address = ray, ray.get_runtime_context().gcs_address

    def __exit__(self, *exc: object) -> None:
        self._ending.set()


class RayLearner:
    """Ray actor: the process of a learner besides the first."""

    def find(self) -> tuple[int, str]:
        """Its process and node."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id()

    def run(
        self, target: Callable[..., None], group: LearnerGroup, rendezvous: tuple, placing: tuple, args: tuple
    ) -> str:
        """Run `target(group, session, *args)`; returns why that is not possible here, if it is not."""
        try:
            cluster, placement, is_restart = placing  # those of learner 0's session
            with ActorSession(cluster, print) as session:
                session.placement, session.is_restart = placement, is_restart
                group.connect(*rendezvous)
                target(group, session, *args)
        except PeerLost:
            pass  # learner 0 has ended, or finds out who has
        except A3CError as error:
            return str(error)
        return ""


class RayProcess:
    """What `Learners` needs of a process, of a learner that is a Ray actor; messages come through a pipe as well."""

    def __init__(self, session: Session, actor: Any, run: tuple, pipe: connection.Connection):
        """`run` are the arguments of `RayLearner.run`."""
        self.session, self.actor = session, actor
        self.pid, self.exitcode = "unknown", None  # type: tuple[int | str, int | None]
        self.how, self.has_failed = "", False  # how it died; whether a restart would not help
        self.sentinel, self._ended = mp.Pipe(duplex=False)
        answers = actor.find.remote(), actor.run.remote(*run)
        threading.Thread(target=self._watch, args=(*answers, pipe), daemon=True).start()

    def _watch(self, found: Any, run: Any, pipe: connection.Connection) -> None:
        """Wait for its end on a thread: torch waits for learners, too."""
        ray, code, node, where, failure = self.session.ray, 1, "", "", ""
        try:
            self.pid, node = ray.get(found)
            where = self.session.state.nodes.get(node, "a node that is gone")
            pipe.send((READY,))
            failure = ray.get(run)
            code = 1 if failure else LOST_PEER
        except ray.exceptions.RayTaskError as error:
            failure = str(error)
        except Exception as error:  # Ray's: it is dead
            is_lost = "node has died" in str(error) or node not in self.session.state.nodes
            how = "was lost with its node" if is_lost else "died"
            self.how = f"at {where} {how}" if node else "died at its start"
            if getattr(error, "actor_init_failed", False):
                failure = str(error)
        if failure:
            self.has_failed = True
            with suppress(OSError):  # its reader has gone
                pipe.send((ERROR, failure))
            self.kill()  # others wait for it until its connections are closed
        self.exitcode = code
        self._ended.close()
        pipe.close()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def terminate(self) -> None:
        """Nothing: it ends once the connections between learners are closed."""

    def kill(self) -> None:
        self.session.kill(self.actor)

    def join(self, seconds: float) -> None:
        connection.wait([self.sentinel], max(seconds, KILL_SECONDS))


class RayLearners(Learners):
    """`Learners` of which all but the first are Ray actors: `target(group, session, args, steps, updates, *parts)`.

    Each `needs` these resources; it gets a node of its own as long as there are as many, or with `--placement pack` the
    first one that has them. Raises WorkerError instead of PeerLost where a restart would not help.
    """

    def __init__(self, session: Session, needs: Resources, run: Any, target: Callable[..., None], *parts: Any):
        super().__init__(run, target, *parts)
        if run.args.address is not None:  # their actors have machines of their own
            self.peer_seconds = run.args.hang_seconds + START_SECONDS
        self.session, self.needs = session, needs
        self._actor_class = session.actor_class(RayLearner)

    def _meeting_place(self) -> tuple[str, int]:
        host = next(iter(self.session.state.nodes.values()))  # that of this process
        listener = socket.create_server((host, 0))  # not on all addresses, as the store itself would
        place = host, listener.getsockname()[1]
        self._store = TCPStore(*place, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return place

    def _launch(self, rank: int) -> tuple[Any, Any]:
        session, group = self.session, LearnerGroup(rank, self.group.size)
        first = 0 if session.placement == "pack" else rank % len(session.state.free)
        nodes = [*session.state.free.items()]
        free = {**dict(nodes[first:]), **dict(nodes[:first])}
        actor = session.start(self._actor_class, (), self.needs, free, name=f"learner {rank}", order="pack")
        args = self.run.args, self.run.steps, self.run.updates, *self.parts
        placing = session.cluster, session.placement, session.is_restart
        run = self.target, group, self._rendezvous(rank), placing, args
        pipe, end = mp.Pipe(duplex=False)
        return RayProcess(session, actor, run, end), pipe

    def _waits_for_place(self, child: Child) -> bool:
        self.session.check()
        return self.session.is_waiting(child.process.actor._actor_id.hex())

    def _name_lost(self, error: BaseException) -> WorkerError:
        lost = super()._name_lost(error)
        return WorkerError(str(lost)) if any(process.has_failed for process in self.processes) else lost

    def _how_ended(self, process: Any) -> str:
        return process.how

    def _stop(self) -> None:
        super()._stop()
        for process in self.processes:
            process.kill()  # Ray keeps the process of an actor that has nothing to do
