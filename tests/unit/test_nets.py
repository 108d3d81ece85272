"""Nets: shapes, memory formats, what they leave alone, and the running moments in front of them."""

import copy
import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from a3c_mp.algorithms.actor_critic import obs_for_stats
from a3c_mp.errors import ConfigError
from a3c_mp.nets import precision
from a3c_mp.nets.build import NETS, NetSpec, make_actor_critic
from a3c_mp.nets.layers import LSTMCore, is_image
from a3c_mp.nets.obs_norm import KNEE, MOST_MERGED, VALUES_AT_ONCE, ObsNorm
from a3c_mp.nets.q_values import DuelingQ
from a3c_mp.processes.weights import Weights

SMALL_IMAGE = (2, 36, 36)  # the smallest that the convolutions take


def image_net():
    return make_actor_critic(Box(0, 255, SMALL_IMAGE, np.uint8), Discrete(6))


def vector_net():
    return make_actor_critic(Box(-1.0, 1.0, (4,)), Discrete(6))


def pixels(num, shape=SMALL_IMAGE, seed=0):
    return torch.randint(0, 256, (num, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


FLT_MAX = torch.finfo(torch.float32).max


def deviates(num, seed=0):
    """Observations [num, 3], and a norm that has seen a thousand of their kind."""
    rng = torch.Generator().manual_seed(seed)
    norm = ObsNorm((3,), image=False)
    norm.update(torch.randn(1000, 3, generator=rng) * 7 - 2)
    return norm, torch.randn(num, 3, generator=rng) * 7 - 2


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.booleans(),
    st.floats(-50, 50),
    st.floats(0.1, 10),
    st.integers(0, 2**32 - 1),
)
def test_running_statistics_are_those_of_all_data_at_once(chunks, image, mean, deviation, seed):
    rng = np.random.default_rng(seed)
    shape = (sum(chunks), 2, 3)
    data = rng.integers(0, 256, shape, np.uint8) if image else mean + deviation * rng.normal(size=shape)
    stats = ObsNorm(shape[1:], image).stats
    for chunk in torch.tensor(data).split(chunks):
        mean, deviation, far = stats.update(chunk)
    assert far == 0
    np.testing.assert_allclose(mean[0], data.mean(axis=0), rtol=1e-4, atol=1e-3)
    expected = data.std(axis=0) + image  # one grey level
    np.testing.assert_allclose(deviation[0], expected if image or len(data) > 1 else 1.0, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("width", "about"), [(348, 4), (70_000, 6)], ids=["wide", "16 rows are enough"])
def test_of_wide_vectors_all_environments_enter_the_statistics(width, about):
    """Rows are those of T steps of B environments, of which some are left out."""
    offsets = 10.0 * torch.arange(8).repeat(256)[:, None]
    mean, deviation, _ = ObsNorm((width,), None).stats.update(offsets.expand(2048, width))
    assert mean.mean().item() == pytest.approx(35, abs=about)
    assert deviation.mean().item() == pytest.approx(offsets.std().item(), rel=0.1)


def test_vectors_come_out_with_mean_zero_and_deviation_one():
    norm, obs = deviates(1000)
    out = norm(obs)
    torch.testing.assert_close(out.mean(dim=0), torch.zeros(3), rtol=0, atol=0.15)
    torch.testing.assert_close(out.std(dim=0), torch.ones(3), rtol=0, atol=0.1)


def test_before_the_first_update_bytes_are_scaled_to_one_and_vectors_left_alone():
    assert ObsNorm((3,), image=True)(torch.tensor([[0.0, 51.0, 255.0]])).tolist() == [[0.0, pytest.approx(0.2), 1.0]]
    assert ObsNorm((3,), image=False)(torch.tensor([[-2.0, 0.0, 2.0]])).tolist() == [[-2.0, 0.0, 2.0]]


@pytest.mark.parametrize("num", [1, 8, 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_normalized_a_few_at_a_time_are_those_normalized_at_once_to_the_last_bit(num, dtype):
    shape = (4, 84, 84)
    assert 1 < VALUES_AT_ONCE // math.prod(shape) < 25
    norm = ObsNorm(shape, image=True)
    norm.update(100 + pixels(50, shape) // 25)
    obs = pixels(num, shape, seed=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        in_learner = norm.convert(obs)
    assert in_learner.dtype == dtype
    assert in_learner.max() > KNEE, "beyond it values stay apart"
    at_once, near = norm(obs.to(dtype)), in_learner.abs() <= KNEE
    assert torch.equal(in_learner[near], at_once[near])
    torch.testing.assert_close(in_learner, at_once, rtol=0.01, atol=0)
    assert torch.equal(norm.to(dtype).convert(obs), in_learner), "an actor's copy"


def test_images_of_more_channels_than_opencv_merges_are_normalized_too():
    norm, obs = ObsNorm(shape := (MOST_MERGED + 1, 36, 36), image=True), pixels(2, shape)
    torch.testing.assert_close(norm.convert(obs), norm(obs.float()))


def test_a_pixel_that_hardly_ever_changes_counts_in_grey_levels():
    """One level off is at most 1, though its deviation is nearly zero."""
    frames = torch.full((10_000, 1), 87, dtype=torch.uint8)
    frames[0] = 88
    norm = ObsNorm((1,), image=True)
    norm.update(frames)
    out = norm(torch.tensor([[86.0], [87.0], [88.0]]))
    assert out[1] == 0.0
    assert out.abs().max() <= 1.0


@pytest.mark.parametrize("first", [8, 1024])
@pytest.mark.parametrize("is_late", [False, True], ids=["seen early", "seen late"])
def test_the_values_of_a_rare_feature_stay_apart(first, is_late):
    """Two that differ by 0.2 deviations, and by a fifth of their distance from the mean, after 500 occurrences."""
    rng = np.random.default_rng(first + is_late)
    for _ in range(12):
        frequency, scale, noise = 10 ** rng.uniform(-3, np.log10(0.5)), *10 ** rng.uniform(-6, 6, 2)
        noise, offset = noise * rng.integers(2), rng.integers(2) * scale * 10 ** rng.uniform(-3, 3)
        norm, seen, left = ObsNorm((1,), image=False), [], 500
        while left > 0:
            size = min(4096, int(10 / frequency)) if seen else first
            is_there = (rng.random(size) < frequency) & (len(seen) >= 5 or not is_late)
            values = np.where(is_there, rng.normal(offset, scale, size), rng.normal(0.0, noise, size))
            seen.append(torch.from_numpy(values).float()[:, None])
            norm.update(seen[-1])
            left -= is_there.sum()
        mean, deviation = torch.cat(seen).double().mean(), torch.cat(seen).double().std()
        values = torch.from_numpy(rng.normal(offset, scale, (2, 500))).float()
        distance, farthest = values[0] - values[1], (values - mean).abs().amax(dim=0)
        apart = (distance.abs() >= 0.2 * deviation) & (distance.abs() >= 0.2 * farthest)
        apart &= farthest <= (1e6 * noise or math.inf)
        inputs = norm.convert(values.reshape(-1, 1)).view(2, -1)
        shown = (inputs[0] - inputs[1]) * distance.sign()
        assert (shown[apart] >= 0.1).all(), (frequency, scale, noise, offset)


OTHERS = {
    "noise": lambda rng, size: rng.normal(size=size),
    "two values": lambda rng, size: rng.integers(2, size=size).astype(float),
    "steps": lambda rng, size: rng.normal(size=size).round(),
}


@pytest.mark.parametrize("first", [8, 1024])
@pytest.mark.parametrize("draw", OTHERS.values(), ids=OTHERS)
def test_a_value_that_is_far_away_however_frequent_moves_the_others_by_a_tenth_at_most(draw, first):
    rng = np.random.default_rng(first)
    for _ in range(10):
        frequency, scale = rng.choice([1e-3, rng.uniform(0.001, 0.95)]), 10 ** rng.uniform(-6, 6)
        offset = rng.choice([0, 1, -1]) * scale * 10 ** rng.uniform(-2, 4)
        far = offset + rng.choice([-1, 1]) * 2e6 * scale * 10 ** rng.uniform(0, 20)
        norm, without = ObsNorm((1,), image=False), ObsNorm((1,), image=False)
        for number in range(20):
            others = offset + scale * draw(rng, (1000 if number else first, 1))
            values = np.where(rng.random(others.shape) < frequency, far, others)
            without.update(torch.from_numpy(others).float())
            norm.update(torch.from_numpy(values).float())
        others = torch.from_numpy(offset + scale * draw(rng, (1000, 1))).float()
        inputs, expected = norm.convert(others), without.convert(others)
        assert (inputs - expected).abs().max() <= 0.1 * expected.abs().max(), (frequency, scale, offset, far)


@pytest.mark.parametrize("noise", [0.0, 1e-12, 1e-9, 1e-7])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.8])
def test_rounding_noise_where_a_feature_is_zero_does_not_hide_its_values(noise, share):
    """As in speed * cos(heading), which is 4e-8 times the speed at 90 degrees."""
    rng, norm = np.random.default_rng(0), ObsNorm((1,), image=False)
    for _ in range(20):
        values = np.where(rng.random(1000) < share, rng.normal(0, 1, 1000) * noise, rng.integers(1, 5, 1000))
        assert norm.update(torch.from_numpy(values).float()[:, None]) == 0
    inputs = norm.convert(torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]]))
    assert (inputs.diff(dim=0) > 0.4).all()


