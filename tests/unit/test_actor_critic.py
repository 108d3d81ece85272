"""The way from a rollout to gradient steps: which ends cut a return, what stays aligned, which samples are repeated."""

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from gymnasium.spaces import Box, Discrete
from inline import random_rollout

import train_a3c_data
from a3c_mp.algorithms.actor_critic import Samples, advantages_and_targets, anneal_entropy_coef
from a3c_mp.algorithms.actor_critic_settings import A3CArgs, PPOArgs
from a3c_mp.data.rollout import InfoField, minibatches
from a3c_mp.maths import losses, returns
from a3c_mp.nets.build import make_actor_critic

ARGS = A3CArgs(
    gamma=0.5, returns="nstep", n_step=1, reward_clip=False, life_loss_terminal=False, normalize_advantages=False
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("life_lost", [False, True])
@pytest.mark.parametrize("life_loss_terminal", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("terminated", [False, True])
def test_what_follows_a_step_depends_on_how_it_ended(terminated, truncated, life_loss_terminal, life_lost):
    """Reward 3; V of the next observation 10, V of the final one 100; gamma 1/2."""
    rollout = random_rollout(1, 1)
    values = {"reward": 3.0, "terminated": terminated, "truncated": truncated, "life_lost": life_lost}
    for name, value in values.items():
        getattr(rollout, name).fill_(value)
    rollout.value[1], rollout.truncation_value[0] = 10.0, 100.0
    ended = terminated or (life_lost and life_loss_terminal)
    expected = 3.0 + 0.5 * (not ended) * (100.0 if truncated else 10.0)
    for estimator in ("nstep", "gae"):
        args = replace(ARGS, returns=estimator, life_loss_terminal=life_loss_terminal)
        advantages, value_targets = advantages_and_targets(args, rollout, 1.0)
        assert value_targets.item() == pytest.approx(expected)
        assert advantages.item() == pytest.approx(expected - rollout.value[0].item(), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reward_clip": False}, [14.0, -1.0, 0.0]),
        ({"reward_clip": True}, [2.0, -2.0, 0.0]),
        ({"reward_clip": False, "reward_scale": None}, [10.0, -1.0, 0.0]),  # an outlier that the scale does not know
    ],
)
def test_rewards_are_clipped_to_their_sign_and_then_scaled_for_learning_only(settings, expected):
    rollout, raw = random_rollout(3, 1), [7.0, -0.5, 0.0]
    rollout.reward.copy_(torch.tensor(raw)[:, None])
    rollout.terminated.fill_(True)
    found = advantages_and_targets(replace(ARGS, **settings), rollout, 2.0)[1]
    assert found.flatten().tolist() == expected
    assert rollout.reward.flatten().tolist() == raw


def test_the_estimator_is_the_one_asked_for():
    rollout = random_rollout(5, 2)
    case = (rollout.reward, torch.full((5, 2), 0.5), rollout.value[:-1], rollout.value[-1])
    by_gae = advantages_and_targets(replace(ARGS, returns="gae", gae_lambda=0.7), rollout, 1.0)
    torch.testing.assert_close(by_gae, returns.gae(*case, lam=0.7))
    by_steps = advantages_and_targets(replace(ARGS, n_step=3), rollout, 1.0)[1]
    torch.testing.assert_close(by_steps, returns.n_step_returns(*case, n=3))


def test_samples_keep_what_belongs_together():
    """Sample t * B + b is step t of environment b, in every field."""
    rollout = random_rollout(4, 3, angle=InfoField((2,)))
    estimates = advantages_and_targets(ARGS, rollout, 1.0)
    fields = (rollout.obs[:-1], rollout.action, rollout.behaviour_logits, *estimates, rollout.extra["angle"])
    samples = Samples.of(rollout, *estimates).select(torch.tensor([7, 2]))
    for sample, field in zip((*samples[:-1], samples.extra["angle"]), fields, strict=True):
        assert torch.equal(sample, torch.stack([field[2, 1], field[0, 2]]))


def test_a_gradient_is_computed_in_the_format_asked_for_and_reaches_every_parameter():
    net, rollout, totals = make_actor_critic(Box(0, 255, (4, 36, 36), "uint8"), Discrete(2)), random_rollout(8, 2), []
    samples = Samples.of(rollout, *advantages_and_targets(ARGS, rollout, 1.0))
    samples = samples._replace(obs=torch.randint(256, (16, 4, 36, 36), dtype=torch.uint8))
    for precision in ("fp32", "bf16"):
        net.zero_grad()
        args = replace(ARGS, precision=precision)
        with torch.no_grad():  # as an environment with nets may have left it
            total, metrics = train_a3c_data.backward(args, net, train_a3c_data.loss, samples)
        values = metrics["values/value"]
        assert total.dtype == values.dtype == torch.float32
        assert torch.equal(values, values.bfloat16().float()) == (precision == "bf16")
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
        totals.append(total.item())
    assert totals[1] == pytest.approx(totals[0], rel=0.05)


@pytest.mark.parametrize("normalize", [False, True])
def test_advantages_are_normalized_if_asked_for_and_value_targets_never(normalize, monkeypatch):
    args = PPOArgs(
        batch_size=16, normalize_advantages=normalize, entropy_coef=0.2, entropy_coef_end=0.0, total_steps=100
    )
    rollout, taken, coefficients = random_rollout(8, 2), [], []

    def gradient_step(args, learner, loss, batch):
        taken.append(batch)
        coefficients.append(args.entropy_coef)

    monkeypatch.setattr(train_a3c_data, "gradient_step", gradient_step)
    learner = SimpleNamespace(steps=50, rng=generator(), reward_scale=2.0, device=torch.device("cpu"))
    train_a3c_data.learn(args, learner, rollout)
    advantages, value_targets = (field.flatten() for field in advantages_and_targets(args, rollout, 2.0))
    expected = losses.normalize(advantages) if normalize else advantages
    torch.testing.assert_close(taken[0].advantages.sort().values, expected.sort().values)
    torch.testing.assert_close(taken[0].value_targets.sort().values, value_targets.sort().values)
    assert coefficients[0] == pytest.approx(0.1), "annealed to half"


def taken(fraction, advantages, num_epochs=3, batch_size=10):
    """The samples of each minibatch, by their numbers, in all epochs."""
    args = PPOArgs(batch_size=batch_size, update_epochs=num_epochs, repeat_fraction=fraction)
    numbers = torch.arange(len(advantages))
    samples = Samples(numbers, numbers, numbers, advantages, numbers)
    return [batch.obs.tolist() for batch in train_a3c_data.epochs(args, samples, generator(1))]


def test_later_epochs_repeat_the_samples_of_the_largest_absolute_advantage():
    advantages = torch.linspace(-2, 1, 40)[torch.randperm(40, generator=generator(2))]
    batches = taken(0.5, advantages)
    assert [len(batch) for batch in batches] == 4 * [10] + 2 * 2 * [10]
    assert sorted(chain(*batches[:4])) == list(range(40)), "the first epoch takes all"
    largest = sorted(range(40), key=lambda i: -abs(advantages[i]))[:20]
    for epoch in (batches[4:6], batches[6:8]):
        assert sorted(chain(*epoch)) == sorted(largest)
    assert batches[4:6] != batches[6:8], "each has an order of its own"


def test_epochs_of_every_sample_are_plain_passes_and_a_fraction_of_none_leaves_one():
    rng = generator(1)
    plain = [batch.tolist() for _ in range(3) for batch in minibatches(25, 10, rng, torch.device("cpu"))]
    assert taken(1.0, torch.randn(25, generator=generator(3))) == plain
    assert taken(1e-9, torch.randn(25, generator=generator(3))) == plain[:3]
    assert [len(batch) for batch in taken(0.5, torch.zeros(25))] == [9, 8, 8, 6, 6, 6, 6]


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.03), (25, 0.02), (75, 0.0), (90, 0.0)])
def test_the_entropy_coefficient_falls_to_its_end_and_stays_there(steps, expected):
    args = PPOArgs(entropy_coef=0.03, entropy_coef_end=0.0, entropy_steps=75, total_steps=100)
    assert anneal_entropy_coef(args, steps) == replace(args, entropy_coef=pytest.approx(expected))
    at_total_steps = anneal_entropy_coef(replace(args, entropy_steps=0), 50)
    assert at_total_steps.entropy_coef == pytest.approx(0.015)
    assert anneal_entropy_coef(replace(args, entropy_coef_end=None), steps).entropy_coef == 0.03
