"""Distributions of actions against `torch.distributions`."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from torch import distributions as reference

from a3c_mp.nets.distributions import ActionHead, Categorical, is_valid, num_outputs, num_params
from a3c_mp.wrappers import ActionScaling


def choices(*sizes):
    """The reference for several choices: their log-probabilities and entropies are added up."""
    return lambda params: [reference.Categorical(logits=part) for part in params.split(sizes, dim=-1)]


def gaussian(params):
    mean, log_std = params.chunk(2, dim=-1)
    return [reference.Normal(mean[..., i], log_std[..., i].exp()) for i in range(mean.shape[-1])]


SPACES = {
    "discrete": (Discrete(5), choices(5)),
    "multi-discrete": (MultiDiscrete([2, 4, 3]), choices(2, 4, 3)),
    "multi-discrete of two axes": (MultiDiscrete([[2, 3], [4, 2]]), choices(2, 3, 4, 2)),
    "multi-binary": (MultiBinary(3), choices(2, 2, 2)),
    "box": (Box(-1.0, 1.0, (3,)), gaussian),
    "box of two axes": (Box(-1.0, 1.0, (2, 2)), gaussian),
    "box of one number": (Box(-1.0, 1.0, ()), gaussian),
}
EVERY_SPACE = pytest.mark.parametrize(("space", "parts"), SPACES.values(), ids=SPACES)


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


def some_params(space, batch, rng):
    return 2 * torch.randn(*batch, num_params(space), generator=rng)


@EVERY_SPACE
def test_log_prob_and_entropy_are_those_of_torch_distributions(space, parts, rng):
    for batch in [(7,), (2, 3, 7)]:
        params = some_params(space, batch, rng)
        policy = ActionHead(space).distribution(params)
        actions = [part.sample() for part in parts(params)]
        log_prob = sum(part.log_prob(action) for part, action in zip(parts(params), actions, strict=True))
        taken = torch.stack(actions, dim=-1).reshape(*batch, *space.shape)
        torch.testing.assert_close(policy.log_prob(taken), log_prob)
        torch.testing.assert_close(policy.entropy(), sum(part.entropy() for part in parts(params)))


@EVERY_SPACE
def test_samples_follow_the_policy_and_the_generator_alone(space, parts, rng):
    num, params = 20_000, 0.5 * some_params(space, (1,), rng)
    policy = ActionHead(space).distribution(params.expand(num, -1))
    drawn = policy.sample(torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    assert torch.equal(drawn, policy.sample(torch.Generator().manual_seed(1)))
    assert not torch.equal(drawn, policy.sample(torch.Generator().manual_seed(3)))
    assert drawn.shape == (num, *space.shape)
    for part, values in zip(parts(params), drawn.reshape(num, -1).T, strict=True):
        if isinstance(space, Box):
            assert abs(values.mean() - part.mean) < 5 * part.stddev / num**0.5
            assert abs(values.std() / part.stddev - 1) < 5 / num**0.5
        else:
            share = part.probs[0]
            found = values.bincount(minlength=len(share)) / num
            assert ((found - share).abs() <= 5 * (share * (1 - share) / num).sqrt()).all()


@EVERY_SPACE
def test_the_mode_is_the_likeliest_action(space, parts, rng):
    policy = ActionHead(space).distribution(some_params(space, (200,), rng))
    best = policy.log_prob(policy.mode())
    for _ in range(20):
        assert (policy.log_prob(policy.sample(rng)) <= best + 1e-6).all()


@EVERY_SPACE
def test_environments_get_valid_actions_whatever_the_net_gives(space, parts, rng):
    for bad in (torch.nan, torch.inf, -torch.inf, 50.0):
        policy = ActionHead(space).distribution(torch.full((4, num_params(space)), bad))
        for action in (policy.sample(rng), policy.mode()):
            given = ActionScaling(space)(action.numpy())
            assert all(space.contains(row if space.shape else row.astype(space.dtype)) for row in given)


def test_box_actions_are_scaled_and_clipped_for_the_environment_only(rng):
    space = Box(np.array([-0.1, -2.0]), np.array([0.3, np.inf]), dtype=np.float64)
    action = ActionHead(space).distribution(torch.tensor([[0.0, 0.0, 3.0, 3.0]] * 100)).sample(rng)
    given, sampled = ActionScaling(space)(action.numpy()), action.numpy().astype(np.float64)
    assert (action[:, 0].abs() > 1.0).any()
    np.testing.assert_allclose(given[:, 0], 0.1 + 0.2 * sampled[:, 0].clip(-1.0, 1.0))
    np.testing.assert_array_equal(given[:, 1], sampled[:, 1].clip(-2.0))
    assert is_valid(space, action)


@pytest.mark.parametrize("space", [Discrete(3), MultiDiscrete([3, 2]), MultiBinary(2)], ids=str)
def test_choices_that_a_space_does_not_have_are_invalid(space):
    none = torch.zeros(4, *space.shape, dtype=torch.int64)
    assert [is_valid(space, none + number) for number in (-1, 0, 1, 3)] == [False, True, True, False]


def test_deviations_do_not_depend_on_the_observation_and_are_learned():
    head = ActionHead(Box(-1.0, 1.0, (2,)), log_std_init=-0.5)
    params = head(torch.randn(4, num_outputs(head.space)))
    assert torch.equal(params[:, 2:], torch.full((4, 2), -0.5))
    head.distribution(params).entropy().mean().backward()
    assert torch.equal(head.log_std.grad, torch.ones(2)), "the entropy of a Gaussian grows as its log deviation does"


def test_means_of_bounded_dimensions_stay_within_their_limit_and_others_are_as_they_come():
    head = ActionHead(Box(np.float32([-1, 0, -np.inf]), np.float32([1, 1000, 1])), mean_limit=2.0)
    means, _ = head(torch.tensor([[0.01, -0.02, 0.3], [1e6, -1e6, 1e6]])).chunk(2, dim=-1)
    assert means[1].tolist() == [2.0, -2.0, 1e6]
    torch.testing.assert_close(means[0], torch.tensor([0.01, -0.02, 0.3]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("space", [Discrete(3, start=1), MultiDiscrete([2], start=[1]), Dict(a=Discrete(2))], ids=str)
def test_other_actions_are_refused(space):
    with pytest.raises(ValueError, match="there is no policy for actions"):
        ActionHead(space)


def test_the_entropy_of_a_certain_policy_is_zero_not_nan():
    logits = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    entropy = Categorical(logits).entropy().sum()
    entropy.backward()
    assert entropy.item() == pytest.approx(0.0, abs=1e-6)
    assert logits.grad.isfinite().all()
