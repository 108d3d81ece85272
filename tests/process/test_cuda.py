"""The GPU path: acting as a graph, pinned slots, every chapter. Runs only where there is a GPU.

That snapshots in shared GPU memory are never torn is in tests/unit/test_weights.py, beside those in shared memory.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from harness import EVERY_CHAPTER

import train_a3c_data as chapter
from a3c_mp.algorithms.actor_critic import Samples, anneal_entropy_coef
from a3c_mp.config import CommonArgs
from a3c_mp.errors import ConfigError, TrainingError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import acting_forward
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.weights import Weights
from a3c_mp.run.graph_step import GraphStep
from a3c_mp.run.learner import Learner
from a3c_mp.run.progress import NonFiniteFilter, Progress

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # a virtual GPU computes on the CPU
]

SPACES = Box(0, 255, (4, 84, 84), "uint8"), Discrete(6)


def obs(seed):
    return torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def needs_ray(chapter):
    if chapter.script == "train_ray.py" and find_spec("ray") is None:
        pytest.skip("needs Ray")


def test_the_graph_computes_what_the_net_does_with_newly_loaded_weights_too():
    net = make_actor_critic(*SPACES).cuda()
    acting = copy.deepcopy(net)
    with torch.inference_mode():
        forward = acting_forward(CommonArgs(), acting, obs(0))
        torch.testing.assert_close(forward(obs(1)), on_cpu(net(obs(1).cuda())))
        for parameter in net.parameters():
            parameter.mul_(0.5)
        Weights(net).load(acting)
        torch.testing.assert_close(forward(obs(2)), on_cpu(net(obs(2).cuda())))


ARGS = chapter.Args(precision="fp32", entropy_coef=1.0, entropy_coef_end=0.0, total_steps=8)


def on_cpu(outputs):
    return tuple(output.cpu() for output in outputs)


def a_learner():
    """As much of a learner as takes a step; `metrics` are those of its steps without a graph."""
    torch.manual_seed(0)
    net = make_actor_critic(*SPACES).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4, eps=1e-5, fused=True)
    run = SimpleNamespace(
        counters=Counter(), log=SimpleNamespace(warning=print), metrics=SimpleNamespace(sources=[]),
        progress=Progress(ARGS),
    )  # fmt: skip
    learner = SimpleNamespace(
        args=ARGS, net=net, optimizer=optimizer, device=torch.device("cuda", 0), group=LearnerGroup(), run=run,
        updates=0, metrics=[], setup=SimpleNamespace(samples_per_update=0),
        gradient_filter=NonFiniteFilter(run, "gradients_not_finite"), _graph_step=None,
    )  # fmt: skip

    def record_update(metrics):
        run.progress.record_update()
        learner.metrics.append(metrics)

    learner.record_update = record_update
    learner.take_step = partial(Learner.take_step, learner)
    return learner


def a_batch(seed, num, advantage=1.0):
    rng = torch.Generator().manual_seed(seed)
    images, actions = torch.randint(0, 256, (num, 4, 84, 84), generator=rng), torch.arange(num) % 6
    logits, advantages, targets = torch.randn(num, 6, generator=rng), *torch.randn(2, num, generator=rng)
    return Samples(images.to(torch.uint8), actions, logits, advantage * advantages, targets).to(torch.device("cuda", 0))


def scaled(args, net, samples, scales):
    total, metrics = chapter.loss(args, net, samples)
    return scales[0] * scales[1] * total, metrics


def test_a_graph_takes_the_same_steps_while_settings_and_numbers_change_and_one_is_skipped(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    plain, graphed = a_learner(), a_learner()
    graphed._graph_step = GraphStep(graphed)
    for step, num in enumerate((24, 32, 24, 32, 24, 32, 24, 24, 24)):  # of each size, from the second on it is a graph
        batch = a_batch(step, num, float("nan") if step == 6 else 1.0)
        for learner in (plain, graphed):
            learner.optimizer.param_groups[0]["lr"] = 5e-4 * (1 - step / 10)
            scales = [1.0 / (1 + step), torch.tensor(num / 24)]
            chapter.gradient_step(anneal_entropy_coef(ARGS, step), learner, scaled, batch, scales)
    graphed._graph_step.settle()
    assert sum(launch is not None for launch in graphed._graph_step.graphs.values()) == 2
    assert plain.run.progress.updates == graphed.run.progress.updates == 8
    assert plain.run.counters == graphed.run.counters == {"gradients_not_finite": 1}
    for one, other in zip(plain.net.parameters(), graphed.net.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
    totals = [metrics["losses/total"].item() for metrics in plain.metrics]
    [take_means] = graphed.run.metrics.sources
    assert take_means()["losses/total"] == pytest.approx(sum(totals) / len(totals), rel=1e-3)
    assert take_means() == {}
    for step in range(5):
        chapter.gradient_step(ARGS, graphed, chapter.loss, a_batch(step, 24, float("inf")))
    with pytest.raises(TrainingError, match="5 in a row"):
        graphed._graph_step.settle()


def test_a_loss_that_waits_for_the_gpu_is_refused_unless_steps_are_no_graphs():
    def loss(args, net, samples):
        total, metrics = chapter.loss(args, net, samples)
        assert total.item() < 1e9
        return total, metrics

    learner = a_learner()
    args = replace(ARGS, entropy_coef=0.5)
    chapter.gradient_step(args, learner, loss, a_batch(0, 24))
    learner._graph_step = GraphStep(learner)
    chapter.gradient_step(args, learner, loss, a_batch(0, 24))
    with pytest.raises(ConfigError, match="cuda-graph=True: gradient steps are launched as a CUDA graph, which failed"):
        chapter.gradient_step(args, learner, loss, a_batch(0, 24))
    torch.cuda.synchronize()  # the GPU can be used as before
    learner._graph_step = None
    chapter.gradient_step(args, learner, loss, a_batch(0, 24))


@EVERY_CHAPTER
@pytest.mark.parametrize("env_id", ["CartPole-v1", "PongNoFrameskip-v4"])
def test_training_on_the_gpu_is_deterministic_where_asked(scripts, env_id, chapter):
    needs_ray(chapter)
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
    needs_ray(chapter)
    first = scripts.run(chapter, "--env-id", "PongNoFrameskip-v4", "--cuda", "--total-steps", "2000")
    assert first.code == 0, first.err
    updates = first.summary["updates"]  # the resumed run writes the same file
    resumed = scripts.resume(chapter, "--total-steps", "4000")
    assert resumed.code == 0, resumed.err
    assert resumed.summary["updates"] > updates > 0
