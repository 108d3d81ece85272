"""The generations of a population: the processes of its members, on this rank and on others, and what follows each."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

from a3c_mp.cli import parse_algo
from a3c_mp.errors import TrainingError
from a3c_mp.nets.layers import is_image
from a3c_mp.population import ranks
from a3c_mp.population.member import Algorithm, run_member
from a3c_mp.population.population import Population
from a3c_mp.population.report import Report
from a3c_mp.population.settings import Args, check_settings
from a3c_mp.processes.pool import Filled, WorkerEvent, WorkerOptions
from a3c_mp.processes.workers import Workers
from a3c_mp.run.preflight import check_limits, check_system, probe_env, set_up_torch
from a3c_mp.run.progress import RunState
from a3c_mp.run.run import Run


class Generations:
    """The generations of a population, an iterator; in a `with` block of `workers`, its members here have processes.

    Each rank has an equal share of the places, in order. The run of rank 0 is a `Run`.
    """

    def __init__(self, algorithm: Algorithm, run: RunState, population: Population, group: ranks.Ranks):
        group.is_interrupted = lambda: run.exit_reason is not None  # by a signal
        group.all_gather_bytes(b"")  # all are there, see `_exchange`
        group.broadcast_state(population)
        args, places = population.args, group.own_share(population.args.population)
        self.run, self.population, self.group = run, population, group
        self.report = Report(run, population, places) if isinstance(run, Run) else None
        self._restarts: list[WorkerEvent] = []  # of a rank besides 0, until the generation ends
        options = WorkerOptions(
            role="member", flag="--population", slots_per_worker=1, in_order=True, first_actor=places.start,
            versions=[population.generation], max_restarts=args.max_restarts, hang_seconds=args.hang_seconds,
        )  # fmt: skip
        shared = algorithm, args, population.memory
        on_restart = run.on_restart if group.rank == 0 else self._restarts.append
        self.workers = Workers(run_member, len(places), shared, options=options, on_restart=on_restart)

    def __iter__(self) -> Iterator[Population]:
        """Yield the population whenever a generation has ended in every rank, until the run should stop.

        Raises TrainingError if no member has a finite fitness or ranks differ, Interrupted, and as `Workers.take`.
        """
        while ended := self.workers.take(self._stops_waiting):
            if self.group.size > 1:
                self._exchange()
            if self._reaches_goal() and not (ended := self._confirm(ended)):
                return
            self.population.take_elite()
            if self.report is not None:
                self.report.record(ended[0].payload)  # of place 0: a `Confirmation` if it has played one
            yield self.population
            self.run.end_round()
            if self._should_stop():
                return
            self.workers.release(ended, self.population.generation)

    def _stops_waiting(self) -> bool:
        if self.report is not None:
            self.report.show_progress()
        if self.run.should_stop() and (self.group.size == 1 or self.run.exit_reason is not None):
            return True  # with several ranks, the end of the time is that of a generation: all end together
        self.group.check()
        return False

    def _reaches_goal(self) -> bool:
        """Whether the fitness of the fittest member reaches the goal, which rank 0 then has confirmed."""
        population, goal = self.population, self.population.args.stop_return
        if goal is None or self.report is None:
            return False
        return population.evaluated[population.fittest].fitness >= goal

    def _confirm(self, ended: list[Filled]) -> list[Filled]:
        """Have the fittest member play new games: it has been lucky too. Empty if an interruption ends them."""
        self.population.memory.confirming.fill_(self.population.fittest)
        self.workers.release(ended, self.population.generation)
        if ended := self.workers.take(self._stops_waiting):
            self.population.memory.confirming.fill_(-1)
        return ended

    def _should_stop(self) -> bool:
        """Whether rank 0 says that the run should stop. Raises TrainingError if ranks have different populations."""
        if self.group.size > 1 and len(set(self.group.all_gather_bytes(self.population.digest()))) > 1:
            raise TrainingError(f"ranks have different members in generation {self.population.generation}")
        return bool(self.group.broadcast_bytes(b"stop" if self.run.should_stop() else b""))

    def _exchange(self) -> None:
        """Exchange reports of restarts, results and transitions with the other ranks."""
        # Short ones first: they wait in the machine of a rank that is slower, long ones would wait on the way.
        reports = self.group.all_gather_bytes(json.dumps(self._restarts).encode())
        self._restarts.clear()
        self.population.memory.exchange(self.group)
        for report in reports:
            for event in json.loads(report):
                self.run.on_restart(WorkerEvent(*event))


def launch(algorithms: Mapping[str, Algorithm], train: Callable[[Args, Generations], None], description: str) -> int:
    """Run `train(args, generations)` of chapter 6, in every rank alike; return the exit code.

    Rank 0 writes the run and decides when it ends. Its exit code says how, so that of the others on its machine is 0,
    unless they fail by themselves.
    """
    with ranks.one_voice():
        args, algorithm = parse_algo(algorithms, description)
        check_system()
        spaces = probe_env(args.env_id, algorithm.generation.actions)
        check_settings(args, is_image(spaces[0]))
        group = ranks.join(args)
        population = Population(args, spaces, algorithm.generation)
        set_up_torch(args)
        if group.rank == 0:
            context: Any = Run(args, args.algorithm, population.elite, None, {"population": population})
        else:
            check_limits(args, population.elite)  # rank 0's run does that
            context = nullcontext(RunState(args, group.rank, steps=0, updates=0))
        with context as run:
            generations = Generations(algorithm, run, population, group)
            with suppress(ranks.Interrupted), generations.workers:
                train(args, generations)
            if generations.report is not None:
                generations.report.log_interruption()
        return getattr(run, "exit_code", 0)  # which the run of rank 0 has
    return 0  # the run has ended or failed in rank 0, which says how
