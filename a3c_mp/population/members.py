"""The processes of a population's members, on this rank and on others, and the exchange after each generation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from a3c_mp.errors import TrainingError
from a3c_mp.population.population import Population
from a3c_mp.processes.learner_group import LearnerGroup, from_bytes
from a3c_mp.processes.pool import Filled, WorkerEvent, WorkerOptions
from a3c_mp.processes.workers import Workers
from a3c_mp.run.progress import RunState


class Members:
    """Supervised processes, one for each place of this rank, that run `target(channel, args, memory)`.

    Each rank has an equal share of the places, in order. To be used in a `with` block.

    Args:
        target: the chapter's member, a module-level function.
        run: counts restarts, says when to stop.
        population: whose members they are.
        group: the ranks.
        on_wait: called several times a second while members work.
    """

    def __init__(
        self,
        target: Callable[..., None],
        run: RunState,
        population: Population,
        group: LearnerGroup,
        on_wait: Callable[[], None] = lambda: None,
    ):
        self.run, self.population, self.group, self.on_wait = run, population, group, on_wait
        self.places = group.own_share(population.args.population)
        self._ended: list[Filled] = []  # of this rank's members, in the generation that has ended
        self._restarts: list[WorkerEvent] = []  # of a rank besides 0, until the generation ends
        options = WorkerOptions(
            role="member",
            flag="--population",
            slots_per_worker=1,
            max_restarts=population.args.max_restarts,
            hang_seconds=population.args.hang_seconds,
            in_order=True,
            versions=[population.generation],
            first_actor=self.places.start,
        )
        self.workers = Workers(
            target,
            len(self.places),
            (population.args, population.memory),
            options=options,
            on_restart=run.on_restart if group.rank == 0 else self._restarts.append,
        )

    def __enter__(self) -> Members:
        self.workers.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.workers.__exit__(*exc)

    def run_generation(self) -> bool:
        """Have all members act, learn and be evaluated, until every rank has their results and transitions.

        Returns:
            whether they have; False once the run should stop.

        Raises:
            WorkerError: the restart budget is spent.
            PeerLost: another rank has ended.
        """
        if self._ended:
            if self._should_stop():
                return False
            self.workers.release(self._ended, self.population.generation)
        self._ended = self.workers.take(self._stops_waiting)
        if self._ended and self.group.size > 1:
            self._exchange()
        return bool(self._ended)

    def _stops_waiting(self) -> bool:
        """Whether a signal or the time limit ends this generation."""
        self.on_wait()
        return self.run.should_stop()

    def _should_stop(self) -> bool:
        """Whether rank 0 says that the run should stop. Raises TrainingError if ranks have different populations."""
        if self.group.size == 1:
            return self.run.should_stop()
        digests = self.group.all_gather(from_bytes(self.population.digest())[None])
        if not bool((digests == digests[0]).all()):
            raise TrainingError(f"ranks have different members in generation {self.population.generation}")
        return bool(self.group.broadcast_bytes(b"stop" if self.run.should_stop() else b""))

    def _exchange(self) -> None:
        """Exchange results, transitions and reports of restarts with the other ranks."""
        memory, generation_rows = self.population.memory, self.population.rows
        own = b"".join(memory.pack(place, generation_rows) for place in self.places)
        for rank, packed in enumerate(self.group.all_gather_bytes(own)):
            places = LearnerGroup(rank, self.group.size).own_share(len(self.population.members))
            size = len(packed) // len(places)
            for i, place in enumerate(places):
                if rank != self.group.rank:
                    memory.unpack(place, generation_rows, packed[i * size : (i + 1) * size])
        reports = self.group.all_gather_bytes(json.dumps(self._restarts).encode())
        self._restarts.clear()
        for report in reports:
            for message in json.loads(report):
                self.run.on_restart(WorkerEvent(*message))
