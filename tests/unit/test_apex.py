"""Ape-X: losses against a second, literal writing of them; ladders, target nets, actions and settings."""

import copy
import logging
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import train_apex
from a3c_mp.algorithms import apex, ddpg, dqn
from a3c_mp.algorithms.apex import LearnerState
from a3c_mp.algorithms.apex_settings import PRESETS, Args
from a3c_mp.config import check_ranges
from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.data.transitions import episode_stats_spec, finished_episodes, reward_to_learn, write_stats
from a3c_mp.errors import ConfigError, TrainingError
from a3c_mp.maths import losses
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.replay import Batch
from a3c_mp.run import preflight
from a3c_mp.run.guard import NonFiniteFilter

N = 7
VECTOR = Box(-1.0, 1.0, (3,))
TORQUE = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
ARGS = Args(num_actors=2, num_envs=4)


def a_batch(action, seed=0):
    rng = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, N, 3, generator=rng)
    discount = torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 0.9, 0.9])
    reward = 3 * torch.randn(N, generator=rng)
    no_mask = torch.ones(N, 0, dtype=torch.bool)
    return Batch(obs, action, reward, discount, next_obs, no_mask, torch.ones(N).double(), torch.arange(N))


def two_nets(algo, action_space, seed=0):
    """An online and a target net with nothing in common, and outputs that are not all near zero."""
    torch.manual_seed(seed)
    nets = [algo.make_net(VECTOR, action_space) for _ in range(2)]
    for net in nets:
        for parameter in net.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return nets[0], nets[1].requires_grad_(False)


def gradients(loss, parameters):
    return torch.autograd.grad(loss, list(parameters), allow_unused=True)


# ---- losses


def learner(algo, net, target_net, args=ARGS, update=lambda priorities: None):
    """What a learner holds, its replay a function that takes new priorities."""
    replay = SimpleNamespace(update=lambda ids, priorities: update(priorities))
    return LearnerState(algo, net, target_net, algo.make_optimizer(args, net), replay, None, None)


def test_huber_is_what_the_paper_says_error_by_error():
    errors, weights = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.2, 4.0]), torch.tensor([1.0, 0.5, 1.0, 0.3, 0.8, 0.25])
    total = 0.0
    for error, weight in zip(errors.tolist(), weights.tolist(), strict=True):
        total += weight * (error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5)
    assert losses.huber(errors, weights).item() == pytest.approx(total / 6)


def test_double_q_chooses_with_one_net_and_judges_with_the_other():
    rng = torch.Generator().manual_seed(0)
    next_q, next_target_q = torch.randn(2, N, 4, generator=rng)
    found = dqn.bootstrap_values(lambda obs: (next_q,), lambda obs: (next_target_q,), a_batch(torch.arange(N) % 4))
    for i in range(N):
        best = max(range(4), key=lambda action, i=i: next_q[i, action].item())
        assert found[i].item() == next_target_q[i, best].item()


def test_dqn_loss_is_that_of_each_transition_alone():
    net, target_net = two_nets(dqn, Discrete(4))
    batch = a_batch(torch.tensor([0, 1, 2, 3, 0, 1, 2]))
    weights = torch.linspace(0.1, 1.0, N)
    loss, td_error, metrics = train_apex.loss(ARGS, learner(dqn, net, target_net), batch, weights)
    expected = []
    for i in range(N):
        row = slice(i, i + 1)
        (q,), (next_q,), (judge,) = net(batch.obs[row]), net(batch.next_obs[row]), target_net(batch.next_obs[row])
        target = batch.reward[i] + batch.discount[i] * judge[0, next_q[0].argmax()].detach()
        expected.append(target - q[0, batch.action[i]])
    expected = torch.stack(expected)
    torch.testing.assert_close(td_error, expected.detach())
    literal = sum(w * (e**2 / 2 if abs(e) <= 1 else abs(e) - 0.5) for w, e in zip(weights, expected, strict=True)) / N
    assert loss.item() == pytest.approx(literal.item(), rel=1e-5)
    assert metrics["losses/total"] is loss
    for found, wanted in zip(
        gradients(loss, net.parameters()), gradients(literal, net.parameters()), strict=True
    ):  # none through the target
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


