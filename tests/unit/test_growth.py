"""Growth: outputs stay, new units learn, kept moments keep every bit, nothing is shared between parent and child."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.population.dqn import Args
from a3c_mp.population.evolution import Genome, Member, mutate_genome
from a3c_mp.population.growth import MemberState, breed, layers_by_depth, make_net
from a3c_mp.population.settings import ACTIVATIONS, MUTATIONS, Convolution
from a3c_mp.wrappers import ImageAndVector

INPUTS, ACTIONS = 5, 3
SPACES = Box(-1, 1, (INPUTS,)), Discrete(ACTIONS)
IMAGES = Box(0, 255, (2, 44, 44), np.uint8), Discrete(ACTIONS)
BESIDE = ImageAndVector((2, 44, 44), Box(-1, 1, (3,))), Discrete(ACTIONS)
CONVOLUTIONS = (Convolution(5, 8, 4), Convolution(6, 4, 2), Convolution(7, 3, 1))
ARGS = Args(units_range=(1, 512), channels_range=(1, 64), genes=("learning_rate",))
FAMILIES = ("q", "actor_critic")
widths = st.integers(1, 300)
hidden_sizes = st.lists(widths, min_size=1, max_size=3).map(tuple)


def observations(num=64, seed=0, image=False):
    rng = torch.Generator().manual_seed(seed)
    if image:
        return torch.randint(0, 256, (num // 4, *IMAGES[0].shape), dtype=torch.uint8, generator=rng)
    return 3 * torch.randn(num, INPUTS, generator=rng)


def spaces_of(genome):
    """An actor-critic on vectors has continuous actions: its log deviations are in no layer."""
    if genome.convolutions:
        return IMAGES
    return SPACES if genome.family == "q" else (SPACES[0], Box(-1, 1, (ACTIONS,)))


def a_member(hidden, activation="relu", updates=2, seed=0, convolutions=(), family="q"):
    """A member after some updates, with statistics of observations and a target net that lags behind."""
    torch.manual_seed(seed)
    genome, image = Genome({"learning_rate": 1e-3}, hidden, activation, convolutions, family), bool(convolutions)
    member = MemberState.make(spaces_of(genome), genome, ARGS)
    member.net.norm.update(1 + observations(image=image))
    if member.target_net is not None:
        member.target_net.norm.update(7 * observations(image=image))
    if family == "actor_critic":  # what does not depend on the architecture
        member.net.reward_scale.fill_(0.3)
        rewards = 1e20 * torch.rand(5, ARGS.num_envs)  # their squares do not fit into float32
        member.return_stats.update(0, rewards, torch.zeros(5, ARGS.num_envs, dtype=torch.bool))
    for update in range(updates):
        update_once(member, seed=100 * seed + update)
    return member


def child_of(member, kind="architecture", seed=0, **genes):
    """A child with other genes, or with noise."""
    genome = replace(member.genome, **genes)
    return breed(member, Member(1, 0, kind, genome, seed), spaces_of(genome), ARGS)


def hidden_of(member):
    return tuple(len(layer[0].bias) for layer in layers_by_depth(member.net)[len(member.genome.convolutions) : -1])


def update_once(member, seed=0):
    """One update towards random targets; returns the gradients by name."""
    obs = observations(seed=seed, image=bool(member.genome.convolutions))
    found = torch.cat([output.view(len(obs), -1) for output in member.net(obs)], dim=1)
    targets = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed + 1000))
    member.optimizer.zero_grad()
    (found - targets).square().mean().backward()
    member.optimizer.step()
    return {name: param.grad.clone() for name, param in member.net.named_parameters()}


def outputs(member):
    """Of all nets, in float64: in float32 they would differ with the order in which a wider layer adds up."""
    obs = observations(seed=9, image=True) if member.genome.convolutions else observations(seed=9).double()
    with torch.no_grad():
        return tuple(part for net in member.nets.values() for part in copy.deepcopy(net).double()(obs))


def state(member):
    """All tensors of a member by name: both nets, and the optimizer's state by the name of its parameter."""
    names = {"online": "net", "target": "target_net"}
    nets = {names[kind]: net for kind, net in member.nets.items()}
    tensors = {f"{which}.{name}": tensor for which, net in nets.items() for name, tensor in net.state_dict().items()}
    tensors |= {f"returns {name}": member.return_stats.state_dict()[name] for name in ("sums", "largest")}
    for name, parameter in member.net.named_parameters():
        tensors |= {f"{key} of {name}": tensor for key, tensor in member.optimizer.state[parameter].items()}
    return tensors


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_same(ones, others):
    for q, expected in zip(ones, others, strict=True):
        assert ((q - expected).abs() <= 1e-12 * (1 + expected.abs())).all(), (q - expected).abs().max()


