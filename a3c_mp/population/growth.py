"""Growth of Q networks: mutations of the architecture that keep what was learned, and parameter noise.

Online net, target net and Adam's moments go through the same steps; the target net is never synchronised with the
online net. All functions return copies, which share no tensor with their arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.nets.q_values import DuelingQ
from a3c_mp.population.evolution import Birth
from a3c_mp.population.genome import Genome

NOISE_SHARE = 0.1
"""share of the weights that parameter noise changes"""


class MemberState(NamedTuple):
    """What a member trains: online net, target net, and the optimizer of the online net, in one parameter group."""

    net: DuelingQ
    target_net: DuelingQ
    optimizer: torch.optim.Adam

    @property
    def updates(self) -> int:
        """Gradient steps of the member and its ancestors: those of the output layer, which no mutation replaces."""
        *_, output_bias = self.net.parameters()
        return int(self.optimizer.state[output_bias]["step"]) if output_bias in self.optimizer.state else 0


def breed(parent: MemberState, old: Genome, birth: Birth, noise: float = 0.1) -> MemberState:
    """Return the state of a newborn member: a copy of its parent's with its mutation, or an exact one if it survives.

    Args:
        parent: with genome `old`.
        noise: standard deviation of parameter noise, relative to each weight.
    """
    if birth.survives:
        return copy.deepcopy(parent)
    rng = np.random.default_rng(birth.seed)
    if birth.kind == "parameters":
        return perturb(*parent, noise, rng)
    return reshape(*parent, old, birth.genome, rng)


def reshape(
    net: DuelingQ, target_net: DuelingQ, optimizer: torch.optim.Adam, old: Genome, new: Genome, rng: np.random.Generator
) -> MemberState:
    """Return copies with the hidden layers, the activation and the learning rate of another genome.

    - A wider layer gets units with random incoming weights and zero outgoing ones: outputs stay as they are.
    - A new layer is the identity after an existing one, which is exact for ReLU only.
    - A narrower layer loses the units with the smallest norm of outgoing weights.
    - Adam keeps the moments of all weights that stay. Of new weights in an existing tensor `exp_avg` is 0 and
      `exp_avg_sq` the tensor's mean: 0 would make their first step 0.1 / sqrt(0.001) = 3.2 times the learning rate.
      A new layer has no moments and counts its steps from 0.
    - Another learning rate changes nothing else, another activation no weights.

    Raises:
        ValueError: `new` has fewer layers, or more layers without ReLU.
    """
    member = copy.deepcopy(MemberState(net, target_net, optimizer))
    member.optimizer.param_groups[0]["lr"] = new.learning_rate
    if new.activation != old.activation or new.hidden != old.hidden:
        layers = _pair_up(member)
        assert old.hidden == tuple(_units(layers)), (old, _units(layers))
        _resize(layers, old, new, rng)
        _rebuild(member, layers, new.activation)
    return member


@torch.no_grad()
def perturb(
    net: DuelingQ, target_net: DuelingQ, optimizer: torch.optim.Adam, sd: float, rng: np.random.Generator
) -> MemberState:
    """Return copies in which a tenth of all weights have changed by sd * |weight| * N(0, 1); biases stay.

    The target net's weights change by the same amounts. After AgileRL's parameter mutation (Khadka & Tumer 2018),
    without its rare draws of 10 times the size or of new weights.
    """
    member = copy.deepcopy(MemberState(net, target_net, optimizer))
    for online, target in zip(member.net.parameters(), member.target_net.parameters(), strict=True):
        if online.dim() > 1:
            noise = rng.standard_normal(online.shape) * (rng.random(online.shape) < NOISE_SHARE)
            delta = sd * online.abs() * torch.from_numpy(noise).to(online)
            online.add_(delta)
            target.add_(delta)
    return member


class _Variable:
    """A parameter together with its target net's counterpart and its moments in Adam, which are all edited alike.

    Args:
        online, target: of the same shape.
        state: Adam's state of the online parameter; empty before its first step.
    """

    def __init__(self, online: Tensor, target: Tensor, state: dict[str, Any]):
        self.online, self.target, self.state = online.detach(), target.detach(), state

    def append(self, values: Tensor, dim: int) -> None:
        """Append new values at the end of a dimension."""
        moments = {name: self.state[name] for name in self.state if name != "step"}
        for name, moment in moments.items():
            fill = 0.0 if name == "exp_avg" else float(moment.mean())
            self.state[name] = torch.cat([moment, torch.full_like(values, fill)], dim)
        self.online = torch.cat([self.online, values], dim)
        self.target = torch.cat([self.target, values], dim)

    def select(self, index: Tensor, dim: int) -> None:
        """Keep the values at these indices of a dimension."""
        for name in self.state:
            if name != "step":
                self.state[name] = self.state[name].index_select(dim, index)
        self.online = self.online.index_select(dim, index)
        self.target = self.target.index_select(dim, index)


class _Layer(NamedTuple):
    """A linear layer of both nets: weight [outputs, inputs], bias [outputs]."""

    weight: _Variable
    bias: _Variable

    @classmethod
    def identity(cls, units: int, like: Tensor) -> _Layer:
        weight, bias = torch.eye(units).to(like), torch.zeros(units).to(like)
        return cls(_Variable(weight, weight.clone(), {}), _Variable(bias, bias.clone(), {}))


_Layers = list[list[_Layer]]
"""as `DuelingQ.layers`: those of item i compute hidden layer i, each from its counterpart in item i - 1 or from one"""


def _pair_up(member: MemberState) -> _Layers:
    """Return the layers of online and target net in pairs, with Adam's state."""
    state = member.optimizer.state

    def pair(online: nn.Linear, target: nn.Linear) -> _Layer:
        return _Layer(
            _Variable(online.weight, target.weight, state[online.weight]),
            _Variable(online.bias, target.bias, state[online.bias]),
        )

    both = zip(member.net.layers(), member.target_net.layers(), strict=True)
    return [[pair(*layer) for layer in zip(online, target, strict=True)] for online, target in both]