def test_ddpg_critic_and_actor_get_their_own_gradients_and_no_others():
    net, target_net = two_nets(ddpg, TORQUE)
    batch = a_batch(torch.rand(N, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1)
    weights = torch.linspace(0.1, 1.0, N)
    loss, td_error, metrics = train_apex.loss(ARGS, learner(ddpg, net, target_net), batch, weights)

    next_value = target_net.q(batch.next_obs, target_net(batch.next_obs)[0])
    errors = batch.reward + batch.discount * next_value - net.q(batch.obs, batch.action)
    torch.testing.assert_close(td_error, errors.detach())
    value_loss = losses.huber(errors, weights)
    policy_loss = -net.q(batch.obs, net(batch.obs)[0]).mean()
    assert metrics["losses/value"].item() == pytest.approx(value_loss.item())
    assert metrics["losses/policy"].mean().item() == pytest.approx(policy_loss.item())
    for part, literal in ((net.critic, value_loss), (net.actor, policy_loss)):
        found = (
            gradients(loss, part.parameters())
            if part is net.actor
            else torch.autograd.grad(loss, list(part.parameters()), retain_graph=True)
        )
        for mine, wanted in zip(found, gradients(literal, part.parameters()), strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-6, rtol=1e-4)


def test_one_step_is_theta_minus_rate_times_gradient():
    net, target_net = two_nets(dqn, Discrete(4))
    batch = a_batch(torch.tensor([0, 1, 2, 3, 0, 1, 2]))
    before = [parameter.clone() for parameter in net.parameters()]
    loss, _, _ = train_apex.loss(ARGS, learner(dqn, net, target_net), batch, torch.ones(N))
    grads = gradients(train_apex.loss(ARGS, learner(dqn, net, target_net), batch, torch.ones(N))[0], net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()
    for old, gradient, new in zip(before, grads, net.parameters(), strict=True):
        torch.testing.assert_close(new, old - 0.1 * gradient)


# ---- target nets


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_the_target_net_moves_by_its_rate_statistics_of_observations_too(rate):
    net, target_net = two_nets(dqn, Discrete(4))
    net.norm.update(torch.randn(10, 3))
    before = {name: value.clone() for name, value in target_net.state_dict().items()}
    apex.move_target(target_net, net, rate)
    for name, value in target_net.state_dict().items():
        torch.testing.assert_close(value, before[name] + rate * (net.state_dict()[name] - before[name]))
    if rate == 1.0:
        assert all(torch.equal(*pair) for pair in zip(target_net.state_dict().values(), net.state_dict().values(),
                                                      strict=True))  # fmt: skip


# ---- exploration


def test_the_ladder_has_a_rung_for_each_environment_of_all_actors():
    found = [epsilon for actor in range(3) for epsilon in apex.ladder(0.4, 7.0, actor, num_envs=2, num_actors=3)]
    assert found == pytest.approx([0.4 ** (1 + 7 * i / 5) for i in range(6)])
    assert found[0] == pytest.approx(0.4)
    assert found[-1] == pytest.approx(0.4**8)
    assert apex.ladder(0.4, 7.0, 0, num_envs=1, num_actors=1) == pytest.approx([0.4])


def test_an_environment_explores_as_much_as_its_epsilon_says():
    args = replace(ARGS, num_actors=1, num_envs=3, epsilon=0.5, ladder_exponent=2.0)
    net = dqn.make_net(VECTOR, Discrete(4))
    obs = np.ones((3, 3), np.float32)
    policy = dqn.Policy(args, net, Discrete(4), obs, 0)
    policy.start_block(seed=1)
    best = net(torch.from_numpy(obs))[0][0].argmax().item()
    chosen = np.array([policy.act(obs)[0] for _ in range(1500)])
    share = (chosen != best).mean(axis=0)  # of random actions, a quarter are the best by chance
    assert share == pytest.approx(0.75 * np.array([0.5, 0.5**2, 0.5**3]), abs=0.05)
    warm_up = np.array([policy.act(obs, warm_up=True)[0] for _ in range(300)])
    assert np.bincount(warm_up.ravel(), minlength=4) / warm_up.size == pytest.approx(np.full(4, 0.25), abs=0.06)


def test_a_dqn_actor_reports_the_values_of_what_it_does():
    args = replace(ARGS, epsilon=1.0)
    net = dqn.make_net(VECTOR, Discrete(5))
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    action, q, value = dqn.Policy(args, net, Discrete(5), obs, 0).act(obs)
    table = net(torch.from_numpy(obs))[0].detach().numpy()
    assert action.shape == (4,)
    assert action.dtype == np.int64
    assert q == pytest.approx(table[np.arange(4), action])
    assert value == pytest.approx(table.max(axis=1))
    assert dqn.Policy(args, net, Discrete(5), obs, 0).value(obs) == pytest.approx(table.max(axis=1))
    assert (dqn.make_policy(net, Discrete(5))(obs, np.ones(4, np.bool_)) == table.argmax(axis=1)).all()


def test_a_ddpg_actor_reports_the_values_of_what_it_does():
    net, _ = two_nets(ddpg, TORQUE)
    obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    policy = ddpg.Policy(replace(ARGS, noise=0.3), net, TORQUE, obs, 0)
    policy.start_block(seed=0)
    action, q, value = policy.act(obs)
    states = torch.from_numpy(obs)
    best = net(states)[0]
    assert (action.shape, action.dtype) == ((4, 2), np.float32)
    assert (np.abs(action) <= 1).all()
    assert (action != best.detach().numpy()).all()
    assert q == pytest.approx(net.q(states, torch.from_numpy(action)).detach().numpy(), abs=1e-6)
    assert value == pytest.approx(net.q(states, best).detach().numpy(), abs=1e-6)
    assert policy.value(obs) == pytest.approx(value, abs=1e-6)


def test_noise_is_as_large_and_as_persistent_as_it_should_be():
    args = replace(ARGS, num_actors=2, num_envs=100, noise=0.1, noise_exponent=1.0, noise_memory=0.8)
    net = ddpg.make_net(VECTOR, TORQUE)  # its first actions are near the middle, so that little is clipped
    obs = np.zeros((100, 3), np.float32)
    policy = ddpg.Policy(args, net, TORQUE, obs, actor=1)
    policy.start_block(seed=0)
    noise = np.array([policy.act(obs)[0] for _ in range(100)])
    noise -= net(torch.from_numpy(obs))[0].detach().numpy()
    scaled = noise / np.array([0.1 ** (1 + i / 199) for i in range(100, 200)])[:, None]
    for part in (scaled[:, :50], scaled[:, 50:]):
        assert part.std() == pytest.approx(1.0, abs=0.1)
        assert (part[1:] * part[:-1]).mean() == pytest.approx(0.8, abs=0.1)


@given(
    st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32)).filter(lambda pair: pair[0] < pair[1]),
    st.floats(-1, 1, width=32),
)
def test_actions_are_stretched_to_the_bounds_and_never_beyond(bounds, action):
    space = Box(np.float32(bounds[0]), np.float32(bounds[1]), (1,))
    found = ddpg.stretch(np.array([[-1.0], [1.0], [action]], np.float32), space)
    assert found.dtype == np.float32
    assert all(row in space for row in found)
    assert (found[0], found[1]) == (space.low, space.high)
    assert found[2] == pytest.approx(
        bounds[0] + (action + 1) / 2 * (bounds[1] - bounds[0]), abs=1e-6 * max(map(abs, bounds))
    )


