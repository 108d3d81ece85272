"""Evolution of a population: genomes, members, ranking, mutations of genomes. Pure functions, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from a3c_mp.population.settings import ACTIVATIONS, Args
from a3c_mp.seeds import FIRST, derive_seeds

HYPERPARAMETERS = ("learning_rate", "batch_size", "learn_every")
"""genes that a mutation of hyperparameters changes"""


@dataclass(frozen=True)
class Genome:
    """Genome: what a member inherits from its parent besides weights and optimizer state."""

    learning_rate: float
    batch_size: int
    learn_every: int  # agent steps for each update
    hidden: tuple[int, ...] = (128, 128)  # units of each hidden layer
    activation: str = "relu"  # by its name in `nets.q_values.ACTIVATIONS`

    def to_json(self) -> str:
        """Return the genome as one line of JSON; `from_json` restores every bit."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Genome:
        genes = json.loads(text)
        return cls(**genes | {"hidden": tuple(genes["hidden"])})


class Range(NamedTuple):
    """Range of a gene on a logarithmic scale, both ends included; a whole number k stands for k - 0.5 to k + 0.5."""

    low: float
    high: float
    integer: bool = False

    @classmethod
    def of(cls, gene: str, args: Args) -> Range:
        """Return the range of a gene: a hyperparameter, or `units` of a hidden layer."""
        low, high = getattr(args, f"{gene}_range")
        return cls(low, high, integer=gene != "learning_rate")

    def sample(self, rng: Generator) -> float:
        """Draw a log-uniform value, an int if `integer`."""
        return self._value(rng.uniform(*self._ends))

    def multiply(self, value: float, factor: float, rng: Generator) -> float:
        """Return value * factor, reflected at the limits that it would pass; an int if `integer`.

        Reflection keeps the distribution of `sample` as it is, if factors f and 1/f are equally likely; clipping would
        collect values at the limits. For the same reason, an integer is first spread over its interval.
        """
        exact = value + (rng.random() - 0.5 if self.integer else 0.0)
        low, high = self._ends
        distance = (math.log(exact * factor) - low) % (2 * (high - low))
        return self._value(low + min(distance, 2 * (high - low) - distance))

    @property
    def _ends(self) -> tuple[float, float]:
        half = 0.5 if self.integer else 0.0
        return math.log(self.low - half), math.log(self.high + half)

    def _value(self, logarithm: float) -> float:
        value = math.exp(logarithm)
        value = min(max(round(value) if self.integer else value, self.low), self.high)
        return int(value) if self.integer else value


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
    given = Genome(args.learning_rate, args.batch_size, args.learn_every, tuple(args.hidden), args.activation)
    genomes = [given] * args.population
    if args.init == "spread":
        rng = np.random.default_rng(derive_seeds(args.seed, FIRST)[1])
        drawn = [{name: Range.of(name, args).sample(rng) for name in HYPERPARAMETERS} for _ in genomes[1:]]
        genomes[1:] = [replace(given, **genes) for genes in drawn]  # type: ignore[arg-type]
    return [Member(place, place, "first", genome) for place, genome in enumerate(genomes)]


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
    if kind == "hyperparameters":
        touched = [name for name in HYPERPARAMETERS if rng.random() < 0.5]
        touched = touched or [HYPERPARAMETERS[rng.integers(len(HYPERPARAMETERS))]]
        genes = {name: move(getattr(genome, name), Range.of(name, args), args, rng, args.resample) for name in touched}
        return replace(genome, **genes)  # type: ignore[arg-type]
    if kind == "architecture":
        return replace(genome, hidden=_mutate_hidden(genome, args, rng))
    if kind == "activation":
        others = [activation for activation in ACTIVATIONS if activation != genome.activation]
        return replace(genome, activation=others[rng.integers(len(others))])
    return genome


def _mutate_hidden(genome: Genome, args: Args, rng: Generator) -> tuple[int, ...]:
    """Copy a hidden layer, or widen or shrink one. A copy changes no outputs of ReLU nets; others get wider instead."""
    hidden, bounds = list(genome.hidden), Range.of("units", args)
    layer = int(rng.integers(len(hidden)))
    units = hidden[layer]
    deepens = rng.random() < args.new_layer and len(hidden) < args.layers_range[1]
    if deepens and genome.activation == "relu":
        hidden.insert(layer, units)
    elif deepens:
        hidden[layer] = min(max(round(units * _factor(args.grow_factor, rng)), units + 1), int(bounds.high))
    else:
        hidden[layer] = int(move(units, bounds, args, rng))
    return tuple(hidden)


def move(value: float, bounds: Range, args: Args, rng: Generator, resample: float = 0.0) -> float:
    """Return another value: times or over a random factor, or with probability `resample` drawn from the range."""
    draws_again, moved = rng.random() < resample, value
    while moved == value and bounds.low < bounds.high:
        if draws_again:
            moved = bounds.sample(rng)
        else:
            factor = _factor(args.grow_factor, rng) if rng.random() < 0.5 else 1 / _factor(args.shrink_factor, rng)
            moved = bounds.multiply(value, factor, rng)
    return moved


def _factor(between: tuple[float, float], rng: Generator) -> float:
    return math.exp(rng.uniform(math.log(between[0]), math.log(between[1])))
