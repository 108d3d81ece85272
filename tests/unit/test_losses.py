"""Parts of losses against their formulas; whole losses are in test_a3c_grad.py, test_apex.py and test_impala.py."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train_a3c_data
from a3c_mp.algorithms.actor_critic import Samples
from a3c_mp.maths import losses


def test_the_policy_gradient_is_that_of_the_weighted_advantage_until_the_ratio_leaves_the_clip_range():
    """d loss / d log pi is -A ratio / B, and 0 where the advantage has moved the ratio far enough."""
    ratios = torch.tensor([1.15, 1.25, 0.75, 0.85, 0.75, 1.25])
    advantages = torch.tensor([1.0, 2.0, 3.0, -1.0, -2.0, -3.0])
    for clip_ratio, pushes in ((0.2, [1, 0, 1, 1, 0, 1]), (math.inf, [1] * 6)):
        log_probs, zeros = ratios.log().requires_grad_(), torch.zeros(6)
        policies = [Mock(**{"log_prob.return_value": x, "entropy.return_value": zeros}) for x in (log_probs, zeros)]
        net = Mock(return_value=(None, zeros), **{"distributions.return_value": policies})
        args = SimpleNamespace(clip_ratio=clip_ratio, value_coef=1.0, entropy_coef=1.0)
        samples = Samples(zeros, zeros, None, advantages, zeros, {})
        train_a3c_data.loss(args, net, samples)[0].backward()
        torch.testing.assert_close(log_probs.grad, -advantages * ratios * torch.tensor(pushes) / 6)


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
    assert torch.equal(losses.normalize(torch.full((7,), 3.0)), torch.zeros(7))
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


def test_metrics_of_ratios_against_the_divergence_of_distributions():
    """Over all actions, weighted by the policy that acted, the estimator is the KL divergence."""
    ours, theirs = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    theirs_then_ours = (torch.distributions.Categorical(logits=logits) for logits in (theirs, ours))
    expected = torch.distributions.kl_divergence(*theirs_then_ours)
    metrics = losses.with_diagnostics({"policy/log_ratio": ours - theirs, "policy/clip_ratio": 0.2})
    torch.testing.assert_close((theirs.exp() * metrics["policy/approx_kl"]).sum(), expected)
    ratios = torch.tensor([0.79, 0.81, 1.0, 1.19, 1.21, 1e30])
    metrics = losses.with_diagnostics({"policy/log_ratio": ratios.log(), "policy/clip_ratio": 0.2})
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
        found = losses.with_diagnostics({"values/value": values, "values/target": theirs})
        assert found["values/explained_variance"].item() == pytest.approx(share)
    found = losses.with_diagnostics({"policy/log_ratio": torch.tensor([0.0, 0.1, 0.5]), "policy/clip_ratio": 0.2})
    assert found.keys() == {"policy/approx_kl", "policy/clip_fraction"}
    assert losses.with_diagnostics({"policy/log_ratio": torch.zeros(3)}).keys() == {"policy/approx_kl"}


@pytest.mark.parametrize(("width", "is_mean"), [(1.0, False), (10.0, True)])
def test_a_wide_huber_loss_values_a_rare_large_loss_at_what_it_costs(width, is_mean):
    """Nine games of 10 win 0.43, one loses 4.3: a narrow loss would follow the median."""
    outcomes = torch.tensor([0.43] * 9 + [-4.3])
    value = outcomes.mean().requires_grad_()
    losses.quantile_huber(value.expand(10, 1), outcomes[:, None], torch.ones(10), width).backward()
    assert (abs(value.grad.item()) < 1e-6) == is_mean
