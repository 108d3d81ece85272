"""Genome of a population's member: the hyperparameters and the architecture that evolve, and their ranges."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from a3c_mp.config import flag_name
from a3c_mp.errors import ConfigError

ACTIVATIONS = ("relu", "elu", "gelu", "tanh")
"""activation functions, by their names in `nets.q_values.ACTIVATIONS`"""
HYPERPARAMETERS = ("learning_rate", "batch_size", "learn_every")
"""genes that a mutation of hyperparameters changes"""


@dataclass(frozen=True)
class Genome:
    """Genome: what a member inherits from its parent besides weights and optimizer state.

    Raises:
        ValueError: a gene that no member can have.
    """

    learning_rate: float
    """of Adam"""
    batch_size: int
    """transitions in one gradient"""
    learn_every: int
    """agent steps for each update"""
    hidden: tuple[int, ...] = (128, 128)
    """units of each hidden layer"""
    activation: str = "relu"
    """activation function of the hidden layers"""

    def __post_init__(self) -> None:
        counts = (self.batch_size, self.learn_every, *self.hidden)
        is_valid = (
            isinstance(self.learning_rate, float)
            and 0 < self.learning_rate < math.inf
            and all(type(count) is int and count > 0 for count in counts)
            and isinstance(self.hidden, tuple)
            and len(self.hidden) > 0
            and self.activation in ACTIVATIONS
        )
        if not is_valid:
            raise ValueError(f"not a valid genome: {self}")

    def to_json(self) -> str:
        """Return the genome as one line of JSON; `from_json` restores every bit."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Genome:
        """Restore a genome. Raises ValueError for anything that `to_json` does not write."""
        genes = json.loads(text)
        names = {field.name for field in fields(cls)}
        if not isinstance(genes, dict) or set(genes) != names or not isinstance(genes["hidden"], list):
            raise ValueError(f"not a genome, whose fields are {sorted(names)}: {text}")
        return cls(**genes | {"hidden": tuple(genes["hidden"])})


class Range(NamedTuple):
    """Range of a gene, both ends included.

    Args:
        low, high: its limits.
        log: values are drawn log-uniform and change on a logarithmic scale, otherwise on a linear one.
        integer: whole numbers; k stands for the interval from k - 0.5 to k + 0.5.
    """

    low: float
    high: float
    log: bool = True
    integer: bool = False

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    def sample(self, rng: np.random.Generator) -> float:
        """Draw a value, an int if `integer`."""
        return self._value(rng.uniform(*self._ends))

    def multiply(self, value: float, factor: float, rng: np.random.Generator) -> float:
        """Return value * factor, reflected at the limits that it would pass; an int if `integer`.

        Reflection keeps the distribution of `sample` as it is, if factors f and 1/f are equally likely. Clipping would
        collect values at the limits, and to draw again until a value is inside would move them away from there. For
        the same reason, an integer is first replaced by a random number of its interval.
        """
        exact = value + (rng.random() - 0.5 if self.integer else 0.0)
        low, high = self._ends
        if low == high:
            return value
        distance = (self._position(exact * factor) - low) % (2 * (high - low))
        return self._value(low + min(distance, 2 * (high - low) - distance))

    @property
    def _ends(self) -> tuple[float, float]:
        """Both ends on the scale."""
        half = 0.5 if self.integer else 0.0
        return self._position(self.low - half), self._position(self.high + half)

    def _position(self, value: float) -> float:
        return math.log(value) if self.log else value

    def _value(self, position: float) -> float:
        value = math.exp(position) if self.log else position
        value = min(max(round(value) if self.integer else value, self.low), self.high)
        return int(value) if self.integer else value


RANGES: Mapping[str, Range] = {
    "learning_rate": Range(1e-5, 1e-1),
    "batch_size": Range(8, 256, integer=True),
    "learn_every": Range(1, 120, integer=True),
    "units": Range(16, 512, integer=True),
    "layers": Range(1, 3, log=False, integer=True),
}
"""gene -> its range by default; `units` is that of each hidden layer, `layers` that of their number"""


def check_start(genome: Genome, ranges: Mapping[str, Range]) -> None:
    """Raise ConfigError for a range that is upside down or impossible, or that the first genome lies outside of."""
    genes = {name: [getattr(genome, name)] for name in HYPERPARAMETERS}
    genes |= {"units": list(genome.hidden), "layers": [len(genome.hidden)]}
    assert set(ranges) == set(genes), sorted(ranges)
    for name, bounds in ranges.items():
        flag = f"{flag_name(name)}-range"
        if not (math.isfinite(bounds.low) and math.isfinite(bounds.high)):
            raise ConfigError(flag, bounds, "both ends must be finite numbers")
        if bounds.low > bounds.high:
            raise ConfigError(flag, bounds, "it is upside down", "give the lower end first")
        if bounds.integer and (bounds.low < 1 or bounds.low % 1 or bounds.high % 1):
            raise ConfigError(flag, bounds, "both ends must be whole numbers, 1 or more")
        if bounds.low <= 0:
            raise ConfigError(flag, bounds, "both ends must be more than 0")
        for value in genes[name]:
            if not bounds.low <= value <= bounds.high:
                why = f"the first member has {value:g}"
                raise ConfigError(flag, bounds, why, "widen the range, or start inside it")


def spread(genome: Genome, ranges: Mapping[str, Range], num: int, rng: np.random.Generator) -> list[Genome]:
    """Return the genomes of `num` first members: member 0 as given, the others with hyperparameters drawn in `ranges`.

    All have the architecture of member 0.
    """
    drawn = [{name: ranges[name].sample(rng) for name in HYPERPARAMETERS} for _ in range(num - 1)]
    return [genome, *(replace(genome, **genes) for genes in drawn)]  # type: ignore[arg-type]
