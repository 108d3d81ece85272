"""Chapter 2 from end to end, its actors as threads: what is applied, what is dropped, what is the same twice."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from inline import unconnected_channel

import train_a3c_grad
from a3c_mp.algorithms import actor_critic, gradients
from a3c_mp.algorithms.actor_critic import Samples
from a3c_mp.algorithms.gradients import Gradient, MeanGradient, Report
from a3c_mp.cli import parse_args
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.rollout import Rollout, empty_rollout, rollout_spec
from a3c_mp.errors import ConfigError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.obs_norm import ObsNorm
from a3c_mp.seeds import derive_seeds
from wrappers import make_vec_env

CARTPOLE = ["--env-id", "CartPole-v1", "--num-envs", "3", "--unroll-length", "5", "--batch-size", "15"]
PONG = ["--env-id", "PongNoFrameskip-v4", "--num-envs", "2", "--unroll-length", "3", "--batch-size", "6"]
NO_CLIP = ["--max-grad-norm", "1e9", "--checkpoint-seconds", "1e6", "--precision", "fp32"]


@pytest.fixture
def train(run_inline):
    """Runs the chapter, each run under a name of its own."""
    numbers = iter(range(100))
    return lambda *flags: run_inline("train_a3c_grad.py", *flags, name=f"r{next(numbers)}")


@pytest.fixture
def tape(monkeypatch):
    """SGD in place of Adam; every step of it as (lr, parameters before, gradient, parameters after)."""
    steps = []

    class Recording(torch.optim.SGD):
        def __init__(self, parameters, lr, eps, fused):
            super().__init__(parameters, lr)

        def step(self):
            group = self.param_groups[0]
            before = [p.detach().clone() for p in group["params"]]
            super().step()
            grads = [p.grad.clone() for p in group["params"]]
            steps.append((group["lr"], before, grads, [p.detach().clone() for p in group["params"]]))

    monkeypatch.setattr(torch.optim, "Adam", Recording)
    return steps


def flat(tensors):
    return torch.cat([t.double().flatten() for t in tensors])


def collected(args, net, worker):
    """The first rollout of an actor, collected again."""
    channel = unconnected_channel(worker)
    env_seed, _ = derive_seeds(args.seed, *channel.seed_key)
    env = make_vec_env(args.env_id, args.num_envs, seed=env_seed)
    spec = rollout_spec(args.unroll_length, args.num_envs, env.single_observation_space, env.single_action_space)
    rollout = empty_rollout(spec)
    RolloutCollector(args, env, copy.deepcopy(net), channel).collect(rollout)
    return rollout


def reference_gradient(args, net, rollouts):
    """Gradient of the mean loss over all samples of all rollouts, in float64, the losses written out."""
    net = copy.deepcopy(net).double()
    samples = [
        Samples.of(args, Rollout(*(f.double() if f.is_floating_point() else f for f in rollout)))
        for rollout in rollouts
    ]
    obs, action, behaviour_logits, advantages, value_targets = (torch.cat(f) for f in zip(*samples, strict=True))
    logits, values = net(obs)
    probs = logits.softmax(dim=-1)
    chosen = torch.arange(len(action)), action
    ratio = probs[chosen] / behaviour_logits.softmax(dim=-1)[chosen]
    surrogate = torch.minimum(ratio * advantages, ratio.clip(1 - args.clip_ratio, 1 + args.clip_ratio) * advantages)
    entropy = -(probs * probs.log()).sum(dim=-1)
    losses = -surrogate + args.value_coef / 2 * (values - value_targets) ** 2 - args.entropy_coef * entropy
    (losses.sum() / len(action)).backward()
    return [p.grad for p in net.parameters()]


def first_net(args):
    """The net that a run starts with."""
    env = make_vec_env(args.env_id, 1, seed=0)
    torch.manual_seed(args.seed)
    return make_actor_critic(env.single_observation_space, env.single_action_space)


@pytest.mark.parametrize(
    ("num_actors", "env", "normalize"),
    [
        (1, CARTPOLE, "--no-normalize-advantages"),
        (4, CARTPOLE, "--normalize-advantages"),
        (2, PONG, "--normalize-advantages"),
    ],
)
def test_in_sync_the_step_is_that_of_one_process_over_the_union_of_all_rollouts(
    train, tape, num_actors, env, normalize
):
    flags = [*env, *NO_CLIP, "--sync", "--num-actors", str(num_actors), "--learning-rate", "0.1", normalize]
    args = parse_args(train_a3c_grad.Args, train_a3c_grad.PRESETS, "", flags)
    net = first_net(args)
    rollouts = [collected(args, net, worker) for worker in range(num_actors)]
    expected = flat(reference_gradient(args, net, rollouts))

    samples = num_actors * args.batch_size
    done = train(*flags, "--total-steps", str(2 * samples))
    assert done.code == 0
    assert done.summary["updates"] == len(tape) == 2
    lr, before, grads, after = tape[0]
    assert torch.equal(flat(before), flat(net.parameters()))
    assert (flat(grads) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert [step[0] for step in tape] == pytest.approx([0.1, 0.1 / 2]), "at the start, and halfway to the last step"
    np.testing.assert_allclose(flat(after), flat(before) - lr * expected, atol=1e-6 * lr)

    state = done.state
    steps = actor_critic.NORM_STEPS if env is PONG else args.unroll_length
    assert state["net"]["norm.count"] == 2 * num_actors * steps * args.num_envs
    assert torch.equal(flat(p for name, p in state["net"].items() if "norm" not in name), flat(tape[-1][3]))


def test_batches_of_a_rollout_add_up_to_it_and_learn_from_every_sample_once(train, tape):
    """With a learning rate of 0, obs not normalised, the mean of 5 gradients is that of the whole rollout."""
    flags = [*CARTPOLE, *NO_CLIP, "--num-actors", "1", "--learning-rate", "0", "--no-normalize-obs"]
    flags += ["--batch-size", "3"]
    args = parse_args(train_a3c_grad.Args, train_a3c_grad.PRESETS, "", flags)
    net = first_net(args)
    expected = flat(reference_gradient(args, net, [collected(args, net, 0)]))
    train(*flags, "--total-steps", "15")
    assert len(tape) == 5
    found = torch.stack([flat(grads) for _, _, grads, _ in tape])
    assert (found.mean(dim=0) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (found - expected).norm(dim=1).min() > 0.01 * expected.norm(), "each is of a part only"


def test_two_deterministic_runs_end_bit_identical(train):
    flags = [*CARTPOLE, "--deterministic", "--num-actors", "3", "--total-steps", "450"]
    hashes = [train(*flags, "--seed", seed).summary["weights_sha256"] for seed in ("5", "5", "6")]
    assert hashes[0] == hashes[1] != hashes[2]


def scripted(*script):
    """An actor that sends gradients (value of every entry, updates it claims to be old), then fine ones of 1."""

    def actor(channel, args, slots, weights, *_):
        entries = iter(script if channel.worker == args.num_actors - 1 else ())
        while True:
            slot, _ = channel.take()
            value, age = next(entries, (1.0, 0))
            gradient = Gradient(**slots[slot])
            gradient.vector.fill_(value)
            gradient.obs_num.fill_(1.0)
            gradient.obs_mean.fill_(value)
            metrics = {"losses/total": value}
            channel.send(slot, Report(weights.version - age, 10, 0, 0, bool(np.isfinite(value)), metrics))

    return actor


def test_k_gradients_make_a_step(train, tape, monkeypatch):
    monkeypatch.setattr(train_a3c_grad, "actor", scripted((1.0, 0), (2.0, 0), (6.0, 0), (4.0, 0), (5.0, 0), (9.0, 0)))
    flags = [*CARTPOLE, *NO_CLIP, "--num-actors", "1", "--grads-per-step", "3", "--total-steps", "80"]
    done = train(*flags)
    assert [grads[0].unique().tolist() for _, _, grads, _ in tape] == [[3.0], [6.0]], "means, of three"
    found = done.summary
    assert (found["updates"], found["steps"]) == (2, 80), "the last two wait for a third"


def test_the_mean_is_clipped_once(train, tape, monkeypatch):
    monkeypatch.setattr(train_a3c_grad, "actor", scripted((3.0, 0), (-1.0, 0)))
    train(*CARTPOLE, "--max-grad-norm", "0.5", "--num-actors", "1", "--grads-per-step", "2", "--total-steps", "20")
    assert flat(tape[0][2]).norm().item() == pytest.approx(0.5, rel=1e-5)
    assert (flat(tape[0][2]) > 0).all(), "the clipped mean, not the mean of the clipped"


def test_gradients_that_are_too_old_are_dropped_and_counted(train, tape, monkeypatch):
    monkeypatch.setattr(train_a3c_grad, "actor", scripted((1.0, 0), (2.0, 0), (3.0, 2), (4.0, 1), (5.0, 3)))
    done = train(*CARTPOLE, *NO_CLIP, "--num-actors", "1", "--max-lag", "1", "--total-steps", "50")
    assert [grads[0].unique().tolist() for _, _, grads, _ in tape] == [[1.0], [2.0], [4.0]]
    found = done.summary
    assert found["grads_too_old"] == 2
    assert found["grads_not_finite"] == 0
    assert found["policy_lag_mean"] == pytest.approx(6 / 5)
    assert found["steps"] == 50, "their steps were lived"


NAN, INF = (float("nan"), 0), (float("inf"), 0)


def test_gradients_that_are_not_finite_are_dropped_counted_and_named(train, tape, monkeypatch):
    monkeypatch.setattr(train_a3c_grad, "actor", scripted(NAN, (1.0, 0), INF, NAN, NAN, NAN, (1.0, 0)))
    done = train(*CARTPOLE, *NO_CLIP, "--num-actors", "2", "--sync", "--total-steps", "200")
    assert done.code == 0
    found = done.summary
    assert found["grads_not_finite"] == 5
    assert found["updates"] == len(tape) == 10, "the other actor's gradient was taken"
    assert all(grads[0].unique().tolist() == [1.0] for _, _, grads, _ in tape)
    assert "gradient of actor 1 at weights 0 contains NaN or inf; skipped (1 so far)" in done.log
    state = done.state
    assert all(t.isfinite().all() for t in state["net"].values())
    assert state["net"]["norm.count"] == 15, "20 gradients less the 5: their moments were dropped with them"


def test_a_few_in_a_row_end_the_run_with_the_last_good_weights(train, tape, monkeypatch):
    monkeypatch.setattr(train_a3c_grad, "actor", scripted((1.0, 0), (1.0, 0), *[NAN] * 100))
    done = train(*CARTPOLE, *NO_CLIP, "--num-actors", "1")
    assert done.code == 1
    found = done.summary
    assert found["exit_reason"].startswith(
        "error: gradient of actor 0 at weights 2 contains NaN or inf, 5 in a row from actor 0"
    )
    assert (found["updates"], found["grads_not_finite"]) == (2, 5)
    state = done.state
    assert torch.equal(flat(p for name, p in state["net"].items() if "norm" not in name), flat(tape[-1][3]))


def test_sync_and_deterministic_settle_what_follows_from_them():
    args = train_a3c_grad.Args(num_actors=3)
    assert gradients.settle_sync(args) == args
    for flag in ("sync", "deterministic"):
        settled = gradients.settle_sync(replace(args, **{flag: True}))
        assert settled.sync
        assert gradients.settle_sync(settled) == settled, "as on resume"
        with pytest.raises(ConfigError, match="one gradient of each of 3 actors"):
            gradients.settle_sync(replace(args, **{flag: True}, grads_per_step=2))
        for useless in ({"slots_per_actor": 2}, {"max_lag": 3}):
            with pytest.raises(ConfigError, match="each actor waits for the new weights; leave it out"):
                gradients.settle_sync(replace(args, **{flag: True}, **useless))
        resumed = replace(args, **{flag: True}, max_lag=3, resume=Path("r"))
        assert gradients.settle_sync(resumed).sync, "accepted by older versions"


def test_the_learner_makes_no_gradients_of_its_own_size_as_it_steps(monkeypatch):
    """`MeanGradient` and the optimizer work in memory that was there before."""
    net = torch.nn.Linear(500, 500)
    mean, optimizer = MeanGradient(net), torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    gradient = torch.ones(500 * 501)
    where = [p.grad.data_ptr() for p in net.parameters()]
    with torch.profiler.profile(profile_memory=True) as profile:
        for _ in range(3):
            mean.add(gradient)
        mean.finish(1.0)
        optimizer.step()
    assert [p.grad.data_ptr() for p in net.parameters()] == where
    assert max(event.self_cpu_memory_usage for event in profile.events()) < 1000, "bytes"


def test_obs_norm_of_the_run_is_that_of_the_actors_observations(train):
    """Two actors, one rollout each: the moments are those of all that either saw after its first observation."""
    flags = [*CARTPOLE, "--sync", "--num-actors", "2", "--total-steps", "30"]
    args = parse_args(train_a3c_grad.Args, train_a3c_grad.PRESETS, "", flags)
    net = first_net(args)
    norm = ObsNorm((4,), image=False)
    norm.update(torch.cat([collected(args, net, worker).obs[1:].flatten(0, 1) for worker in range(2)]))
    done = train(*flags)
    state = done.state
    for name in ("count", "mean", "variance"):
        torch.testing.assert_close(state["net"][f"norm.{name}"], norm.state_dict()[name])
