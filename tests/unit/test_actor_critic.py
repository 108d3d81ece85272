"""The way from a rollout to targets and samples: which ends cut a return, and what stays aligned."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from gymnasium.spaces import Box, Discrete

import train_a3c_data
import train_task
from a3c_mp.algorithms import actor_critic
from a3c_mp.algorithms.actor_critic import (
    Samples,
    advantages_and_targets,
    anneal_entropy_coef,
    epoch_minibatches,
    make_optimizer,
    obs_for_stats,
    set_learning_rate,
)
from a3c_mp.algorithms.actor_critic_settings import PRESETS, ActorCriticArgs, PPOArgs
from a3c_mp.config import check_ranges
from a3c_mp.data.rollout import Rollout, minibatches, rollout_spec
from a3c_mp.maths import losses, returns
from a3c_mp.nets.build import make_actor_critic

ARGS = ActorCriticArgs(
    gamma=0.5, returns="nstep", n_step=1, reward_clip=False, life_loss_terminal=False, normalize_advantages=False
)


def a_rollout(unroll_length=1, num_envs=1, seed=0):
    """A rollout of random numbers in which nothing ends."""
    rng = torch.Generator().manual_seed(seed)
    spec = rollout_spec(unroll_length, num_envs, Box(-1.0, 1.0, (3,)), Discrete(2))
    fields = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    for field in fields.values():
        if field.is_floating_point():
            field.normal_(generator=rng)
    fields["action"].random_(2, generator=rng)
    return Rollout(**fields)


@pytest.mark.parametrize("life_lost", [False, True])
@pytest.mark.parametrize("life_loss_terminal", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("terminated", [False, True])
def test_what_follows_a_step_depends_on_how_it_ended(terminated, truncated, life_loss_terminal, life_lost):
    """Reward 3; V of the next observation 10, V of the final one 100; gamma 1/2."""
    rollout = a_rollout()
    values = {"reward": 3.0, "terminated": terminated, "truncated": truncated, "life_lost": life_lost}
    for name, value in values.items():
        getattr(rollout, name).fill_(value)
    rollout.value[1], rollout.truncation_value[0] = 10.0, 100.0
    ended = terminated or (life_lost and life_loss_terminal)
    expected = 3.0 + 0.5 * (not ended) * (100.0 if truncated else 10.0)
    for estimator in ("nstep", "gae"):
        args = replace(ARGS, returns=estimator, life_loss_terminal=life_loss_terminal)
        advantages, value_targets = advantages_and_targets(args, rollout)
        assert value_targets.item() == pytest.approx(expected)
        assert advantages.item() == pytest.approx(expected - rollout.value[0].item(), abs=1e-5)


def test_rewards_are_clipped_to_their_sign_for_learning_only():
    rollout = a_rollout(3)
    rollout.reward.copy_(torch.tensor([[7.0], [-0.5], [0.0]]))
    rollout.terminated.fill_(True)
    assert advantages_and_targets(replace(ARGS, reward_clip=True), rollout)[1].flatten().tolist() == [1.0, -1.0, 0.0]
    assert advantages_and_targets(ARGS, rollout)[1].flatten().tolist() == [7.0, -0.5, 0.0]
    assert advantages_and_targets(replace(ARGS, reward_scale=2.0), rollout)[1].flatten().tolist() == [14.0, -1.0, 0.0]
    scaled_signs = replace(ARGS, reward_clip=True, reward_scale=2.0)
    assert advantages_and_targets(scaled_signs, rollout)[1].flatten().tolist() == [2.0, -2.0, 0.0]
    assert rollout.reward.flatten().tolist() == [7.0, -0.5, 0.0]


def test_the_estimator_is_the_one_asked_for():
    rollout = a_rollout(5, 2)
    case = (rollout.reward, torch.full((5, 2), 0.5), rollout.value[:-1], rollout.value[-1])
    found = advantages_and_targets(replace(ARGS, returns="gae", gae_lambda=0.7), rollout)
    for x, expected in zip(found, returns.gae(*case, lam=0.7), strict=True):
        torch.testing.assert_close(x, expected)
    torch.testing.assert_close(
        advantages_and_targets(replace(ARGS, n_step=3), rollout)[1], returns.n_step_returns(*case, n=3)
    )


def test_samples_keep_what_belongs_together():
    """Sample t * B + b is step t of environment b, in every field."""
    rollout = a_rollout(4, 3)
    fields = (rollout.obs, rollout.action, rollout.behaviour_logits, *advantages_and_targets(ARGS, rollout))
    samples = Samples.of(ARGS, rollout)
    assert [len(sample) for sample in samples] == [4 * 3] * 5
    for t in range(4):
        for b in range(3):
            for sample, field in zip(samples, fields, strict=True):
                assert torch.equal(sample[t * 3 + b], field[t, b])


@pytest.mark.parametrize("loss", [actor_critic.loss, train_a3c_data.loss, train_task.loss])
def test_the_loss_is_computed_in_the_format_asked_for_and_reaches_every_parameter(loss):
    """Chapters 1 and 5 show it in their scripts, and the library has it for chapter 2."""
    net = make_actor_critic(Box(0, 255, (4, 36, 36), "uint8"), Discrete(2))
    samples = Samples.of(ARGS, a_rollout(8, 2))._replace(obs=torch.randint(256, (16, 4, 36, 36), dtype=torch.uint8))
    totals = []
    for precision in ("fp32", "bf16"):
        net.zero_grad()
        total, metrics = loss(replace(ARGS, precision=precision), net, samples)
        total.backward()
        assert total.dtype == torch.float32
        rounded = metrics["values/value"].bfloat16().float()
        assert torch.equal(metrics["values/value"], rounded) == (precision == "bf16")
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
        totals.append(total.item())
    assert totals[1] == pytest.approx(totals[0], rel=0.05)
    assert torch.equal(total, actor_critic.loss(replace(ARGS, precision="bf16"), net, samples)[0])


def test_advantages_are_normalized_if_asked_for_and_value_targets_never():
    net, rollout = make_actor_critic(Box(-1.0, 1.0, (3,)), Discrete(2)), a_rollout(8, 2)
    advantages, value_targets = (field.flatten() for field in advantages_and_targets(ARGS, rollout))
    for normalize, expected in [(False, advantages), (True, losses.normalize(advantages))]:
        args = replace(ARGS, normalize_advantages=normalize)
        _, metrics = actor_critic.loss(args, net, Samples.of(args, rollout))
        torch.testing.assert_close(metrics["values/advantage"], expected)
        assert torch.equal(metrics["values/target"], value_targets)
    assert not torch.equal(advantages, losses.normalize(advantages))


def taken(fraction, advantages, num_epochs=3, batch_size=10):
    """The samples of each minibatch, by their indices, in all epochs."""
    args = PPOArgs(batch_size=batch_size, update_epochs=num_epochs, repeat_fraction=fraction)
    return [batch.tolist() for batch in epoch_minibatches(args, advantages, torch.Generator().manual_seed(1))]


def test_later_epochs_repeat_the_samples_of_the_largest_absolute_advantage():
    advantages = torch.linspace(-2, 1, 40)[torch.randperm(40, generator=torch.Generator().manual_seed(2))]
    batches = taken(0.5, advantages)
    assert [len(batch) for batch in batches] == 4 * [10] + 2 * 2 * [10]
    assert sorted(chain(*batches[:4])) == list(range(40)), "the first epoch takes all"
    largest = sorted(range(40), key=lambda i: -abs(advantages[i]))[:20]
    for epoch in (batches[4:6], batches[6:8]):
        assert sorted(chain(*epoch)) == sorted(largest)
    assert batches[4:6] != batches[6:8], "each has an order of its own"


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_epochs_that_repeat_every_sample_are_plain_passes(num_epochs):
    """Also in their random numbers: runs from before `--repeat-fraction` resume to the same bit."""
    rng = torch.Generator().manual_seed(1)
    plain = [batch.tolist() for batch in minibatches(25, 10, num_epochs, rng, torch.device("cpu"))]
    assert taken(1.0, torch.randn(25, generator=torch.Generator().manual_seed(3)), num_epochs) == plain


def test_equal_advantages_are_repeated_as_others_and_a_fraction_of_none_leaves_one_epoch():
    assert [len(batch) for batch in taken(0.5, torch.zeros(25))] == [9, 8, 8, 6, 6, 6, 6]
    for fraction in (0.0, 1e-9):
        assert [len(batch) for batch in taken(fraction, torch.ones(25))] == [9, 8, 8]


@pytest.mark.parametrize("env_id", PRESETS)
def test_presets_are_settings_within_their_ranges(env_id):
    check_ranges(ActorCriticArgs(env_id=env_id, **PRESETS[env_id]))


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_both_optimizers_move_against_the_gradient(name):
    net = torch.nn.Linear(1, 1)
    before = net.bias.item()
    optimizer = make_optimizer(replace(ARGS, optimizer=name), net)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert net.bias.item() < before


def test_moments_take_in_every_new_vector_but_not_every_image():
    obs = torch.arange(5 * 3).view(5, 3, 1)
    assert obs_for_stats(obs, image=False).flatten().tolist() == list(range(3, 15)), (
        "row 0 came with the rollout before"
    )
    assert obs_for_stats(obs, image=True).flatten().tolist() == list(range(9, 15))


def test_every_group_of_parameters_has_the_annealed_learning_rate():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [net.weight], "lr": 1.0}, {"params": [net.bias], "weight_decay": 0.0}])
    set_learning_rate(optimizer, ActorCriticArgs(learning_rate=4e-4, total_steps=100), steps=75)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(1e-4)] * 2


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.03), (25, 0.02), (75, 0.0), (90, 0.0)])
def test_the_entropy_coefficient_falls_to_its_end_and_stays_there(steps, expected):
    args = PPOArgs(entropy_coef=0.03, entropy_coef_end=0.0, entropy_steps=75, total_steps=100)
    assert anneal_entropy_coef(args, steps) == replace(args, entropy_coef=pytest.approx(expected))
    assert anneal_entropy_coef(replace(args, entropy_steps=0), 50).entropy_coef == pytest.approx(0.015), (
        "at total-steps"
    )
    assert anneal_entropy_coef(replace(args, entropy_coef_end=None), steps).entropy_coef == 0.03


@pytest.mark.parametrize(("steps", "expected"), [(0, 4e-4), (25, 2.5e-4), (50, 1e-4), (75, 1e-4)])
def test_the_learning_rate_may_reach_its_end_before_the_budget_and_stays_there(steps, expected):
    net = torch.nn.Linear(2, 2)
    args = ActorCriticArgs(learning_rate=4e-4, learning_rate_end=1e-4, anneal_steps=50, total_steps=100)
    optimizer = make_optimizer(args, net)
    set_learning_rate(optimizer, args, steps)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
