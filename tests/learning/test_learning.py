"""Every chapter learns. Seeded and deterministic, so a failure is the code's and not the dice's."""

import pytest
from harness import (
    A3C_DATA,
    A3C_GRAD,
    APEX_DQN,
    CHAPTERS,
    IMPALA,
    POPULATION,
    POPULATION_PPO,
    RAY_DQN,
    RAY_IMPALA,
    TASK,
    row_id,
)

AS_ANOTHER = (TASK, RAY_IMPALA, RAY_DQN, POPULATION_PPO)
"""chapter 5 has the bits of chapter 1, train_ray.py those of chapter 4; PPO in a population has chapter 1's loss"""
FLAGS = {
    RAY_DQN: ["--algo", "dqn"],
    POPULATION: ["--population", "2"],
    POPULATION_PPO: ["--algo", "ppo", "--population", "2", "--generation-steps", "8000"],
}

ON_POLICY = ["--num-envs", "8", "--learning-rate", "1e-3"]
SHORT = ["--num-envs", "8", "--learning-rate", "3e-3", "--unroll-length", "16"]
FOR_MASKS = {
    A3C_DATA: [*ON_POLICY, "--batch-size", "64", "--update-epochs", "4"],
    A3C_GRAD: [*SHORT, "--batch-size", "64"],
    APEX_DQN: ["--learning-rate", "5e-4", "--learning-starts", "1000", "--replay-size", "20000"],
    IMPALA: [*ON_POLICY, "--replay-proportion", "0.875", "--no-normalize-advantages", "--reward-scale", "0.1"],
}
ANY_UNITS = ["--num-actors", "1", "--gamma", "0", "--learning-rate", "3e-3", "--log-std-init", "-1"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(chapter, marks=pytest.mark.slow) if chapter in AS_ANOTHER else chapter
        for chapter in (*CHAPTERS, POPULATION, POPULATION_PPO)
    ],
    ids=row_id,
)
def test_a_chapter_learns_cartpole(run_inline, chapter):
    """From 20 or so, the mean return of the last 100 games that chance reaches, to 100 of 200."""
    flags = ["--env-id", "CartPole-v0", "--deterministic", "--seed", "1", "--stop-return", "100"]
    done = run_inline(chapter.script, *FLAGS.get(chapter, []), *flags, "--total-steps", "100000", workers=None)
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "how", [["--deterministic"], ["--standalone", "--deterministic"], ["--standalone", "--async-mode"]]
)
def test_a_task_solves_cartpole_in_every_mode(scripts, how):
    """To 475. Threads of --async-mode have no fixed order, so its margin is the number of steps."""
    flags = ["--env-id", "CartPole-v1", "--seed", "1", "--total-steps", "400000", *how]
    done = scripts.finish(scripts.start(TASK.script, "--run-name", "r", *flags), "r", timeout=880)
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gaussian_policy_drives_up_the_mountain(run_inline):
    """Noise that lasts reaches the goal from the start, with a mean of 87 or so; without noise, the policy must."""
    flags = ["--env-id", "MountainCarContinuous-v0", "--deterministic", "--seed", "1", "--total-steps", "40000"]
    done = run_inline(A3C_DATA.script, *flags, "--stop-return", "101", workers=None)
    assert done.code == 0, done.err
    played = run_inline("play.py", "runs/r", "--episodes", "20", "--num-envs", "20")
    mean = float(played.out.split("\nmean ")[1].split(",")[0])
    assert mean >= 90, played.out


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("chapter", "env_id"),
    [
        (A3C_DATA, "envs:Wide-v0"),
        (IMPALA, "envs:Narrow-v0"),
        pytest.param(A3C_DATA, "envs:Narrow-v0", marks=pytest.mark.slow),
        pytest.param(IMPALA, "envs:Wide-v0", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_gaussian_policy_learns_actions_of_any_units(run_inline, chapter, env_id):
    """From 6 or so to 12 of 16, which takes actions that follow the target; their middle earns 8."""
    flags = ["--env-id", env_id, "--deterministic", "--seed", "1", "--stop-return", "12", "--total-steps", "15000"]
    done = run_inline(chapter.script, *flags, *ANY_UNITS, "--unroll-length", "32", workers=None)
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary


@pytest.mark.timeout(300)
def test_an_image_and_a_vector_beside_it_are_learned_together(run_inline):
    """From 8 to 14 of 16; either part alone, as a blind policy, earns 8."""
    flags = ["--env-id", "envs:Beside-v0", "--deterministic", "--seed", "1", "--stop-return", "14", "--gamma", "0"]
    done = run_inline(A3C_DATA.script, *flags, "--num-envs", "8", "--total-steps", "30000", workers=None)
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary
    played = run_inline("play.py", "runs/r", "--episodes", "8")
    assert float(played.out.split("\nmean ")[1].split(",")[0]) >= 14, played.out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, APEX_DQN, IMPALA], ids=row_id)
def test_a_chapter_learns_with_masks(run_inline, chapter):
    """Half of the actions end the game at once; chance earns 8 of 32."""
    flags = ["--env-id", "envs:Masked-v0", "--deterministic", "--seed", "1", "--stop-return", "28", *FOR_MASKS[chapter]]
    done = run_inline(chapter.script, *flags, "--total-steps", "40000", workers=None)
    assert done.code == 0, done.err
    assert done.summary["solved"], done.summary


@pytest.mark.timeout(300)
@pytest.mark.parametrize("algo", [pytest.param("ddpg", marks=pytest.mark.slow), "td3"])
def test_apex_swings_the_pendulum_up(run_inline, algo):
    flags = ["--env-id", "Pendulum-v1", "--algo", algo, "--deterministic", "--seed", "1", "--total-steps", "12000"]
    done = run_inline(APEX_DQN.script, *flags, workers=None)
    assert done.code == 0, done.err
    played = run_inline("play.py", "runs/r", "--episodes", "20", "--num-envs", "20")
    mean = float(played.out.split("\nmean ")[1].split(",")[0])
    assert mean >= -200, played.out
