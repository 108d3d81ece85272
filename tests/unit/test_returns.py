"""Returns against second implementations: literal sums in float64, and a walk that stops where an episode does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.maths.return_stats import FEW, MANY, ReturnStats
from a3c_mp.maths.returns import cut_truncated, gae, n_step_returns, vtrace

GAMMA = 0.97


class Unroll:
    """Random float64 arrays of a rollout, [T, B]."""

    def __init__(self, unroll_length, num_envs, seed, end_probability=0.2):
        rng, shape = np.random.default_rng(seed), (unroll_length, num_envs)
        self.rewards, self.final_values, self.log_rhos = rng.normal(size=(3, *shape))
        self.terminated, self.truncated = rng.random((2, *shape)) < end_probability
        self.discounts = GAMMA * ~self.terminated
        self.values = rng.normal(size=(unroll_length + 1, num_envs))

    def tensors(self, cut=False, dtype=torch.float32):
        """(rewards, discounts, values, bootstrap_value), arguments of the functions; `cut`: at time limits."""
        final_values = np.where(self.truncated, self.final_values, np.nan)  # undefined where nothing was truncated
        arrays = self.rewards, self.discounts, final_values, self.values
        rewards, discounts, final_values, values = (torch.tensor(array, dtype=dtype) for array in arrays)
        if cut:
            rewards, discounts = cut_truncated(rewards, discounts, torch.tensor(self.truncated), final_values)
        return rewards, discounts, values[:-1], values[-1]


unrolls = st.builds(
    Unroll, st.integers(1, 12), st.integers(1, 3), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2, 1.0])
)


def literal_gae(rewards, discounts, values, lam):
    """The sum of all later TD errors, each times the discounts and lambdas on the way to it."""
    unroll_length, num_envs = rewards.shape
    advantages = np.zeros_like(rewards)
    for t in range(unroll_length):
        for b in range(num_envs):
            for k in range(t, unroll_length):
                td_error = rewards[k, b] + discounts[k, b] * values[k + 1, b] - values[k, b]
                advantages[t, b] += np.prod(lam * discounts[t:k, b]) * td_error
    return advantages


def literal_vtrace(unroll: Unroll, clip_rho, clip_c, clip_pg_rho):
    """Equation 1 and the advantages of section 4.2, written out stream by stream and cut at every end."""
    unroll_length, num_envs = unroll.rewards.shape
    rhos = np.exp(unroll.log_rhos)
    vs, advantages = np.zeros((2, *rhos.shape))
    for b in range(num_envs):
        ended = unroll.terminated[:, b] | unroll.truncated[:, b]

        def what_follows(t, values, b=b):
            """r_t + gamma * the value of what comes next."""
            if unroll.terminated[t, b]:
                return unroll.rewards[t, b]
            return unroll.rewards[t, b] + GAMMA * (unroll.final_values if unroll.truncated[t, b] else values)[t, b]

        for s in range(unroll_length):
            vs[s, b] = unroll.values[s, b]
            for t in range(s, unroll_length):
                if ended[s:t].any():
                    break
                product = np.prod([min(clip_c, rhos[i, b]) for i in range(s, t)])
                delta = min(clip_rho, rhos[t, b]) * (what_follows(t, unroll.values[1:]) - unroll.values[t, b])
                vs[s, b] += GAMMA ** (t - s) * product * delta
        next_vs = np.append(vs[1:], unroll.values[-1:], axis=0)
        for s in range(unroll_length):
            advantage = what_follows(s, next_vs) - unroll.values[s, b]
            advantages[s, b] = min(clip_pg_rho, rhos[s, b]) * advantage
    return vs, advantages


def literal_returns_of_episodes(unroll: Unroll, n: int):
    """n-step returns of a stream with both kinds of ends, by walking forward until one of them."""
    unroll_length, num_envs = unroll.rewards.shape
    targets = np.zeros_like(unroll.rewards)
    for t in range(unroll_length):
        for b in range(num_envs):
            weight = 1.0
            for k in range(t, min(t + n, unroll_length)):
                targets[t, b] += weight * unroll.rewards[k, b]
                if unroll.terminated[k, b]:
                    weight = 0.0  # nothing follows, not even at a time limit reached in the same step
                elif unroll.truncated[k, b]:
                    targets[t, b] += weight * GAMMA * unroll.final_values[k, b]
                    weight = 0.0
                weight *= GAMMA
            targets[t, b] += weight * unroll.values[min(t + n, unroll_length), b]
    return targets


@settings(deadline=None)
@given(unrolls, st.integers(1, 14))
def test_n_step_returns_are_what_a_walk_along_each_episode_gives(unroll, n):
    targets = n_step_returns(*unroll.tensors(cut=True), n)
    np.testing.assert_allclose(targets, literal_returns_of_episodes(unroll, n), rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(unrolls, st.floats(0.0, 1.0))
def test_gae_is_the_double_sum(unroll, lam):
    expected = literal_gae(unroll.rewards, unroll.discounts, unroll.values, lam)
    advantages, returns = gae(*unroll.tensors(), lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(returns, expected + unroll.values[:-1], rtol=1e-4, atol=1e-4)


clips = st.sampled_from([0.5, 1.0, 2.0, float("inf")])


@settings(deadline=None)
@given(unrolls, clips, clips, clips, st.sampled_from([(torch.float64, 1e-9), (torch.float32, 1e-4)]))
def test_vtrace_is_the_double_sum(unroll, clip_rho, clip_c, clip_pg_rho, precision):
    dtype, tolerance = precision
    rewards, discounts, *values = unroll.tensors(cut=True, dtype=dtype)
    log_rhos = torch.tensor(unroll.log_rhos, dtype=dtype)
    vs, advantages, weights = vtrace(log_rhos, discounts, rewards, *values, clip_rho, clip_c, clip_pg_rho)
    expected = literal_vtrace(unroll, clip_rho, clip_c, clip_pg_rho)
    for x, literal in zip((vs, weights * advantages), expected, strict=True):
        np.testing.assert_allclose(x, literal, rtol=tolerance, atol=tolerance)


def test_nothing_is_written_into_the_arguments():
    """They may be views of a slot that other processes read."""
    rewards, discounts, *values = case = Unroll(6, 2, seed=0).tensors()
    before = [x.clone() for x in case]
    n_step_returns(*case, n=3)
    gae(*case, lam=0.9)
    vtrace(rewards, discounts, rewards, *values)
    cut_truncated(rewards, discounts, rewards > 0, values[0])
    assert all(torch.equal(*pair) for pair in zip(case, before, strict=True))


@pytest.mark.parametrize("wrong", range(4))
def test_shapes_are_checked_at_the_door(wrong):
    """A [B] that broadcasts into [T, B] would be a silent mistake."""
    case = list(Unroll(4, 4, seed=0).tensors())
    case[wrong] = case[wrong][..., :1]
    rewards, discounts, *values = case
    for call in (
        lambda: n_step_returns(*case, n=2),
        lambda: gae(*case, lam=0.9),
        lambda: vtrace(torch.zeros(4, 4), discounts, rewards, *values),
    ):
        with pytest.raises(AssertionError):
            call()


@given(unrolls, st.integers(1, 5), st.integers(-100, 100), st.sampled_from([1e-6, 1.0, 1e6]))
def test_the_deviation_of_returns_is_that_of_whole_games_however_short_the_rollouts(unroll, steps, offset, scale):
    rewards, ended = scale * (unroll.rewards + offset / 10), unroll.terminated | unroll.truncated
    stats, returns, later = ReturnStats(GAMMA, 2, rewards.shape[1]), np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        returns[t] = later = rewards[t] + GAMMA * later * ~ended[t]
    for part in (slice(t, t + steps) for t in range(0, len(rewards), steps)):
        stats.update(1, torch.tensor(rewards[part]), torch.tensor(ended[part]))
    assert stats.sums[1] == pytest.approx(returns.sum(), rel=1e-9, abs=1e-9 * scale)
    assert stats.sums[2] == pytest.approx(np.square(returns).sum(), rel=1e-9)
    assert returns.size == 1 or stats.deviation() == pytest.approx(returns.std(), rel=1e-6)
    largest = np.abs(rewards).max()
    assert stats.scale() == pytest.approx(1 / max(stats.deviation() or largest or 1.0, largest / 10), rel=1e-6)


def test_the_statistics_of_returns_continue_from_a_checkpoint_and_with_other_actors_without_their_games():
    rewards, going_on = torch.arange(12.0).view(6, 2), torch.zeros(6, 2, dtype=torch.bool)
    for num_actors, equal in ((1, True), (2, False)):
        whole, restored = ReturnStats(GAMMA, 1, 2), ReturnStats(GAMMA, num_actors, 2)
        whole.update(0, rewards[:3], going_on[:3])
        restored.load_state_dict(whole.state_dict())
        for stats in (whole, restored):
            stats.update(0, rewards[3:], going_on[3:])
        assert torch.equal(whole.sums, restored.sums) == equal
        assert restored.sums[0] == 12
    whole.forget(0)
    assert not whole.open.any()


def test_returns_of_another_discount_factor_are_soon_outweighed():
    """As where a run is resumed with `--gamma`."""
    before, after, new = ReturnStats(0.5, 1, 2), ReturnStats(0.99, 1, 2), ReturnStats(0.99, 1, 2)
    for stats in (before, after, new):
        if stats is after:
            after.load_state_dict(before.state_dict())
        stats.update(0, torch.ones(10 * FEW, 2), (torch.arange(10 * FEW) % 200 == 199)[:, None].expand(-1, 2))
    assert after.deviation() == pytest.approx(new.deviation(), rel=0.1)
    assert before.deviation() < 0.1 * new.deviation()
    clipped = ReturnStats(0.99, 1, 2, is_clipped=True)
    clipped.load_state_dict(new.state_dict())
    assert (clipped.sums[0], clipped.largest) == (FEW, 0.0), "returns of other rewards"


def test_one_reward_of_another_scale_changes_little_and_a_lasting_one_is_soon_reached():
    stats, done = ReturnStats(0.9, 1, 1), (torch.arange(100) % 20 == 19)[:, None]
    for _ in range(MANY // 100 + 1):
        stats.update(0, torch.rand(100, 1), done)
    before = stats.scale()
    glitch = torch.rand(100, 1)
    glitch[50] = 1e9
    stats.update(0, glitch, done)
    assert stats.scale() > 0.5 * before
    for _ in range(11):
        stats.update(0, 1e9 * torch.rand(100, 1), done)
    assert stats.scale() < 1e-7 * before


@pytest.mark.parametrize("reward", [0.0, 1e-300, 1e-30, 1e30, 1e155, 1e300])
def test_the_scale_of_any_finite_rewards_is_a_number_of_float32(reward):
    stats = ReturnStats(GAMMA, 1, 1)
    assert stats.scale() == 1.0
    for done in (False, True):
        stats.update(0, torch.tensor([[reward], [0.0]], dtype=torch.float64), torch.tensor([[done], [done]]))
    assert 0 < torch.tensor(stats.scale()).item() < np.inf
