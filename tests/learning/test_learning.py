"""Every chapter learns. Seeded and deterministic, so a failure is the code's and not the dice's."""

import pytest


@pytest.mark.timeout(300)
def test_a3c_data_solves_cartpole(scripts):
    done = scripts.run("r", "--env-id", "CartPole-v1", "--deterministic", "--seed", "1", "--total-steps", "200000")
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary
    assert done.summary["mean_return_100"] >= 475


@pytest.mark.timeout(300)
def test_apex_dqn_solves_cartpole(scripts):
    flags = ["--env-id", "CartPole-v0", "--deterministic", "--seed", "1", "--total-steps", "60000"]
    done = scripts.run("r", *flags, script="train_apex.py")
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary
    assert done.summary["mean_return_100"] >= 195


@pytest.mark.timeout(300)
def test_apex_ddpg_swings_the_pendulum_up(scripts):
    flags = ["--env-id", "Pendulum-v1", "--deterministic", "--seed", "1", "--total-steps", "10000"]
    done = scripts.run("r", *flags, script="train_apex.py")
    assert done.code == 0, done.err
    played = scripts.finish(scripts.start("play.py", "runs/r", "--episodes", "20", "--num-envs", "20"), "r")
    mean = float(played.out.split("\nmean ")[1].split(",")[0])
    assert mean >= -200, played.out
