"""What is said of observations that stay out of the running moments, and how often."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from a3c_mp.nets.obs_norm import Moments, ObsNorm
from a3c_mp.run.guard import merge_moments, update_norm

HUGE = torch.tensor([[3e38], [0.0]])
"""observations whose variance is no float32"""


@pytest.fixture
def run():
    """As much of a `Run` as counts and logs."""
    lines = []
    return SimpleNamespace(counters=Counter(), log=SimpleNamespace(warning=lines.append), lines=lines)


def test_clipped_values_are_counted_and_logged_whenever_their_number_has_doubled(run):
    norm = ObsNorm((1,), image=False)
    update_norm(run, norm, torch.randn(1000, 1, generator=torch.Generator().manual_seed(0)), "actor 3")
    assert run.counters == {"obs_values_clipped": 0, "obs_moments_not_finite": 0}
    for _ in range(9):
        update_norm(run, norm, HUGE, "actor 3")
    assert run.counters == {"obs_values_clipped": 9, "obs_moments_not_finite": 0}
    text = "observations from actor 3: 1 values more than 100 standard deviations from the mean; clipped ({} so far)"
    assert run.lines == [text.format(total) for total in (1, 2, 4, 8)]


def test_moments_that_are_not_finite_are_counted_and_logged_and_the_norm_stays_as_it_was(run):
    norm = ObsNorm((1,), image=False)
    for _ in range(5):
        merge_moments(run, norm, Moments.of(HUGE), 0, "actor 3")
    assert run.counters == {"obs_values_clipped": 0, "obs_moments_not_finite": 5}
    assert [line.split(";")[0] for line in run.lines] == [
        "observations from actor 3: mean or variance is not finite"
    ] * 3
    assert norm.count == 0
    assert norm(torch.ones(1, 1)) == 1


def test_images_have_no_outliers_to_be_counted(run):
    norm = ObsNorm((1,), image=True)
    update_norm(run, norm, torch.zeros(9, 1, dtype=torch.uint8), "actor 3")
    update_norm(run, norm, torch.full((9, 1), 255, dtype=torch.uint8), "actor 3")
    assert not run.counters
    assert norm.count == 18