def _units(layers: _Layers) -> list[int]:
    return [len(side_by_side[0].bias.online) for side_by_side in layers[:-1]]


def _resize(layers: _Layers, old: Genome, new: Genome, rng: np.random.Generator) -> None:
    """Insert layers until there are as many as in the new genome, then widen or shrink each of them."""
    if len(new.hidden) < len(old.hidden):
        raise ValueError(f"layers cannot be removed: {old.hidden} to {new.hidden}")
    if len(new.hidden) > len(old.hidden) and new.activation != "relu":
        raise ValueError(f"a new layer changes what a net of {new.activation} computes: widen it instead")
    while len(units := _units(layers)) < len(new.hidden):
        place = _place_of_new_layer(units, new.hidden)
        like = layers[place][0].weight.online
        layers.insert(place, [_Layer.identity(units[place - 1], like) for _ in layers[place]])
    changes = [after - before for before, after in zip(units, new.hidden, strict=True)]
    for i, change in enumerate(changes):
        if change > 0:
            _widen(layers[i], layers[i + 1], change, rng)
    for i, change in reversed(list(enumerate(changes))):  # from the last, whose lost units do not count as consumers
        if change < 0:
            _shrink(layers[i], layers[i + 1], new.hidden[i])


def _place_of_new_layer(units: Sequence[int], target: Sequence[int]) -> int:
    """Return where to insert a copy of the layer before, so that the fewest units are to be dropped, then added."""

    def cost(place: int) -> tuple[int, int]:
        differences = [b - a for a, b in zip([*units[:place], *units[place - 1 :]], target, strict=False)]
        return sum(max(-difference, 0) for difference in differences), sum(map(abs, differences))

    return min(range(1, len(units) + 1), key=cost)


def _widen(layers: Sequence[_Layer], consumers: Sequence[_Layer], num: int, rng: np.random.Generator) -> None:
    """Add units with random incoming weights, uniform as torch's own initial ones, and outgoing weights of 0."""
    for layer in layers:
        weight = layer.weight.online
        rows = rng.uniform(-1, 1, (num, weight.shape[1] + 1)) / weight.shape[1] ** 0.5
        layer.weight.append(torch.from_numpy(rows[:, 1:]).to(weight), dim=0)
        layer.bias.append(torch.from_numpy(rows[:, 0]).to(weight), dim=0)
    for consumer in consumers:
        weight = consumer.weight.online
        consumer.weight.append(weight.new_zeros(len(weight), num), dim=1)


def _shrink(layers: Sequence[_Layer], consumers: Sequence[_Layer], num: int) -> None:
    """Keep the `num` units with the largest norms of outgoing weights in the online net, in their order."""
    for i, layer in enumerate(layers):
        own = consumers if len(layers) == 1 else [consumers[i]]
        norm = torch.cat([consumer.weight.online for consumer in own]).norm(dim=0)
        index = norm.argsort(descending=True, stable=True)[:num].sort().values
        layer.weight.select(index, dim=0)
        layer.bias.select(index, dim=0)
        for consumer in own:
            consumer.weight.select(index, dim=1)


def _rebuild(member: MemberState, layers: _Layers, activation: str) -> None:
    """Put layers into both nets, and their parameters with Adam's state into the optimizer, in the net's order."""
    online = [[_linear(layer.weight.online, layer.bias.online) for layer in item] for item in layers]
    target = [[_linear(layer.weight.target, layer.bias.target) for layer in item] for item in layers]
    member.net.set_layers(online, activation)
    member.target_net.set_layers([[linear.requires_grad_(False) for linear in item] for item in target], activation)
    old_state, params = member.optimizer.state, list(member.net.parameters())
    state: dict[Tensor, Any] = {param: old_state[param] for param in params if param in old_state}
    for linears, item in zip(online, layers, strict=True):
        for linear, layer in zip(linears, item, strict=True):
            state |= {linear.weight: layer.weight.state, linear.bias: layer.bias.state}
    member.optimizer.state.clear()
    member.optimizer.state.update({param: moments for param, moments in state.items() if moments})
    member.optimizer.param_groups[0]["params"] = params


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")  # draws no random numbers
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear
