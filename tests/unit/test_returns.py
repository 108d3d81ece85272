"""Returns against second implementations: literal sums in float64, and a walk that stops where an episode does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.maths.returns import cut_truncated, gae, n_step_returns, vtrace

GAMMA = 0.97


class Unroll:
    """Random float64 arrays of a rollout, [T, B], and their float32 tensors."""

    def __init__(self, unroll_length: int, num_envs: int, seed: int, end_probability: float = 0.2):
        rng = np.random.default_rng(seed)
        shape = (unroll_length, num_envs)
        self.rewards = rng.normal(size=shape)
        self.terminated = rng.random(shape) < end_probability
        self.truncated = rng.random(shape) < end_probability
        self.discounts = GAMMA * ~self.terminated
        self.values = rng.normal(size=(unroll_length + 1, num_envs))
        self.final_values = rng.normal(size=shape)
        self.log_rhos = rng.normal(size=shape)

    def tensors(self):
        """Arguments of the functions under test: (rewards, discounts, values, bootstrap_value)."""
        return (f32(self.rewards), f32(self.discounts), f32(self.values[:-1]), f32(self.values[-1]))


def f32(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float32)


unrolls = st.builds(
    Unroll,
    unroll_length=st.integers(1, 12),
    num_envs=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    end_probability=st.sampled_from([0.0, 0.2, 1.0]),
)


def literal_n_step_returns(rewards, discounts, values, n):
    """The sum of n discounted rewards and a discounted value, written out."""
    unroll_length, num_envs = rewards.shape
    targets = np.zeros_like(rewards)
    for t in range(unroll_length):
        end = min(t + n, unroll_length)
        for b in range(num_envs):
            targets[t, b] = np.prod(discounts[t:end, b]) * values[end, b]
            for k in range(t, end):
                targets[t, b] += np.prod(discounts[t:k, b]) * rewards[k, b]
    return targets


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
def test_n_step_returns_are_the_double_sum(unroll, n):
    expected = literal_n_step_returns(unroll.rewards, unroll.discounts, unroll.values, n)
    np.testing.assert_allclose(n_step_returns(*unroll.tensors(), n), expected, rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(unrolls, st.floats(0.0, 1.0))
def test_gae_is_the_double_sum(unroll, lam):
    expected = literal_gae(unroll.rewards, unroll.discounts, unroll.values, lam)
    advantages, returns = gae(*unroll.tensors(), lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(returns, expected + unroll.values[:-1], rtol=1e-4, atol=1e-4)


clips = st.sampled_from([0.5, 1.0, 2.0, float("inf")])


def cut_vtrace(unroll: Unroll, dtype, *args):
    """`vtrace` of a stream with both kinds of ends, as a learner calls it."""
    fields = (unroll.rewards, unroll.discounts, unroll.final_values, unroll.log_rhos, unroll.values)
    rewards, discounts, final_values, log_rhos, values = (torch.tensor(field, dtype=dtype) for field in fields)
    rewards, discounts = cut_truncated(rewards, discounts, torch.tensor(unroll.truncated), final_values)
    vs, advantages, weights = vtrace(log_rhos, discounts, rewards, values[:-1], values[-1], *args)
    return vs, weights * advantages


@settings(deadline=None)
@given(unrolls, clips, clips, clips)
def test_vtrace_is_the_double_sum(unroll, clip_rho, clip_c, clip_pg_rho):
    expected = literal_vtrace(unroll, clip_rho, clip_c, clip_pg_rho)
    for x, literal in zip(cut_vtrace(unroll, torch.float64, clip_rho, clip_c, clip_pg_rho), expected, strict=True):
        np.testing.assert_allclose(x, literal, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(unrolls)
def test_vtrace_in_float32_is_the_double_sum(unroll):
    for x, literal in zip(cut_vtrace(unroll, torch.float32), literal_vtrace(unroll, 1.0, 1.0, 1.0), strict=True):
        np.testing.assert_allclose(x, literal, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(unrolls, st.integers(1, 14))
def test_cut_streams_are_what_a_walk_along_each_episode_gives(unroll, n):
    _, discounts, values, bootstrap_value = unroll.tensors()
    rewards, discounts = cut_truncated(
        f32(unroll.rewards), discounts, torch.tensor(unroll.truncated), f32(unroll.final_values)
    )
    targets = n_step_returns(rewards, discounts, values, bootstrap_value, n)
    np.testing.assert_allclose(targets, literal_returns_of_episodes(unroll, n), rtol=1e-4, atol=1e-4)


def column(*numbers: float) -> torch.Tensor:
    """One environment over time, [T, 1]."""
    return torch.tensor(numbers)[:, None]


def test_returns_of_a_small_case_computed_by_hand():
    """Rewards 1, 2, 4; discount 1/2, but 0 at the second step, which ends an episode; values 8, 16, 32; then 64.

    One step:  1 + 16/2 = 9;  2;  4 + 64/2 = 36.
    Two steps: 1 + 2/2 = 2;   2;  36, as the rollout has no more steps.
    """
    case = column(1.0, 2.0, 4.0), column(0.5, 0.0, 0.5), column(8.0, 16.0, 32.0), torch.tensor([64.0])
    assert n_step_returns(*case, n=1).flatten().tolist() == [9.0, 2.0, 36.0]
    assert n_step_returns(*case, n=2).flatten().tolist() == [2.0, 2.0, 36.0]


def test_gae_of_a_small_case_computed_by_hand():
    """The same case: TD errors 9 - 8 = 1, 2 - 16 = -14, 36 - 32 = 4; lambda 1/2: 1 - 14/4 = -2.5, -14, 4."""
    case = column(1.0, 2.0, 4.0), column(0.5, 0.0, 0.5), column(8.0, 16.0, 32.0), torch.tensor([64.0])
    advantages, returns = gae(*case, lam=0.5)
    assert advantages.flatten().tolist() == [-2.5, -14.0, 4.0]
    assert returns.flatten().tolist() == [5.5, 2.0, 36.0]


def test_vtrace_of_a_small_case_computed_by_hand():
    """The same case, with rho 1/2, 3, 2.

    TD errors 9 - 8 = 1, 2 - 16 = -14, 36 - 32 = 4, times rho clipped at 1: 1/2, -14, 4.
    vs:  32 + 4 = 36;  16 - 14 = 2, as the discount of 0 lets nothing through;  8 + 1/2 + 1/2 * 1/2 * -14 = 5.
    Advantages: 1/2 * (1 + 2/2 - 8) = -3;  2 - 16 = -14;  4 + 64/2 - 32 = 4; with a clip at 2, twice the last two.
    """
    case = column(0.5, 0.0, 0.5), column(1.0, 2.0, 4.0), column(8.0, 16.0, 32.0), torch.tensor([64.0])
    log_rhos = column(0.5, 3.0, 2.0).log()
    vs, advantages, weights = vtrace(log_rhos, *case)
    torch.testing.assert_close(vs, column(5.0, 2.0, 36.0))
    torch.testing.assert_close(advantages, column(-6.0, -14.0, 4.0))
    torch.testing.assert_close(weights, column(0.5, 1.0, 1.0))
    torch.testing.assert_close(vtrace(log_rhos, *case, clip_pg_rho=2.0)[2], column(0.5, 2.0, 2.0))
    torch.testing.assert_close(vtrace(log_rhos, *case, clip_rho=2.0)[0], column(8 + 0.5 - 0.25 * 28, -12.0, 40.0))


@pytest.mark.parametrize(
    ("terminated", "truncated", "reward", "discount"),
    [
        (False, False, 1.0, 0.5),  # goes on
        (True, False, 1.0, 0.0),  # nothing follows
        (False, True, 1.0 + 0.5 * 8.0, 0.0),  # the value of the final observation follows
        (True, True, 1.0, 0.0),  # it was over when the time was
    ],
)
def test_a_truncated_step_is_paid_the_value_it_was_cut_off_from(terminated, truncated, reward, discount):
    discounts = column(0.5 * (not terminated))
    found = cut_truncated(column(1.0), discounts, torch.tensor([[truncated]]), column(8.0))
    assert [x.item() for x in found] == [reward, discount]


def test_final_values_of_steps_that_were_not_truncated_are_never_looked_at():
    truncated = torch.tensor([[False], [True]])
    nan = float("nan")
    rewards, discounts = cut_truncated(column(1.0, 1.0), column(0.5, 0.5), truncated, column(nan, 8.0))
    assert rewards.flatten().tolist() == [1.0, 5.0]
    assert discounts.flatten().tolist() == [0.5, 0.0]


def test_nothing_is_written_into_the_arguments():
    unroll = Unroll(6, 2, seed=0)
    case = unroll.tensors()
    truncated, final_values = torch.tensor(unroll.truncated), f32(unroll.final_values)
    before = [x.clone() for x in (*case, final_values)]
    n_step_returns(*case, n=3)
    gae(*case, lam=0.9)
    vtrace(f32(unroll.log_rhos), case[1], case[0], *case[2:])
    cut_truncated(case[0], case[1], truncated, final_values)
    for x, copy in zip((*case, final_values), before, strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize("wrong", range(4))
def test_shapes_are_checked_at_the_door(wrong):
    """A [B] that broadcasts into [T, B] would be a silent mistake."""
    case = list(Unroll(4, 4, seed=0).tensors())
    case[wrong] = case[wrong][..., :1]
    with pytest.raises(AssertionError):
        n_step_returns(*case, n=2)
    with pytest.raises(AssertionError):
        gae(*case, lam=0.9)
    rewards, discounts, *rest = case
    with pytest.raises(AssertionError):
        vtrace(torch.zeros(4, 4), discounts, rewards, *rest)
