"""Rollouts as actors write them and the learner reads them."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.data.rollout import Rollout, finished_episodes, minibatches, rollout_spec, write_step
from a3c_mp.processes.slots import Slots

CPU = torch.device("cpu")
IMAGES = Box(0, 255, (4, 84, 84), np.uint8)
VECTORS = Box(-1.0, 1.0, (3,), np.float32)


def a_rollout(unroll_length, num_envs, obs_space=VECTORS, num_actions=2):
    return Rollout(**Slots(rollout_spec(unroll_length, num_envs, obs_space, Discrete(num_actions)), 1)[0])


def test_a_slot_made_from_the_spec_is_a_rollout():
    """By name and in order, so that neither can gain a field without the other."""
    spec = rollout_spec(5, 3, IMAGES, Discrete(6))
    assert tuple(spec) == Rollout._fields
    for name, tensor in Slots(spec, 1)[0].items():
        steps = {"obs": 6, "value": 6, "lstm_state": 1}.get(name, 5)
        assert tensor.shape[:2] == (steps, 3), name


@pytest.mark.parametrize(
    ("obs_space", "dtype"),
    [(IMAGES, torch.uint8), (VECTORS, torch.float32), (Box(-1.0, 1.0, (3,), np.float64), torch.float32)],
)
def test_observations_are_bytes_for_images_and_float32_otherwise(obs_space, dtype):
    rollout = a_rollout(5, 3, obs_space, num_actions=7)
    assert rollout.obs.dtype == dtype
    assert rollout.obs.shape == (6, 3, *obs_space.shape)
    assert rollout.behaviour_logits.shape == (5, 3, 7)
    assert rollout.action.dtype == torch.int64


def test_observations_that_no_rollout_holds_are_refused():
    with pytest.raises(AssertionError):
        rollout_spec(5, 3, Discrete(4), Discrete(2))


@pytest.mark.parametrize(
    ("space", "shape", "dtype", "params"),
    [
        (Box(-1.0, 1.0, (2, 3)), (2, 3), torch.float32, 12),
        (MultiDiscrete([2, 4]), (2,), torch.int64, 6),
        (MultiBinary(3), (3,), torch.int64, 6),
    ],
    ids=str,
)
def test_actions_have_the_shape_and_dtype_of_their_space(space, shape, dtype, params):
    spec = rollout_spec(5, 3, VECTORS, space)
    assert spec["action"] == ((5, 3, *shape), dtype)
    assert spec["behaviour_logits"] == ((5, 3, params), torch.float32)


def test_write_step_fills_its_step_and_no_other():
    rollout = a_rollout(4, 2)
    obs = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
    write_step(rollout, 1, obs=obs, reward=np.array([1.5, -1.5]), terminated=np.array([True, False]))
    assert rollout.obs[1].tolist() == obs.tolist()
    assert rollout.reward[1].tolist() == [1.5, -1.5]
    assert rollout.terminated[1].tolist() == [True, False]
    for field in (rollout.obs, rollout.reward, rollout.terminated):
        assert not field[[0, 2, 3]].any()
    untouched = set(Rollout._fields) - {"obs", "reward", "terminated"}
    assert not any(getattr(rollout, name).any() for name in untouched)


def test_write_step_clears_what_the_slot_held_before():
    """Where an environment knows no lives, `False` stands for the whole batch."""
    rollout = a_rollout(2, 3)
    rollout.life_lost.fill_(True)
    write_step(rollout, 0, life_lost=False)
    assert rollout.life_lost.tolist() == [[False] * 3, [True] * 3]


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 250), st.integers(1, 3), st.integers(0, 2**31))
def test_minibatches_visit_every_sample_once_a_pass(num_samples, batch_size, passes, seed):
    batches = list(minibatches(num_samples, batch_size, passes, torch.Generator().manual_seed(seed), CPU))
    batches_a_pass = -(-num_samples // batch_size)
    assert len(batches) == passes * batches_a_pass
    for start in range(0, len(batches), batches_a_pass):
        one_pass = batches[start : start + batches_a_pass]
        assert torch.cat(one_pass).sort().values.tolist() == list(range(num_samples))
        sizes = [len(batch) for batch in one_pass]
        assert max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1, "a small one would weigh as much as the others"


def test_minibatches_are_shuffled_by_the_generator_they_are_given():
    def order(seed):
        return torch.cat(list(minibatches(100, 32, 2, torch.Generator().manual_seed(seed), CPU))).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[:100] != order(1)[100:], "each pass has an order of its own"
    assert order(1)[:100] != list(range(100))


def literal_episodes(rewards, done):
    """(step at which it ended, environment, episode) of every episode in a stream [T, B], in order of time."""
    found = []
    for b in range(rewards.shape[1]):
        start = 0
        for end in np.flatnonzero(done[:, b]):
            found.append((end, b, Episode(rewards[start : end + 1, b].sum(), end + 1 - start, b)))
            start = end + 1
    return [episode for *_, episode in sorted(found)]


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_finished_episodes_of_a_stream_are_its_whole_games(num_envs, num_rollouts, unroll_length, seed):
    """Games go on from one rollout to the next; lost lives do not end them. Rewards are whole, so sums are exact."""
    rng = np.random.default_rng(seed)
    shape = (num_rollouts * unroll_length, num_envs)
    rewards = rng.integers(-9, 10, shape).astype(np.float64)
    terminated, truncated, life_lost = rng.random((3, *shape)) < 0.2

    stats = EpisodeStats(num_envs)
    rollout = a_rollout(unroll_length, num_envs)  # one slot, filled again and again
    found = []
    for step in range(len(rewards)):
        stats.step(rewards[step], terminated[step] | truncated[step])
        write_step(
            rollout,
            step % unroll_length,
            terminated=terminated[step],
            truncated=truncated[step],
            life_lost=life_lost[step],
            episode_return=stats.returns,
            episode_length=stats.lengths,
        )
        if (step + 1) % unroll_length == 0:
            found += finished_episodes(rollout)
    assert found == literal_episodes(rewards, terminated | truncated)


def test_a_game_that_is_over_when_its_time_is_counts_once():
    rollout = a_rollout(1, 2)
    both = np.array([True, False])
    write_step(rollout, 0, terminated=both, truncated=both, episode_return=torch.tensor([7.0, 8.0]), episode_length=3)
    assert finished_episodes(rollout) == [Episode(7.0, 3)]
