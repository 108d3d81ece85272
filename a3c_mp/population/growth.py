"""The state of a member, and how it grows: mutations of the architecture that keep what was learned, parameter noise.

Online net, target net (where there is one) and Adam's moments go through the same steps; the target net is never
synchronised with the online net. Children share no tensor with their parents.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from numpy.random import Generator, default_rng
from torch import Tensor, nn

from a3c_mp.maths.return_stats import ReturnStats
from a3c_mp.nets.actor_critic import LayeredActorCritic
from a3c_mp.nets.distributions import ActionHead
from a3c_mp.nets.layers import VECTOR_UNITS, JoinedTorso, image_shape, image_torso
from a3c_mp.nets.obs_norm import ObsNorm
from a3c_mp.nets.q_values import ACTIVATIONS, DuelingQ
from a3c_mp.population.evolution import Genome, Member
from a3c_mp.population.settings import Args
from a3c_mp.processes.learner_group import from_bytes

MOMENTS = ("exp_avg", "exp_avg_sq")
Record = Mapping[str, Tensor]  # a member in shared memory
Spaces = tuple[Any, Any]  # of observations and actions of one environment
Layer = dict[str, dict[str, Tensor]]
"""weight [units, inputs, H, W] and bias [units, 1, 1, 1] of a layer, each in all nets (`MemberState.nets`) and in Adam

Inputs are units of the layer before; H and W those of a kernel, in a linear layer the pixels of each unit and 1. The
first layer behind a `JoinedTorso` has weights for the features of the vector, too: joined [units, features, 1, 1].
"""


def make_net(spaces: Spaces, genome: Genome) -> Any:
    """Make a net with the architecture of a genome and random weights; torch's random state stays as it was."""
    obs_space, action_space = spaces
    shape, image = obs_space.shape, image_shape(obs_space)
    with torch.random.fork_rng(devices=[]):
        convs = genome.convolutions or "nature"
        if genome.family == "q":
            return DuelingQ(shape, int(action_space.n), image, genome.hidden, genome.activation, convs)
        torso = image_torso(convs, shape, image) if image else nn.Flatten()
        norm, head = ObsNorm(shape, image), ActionHead(action_space)
        return LayeredActorCritic(norm, head, torso, genome.hidden, ACTIVATIONS[genome.activation])


