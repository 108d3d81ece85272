"""The state of a member, and how it grows: mutations of the architecture that keep what was learned, parameter noise.

Online net, target net and Adam's moments go through the same steps; the target net is never synchronised with the
online net. Children share no tensor with their parents.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numpy.random import Generator, default_rng
from torch import Tensor, nn

from a3c_mp.algorithms import dqn
from a3c_mp.nets.q_values import DuelingQ
from a3c_mp.population.evolution import Genome, Member
from a3c_mp.processes.learner_group import from_bytes

MOMENTS = ("exp_avg", "exp_avg_sq")
Spaces = tuple[Any, Any]  # of observations and actions of one environment
Record = Mapping[str, Tensor]  # a member in shared memory
Layer = dict[str, dict[str, Tensor]]
"""weight [units, inputs] and bias [units] of a linear layer, each in the online and the target net and in Adam"""


def make_net(spaces: Spaces, genome: Genome) -> DuelingQ:
    """Make a Q network with the architecture of a genome and random weights; torch's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        return dqn.make_net(*spaces, genome.hidden, genome.activation)


class MemberState(NamedTuple):
    """What a member trains: online net, target net, and Adam, which has moments from the start; and its genome."""

    net: DuelingQ
    target_net: DuelingQ
    optimizer: torch.optim.Adam
    genome: Genome

    @classmethod
    def make(cls, spaces: Spaces, genome: Genome, adam_eps: float) -> MemberState:
        """Make a new member: random weights, the same ones in its target net, moments of 0."""
        net = make_net(spaces, genome)
        optimizer = torch.optim.Adam(net.parameters(), lr=genome.learning_rate, eps=adam_eps, fused=True)
        for parameter in net.parameters():
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        return cls(net, copy.deepcopy(net).requires_grad_(False), optimizer, genome)

    @property
    def updates(self) -> int:
        """Gradient steps of the member and its ancestors: those of the output layer, which no mutation replaces."""
        *_, output_bias = self.net.parameters()
        return int(self.optimizer.state[output_bias]["step"])

    @property
    def parts(self) -> tuple[Any, ...]:
        """What has a `state_dict`."""
        return self.net, self.target_net, self.optimizer, self.net.norm.stats

    def tensors(self) -> list[Tensor]:
        """Return all tensors of it, in the order of a record."""
        moments = [self.optimizer.state[p][name] for p in self.net.parameters() for name in ("step", *MOMENTS)]
        stats = self.net.norm.stats.state_dict().values()
        return [*self.net.state_dict().values(), *self.target_net.state_dict().values(), *moments, *stats]

    def write(self, record: Record) -> None:
        """Write it to a record; what it does not need of it becomes 0."""
        values = torch.cat([tensor.detach().flatten() for tensor in self.tensors()])
        for field, content in (("genome", from_bytes(self.genome.to_json().encode())), ("tensors", values)):
            record[field][: len(content)] = content
            record[field][len(content) :] = 0

    @classmethod
    @torch.no_grad()
    def read(cls, record: Record, spaces: Spaces, adam_eps: float) -> MemberState:
        """Return the member in a record, in tensors of its own."""
        genome = Genome.from_json(bytes(record["genome"].tolist()).rstrip(b"\0").decode())
        state, start = cls.make(spaces, genome, adam_eps), 0
        for tensor in state.tensors():
            tensor.copy_(record["tensors"][start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        return state


@torch.no_grad()
def breed(parent: MemberState, child: Member, spaces: Spaces, noise: float) -> MemberState:
    """Return the state of a newborn member: a copy of its parent's with its mutation, or an exact one if it survives.

    - A wider layer gets units with random incoming weights and zero outgoing ones: outputs stay as they are.
    - A new layer is the identity after an existing one, which is exact for ReLU only. It has no moments yet.
    - A narrower layer loses the units with the smallest norm of outgoing weights.
    - Adam keeps the moments of all weights that stay. Of new weights in an existing tensor `exp_avg` is 0 and
      `exp_avg_sq` the tensor's mean: 0 would make their first step 0.1 / sqrt(0.001) = 3.2 times the learning rate.
    - `noise` is the standard deviation of a mutation of parameters, relative to each weight.
    """
    rng = default_rng(child.seed)
    state = MemberState.make(spaces, child.genome, parent.optimizer.defaults["eps"])
    old, new = layers_of(parent), layers_of(state)
    if len(new) > len(old):
        before, after = parent.genome.hidden, child.genome.hidden
        place = next(i for i in range(1, len(new)) if (*before[:i], *before[i - 1 :]) == after)
        for layer in new.pop(place):
            for net in ("online", "target"):
                nn.init.eye_(layer["weight"][net])
                nn.init.zeros_(layer["bias"][net])
    inputs = [torch.arange(old[0][0]["weight"]["online"].shape[1])]
    for i, item in enumerate(new):
        units = [kept_units(old, i, j, len(layer["weight"]["online"])) for j, layer in enumerate(item)]
        for j, layer in enumerate(item):
            inherit(layer, old[i][j], units[j], inputs[j % len(inputs)], rng)
        inputs = units
    state.net.norm.load_state_dict(parent.net.norm.state_dict())
    state.net.norm.stats.load_state_dict(parent.net.norm.stats.state_dict())
    state.target_net.norm.load_state_dict(parent.target_net.norm.state_dict())
    if child.kind == "parameters":
        perturb(state, noise, rng)
    return state


def layers_of(state: MemberState) -> list[list[Layer]]:
    """Return all layers, as `DuelingQ.layers`: those of item i get the units of their counterpart in item i - 1."""

    def tensors(*twins: Tensor) -> dict[str, Tensor]:
        return dict(zip(("online", "target"), twins, strict=True)) | state.optimizer.state[twins[0]]

    def layer(online: nn.Linear, target: nn.Linear) -> Layer:
        return {"weight": tensors(online.weight, target.weight), "bias": tensors(online.bias, target.bias)}

    both = zip(state.net.layers(), state.target_net.layers(), strict=True)
    return [[layer(*linears) for linears in zip(*item, strict=True)] for item in both]


def kept_units(layers: list[list[Layer]], i: int, j: int, num: int) -> Tensor:
    """Return the `num` units of a layer that have the largest norms of outgoing weights in the online net, in order."""
    if i == len(layers) - 1:
        return torch.arange(num)
    after = layers[i + 1] if len(layers[i]) == 1 else [layers[i + 1][j]]
    norm = torch.cat([layer["weight"]["online"] for layer in after]).norm(dim=0)
    return norm.argsort(descending=True, stable=True)[:num].sort().values


def inherit(layer: Layer, old: Layer, units: Tensor, inputs: Tensor, rng: Generator) -> None:
    """Copy `units` of the parent's layer, with their weights of `inputs`.

    What the layer has on top is new: units with uniform incoming weights as torch's own, inputs with weights of 0.
    """
    num_units, num_inputs = layer["weight"]["online"].shape
    fresh = torch.from_numpy(rng.uniform(-1, 1, (num_units - len(units), num_inputs + 1)) / num_inputs**0.5)
    for name, values, columns in ("weight", fresh[:, 1:], inputs), ("bias", fresh[:, :1], torch.tensor([0])):
        for kind in ("online", "target", *MOMENTS):
            source, target = (part[name][kind].view(len(part[name][kind]), -1) for part in (old, layer))
            target.fill_(source.mean() if kind == "exp_avg_sq" else 0.0)
            if kind not in MOMENTS:
                target[len(units) :] = values
            target[: len(units), : len(columns)] = source[units][:, columns]
        layer[name]["step"].copy_(old[name]["step"])


def perturb(state: MemberState, sd: float, rng: Generator) -> None:
    """Change a tenth of all weights, in both nets alike, by sd * |weight| * N(0, 1); biases stay.

    AgileRL's parameter mutation (Khadka & Tumer 2018), without its rare draws of 10 times the size or new weights.
    """
    for online, target in zip(state.net.parameters(), state.target_net.parameters(), strict=True):
        if online.dim() > 1:
            noise = rng.standard_normal(online.shape) * (rng.random(online.shape) < 0.1)
            delta = sd * online.abs() * torch.from_numpy(noise).to(online)
            online.add_(delta)
            target.add_(delta)
