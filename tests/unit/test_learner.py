"""A round of a learner that loses a peer: what its checkpoint then holds."""

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
from a3c_mp.run.progress import RunState


class Lost(LearnerGroup):
    """A group in which the other learner is lost when this one wants to know its messages."""

    def all_gather_object(self, message):
        raise PeerLost("gone")

    def broadcast_state(self, *parts):
        pass


def test_a_peer_that_is_lost_in_the_middle_of_a_round_leaves_the_states_at_its_start(monkeypatch):
    """The checkpoint that is written then has the actors' states and the weights of one and the same round."""
    args, net = CommonArgs(num_actors=2), torch.nn.Linear(1, 1)
    pool = SimpleNamespace(take=lambda should_stop, size: [Filled(0, 0, 0)])
    carrier = SimpleNamespace(share=lambda net, dtype, untrained: Weights(net), start=lambda *_, **options: pool)
    layout, slots = ActorLayout(Discrete(2), 8, {}), Slots({"x": ((1,), torch.float32)}, 1)
    setup, tape = Setup(net, torch.optim.SGD(net.parameters()), slots, layout, torch.float32), []
    for group, expected in ((LearnerGroup(), ["report"]), (Lost(0, 2), [])):
        learner = Learner(args, RunState(args, 0, steps=0, updates=0), setup, None, group, carrier)
        monkeypatch.setattr(learner.states, "read", lambda filled: ["report"] * len(filled))
        monkeypatch.setattr(learner.states, "advance", tape.extend)
        filled = learner.take()
        assert tape == expected, "a learner alone advances at once"
        tape.clear()
    with pytest.raises(PeerLost):
        learner.record(filled, [MessageStats(8, [], 0, True)])
    assert tape == []
