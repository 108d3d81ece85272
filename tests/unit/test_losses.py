"""Parts of losses against their formulas; whole losses are in test_a3c_grad.py, test_apex.py and test_impala.py."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from a3c_mp.maths import losses
from a3c_mp.nets.distributions import Categorical

B, A = 7, 5


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("clip_ratio", "on_policy"), [(0.2, True), (math.inf, True), (math.inf, False)])
def test_the_policy_gradient_is_that_of_a2c_weighted_by_the_ratio(clip_ratio, on_policy, rng):
    logits, behaviour_logits = torch.randn(2, B, A, generator=rng)
    behaviour_logits = logits if on_policy else behaviour_logits
    action, advantages = torch.randint(A, (B,), generator=rng), torch.randn(B, generator=rng)
    ratio = (Categorical(logits).log_prob(action) - Categorical(behaviour_logits).log_prob(action)).exp()
    variable = logits.clone().requires_grad_()
    log_probs, behaviour_log_probs = (Categorical(params).log_prob(action) for params in (variable, behaviour_logits))
    losses.clipped_policy_loss(log_probs, behaviour_log_probs, advantages, clip_ratio).backward()
    grad_log_prob = nn.functional.one_hot(action, A) - logits.softmax(dim=-1)
    torch.testing.assert_close(variable.grad, -(ratio * advantages)[:, None] * grad_log_prob / B)


@pytest.mark.parametrize(
    ("ratio", "advantage", "pushes"),
    [
        (1.15, +1.0, True),  # good, and not yet far enough
        (1.25, +1.0, False),  # good, and far enough
        (0.75, +1.0, True),  # good, yet less likely than it was
        (0.85, -1.0, True),  # bad, and not yet far enough
        (0.75, -1.0, False),  # bad, and far enough
        (1.25, -1.0, True),  # bad, yet likelier than it was
    ],
)
def test_a_sample_stops_pushing_once_it_has_moved_far_enough(ratio, advantage, pushes):
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    losses.clipped_policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), clip_ratio=0.2).backward()
    assert log_probs.grad.item() == pytest.approx(-advantage * ratio if pushes else 0.0)


@settings(deadline=None)
@given(st.integers(2, 300), st.integers(0, 2**32 - 1), st.floats(-100, 100), st.floats(0.01, 100))
def test_normalized_advantages_have_mean_zero_and_variance_one(num_samples, seed, mean, deviation):
    advantages = mean + deviation * np.random.default_rng(seed).normal(size=num_samples)
    deviation = advantages.std()
    if deviation < 1e-4 * abs(mean):  # float32 has no such numbers
        return
    normalized = losses.normalize(torch.tensor(advantages, dtype=torch.float32))
    np.testing.assert_allclose(normalized, (advantages - advantages.mean()) / deviation, rtol=1e-2, atol=1e-2)


def test_equal_advantages_normalize_to_zero_and_a_single_one_is_left_as_it_is():
    assert torch.equal(losses.normalize(torch.full((B,), 3.0)), torch.zeros(B))
    assert losses.normalize(torch.tensor([[-3.0]])).tolist() == [[-3.0]]


def test_moments_are_weighted_and_samples_without_weight_do_not_push():
    """Where every action is worth the same, nothing is to be learned, however old the policy that acted."""
    pi, mu = torch.tensor([0.9, 0.1]), torch.tensor([0.1, 0.9])
    actions = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 1])  # as mu takes them
    weights = pi[actions] / mu[actions]
    for worth, scale in ((1.0, 1.0), (-1.0, 1.0), (1.0, 0.01)):
        found = losses.normalize(torch.full((10,), worth), scale * weights)
        assert torch.equal(weights * found, torch.zeros(10))
    advantages = torch.tensor([5.0, 1.0, 3.0])
    found = losses.normalize(advantages, torch.tensor([0.0, 1.0, 1.0]))
    torch.testing.assert_close(found[1:], losses.normalize(advantages[1:]))
    assert losses.normalize(advantages, torch.zeros(3)).isfinite().all()


def test_metrics_of_ratios_against_the_divergence_of_distributions(rng):
    """Over all actions, weighted by the policy that acted, the estimator is the KL divergence."""
    ours, theirs = torch.randn(2, A, generator=rng).log_softmax(-1)
    theirs_then_ours = (torch.distributions.Categorical(logits=logits) for logits in (theirs, ours))
    expected = torch.distributions.kl_divergence(*theirs_then_ours)
    metrics = losses.ratio_metrics(ours - theirs, 0.2)
    torch.testing.assert_close((theirs.exp() * metrics["policy/approx_kl"]).sum(), expected)
    ratios = torch.tensor([0.79, 0.81, 1.0, 1.19, 1.21, 1e30])
    metrics = losses.ratio_metrics(ratios.log(), 0.2)
    assert metrics["policy/clip_fraction"].tolist() == [1, 0, 0, 0, 1, 1]
    assert metrics["policy/approx_kl"].isfinite().all()


def test_diagnostics_are_read_off_a_loss():
    targets = torch.tensor([1.0, 2.0, 3.0])
    for values, theirs, share in (
        (targets + 5, targets, 1.0),
        (torch.zeros(3), targets, 0.0),
        (-targets, targets, -3.0),
        (targets, torch.ones(3), 0.0),
    ):
        found = losses.with_diagnostics({"values/value": values, "values/target": theirs, "losses/entropy": -0.5})
        assert found["values/explained_variance"].item() == pytest.approx(share)
        assert found["policy/entropy"] == 0.5
    log_ratios = torch.tensor([0.0, 0.1, 0.5])
    found = losses.with_diagnostics({"policy/log_ratio": log_ratios, "policy/clip_ratio": 0.2})
    assert found.keys() == losses.ratio_metrics(log_ratios, 0.2).keys()
