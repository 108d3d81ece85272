"""A round of a learner: what is counted and published when, what other learners see of it."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from gymnasium.spaces import Discrete

from a3c_mp.config import CommonArgs
from a3c_mp.data.resume_states import ActorLayout
from a3c_mp.errors import PeerLost
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.pool import Filled
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.run.learner import Learner, MessageStats, Setup
from a3c_mp.run.progress import Timings


class Lost(LearnerGroup):
    """A group in which the other learner is lost when this one wants to know its messages."""

    def all_gather_object(self, message):
        raise PeerLost("gone")

    def broadcast_state(self, *parts):
        pass


@pytest.fixture
def tape():
    return []


@pytest.fixture
def learner_of(monkeypatch, tape):
    """Makes a learner in a group, one of whose actors fills a slot; its tape has what happens."""

    def make(group=None):
        arriving = iter([[Filled(0, 0, 0)], []])
        pool = SimpleNamespace(
            take=lambda should_stop, size: next(arriving),
            release=lambda filled, version: tape.append(f"released, version {version}"),
        )
        carrier = SimpleNamespace(share=lambda net, dtype, untrained: Weights(net), start=lambda *_, **options: pool)
        run = SimpleNamespace(
            args=CommonArgs(num_actors=2), steps=0, updates=0, counters=Counter(), timing=Timings(),
            should_stop=lambda: False, end_round=lambda: tape.append("end of round"), keep=lambda **parts: None,
            record_rollout=lambda *figures: tape.append(f"recorded {figures}"),
        )  # fmt: skip
        net = torch.nn.Linear(1, 1)
        layout, slots = ActorLayout(Discrete(2), 8, {}), Slots({"x": ((1,), torch.float32)}, 1)
        setup = Setup(net, torch.optim.SGD(net.parameters()), slots, layout, torch.float32)
        learner = Learner(run.args, run, setup, None, group, carrier)
        monkeypatch.setattr(learner.states, "read", lambda filled: ["report"] * len(filled))
        monkeypatch.setattr(learner.states, "advance", lambda reports: tape.extend(reports))
        return learner

    return make


MESSAGE = MessageStats(8, [], 0, True)


def test_a_learner_alone_knows_the_states_of_a_round_at_once_and_slots_go_back_with_the_newest_version(
    learner_of, tape
):
    learner = learner_of()
    filled = learner.take()
    assert tape == ["report"]
    assert learner.record(filled, [MESSAGE], 12) == (True, [12])
    assert learner.end_round()
    learner.release(filled)
    assert tape[1:] == ["recorded (8, [], 0, 0)", "end of round", "released, version 1"]
    assert learner.take() == []


def test_a_peer_that_is_lost_in_the_middle_of_a_round_leaves_the_states_at_its_start(learner_of, tape):
    """The checkpoint that is written then has the actors' states and the weights of one and the same round."""
    learner = learner_of(Lost(0, 2))
    filled = learner.take()
    with pytest.raises(PeerLost):
        learner.record(filled, [MESSAGE])
    assert tape == []
