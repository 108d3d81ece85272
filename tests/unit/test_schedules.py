"""A schedule is a straight line between its ends, and flat beyond them; a count passes the multiples of a period."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3c_mp.maths.schedules import linear, passes_multiple


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(1, 10**9))
def test_linear_starts_at_start_and_stays_at_end(start, end, total):
    assert linear(start, end, 0, total) == start
    assert linear(start, end, -5, total) == start
    assert linear(start, end, total, total) == pytest.approx(end, abs=1e-9)
    assert linear(start, end, 2 * total, total) == linear(start, end, total, total)


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(1, 10**9), st.data())
def test_equal_steps_make_equal_differences(start, end, total, data):
    step = data.draw(st.integers(0, total))
    assert linear(start, end, step, total) * total == pytest.approx(start * (total - step) + end * step, abs=1e-3)


def test_half_way_it_is_half_way():
    assert linear(4e-4, 0.0, 500, 1000) == pytest.approx(2e-4)


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 120))
def test_a_multiple_is_passed_if_it_lies_after_the_count_before_and_not_after_the_other(period, before, increment):
    multiples = [n for n in range(before + 1, before + increment + 1) if n % period == 0]
    assert passes_multiple(before, before + increment, period) == bool(multiples)
