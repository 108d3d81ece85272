"""Snapshots of weights: versioned, exact, and whole whatever the learner does meanwhile."""

import time

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from a3c_mp.processes.weights import Weights


class Constant(nn.Module):
    """A net whose parameters and buffers all have one value, about a megabyte of it."""

    def __init__(self, value=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(300, 300), nn.Conv2d(4, 8, 3), nn.Linear(400, 400))
        self.register_buffer("scale", torch.zeros(1, 7))
        self.fill(value)

    @torch.no_grad()
    def fill(self, value):
        for tensor in self.state_dict().values():
            tensor.fill_(value)

    def values(self):
        """The distinct values in all tensors."""
        return torch.cat([tensor.unique() for tensor in self.state_dict().values()]).unique().tolist()


def test_the_newest_two_versions_and_no_others_are_loaded_by_number():
    """They are copies, which do not follow the net."""
    learner, actor = Constant(3.0), Constant()
    weights = Weights(learner)
    assert weights.load(actor) == weights.version == 0
    assert actor.values() == [3.0]
    for version in range(1, 6):
        learner.fill(version)
        assert weights.publish(learner) == version == weights.version
        learner.fill(-1.0)
        for asked, loaded in ((version, version), (version - 1, version - 1), (None, version)):
            assert weights.load(actor, asked) == loaded
            assert actor.values() == [loaded or 3.0]
        for missing in {-1, version - 2, version + 1}:
            with pytest.raises(LookupError, match=f"version {missing} .*{version} is the newest"):
                weights.load(actor, missing)
            assert actor.values() == [version], "nothing was copied"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_and_buffer_arrives_where_it_belongs_rounded_to_the_type_of_the_weights(dtype):
    torch.manual_seed(0)
    learner, actor, wide_actor = Constant(), Constant().to(dtype), Constant()
    for tensor in learner.state_dict().values():
        tensor.normal_()
    weights = Weights(learner, dtype)
    weights.load(actor)
    weights.load(wide_actor)
    for name, sent in learner.state_dict().items():
        assert torch.equal(actor.state_dict()[name], sent.to(dtype)), name
        assert torch.equal(wide_actor.state_dict()[name], sent.to(dtype).float()), name
    assert weights.buffers.nbytes == 2 * dtype.itemsize * sum(t.numel() for t in learner.state_dict().values())


class Overtaken:
    """Stands in for `torch._foreach_copy_`: in the midst of the first copy, the learner publishes."""

    def __init__(self, weights, learner, publications):
        self.weights, self.learner, self.publications = weights, learner, publications
        self.copy = torch._foreach_copy_

    def __call__(self, targets, sources):
        publications, self.publications = self.publications, 0
        half = len(targets) // 2
        self.copy(targets[:half], sources[:half])
        for _ in range(publications):
            version = self.weights.version + 1
            self.learner.fill(version)
            self.weights.publish(self.learner)
        self.copy(targets[half:], sources[half:])


@pytest.mark.parametrize(("publications", "loaded"), [(1, 0), (2, 2), (3, 3)])
def test_a_reader_that_is_overtaken_starts_again(publications, loaded, monkeypatch):
    """The next version lies in the other buffer and does no harm; the one after it overwrites what is being read."""
    learner, actor = Constant(), Constant()
    weights = Weights(learner)
    monkeypatch.setattr(torch, "_foreach_copy_", Overtaken(weights, learner, publications))
    assert weights.load(actor) == loaded
    assert actor.values() == [loaded]
    monkeypatch.setattr(torch, "_foreach_copy_", Overtaken(weights, learner, 2))
    with pytest.raises(LookupError, match=f"version {weights.version}"):
        weights.load(actor, weights.version)


def load_until(weights, stop, results):
    """Load as often as possible; send every version loaded, and what was wrong with those that were torn."""
    net = Constant().to(weights.buffers.device)
    versions, torn = [], []
    results.send("ready")
    while not stop.is_set():
        version = weights.load(net)
        versions.append(version)
        if net.values() != [version]:
            torn.append((version, net.values()))
    results.send((versions, torn))


CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_a_load_is_never_torn_while_the_learner_publishes_as_fast_as_it_can(device):
    learner = Constant().to(device)
    weights = Weights(learner)
    context = mp.get_context("forkserver" if device == "cpu" else "spawn")
    stop = context.Event()
    receive_end, send_end = context.Pipe(duplex=False)
    reader = context.Process(target=load_until, args=(weights, stop, send_end), daemon=True)
    reader.start()
    send_end.close()
    assert receive_end.recv() == "ready"
    deadline = time.monotonic() + (2.0 if device == "cpu" else 6.0)  # which may be a virtual GPU
    while time.monotonic() < deadline:
        learner.fill(weights.version + 1)
        weights.publish(learner)
    stop.set()
    versions, torn = receive_end.recv()
    reader.join()
    assert reader.exitcode == 0
    assert not torn
    assert versions == sorted(versions), "a reader never goes back"
    assert len(set(versions)) >= 10, "the reader kept up with the learner"
    assert versions[-1] <= weights.version
