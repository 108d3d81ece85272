"""Evolution of a population: genomes, members, ranking, mutations of genomes. Pure functions, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from a3c_mp.population.genes import Gene, log_uniform
from a3c_mp.population.settings import ACTIVATIONS, Args, Convolution
from a3c_mp.seeds import FIRST, derive_seeds


@dataclass(frozen=True)
class Genome:
    """Genome: what a member inherits from its parent besides weights and optimizer state."""

    hyperparameters: Mapping[str, float]  # of the settings that evolve
    hidden: tuple[int, ...] = (128, 128)  # units of each hidden layer
    activation: str = "relu"  # of hidden layers, by its name in `nets.q_values.ACTIVATIONS`
    convolutions: tuple[Convolution, ...] = ()  # before them, for images

    @property
    def layers(self) -> tuple[Convolution | int, ...]:
        """Sizes of all layers but the last one, from input to output."""
        return (*self.convolutions, *self.hidden)

    def with_genes(self, args: Args) -> Genome:
        """The genome of a resumed run, whose `--genes` may be others."""
        genes = {name: self.hyperparameters.get(name, getattr(args, name)) for name in args.evolving}
        return replace(self, hyperparameters=genes)

    def settings(self, args: Args) -> Args:
        """The settings of a run as this member has them."""
        return replace(args, **self.hyperparameters)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Return the genome as one line of JSON; `from_json` restores every bit."""
        net = {"hidden": self.hidden, "activation": self.activation}
        return json.dumps({**self.hyperparameters, **net} | ({"convolutions": c} if (c := self.convolutions) else {}))

    @classmethod
    def from_json(cls, text: str) -> Genome:
        genes: dict[str, Any] = json.loads(text)
        convolutions = tuple(Convolution(*each) for each in genes.pop("convolutions", ()))
        hidden, activation = tuple(genes.pop("hidden")), genes.pop("activation")
        return cls(genes, hidden, activation, convolutions)


class Member(NamedTuple):
    """Member of a generation: a child, or a survivor, which keeps its id and is its own parent."""

    id: int
    parent: int  # id of the member whose weights and optimizer it starts from
    kind: str  # of its mutation, one of `MUTATIONS`; "first" without parents, "elite" or "kept" for a survivor
    genome: Genome
    seed: int = 0  # of the random numbers that its weights need: new units, parameter noise
    fitnesses: tuple[float, ...] = ()  # of its line's last generations; once it has been evaluated, its own is the last

    @property
    def fitness(self) -> float:
        return self.fitnesses[-1]

    def survive(self, kind: str) -> Member:
        """Return it as a member of the next generation, unchanged."""
        return self._replace(parent=self.id, kind=kind)


def first_members(args: Args) -> list[Member]:
    """Return the first generation: member 0 has the settings as given, the others draw theirs with `--init spread`."""
    genes = args.evolving
    start = {name: getattr(args, name) for name in genes}
    given = Genome(start, tuple(args.hidden), args.activation, args.first_convolutions)
    genomes = [given] * args.population
    if args.init == "spread":
        rng = np.random.default_rng(derive_seeds(args.seed, FIRST)[1])
        drawn = [{name: gene.sample(rng) for name, gene in genes.items()} for _ in genomes[1:]]
        genomes[1:] = [replace(given, hyperparameters=each) for each in drawn]
    return [Member(place, place, "first", genome) for place, genome in enumerate(genomes)]


