"""Chapter 2: gradients as they travel, their mean, and whole runs: what is applied and dropped."""

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from inline import collect, unconnected_collector
from torch import nn

import train_a3c_grad
from a3c_mp.algorithms import actor_critic
from a3c_mp.algorithms.actor_critic import Samples, advantages_and_targets
from a3c_mp.algorithms.gradients import GradientSetup, MeanGradient, Outbox, Report, copy_gradient
from a3c_mp.cli import parse_args
from a3c_mp.data.episodes import Episode
from a3c_mp.maths.losses import normalize
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.obs_norm import ObsNorm
from a3c_mp.processes.pool import Token

EPISODES = [Episode(-21.0, 824), Episode(0.1, 3)]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_step_on_a_gradient_that_travelled_is_the_step_on_the_gradient_itself(is_frozen):
    """Those of convolutions, which are channels-last, lie in memory in another order; that of an unused one is 0.

    An actor does not know which layers are frozen in the learner.
    """
    torch.manual_seed(0)
    net = make_actor_critic(Box(0, 255, (2, 36, 36), "uint8"), Discrete(3))
    net.unused = nn.Parameter(torch.ones(3))
    logits, values = net(torch.randint(0, 256, (8, 2, 36, 36), dtype=torch.uint8))
    (logits.square().sum() + (values - 1).square().sum()).backward()
    there = copy.deepcopy(net)
    vector, mean = torch.full((sum(p.numel() for p in net.parameters()),), 7.0), MeanGradient(there)
    copy_gradient(net, vector)
    mean.add(vector)
    if is_frozen:
        next(there.parameters()).requires_grad_(False)
        next(net.parameters()).grad = None
    norm = mean.finish(max_norm=1.0)

    expected_norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0.0)
    assert norm > 1.0, "there was something to clip"
    torch.optim.Adam(net.parameters(), lr=0.1).step()
    torch.optim.Adam(there.parameters(), lr=0.1, fused=True).step()
    for found, expected in zip(there.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_statistics_of_a_rollout_arrive_with_its_first_gradient_and_what_is_not_finite_is_reported():
    args = train_a3c_grad.Args(env_id="CartPole-v1", num_envs=2, unroll_length=6, batch_size=4)
    setup = GradientSetup(args)
    net, metrics = setup.net, {"values/target": torch.tensor([1.0, 5.0])}
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    outbox = Outbox(args, unconnected_collector(args), net)
    outbox.memory.slots = setup.slots
    outbox.memory.states = SimpleNamespace(write=lambda *_: None)
    outbox.finite, outbox.episodes, outbox.is_first, outbox.action_metrics = True, EPISODES, True, {}
    outbox.rollout.obs.normal_()
    slot, reports = outbox.memory.slots[0], []
    for indices in outbox.unsent(12):
        reports.append(outbox.write(Token(0, 7), 7, metrics, len(indices)))
        if len(reports) == 1:
            assert torch.equal(slot["obs"], outbox.rollout.obs[1:].flatten(0, 1))
            assert slot["episodes"][:2].tolist() == [[-21.0, 824, 0], [0.1, 3, 0]]
    means = {"values/target": 3.0}
    assert reports == [Report(7, 4, 2, True, True, means), *2 * [Report(7, 4, 0, False, True, means)]]

    assert not outbox.write(Token(0, 7), 7, {"losses/total": torch.tensor(torch.inf)}, 4).finite
    list(net.parameters())[-1].grad[-1] = torch.nan
    assert not outbox.write(Token(0, 7), 7, metrics, 4).finite


@pytest.mark.parametrize(("version", "has_own"), [(0, True), (1, False)])
def test_only_before_the_first_published_scale_a_rollout_has_one_of_its_own(version, has_own):
    """A published one may be 1.0."""
    args = train_a3c_grad.Args(env_id="CartPole-v1", num_envs=2, unroll_length=6, reward_scale=None)
    collector = unconnected_collector(args)
    outbox = Outbox(args, collector, collector.net)
    outbox.memory.more = SimpleNamespace(load=lambda net: version)
    outbox.collect()
    assert (outbox.reward_scale != 1.0) == has_own


# ---- whole runs

CARTPOLE = ["--env-id", "CartPole-v1", "--num-envs", "3", "--unroll-length", "5", "--batch-size", "15"]
PONG = ["--env-id", "PongNoFrameskip-v4", "--num-envs", "2", "--unroll-length", "3", "--batch-size", "6"]
NO_CLIP = ["--max-grad-norm", "1e9", "--checkpoint-seconds", "1e6", "--precision", "fp32"]


@pytest.fixture
def tape(monkeypatch):
    """SGD in place of Adam; every step of it as (lr, parameters before, gradient, parameters after), flat."""
    steps = []

    class Recording(torch.optim.SGD):
        def __init__(self, parameters, lr, eps, fused):
            super().__init__(parameters, lr)

        def step(self):
            group = self.param_groups[0]
            before = flat(group["params"])
            super().step()
            steps.append((group["lr"], before, flat(p.grad for p in group["params"]), flat(group["params"])))

    monkeypatch.setattr(torch.optim, "Adam", Recording)
    return steps


def flat(tensors):
    return torch.cat([t.detach().double().flatten() for t in tensors])


def reference_gradient(args, net, rollouts):
    """Gradient of the mean loss over all samples of all rollouts, in float64, the losses written out."""
    net, parts = copy.deepcopy(net).double(), []
    for rollout in rollouts:
        rollout = rollout.map(lambda field: field.double() if field.is_floating_point() else field)
        advantages, value_targets = advantages_and_targets(args, rollout, 1.0)
        advantages = normalize(advantages) if args.normalize_advantages else advantages
        *fields, _ = Samples.of(rollout, advantages, value_targets)
        parts.append(fields)
    obs, action, behaviour_logits, advantages, value_targets = (torch.cat(f) for f in zip(*parts, strict=True))
    logits, values = (output.double() for output in net(obs))
    probs = logits.softmax(dim=-1)
    chosen = torch.arange(len(action)), action
    ratio = probs[chosen] / behaviour_logits.softmax(dim=-1)[chosen]
    surrogate = torch.minimum(ratio * advantages, ratio.clip(1 - args.clip_ratio, 1 + args.clip_ratio) * advantages)
    entropy = -(probs * probs.log()).sum(dim=-1)
    losses = -surrogate + args.value_coef / 2 * (values - value_targets) ** 2 - args.entropy_coef * entropy
    (losses.sum() / len(action)).backward()
    return flat(p.grad for p in net.parameters())


@pytest.mark.parametrize(
    ("num_actors", "env", "normalized"),
    [
        (1, CARTPOLE, "--no-normalize-advantages"),
        (4, CARTPOLE, "--normalize-advantages"),
        (2, PONG, "--normalize-advantages"),
    ],
)
def test_in_sync_the_step_is_that_of_one_process_over_the_union_of_all_rollouts(
    run_inline, tape, num_actors, env, normalized
):
    flags = [*env, *NO_CLIP, "--sync", "--num-actors", str(num_actors), "--learning-rate", "0.1", normalized]
    chapter = train_a3c_grad.main
    args = parse_args(chapter.args_class, chapter.presets, "", flags)
    net = GradientSetup(args).net
    rollouts = [collect(unconnected_collector(args, net, actor))[0] for actor in range(num_actors)]
    expected = reference_gradient(args, net, rollouts)

    done = run_inline("train_a3c_grad.py", *flags, "--total-steps", str(num_actors * args.batch_size))
    assert done.code == 0
    ((lr, before, gradient, after),) = tape
    assert torch.equal(before, flat(net.parameters()))
    assert (gradient - expected).abs().max() < 1e-5 * expected.abs().max()
    np.testing.assert_allclose(after, before - lr * expected, atol=1e-6 * lr)

    state = done.state["net"]
    assert torch.equal(flat(p for name, p in state.items() if "norm" not in name and name != "reward_scale"), after)
    norm = ObsNorm(net.norm.shift.shape[1:], image=env is PONG)
    norm.update(torch.cat([actor_critic.obs_for_stats(rollout.obs, env is PONG) for rollout in rollouts]))
    for name in ("shift", "scale"):
        torch.testing.assert_close(state[f"norm.{name}"], norm.state_dict()[name])


@pytest.mark.parametrize(
    ("flags", "entries", "steps", "figures"),
    [
        (["--grads-per-step", "3"], [(1, 0), (2, 0), (6, 0), (4, 0), (5, 0), (9, 0), (1, 0), (1, 0)], [3, 6], {}),
        (["--max-lag", "1"], [(1, 0), (2, 0), (3, 2), (4, 1), (5, 3)], [1, 2, 4], {"policy_lag_mean": 6 / 5}),
    ],
    ids=["the mean of K, the last two wait for a third", "too old ones are dropped and counted, not their steps"],
)
def test_which_gradients_make_a_step(run_inline, tape, monkeypatch, flags, entries, steps, figures):
    """Entries: the value of all of a gradient, and how many updates old it claims to be."""
    given = itertools.chain(entries, itertools.repeat((1, 0)))

    def actor(channel, args):
        def fill(token):
            value, age = next(given)
            channel.memory.slots[token.slot]["vector"].fill_(value)
            return Report(channel.memory.weights.version - age, 10, 0, False, True, {})

        return fill

    monkeypatch.setattr(train_a3c_grad.main, "actor", actor)
    total_steps, too_old = 10 * len(entries), sum(age > 1 for _, age in entries)
    flags = [*CARTPOLE, *NO_CLIP, "--num-actors", "1", *flags, "--total-steps", str(total_steps)]
    done = run_inline("train_a3c_grad.py", *flags)
    assert done.code == 0
    assert [gradient.unique().tolist() for _, _, gradient, _ in tape] == [[mean] for mean in steps]
    figures |= {"steps": total_steps, "gradients_too_old": too_old}
    assert {name: done.summary[name] for name in figures} == figures
