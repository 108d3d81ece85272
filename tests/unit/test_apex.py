"""Ape-X: the loss against a second, literal writing of it; ladders, target nets, actions and sizes."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

import train_apex
from a3c_mp.algorithms import apex, ddpg, dqn, td3
from a3c_mp.algorithms.apex_settings import Args
from a3c_mp.data.episodes import EpisodeStats
from a3c_mp.data.transitions import TransitionCollector, block_spec
from a3c_mp.errors import ConfigError
from a3c_mp.maths.schedules import set_learning_rate
from a3c_mp.nets.build import NetSpec
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.pool import WorkerEvent
from a3c_mp.replay import Batch, EnvStep, Replay, Shards, Writer, importance_weights
from a3c_mp.run import preflight
from a3c_mp.run.banner import first_lines
from a3c_mp.run.learner import Learner
from a3c_mp.wrappers import ActionScaling

N = 7
VECTOR = Box(-1.0, 1.0, (3,))
TORQUE = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
ARGS = Args(num_actors=2, num_envs=4, target_noise=0.0)


def a_case(name, num=N, num_quantiles=1):
    """Of an algorithm: (module, action space, batch [num], online and target net with nothing in common)."""
    torch.manual_seed(0)
    algo, (obs, next_obs), reward = train_apex.ALGORITHMS[name], torch.randn(2, num, 3), 3 * torch.randn(num)
    space, action = Discrete(4), torch.arange(num) % 4
    if name != "dqn":
        space, action = TORQUE, torch.rand(num, 2) * 2 - 1
    discount = torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 0.9, 0.9, 0.9])[:num]
    probability, no_mask = torch.rand(num).double() + 0.1, torch.ones(num, 0, dtype=torch.bool)
    batch = Batch(obs, action, reward, discount, next_obs, no_mask, probability, torch.arange(num) + 50)
    nets = [algo.make_net(VECTOR, space, NetSpec(num_quantiles=num_quantiles)) for _ in range(2)]
    for parameter in (parameter for net in nets for parameter in net.parameters()):
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # outputs that are not all near zero
    return algo, space, batch, (nets[0], nets[1].requires_grad_(False))


def as_learned(name, batch):
    return td3.with_noise(batch, torch.Generator()) if name == "td3" else batch


BOTH = pytest.mark.parametrize("name", train_apex.ALGORITHMS)


# ---- the loss, and a step


def quantile_loss(errors, width=1.0):
    """Of one sample's errors [K, L]: Dabney et al. 2018, equation 10, doubled; of one quantile: Huber's."""
    total = 0.0
    for i, row in enumerate(errors):
        tau = (i + 0.5) / len(errors)
        for e in row:
            total += 2 * (tau if e >= 0 else 1 - tau) * (e**2 / 2 if abs(e) <= width else width * (abs(e) - width / 2))
    return total / errors.shape[1]


@pytest.mark.parametrize(
    ("name", "num_quantiles", "scale", "width"),
    [("dqn", 1, 1.0, 1), ("dqn", 5, 1.0, 1), ("ddpg", 1, 1.0, 1), ("td3", 1, 1.0, 1), ("dqn", 1, None, 10)],
)
def test_the_loss_is_that_of_each_transition_alone_and_has_no_gradient_through_the_target(
    name, num_quantiles, scale, width
):
    _, _, batch, (net, target_net) = a_case(name, num_quantiles=num_quantiles)
    weights = torch.linspace(0.1, 1.0, N)
    net.reward_scale.fill_(2.0)
    args = replace(ARGS, algo=name, reward_scale=scale, num_quantiles=num_quantiles)
    loss, metrics = train_apex.loss(args, net, target_net, as_learned(name, batch), weights)
    errors, second = [], []
    for i in range(N):
        (obs, next_obs), action = (field[i : i + 1] for field in (batch.obs, batch.next_obs)), batch.action[i : i + 1]
        if name == "dqn":
            best = net.quantiles(next_obs)[0].mean(dim=1).argmax()
            q, bootstrap = net.quantiles(obs)[0, action[0]], target_net.quantiles(next_obs)[0, best]
        else:
            q, bootstrap = net.q(obs, action), target_net.q(next_obs, target_net(next_obs)[0])
        if name == "td3":  # the smaller value of two critics is the target of both
            inputs = torch.cat([next_obs, target_net(next_obs)[0]], dim=1)
            bootstrap = torch.minimum(bootstrap, target_net.twin(inputs)[0])
            second.append(net.twin(torch.cat([obs, action], dim=1)))
        target = 2 * batch.reward[i] + batch.discount[i] * bootstrap.detach()
        errors.append(target - q[:, None])
        second = [*second[:i], *(target - each for each in second[i:])]
    torch.testing.assert_close(metrics["values/td_error"], torch.stack(errors).mean(dim=(1, 2)).detach().abs())
    value_loss = sum(w * quantile_loss(e, width) for w, e in zip(weights, errors, strict=True)) / N
    value_loss += sum(w * quantile_loss(e, width) for w, e in zip(weights, second, strict=False)) / N
    assert metrics["losses/value"].item() == pytest.approx(value_loss.item(), rel=1e-5)
    parts = [(net, value_loss)]
    if name != "dqn":  # critics and actor get gradients of their own and no others
        policy_loss = -net.q(batch.obs, net(batch.obs)[0]).mean()
        parts = [(nn.ModuleList(net.critics()), value_loss), (net.actor, policy_loss)]
        assert metrics["losses/policy"].mean().item() == pytest.approx(parts[1][1].item())
    for part, literal in parts:
        found, wanted = (torch.autograd.grad(x, list(part.parameters()), retain_graph=True) for x in (loss, literal))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def a_learner(name, nets, group=None, **settings):
    """As much of a learner as takes a step; `priorities` are those that its replay was given."""
    args, priorities = replace(ARGS, algo=name, **settings), {}
    replay = SimpleNamespace(
        update=lambda ids, values: priorities.update(zip(ids.tolist(), values.tolist(), strict=True))
    )
    learner = SimpleNamespace(
        args=args, net=nets[0], optimizer=train_apex.ALGORITHMS[name].make_optimizer(args, nets[0]), updates=1,
        rng=torch.Generator(),
        setup=SimpleNamespace(replay=replay, target_net=nets[1]), priorities=priorities, group=group or LearnerGroup(),
        steps=args.total_steps // 4, record_update=lambda metrics: None, _graph_step=None,
        gradient_filter=SimpleNamespace(check=lambda value, source, what: bool(value.isfinite())),
    )  # fmt: skip
    learner.take_step = partial(Learner.take_step, learner)
    return learner


@BOTH
def test_with_two_learners_the_gradient_is_that_of_one_over_both_batches(name):
    _, _, whole, nets = a_case(name, 8)
    halves = [Batch(*(field[part] for field in whole)) for part in (slice(4), slice(4, 8))]
    # One of two, in one process: it sees the probabilities of both, and keeps its own gradient.
    half = SimpleNamespace(
        size=2, all_gather=lambda own: whole.probability, all_reduce_gradients=lambda optimizer, loss: None
    )

    def gradient(group, batch):
        online = copy.deepcopy(nets[0]), nets[1]
        learner = a_learner(name, online, group, max_grad_norm=1e9, learning_rate=0.0, policy_learning_rate=0.0)
        train_apex.learn(learner.args, learner, batch)
        return [parameter.grad for parameter in learner.net.parameters()]

    for x, a, b in zip(gradient(None, whole), *(gradient(half, batch) for batch in halves), strict=True):
        torch.testing.assert_close((a + b) / 2, x, rtol=1e-5, atol=1e-7)


def test_targets_of_td3_are_values_of_actions_around_the_policys():
    algo, _, batch, (net, target_net) = a_case("td3", 8)
    batch = as_learned("td3", batch)
    for noise, clip in ((0.2, 0.5), (1e3, 0.1)):
        found = algo.bootstrap_values(replace(ARGS, target_noise=noise, target_noise_clip=clip), net, target_net, batch)
        best = target_net(batch.next_obs)[0]
        shift = (noise * torch.randn(8, 2, generator=torch.Generator())).clamp(-clip, clip)
        assert (shift.abs() == clip).all() == (noise == 1e3)
        inputs = torch.cat([batch.next_obs, (best + shift).clamp(-1, 1)], dim=1)
        values = torch.cat([target_net.critic(inputs), target_net.twin(inputs)], dim=1)
        assert found[:, 0].tolist() == pytest.approx(values.min(dim=1).values.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "delay", "learns"), [("td3", 2, [0, 1, 0, 1]), ("td3", 3, [0, 0, 1, 0]), ("ddpg", 2, [1] * 4)]
)
def test_the_policy_learns_with_every_second_update_of_td3s_critics(name, delay, learns, monkeypatch):
    _, _, batch, nets = a_case(name)
    learner, found, moved = a_learner(name, nets, policy_delay=delay, target_period=3, target_rate=0.1), [], []
    monkeypatch.setattr(train_apex, "move_target", lambda target, net, rate: moved.append((learner.updates, rate)))
    for learner.updates in range(4):
        parts = [*learner.net.critics(), learner.net.actor]
        before = [[p.clone() for p in part.parameters()] for part in parts]
        train_apex.learn(learner.args, learner, batch)
        same = [all(map(torch.equal, old, part.parameters())) for old, part in zip(before, parts, strict=True)]
        assert not any(same[:-1])
        found.append(not same[-1])
    assert found == learns
    assert moved == [(0, 0.1), (3, 0.1)], "the target net"


@BOTH
@pytest.mark.parametrize(
    ("end", "steps", "share"), [(None, 50, 1.0), (5e-4, 50, 0.75), (5e-4, 200, 0.5), (0.0, 99, 0.01)]
)
def test_the_learning_rates_of_values_and_policy_fall_in_the_same_proportion(name, end, steps, share):
    algo, _, _, (net, _) = a_case(name)
    args = replace(ARGS, learning_rate=1e-3, policy_learning_rate=1e-4, total_steps=100, learning_rate_end=end)
    optimizer = algo.make_optimizer(args, net)
    set_learning_rate(SimpleNamespace(args=args, optimizer=optimizer, steps=steps))
    rates = [1e-3, 1e-4][: len(optimizer.param_groups)]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([share * rate for rate in rates])


@BOTH
def test_a_step_anneals_the_importance_exponent_and_makes_priorities_of_td_errors(name, monkeypatch):
    _, _, batch, nets = a_case(name)
    learner, exponents = a_learner(name, nets, importance_exponent=0.4, reward_scale=None), []
    batch.reward[1] = 70.0  # the scale may not know of an outlier yet

    def recording(probability, exponent, smallest):
        exponents.append(exponent)
        return importance_weights(probability, exponent, smallest)

    monkeypatch.setattr(train_apex, "importance_weights", recording)
    _, metrics = train_apex.loss(learner.args, *nets, as_learned(name, batch), torch.ones(N))
    train_apex.learn(learner.args, learner, batch)
    assert exponents == [pytest.approx(0.4 + 0.6 / 4)]
    expected = dict(zip(range(50, 57), metrics["values/td_error"].clamp(max=10.0).tolist(), strict=True))
    assert learner.priorities == pytest.approx(expected)


@BOTH
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_batch_with_a_td_error_that_is_not_finite_changes_nothing(name, bad):
    """Huber's gradient of an infinite error is finite: the gradient alone would not tell."""
    _, _, batch, nets = a_case(name)
    learner, before = a_learner(name, nets), copy.deepcopy(nets[0].state_dict())
    batch.reward[1] = bad
    train_apex.learn(learner.args, learner, batch)
    assert not learner.priorities
    assert all(torch.equal(value, before[name]) for name, value in learner.net.state_dict().items())


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_the_target_net_moves_by_its_rate_statistics_of_observations_too(rate):
    *_, (net, target_net) = a_case("dqn")
    net.norm.update(torch.randn(10, 3))
    for each in (net, target_net):  # constants of a net of one's own
        each.register_buffer("mask", torch.tensor(-math.inf), persistent=False)
        each.register_buffer("places", torch.arange(3), persistent=False)
    before, online = copy.deepcopy(target_net.state_dict()), net.state_dict()
    apex.move_target(target_net, net, rate)
    for name, value in target_net.state_dict().items():
        torch.testing.assert_close(value, before[name] + rate * (online[name] - before[name]))
    assert (target_net.mask.item(), target_net.places.tolist()) == (-math.inf, [0, 1, 2])


