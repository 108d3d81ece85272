"""The sum tree agrees with a plain list of numbers, however it is changed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a3c_mp.replay.sum_tree import FANOUT, TOP, SumTree

SIZES = [1, 2, FANOUT - 1, FANOUT + 1, FANOUT**2 + 1, TOP, TOP + 1, 5000, FANOUT * TOP + 1]


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(SIZES), st.integers(0, 2**32 - 1))
def test_it_is_a_list_with_sums(capacity, seed):
    rng = np.random.default_rng(seed)
    tree, leaves = SumTree(capacity), np.zeros(capacity)
    for _ in range(4):
        where = rng.integers(capacity, size=rng.integers(1, 40))
        values = rng.integers(0, 5, size=len(where)).astype(float)  # sums of whole numbers are exact
        tree[where] = values
        for i, value in zip(where, values, strict=True):
            leaves[i] = value
        np.testing.assert_array_equal(tree.leaves, leaves)
        assert tree.total == leaves.sum()
        if tree.total:
            sums = rng.random(20) * tree.total
            sums[:2] = 0.0, tree.total - 0.5
            edges = np.cumsum(leaves)  # of whole numbers, so exact
            assert tree.find(sums).tolist() == [int(np.flatnonzero(edges > s)[0]) for s in sums]


def test_a_leaf_of_zero_is_never_found_not_even_by_rounding():
    rng = np.random.default_rng(0)
    tree = SumTree(3000)
    filled = rng.choice(2000, 700, replace=False) + 500
    for _ in range(50):
        tree[filled] = rng.random(700) * 10.0 ** rng.integers(-9, 6, 700)
        total = tree.total
        sums = np.concatenate([rng.random(500) * total, [0.0, np.nextafter(total, 0.0), total, total * (1 + 1e-12)]])
        assert tree[tree.find(sums)].min() > 0


def test_rounding_errors_do_not_add_up():
    rng = np.random.default_rng(0)
    tree = SumTree(1000)
    for _ in range(300):
        tree[rng.integers(1000, size=50)] = rng.random(50) * 1e12
    tree[np.arange(1000)] = 1e-3
    assert tree.total == pytest.approx(1.0, rel=1e-12)
    tree[np.arange(1000)] = 0.0
    assert tree.total == 0.0
