"""IMPALA's batches and loss: what is drawn, what stays together, and which way the gradient points."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from inline import random_rollout

import train_impala
from a3c_mp.algorithms.impala import PRESETS, Args, ImpalaSetup, UnrollReplay, batches, rollouts_per_round, select
from a3c_mp.data.rollout import episode_starts, join, rollout_spec
from a3c_mp.errors import ConfigError
from a3c_mp.maths import returns
from a3c_mp.nets.build import NetSpec, make_actor_critic
from a3c_mp.nets.distributions import Categorical
from a3c_mp.processes.learner_group import LearnerGroup

SPACES = Box(-1.0, 1.0, (3,)), Discrete(2)
ARGS = Args(reward_clip=False, life_loss_terminal=False, normalize_advantages=False)


def some_unrolls(num_unrolls, lstm_size=0, first=0):
    """Random unrolls; the observations of unroll b begin with the number `first + b`."""
    rng, unrolls = torch.Generator().manual_seed(first), random_rollout(6, num_unrolls, lstm_size, seed=first)
    unrolls.terminated.bernoulli_(0.1, generator=rng)
    unrolls.truncated.bernoulli_(0.1, generator=rng)
    unrolls.obs[0, :, 0] = first + torch.arange(num_unrolls)
    return unrolls


def a_replay(capacity, lstm_size=0):
    return UnrollReplay(rollout_spec(6, 4, *SPACES, lstm_size), capacity, torch.device("cpu"))


def numbers(unrolls):
    return unrolls.obs[0, :, 0].int().tolist()


@pytest.mark.parametrize(("replayed", "sizes"), [(0, [2, 2, 1]), (6, [8, 8, 8])])
def test_batches_take_every_new_unroll_once_with_all_its_fields_and_are_filled_up_with_replayed_ones(replayed, sizes):
    args = replace(ARGS, batch_unrolls=2 + replayed, replay_proportion=replayed / (2 + replayed))
    unrolls, replay = some_unrolls(5), a_replay(100 if replayed else 0)
    if replayed:
        replay.add(some_unrolls(20, first=100))
    found = list(batches(args, unrolls, replay, torch.Generator().manual_seed(0)))
    assert [batch.action.shape[1] for batch in found] == sizes
    drawn = {number for batch in found for number in numbers(batch)[2:]}
    assert drawn <= {*range(5), *range(100, 120)}
    assert len(drawn) > 3 or not replayed
    new = join([select(batch, torch.arange(num)) for batch, num in zip(found, (2, 2, 1), strict=True)])
    assert sorted(numbers(new)) == list(range(5))
    for b, number in enumerate(numbers(new)):
        for name, field in new.fields().items():
            assert torch.equal(field[:, b], unrolls.fields()[name][:, number])


def test_a_replay_keeps_the_newest_and_is_saved_without_the_room_that_is_empty():
    replay = a_replay(10, lstm_size=3)
    for first in (0, 4, 8, 12):
        replay.add(some_unrolls(4, lstm_size=3, first=first))
        if first == 0:
            fields = replay.state_dict()["unrolls"].values()
            assert [field.untyped_storage().nbytes() for field in fields] == [field.nbytes for field in fields]
    restored = a_replay(10, lstm_size=3)
    restored.load_state_dict(replay.state_dict())
    drawn = replay.draw(500, torch.Generator().manual_seed(0))
    ours, theirs = (numbers(select(one.unrolls, drawn)) for one in (replay, restored))
    assert set(ours) == set(range(6, 16))
    assert ours == theirs


def test_a_batch_never_waits_for_more_unrolls_than_there_are():
    args = Args(num_actors=2, num_envs=4, batch_unrolls=6)
    assert rollouts_per_round(args) == 2
    assert rollouts_per_round(replace(args, batch_unrolls=4)) == 1
    assert rollouts_per_round(replace(args, batch_unrolls=4, deterministic=True)) == 2
    assert rollouts_per_round(replace(args, batch_unrolls=16, replay_proportion=0.5)) == 2
    with pytest.raises(ConfigError, match="batch-unrolls=9"):
        rollouts_per_round(replace(args, batch_unrolls=9))
    assert all(rollouts_per_round(Args(env_id=env_id, **preset)) for env_id, preset in PRESETS.items())


ALONE = LearnerGroup().all_reduce_mean


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("lstm", [False, True])
def test_the_gradient_is_that_of_the_three_losses_with_vtrace_held_constant(lstm, normalize):
    args = replace(ARGS, normalize_advantages=normalize, clip_rho=0.9, clip_c=0.7, clip_pg_rho=1.1)
    net = make_actor_critic(*SPACES, NetSpec(lstm=lstm))
    batch = some_unrolls(5, lstm_size=net.lstm_size)
    total, metrics = train_impala.loss(args, net, batch, ALONE)
    total.backward()
    gradient = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()

    logits, values, _ = net.unroll(batch.obs, batch.lstm_state[0], episode_starts(batch))
    log_pi = logits[:-1].log_softmax(-1).gather(-1, batch.action[..., None])[..., 0]
    log_mu = batch.behaviour_logits.log_softmax(-1).gather(-1, batch.action[..., None])[..., 0]
    discounts = ARGS.gamma * (~batch.terminated).float()
    rewards, discounts = returns.cut_truncated(batch.reward, discounts, batch.truncated, batch.truncation_value)
    constants = (x.detach() for x in (log_pi - log_mu, discounts, rewards, values[:-1], values[-1]))
    vs, advantages, weights = returns.vtrace(*constants, 0.9, 0.7, 1.1)
    if args.normalize_advantages:
        mean = (weights * advantages).sum() / weights.sum()
        variance = (weights * (advantages - mean) ** 2).sum() / weights.sum()
        advantages = (advantages - mean) / variance.sqrt()
    expected = -(weights * advantages * log_pi).mean() + ARGS.value_coef * 0.5 * (vs - values[:-1]).square().mean()
    expected = expected + ARGS.entropy_coef * -Categorical(logits[:-1]).entropy().mean()
    expected.backward()
    torch.testing.assert_close(total, expected)
    for found, parameter in zip(gradient, net.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)
    rhos = (log_pi - log_mu).exp()
    torch.testing.assert_close(metrics["values/rho"].mean(), rhos.mean())
    torch.testing.assert_close(metrics["values/rho_clipped"].mean(), (rhos > 0.9).float().mean())


@pytest.mark.parametrize("vtrace", [False, True])
@pytest.mark.parametrize("scale", [(3.0, -3.0), (0.0, -torch.inf)])
def test_without_vtrace_the_policy_that_acted_plays_no_part(vtrace, scale):
    net, batch, args = make_actor_critic(*SPACES), some_unrolls(5), replace(ARGS, vtrace=vtrace)
    other = batch._replace(behaviour_logits=batch.behaviour_logits + torch.tensor(scale))
    first, second = (train_impala.loss(args, net, unrolls, ALONE)[0] for unrolls in (batch, other))
    assert torch.equal(first, second) != vtrace


@pytest.mark.parametrize(
    ("unrolls", "proportion", "warns"),
    [(16, 0.9375, 0), (8, 0.9375, 1), (4, 0.875, 1), (16, 0.99, 1), (1, 0.0, 0), (16, 0.94, 0), (4, 0.6, 1)],
)
def test_a_batch_with_less_replay_than_was_asked_for_says_so(unrolls, proportion, warns):
    said = []
    args = Args(batch_unrolls=unrolls, replay_proportion=proportion)
    log = SimpleNamespace(warning=said.append)
    ImpalaSetup.begin(None, SimpleNamespace(args=args, run=SimpleNamespace(log=log)))
    assert len(said) == warns
