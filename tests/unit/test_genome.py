"""Genomes and the ranges of their genes."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3c_mp.errors import ConfigError
from a3c_mp.nets import q_values
from a3c_mp.population.genome import ACTIVATIONS, HYPERPARAMETERS, RANGES, Genome, Range, check_start, spread

START = Genome(learning_rate=1e-3, batch_size=64, learn_every=8, hidden=(128, 64))

genomes = st.builds(
    Genome,
    st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    st.integers(1, 2**40),
    st.integers(1, 2**40),
    st.lists(st.integers(1, 10_000), min_size=1, max_size=5).map(tuple),
    st.sampled_from(ACTIVATIONS),
)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@given(genomes)
def test_a_genome_survives_json_bit_by_bit(genome):
    restored = Genome.from_json(genome.to_json())
    assert restored == genome
    assert hash(restored) == hash(genome)
    assert "\n" not in genome.to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"learning_rate": math.inf},
        {"learning_rate": "0.1"},
        {"batch_size": 0},
        {"batch_size": 64.0},
        {"learn_every": True},
        {"hidden": []},
        {"hidden": [64, 0]},
        {"hidden": 64},
        {"activation": "sigmoid"},
        {"gamma": 0.9},
    ],
)
def test_what_is_not_a_genome_is_refused(change):
    genes = json.loads(START.to_json())
    with pytest.raises(ValueError, match="genome"):
        Genome.from_json(json.dumps(genes | change))


@pytest.mark.parametrize("text", ["", "[]", "null", '{"learning_rate": 0.1}'])
def test_text_that_is_not_a_genome_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 (json has its own messages)
        Genome.from_json(text)


def test_genomes_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        START.batch_size = 3


def test_nets_know_every_activation():
    assert tuple(q_values.ACTIVATIONS) == ACTIVATIONS


def test_a_spread_starts_with_the_given_genome_and_draws_the_hyperparameters_of_all_others(rng):
    first, *others = spread(START, RANGES, 10_000, rng)
    assert first == START
    assert {(other.hidden, other.activation) for other in others} == {(START.hidden, START.activation)}
    for name in HYPERPARAMETERS:
        low, high, _, integer = RANGES[name]
        values = [getattr(other, name) for other in others]
        assert all(isinstance(value, int if integer else float) for value in values)
        assert low <= min(values) <= max(values) <= high
        # log-uniform: the logarithms have the mean and the deviation of a uniform distribution over the interval
        ends = np.log([low - integer / 2, high + integer / 2])
        logs = np.log(values)
        assert logs.mean() == pytest.approx(ends.mean(), abs=0.05 * np.ptp(ends))
        assert logs.std() == pytest.approx(np.ptp(ends) / 12**0.5, rel=0.05)
    assert spread(START, RANGES, 1, rng) == [START]


def test_the_same_seed_spreads_alike():
    draws = [spread(START, RANGES, 6, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_linear_ranges_are_drawn_uniform(rng):
    counts = Counter(Range(1, 4, log=False, integer=True).sample(rng) for _ in range(4000))
    assert sorted(counts) == [1, 2, 3, 4]
    assert min(counts.values()) > 900


@given(
    st.floats(1e-6, 1e3), st.floats(1.0, 1e4), st.floats(0, 1), st.floats(1e-3, 1e3), st.booleans(), st.integers(0, 99)
)
def test_multiplied_values_stay_in_their_range(low, ratio, share, factor, log, seed):
    bounds = Range(low, low * ratio, log)
    value = bounds.multiply(low + share * (bounds.high - low), factor, np.random.default_rng(seed))
    assert bounds.low <= value <= bounds.high


@pytest.mark.parametrize(
    ("value", "factor", "expected"),
    [(2.0, 3.0, 6.0), (6.0, 3.0, 100 / 18), (2.0, 1 / 4, 2.0), (2.0, 1 / 3, 1.5), (1.0, 0.5, 2.0), (10.0, 1.25, 8.0)],
)
def test_a_product_beyond_a_limit_is_reflected_there(value, factor, expected, rng):
    assert Range(1, 10).multiply(value, factor, rng) == pytest.approx(expected)


def test_a_range_of_one_number_leaves_it(rng):
    assert Range(3, 3).multiply(3, 2.0, rng) == 3


@pytest.mark.parametrize(
    ("gene", "bounds", "message"),
    [
        ("learning_rate", Range(1e-1, 1e-5), "learning-rate-range=0.1 to 1e-05: it is upside down"),
        ("learning_rate", Range(0, 1e-1), "more than 0"),
        ("learning_rate", Range(1e-5, math.inf), "finite"),
        ("learning_rate", Range(math.nan, 1), "finite"),
        ("learning_rate", Range(1e-5, 1e-4), "the first member has 0.001; widen the range, or start inside it"),
        ("batch_size", Range(65, 256, integer=True), "batch-size-range=65 to 256: the first member has 64"),
        ("batch_size", Range(8.5, 256, integer=True), "whole numbers"),
        ("learn_every", Range(0, 120, integer=True), "1 or more"),
        ("units", Range(65, 512, integer=True), "the first member has 64"),
        ("layers", Range(1, 1, log=False, integer=True), "the first member has 2"),
    ],
)
def test_ranges_that_cannot_be_and_starts_outside_them_are_refused(gene, bounds, message):
    with pytest.raises(ConfigError, match=message):
        check_start(START, {**RANGES, gene: bounds})


def test_the_ranges_by_default_hold_usual_genomes():
    check_start(START, RANGES)
    check_start(Genome(1e-3, 128, 1, hidden=(32, 32)), RANGES)