# ---- learners in parallel


class Half(LearnerGroup):
    """One of two learners, in one process: told beforehand what all have to show, in the order it asks."""

    def __init__(self, *gathered):
        super().__init__(0, 2)
        self.gathered = list(gathered)

    def all_gather(self, tensor):
        return self.gathered.pop(0)

    def all_reduce_gradients(self, net, loss):
        pass


@pytest.mark.parametrize("algo", [dqn, ddpg])
def test_with_two_learners_the_gradient_is_that_of_one_over_both_batches(algo):
    name = algo.__name__.rpartition(".")[2]
    args = replace(ARGS, algo=name, batch_size=8, max_grad_norm=1e9, learning_rate=0.0, policy_learning_rate=0.0)
    space = Discrete(4) if algo is dqn else TORQUE
    net, target_net = two_nets(algo, space)
    action = torch.arange(8) % 4 if algo is dqn else torch.rand(8, 2) * 2 - 1
    whole = Batch(*(field[torch.arange(8) % N] for field in a_batch(action[:N])))._replace(
        action=action, probability=torch.rand(8).double() + 0.1
    )
    halves = [Batch(*(field[part] for field in whole)) for part in (slice(4), slice(4, 8))]
    guard = SimpleNamespace(check=lambda *_: True)
    run = SimpleNamespace(steps=0, updates=1, counters=Counter(), record_update=lambda metrics, samples: None)

    def gradient(group, batch):
        online = copy.deepcopy(net)
        train_apex.learn(args, run, group, learner(algo, online, target_net, args), batch, guard)
        return [parameter.grad for parameter in online.parameters()]

    expected = gradient(LearnerGroup(), whole)
    found = [gradient(Half(whole.probability, whole.obs), half) for half in halves]
    for x, a, b in zip(expected, *found, strict=True):
        torch.testing.assert_close((a + b) / 2, x, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("algo", [dqn, ddpg])
def test_a_step_anneals_the_importance_exponent_and_makes_priorities_of_td_errors(algo, monkeypatch):
    space, action = (Discrete(4), torch.arange(N) % 4) if algo is dqn else (TORQUE, torch.zeros(N, 2))
    net, target_net = two_nets(algo, space)
    args = replace(ARGS, algo=algo.__name__.rpartition(".")[2], normalize_obs=False, importance_exponent=0.4)
    batch = a_batch(action)._replace(ids=torch.arange(N) + 50, probability=torch.linspace(0.1, 1, N).double())
    exponents, updates, original = [], [], train_apex.importance_weights

    def recording(probability, exponent, smallest):
        exponents.append(exponent)
        return original(probability, exponent, smallest)

    monkeypatch.setattr(train_apex, "importance_weights", recording)
    guard = SimpleNamespace(check=lambda *_: True)
    run = SimpleNamespace(
        steps=args.total_steps // 4, updates=1, counters=Counter(), record_update=lambda metrics, samples: None
    )
    state = learner(algo, net, target_net, args, lambda priorities: updates.append(priorities))
    _, td_error, _ = train_apex.loss(args, state, batch, torch.ones(N))
    train_apex.learn(args, run, LearnerGroup(), state, batch, guard)
    assert exponents == [pytest.approx(0.55)]
    assert len(updates) == 1
    torch.testing.assert_close(updates[0], td_error.abs())


@pytest.mark.parametrize("algo", [dqn, ddpg])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_batch_with_a_td_error_that_is_not_finite_changes_nothing(algo, bad):
    """Huber's gradient of an infinite error is finite: the gradient alone would not tell."""
    space, action = (Discrete(4), torch.arange(N) % 4) if algo is dqn else (TORQUE, torch.zeros(N, 2))
    net, target_net = two_nets(algo, space)
    batch = a_batch(action)
    batch.reward[1] = bad
    run = SimpleNamespace(steps=0, updates=0, counters=Counter(), log=logging.Logger("quiet", logging.CRITICAL))
    before = copy.deepcopy(net.state_dict())
    args = replace(ARGS, algo=algo.__name__.rpartition(".")[2], normalize_obs=False)
    updates = []
    state = learner(algo, net, target_net, args, updates.append)
    train_apex.learn(args, run, LearnerGroup(), state, batch, NonFiniteFilter(run, "bad"))
    assert not updates, "no priorities"
    assert run.counters["bad"] == 1
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(("n_step", "block_length", "patience"), [(3, 4, 5), (5, 4, 6), (20, 4, 9), (5, 1, 9)])
def test_a_bad_reward_in_many_returns_is_no_reason_to_give_up(n_step, block_length, patience):
    """n steps lie in up to ceil(n / block) + 1 blocks, one after the other."""
    run = SimpleNamespace(counters=Counter(), log=logging.Logger("quiet", logging.CRITICAL))
    args = replace(ARGS, n_step=n_step, block_length=block_length)
    guard = NonFiniteFilter(run, "bad", apex.bad_blocks_in_a_row(args))
    assert not any(guard.check(False, "actor 0", "a message") for _ in range(patience - 1))
    assert patience - 1 > math.ceil(n_step / block_length) + 1
    with pytest.raises(TrainingError, match=f"contains NaN or inf, {patience} in a row from actor 0"):
        guard.check(False, "actor 0", "a message")


# ---- what is written of steps, and settings


def test_rewards_are_clipped_before_they_are_scaled():
    reward = np.array([-7.0, 0.0, 0.5])
    assert reward_to_learn(replace(ARGS, reward_clip=True, reward_scale=0.1), reward) == pytest.approx([-0.1, 0, 0.1])
    assert reward_to_learn(replace(ARGS, reward_clip=False, reward_scale=0.1), reward) == pytest.approx([-0.7, 0, 0.05])


def test_a_block_tells_of_each_episode_that_ended_in_it_once():
    args = replace(ARGS, num_envs=2, block_length=3)
    spec = episode_stats_spec(args.block_length, args.num_envs)
    block = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
    stats = EpisodeStats(2)
    dones = [[False, False], [True, False], [True, True], [False, False], [False, False], [False, True]]
    found = []
    for t, done in enumerate(dones):
        stats.step(np.array([1.0, 10.0], np.float32), np.array(done))
        write_stats(block, t % 3, stats)
        if t % 3 == 2:
            found.append(finished_episodes(block))
    assert found == [[Episode(2.0, 2), Episode(1.0, 1), Episode(30.0, 3, env=1)], [Episode(30.0, 3, env=1)]]


@pytest.mark.parametrize("env_id", PRESETS)
def test_presets_are_in_range_and_go_together(env_id):
    args = Args(**{**PRESETS[env_id], "env_id": env_id})
    check_ranges(args)
    space = Box(-1.0, 1.0, (apex.FRAMES,))  # a stack of frames that are one number each
    shards, blocks = apex.allocate(args, space, Discrete(2))
    assert args.replay_size <= shards.num_lanes * shards.rows < args.replay_size + shards.num_lanes
    assert len(blocks) == args.num_actors * args.blocks_per_actor


REFUSED = {
    "too small": ({"replay_size": 100, "learning_starts": 10}, "replay-size=100: each of 2 . 4 environments has 13"),
    "late start": (
        {"replay_size": 2000, "learning_starts": 1500},
        "learning-starts=1500: the replay has room for 2000",
    ),
    "too large": ({"replay_size": 10**9}, "replay needs .* GiB, 5.0 GiB is free; lower --replay-size"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_replay_that_cannot_be_is_refused_with_figures(changes, message, monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda: 5 * 2**30)
    args = replace(ARGS, env_id="CartPole-v1", **changes)
    with pytest.raises(ConfigError, match=message):
        apex.allocate(args, VECTOR, Discrete(2))


def test_a_small_replay_does_not_need_nothing(monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda: 0)
    args = replace(ARGS, env_id="CartPole-v1", replay_size=1000, learning_starts=100)
    with pytest.raises(ConfigError, match=r"the replay needs 0\.1 GiB, 0\.0 GiB is free"):
        apex.allocate(args, VECTOR, Discrete(2))
    apex.allocate(args, VECTOR, Discrete(2), rank=1)  # the first learner has checked it for all, and taken its share


def test_the_memory_that_is_refused_is_the_memory_that_is_needed(monkeypatch):
    env = gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    args = Args(env_id="PongNoFrameskip-v4", replay_size=1_000_000)
    monkeypatch.setattr(preflight, "free_memory", lambda: 0)
    with pytest.raises(ConfigError, match=r"the replay needs 6\.6 GiB, 0\.0 GiB is free"):  # 84 * 84 + some = 7.1 KB
        apex.allocate(args, env, Discrete(6))


@pytest.mark.parametrize(
    ("obs_space", "action_space", "message"),
    [
        (Box(0, 255, (3, 96, 96), np.uint8), TORQUE, "observations are images"),
        (VECTOR, Box(-np.inf, np.inf, (2,)), "are not finite"),
    ],
)
def test_ddpg_refuses_what_it_cannot_learn(obs_space, action_space, message):
    with pytest.raises(ConfigError, match=message):
        ddpg.make_net(obs_space, action_space)


@pytest.mark.parametrize("hidden", [None, (16,), (16, 8)])
def test_dueling_advantages_have_mean_zero(hidden):
    net = dqn.DuelingQ((4, 84, 84), 6, image=True, hidden=hidden)
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    kept = obs.clone()
    (q,) = net(obs)
    features = net.torso(net.norm.convert(obs))
    torch.testing.assert_close(q.mean(dim=1, keepdim=True), net.value(features))
    torch.testing.assert_close(q - q.mean(dim=1, keepdim=True), net.advantage(features) - net.advantage(features).mean(
        dim=1, keepdim=True))  # fmt: skip
    assert torch.equal(obs, kept), "observations are left as they are"


@pytest.mark.parametrize("hidden", [(3,), (3, 5), (3, 5, 7)])
def test_a_dueling_net_for_vectors_has_the_hidden_layers_that_it_is_given(hidden):
    net = dqn.make_net(Box(-1, 1, (2,)), Discrete(4), hidden, "tanh")
    sizes = [[layer.weight.shape for layer in side_by_side] for side_by_side in net.layers()]
    outputs = [2, *hidden]
    assert sizes[0] == [(3, 2)], "shared by value and advantage"
    assert sizes[1:-1] == [[(outputs[i + 1], outputs[i])] * 2 for i in range(1, len(hidden))]
    assert sizes[-1] == [(1, outputs[-1]), (4, outputs[-1])]
    activations = [module for module in net.modules() if isinstance(module, nn.Tanh)]
    assert len(activations) == 2 * len(hidden) - 1
    assert not any(isinstance(module, nn.ReLU) for module in net.modules())


def test_the_layers_of_a_net_can_be_put_back():
    net = dqn.make_net(Box(-1, 1, (2,)), Discrete(4))
    before = copy.deepcopy(net)
    net.set_layers(net.layers(), "relu")
    assert list(net.state_dict()) == list(before.state_dict())
    obs = torch.randn(9, 2)
    assert torch.equal(net(obs)[0], before(obs)[0])


def test_a_copy_of_a_net_acts_alike():
    net, _ = two_nets(ddpg, TORQUE)
    obs = np.zeros((2, 3), np.float32)
    starts = np.ones(2, np.bool_)
    actions = ddpg.make_policy(net, TORQUE)(obs, starts)
    assert (actions == ddpg.make_policy(copy.deepcopy(net), TORQUE)(obs, starts)).all()
    assert (actions == ddpg.stretch(net(torch.from_numpy(obs))[0].detach().numpy(), TORQUE)).all()