# ---- exploration


def test_the_ladder_has_a_rung_for_each_environment_of_all_actors():
    found = [epsilon for actor in range(3) for epsilon in apex.ladder(0.4, 7.0, actor, num_envs=2, num_actors=3)]
    assert found == pytest.approx([0.4 ** (1 + 7 * i / 5) for i in range(6)])
    assert apex.ladder(0.4, 7.0, 0, num_envs=1, num_actors=1) == pytest.approx([0.4])


def test_an_environment_explores_as_much_as_its_epsilon_says():
    args = replace(ARGS, num_actors=1, num_envs=3, epsilon=0.5, ladder_exponent=2.0)
    net, obs = dqn.make_net(VECTOR, Discrete(4)), np.ones((3, 3), np.float32)
    policy, rng = dqn.Policy(args, net, Discrete(4), obs, 0), np.random.default_rng(1)
    best = net(torch.from_numpy(obs))[0][0].argmax().item()
    for warm_up, epsilons in ((False, [0.5, 0.5**2, 0.5**3]), (True, [1, 1, 1])):
        chosen = np.array([policy.act(obs, rng, warm_up=warm_up)[0] for _ in range(1500)])
        share = (chosen != best).mean(axis=0)  # of random actions, a quarter are the best by chance
        assert share == pytest.approx(0.75 * np.array(epsilons), abs=0.05)


