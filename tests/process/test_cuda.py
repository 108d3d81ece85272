"""The GPU path: shared CUDA snapshots, acting as a graph, pinned slots. Runs only where there is a GPU."""

import copy

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from support import SMALL

from a3c_mp.device import GraphedForward
from a3c_mp.nets import make_actor_critic
from a3c_mp.weights import Weights
from a3c_mp.workers import Workers

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPACES = Box(0, 255, (4, 84, 84), "uint8"), Discrete(6)


def obs(seed):
    return torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_graph_computes_what_the_net_does_with_newly_loaded_weights_too():
    net = make_actor_critic(*SPACES).cuda()
    acting = copy.deepcopy(net)
    with torch.inference_mode():
        forward = GraphedForward(acting, obs(0))
        torch.testing.assert_close(forward(obs(1)), net(obs(1).cuda()))
        for parameter in net.parameters():
            parameter.mul_(0.5)
        Weights(net).load(acting)
        torch.testing.assert_close(forward(obs(2)), net(obs(2).cuda()))


def read_snapshots(link, weights):
    """Load as fast as can be; tell of every load whether it was uniform and of the version it claims."""
    net = torch.nn.Linear(1000, 1000).cuda()
    while True:
        slot, _ = link.take()
        version = weights.load(net)
        values = torch.cat([parameter.flatten() for parameter in net.parameters()])
        link.beat()
        link.send(slot, bool((values == version).all()))


def test_snapshots_in_gpu_memory_are_never_torn():
    net = torch.nn.Linear(1000, 1000).cuda()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    weights = Weights(net)
    whole = []
    with Workers(read_snapshots, 1, (weights,), slots_per_worker=1) as workers:
        for filled in workers.rounds(lambda: len(whole) >= 500):
            whole.append(filled[0].payload)
            for _ in range(3):
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.add_(1.0)
                weights.publish(net)
            workers.release(filled, weights.version)
    assert all(whole)


@pytest.mark.parametrize("script", ["train_a3c_data.py", "train_a3c_grad.py"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "PongNoFrameskip-v4"])
def test_training_on_the_gpu_is_deterministic_where_asked(scripts, env_id, script):
    flags = ["--env-id", env_id, *SMALL, "--cuda", "--deterministic", "--total-steps", "2000"]
    hashes = []
    for name in ("a", "b"):
        done = scripts.run(name, *flags, script=script)
        assert done.code == 0, done.err
        hashes.append(done.summary["weights_sha256"])
    assert hashes[0] == hashes[1]
