"""IMPALA's batches and loss: what is drawn, what stays together, and which way the gradient points."""

from dataclasses import replace

import pytest
import torch
from gymnasium.spaces import Box, Discrete

import train_impala
import train_ray
from a3c_mp.algorithms.impala import PRESETS, Args, DelayLine, UnrollReplay, batches, rollouts_per_round
from a3c_mp.config import check_ranges
from a3c_mp.data.rollout import Rollout, episode_starts, join, rollout_spec
from a3c_mp.errors import ConfigError
from a3c_mp.maths import returns
from a3c_mp.nets.actor_critic import unroll
from a3c_mp.nets.build import NetSpec, make_actor_critic
from a3c_mp.nets.distributions import Categorical
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.run.preflight import check_learners

SPACES = Box(-1.0, 1.0, (3,)), Discrete(2)
CPU = torch.device("cpu")
ARGS = Args(reward_clip=False, life_loss_terminal=False, normalize_advantages=False)


def some_unrolls(num_unrolls, unroll_length=6, lstm_size=0, seed=0):
    """Random unrolls; the observations of unroll b begin with the number `seed + b`."""
    rng = torch.Generator().manual_seed(seed)
    spec = rollout_spec(unroll_length, num_unrolls, *SPACES, lstm_size)
    fields = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    for field in fields.values():
        if field.is_floating_point():
            field.normal_(generator=rng)
    fields["action"].random_(2, generator=rng)
    fields["terminated"].bernoulli_(0.1, generator=rng)
    fields["truncated"].bernoulli_(0.1, generator=rng)
    fields["obs"][0, :, 0] = seed + torch.arange(num_unrolls)
    return Rollout(**fields)


def numbers(unrolls):
    return unrolls.obs[0, :, 0].tolist()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_batches_take_every_new_unroll_once_with_all_its_fields():
    unrolls = some_unrolls(7)
    no_replay = UnrollReplay(rollout_spec(6, 4, *SPACES), 0, CPU)
    found = list(batches(replace(ARGS, batch_unrolls=3), unrolls, no_replay, generator()))
    assert [batch.action.shape[1] for batch in found] == [3, 2, 2]
    together = join(found)
    assert sorted(numbers(together)) == list(range(7))
    for b, number in enumerate(numbers(together)):
        for field, original in zip(together, unrolls, strict=True):
            assert torch.equal(field[:, b], original[:, int(number)])


def test_a_share_of_a_batch_is_replayed():
    args = replace(ARGS, batch_unrolls=8, replay_proportion=0.75)
    replay = UnrollReplay(rollout_spec(6, 4, *SPACES), 100, CPU)
    old, new = some_unrolls(20, seed=100), some_unrolls(4, seed=0)
    replay.add(old)
    found = list(batches(args, new, replay, generator()))
    assert [batch.action.shape[1] for batch in found] == [8, 8]
    assert sorted(number for batch in found for number in numbers(batch)[:2]) == [0, 1, 2, 3]
    drawn = {number for batch in found for number in numbers(batch)[2:]}
    assert drawn <= {*range(4), *range(100, 120)}
    assert len(drawn) > 3


def test_a_replay_is_saved_without_the_room_that_is_empty():
    replay = UnrollReplay(rollout_spec(6, 4, *SPACES, lstm_size=3), 100, CPU)
    replay.add(some_unrolls(4, lstm_size=3))
    fields = [field for field in replay.state_dict().values() if isinstance(field, torch.Tensor)]
    assert [field.untyped_storage().nbytes() for field in fields] == [field.nbytes for field in fields]


def test_replayed_unrolls_fill_every_batch_to_one_size():
    replay = UnrollReplay(rollout_spec(6, 10, *SPACES), 20, CPU)
    found = batches(replace(ARGS, batch_unrolls=16, replay_proportion=0.75), some_unrolls(10), replay, generator())
    assert [batch.action.shape[1] for batch in found] == [16, 16, 16]