@BOTH
def test_an_actor_reports_the_values_of_what_it_does(name):
    algo, space, batch, (net, _) = a_case(name)
    states, obs = batch.obs, batch.obs.numpy()
    policy = algo.Policy(replace(ARGS, num_envs=N, epsilon=1.0, noise=0.3), net, space, obs, 0)
    action, q, value = policy.act(obs, np.random.default_rng(0))
    taken = torch.from_numpy(action)
    if name == "dqn":
        table = net(states)[0]
        expected, best, greedy = table.gather(1, taken[:, None])[:, 0], table.max(dim=1).values, table.argmax(dim=1)
    else:
        mean = net(states)[0]
        assert (taken.abs() <= 1).all()
        assert (taken != mean).all()
        expected, best, greedy = net.q(states, taken), net.q(states, mean), ActionScaling(space)(mean.detach().numpy())
    assert taken.dtype == batch.action.dtype
    assert q == pytest.approx(expected.tolist(), abs=1e-6)
    assert value == pytest.approx(best.tolist(), abs=1e-6)
    assert policy.value(obs) == pytest.approx(value, abs=1e-6)
    assert (algo.make_policy(net, space)(obs, np.ones(N, np.bool_)) == np.asarray(greedy)).all()


def test_noise_is_as_large_and_as_persistent_as_it_should_be():
    args = replace(ARGS, num_actors=2, num_envs=100, noise=0.1, noise_exponent=1.0, noise_memory=0.8)
    net = ddpg.make_net(VECTOR, TORQUE)  # its first actions are near the middle, so that little is clipped
    obs = np.zeros((100, 3), np.float32)
    policy, rng = ddpg.Policy(args, net, TORQUE, obs, actor=1), np.random.default_rng(0)
    noise = np.array([policy.act(obs, rng)[0] for _ in range(100)])
    noise -= net(torch.from_numpy(obs))[0].detach().numpy()
    scaled = noise / np.array([0.1 ** (1 + i / 199) for i in range(100, 200)])[:, None]
    for part in (scaled[:, :50], scaled[:, 50:]):
        assert part.std() == pytest.approx(1.0, abs=0.1)
        assert (part[1:] * part[:-1]).mean() == pytest.approx(0.8, abs=0.1)


