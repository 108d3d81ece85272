"""Evolution of a population: ranking, tournament selection, mutation of genomes. Pure functions, without torch.

A generation's end is one call: `next_generation` turns the members and their fitness into births.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from a3c_mp.errors import ConfigError, TrainingError
from a3c_mp.population.genome import ACTIVATIONS, HYPERPARAMETERS, RANGES, Genome, Range

KINDS: Mapping[str, float] = {
    "none": 0.4,
    "architecture": 0.2,
    "parameters": 0.2,
    "activation": 0.0,
    "hyperparameters": 0.2,
}
"""kind of mutation -> its probability by default, relative to the sum of all"""


class Steps(NamedTuple):
    """Sizes and probabilities of a mutation's steps.

    Factors are drawn log-uniform. By default, growing and shrinking cancel out, so that genes do not drift.
    """

    grow: tuple[float, float] = (1.1, 2.5)
    """a gene is multiplied by a factor between these, in half of all cases"""
    shrink: tuple[float, float] = (1.1, 2.5)
    """or divided by a factor between these"""
    resample: float = 0.25
    """probability that a hyperparameter is drawn from its whole range instead"""
    touch: float = 0.5
    """probability that a mutation of hyperparameters changes each of them; it changes one at least"""
    new_layer: float = 0.2
    """probability that a mutation of the architecture adds a layer instead of resizing one"""


STEPS = Steps()


@dataclass(frozen=True)
class Evolution:
    """Settings of evolution.

    Raises:
        ConfigError: a setting is out of range.
    """

    tournament_size: int = 2
    """members in each tournament; the fittest of them is a parent"""
    elitism: bool = True
    """the fittest member survives unchanged"""
    kinds: Mapping[str, float] = field(default_factory=lambda: KINDS)
    """kind of mutation -> its probability, relative to the sum of all"""
    ranges: Mapping[str, Range] = field(default_factory=lambda: RANGES)
    """gene -> its range"""
    steps: Steps = STEPS

    def __post_init__(self) -> None:
        assert set(self.kinds) == set(KINDS), sorted(self.kinds)
        if self.tournament_size < 1:
            raise ConfigError("tournament-size", self.tournament_size, "must be 1 or more")
        for kind, probability in self.kinds.items():
            if not 0 <= probability < math.inf:
                raise ConfigError(f"mutate-{kind}", probability, "must be a finite number, 0 or more")
        for name in ("grow", "shrink"):
            low, high = getattr(self.steps, name)
            if not 1.01 <= low <= high < math.inf:
                raise ConfigError(f"{name}-factor", f"{low:g} to {high:g}", "must be 1.01 or more, lower end first")
        for name in ("resample", "touch", "new_layer"):
            if not 0 <= getattr(self.steps, name) <= 1:
                raise ConfigError(name.replace("_", "-"), getattr(self.steps, name), "must be between 0 and 1")


class Candidate(NamedTuple):
    """Member of the generation that ends, as evolution sees it."""

    id: int
    genome: Genome
    fitness: float


class Birth(NamedTuple):
    """Member of the next generation: a child, or a survivor, which keeps its id and is its own parent."""

    id: int
    parent: int
    """id of the member whose weights and optimizer it starts from"""
    kind: str
    """of mutation, one of `KINDS`; "elite" or "kept" for a survivor"""
    change: str
    """what the mutation has changed, for tables and logs"""
    genome: Genome
    seed: int = 0
    """of the random numbers that its weights need: new units, parameter noise"""

    @property
    def survives(self) -> bool:
        return self.id == self.parent


def rank(fitness: Sequence[float], rng: np.random.Generator) -> list[int]:
    """Return the indices of members, the fittest first; ties are in random order, not finite values last."""

    def key(i: int) -> float:
        return -fitness[i] if math.isfinite(fitness[i]) else math.inf

    return sorted(rng.permutation(len(fitness)).tolist(), key=key)


def tournament(fitness: Sequence[float], size: int, num: int, rng: np.random.Generator) -> list[int]:
    """Return the winners' indices of `num` tournaments among `size` members each, drawn with replacement.

    Without ties, the r-th least fit of n wins with probability (r^size - (r - 1)^size) / n^size.
    """
    entrants = rng.integers(len(fitness), size=(num, size)).tolist()
    return [row[rank([fitness[i] for i in row], rng)[0]] for row in entrants]


def draw_kind(kinds: Mapping[str, float], rng: np.random.Generator) -> str:
    """Draw a kind of mutation with these relative probabilities; "none" if all are 0."""
    total = sum(kinds.values())
    if total == 0:
        return "none"
    return list(kinds)[rng.choice(len(kinds), p=[probability / total for probability in kinds.values()])]


def mutate(
    genome: Genome, kind: str, ranges: Mapping[str, Range], rng: np.random.Generator, steps: Steps = STEPS
) -> tuple[Genome, str]:
    """Return a mutated genome, and what has changed; kinds "none" and "parameters" change no gene."""
    if kind == "hyperparameters":
        return _mutate_hyperparameters(genome, ranges, rng, steps)
    if kind == "architecture":
        return _mutate_architecture(genome, ranges, rng, steps)
    if kind == "activation":
        others = [activation for activation in ACTIVATIONS if activation != genome.activation]
        activation = others[rng.integers(len(others))]
        return replace(genome, activation=activation), f"{genome.activation} to {activation}"
    assert kind in ("none", "parameters"), kind
    return genome, ""


def _mutate_hyperparameters(
    genome: Genome, ranges: Mapping[str, Range], rng: np.random.Generator, steps: Steps
) -> tuple[Genome, str]:
    """Change each hyperparameter with probability `touch`, and one of them at least."""
    touched = [name for name in HYPERPARAMETERS if rng.random() < steps.touch]
    touched = touched or [HYPERPARAMETERS[rng.integers(len(HYPERPARAMETERS))]]
    genes: dict[str, Any] = {}
    for name in touched:
        genes[name] = move(getattr(genome, name), ranges[name], rng, steps, steps.resample)
    changes = [f"{name} {getattr(genome, name):.3g} to {value:.3g}" for name, value in genes.items()]
    return replace(genome, **genes), ", ".join(changes)


def _mutate_architecture(
    genome: Genome, ranges: Mapping[str, Range], rng: np.random.Generator, steps: Steps
) -> tuple[Genome, str]:
    """Add a copy of a hidden layer, or widen or shrink one.

    Only ReLU nets can have a new layer that changes nothing at first; others are widened instead.
    """
    hidden, bounds = list(genome.hidden), ranges["units"]
    layer = int(rng.integers(len(hidden)))
    units = hidden[layer]
    deepens = rng.random() < steps.new_layer and len(hidden) < ranges["layers"].high
    if deepens and genome.activation == "relu":
        hidden.insert(layer, units)
        change = f"a new layer of {units} units"
    elif deepens:
        hidden[layer] = min(max(round(units * _factor(steps.grow, rng)), units + 1), int(bounds.high))
        change = f"layer {layer + 1}: {units} to {hidden[layer]} units, as a new {genome.activation} layer is not exact"
    else:
        hidden[layer] = int(move(units, bounds, rng, steps))
        change = f"layer {layer + 1}: {units} to {hidden[layer]} units"
    return replace(genome, hidden=tuple(hidden)), change


def move(value: float, bounds: Range, rng: np.random.Generator, steps: Steps, resample: float = 0.0) -> float:
    """Return a value multiplied or divided by a random factor, or with probability `resample` drawn from its range.

    The result is inside the range and never the same value, unless the range is a single number.
    """
    draws_again, moved = rng.random() < resample, value
    while moved == value and bounds.low < bounds.high:
        if draws_again:
            moved = bounds.sample(rng)
        else:
            factor = _factor(steps.grow, rng) if rng.random() < 0.5 else 1 / _factor(steps.shrink, rng)
            moved = bounds.multiply(value, factor, rng)
    return moved


def _factor(between: tuple[float, float], rng: np.random.Generator) -> float:
    """Draw a log-uniform factor."""
    return math.exp(rng.uniform(math.log(between[0]), math.log(between[1])))


def survive(member: Candidate, kind: str = "kept") -> Birth:
    """Return the birth of a member that survives unchanged."""
    return Birth(member.id, member.id, kind, "", member.genome)


def survive_all(members: Sequence[Candidate]) -> list[Birth]:
    """Return births of members that all live on. Raises TrainingError: no member has a finite fitness."""
    check_alive(members)
    return [survive(member) for member in members]


def check_alive(members: Sequence[Candidate]) -> None:
    """Raise TrainingError if no member has a finite fitness."""
    if not any(math.isfinite(member.fitness) for member in members):
        raise TrainingError("no member has a finite fitness: all have diverged; lower the learning rates")


def next_generation(
    members: Sequence[Candidate], settings: Evolution, rng: np.random.Generator, kept: Collection[int] = ()
) -> list[Birth]:
    """Return the births of the next generation, as many as there are members.

    First comes the elite, then the members in `kept`, both unchanged; all others are mutated children of tournament
    winners. Members whose fitness is not finite have no children. Ids of children are larger than those of all members.

    Args:
        members: of the generation that ends.
        kept: ids of members that live on whatever their fitness, for comparison.

    Raises:
        TrainingError: no member has a finite fitness.
    """
    check_alive(members)
    elite = members[rank([member.fitness for member in members], rng)[0]]
    births = [survive(elite, "elite")] if settings.elitism else []
    for member in members:
        if member.id in kept and not (settings.elitism and member is elite):
            births.append(survive(member))
    parents = [member for member in members if math.isfinite(member.fitness)]
    num = len(members) - len(births)
    winners = tournament([parent.fitness for parent in parents], settings.tournament_size, num, rng)
    first_id = max(member.id for member in members) + 1
    for child, parent in enumerate(parents[winner] for winner in winners):
        kind = draw_kind(settings.kinds, rng)
        genome, change = mutate(parent.genome, kind, settings.ranges, rng, settings.steps)
        births.append(Birth(first_id + child, parent.id, kind, change, genome, int(rng.integers(2**63))))
    return births
