"""A schedule is a straight line between its ends, and flat beyond them; a count passes powers of two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a3c_mp.maths.schedules import linear, passes_power_of_two


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


def test_powers_of_two_are_passed_ever_more_rarely():
    assert [n for n in range(1, 40) if passes_power_of_two(n - 1, n)] == [1, 2, 4, 8, 16, 32]
    assert passes_power_of_two(5, 9)