@pytest.mark.parametrize("angles", [4, 6, 8, 12])
def test_sines_of_a_few_headings_keep_their_scale_beside_their_rounding_noise(angles):
    """Computed in float32, the cosines of 90 degrees are 4e-8 and 1e-8, and those of 45 and 315 differ by 2e-7."""
    headings = torch.arange(4096) % angles * (2 * math.pi / angles)
    norm = ObsNorm((2,), image=False)
    assert norm.update(torch.stack([headings.cos(), headings.sin()], dim=1)) == 0
    torch.testing.assert_close(norm.scale, torch.full((1, 2), 2**0.5), rtol=0.01, atol=0)


def turned(rng, steps=700):
    """Cosines of headings to which quarter turns are added, wrapped to [-pi, pi]; all in float32."""
    heading, pi, found = np.zeros(16, np.float32), np.float32(np.pi), []
    for _ in range(steps):
        heading = (heading + rng.integers(-1, 2, 16).astype(np.float32) * (pi / 2) + pi) % (2 * pi) - pi
        found.append(np.cos(heading))
    return np.concatenate(found)


def moved(rng, steps=700):
    """Differences of float32 positions: steps of 0.1, which walls stop, and half of the time none."""
    place, found = np.zeros(16, np.float32), []
    for _ in range(steps):
        step = np.where(rng.random(16) < 0.5, 0, rng.choice([-0.1, 0.1], 16)).astype(np.float32)
        before, place = place, np.clip(place + step, np.float32(0), np.float32(3))
        found.append(place - before)
    return np.concatenate(found)


