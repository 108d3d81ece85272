"""Share actor statistics among learners, so that all keep identical counters and take identical decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from a3c_mp.actor_states import ActorReport, ActorStates
from a3c_mp.follower import Follower
from a3c_mp.guard import Guard
from a3c_mp.learners import Team
from a3c_mp.rollout import Episode
from a3c_mp.run import Run
from a3c_mp.workers import Incident


class News(NamedTuple):
    """What a message of an actor has brought."""

    steps: int  # agent steps
    episodes: list[Episode]  # that ended in them
    actor: int
    policy_lag: int  # versions
    finite: bool | None  # whether all of it can be learned from; None if it brought nothing new


@contextmanager
def logged_at_the_end(run: Run | Follower, incidents: list[Incident]) -> Iterator[None]:
    """Pass on incidents after the last `tell`: what led to the end of a run is the most interesting of all."""
    try:
        yield
    finally:
        for incident in incidents:
            run.on_incident(incident)


def tell(
    team: Team, run: Run | Follower, guard: Guard, news: Sequence[News], incidents: list[Incident],
    states: ActorStates, reports: list[ActorReport], also: Any = None,
) -> tuple[bool, list[Any]]:  # fmt: skip
    """Let the books of every learner take in what the actors of all have brought, and which were replaced.

    Args:
        team: the learners; every one calls this as often as the others.
        run: this learner's books.
        guard: judges what was brought, in every learner alike.
        news: of every message of this learner's actors since the last call.
        incidents: of its actors since the last call; emptied.
        states: of all actors.
        reports: what this learner's actors sent for them.
        also: one more thing to exchange.

    Returns:
        (whether everything is finite, `also` of every learner in the order of their ranks).
    """
    everything = team.exchange((news, incidents, reports, also))
    verdicts = []
    for rank, (their_news, their_incidents, their_reports, _) in enumerate(everything):
        for incident in their_incidents:
            run.on_incident(incident)
            if not incident.replaced and rank != team.rank:
                states.start_new_games(incident.actor)
        for steps, episodes, actor, policy_lag, finite in their_news:
            run.consumed(steps, episodes, actor, policy_lag)
            if finite is not None:
                verdicts.append(guard.accepts(finite, f"actor {actor}", f"message from actor {actor}"))
        states.advance(their_reports)
    incidents.clear()
    return all(verdicts), [their_also for *_, their_also in everything]
