"""The actors of a learner: their processes, the rounds of slots that they fill, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from a3c_mp.data.episodes import Episode
from a3c_mp.data.resume_states import ActorReport, ResumeStates
from a3c_mp.processes.pool import Filled, WorkerEvent, WorkerOptions, WorkerPool
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import Workers
from a3c_mp.run.guard import NonFiniteFilter
from a3c_mp.run.progress import RunState


class MessageStats(NamedTuple):
    """What is counted of one message of an actor."""

    steps: int  # agent steps in it
    episodes: list[Episode]  # that ended in them
    policy_lag: int  # versions
    finite: bool | None  # whether all of it can be learned from; None if it held nothing new


class Round(NamedTuple):
    """A round of all learners, as `Actors.record_round` recorded it."""

    finite: bool  # whether all of its messages can be learned from
    replay_sizes: list[int]  # transitions in the replay of each learner, by rank; 0 without a replay


def processes(target: Callable[..., None], *args: Any) -> Callable[..., WorkerPool]:
    """Make `start` of `Actors`: spawned processes that run the module-level function `target(channel, *args)`."""
    return partial(Workers, target, args=args)


class Actors:
    """Supervised actors of a learner, used in a `with` block.

    Args:
        start: makes what starts the actors, called as `Workers` is; see `processes`.
        weights: the ones whose versions actors are given with their slots.
        states: what actors are rebuilt from, and which of them belong to this learner.
        run: counts restarts, says when to stop.
        on_restart: called in addition with each `WorkerEvent`: of an actor that is replaced, leaves or joins.
    """

    def __init__(
        self, start: Callable[..., WorkerPool], weights: Weights, states: ResumeStates, run: RunState,
        on_restart: Callable[[WorkerEvent], None] = lambda message: None,
    ):  # fmt: skip
        self.weights, self.states, self.run = weights, states, run
        self.group, self.own = states.group, states.own
        self.restart_messages: list[WorkerEvent] = []  # of a group of learners, until the next `record_round`
        self._reports: list[ActorReport] = []
        self._also_on_restart = on_restart
        args, layout = run.args, states.layout
        self.workers = start(
            num_workers=len(self.own),
            states=states,
            options=WorkerOptions(
                role="actor",
                slots_per_worker=layout.slots_per_actor,
                max_restarts=args.max_restarts,
                hang_seconds=args.hang_seconds,
                in_order=args.in_order,
                versions=weights.versions_in_flight(layout.slots_per_actor),
                first_actor=self.own.start,
            ),
            on_restart=self._on_restart,
        )

    def __enter__(self) -> Actors:
        self.workers.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            self.workers.__exit__(*exc)
        finally:
            for message in self.restart_messages:  # what led to the end of a run is the most interesting of all
                self.run.on_restart(message)

    def rounds(self, size: int = 1) -> Iterator[list[Filled]]:
        """Yield rounds of filled slots until the run should stop: `size` in order of arrival, or one of every actor.

        One of every actor, in their order, is a round of deterministic and synchronous runs. The slots belong to the
        loop's body; when it ends, they go back to their actors with the newest version of the weights.
        """
        while filled := self.take(size):
            yield filled
            self.release(filled)

    def take(self, size: int = 1) -> list[Filled]:
        """Wait for the next round of filled slots; empty when the run should stop."""
        with self.run.timing("waiting"):
            filled = self.workers.take(self.run.should_stop, size)
        self._reports = self.states.read(filled)
        if self.group.size == 1:  # else `record_round` does: a peer that is lost in it must not leave half a round
            self.states.advance(self._reports)
        return filled

    def release(self, filled: Sequence[Filled]) -> None:
        """Give slots back to their actors with the newest version of the weights."""
        self.workers.release(filled, self.weights.version)

    def record_round(
        self, filled: Sequence[Filled], stats: Sequence[MessageStats], guard: NonFiniteFilter, replay_size: int = 0
    ) -> Round:
        """Record a round's steps and episodes, with those of other learners: all keep equal counters and decide alike.

        Every learner calls this once for each round.

        Args:
            filled, stats: the round of this learner, and the statistics of each of its messages.
            guard: checks what the messages hold, in every learner alike.
            replay_size: transitions that this learner's replay holds, to share with the others.
        """
        named = [(self.own[message.worker], figures) for message, figures in zip(filled, stats, strict=True)]
        reports = self._reports if self.group.size > 1 else []
        with self.run.timing("waiting"):
            everything = self.group.all_gather_object((named, self.restart_messages, reports, replay_size))
        verdicts = []
        for rank, (their_stats, their_restarts, their_reports, _) in enumerate(everything):
            for message in their_restarts:
                self.run.on_restart(message)
                if not message.replaced and rank != self.group.rank:
                    self.states.forget(message.actor)
            for actor, (steps, episodes, policy_lag, finite) in their_stats:
                self.run.record_rollout(steps, episodes, actor, policy_lag)
                if finite is not None:
                    verdicts.append(guard.check(finite, f"actor {actor}", f"message from actor {actor}"))
            self.states.advance(their_reports)
        self.restart_messages = []
        return Round(all(verdicts), [size for *_, size in everything])

    def _on_restart(self, message: WorkerEvent) -> None:
        if self.group.size > 1:
            self.restart_messages.append(message)
        else:
            self.run.on_restart(message)
        self._also_on_restart(message)