def spread(rng):
    """Speed * cos(heading) on roads that mostly lead north: few values that are spread widely, beside noise at 0."""
    signs, noise = rng.choice([-1, 1], 10_000), 3e-8 * rng.normal(size=10_000)
    return np.where(rng.random(10_000) < 0.15, rng.uniform(0.1, 1, 10_000) * signs, noise)


@pytest.mark.parametrize("draw", [turned, moved, spread])
def test_rounding_that_differs_from_step_to_step_is_not_taken_for_the_scale(draw):
    values = torch.from_numpy(draw(np.random.default_rng(1))).float()[:, None]
    norm = ObsNorm((1,), image=False)
    assert sum(norm.update(part) for part in values.split(1000)[:3]) + norm.update(values) == 0
    assert norm.scale.item() == pytest.approx(1 / values.std().item(), rel=0.1)


@pytest.mark.parametrize("envs", [8, 32])
@pytest.mark.parametrize("width", [773, 1520, 2950, 5600])
def test_statistics_of_wide_vectors_are_of_all_environments(envs, width):
    """Each has a constant of its own."""
    rollout = torch.arange(float(envs)).repeat(1024 // envs)[:, None].expand(1024, width)
    norm = ObsNorm((width,), image=False)
    norm.update(rollout)
    assert (norm.scale * rollout.std(dim=0, correction=0) < 2).all(), "they differ as all do"
    assert (norm.scale * rollout.std(dim=0, correction=0) > 0.5).all()


@pytest.mark.parametrize("share", [0.06, 0.3])
@pytest.mark.parametrize("absurd", ["codes", "parked"])
def test_absurd_values_that_differ_a_little_or_are_of_two_kinds_are_left_out(absurd, share):
    """Positions of an absent object relative to the agent's, or rare codes for below and above the range."""
    rng = np.random.default_rng(0)
    others, draw = rng.normal(size=20_000), rng.random(20_000)
    far = 3e6 - rng.normal(size=20_000) if absurd == "parked" else rng.choice([-1e7, 1e7], 20_000)
    values = np.where(draw < (share if absurd == "parked" else share / 100), far, others)
    norm = ObsNorm((1,), image=False)
    norm.update(torch.from_numpy(values).float()[:, None])
    assert norm.scale.item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(("offset", "deviation", "absurd"), [(5e6, 2, 1e9), (5e6, 2, 0), (1e6, 0.3, 1e12)])
def test_an_absurd_value_is_left_out_where_values_differ_by_little_of_their_size(offset, deviation, absurd):
    values = torch.from_numpy(np.random.default_rng(0).normal(offset, deviation, 4000)).float()[:, None]
    norm, without = ObsNorm((1,), image=False), ObsNorm((1,), image=False)
    without.update(values)
    assert norm.update(torch.cat([values, torch.full((4, 1), float(absurd))])) == 4
    torch.testing.assert_close(norm.scale, without.scale, rtol=1e-3, atol=0)


BROKEN = {"NaN": math.nan, "infinity": math.inf, "a huge value": 1e25, "FLT_MAX": -FLT_MAX}


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_one_absurd_value_costs_nothing(value, is_trained):
    norm, obs = deviates(256) if is_trained else (ObsNorm((3,), image=False), deviates(256)[1])
    without = copy.deepcopy(norm)
    without.update(obs)
    obs[17, 1] = value
    assert norm.update(obs) == (not math.isnan(value))
    torch.testing.assert_close(norm.shift, without.shift, atol=0.3, rtol=0)
    torch.testing.assert_close(norm.scale, without.scale, atol=0, rtol=0.1)
    assert norm(obs[17:18]).isfinite().all() == (not math.isnan(value))


def test_without_normalization_vectors_enter_as_they_are():
    norm = ObsNorm((3,), image=False)
    norm.turn_off()
    assert norm(torch.tensor([[-1e9, 1e-9, 300.0]])).tolist() == torch.tensor([[-1e9, 1e-9, 300.0]]).tolist()


def test_images_of_all_phases_of_a_rollout_enter_the_statistics():
    """Games that started together, and last as long as a rollout."""
    obs = torch.arange(33)[:, None].expand(33, 4)
    steps = obs_for_stats(obs, image=True).sort().values
    assert [steps[0] // 5, steps[-1] // 28, steps.diff().max() // 5] == [0, 1, 0]
    envs = torch.arange(4).expand(33, 4)
    assert obs_for_stats(envs, image=True).bincount().tolist() == [2, 2, 2, 2]


def test_convolutions_stay_channels_last_where_weights_are_loaded():
    learner, actor = image_net(), image_net().bfloat16()
    Weights(learner, torch.bfloat16).load(actor)
    learner.load_state_dict({name: tensor.contiguous() for name, tensor in learner.state_dict().items()})
    for net in (learner, actor):
        weights = [module.weight for module in net.modules() if isinstance(module, nn.Conv2d)]
        assert [weight.is_contiguous(memory_format=torch.channels_last) for weight in weights] == 3 * [True]


BOTH = pytest.mark.parametrize(("net", "obs"), [(vector_net(), torch.randn(5, 4)), (image_net(), pixels(5))])


@BOTH
def test_the_first_policy_is_nearly_uniform_and_nets_do_not_touch_the_observations_they_are_given(net, obs):
    """They are views of a slot, and will be learned from."""
    before = obs.clone()
    assert (net(obs)[0].softmax(dim=-1) - 1 / 6).abs().max() < 0.02
    assert torch.equal(obs, before)


@BOTH
def test_nets_compute_in_the_format_of_their_weights_or_of_autocast(net, obs):
    net = copy.deepcopy(net)
    assert [out.dtype for out in net(obs)] == [torch.float32] * 2
    with torch.autocast("cpu", torch.bfloat16):
        outputs = net(obs)
    assert is_bfloat16(outputs)
    sum(out.sum() for out in outputs).backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters())
    assert is_bfloat16(net.bfloat16()(obs))


def is_bfloat16(outputs):
    """Whether outputs, which are float32 always, were computed in bfloat16."""
    return all(out.dtype == torch.float32 and torch.equal(out, out.bfloat16().float()) for out in outputs)


def test_in_bfloat16_too_actions_of_nearly_the_same_value_stay_apart():
    torch.manual_seed(0)
    net, obs = DuelingQ(SMALL_IMAGE, 6, SMALL_IMAGE), pixels(50)
    nn.init.constant_(net.value[-1].bias, 5.0)
    expected, found = net(obs)[0].argmax(dim=1), net.bfloat16()(obs)[0]
    assert found.dtype == torch.float32
    assert sum(len(q.unique()) for q in found) > 0.95 * found.numel()
    assert (found.argmax(dim=1) == expected).float().mean() > 0.8


SPACES = Box(0, 255, SMALL_IMAGE, np.uint8), Box(-1.0, 1.0, (2, 3, 4)), Box(0, 255, (2, 3, 4, 5), np.uint8)


@pytest.mark.parametrize("space", SPACES, ids=["image", "three axes", "four axes"])
@pytest.mark.parametrize(("kind", "lstm"), product(NETS, [False, True]))
def test_every_net_unrolls_to_policies_and_values(space, kind, lstm):
    if kind != "nature" and not is_image(space):
        with pytest.raises(ConfigError, match=f"net={kind}: observations are of shape .* needs images"):
            make_actor_critic(space, Discrete(5), NetSpec(kind, lstm))
        return
    net = make_actor_critic(space, Discrete(5), NetSpec(kind, lstm))
    obs = torch.from_numpy(np.stack([[space.sample() for _ in range(2)] for _ in range(3)]))
    logits, values, _ = net.unroll(obs, torch.zeros(2, net.lstm_size), torch.zeros(3, 2, dtype=torch.bool))
    assert (logits.shape, values.shape) == ((3, 2, 5), (3, 2))
    assert (net.lstm_size > 0) == lstm == bool(net.initial_state(2))
    (logits.square().sum() + values.sum()).backward()
    assert not [name for name, parameter in net.named_parameters() if parameter.grad is None], "dead"


@pytest.mark.parametrize(
    ("kind", "convolutions", "features", "hidden"),
    [
        ("a3c", 2, 32 * 9 * 9, 256),
        ("nature", 3, 64 * 7 * 7, 512),
        ("deep", 15, 32 * 11 * 11, 256),
        ("resnet", 9, 32 * 6 * 6, 256),
    ],
)
def test_nets_have_the_sizes_of_their_papers(kind, convolutions, features, hidden):
    net = make_actor_critic(Box(0, 255, (4, 84, 84), np.uint8), Discrete(6), NetSpec(kind))
    assert sum(isinstance(module, nn.Conv2d) for module in net.modules()) == convolutions
    linear = next(module for module in net.modules() if isinstance(module, nn.Linear))
    assert (linear.in_features, linear.out_features) == (features, hidden)
    assert (len(net.policy) > 1) == (kind == "nature"), "hidden layers of their own"


def test_the_core_is_torchs_lstm_reset_at_episode_starts():
    """nn.LSTM on each piece between two starts; its gates stand in the same order."""
    rng = torch.Generator().manual_seed(0)
    core, reference = LSTMCore(3, 4), nn.LSTM(3, 4)
    with torch.no_grad():
        reference.weight_ih_l0.copy_(core.from_input.weight)
        reference.weight_hh_l0.copy_(core.from_output.weight)
        reference.bias_ih_l0.copy_(core.from_input.bias + torch.tensor([0.0, 1, 0, 0]).repeat_interleave(4))
        reference.bias_hh_l0.zero_()
    inputs, state = torch.randn(9, 1, 3, generator=rng), torch.randn(1, 8, generator=rng)
    starts = torch.zeros(9, 1, dtype=torch.bool)
    starts[[4, 7]] = True
    outputs, last = core(inputs, state, starts)
    h_c = tuple(part[None] for part in state.chunk(2, dim=-1))
    for first, end in [(0, 4), (4, 7), (7, 9)]:
        expected, h_c = reference(inputs[first:end], h_c if first == 0 else None)
        torch.testing.assert_close(outputs[first:end], expected)
    torch.testing.assert_close(last, torch.cat(h_c, dim=-1)[0])


def test_in_bfloat16_too_the_learner_computes_what_the_actor_computed_step_by_step():
    """Rounded at each of 40 steps, the cell's state would put the mean difference at 3e-4."""
    net = make_actor_critic(Box(-1.0, 1.0, (2,)), Discrete(3), NetSpec(lstm=True))
    nn.init.normal_(net.policy[-1].weight, std=0.1)
    acting, obs = copy.deepcopy(net).to(torch.bfloat16), torch.randn(40, 64, 2)
    state, acted = acting.initial_state(64), []
    with torch.no_grad():
        for now in obs:
            logits, _, *state = acting(now, *state)
            acted.append(logits)
        assert state[0].dtype == torch.float32, "it is carried from step to step"
        with torch.autocast("cpu", torch.bfloat16):
            learned, *_ = net.unroll(obs, torch.zeros(64, net.lstm_size), torch.zeros(40, 64, dtype=torch.bool))
    assert (learned.float() - torch.stack(acted).float()).abs().mean() < 1e-4


class Attention(nn.Module):
    """A layer whose sequences have one entry each, or are one sequence over the batch without `batch_first`."""

    def __init__(self, batch_first=False):
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, inputs):
        sequence = inputs[:, None]
        return self.layer(sequence, sequence, sequence, need_weights=False)[0].flatten(1)


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs):
        outputs = inputs - self.mean
        self.mean.lerp_(inputs.mean(0), 0.1)
        return outputs