def layers_by_depth(net: Any) -> list[list[Any]]:
    """All layers from input to output, those of the same depth as one item: one of the torso, or one of each head."""
    torso = net.torso.image if isinstance(net.torso, JoinedTorso) else net.torso
    shared = [[layer] for layer in torso.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    heads = (net.value, net.advantage) if isinstance(net, DuelingQ) else (net.policy, net.value)
    own = [[layer for layer in head if isinstance(layer, nn.Linear)] for head in heads]
    return shared + [list(pair) for pair in zip(*own, strict=True)]


class MemberState(NamedTuple):
    """What a member trains: nets, and Adam, which has moments from the start; and its genome."""

    net: Any
    target_net: Any  # of action values, else None
    optimizer: torch.optim.Adam
    return_stats: ReturnStats  # for `--reward-scale none`; games begin with a generation
    genome: Genome

    @classmethod
    def make(cls, spaces: Spaces, genome: Genome, args: Args, device: torch.device | str = "cpu") -> Self:
        """Make a new member: random weights, the same ones in its target net, moments of 0."""
        net, own = make_net(spaces, genome).to(device), genome.settings(args)
        optimizer = torch.optim.Adam(net.parameters(), lr=own.learning_rate, eps=own.adam_eps, fused=True)
        for parameter in net.parameters():
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            optimizer.state[parameter] = {"step": torch.zeros((), device=device), **moments}
        target_net = copy.deepcopy(net).requires_grad_(False) if genome.family == "q" else None
        return cls(net, target_net, optimizer, ReturnStats(own.gamma, 1, args.num_envs, args.reward_clip), genome)

    @property
    def updates(self) -> int:
        """Gradient steps of the member and its ancestors: those of the output layer, which no mutation replaces."""
        *_, output_bias = self.net.parameters()
        return int(self.optimizer.state[output_bias]["step"])

    @property
    def nets(self) -> dict[str, Any]:
        return {"online": self.net} | ({"target": self.target_net} if self.target_net is not None else {})

    @property
    def parts(self) -> tuple[Any, ...]:
        """What has a `state_dict`."""
        return *self.nets.values(), self.optimizer, self.net.norm.stats, self.return_stats

    def tensors(self) -> list[Tensor]:
        """Return all float32 tensors of it, in the order of a record."""
        weights = [tensor for net in self.nets.values() for tensor in net.state_dict().values()]
        moments = [self.optimizer.state[p][name] for p in self.net.parameters() for name in ("step", *MOMENTS)]
        stats = self.net.norm.stats.state_dict().values()
        return [*weights, *moments, *stats]

    def write(self, record: Record) -> None:
        """Write it to a record; what it does not need of it becomes 0."""
        values = torch.cat([tensor.detach().cpu().flatten() for tensor in self.tensors()])
        record["returns"][:] = torch.cat([self.return_stats.sums, self.return_stats.largest.view(1)])
        for field, content in (("genome", from_bytes(self.genome.to_json().encode())), ("tensors", values)):
            record[field][: len(content)] = content
            record[field][len(content) :] = 0

    @classmethod
    @torch.no_grad()
    def read(cls, record: Record, spaces: Spaces, args: Args, device: torch.device | str = "cpu") -> Self:
        """Return the member in a record, in tensors of its own on a device."""
        genome = Genome.from_json(bytes(record["genome"].tolist()).rstrip(b"\0").decode())
        state, start = cls.make(spaces, genome, args, device), 0
        for tensor in state.tensors():
            tensor.copy_(record["tensors"][start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        state.return_stats.sums.copy_(record["returns"][:3])
        state.return_stats.largest.copy_(record["returns"][3])
        return state


@torch.no_grad()
def breed(parent: MemberState, child: Member, spaces: Spaces, args: Args) -> MemberState:
    """Return the state of a newborn member: a copy of its parent's with its mutation, or an exact one if it survives.

    - A wider layer gets units with random incoming weights and zero outgoing ones: outputs stay as they are.
    - A new layer is the identity after an existing one, which is exact for ReLU only. It has no moments yet.
    - A larger kernel gets a ring of zeros; a smaller one loses its ring.
    - A layer that goes is multiplied into the next one (a kernel summed): exact if it is the identity.
    - A narrower layer loses the units with the smallest norm of outgoing weights.
    - Adam keeps the moments of all weights that stay. Of new weights in an existing tensor `exp_avg` is 0 and
      `exp_avg_sq` the tensor's mean: 0 would make their first step 0.1 / sqrt(0.001) = 3.2 times the learning rate.
    """
    rng = default_rng(child.seed)
    state = MemberState.make(spaces, child.genome, args)
    old, new = layers_of(parent), layers_of(state)
    before, after = parent.genome.layers, child.genome.layers
    if len(after) > len(before):
        for layer in new.pop(added_place(before, after)):
            for net in state.nets:
                nn.init.dirac_(layer["weight"][net])
                nn.init.zeros_(layer["bias"][net])
    elif len(after) < len(before):
        old = without(old, added_place(after, before))
    inputs = [torch.arange(old[0][0]["weight"]["online"].shape[1])]
    for i, item in enumerate(new):
        units = [kept_units(old, i, j, len(layer["weight"]["online"])) for j, layer in enumerate(item)]
        for j, layer in enumerate(item):
            inherit(layer, old[i][j], units[j], inputs[j % len(inputs)], rng)
        inputs = units
    copy_other_tensors(state, parent)
    if child.kind == "parameters":
        perturb(state, args.parameter_noise, rng)
    return state


def copy_other_tensors(state: MemberState, parent: MemberState) -> None:
    """Copy what does not depend on the architecture: log deviations with their moments, scales, statistics."""
    for kind, net in state.nets.items():
        of_layers = {id(tensor) for item in layers_by_depth(net) for layer in item for tensor in layer.parameters()}
        old = dict([*parent.nets[kind].named_parameters(), *parent.nets[kind].named_buffers()])
        for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
            if id(tensor) not in of_layers:
                tensor.copy_(old[name])
                for key, value in parent.optimizer.state.get(old[name], {}).items():  # of parameters of the online net
                    state.optimizer.state[tensor][key].copy_(value)
    state.net.norm.stats.load_state_dict(copy.deepcopy(parent.net.norm.stats.state_dict()))
    state.return_stats.load_state_dict(parent.return_stats.state_dict())


def added_place(fewer: Sequence[Any], more: Sequence[Any]) -> int:
    """Place of the layer that only `more` has: behind one of its kind, as wide as that if there is such a place."""
    units = [getattr(layer, "channels", layer) for layer in more]
    behind_its_kind = [i for i in range(1, len(more)) if type(more[i]) is type(more[i - 1])]
    places = [i for i in behind_its_kind if (*more[:i], *more[i + 1 :]) == tuple(fewer)]
    return min(places, key=lambda i: units[i] != units[i - 1])


def layers_of(state: MemberState) -> list[list[Layer]]:
    """Return all layers, as `layers_by_depth`: those of item i get the units of their counterpart in item i - 1."""

    def tensors(name: str, twins: Sequence[Any], inputs: int, columns: slice = slice(None)) -> dict[str, Tensor]:
        found = {net: getattr(layer, name) for net, layer in zip(state.nets, twins, strict=True)}
        moments = state.optimizer.state[found["online"]]
        found |= {name: moments[name] for name in MOMENTS}
        if name == "weight":
            found = {name: part[:, columns] for name, part in found.items()}
        found = {name: part if part.dim() == 4 else part.view(len(part), inputs, -1, 1) for name, part in found.items()}
        return found | {"step": moments["step"]}

    items: list[list[Layer]] = []
    for item in zip(*map(layers_by_depth, state.nets.values()), strict=True):
        inputs = len(items[-1][0]["bias"]["online"]) if items else item[0][0].weight.shape[1]
        twins = list(zip(*item, strict=True))  # each layer in all nets
        is_joined = isinstance(state.net.torso, JoinedTorso) and len(twins) > 1 and len(items[-1]) == 1
        own = slice(-VECTOR_UNITS) if is_joined else slice(None)  # columns of the layer before
        layers = [{"weight": tensors("weight", each, inputs, own), "bias": tensors("bias", each, 1)} for each in twins]
        if is_joined:
            for layer, each in zip(layers, twins, strict=True):
                layer["joined"] = tensors("weight", each, VECTOR_UNITS, slice(-VECTOR_UNITS, None))
        items.append(layers)
    return items


def without(layers: list[list[Layer]], place: int) -> list[list[Layer]]:
    """Return all layers but one, whose weights, summed over its kernel, are multiplied into those of the next."""
    removed, following = layers[place], list[Layer]()
    for j, layer in enumerate(layers[place + 1]):
        weight, bias = dict(layer["weight"]), dict(layer["bias"])
        gone = removed[j % len(removed)]
        for net in weight.keys() - {"step", *MOMENTS}:
            inner = gone["weight"][net].sum(dim=(2, 3))
            bias[net] = bias[net] + (weight[net] * gone["bias"][net][:, 0]).sum(dim=(1, 2, 3), keepdim=True)
            weight[net] = torch.einsum("oihw,ij->ojhw", weight[net], inner)
        weight["exp_avg"] = torch.zeros_like(weight["online"])
        weight["exp_avg_sq"] = torch.full_like(weight["online"], float(weight["exp_avg_sq"].mean()))
        following.append(layer | {"weight": weight, "bias": bias})
    return [*layers[:place], following, *layers[place + 2 :]]


def kept_units(layers: list[list[Layer]], i: int, j: int, num: int) -> Tensor:
    """Return the `num` units of a layer that have the largest norms of outgoing weights in the online net, in order."""
    if i == len(layers) - 1:
        return torch.arange(num)
    after = layers[i + 1] if len(layers[i]) == 1 else [layers[i + 1][j]]
    norm = torch.cat([layer["weight"]["online"].flatten(2).mT.flatten(0, 1) for layer in after]).norm(dim=0)
    return norm.argsort(descending=True, stable=True)[:num].sort().values


def inherit(layer: Layer, old: Layer, units: Tensor, inputs: Tensor, rng: Generator) -> None:
    """Copy `units` of the parent's layer, with their weights of `inputs`; new units are as in torch, new inputs 0."""
    num_units, *shape = layer["weight"]["online"].shape
    num_inputs = math.prod(shape)
    fresh = torch.from_numpy(rng.uniform(-1, 1, (num_units - len(units), num_inputs + 1)) / num_inputs**0.5)
    parts = [("weight", fresh[:, 1:], inputs), ("bias", fresh[:, :1], torch.tensor([0]))]
    if "joined" in layer:
        few = torch.from_numpy(rng.uniform(-1, 1, (num_units - len(units), VECTOR_UNITS)) / num_inputs**0.5)
        parts.append(("joined", few, torch.arange(VECTOR_UNITS)))
    for name, values, columns in parts:
        for kind in layer[name].keys() - {"step"}:
            source, target = old[name][kind], layer[name][kind]
            rest = float(source.mean()) if kind == "exp_avg_sq" else 0.0
            target.fill_(rest)
            if kind not in MOMENTS:
                target[len(units) :] = values.view(-1, *target.shape[1:])
            ring = (target.shape[-1] - source.shape[-1]) // 2
            target[: len(units), : len(columns)] = F.pad(source[units][:, columns], [ring] * 4, value=rest)
        layer[name]["step"].copy_(old[name]["step"])


def perturb(state: MemberState, sd: float, rng: Generator) -> None:
    """Change a tenth of all weights, in all nets alike, by sd * |weight| * N(0, 1); biases stay.

    AgileRL's parameter mutation (Khadka & Tumer 2018), without its rare draws of 10 times the size or new weights.
    """
    for online, *others in zip(*(net.parameters() for net in state.nets.values()), strict=True):
        if online.dim() > 1:
            noise = rng.standard_normal(online.shape) * (rng.random(online.shape) < 0.1)
            delta = sd * online.abs() * torch.from_numpy(noise).to(online)
            for weights in (online, *others):
                weights.add_(delta)
