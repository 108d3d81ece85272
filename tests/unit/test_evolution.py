"""Evolution: genomes and their ranges, ranking, tournaments, mutations, births."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import train_population
from a3c_mp.population.dqn import Args
from a3c_mp.population.evolution import Genome, Member, first_members, fittest_first, largest_genome, mutate_genome
from a3c_mp.population.genes import Gene
from a3c_mp.population.settings import ACTIVATIONS, MUTATIONS, check_genome

ARGS = Args(
    learning_rate=1e-3, batch_size=45, learn_every=30, n_step=10, target_period=150, hidden=(64, 32), gamma=0.99,
    units_range=(16, 512), epsilon=0.2, genes=("n_step=1:100", *(name for name in Args.gene_table if name != "n_step")),
)  # fmt: skip
START = first_members(ARGS)[0].genome
SEEDS_OWN = replace(ARGS, grow_factor=(1.5, 1.5), shrink_factor=(4 / 3, 4 / 3), resample=0.0)
"""times 1.5 or times 0.75"""
NAN, INF = math.nan, math.inf
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


def scaled(values, gene):
    """Logarithms of values on the scale that a gene mutates on."""
    values = np.asarray(values, float)
    return np.log(1 / (1 - values) if gene.horizon else values)


def members(fitness):
    return [Member(i, i, "first", START, fitnesses=(value,)) for i, value in enumerate(fitness)]


# ---- genomes and ranges


def test_a_spread_starts_with_the_given_genome_and_draws_the_hyperparameters_of_all_others():
    args = replace(ARGS, population=10_000)
    first, *others = (member.genome for member in first_members(args))
    assert first == START == Genome({name: getattr(ARGS, name) for name in ARGS.evolving}, (64, 32), "relu")
    assert {(other.hidden, other.activation) for other in others} == {(START.hidden, START.activation)}
    for name, gene in args.evolving.items():
        values = [other.hyperparameters[name] for other in others]
        assert all(isinstance(value, int if gene.integer else float) for value in values)
        assert gene.low <= min(values) <= max(values) <= gene.high
        # log-uniform: the logarithms have the mean and the deviation of a uniform distribution over the interval
        ends, logs = scaled([gene.low - gene.integer / 2, gene.high + gene.integer / 2], gene), scaled(values, gene)
        assert logs.mean() == pytest.approx(ends.mean(), abs=0.05 * np.ptp(ends))
        assert logs.std() == pytest.approx(np.ptp(ends) / 12**0.5, rel=0.05)
    draws = [first_members(replace(ARGS, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert all(member.genome == START for member in first_members(replace(ARGS, init="same")))


@pytest.mark.parametrize(
    ("value", "factor", "expected"),
    [
        (2.0, 3.0, 6.0), (6.0, 3.0, 100 / 18), (2.0, 1 / 4, 2.0), (2.0, 1 / 3, 1.5), (1.0, 0.5, 2.0), (10.0, 1.25, 8.0),
        (0.0, 3.0, 3.0), (40.0, 0.5, 5.0),
    ],
)  # fmt: skip
def test_a_product_beyond_a_limit_is_reflected_there(value, factor, expected, rng):
    assert Gene(1, 10).multiply(value, factor, rng) == pytest.approx(expected)
    assert Gene(0.9, 0.99, horizon=True).multiply(1.0, 0.5, rng) == pytest.approx(0.98)


def test_a_gene_moves_also_where_its_step_is_reflected_to_where_it_began(rng):
    gene, args, value = Gene(1, 100, step=100.0), ARGS, 10.0
    for _ in range(20):
        before, value = value, gene.move(value, args, rng)
        assert before != value
        assert 1 <= value <= 100


# ---- ranking and tournaments


@given(st.lists(fitness_values, min_size=1, max_size=12), st.integers(0, 99))
def test_ranks_descend_and_values_that_are_not_finite_come_last(fitness, seed):
    ranked = fittest_first(members(fitness), np.random.default_rng(seed))
    assert sorted(member.id for member in ranked) == list(range(len(fitness)))
    finite = [value for value in fitness if math.isfinite(value)]
    assert [member.fitness for member in ranked[: len(finite)]] == sorted(finite, reverse=True)


def test_ties_are_drawn(rng):
    orders = np.array(
        [[member.id for member in fittest_first(members([1.0, 5, NAN, 5, INF, 5]), rng)] for _ in range(3000)]
    )
    for places, tied in [([0, 1, 2], [1, 3, 5]), ([4, 5], [2, 4])]:
        for place in places:
            counts = Counter(orders[:, place].tolist())
            assert set(counts) == set(tied)
            assert_distribution([counts[i] for i in tied], np.full(len(tied), 1 / len(tied)))


@pytest.mark.parametrize(("n", "size"), [(8, 3), (4, 2), (5, 1)])
def test_the_rth_least_fit_wins_a_tournament_as_often_as_it_should(n, size, rng):
    parents = members([*rng.permutation(n).astype(float), NAN])
    won = train_population.tournament(replace(ARGS, tournament_size=size), parents, 20_000, rng)
    counts, r = Counter(winner.fitness for winner in won), np.arange(1, n + 1)
    assert_distribution([counts[k - 1] for k in r], (r**size - (r - 1) ** size) / n**size)


# ---- mutations


def test_kinds_are_drawn_with_their_probabilities(rng):
    (parent,) = members([1.0])

    def kinds(num, *weights):
        args = replace(ARGS, **{f"mutate_{kind}": weight for kind, weight in zip(MUTATIONS, weights, strict=True)})
        counts = Counter(train_population.mutate(args, parent, 1, rng).kind for _ in range(num))
        return [counts[kind] for kind in MUTATIONS]

    assert_distribution(kinds(8000, 0.8, 0.4, 0.4, 0.2, 0.2), [0.4, 0.2, 0.2, 0.1, 0.1])
    assert kinds(100, 0, 1, 0, 0, 0) == [0, 100, 0, 0, 0]
    assert kinds(100, 0, 0, 0, 0, 0) == [100, 0, 0, 0, 0], "without any probability nothing mutates"


def test_limits_hold_over_30_000_mutations_and_every_integer_is_reached(rng):
    genome, seen = START, Counter()
    for _ in range(30_000):
        parent, genome = genome, mutate_genome(genome, "hyperparameters", ARGS, rng)
        assert genome != parent, "each mutation changes something"
        seen[genome.hyperparameters["learn_every"]] += 1
        for name, gene in ARGS.evolving.items():
            assert gene.low <= genome.hyperparameters[name] <= gene.high
    assert sorted(seen) == list(range(1, 121))


@pytest.mark.parametrize("step", [None, 1.5])
@pytest.mark.parametrize("name", Args.gene_table)
def test_away_from_the_limits_genes_do_not_drift(name, step, rng):
    value, gene = getattr(ARGS, name), ARGS.evolving[name]._replace(step=step)
    factor, half = step or 2.5, 0.5 if gene.integer else 1e-9
    start = scaled([gene.low, value, gene.high], gene)
    assert (np.diff(start) > np.log(2.5)).all(), "no step reaches a limit"
    moved = [gene.move(value, ARGS, rng) for _ in range(20_000)]
    assert value not in moved
    steps = np.exp(scaled(moved, gene) - start[1])
    assert abs(np.log(steps).mean()) < 0.0135
    assert (1 - half / value) / factor - half / value <= min(steps)
    assert max(steps) <= (1 + half / value) * factor + half / value


def test_a_step_leaves_the_log_uniform_distribution_as_it_is_up_to_the_limits(rng):
    """A test that clipping at the limits, or drawing again, would fail: their first and last bins are off."""
    bounds = Gene(1e-5, 1e-1)
    moved = [bounds.move(bounds.sample(rng), ARGS, rng) for _ in range(40_000)]
    counts, _ = np.histogram(np.log10(moved), bins=40, range=(-5, -1))
    assert_distribution(counts, np.full(40, 1 / 40))


def test_an_integer_at_its_limit_moves_by_one_at_least_and_the_seeds_factors_can_be_set(rng):
    small, bounds = replace(ARGS, grow_factor=(1.01, 1.01), shrink_factor=(1.01, 1.01)), Gene(1, 120, integer=True)
    assert min(bounds.move(1, SEEDS_OWN, rng) for _ in range(500)) == 2
    assert {bounds.move(120, small, rng) for _ in range(500)} == {118, 119}
    assert Gene(5, 5, integer=True).move(5, ARGS, rng) == 5
    rates = {round(Gene(1e-5, 1e-1).move(1e-3, SEEDS_OWN, rng), 9) for _ in range(100)}
    assert rates == {1.5e-3, 0.75e-3}


def test_architectures_grow_and_shrink_equally_often_inside_their_limits(rng):
    genome, wider, narrower = replace(START, hidden=(64,)), 0, 0
    args = replace(ARGS, units_range=(16, 80), new_layer=0.01, remove_layer=0.0)
    for _ in range(5000):
        parent, genome = genome, mutate_genome(genome, "architecture", args, rng)
        assert replace(parent, hidden=genome.hidden) == genome, "other genes stay"
        assert all(16 <= units <= 80 for units in genome.hidden)
        if len(parent.hidden) == len(genome.hidden):
            (change,) = [b - a for a, b in zip(parent.hidden, genome.hidden, strict=True) if a != b]
            wider, narrower = wider + (change > 0), narrower + (change < 0)
    assert len(genome.hidden) == 3
    assert wider == pytest.approx(narrower, rel=0.1)


def test_a_relu_net_gets_a_copy_of_a_layers_size_and_others_are_widened(rng):
    always = replace(ARGS, new_layer=1.0)
    deeper = {mutate_genome(START, "architecture", always, rng).hidden for _ in range(50)}
    assert deeper == {(64, 64, 32), (64, 32, 32)}
    for activation in ACTIVATIONS[1:]:
        genome = mutate_genome(replace(START, activation=activation), "architecture", always, rng)
        assert sorted(after > before for before, after in zip((64, 32), genome.hidden, strict=True)) == [0, 1]


def test_layers_are_removed_down_to_the_first_one(rng):
    args = replace(ARGS, remove_layer=1.0, new_layer=0.0)
    assert {mutate_genome(START, "architecture", args, rng).hidden == (64,) for _ in range(50)} == {True, False}
    for fewest in (1, 2):
        genome = START
        for _ in range(50):
            genome = mutate_genome(genome, "architecture", replace(args, layers_range=(fewest, 3)), rng)
        assert len(genome.hidden) == fewest


def test_convolutions_come_and_go_and_change_channels_and_kernels_inside_their_limits(rng):
    args = replace(ARGS, **Args.images, remove_layer=0.2)
    genome, first, changes = first_members(args)[0].genome, args.first_convolutions, Counter()
    most = largest_genome(args)
    for _ in range(4000):
        parent, genome = genome, mutate_genome(genome, "architecture", args, rng)
        before, after = parent.convolutions, genome.convolutions
        assert replace(parent, hidden=genome.hidden, convolutions=after) == genome, "other genes stay"
        assert 3 <= len(after) <= args.convolutions_range[1] == len(most.convolutions)
        strided = [each for each in after if each.stride > 1 or each.kernel != 2 * each.padding + 1]
        assert [(each.stride, each.kernel - 2 * each.padding) for each in strided] == [each[2:0:-1] for each in first]
        assert all(8 <= each.channels <= 64 and 1 <= each.kernel <= 10 for each in after)
        if len(before) != len(after):
            changes["added" if len(after) > len(before) else "removed"] += 1
            continue
        for old, new in zip(before, after, strict=True):
            wider, larger = np.sign([new.channels - old.channels, new.kernel - old.kernel]).tolist()
            changes[wider, larger] += 1
    steps = [(0, -1), (0, 1), (-1, 0), (1, 0)]
    assert changes.keys() == {"added", "removed", (0, 0), *steps}
    assert changes["added"] - changes["removed"] <= 2
    assert all(changes[step] > 20 for step in steps)
    assert [each[1:] for each in most.convolutions] == [(10, 4, 1), (10, 2, 3), (9, 1, 3), (9, 1, 4), (9, 1, 4)]
    small = largest_genome(replace(args, kernels_range=(1, 2))).convolutions
    assert [each[1:] for each in small] == [*[(c.kernel, c.stride, c.padding) for c in first], *[(3, 1, 1)] * 2]
    grown = replace(START, convolutions=small[-2:])
    check_genome(replace(args, kernels_range=(1, 2)), grown, member=1)  # a new one has 3


@pytest.mark.parametrize(("ranks", "here", "members"), [(None, None, 64), (2, 1, 32), (3, 2, 44), (100, 4, 4)])
def test_memory_is_checked_for_the_members_of_this_machine(ranks, here, members, monkeypatch):
    for name, value in (("RANK", ranks and 0), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", here)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    assert Args(population=64).local_actors == members


def test_an_activation_mutates_to_each_of_the_others(rng):
    drawn = {mutate_genome(START, "activation", ARGS, rng).to_json() for _ in range(100)}
    assert drawn == {replace(START, activation=name).to_json() for name in ACTIVATIONS[1:]}


# ---- births


@given(st.lists(fitness_values, min_size=2, max_size=8), st.booleans(), st.integers(1, 4), st.integers(0, 99))
def test_a_generation_has_parents_of_the_last_one_and_fresh_ids(fitness, elitism, size, seed):
    args, parents = replace(ARGS, tournament_size=size, elitism=elitism), members(fitness)
    able = {member.id: member for member in parents if math.isfinite(member.fitness)}
    assume(able)
    births = train_population.evolve(args, parents, np.random.default_rng(seed))
    if elitism:
        elite, *children = births
        assert elite == able[elite.id]._replace(kind="elite")
        assert elite.fitness == max(member.fitness for member in able.values())
    else:
        children = births
    assert [child.id for child in children] == list(range(len(parents), 2 * len(parents) - elitism))
    for child in children:
        parent = able[child.parent]
        assert child.kind in MUTATIONS
        assert child.fitnesses == parent.fitnesses
        assert (child.genome == parent.genome) >= (child.kind in ("none", "parameters"))


def test_births_depend_on_the_seed_alone_and_have_seeds_of_their_own():
    parents = members([1.0, 2.0, 2.0, NAN, 0.0])
    births = [train_population.evolve(ARGS, parents, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert births[0] == births[1] != births[2]
    assert len({birth.seed for birth in births[0][1:]}) == 4
