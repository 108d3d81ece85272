"""The GPU path: acting as a graph, pinned slots, every chapter. Runs only where there is a GPU.

That snapshots in shared GPU memory are never torn is in tests/unit/test_weights.py, beside those in shared memory.
"""

import copy

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from harness import EVERY_CHAPTER

from a3c_mp.config import CommonArgs
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import acting_forward
from a3c_mp.processes.weights import Weights

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a virtual GPU computes on the CPU
]

SPACES = Box(0, 255, (4, 84, 84), "uint8"), Discrete(6)


def obs(seed):
    return torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_graph_computes_what_the_net_does_with_newly_loaded_weights_too():
    net = make_actor_critic(*SPACES).cuda()
    acting = copy.deepcopy(net)
    with torch.inference_mode():
        forward = acting_forward(CommonArgs(), acting, obs(0))
        torch.testing.assert_close(forward(obs(1)), net(obs(1).cuda()))
        for parameter in net.parameters():
            parameter.mul_(0.5)
        Weights(net).load(acting)
        torch.testing.assert_close(forward(obs(2)), net(obs(2).cuda()))


@EVERY_CHAPTER
@pytest.mark.parametrize("env_id", ["CartPole-v1", "PongNoFrameskip-v4"])
def test_training_on_the_gpu_is_deterministic_where_asked(scripts, env_id, chapter):
    flags = ["--env-id", env_id, "--cuda", "--deterministic", "--total-steps", "2000"]
    hashes = []
    for name in ("a", "b"):
        done = scripts.run(chapter, *flags, name=name)
        assert done.code == 0, done.err
        assert done.summary["updates"] > 0
        hashes.append(done.summary["weights_sha256"])
    assert hashes[0] == hashes[1]


@EVERY_CHAPTER
def test_training_on_the_gpu_goes_on_where_it_was_stopped(scripts, chapter):
    """Not deterministic: with batches drawn ahead into pinned memory, and slots in flight while others are learned."""
    first = scripts.run(chapter, "--env-id", "PongNoFrameskip-v4", "--cuda", "--total-steps", "2000")
    assert first.code == 0, first.err
    updates = first.summary["updates"]  # the resumed run writes the same file
    resumed = scripts.resume(chapter, "--total-steps", "4000")
    assert resumed.code == 0, resumed.err
    assert resumed.summary["updates"] > updates > 0
