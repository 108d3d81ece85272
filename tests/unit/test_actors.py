"""A round of the actors: when their states advance, and what other learners learn of it."""

from types import SimpleNamespace

import pytest
import torch
from gymnasium.spaces import Discrete

from a3c_mp.config import CommonArgs
from a3c_mp.data.resume_states import ActorLayout, ResumeStates
from a3c_mp.errors import PeerLost
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.pool import Filled
from a3c_mp.run.actors import Actors, MessageStats, processes
from a3c_mp.run.averages import Timings

ROUND = [Filled(0, 0, 5)]
STATS = [MessageStats(8, [], 0, True)]


class Lost(LearnerGroup):
    def all_gather_object(self, message):
        raise PeerLost("gone")


@pytest.fixture
def actors_of():
    """Makes the actors of a learner, which have filled one round; `advanced` are the reports that its states took."""

    def make(group):
        advanced, recorded = [], []
        states = SimpleNamespace(
            group=group, own=range(1), layout=ActorLayout(None, 8, {}), start=0, advanced=advanced,
            read=lambda filled: ["report"] * len(filled), advance=advanced.extend,
        )  # fmt: skip
        run = SimpleNamespace(
            args=CommonArgs(num_actors=1), timing=Timings(), should_stop=lambda: False,
            record_rollout=lambda *figures: recorded.append(figures),
        )  # fmt: skip
        weights = SimpleNamespace(version=5, versions_in_flight=lambda rollouts: [5] * rollouts)
        actors = Actors(processes(print), weights, states, run)
        arriving = iter([ROUND, []])
        actors.workers = SimpleNamespace(take=lambda stop, size: next(arriving), release=lambda *_: None)
        return actors, advanced, recorded

    return make


def test_alone_the_states_have_advanced_when_the_loop_body_begins(actors_of):
    actors, advanced, recorded = actors_of(LearnerGroup())
    guard = SimpleNamespace(check=lambda *_: True)
    for filled in actors.rounds():
        assert advanced == ["report"]
        assert actors.record_round(filled, STATS, guard, 12) == (True, [12])
    assert advanced == ["report"], "once"
    assert recorded == [(8, [], 0, 0)]


def test_a_peer_that_is_lost_in_the_middle_of_a_round_leaves_the_states_at_its_start(actors_of):
    """The checkpoint that is written then has the actors' states and the weights of one and the same round."""
    actors, advanced, recorded = actors_of(Lost(0, 2))
    for filled in actors.rounds():
        with pytest.raises(PeerLost):
            actors.record_round(filled, STATS, None)
    assert (advanced, recorded) == ([], [])


def test_states_of_actors_that_other_settings_have_made_are_refused():
    def states(messages=4, successor_state=3):
        layout = ActorLayout(Discrete(2), 8, {"waiting": ((successor_state, 2), torch.float32)}, messages=messages)
        args = CommonArgs(env_id="CartPole-v1", num_actors=1, num_envs=2, deterministic=True)
        return ResumeStates(args, layout, start=0)

    saved = states()
    saved.read([Filled(0, 0, None)])  # one of four messages
    states().load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="a rollout was sent in 4 messages, not 2"):
        states(messages=2).load_state_dict(saved.state_dict())
    saved._successor_state[0] = {"waiting": torch.zeros(3, 2)}
    states().load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"waiting is \[3, 2\], not \[5, 2\]"):
        states(successor_state=5).load_state_dict(saved.state_dict())