@BOTH
@pytest.mark.parametrize("greedy", [False, True])
def test_the_log_says_that_games_with_exploration_decide_when_the_run_ends(name, greedy):
    args = replace(ARGS, algo=name, stop_return=5.0, **({"epsilon": 0.0, "noise": 0.0} if greedy else {}))
    log = "\n".join(first_lines(args, a_case(name)[3][0]))
    assert ("; --eval-every N --stop-eval-return R --stop-return none: of greedy games)" in log) is not greedy
    assert ("(the mean return of games with exploration" in log) is not greedy
    goal = first_lines(replace(args, eval_every=100, stop_eval_return=5.0), a_case(name)[3][0])
    assert not any("--eval-every N" in line for line in goal), "it is given"


@pytest.mark.parametrize(
    ("total", "steps", "held", "resumed", "warns"),
    [(5000, 0, 0, False, 1), (8001, 0, 0, False, 0), (9000, 5000, 0, True, 1), (6000, 5900, 8000, True, 0)],
)
def test_a_run_that_ends_before_its_first_update_says_so_at_the_start(total, steps, held, resumed, warns):
    args = replace(ARGS, total_steps=total, learning_starts=8000, replay_ratio=64.0, target_period=1)
    args = replace(args, resume=Path("runs/r") if resumed else None)
    said = []
    log = SimpleNamespace(warning=said.append, info=lambda text: None)
    run = SimpleNamespace(log=log, steps=steps, metrics=SimpleNamespace())
    apex.show_replay(run, args, SimpleNamespace(has_started=False), lambda: held, "")
    assert ["ends before its next update" in text for text in said] == [True] * warns


