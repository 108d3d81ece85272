"""Gradients of the losses against their formulas, written out for a softmax policy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import train_a3c_data
import train_task
from a3c_mp.algorithms import actor_critic
from a3c_mp.algorithms.actor_critic import Samples
from a3c_mp.algorithms.actor_critic_settings import ActorCriticArgs
from a3c_mp.maths import losses
from a3c_mp.nets.distributions import Categorical
from a3c_mp.nets.obs_norm import ObsNorm

B, A = 7, 5


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


def grad_log_prob(logits, action):
    """d log pi(a|s) / d logits of each sample [B, A]: one at the action, less the probabilities."""
    return nn.functional.one_hot(action, logits.shape[-1]) - logits.softmax(dim=-1)


def policy_loss_gradient(logits, action, behaviour_logits, advantages, clip_ratio):
    """d policy_loss / d logits, by autograd."""
    logits = logits.clone().requires_grad_()
    log_probs, behaviour_log_probs = (Categorical(params).log_prob(action) for params in (logits, behaviour_logits))
    losses.clipped_policy_loss(log_probs, behaviour_log_probs, advantages, clip_ratio).backward()
    return logits.grad


def test_value_loss_gradient_is_the_mean_error(rng):
    values, targets = torch.randn(2, B, generator=rng)
    values.requires_grad_()
    losses.value_loss(values, targets).backward()
    torch.testing.assert_close(values.grad, (values.detach() - targets) / B)


@pytest.mark.parametrize("clip_ratio", [0.1, 0.2, math.inf])
def test_at_ratio_one_the_policy_gradient_is_that_of_a2c(clip_ratio, rng):
    logits = torch.randn(B, A, generator=rng)
    action = torch.randint(A, (B,), generator=rng)
    advantages = torch.randn(B, generator=rng)
    gradient = policy_loss_gradient(logits, action, logits, advantages, clip_ratio)
    torch.testing.assert_close(gradient, -advantages[:, None] * grad_log_prob(logits, action) / B)


def test_without_a_clip_the_policy_gradient_is_weighted_by_the_ratio(rng):
    logits, behaviour_logits = torch.randn(2, B, A, generator=rng)
    action = torch.randint(A, (B,), generator=rng)
    advantages = torch.randn(B, generator=rng)
    ratio = (Categorical(logits).log_prob(action) - Categorical(behaviour_logits).log_prob(action)).exp()
    gradient = policy_loss_gradient(logits, action, behaviour_logits, advantages, math.inf)
    torch.testing.assert_close(gradient, -(ratio * advantages)[:, None] * grad_log_prob(logits, action) / B)


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


def test_a_single_advantage_is_left_as_it_is():
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
    assert torch.equal(losses.normalize(advantages, torch.full((3,), 1.0)), losses.normalize(advantages))
    assert torch.zeros(3).equal(torch.zeros(3) * losses.normalize(advantages, torch.zeros(3))), "finite"


class Given(nn.Module):
    """A net of vectors whose outputs are given."""

    def __init__(self, logits, values):
        super().__init__()
        self.outputs, self.norm = (logits, values), ObsNorm((1,), image=False)
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        return self.outputs

    def distributions(self, logits, behaviour_logits):
        return Categorical(logits), Categorical(behaviour_logits)


def some_samples(rng):
    behaviour_logits, advantages, value_targets = torch.randn(B, A, generator=rng), *torch.randn(2, B, generator=rng)
    return Samples(
        torch.zeros(B, 1), torch.randint(A, (B,), generator=rng), behaviour_logits, advantages, value_targets
    )


A3C_LOSS = pytest.mark.parametrize("a3c_loss", [train_a3c_data.loss, train_task.loss, actor_critic.loss])


@A3C_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_total_is_the_losses_times_their_costs_in_float32(rng, a3c_loss, dtype):
    samples = some_samples(rng)
    logits, values = torch.randn(B, A, generator=rng).to(dtype), torch.randn(B, generator=rng).to(dtype)
    total, metrics = a3c_loss(ActorCriticArgs(value_coef=0.5, entropy_coef=0.01), Given(logits, values), samples)
    expected = metrics["losses/policy"] + 0.5 * metrics["losses/value"] + 0.01 * metrics["losses/entropy"]
    torch.testing.assert_close(total, expected)
    assert metrics["losses/total"] is total
    for metric, field in {"advantage": samples.advantages, "value": values, "target": samples.value_targets}.items():
        assert torch.equal(metrics[f"values/{metric}"], field.float())
    assert {tensor.dtype for tensor in [total, *losses.with_diagnostics(metrics).values()]} == {torch.float32}


@A3C_LOSS
def test_one_sgd_step_is_theta_minus_learning_rate_times_gradient(rng, a3c_loss):
    """A linear policy and value, acting as it learns, so that every gradient has a closed form."""
    learning_rate, value_coef, entropy_coef = 0.1, 0.5, 0.03
    obs = torch.randn(B, 3, generator=rng)
    net = nn.Linear(3, A + 1)
    output = net(obs)
    samples = some_samples(rng)._replace(behaviour_logits=output[:, :A].detach())

    logits, values = output[:, :A].detach(), output[:, A].detach()
    log_probs = logits.log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1, keepdim=True)
    gradient = torch.empty(B, A + 1)
    gradient[:, :A] = -samples.advantages[:, None] * grad_log_prob(logits, samples.action)
    gradient[:, :A] += entropy_coef * log_probs.exp() * (log_probs + entropy)  # d(-H)/dlogit_i = p_i (log p_i + H)
    gradient[:, A] = value_coef * (values - samples.value_targets)
    gradient /= B
    expected_weight = net.weight.detach() - learning_rate * gradient.T @ obs
    expected_bias = net.bias.detach() - learning_rate * gradient.sum(dim=0)

    optimizer = torch.optim.SGD(net.parameters(), lr=learning_rate)
    args = ActorCriticArgs(value_coef=value_coef, entropy_coef=entropy_coef)
    a3c_loss(args, Given(output[:, :A], output[:, A]), samples)[0].backward()
    optimizer.step()
    torch.testing.assert_close(net.weight.detach(), expected_weight)
    torch.testing.assert_close(net.bias.detach(), expected_bias)


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
    for values, share in ((targets + 5, 1.0), (torch.zeros(3), 0.0), (-targets, -3.0)):
        found = losses.with_diagnostics({"values/value": values, "values/target": targets, "losses/entropy": -0.5})
        assert found["values/explained_variance"].item() == pytest.approx(share)
        assert found["policy/entropy"] == 0.5
    log_ratios = torch.tensor([0.0, 0.1, 0.5])
    found = losses.with_diagnostics({"policy/log_ratio": log_ratios, "policy/clip_ratio": 0.2})
    assert found.keys() == losses.ratio_metrics(log_ratios, 0.2).keys()
    assert found["policy/clip_fraction"].tolist() == [0, 0, 1]
    constant = {"values/value": targets, "values/target": torch.ones(3)}
    assert losses.with_diagnostics(constant)["values/explained_variance"] == 0
