"""Evolution of a population: genomes, members, ranking, mutations of genomes. Pure functions, without torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.random import Generator

from a3c_mp.population.genes import Gene, log_uniform
from a3c_mp.population.settings import ACTIVATIONS, NEW_KERNEL, Args, Convolution
from a3c_mp.seeds import FIRST, derive_seeds


@dataclass(frozen=True)
class Genome:
    """Genome: what a member inherits from its parent besides weights and optimizer state."""

    hyperparameters: Mapping[str, float]  # of the settings that evolve
    hidden: tuple[int, ...] = (128, 128)  # units of each hidden layer
    activation: str = "relu"  # of hidden layers, by its name in `nets.q_values.ACTIVATIONS`
    convolutions: tuple[Convolution, ...] = ()  # before them, for images
    family: str = "q"  # of the net, see `settings.Args`

    @property
    def layers(self) -> tuple[Convolution | int, ...]:
        """Sizes of all layers but the last one, from input to output."""
        return (*self.convolutions, *self.hidden)

    def with_genes(self, args: Args) -> Self:
        """The genome with the `--genes` of a run: what it lacks of them begins with its setting."""
        genes = {name: self.hyperparameters.get(name, getattr(args, name)) for name in args.evolving}
        return replace(self, hyperparameters=genes)

    def settings(self, args: Args) -> Args:
        """The settings of a run as this member has them."""
        return replace(args, **self.hyperparameters)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Return the genome as one line of JSON; `from_json` restores every bit."""
        net: dict[str, Any] = {"hidden": self.hidden, "activation": self.activation}
        net |= {"convolutions": self.convolutions} if self.convolutions else {}
        return json.dumps({**self.hyperparameters, **net} | ({"family": self.family} if self.family != "q" else {}))

    @classmethod
    def from_json(cls, text: str) -> Self:
        genes: dict[str, Any] = json.loads(text)
        convolutions = tuple(Convolution(*each) for each in genes.pop("convolutions", ()))
        hidden, activation = tuple(genes.pop("hidden")), genes.pop("activation")
        return cls(genes, hidden, activation, convolutions, family=genes.pop("family", "q"))


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

    def survive(self, kind: str) -> Self:
        """Return it as a member of the next generation, unchanged."""
        return self._replace(parent=self.id, kind=kind)


def first_members(args: Args) -> list[Member]:
    """Return the first generation: member 0 has the settings as given, the others draw theirs with `--init spread`."""
    given = Genome({}, tuple(args.hidden), args.activation, args.first_convolutions, args.family).with_genes(args)
    genomes, genes = [given] * args.population, args.evolving
    if args.init == "spread":
        rng = np.random.default_rng(derive_seeds(args.seed, FIRST)[1])
        for place in range(1, args.population):
            genomes[place] = replace(given, hyperparameters={name: gene.sample(rng) for name, gene in genes.items()})
    return [Member(place, place, "first", genome) for place, genome in enumerate(genomes)]


def largest_genome(args: Args) -> Genome:
    """Return the genome of the largest net that evolution can reach."""
    layers, channels = list(args.first_convolutions), args.channels_range[1]
    if layers:
        layers += [Convolution(channels, NEW_KERNEL, 1, padding=1)] * (args.convolutions_range[1] - len(layers))
    for i, (_, kernel, stride, padding) in enumerate(layers):
        ring = max(args.kernels_range[1] - kernel, 0) // 2
        layers[i] = Convolution(channels, kernel + 2 * ring, stride, padding + ring)
    return Genome({}, args.units_range[1:] * args.layers_range[1], "relu", tuple(layers), args.family)


def fittest_first(members: Sequence[Member], rng: Generator) -> list[Member]:
    """Return the members, the fittest first; ties are in random order.

    Those of which a game has failed (fitness -inf) come after all others, and last those whose weights are not finite.
    """
    drawn = [members[i] for i in rng.permutation(len(members))]
    return sorted(drawn, key=lambda member: (not member.fitness < math.inf, -member.fitness))  # NaN last


def possible_parents(members: Sequence[Member]) -> list[Member]:
    """Return the members with a finite fitness; if there is none, those with finite weights."""
    finite = [member for member in members if math.isfinite(member.fitness)]
    return finite or [member for member in members if member.fitness == -math.inf]