@settings(deadline=None, max_examples=100)
@given(
    hidden_sizes, st.sampled_from(ACTIVATIONS), st.booleans(), st.integers(0, 2), st.sampled_from(FAMILIES), st.data()
)
def test_a_wider_net_and_a_deeper_relu_net_have_the_same_outputs(hidden, activation, deepens, updates, family, data):
    place = data.draw(st.integers(0, len(hidden) - 1))
    wider = tuple(data.draw(st.integers(units, 300)) for units in hidden)
    member = a_member(hidden, "relu" if deepens else activation, updates, family=family)
    before = outputs(member)
    grown = child_of(member, hidden=(*hidden[: place + 1], *hidden[place:]) if deepens else wider)
    assert hidden_of(grown) == grown.genome.hidden
    assert_same(outputs(grown), before)
    if family == "q":
        assert not torch.equal(grown.net.norm.shift, grown.target_net.norm.shift), "the target net was not synchronised"
    assert grown.updates == member.updates == updates
    update_once(grown)
    assert grown.updates == updates + 1


def changed(place, **changes):
    return tuple(each._replace(**changes) if i == place else each for i, each in enumerate(CONVOLUTIONS))


ADDED = Convolution(6, 3, 1, padding=1)
GROWN = {
    "wider first": {"convolutions": changed(0, channels=9)},
    "wider last": {"convolutions": changed(2, channels=8)},
    "wider hidden": {"hidden": (12, 4)},
    "larger kernel, strided": {"convolutions": changed(0, kernel=10, padding=1)},
    "larger kernel": {"convolutions": changed(2, kernel=5, padding=1)},
    "another hidden": {"hidden": (6, 6, 4)},
    "another convolution": {"convolutions": (*CONVOLUTIONS[:2], ADDED, CONVOLUTIONS[2])},
    "another last convolution": {"convolutions": (*CONVOLUTIONS, ADDED._replace(channels=7))},
}
"""a convolutional net with two hidden layers, larger in one way"""


@pytest.fixture(params=[IMAGES, BESIDE], ids=["image", "beside a vector"])
def images(request, monkeypatch):
    monkeypatch.setitem(globals(), "IMAGES", request.param)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grown", GROWN.values(), ids=GROWN)
def test_a_larger_convolutional_net_has_the_same_outputs_and_shrinks_to_what_it_was(images, grown, family):
    member = a_member((6, 4), convolutions=CONVOLUTIONS, family=family)
    child = child_of(member, **grown)
    assert [tuple(layer[0].weight.shape[:1]) for layer in layers_by_depth(child.net)[:3]] == [
        (each.channels,) for each in child.genome.convolutions[:3]
    ]
    assert_same(outputs(child), outputs(member))
    assert child.updates == 2
    again, first = child_of(child, hidden=(6, 4), convolutions=CONVOLUTIONS, seed=1), state(member)
    found = state(again)
    if len(child.genome.layers) > 5:  # a layer that goes takes the moments of the next one's weights with it
        found, first = ({n: x for n, x in each.items() if not n.startswith("exp_avg")} for each in (found, first))
    assert equal(found, first)
    update_once(child)
    assert not torch.equal(layers_by_depth(child.net)[0][0].weight[:5], layers_by_depth(member.net)[0][0].weight)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", [(6, 5, 4), (6, 6)])
def test_a_layer_that_goes_is_multiplied_into_the_next_one(hidden, activation):
    member = a_member(hidden, activation)
    child = child_of(member, hidden=hidden[:1] + hidden[2:])
    for head, old in ((child.net.value, member.net.value), (child.net.advantage, member.net.advantage)):
        torch.testing.assert_close(head[0].weight, old[2].weight @ old[0].weight)
        torch.testing.assert_close(head[0].bias, old[2].weight @ old[0].bias + old[2].bias)
        assert (child.optimizer.state[head[0].weight]["exp_avg"] == 0).all()
    assert child.updates == 2
    update_once(child)


