"""Flat gradients: what is written is what was meant, their mean is a mean, and nothing that is not finite passes."""

import copy

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

from a3c_mp.algorithms.gradients import (
    Gradient,
    MeanGradient,
    Report,
    RolloutStats,
    copy_gradient,
    gradient_spec,
    unsent,
    views_like,
)
from a3c_mp.data.episodes import Episode
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.obs_norm import Moments, ObsNorm
from a3c_mp.processes.slots import Slots

IMAGE = (2, 36, 36)  # its convolutions are channels-last: their gradients lie in memory in another order
EPISODES = [Episode(-21.0, 824), Episode(0.1, 3)]


def images(num, seed=0):
    return torch.randint(0, 256, (num, *IMAGE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def a_net_with_gradients(seed=0):
    torch.manual_seed(seed)
    net = make_actor_critic(Box(0, 255, IMAGE, "uint8"), Discrete(3))
    logits, values = net(images(8, seed))
    (logits.square().sum() + (values - 1).square().sum()).backward()
    return net


def a_slot(net):
    return Gradient(**Slots(gradient_spec(net, IMAGE, max_episodes=4), 1)[0])


def test_views_are_consecutive_and_laid_out_like_their_models():
    models = [torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(()), torch.zeros(7)]
    vector = torch.arange(2 * 3 * 4 * 5 + 1 + 7.0)
    views = views_like(vector, models)
    assert [(v.shape, v.stride()) for v in views] == [(m.shape, m.stride()) for m in models]
    assert torch.equal(
        torch.cat([v.permute(0, 2, 3, 1).flatten() if v.ndim == 4 else v.flatten() for v in views]), vector
    )
    views[2].zero_()
    assert vector[-7:].count_nonzero() == 0, "they are views"


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_on_a_gradient_that_travelled_is_the_step_on_the_gradient_itself(optimizer):
    net = a_net_with_gradients()
    there = copy.deepcopy(net)
    gradient, mean = a_slot(net), MeanGradient(there)
    copy_gradient(net, gradient.vector)
    mean.add(gradient.vector)
    norm = mean.finish(max_norm=1.0)

    expected_norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0.0)
    assert norm > 1.0, "there was something to clip"
    optimizer(net.parameters(), lr=0.1).step()
    optimizer(there.parameters(), lr=0.1, fused=True).step()
    for found, expected in zip(there.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_mean_and_clip_and_a_new_mean_after_that():
    net = nn.Linear(3, 2)
    mean = MeanGradient(net)
    for scale, max_norm in [(1.0, 1e9), (10.0, 0.5)]:
        vectors = [scale * torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        for vector in vectors:
            mean.add(vector.clone())
        expected = torch.stack(vectors).double().mean(dim=0)
        norm = mean.finish(max_norm)
        assert norm.item() == pytest.approx(expected.norm().item())
        found = torch.cat([net.weight.grad.flatten(), net.bias.grad])
        torch.testing.assert_close(found.double(), expected * min(1.0, max_norm / expected.norm().item()))
        assert mean.count == 0


def test_news_of_a_rollout_arrive_with_the_gradient_once():
    net = a_net_with_gradients()
    gradient = a_slot(net)
    moments = Moments.of(images(6))
    metrics = {"losses/total": torch.tensor(2.0), "values/target": torch.tensor([1.0, 2.0, 6.0])}
    copy_gradient(net, gradient.vector)
    stats = RolloutStats(EPISODES, moments, 3, finite=True)
    gradient.write_stats(stats)
    report = gradient.report(7, 64, stats, metrics)
    assert report == Report(7, 64, 2, 3, True, {"losses/total": 2.0, "values/target": 3.0})
    assert gradient.finished_episodes(report) == [Episode(-21.0, 824), Episode(pytest.approx(0.1), 3)]
    for found, expected in zip(gradient.moments, moments, strict=True):
        assert torch.equal(found, expected)
    gradient.write_stats(stats.once_sent())
    assert gradient.obs_num == 0
    assert gradient.finished_episodes(gradient.report(7, 64, stats.once_sent(), metrics)) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["first", "last"])
def test_what_is_not_finite_is_reported(bad, where):
    net = a_net_with_gradients()
    gradient, stats = a_slot(net), RolloutStats([], None, 0, finite=True)
    parameters = list(net.parameters())
    target = {"first": parameters[0].grad, "last": parameters[-1].grad}[where]
    copy_gradient(net, gradient.vector)
    assert gradient.report(0, 1, stats, {}).finite
    assert not gradient.report(0, 1, stats._replace(finite=False), {}).finite, "the rollout is not"
    target[(-1,) * target.ndim] = bad
    copy_gradient(net, gradient.vector)
    assert not gradient.report(0, 1, stats, {}).finite


def test_moments_merged_from_several_actors_are_those_of_all_observations():
    norm, at_once = ObsNorm(IMAGE, image=True), ObsNorm(IMAGE, image=True)
    parts = [images(n, seed) for seed, n in enumerate((1, 7, 4))]
    for part in parts:
        norm.merge(Moments.of(part))
    at_once.update(torch.cat(parts))
    assert norm.count == 12
    for name in ("mean", "variance"):
        torch.testing.assert_close(norm.state_dict()[name], at_once.state_dict()[name], rtol=1e-4, atol=1e-3)


def test_moments_leave_the_observations_as_they_were():
    obs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    before = obs.clone()
    num, mean, variance = Moments.of(obs)
    assert torch.equal(obs, before)
    assert num == 5
    torch.testing.assert_close(mean, obs.mean(dim=0, keepdim=True))
    torch.testing.assert_close(variance, obs.var(dim=0, correction=0, keepdim=True))


def test_a_parameter_that_the_loss_does_not_use_has_a_gradient_of_zero():
    net = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("first", "unused", "last")})
    vector = torch.full((9,), 7.0)
    (net["first"](torch.ones(2)) + 2 * net["last"](torch.ones(2))).sum().backward()
    copy_gradient(net, vector)
    assert vector.tolist() == [1, 1, 1, 0, 0, 0, 2, 2, 2]


def test_what_a_predecessor_has_sent_is_not_sent_again_and_a_rollout_is_counted_once():
    stats, batches = RolloutStats(EPISODES, None, 3, finite=True), [torch.tensor([i]) for i in range(3)]
    assert list(unsent(batches, stats, 0)) == [
        (batches[0], stats),
        *((batch, stats.once_sent()) for batch in batches[1:]),
    ]
    assert list(unsent(batches, stats, 2)) == [(batches[2], stats.once_sent())]
    assert list(unsent(batches, stats, 3)) == []