def mutate_genome(genome: Genome, kind: str, args: Args, rng: Generator) -> Genome:
    """Return a mutated genome; kinds "none" and "parameters" change no gene."""
    if kind == "hyperparameters" and (genes := args.evolving):
        touched = [name for name in genes if rng.random() < 0.5] or [list(genes)[rng.integers(len(genes))]]
        values = {name: genes[name].move(genome.hyperparameters[name], args, rng, args.resample) for name in touched}
        return replace(genome, hyperparameters={**genome.hyperparameters, **values})
    if kind == "architecture":
        return _mutate_architecture(genome, args, rng)
    if kind == "activation":
        others = [activation for activation in ACTIVATIONS if activation != genome.activation]
        return replace(genome, activation=others[rng.integers(len(others))])
    return genome


def _mutate_architecture(genome: Genome, args: Args, rng: Generator) -> Genome:
    """Add a layer behind another, remove one that is not the first of its kind, or resize one.

    What is added changes no outputs: an identity, which is exact for ReLU only; other hidden layers get wider instead.
    """
    place, draw = int(rng.integers(len(genome.layers))), rng.random()
    layers, layer = list(genome.layers), genome.layers[place]
    if isinstance(layer, Convolution):
        number, (fewest, most) = len(genome.convolutions), args.convolutions_range
        can_go = layer.stride == 1 and layer.kernel == 2 * layer.padding + 1  # it keeps height and width
        copy: Any = layer._replace(kernel=NEW_KERNEL, stride=1, padding=1)
    else:
        number, (fewest, most), can_go, copy = len(genome.hidden), args.layers_range, True, layer
    if draw < args.new_layer and number < most:
        if isinstance(layer, Convolution) or genome.activation == "relu":
            layers.insert(place + 1, copy)
        else:
            wider = max(round(layer * log_uniform(args.grow_factor, rng)), layer + 1)
            layers[place] = min(wider, args.units_range[1])
    elif draw >= 1 - args.remove_layer and number > fewest and can_go and place not in (0, len(genome.convolutions)):
        layers.pop(place)
    else:
        layers[place] = _resized(layer, args, rng)
    convolutions = tuple(each for each in layers if isinstance(each, Convolution))
    hidden = tuple(each for each in layers if not isinstance(each, Convolution))
    return replace(genome, convolutions=convolutions, hidden=hidden)


def _resized(layer: Convolution | int, args: Args, rng: Generator) -> Convolution | int:
    """Resize a layer; a kernel by a ring, with as much padding: its stride takes it to the same pixels as before."""
    if not isinstance(layer, Convolution):
        return int(Gene(*args.units_range, integer=True).move(layer, args, rng))
    low, high = args.kernels_range
    rings = [r for r in (-1, 1) if layer.padding + r >= 0 and low <= layer.kernel + 2 * r <= high]
    if rings and rng.random() < 0.5:
        ring = rings[rng.integers(len(rings))]
        return layer._replace(kernel=layer.kernel + 2 * ring, padding=layer.padding + ring)
    return layer._replace(channels=int(Gene(*args.channels_range, integer=True).move(layer.channels, args, rng)))


def describe_genes(args: Args) -> str:
    """Which genes mutate, and in which ranges, as a line for the log."""
    kinds = {kind for kind, weight in args.mutations.items() if weight and args.evolve}
    genes = {name: str(gene) for name, gene in args.evolving.items() if "hyperparameters" in kinds}
    if "architecture" in kinds:
        genes["hidden"] = "{} to {} layers of {} to {} units".format(*args.layers_range, *args.units_range)
    if "architecture" in kinds and args.convolutions:
        ranges = (*args.convolutions_range, *args.channels_range, *args.kernels_range)
        genes["convolutions"] = "{} to {} of {} to {} channels, kernels {} to {}".format(*ranges)
    genes |= {"activation": ", ".join(ACTIVATIONS)} if "activation" in kinds else {}
    return f"genes that mutate: {' · '.join(f'{name} {text}' for name, text in genes.items()) or 'none'}"
