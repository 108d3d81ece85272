"""Share actor statistics among learners, so that all keep identical counters and take identical decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from a3c_mp.data.actor_states import ActorReport, ActorStates
from a3c_mp.data.episodes import Episode
from a3c_mp.processes.learners import LearnerGroup
from a3c_mp.processes.workers import RestartMessage
from a3c_mp.run.guard import FiniteGuard
from a3c_mp.run.replica import ReplicaRun
from a3c_mp.run.run import Run


class MessageStats(NamedTuple):
    """What a message of an actor has brought."""

    steps: int  # agent steps
    episodes: list[Episode]  # that ended in them
    actor: int
    policy_lag: int  # versions
    finite: bool | None  # whether all of it can be learned from; None if it brought nothing new


@contextmanager
def log_restarts_on_exit(run: Run | ReplicaRun, restart_messages: list[RestartMessage]) -> Iterator[None]:
    """Pass on restart_messages after the last `tell`: what led to the end of a run is the most interesting of all."""
    try:
        yield
    finally:
        for message in restart_messages:
            run.on_restart(message)


def sync_counters(
    group: LearnerGroup, run: Run | ReplicaRun, guard: FiniteGuard, news: Sequence[MessageStats],
    restart_messages: list[RestartMessage],
    states: ActorStates, reports: list[ActorReport], also: Any = None,
) -> tuple[bool, list[Any]]:  # fmt: skip
    """Let the books of every learner take in what the actors of all have brought, and which were replaced.

    Args:
        group: the learners; every one calls this as often as the others.
        run: this learner's books.
        guard: judges what was brought, in every learner alike.
        news: of every message of this learner's actors since the last call.
        restart_messages: of its actors since the last call; emptied.
        states: of all actors.
        reports: what this learner's actors sent for them.
        also: one more thing to exchange.

    Returns:
        (whether everything is finite, `also` of every learner in the order of their ranks).
    """
    everything = group.all_gather_object((news, restart_messages, reports, also))
    verdicts = []
    for rank, (their_news, their_restarts, their_reports, _) in enumerate(everything):
        for message in their_restarts:
            run.on_restart(message)
            if not message.replaced and rank != group.rank:
                states.start_new_games(message.actor)
        for steps, episodes, actor, policy_lag, finite in their_news:
            run.record_rollout(steps, episodes, actor, policy_lag)
            if finite is not None:
                verdicts.append(guard.check(finite, f"actor {actor}", f"message from actor {actor}"))
        states.advance(their_reports)
    restart_messages.clear()
    return all(verdicts), [their_also for *_, their_also in everything]