@pytest.mark.parametrize("family", ["q", "actor_critic"])
def test_a_genome_without_convolutions_has_those_of_dqn(family):
    """As `api.policy` makes one, into which it loads the net of a member."""
    net = make_net((Box(0, 255, (4, 84, 84), np.uint8), Discrete(6)), Genome({}, family=family))
    assert [tuple(layer.weight.shape) for (layer, *_) in layers_by_depth(net)[:3]] == [
        (32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3),
    ]  # fmt: skip


def test_convolutional_nets_live_through_mutations_of_every_kind(images):
    rng, member = np.random.default_rng(0), a_member((6, 4), convolutions=CONVOLUTIONS)
    args = replace(ARGS, remove_layer=0.3, new_layer=0.3, units_range=(2, 16), channels_range=(2, 12))
    sizes = set()
    for seed in range(30):
        kind = MUTATIONS[1 + seed % 2]
        genome = mutate_genome(member.genome, kind, args, rng)
        member = child_of(member, kind, seed, **vars(genome))
        sizes.add(tuple(type(layer) for layer in genome.layers))
        assert hidden_of(member) == genome.hidden
        update_once(member, seed)
        assert all(tensor.isfinite().all() for tensor in state(member).values())
    assert len(sizes) >= 5


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layer", [0, 1])
def test_new_units_learn_from_the_second_update_on(activation, layer):
    grown = child_of(a_member((8, 8), activation), hidden=tuple(8 + 6 * (i == layer) for i in range(2)))
    incoming = ["torso.1.weight"] if layer == 0 else ["value.0.weight", "advantage.0.weight"]
    outgoing = ["value.0.weight", "advantage.0.weight"] if layer == 0 else ["value.2.weight", "advantage.2.weight"]
    first, second = update_once(grown, seed=1), update_once(grown, seed=2)
    assert all((first[name][8:] == 0).all() for name in incoming), "nothing depends on a new unit yet"
    learns_first = torch.cat([first[name][:, 8:].abs().amax(dim=0) > 0 for name in outgoing])
    learns_second = torch.cat([second[name][8:].abs().amax(dim=1) > 0 for name in incoming])
    most = 1.0 if activation != "relu" else 0.8  # a ReLU that is 0 for all observations never learns, as in any net
    assert learns_first.float().mean() >= most
    assert learns_second.float().mean() >= most


def test_kept_weights_and_moments_keep_every_bit_and_new_ones_are_as_described():
    member = a_member((6, 4))
    before, after = state(member), state(child_of(member, hidden=(9, 4)))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        kept = after[name][tuple(slice(size) for size in tensor.shape)]
        assert torch.equal(kept, tensor), name
        if tensor.shape == after[name].shape:
            continue
        dim = next(i for i in range(tensor.dim()) if tensor.shape[i] != after[name].shape[i])
        added = after[name].narrow(dim, tensor.shape[dim], 3)
        if name.startswith("exp_avg of") or (dim == 1 and "net" in name):  # outgoing weights
            assert (added == 0).all()
        elif name.startswith("exp_avg_sq of"):
            assert torch.equal(added, torch.full_like(added, tensor.mean().item()))
        else:
            assert (added != 0).all()
            assert added.abs().max() <= INPUTS**-0.5
            twin = after[name.replace("target_net", "net")].narrow(dim, tensor.shape[dim], 3)
            assert torch.equal(added, twin), "the target net has the same new units"


def test_a_new_layer_starts_its_moments_at_its_first_update():
    grown = child_of(a_member((6, 4), updates=3), hidden=(6, 4, 4))
    before = {name: tensor.clone() for name, tensor in state(grown).items()}
    update_once(grown)
    fresh = {f"{head}.2.{part}" for head in ("value", "advantage") for part in ("weight", "bias")}
    for name, _ in grown.net.named_parameters():
        assert before[f"step of {name}"] == (0 if name in fresh else 3)
        assert before[f"exp_avg of {name}"].any() == before[f"exp_avg_sq of {name}"].any() == (name not in fresh)
        assert state(grown)[f"step of {name}"] == before[f"step of {name}"] + 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("small", "large"), [((4,), (9,)), ((6, 4), (6, 5)), ((6, 4, 3), (6, 12, 3))])
def test_to_shrink_undoes_what_growing_did_bit_by_bit(activation, small, large, family):
    """New units have the smallest outgoing norm, 0, so they are the first to go."""
    member = a_member(small, activation, family=family)
    assert equal(state(child_of(child_of(member, hidden=large), hidden=small, seed=1)), state(member))


