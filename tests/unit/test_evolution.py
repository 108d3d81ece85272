"""Evolution: ranking, tournaments, kinds of mutation, mutated genomes, births."""

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3c_mp.errors import ConfigError, TrainingError
from a3c_mp.population.evolution import (
    KINDS,
    Candidate,
    Evolution,
    Steps,
    draw_kind,
    move,
    mutate,
    next_generation,
    rank,
    tournament,
)
from a3c_mp.population.genome import ACTIVATIONS, HYPERPARAMETERS, RANGES, Genome, Range

START = Genome(learning_rate=1e-3, batch_size=45, learn_every=30, hidden=(64, 32))
NAN, INF = math.nan, math.inf
SEEDS_OWN = Steps(grow=(1.5, 1.5), shrink=(4 / 3, 4 / 3), resample=0.0)
"""times 1.5 or times 0.75"""
fitness_values = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([NAN, INF, -INF]), st.floats())


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def assert_distribution(counts, probabilities):
    """Pearson's chi-square test at 1 in 1,000; its critical value is Wilson and Hilferty's approximation."""
    counts, expected = np.asarray(counts), sum(counts) * np.asarray(probabilities)
    df = len(counts) - 1
    critical = df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < critical, (counts.tolist(), expected.round().tolist())


def population(fitness, genome=START, first_id=0):
    return [Candidate(first_id + i, genome, value) for i, value in enumerate(fitness)]


@given(st.lists(fitness_values, min_size=1, max_size=12), st.integers(0, 99))
def test_ranks_descend_and_values_that_are_not_finite_come_last(fitness, seed):
    order = rank(fitness, np.random.default_rng(seed))
    assert sorted(order) == list(range(len(fitness)))
    ranked = [fitness[i] for i in order]
    finite = [value for value in ranked if math.isfinite(value)]
    assert finite == sorted(finite, reverse=True)
    assert all(math.isfinite(value) for value in ranked[: len(finite)])


def test_ties_are_drawn(rng):
    fitness = [1.0, 5.0, NAN, 5.0, INF, 5.0]
    orders = np.array([rank(fitness, rng) for _ in range(3000)])
    for places, tied in [([0, 1, 2], [1, 3, 5]), ([4, 5], [2, 4])]:
        for place in places:
            counts = Counter(orders[:, place].tolist())
            assert set(counts) == set(tied)
            assert_distribution([counts[i] for i in tied], np.full(len(tied), 1 / len(tied)))


@pytest.mark.parametrize(("n", "size"), [(8, 3), (4, 2), (5, 1), (3, 7)])
def test_the_rth_least_fit_wins_a_tournament_as_often_as_it_should(n, size, rng):
    fitness = rng.permutation(n).astype(float)
    counts = Counter(fitness[i] for i in tournament(fitness.tolist(), size, 20_000, rng))
    r = np.arange(1, n + 1)
    probabilities = (r**size - (r - 1) ** size) / n**size
    if (n, size) == (4, 2):
        assert (16 * probabilities).tolist() == [1, 3, 5, 7]
    if size == 7:  # the least fit wins once in 2,187: too rare for the test
        probabilities, r = probabilities[1:] / probabilities[1:].sum(), r[1:]
    assert_distribution([counts[k - 1] for k in r], probabilities)


def test_tied_entrants_win_a_tournament_equally_often(rng):
    counts = Counter(tournament([7.0] * 5, 2, 20_000, rng))
    assert_distribution([counts[i] for i in range(5)], np.full(5, 0.2))


def test_kinds_are_drawn_with_their_probabilities(rng):
    counts = Counter(draw_kind(KINDS, rng) for _ in range(20_000))
    assert counts["activation"] == 0
    assert_distribution([counts[kind] for kind in KINDS if KINDS[kind]], [0.4, 0.2, 0.2, 0.2])
    doubled = Counter(draw_kind({kind: 2 * KINDS[kind] for kind in KINDS}, rng) for _ in range(20_000))
    assert_distribution([doubled[kind] for kind in KINDS if KINDS[kind]], [0.4, 0.2, 0.2, 0.2])