def standardised(inputs):
    inputs = inputs - inputs.mean(0)
    return inputs / (inputs.square().sum(0) / (len(inputs) - 1)).sqrt()  # no number where there is only one


class Body(nn.Module):
    """A net of a user's own: `policy`, `value` and `state` are what makes it right or wrong."""

    def __init__(self, outputs=2, values=(), state=None, layer=None):
        super().__init__()
        self.policy, self.values, self.layer = nn.Linear(4, outputs), values, layer or nn.Identity()
        self.register_buffer("state", state)

    def forward(self, obs):
        outputs = self.policy(self.layer(obs.flatten(1)))
        return outputs, outputs.new_zeros(len(obs), *self.values)


def fails():
    raise RuntimeError("no such size")


COUNTER, BATCH_NORM = torch.zeros((), dtype=torch.int64), nn.BatchNorm1d(4, track_running_stats=False)
OWN_NETS = {
    "two outputs": (Body, None),
    "dropout that is off": (lambda: Body(layer=nn.Dropout(0.0)), None),
    "too many outputs": (lambda: Body(3), r"shapes \(3, 3\) and \(3,\), must be \(3, 2\) and \(3,\)"),
    "a column of values": (lambda: Body(values=(1,)), r"shapes \(3, 2\) and \(3, 1\), must be"),
    "a counter": (lambda: Body(state=COUNTER), "state is not floating-point"),
    "dropout": (lambda: Body(layer=nn.Dropout(0.1)), "layer is Dropout; its outputs for one observation would differ"),
    "statistics of a batch": (lambda: Body(layer=BATCH_NORM), "layer is BatchNorm1d"),
    "attention in an observation": (lambda: Body(layer=Attention(batch_first=True)), None),
    "attention over a batch": (lambda: Body(layer=Attention()), r"depend on chance, or on the others of a batch"),
    "noise": (lambda: Body(layer=Layer(lambda inputs: inputs + torch.randn_like(inputs))), r"depend on chance"),
    "its own statistics of a batch": (lambda: Body(layer=Layer(standardised)), r"depend on chance, or on the others"),
    "a spectral norm": (lambda: Body(layer=nn.utils.spectral_norm(nn.Linear(4, 4))), None),
    "a step of bfloat16": (lambda: Body(layer=Layer(lambda inputs: inputs * (1 + 2**-8 * (len(inputs) > 1)))), None),
    "its own running mean": (lambda: Body(layer=Centred()), "its buffers change with the observations of a pass"),
    "no number": (lambda: Body(layer=Layer(lambda inputs: inputs / inputs.norm(dim=1, keepdim=True))), None),
    "a lazy layer": (lambda: Body(layer=nn.LazyLinear(4)), None),
    "a mask": (lambda: Body(state=torch.tensor(-math.inf)), "state has NaN or infinity; register a buffer that is"),
    "no module": (lambda: 3, "it returned a int, must be a torch.nn.Module"),
    "an error": (fails, r"RuntimeError: no such size \(test_nets.py:\d+\); correct it"),
}


