"""A schedule is a straight line between its ends, and flat beyond them; a count passes powers of two."""

import numpy as np
import pytest

from a3c_mp.maths.schedules import linear, passes_power_of_two


@pytest.mark.parametrize(("start", "end"), [(0.4, 1.0), (1e-3, 0.0), (-7.0, -7.0)])
def test_linear_is_a_line_that_stays_at_its_ends(start, end):
    steps = range(-50, 250, 10)
    expected = np.interp(steps, [0, 200], [start, end])
    assert [linear(start, end, step, 200) for step in steps] == pytest.approx(expected)


def test_powers_of_two_are_passed_ever_more_rarely():
    assert [n for n in range(1, 40) if passes_power_of_two(n - 1, n)] == [1, 2, 4, 8, 16, 32]
    assert passes_power_of_two(5, 9)