def test_without_any_probability_nothing_mutates(rng):
    nothing = dict.fromkeys(KINDS, 0.0)
    assert {draw_kind(nothing, rng) for _ in range(100)} == {"none"}
    births = next_generation(population([1.0, 2.0, 3.0]), Evolution(kinds=nothing), rng)
    assert {(birth.genome, birth.change) for birth in births} == {(START, "")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tournament_size": 0}, "tournament-size=0"),
        ({"kinds": {**KINDS, "architecture": -0.1}}, "mutate-architecture=-0.1"),
        ({"kinds": {**KINDS, "none": NAN}}, "mutate-none=nan"),
        ({"kinds": {**KINDS, "none": INF}}, "mutate-none=inf"),
        ({"steps": Steps(grow=(1.0, 2.0))}, "grow-factor=1 to 2"),
        ({"steps": Steps(shrink=(2.0, 1.5))}, "shrink-factor=2 to 1.5"),
        ({"steps": Steps(resample=1.5)}, "resample=1.5"),
        ({"steps": Steps(new_layer=-1)}, "new-layer=-1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Evolution(**settings)


@pytest.mark.parametrize("steps", [Steps(), SEEDS_OWN])
def test_limits_hold_over_30_000_mutations_and_every_integer_is_reached(steps, rng):
    genome, seen = START, Counter()
    for _ in range(30_000):
        parent, (genome, _) = genome, mutate(genome, "hyperparameters", RANGES, rng, steps)
        assert genome != parent, "each mutation changes something"
        seen[genome.learn_every] += 1
        for name in HYPERPARAMETERS:
            assert RANGES[name].low <= getattr(genome, name) <= RANGES[name].high
    assert sorted(seen) == list(range(1, 121))
    assert max(seen.values()) < 0.3 * sum(seen.values()), "no value collects the others"


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_away_from_the_limits_genes_do_not_drift(name, rng):
    value, bounds = getattr(START, name), RANGES[name]
    assert bounds.low * 2.5 < value < bounds.high / 2.5, "no step reaches a limit"
    moved = [move(value, bounds, rng, Steps()) for _ in range(100_000)]
    factors = np.array(moved) / value
    assert abs(np.log(factors).mean()) < 0.005
    half = 0.5 if bounds.integer else 1e-9
    assert min(moved) >= (value - half) / 2.5 - half
    assert max(moved) <= (value + half) * 2.5 + half
    assert value not in moved
    if bounds.integer:
        assert {type(each) for each in moved} == {int}
        assert {round(value / 1.1), round(value * 1.1)} <= set(moved), "the smallest steps"


def test_a_step_leaves_the_log_uniform_distribution_as_it_is_up_to_the_limits(rng):
    """A test that clipping at the limits, or drawing again, would fail: their first and last bins are off."""
    bounds = Range(1e-5, 1e-1)
    moved = [move(bounds.sample(rng), bounds, rng, Steps()) for _ in range(40_000)]
    counts, _ = np.histogram(np.log10(moved), bins=40, range=(-5, -1))
    assert_distribution(counts, np.full(40, 1 / 40))


def test_an_integer_at_its_limit_moves_by_one_at_least(rng):
    bounds = Range(1, 120, integer=True)
    assert min(move(1, bounds, rng, SEEDS_OWN) for _ in range(500)) == 2
    small = Steps(grow=(1.01, 1.01), shrink=(1.01, 1.01))
    assert {move(120, bounds, rng, small) for _ in range(500)} == {118, 119}
    assert {move(1, Range(1, 2, integer=True), rng, Steps()) for _ in range(50)} == {2}
    assert move(5, Range(5, 5, integer=True), rng, Steps()) == 5


def test_the_factors_of_the_seed_script_can_be_set(rng):
    bounds = RANGES["learning_rate"]
    assert {round(move(1e-3, bounds, rng, SEEDS_OWN), 9) for _ in range(100)} == {1.5e-3, 0.75e-3}


def test_each_hyperparameter_is_touched_half_of_the_time_and_one_at_least(rng):
    mutated = [mutate(START, "hyperparameters", RANGES, rng)[0] for _ in range(8000)]
    touched = [tuple(getattr(genome, name) != getattr(START, name) for name in HYPERPARAMETERS) for genome in mutated]
    assert (False, False, False) not in touched
    share = 1 / 2 + 1 / 8 / 3  # where none was to be touched, 1 in 8 times, it is one of three
    assert np.mean(touched, axis=0) == pytest.approx(np.full(3, share), abs=0.02)
    assert {(genome.hidden, genome.activation) for genome in mutated} == {(START.hidden, START.activation)}


def test_architectures_grow_and_shrink_equally_often_inside_their_limits(rng):
    genome, wider, narrower = replace(START, hidden=(64,)), 0, 0
    ranges = {**RANGES, "units": Range(16, 80, integer=True)}
    for _ in range(5000):
        parent, (genome, change) = genome, mutate(genome, "architecture", ranges, rng, Steps(new_layer=0.01))
        assert replace(parent, hidden=genome.hidden) == genome, "other genes stay"
        assert all(16 <= units <= 80 for units in genome.hidden)
        assert 1 <= len(genome.hidden) <= 3
        if len(parent.hidden) == len(genome.hidden):
            ((before, after),) = [pair for pair in zip(parent.hidden, genome.hidden, strict=True) if pair[0] != pair[1]]
            assert f"{before} to {after} units" in change
            wider, narrower = wider + (after > before), narrower + (after < before)
    assert len(genome.hidden) == 3
    assert wider == pytest.approx(narrower, rel=0.1)


def test_a_relu_net_gets_a_copy_of_a_layers_size_and_others_are_widened_and_say_so(rng):
    always = Steps(new_layer=1.0)
    deeper = {mutate(START, "architecture", RANGES, rng, always) for _ in range(50)}
    assert {(genome.hidden, change) for genome, change in deeper} == {
        ((64, 64, 32), "a new layer of 64 units"),
        ((64, 32, 32), "a new layer of 32 units"),
    }
    for activation in ACTIVATIONS[1:]:
        parent = replace(START, activation=activation)
        for _ in range(50):
            genome, change = mutate(parent, "architecture", RANGES, rng, always)
            assert len(genome.hidden) == 2
            assert sorted(after - before > 0 for before, after in zip((64, 32), genome.hidden, strict=True)) == [0, 1]
            assert f"new {activation} layer is not exact" in change


def test_an_activation_mutates_to_each_of_the_others(rng):
    drawn = [mutate(START, "activation", RANGES, rng)[0] for _ in range(100)]
    assert {genome.activation for genome in drawn} == set(ACTIVATIONS) - {"relu"}
    assert {replace(genome, activation="relu") for genome in drawn} == {START}


@given(st.lists(fitness_values, min_size=1, max_size=8), st.booleans(), st.integers(1, 4), st.integers(0, 99))
def test_every_generation_has_parents_of_the_last_one_and_fresh_ids(fitness, elitism, size, seed):
    rng = np.random.default_rng(seed)
    settings = Evolution(tournament_size=size, elitism=elitism)
    members, used = population(fitness), set(range(len(fitness)))
    while sum(map(math.isfinite, fitness)) and max(used) < 20 + len(fitness):
        births = next_generation(members, settings, rng)
        assert len(births) == len(members)
        viable = {member.id: member for member in members if math.isfinite(member.fitness)}
        if elitism:
            elite, *children = births
            assert (elite.id, elite.kind, elite.genome) == (elite.parent, "elite", viable[elite.id].genome)
            assert viable[elite.id].fitness == max(member.fitness for member in viable.values())
        else:
            children = births
        ids = [child.id for child in children]
        assert len(set(ids)) == len(ids)
        assert not used & set(ids)
        used |= set(ids)
        for child in children:
            assert not child.survives
            assert child.parent in viable
            assert child.kind in KINDS
            if child.kind in ("none", "parameters"):
                assert child.genome == viable[child.parent].genome
        if not children:
            break
        members = [Candidate(birth.id, birth.genome, float(rng.normal())) for birth in births]


def test_members_that_are_kept_live_on_once(rng):
    members = population([1.0, 2.0, NAN, 3.0], first_id=5)
    births = next_generation(members, Evolution(), rng, kept=[5, 7, 8])
    assert [(birth.id, birth.kind) for birth in births[:3]] == [(8, "elite"), (5, "kept"), (7, "kept")]
    assert births[3].id == 9
    births = next_generation(members, Evolution(elitism=False), rng, kept=[8])
    assert [birth.id for birth in births] == [8, 9, 10, 11]


def test_births_depend_on_the_seed_alone_and_have_seeds_of_their_own():
    members = population([1.0, 2.0, 2.0, NAN, 0.0])
    births = [next_generation(members, Evolution(), np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert births[0] == births[1] != births[2]
    assert len({birth.seed for birth in births[0][1:]}) == 4


def test_a_generation_that_has_diverged_is_an_error(rng):
    with pytest.raises(TrainingError, match="no member has a finite fitness"):
        next_generation(population([NAN, INF, -INF]), Evolution(), rng)


def test_evolution_loads_no_torch():
    code = "import sys, a3c_mp.population.evolution; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
