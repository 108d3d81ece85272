"""Chapter 5 in its deterministic modes: one hash for all of them."""

import pytest
from harness import A3C_DATA, TASK

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("collectors", "seed"), [(2, 1), *(pytest.param(*case, marks=SLOW) for case in [(1, 1), (1, 2), (2, 2)])]
)
def test_a_deterministic_run_has_the_weights_of_chapter_1_in_every_mode(run_inline, collectors, seed):
    flags = ["--deterministic", "--total-steps", "1000", "--num-actors", str(collectors), "--seed", str(seed)]
    expected = run_inline.train(A3C_DATA, *flags, name="chapter-1").summary
    assert expected["updates"] > 20
    for name, mode in {"alone": ["--standalone"], "nodes": []}.items():
        done = run_inline.train(TASK, *flags, *mode, name=name, workers=None)
        assert done.code == 0, done.out + done.err
        for figure in ("steps", "episodes", "mean_return_100", "policy_lag_mean", "weights_sha256"):
            assert done.summary[figure] == expected[figure], (name, figure)
