"""Bursts: some environments repeat a random action for a while."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from envs import CountEnv, Env
from inline import collect, unconnected_collector

from a3c_mp.algorithms.actor_critic_settings import RolloutArgs
from a3c_mp.data.exploration import FREQUENCY, Bursts
from a3c_mp.nets.distributions import MASKED, Categorical, MultiCategorical


def runs_of(column):
    """(action, length) of each burst in a column [T] of -1 and actions; two in a row rarely have the same action."""
    edges = np.flatnonzero(np.diff(column, prepend=-2, append=-2))
    return [(column[start], end - start) for start, end in pairwise(edges) if column[start] >= 0]


def drawn(bursts, rollouts, unroll_length, seed=0):
    """The bursts of rollouts that follow each other, int [T, B], of the first part of the action."""
    parts = []
    for rollout in range(rollouts):
        bursts.draw(lambda stretch: seed + stretch, rollout, unroll_length)
        parts.append(bursts.repeated[:, :, 0].numpy())
    return np.concatenate(parts)


def test_bursts_repeat_one_action_in_the_environments_that_explore():
    bursts = Bursts(3, 2, 20, 0, [100])
    repeated = drawn(bursts, 1, 100_000)
    assert (repeated[:, 2] == -1).all()
    found = runs_of(repeated[:, 0])
    actions, lengths = np.array(found).T
    assert lengths.max() == 20
    assert lengths.mean() == pytest.approx(10.5, rel=0.05)
    assert len(found) == pytest.approx(100_000 / (1 / FREQUENCY - 1 + 10.5), rel=0.1)
    assert set(actions) == set(range(100))
    assert not (repeated[:, 0] == repeated[:, 1]).all()


def test_a_burst_goes_on_in_the_next_rollout_and_ends_with_its_stretch():
    bursts, stretch = Bursts(2, 2, 80, 0, [100]), 32 * 32  # 1,000 steps or more in whole rollouts
    repeated = drawn(bursts, 64, 32)
    assert max(length for _, length in runs_of(repeated[:, 0])) > 64
    assert (repeated[stretch:] == drawn(bursts, 1, stretch, seed=1)).all(), "the second stretch is that of its seed"


def test_the_policy_of_a_burst_is_certain_of_its_action_unless_it_is_masked():
    bursts = Bursts(num_envs=3, explorers=3, longest=5, after=0, sizes=[2, 3])
    bursts.repeated = torch.tensor([[[1, 2], [-1, -1], [1, 2]]])
    logits = torch.randn(3, 5)
    logits[2, 4] = MASKED  # the third choice of the second part
    acting = bursts.acting_logits(0, logits)
    policy = MultiCategorical(acting, (2,), [2, 3])
    assert policy.log_prob(torch.tensor([[1, 2]] * 3))[0] == pytest.approx(0, abs=1e-9)
    assert policy.mode()[0].tolist() == [1, 2]
    assert torch.equal(acting[1:], logits[1:]), "the policy acts"


def test_a_rollout_holds_the_policies_that_acted():
    args = RolloutArgs(env_id="envs:Count-v0", num_envs=4, unroll_length=200, explore_envs=0.5, explore_steps=100)
    collector = unconnected_collector(args)
    (rollout,) = collect(collector)
    repeated = collector.bursts.repeated[:, :, 0]
    bursting = repeated >= 0
    assert bursting[:, :2].any()
    assert not bursting[:, 2:].any()
    assert torch.equal(rollout.action[bursting], repeated[bursting])
    log_probs = Categorical(rollout.behaviour_logits).log_prob(rollout.action)
    assert log_probs[bursting].abs().max() < 1e-6
    assert log_probs[~bursting].max() < -0.1


@pytest.mark.parametrize("entry_point", [Env, CountEnv])
def test_exploration_begins_after_steps_without_a_reward(register, entry_point):
    env_id = register(entry_point=entry_point)
    args = RolloutArgs(env_id=env_id, num_envs=4, unroll_length=100, explore_envs=0.5, explore_after=300)
    rollouts = collect(unconnected_collector(args), 4)  # of 200 steps in the environments that do not explore
    certain = [bool((Categorical(rollout.behaviour_logits).entropy() < 1e-6).any()) for rollout in rollouts]
    assert certain == [False, False, entry_point is Env, entry_point is Env]


def test_rewards_of_environments_that_explore_do_not_end_it():
    bursts = Bursts(num_envs=3, explorers=1, longest=5, after=20, sizes=[3])
    assert bursts.wanted(np.array([0, 10, 400]))
    assert not bursts.wanted(np.array([0, 9, 400])), "20 steps ago one of them had a reward"
    assert not bursts.wanted(np.array([500, 0, 0])), "their steps do not count either"
    assert Bursts(num_envs=3, explorers=1, longest=5, after=0, sizes=[3]).wanted(np.zeros(3, int))
    never = Bursts(num_envs=3, explorers=1, longest=5, after=2**40, sizes=[3])
    assert not never.wanted(np.zeros(3, np.int32)), "more than an int32 holds"


@pytest.mark.parametrize(
    ("share", "num_envs", "explorers"),
    [
        (0, 8, 0),
        (0.25, 32, 8),
        (0.25, 2, 1),
        (0.25, 1, 0),
        (1, 4, 3),
        (0.07, 100, 7),
        (0.06, 4, 1),
        (0.06, 16, 1),
        (0.06, 2, 0),
    ],
)
def test_one_environment_of_four_explores_at_least_and_one_does_not(share, num_envs, explorers):
    assert RolloutArgs(num_envs=num_envs, explore_envs=share).explorers == explorers


@pytest.mark.parametrize("noise_steps", [3, 16])
def test_noise_is_held_for_so_many_steps_also_across_rollouts(noise_steps):
    args, noise = RolloutArgs(env_id="Pendulum-v1", num_envs=2, unroll_length=4, noise_steps=noise_steps), []
    for rollout in collect(unconnected_collector(args), 12):
        mean, log_std = rollout.behaviour_logits.chunk(2, dim=-1)
        noise += ((rollout.action - mean) / log_std.exp()).squeeze(-1)
    held = torch.stack(noise)
    for t in range(1, len(held)):
        assert torch.allclose(held[t], held[t - 1], atol=1e-5) == (t % noise_steps != 0), t