# ---- what is written of steps, and sizes


@pytest.mark.parametrize("reward_clip", [False, True])
def test_the_replay_has_rewards_clipped_and_not_scaled_and_the_message_has_them_raw(reward_clip):
    rewards, seen = np.array([-7.0, math.inf]), []
    args = replace(ARGS, num_envs=2, reward_clip=reward_clip)
    no = np.zeros(2, bool)
    env = SimpleNamespace(mask=None, step=lambda action: (np.zeros((2, 3)), rewards, no, no, {}))
    policy = SimpleNamespace(
        act=lambda obs, rng, mask, warm_up: (np.zeros(2, int), *np.zeros((2, 2))), to_env=lambda action: action
    )
    collector = object.__new__(TransitionCollector)
    collector.args, collector.env, collector.policy, collector.obs = args, env, policy, np.zeros((2, 3))
    collector.channel, collector.rollouts = SimpleNamespace(seed_key=(0,)), 0
    collector.writer, collector.stats = SimpleNamespace(step=lambda step: seen.append(step.reward)), EpisodeStats(2)
    block = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in block_spec(3, 2).items()}
    collector.collect(block)
    np.testing.assert_array_equal(seen, [[-1.0, math.nan] if reward_clip else [-7.0, math.inf]] * 3)  # NaN: not sampled
    assert block["reward"].tolist() == [[-7.0, math.inf]] * 3


@pytest.mark.parametrize(("n_step", "block_length", "patience"), [(3, 4, 5), (5, 4, 6), (20, 4, 9), (5, 1, 9)])
def test_a_bad_reward_in_many_returns_is_no_reason_to_give_up(n_step, block_length, patience):
    """n steps lie in up to ceil(n / block) + 1 blocks, one after the other."""
    args = replace(ARGS, env_id="CartPole-v1", n_step=n_step, block_length=block_length)
    assert apex.ApexSetup(args, dqn).bad_in_a_row == patience > math.ceil(n_step / block_length) + 2


def one_output(obs_space, action_space):
    return nn.Linear(3, 1)


SPEC_OF_Q = {
    "two layers": ("dqn", NetSpec(hidden=(8, 5)), [(8, 3), (5, 8), (1, 5), (5, 8), (4, 5)]),
    "one layer": ("dqn", NetSpec(hidden=(8,)), [(8, 3), (1, 8), (4, 8)]),
    "ddpg": ("ddpg", NetSpec(hidden=(8, 5)), [(8, 3), (5, 8), (2, 5), (8, 5), (5, 8), (1, 5)]),
    "td3": ("td3", NetSpec(hidden=(8,)), [(8, 3), (2, 8), (8, 5), (1, 8), (8, 5), (1, 8)]),
    "no units": ("ddpg", NetSpec(hidden=(8, 0)), "hidden=8 0: a layer needs 1 or more units"),
    "a net for images": ("dqn", NetSpec("deep"), r"net=deep: observations are of shape \(3,\), it needs images"),
    "a net of dqn's": ("ddpg", NetSpec("a3c"), "net=a3c: --algo ddpg has a net of its own"),
    "a size of an own net": ("dqn", NetSpec(f"{__name__}:one_output", hidden=(8,)), "hidden=8: a net of your own"),
    "too few values": ("dqn", NetSpec(f"{__name__}:one_output"), r"returned shapes \(3, 1\), must be \(3, 4\)"),
    "no quantiles": ("dqn", NetSpec(f"{__name__}:one_output", num_quantiles=5), r"must be \(3, 4, 5\)"),
}


