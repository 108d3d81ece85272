"""Growth of Q networks: mutations of the architecture that keep what was learned, and parameter noise.

Online net, target net and Adam's moments go through the same steps; the target net is never synchronised with the
online net. Children share no tensor with their parents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from numpy.random import Generator, default_rng
from torch import Tensor, nn

from a3c_mp.population.evolution import Genome, Member
from a3c_mp.population.memory import MOMENTS, MemberState, Spaces

NOISE_SHARE = 0.1
"""share of the weights that parameter noise changes"""


@torch.no_grad()
def breed(parent: MemberState, old: Genome, child: Member, spaces: Spaces, noise: float) -> MemberState:
    """Return the state of a newborn member: a copy of its parent's with its mutation, or an exact one if it survives.

    `old` is the parent's genome, `noise` the standard deviation of parameter noise, relative to each weight.

    - A wider layer gets units with random incoming weights and zero outgoing ones: outputs stay as they are.
    - A new layer is the identity after an existing one, which is exact for ReLU only.
    - A narrower layer loses the units with the smallest norm of outgoing weights.
    - Adam keeps the moments of all weights that stay. Of new weights in an existing tensor `exp_avg` is 0 and
      `exp_avg_sq` the tensor's mean: 0 would make their first step 0.1 / sqrt(0.001) = 3.2 times the learning rate.
      A new layer has no moments and counts its steps from 0.
    """
    rng = default_rng(child.seed)
    state, layers = MemberState.make(spaces, child.genome, parent.optimizer.defaults["eps"]), read_layers(parent)
    reshape(layers, old.hidden, child.genome.hidden, rng)
    write_layers(state, layers)
    for net, its_parent in zip(state[:2], parent[:2], strict=True):
        net.norm.load_state_dict(its_parent.norm.state_dict())
    if child.kind == "parameters":
        perturb(state, noise, rng)
    return state


def perturb(state: MemberState, sd: float, rng: Generator) -> None:
    """Change a tenth of all weights, in both nets alike, by sd * |weight| * N(0, 1); biases stay.

    After AgileRL's parameter mutation (Khadka & Tumer 2018), without its rare draws of 10 times the size or of new
    weights.
    """
    for online, target in zip(state.net.parameters(), state.target_net.parameters(), strict=True):
        if online.dim() > 1:
            noise = rng.standard_normal(online.shape) * (rng.random(online.shape) < NOISE_SHARE)
            delta = sd * online.abs() * torch.from_numpy(noise).to(online)
            online.add_(delta)
            target.add_(delta)


class Layer(NamedTuple):
    """A linear layer of online net, target net and Adam's two moments, which are all edited alike."""

    weight: Tensor  # [4, outputs, inputs]
    bias: Tensor  # [4, outputs]
    step: Tensor  # [], Adam's


Layers = list[list[Layer]]
"""as `DuelingQ.layers`: those of item i compute hidden layer i, each from its counterpart in item i - 1 or from one"""


def tensors_of(state: MemberState, online: nn.Linear, target: nn.Linear) -> list[list[Tensor]]:
    """Return what a `Layer` stacks, of the weights and of the biases."""
    adam, pairs = state.optimizer.state, zip(online.parameters(), target.parameters(), strict=True)
    return [[parameter, twin, *(adam[parameter][name] for name in MOMENTS)] for parameter, twin in pairs]


def read_layers(state: MemberState) -> Layers:
    """Return copies of a member's layers."""

    def read(online: nn.Linear, target: nn.Linear) -> Layer:
        weight, bias = (torch.stack(tensors) for tensors in tensors_of(state, online, target))
        return Layer(weight, bias, state.optimizer.state[online.weight]["step"])

    both = zip(state.net.layers(), state.target_net.layers(), strict=True)
    return [[read(*linears) for linears in zip(*item, strict=True)] for item in both]


def write_layers(state: MemberState, layers: Layers) -> None:
    """Copy layers into a member whose nets have the same sizes."""
    for item, *linears in zip(layers, state.net.layers(), state.target_net.layers(), strict=True):
        for layer, online, target in zip(item, *linears, strict=True):
            for stack, tensors in zip(layer[:2], tensors_of(state, online, target), strict=True):
                for tensor, value in zip(tensors, stack, strict=True):
                    tensor.copy_(value)
            for parameter in online.parameters():
                state.optimizer.state[parameter]["step"].copy_(layer.step)


def reshape(layers: Layers, old: tuple[int, ...], new: tuple[int, ...], rng: Generator) -> None:
    """Insert a layer after one of the same size, or widen or shrink one: from the units `old` to `new`."""
    if len(new) > len(old):
        place = next(i for i in range(1, len(new)) if (*old[:i], *old[i - 1 :]) == new)
        layers.insert(place, [identity(old[place - 1]) for _ in layers[place]])
        return
    for i, change in enumerate(after - before for before, after in zip(old, new, strict=True)):
        if change > 0:
            widen(layers, i, change, rng)
        elif change < 0:
            shrink(layers, i, new[i])


def identity(units: int) -> Layer:
    """Return a new layer that passes on what it gets, if that is positive, as units after a ReLU are."""
    weight, bias = torch.zeros(4, units, units), torch.zeros(4, units)
    weight[:2] = torch.eye(units)
    return Layer(weight, bias, torch.zeros(()))


def append(stack: Tensor, values: Tensor, dim: int) -> Tensor:
    """Append new weights to a stack at the end of a dimension of its tensors, with the moments of new weights."""
    mean = stack[3].mean().expand_as(values)
    return torch.cat([stack, torch.stack([values, values, torch.zeros_like(values), mean])], dim + 1)


def widen(layers: Layers, i: int, num: int, rng: Generator) -> None:
    """Add units with random incoming weights, uniform as torch's own initial ones, and outgoing weights of 0."""
    for j, (weight, bias, step) in enumerate(layers[i]):
        inputs = weight.shape[2]
        rows = torch.from_numpy(rng.uniform(-1, 1, (num, inputs + 1)) / inputs**0.5).to(weight)
        layers[i][j] = Layer(append(weight, rows[:, 1:], 0), append(bias, rows[:, 0], 0), step)
    for j, layer in enumerate(layers[i + 1]):
        zeros = layer.weight.new_zeros(layer.weight.shape[1], num)
        layers[i + 1][j] = layer._replace(weight=append(layer.weight, zeros, 1))


def shrink(layers: Layers, i: int, num: int) -> None:
    """Keep the `num` units with the largest norms of outgoing weights in the online net, in their order."""
    for j, layer in enumerate(layers[i]):
        own = range(len(layers[i + 1])) if len(layers[i]) == 1 else [j]
        norm = torch.cat([layers[i + 1][k].weight[0] for k in own]).norm(dim=0)
        index = norm.argsort(descending=True, stable=True)[:num].sort().values
        layers[i][j] = Layer(layer.weight[:, index], layer.bias[:, index], layer.step)
        for k in own:
            layers[i + 1][k] = layers[i + 1][k]._replace(weight=layers[i + 1][k].weight[:, :, index])