def test_the_units_with_the_smallest_outgoing_norm_in_the_online_net_go_from_both_nets():
    member = a_member((4, 3))
    with torch.no_grad():  # columns of the layer after: norms over both heads for shared units, over its own for others
        member.net.value[0].weight.copy_(torch.tensor([[0.0, 3, 1, 0]] * 3))
        member.net.advantage[0].weight.copy_(torch.tensor([[1.0, 0, 3, 0]] * 3))
        member.net.value[2].weight.copy_(torch.tensor([[0.1, -2, 1]]))
        member.net.advantage[2].weight.copy_(torch.tensor([[-2.0, 0.1, 1]] * ACTIONS))
    before = state(member)
    first, second = (state(child_of(member, hidden=hidden)) for hidden in ((2, 3), (4, 2)))
    shared = torch.tensor([1, 2])
    for prefix in ("net.", "target_net.", "exp_avg of ", "exp_avg_sq of "):
        assert torch.equal(first[f"{prefix}torso.1.weight"], before[f"{prefix}torso.1.weight"][shared])
        for head, kept in [("value", torch.tensor([1, 2])), ("advantage", torch.tensor([0, 2]))]:
            weight, bias, outgoing = (f"{prefix}{head}.{name}" for name in ("0.weight", "0.bias", "2.weight"))
            assert torch.equal(first[weight], before[weight][:, shared])
            assert torch.equal(second[weight], before[weight][kept])
            assert torch.equal(second[bias], before[bias][kept])
            assert torch.equal(second[outgoing], before[outgoing][:, kept])


def test_noise_is_relative_reaches_a_tenth_of_the_weights_and_is_the_same_in_the_target_net():
    member = a_member((200, 100))
    before, after = state(member), state(child_of(member, "parameters"))
    weights = {f"net.{name}" for name, parameter in member.net.named_parameters() if parameter.dim() > 1}
    kept = before.keys() - weights - {f"target_{name}" for name in weights}
    assert all(torch.equal(after[name], before[name]) for name in kept)
    changes = {name: after[name] - before[name] for name in weights}
    for name, change in changes.items():
        torch.testing.assert_close(after[f"target_{name}"] - before[f"target_{name}"], change, rtol=0, atol=1e-6)
    noise = torch.cat([(change / before[name]).flatten() for name, change in changes.items()])
    changed = noise[noise != 0]
    assert len(changed) / len(noise) == pytest.approx(0.1, rel=0.05)
    assert changed.mean().item() == pytest.approx(0.0, abs=0.01)
    assert changed.std().item() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(("kind", "hidden"), [("architecture", (12, 4)), ("parameters", (6, 4))])
def test_the_seed_decides_and_torchs_own_generator_is_left_alone(kind, hidden):
    member, before = a_member((6, 4)), torch.get_rng_state()
    first, again, other = (state(child_of(member, kind, seed, hidden=hidden)) for seed in (1, 1, 2))
    assert equal(first, again)
    assert not equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_survivor_keeps_every_bit_and_children_share_nothing_with_their_parent_or_each_other(family):
    rng, member = np.random.default_rng(0), a_member((8, 6), family=family)
    before = state(copy.deepcopy(member))
    children = [child_of(member, "elite")]
    assert equal(state(children[0]), before)
    assert children[0].optimizer.defaults == member.optimizer.defaults
    for kind in MUTATIONS:
        for new_layer in (0.0, 1.0):
            genome = mutate_genome(member.genome, kind, replace(ARGS, new_layer=new_layer), rng)
            children.append(child_of(member, kind, int(rng.integers(2**63)), **vars(genome)))
            assert hidden_of(children[-1]) == genome.hidden
            assert children[-1].optimizer.param_groups[0]["lr"] == genome.hyperparameters["learning_rate"]
            assert equal(state(children[-1]), before) == (kind not in ("architecture", "parameters"))
    family = [member, *children]
    addresses = [{tensor.untyped_storage().data_ptr() for tensor in state(each).values()} for each in family]
    assert sum(map(len, addresses)) == len(set().union(*addresses))
    for child in children:
        update_once(child)
        child.optimizer.param_groups[0]["lr"] = 9.0
    assert equal(state(member), before), "children that learn leave their parent as it is"
    assert member.optimizer.param_groups[0]["lr"] == member.genome.hyperparameters["learning_rate"]
    targets = [child.target_net for child in children if child.target_net is not None]
    assert not any(parameter.requires_grad for net in targets for parameter in net.parameters())