@pytest.mark.parametrize(("name", "spec", "expected"), SPEC_OF_Q.values(), ids=SPEC_OF_Q)
def test_a_q_net_has_the_layers_that_flags_give_it_or_is_refused(name, spec, expected):
    spaces = VECTOR, Discrete(4) if name == "dqn" else TORQUE
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            train_apex.ALGORITHMS[name].make_net(*spaces, spec)
        return
    net = train_apex.ALGORITHMS[name].make_net(*spaces, spec)
    assert [tuple(each.shape) for each in net.parameters() if each.dim() == 2] == expected


def test_the_memory_that_is_refused_is_the_memory_that_is_needed(monkeypatch):
    """Frames are stored once: 84 * 84 bytes and some, 7.1 KB."""
    monkeypatch.setattr(preflight, "free_memory", lambda: 0)
    with pytest.raises(ConfigError, match=r"the replay needs 6\.6 GiB, 0\.0 GiB is free"):
        apex.ApexSetup(Args(replay_size=1_000_000), dqn)
    small = replace(ARGS, env_id="CartPole-v1", replay_size=1000, learning_starts=100)
    apex.ApexSetup(small, dqn, rank=1)  # the first learner has checked it for all, and taken its share


def test_dueling_advantages_have_mean_zero():
    net, obs = dqn.DuelingQ((4, 84, 84), 6, image=True), torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    features = net.torso(net.norm.convert(obs))
    advantage = net.advantage(features)
    torch.testing.assert_close(net(obs)[0], net.value(features) + advantage - advantage.mean(dim=1, keepdim=True))


# ---- the rate limiter, and a replay whose actor dies


@pytest.mark.parametrize(
    ("steps", "sizes", "allowed"),
    [
        (50, [60, 30], 0),  # 100 transitions are needed
        (50, [60, 40], 100),
        (50, [120, 0], 0),  # one learner's replay is empty
        (999, [10, 10], 0),
        (1000, [10, 10], 2000),  # as many steps as each replay holds: games of one step take two rows
    ],
)
def test_sampling_starts_with_enough_transitions_or_full_replays_and_keeps_the_ratio(steps, sizes, allowed):
    limiter = apex.RateLimiter(samples_per_insert=2.0, min_size_to_sample=100, capacity=1000)
    limiter.insert(steps, sizes)
    run = SimpleNamespace(args=SimpleNamespace(deterministic=True), timing=lambda name: nullcontext())
    batches = SimpleNamespace(batch_size=25, next=lambda: "batch")
    assert len(list(limiter.allowed(batches, run))) == allowed / 25
    limiter.insert(24, [1000, 1000])
    assert len(list(limiter.allowed(batches, run))) == 48 // 25
    restored = apex.RateLimiter(2.0, 100, 1000)
    restored.load_state_dict(limiter.state_dict())
    assert restored.samples_allowed == limiter.samples_allowed == 23


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_successor_has_room_for_its_blocks_or_writes_the_lost_one_again(deterministic):
    args = replace(ARGS, num_envs=2, deterministic=deterministic)
    shards = Shards(2, 2, 40, VECTOR, Discrete(4))
    setup = apex.ApexSetup.__new__(apex.ApexSetup)
    setup.more, setup.replay = shards, Replay(shards, 1.0, 0)
    writer, lanes = Writer(shards, 1, 1, 0.9), shards.lanes(1)

    def block():
        for _ in range(args.block_length):
            nothing = np.zeros((4, 2))
            ends = nothing[:2].astype(bool)
            writer.step(EnvStep(np.zeros((2, 3), np.float32), np.zeros(2, np.int64), nothing[0], *ends, *nothing[2:]))

    for _ in range(30):  # its lanes are full many times
        setup.make_room(args, [1])
        block()
        setup.replay.ingest(1)
    before = shards.written[lanes].copy()
    setup.make_room(args, [1])
    block()  # and then it dies
    setup._prepare_successor(SimpleNamespace(args=args, own=range(4, 6)), WorkerEvent(5, "it died"))
    assert np.array_equal(shards.written[lanes], before) == deterministic
    assert (shards.writable_until[lanes] - shards.written[lanes] >= args.rows_in_flight).all()