@pytest.mark.parametrize(("body", "message"), OWN_NETS.values(), ids=OWN_NETS)
@pytest.mark.parametrize("space", [Discrete(2), Box(-1.0, 1.0, (2,))], ids=str)
def test_a_net_of_the_users_own_keeps_the_contract_or_is_refused(body, message, space, monkeypatch):
    monkeypatch.setitem(globals(), "make_own", lambda obs_space, action_space: body())
    spec = NetSpec(f"{__name__}:make_own", log_std_init=0.5)
    if message is not None:
        with pytest.raises(ConfigError, match=f"net={__name__}:make_own: .*{message}"):
            make_actor_critic(Box(-1.0, 1.0, (4,)), space, spec)
        return
    net = make_actor_critic(Box(-1.0, 1.0, (4,)), space, spec)
    logits, values = net(torch.randn(5, 4))
    assert (logits.shape, values.shape) == ((5, 4 if isinstance(space, Box) else 2), (5,))


BAD_SPECS = {
    "no such net": (NetSpec("small"), "net=small: must be a3c, nature, deep, resnet or module:function"),
    "no such module": (NetSpec("nowhere:small"), "net=nowhere:small: ModuleNotFoundError: No module named 'nowhere'"),
    "no such function": (NetSpec("math:small"), "net=math:small: AttributeError: "),
    "no function": (NetSpec("math:pi"), "net=math:pi: TypeError: 'float' object is not callable"),
    "an LSTM": (NetSpec("math:sqrt", lstm=True), "lstm=True: --net math:sqrt has no place for it"),
    "no units": (NetSpec(hidden=(64, 0)), "hidden=64 0: a layer needs 1 or more units"),
    "sizes and an LSTM": (NetSpec(lstm=True, hidden=(8,)), "hidden=8: it is for vectors"),
}


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_flags_of_nets_that_contradict_each_other_are_refused(spec, message):
    with pytest.raises(ConfigError) as error:
        make_actor_critic(Box(-1.0, 1.0, (4,)), Discrete(2), spec)
    assert str(error.value).startswith(message)


# ---- number formats


@pytest.mark.parametrize(("flag", "native", "image"), product(["fp32", "bf16", "auto"], [True, False], [True, False]))
def test_bfloat16_is_for_images_where_it_is_asked_for_or_the_hardware_multiplies_it(flag, native, image, monkeypatch):
    monkeypatch.setattr(precision, "has_native_bf16", lambda device: native)
    found = precision.acting_dtype(flag, SimpleNamespace(norm=ObsNorm((3, 36, 36), image)))
    assert found == (torch.bfloat16 if image and (flag == "bf16" or (flag == "auto" and native)) else torch.float32)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_has_bfloat16_from_capability_8_on(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert precision.has_native_bf16(torch.device("cuda")) == expected