def test_replay_keeps_the_newest():
    replay = UnrollReplay(rollout_spec(6, 4, *SPACES), 10, CPU)
    for seed in (0, 4, 8, 12):
        replay.add(some_unrolls(4, seed=seed))
    assert {int(n) for n in numbers(replay.sample(500, generator()))} == set(range(6, 16))


def test_a_batch_never_waits_for_more_unrolls_than_there_are():
    args = Args(num_actors=2, num_envs=4, batch_unrolls=6)
    assert rollouts_per_round(args) == 2
    assert rollouts_per_round(replace(args, batch_unrolls=4)) == 1
    assert rollouts_per_round(replace(args, batch_unrolls=4, deterministic=True)) == 2
    assert rollouts_per_round(replace(args, batch_unrolls=16, replay_proportion=0.5)) == 2
    with pytest.raises(ConfigError, match="batch-unrolls=9"):
        rollouts_per_round(replace(args, batch_unrolls=9))


def test_learners_share_the_actors_evenly():
    check_learners(num_learners=2, num_actors=4, cuda=False)
    with pytest.raises(ConfigError, match="num-learners=3: 4 actors cannot be divided evenly"):
        check_learners(num_learners=3, num_actors=4, cuda=False)
    with pytest.raises(ConfigError, match="num-learners=64: each needs a GPU to itself"):
        check_learners(num_learners=64, num_actors=64, cuda=True)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("lstm", [False, True])
def test_the_gradient_is_that_of_the_three_losses_with_vtrace_held_constant(lstm, normalize):
    args = replace(ARGS, normalize_advantages=normalize)
    net = make_actor_critic(*SPACES, NetSpec(lstm=lstm))
    batch = some_unrolls(5, lstm_size=net.lstm_size)
    total, metrics = train_impala.loss(args, net, batch, LearnerGroup())
    total.backward()
    gradient = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()

    logits, values = unroll(net, batch.obs, batch.lstm_state[0], episode_starts(batch))
    log_pi = logits[:-1].log_softmax(-1).gather(-1, batch.action[..., None])[..., 0]
    log_mu = batch.behaviour_logits.log_softmax(-1).gather(-1, batch.action[..., None])[..., 0]
    discounts = ARGS.gamma * (~batch.terminated).float()
    rewards, discounts = returns.cut_truncated(batch.reward, discounts, batch.truncated, batch.truncation_value)
    constants = (x.detach() for x in (log_pi - log_mu, discounts, rewards, values[:-1], values[-1]))
    vs, advantages, weights = returns.vtrace(*constants)
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
    torch.testing.assert_close(metrics["values/rho_clipped"].mean(), (rhos > 1).float().mean())


def on_ray(args, net, batch, group):
    """Chapter 7 has the same loss, for one learner."""
    return train_ray.impala_loss(args, net, batch)


@pytest.mark.parametrize("loss", [train_impala.loss, on_ray])
def test_without_vtrace_the_policy_that_acted_plays_no_part(loss):
    net, batch = make_actor_critic(*SPACES), some_unrolls(5)
    for scale in (torch.tensor([3.0, -3.0]), torch.tensor([0.0, -torch.inf])):
        other = batch._replace(behaviour_logits=batch.behaviour_logits + scale)
        for vtrace in (True, False):
            args = replace(ARGS, vtrace=vtrace)
            first, second = (loss(args, net, unrolls, LearnerGroup())[0] for unrolls in (batch, other))
            assert torch.equal(first, second) != vtrace


def test_a_delay_line_gives_the_net_of_so_many_calls_ago():
    net = torch.nn.Linear(1, 1)
    assert DelayLine(0)(net) is net
    delayed, seen = DelayLine(2), []
    for number in range(5):
        torch.nn.init.constant_(net.bias, float(number))
        seen.append(delayed(net).bias.item())
    assert seen == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("env_id", PRESETS)
def test_presets_are_settings_within_their_ranges(env_id):
    args = Args(env_id=env_id, **PRESETS[env_id])
    check_ranges(args)
    assert rollouts_per_round(args) >= 1
