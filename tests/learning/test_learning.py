"""Every chapter learns. Seeded and deterministic, so a failure is the code's and not the dice's."""

import pytest
from harness import APEX_DDPG, CHAPTERS, RAY_DQN, RAY_IMPALA, TASK, row_id


@pytest.mark.timeout(300)
@pytest.mark.parametrize(  # chapter 5 has the bits of chapter 1, train_ray.py those of chapter 4
    "chapter",
    [pytest.param(c, marks=pytest.mark.slow) if c in (TASK, RAY_IMPALA, RAY_DQN) else c for c in CHAPTERS],
    ids=row_id,
)
def test_a_chapter_learns_cartpole(run_inline, chapter):
    """From 20 or so, the mean return of the last 100 games that chance reaches, to 150."""
    flags = ["--algo", "dqn"] if chapter is RAY_DQN else []
    flags += ["--env-id", "CartPole-v0", "--deterministic", "--seed", "1", "--stop-return", "150"]
    flags += ["--total-steps", "100000"]
    done = run_inline(chapter.script, *flags, workers=None)
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


@pytest.mark.timeout(300)
def test_apex_ddpg_swings_the_pendulum_up(run_inline):
    flags = ["--env-id", "Pendulum-v1", "--deterministic", "--seed", "1", "--total-steps", "10000"]
    done = run_inline(APEX_DDPG.script, *flags, workers=None)
    assert done.code == 0, done.err
    played = run_inline("play.py", "runs/r", "--episodes", "20", "--num-envs", "20")
    mean = float(played.out.split("\nmean ")[1].split(",")[0])
    assert mean >= -200, played.out
