"""Every chapter learns. Seeded and deterministic, so a failure is the code's and not the dice's."""

import pytest


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["train_a3c_data.py", "train_a3c_grad.py"])
def test_a_chapter_solves_cartpole(scripts, script):
    flags = ["--env-id", "CartPole-v1", "--deterministic", "--seed", "1", "--total-steps", "200000"]
    done = scripts.finish(scripts.train("r", *flags, script=script), "r", timeout=280)
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary
    assert done.summary["mean_return_100"] >= 475


@pytest.mark.timeout(300)
def test_impala_solves_cartpole(scripts):
    flags = ["--env-id", "CartPole-v0", "--deterministic", "--seed", "1", "--total-steps", "100000"]
    done = scripts.run("r", *flags, script="train_impala.py")
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary
    assert done.summary["mean_return_100"] >= 195
