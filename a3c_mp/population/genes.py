"""Genes: settings of which each member has a value of its own, the ranges of their values, and how these mutate."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.random import Generator

from a3c_mp.errors import ConfigError


class Gene(NamedTuple):
    """Range of a gene on a logarithmic scale, both ends included; a whole number k stands for k - 0.5 to k + 0.5."""

    low: float
    high: float
    integer: bool = False
    horizon: bool = False  # a discount factor: the scale is that of its horizon, 1 / (1 - value) steps
    step: float | None = None  # a mutation multiplies or divides by it; None: by --grow-factor, --shrink-factor

    def sample(self, rng: Generator) -> float:
        """Draw a log-uniform value, an int if `integer`."""
        return self._value(rng.uniform(*self._ends))

    def multiply(self, value: float, factor: float, rng: Generator) -> float:
        """Return value * factor, reflected at the limits that it would pass; an int if `integer`.

        Reflection keeps the distribution of `sample` as it is, if factors f and 1/f are equally likely; clipping would
        collect values at the limits. For the same reason, an integer is first spread over its interval. A value outside
        of the range, as a resumed member may begin with, counts as its nearest end.
        """
        value = min(max(value, self.low), self.high)
        exact = self._scaled(value) + (rng.random() - 0.5 if self.integer else 0.0)
        low, high = self._ends
        distance = (math.log(exact * factor) - low) % (2 * (high - low))
        return self._value(low + min(distance, 2 * (high - low) - distance))

    def move(self, value: float, args: Any, rng: Generator, resample: float = 0.0) -> float:
        """Return another value: times or over a factor, or with probability `resample` drawn from the range."""
        draws_again, moved = rng.random() < resample, value
        grow, shrink = args.grow_factor, args.shrink_factor
        if self.step:
            grow = shrink = self.step, self.step
        while moved == value and self.low < self.high:
            if draws_again:
                moved = self.sample(rng)
            else:
                factor = log_uniform(grow, rng) if rng.random() < 0.5 else 1 / log_uniform(shrink, rng)
                moved = self.multiply(value, factor, rng)
                # A fixed factor may be reflected to where it began, in both directions.
                draws_again = not self.integer or abs(math.log(factor)) >= self._ends[1] - self._ends[0]
        return moved

    def _scaled(self, value: float) -> float:
        return 1 / (1 - value) if self.horizon else value

    @property
    def _ends(self) -> tuple[float, float]:
        half = 0.5 if self.integer else 0.0
        return math.log(self._scaled(self.low) - half), math.log(self._scaled(self.high) + half)

    def _value(self, logarithm: float) -> float:
        value = math.exp(logarithm)
        value = 1 - 1 / value if self.horizon else value
        value = min(max(round(value) if self.integer else value, self.low), self.high)
        return int(value) if self.integer else value

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}" + (f" in steps of x {self.step:g}" if self.step else "")


GENES = {
    "learning_rate": Gene(1e-5, 1e-1),
    "batch_size": Gene(8, 256, integer=True),
    "learn_every": Gene(1, 120, integer=True),
    "gamma": Gene(0.9, 0.999, horizon=True),
    "n_step": Gene(1, 10, integer=True),
    "target_period": Gene(10, 2_000, integer=True),
    "epsilon": Gene(0.02, 1.0),
    "max_grad_norm": Gene(0.1, 100.0),
    "update_epochs": Gene(2, 20, integer=True),
    "clip_ratio": Gene(0.05, 0.5),
    "entropy_coef": Gene(1e-4, 0.1),
}
"""settings that can be genes -> how they mutate; of those in `--genes`, a member's settings have its own values"""
COMMON = ("learning_rate", "batch_size", "gamma", "n_step", "max_grad_norm")  # those of all algorithms


def log_uniform(between: tuple[float, float], rng: Generator) -> float:
    return math.exp(rng.uniform(math.log(between[0]), math.log(between[1])))


def read_genes(words: tuple[str, ...], table: Mapping[str, Gene]) -> dict[str, Gene]:
    """Genes by `--genes`, in its order: NAME, NAME=LOW:HIGH or NAME=LOW:HIGH:STEP. Raises ConfigError."""
    genes = dict[str, Gene]()
    for word in words:
        name, _, numbers = word.partition("=")
        name = name.replace("-", "_")
        if name not in table or name in genes:
            why = "it is there twice" if name in genes else "there is no such gene"
            raise ConfigError("genes", word, why, f"choose of {', '.join(table)}")
        try:
            found = [float(number) for number in numbers.split(":")] if numbers else table[name][:2]
            low, high, step = found if len(found) == 3 else (*found, table[name].step)
            gene = table[name]._replace(low=low, high=high, step=step)
        except ValueError:
            raise ConfigError("genes", word, "must be NAME, NAME=LOW:HIGH or NAME=LOW:HIGH:STEP") from None
        if gene.horizon and high >= 1:
            raise ConfigError("genes", word, "both ends must be below 1")
        if gene.integer and not (float(low).is_integer() and float(high).is_integer()):
            raise ConfigError("genes", word, "both ends must be whole numbers")
        if gene.step is not None and not 1.01 <= gene.step < math.inf:
            raise ConfigError("genes", word, "its step is a factor, finite and 1.01 or more")
        genes[name] = gene
    return genes