def largest_genome(args: Args) -> Genome:
    """Return the genome of the largest net that evolution can reach."""
    most, kernel, hidden = args.channels_range[1], args.largest_kernel, (args.units_range[1],) * args.layers_range[1]
    rings = [(kernel - each.kernel) // 2 for each in args.first_convolutions]
    convolutions = [
        Convolution(most, first.kernel + 2 * ring, first.stride, ring)
        for first, ring in zip(args.first_convolutions, rings, strict=True)
    ]
    if convolutions:
        ring = (kernel - 1) // 2
        convolutions += [Convolution(most, 2 * ring + 1, 1, ring)] * (args.most_convolutions - len(convolutions))
    return Genome({}, hidden, convolutions=tuple(convolutions))


def rank(members: Sequence[Member], rng: Generator) -> list[Member]:
    """Return the members, the fittest first; ties are in random order.

    Those of which a game has failed (fitness -inf) come after all others, and last those whose weights are not finite.
    """

    def key(member: Member) -> tuple[int, float]:
        if math.isfinite(member.fitness):
            return 0, -member.fitness
        return (1 if member.fitness == -math.inf else 2), 0.0

    return sorted([members[i] for i in rng.permutation(len(members))], key=key)


def possible_parents(members: Sequence[Member]) -> list[Member]:
    """Return the members with a finite fitness; if there is none, those with finite weights."""
    finite = [member for member in members if math.isfinite(member.fitness)]
    return finite or [member for member in members if member.fitness == -math.inf]


def mutate_genome(genome: Genome, kind: str, args: Args, rng: Generator) -> Genome:
    """Return a mutated genome; kinds "none" and "parameters" change no gene."""
    if kind == "hyperparameters" and (genes := args.evolving):
        names, values = list(genes), dict(genome.hyperparameters)
        touched = [name for name in names if rng.random() < 0.5] or [names[rng.integers(len(names))]]
        values |= {name: genes[name].move(values[name], args, rng, args.resample) for name in touched}
        return replace(genome, hyperparameters=values)
    if kind == "architecture":
        return _mutate_architecture(genome, args, rng)
    if kind == "activation":
        others = [activation for activation in ACTIVATIONS if activation != genome.activation]
        return replace(genome, activation=others[rng.integers(len(others))])
    return genome


def _mutate_architecture(genome: Genome, args: Args, rng: Generator) -> Genome:
    """Add or remove a layer, or resize one. What is added changes no outputs (see `growth.breed`)."""
    place = int(rng.integers(len(genome.layers))) - len(genome.convolutions)
    draw = rng.random()
    adds, removes = draw < args.new_layer, draw >= 1 - args.remove_layer
    if place >= 0:
        return replace(genome, hidden=_mutate_hidden(genome, place, adds, removes, args, rng))
    place += len(genome.convolutions)
    return replace(genome, convolutions=_mutate_convolutions(genome, place, adds, removes, args, rng))


def _mutate_hidden(
    genome: Genome, layer: int, adds: bool, removes: bool, args: Args, rng: Generator
) -> tuple[int, ...]:  # fmt: skip
    """Copy or remove a hidden layer, or resize it. A copy is exact for ReLU only; layers of other nets get wider."""
    hidden, bounds = list(genome.hidden), Gene(*args.units_range, integer=True)
    units, (fewest, most) = hidden[layer], args.layers_range
    if adds and len(hidden) < most and genome.activation == "relu":
        hidden.insert(layer, units)
    elif adds and len(hidden) < most:
        hidden[layer] = min(max(round(units * log_uniform(args.grow_factor, rng)), units + 1), int(bounds.high))
    elif removes and layer > 0 and len(hidden) > fewest:
        hidden.pop(layer)
    else:
        hidden[layer] = int(bounds.move(units, args, rng))
    return tuple(hidden)


def _mutate_convolutions(
    genome: Genome, layer: int, adds: bool, removes: bool, args: Args, rng: Generator
) -> tuple[Convolution, ...]:  # fmt: skip
    """Add a 3 x 3 convolution, remove one that keeps the size of its input, or change kernel or channels of one.

    A kernel grows or shrinks by a ring, with as much padding: its stride then takes it to the same pixels as before.
    """
    convolutions = list(genome.convolutions)
    old = convolutions[layer]
    if adds and len(convolutions) < args.most_convolutions:
        convolutions.insert(layer + 1, Convolution(old.channels, 3, 1, padding=1))
    elif removes and layer > 0 and old.keeps_size:
        convolutions.pop(layer)
    else:
        steps = [step for step in (-1, 1) if old.padding + step >= 0 and old.kernel + 2 * step <= args.largest_kernel]
        if steps and rng.random() < 0.5:
            step = steps[rng.integers(len(steps))]
            new = old._replace(kernel=old.kernel + 2 * step, padding=old.padding + step)
        else:
            bounds = Gene(*args.channels_range, integer=True)
            new = old._replace(channels=int(bounds.move(old.channels, args, rng)))
        convolutions[layer] = new
    return tuple(convolutions)


def describe_genes(args: Args) -> str:
    """Which genes mutate, and in which ranges, as a line for the log."""
    kinds = {kind for kind, weight in args.mutations.items() if weight and args.evolve}
    genes = {name: str(gene) for name, gene in args.evolving.items() if "hyperparameters" in kinds}
    if "architecture" in kinds:
        fewest, most = args.layers_range
        genes["hidden"] = "{} to {} units, {} to {} layers".format(*args.units_range, fewest, most)
    if "architecture" in kinds and args.convolutions:
        genes["convolutions"] = "{} to {} channels".format(*args.channels_range)
        genes["convolutions"] += f", {args.most_convolutions} layers and kernels of {args.largest_kernel} at most"
    genes |= {"activation": ", ".join(ACTIVATIONS)} if "activation" in kinds else {}
    return f"genes that mutate: {' · '.join(f'{name} {text}' for name, text in genes.items()) or 'none'}"
