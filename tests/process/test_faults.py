"""Every chapter among mishaps: actors that die in every way, environments that raise, a parent that is killed, signals.

What each fault costs is promised in docs/reliability.md.
"""

import os
import re
import signal
import time
from dataclasses import replace
from datetime import datetime

import pytest
from envs import MISHAPS
from harness import (
    A3C_DATA,
    A3C_GRAD,
    APEX_DQN,
    BUSY_SECONDS,
    IMPALA,
    POPULATION,
    SPAWNING,
    TASK,
    Scripts,
    family_of,
    row_id,
    scalars,
    still_alive,
)
from test_ends import actors_with_helpers, closed, left_of

from a3c_mp.run.checkpoint import list_checkpoints

HANG_SECONDS = 4
SLOW = pytest.mark.slow
ONE_IN_CI = [A3C_DATA, *(pytest.param(chapter, marks=SLOW) for chapter in (*SPAWNING[1:], POPULATION))]
WAYS = {
    "killed at start": "was killed by SIGKILL",
    "killed in a step": "was killed by SIGKILL",  # a step is written to the slot as soon as it is taken
    "killed while sending": "was killed by SIGKILL",
    "raised": "raised an exception",
    "hung": rf"sent no heartbeat for {HANG_SECONDS} s and was killed \(--hang-seconds\)",
    "stopped": rf"sent no heartbeat for {HANG_SECONDS} s and was killed \(--hang-seconds\)",
}
"""what can happen to an actor -> what the log says"""
SOME = [
    (A3C_DATA, ("killed while sending", "hung")),
    (A3C_GRAD, ("raised",)),
    (APEX_DQN, ("stopped",)),
    (IMPALA, ("killed at start",)),
    (TASK, ("killed in a step", "raised")),
    pytest.param(POPULATION, ("killed at start", "killed in a step", "raised"), marks=SLOW),
]
IN_EVERY_WAY = [pytest.param(chapter, tuple(WAYS), marks=SLOW) for chapter in SPAWNING]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("chapter", "mishaps"), [*SOME, *IN_EVERY_WAY], ids=row_id)
def test_an_actor_that_is_lost_is_named_and_replaced_until_the_budget_is_spent(
    run_inline, monkeypatch, chapter, mishaps
):
    """Actor 0 and its successors meet these mishaps, then one more, for which there is no budget left."""
    monkeypatch.setenv(MISHAPS, ",".join([*mishaps, "killed at last"]))
    restarts = len(mishaps)
    flags = ["--max-restarts", str(restarts), "--hang-seconds", str(HANG_SECONDS)]
    done = run_inline.train(chapter, "--env-id", "envs:Mishap-v0", *flags, workers=None)
    messages = [line for line in done.log.splitlines() if re.search(r"; restart \d", line)]
    for number, (line, mishap) in enumerate(zip(messages, mishaps, strict=True), start=1):
        end = rf"restart {number} of {restarts}(; rebuilt to where it was)?$"  # which a population always is
        assert re.search(rf"{chapter.actor} 0 \(pid \d+\) {WAYS[mishap]}; {end}", line)
        happened = (run_inline.runs_dir / mishap).stat().st_mtime
        logged = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if WAYS[mishap].startswith("sent no heartbeat"):
            assert HANG_SECONDS - 1 < logged - happened < HANG_SECONDS + BUSY_SECONDS
            seconds = [event.wall_time for event in scalars(done.folder)["charts/sps"] if event.value > 0]
            assert any(happened + 1 < s < logged - 1 for s in seconds), "the other actor goes on meanwhile"
        else:
            assert logged - happened < BUSY_SECONDS
    if "raised" in mishaps:
        assert done.log.count("ArithmeticError: the pole caught fire") == 1
        assert re.search(r"\(raised by step\(\) of envs:Mishap-v0, seed \d+, after \d+ steps\)", done.log)
    assert done.code == 1
    assert f"was killed by SIGKILL; restart budget of {restarts} spent" in done.out
    assert done.summary["worker_restarts"] == restarts
    assert f"the last checkpoint is {done.checkpoints[0].relative_to(run_inline.runs_dir)}" in done.out
    assert "Traceback" not in done.err


@pytest.mark.parametrize("chapter", ONE_IN_CI, ids=row_id)
def test_where_every_actor_fails_at_start_the_run_ends_at_once_with_one_traceback(run_inline, chapter):
    done = run_inline.train(chapter, "--env-id", "envs:Unmakeable-v0", workers=None)
    since = (run_inline.runs_dir / "failed").stat().st_mtime
    assert time.time() - since < BUSY_SECONDS
    assert done.code == 1
    assert (done.out + done.err).count("Traceback") == 1
    assert "ArithmeticError: no coin in the slot" in done.out
    assert "(raised by the constructor of envs:Unmakeable-v0, seed " in done.out
    assert done.summary["worker_restarts"] == 0
    assert done.summary["exit_reason"].startswith(f"error: {chapter.actor} ")


@pytest.mark.parametrize(
    "chapter", [A3C_DATA, *(pytest.param(row, marks=SLOW) for row in (APEX_DQN, TASK))], ids=row_id
)
def test_environments_whose_steps_together_take_longer_than_the_limit_do_not_hang(run_inline, chapter):
    """Six of them, one after another: 1.5 s."""
    flags = ["--num-actors", "1", "--num-envs", "6", "--hang-seconds", "1.2", "--max-restarts", "0"]
    learning = ["--block-length", "2"] if chapter is APEX_DQN else ["--unroll-length", "2", "--batch-size", "12"]
    done = run_inline.train(chapter, "--env-id", "envs:Slow-v0", *flags, *learning, "--total-steps", "12", workers=None)
    assert done.code == 0, done.log
    assert done.summary["steps"] >= 12


HELPER = "envs:Helper-v0"
IMPALA_WITH_HELPERS, TASK_WITH_HELPERS = replace(IMPALA, env_id=HELPER), replace(TASK, env_id=HELPER)
"""their environments have helper processes, which must not outlive the run"""


def work_of(chapter):
    """Flags by which as few processes as there can be work; IMPALA has two learners, for the faults that need them."""
    return {IMPALA: chapter.two_learners, POPULATION: []}.get(chapter, ["--num-actors", "1"])


under_way = Scripts.wait_for_game


def starting_up(scripts, trainer):
    scripts.wait_for("r", "run.log:seed 1", trainer)
    scripts.wait_until(lambda: family_of(trainer.pid), trainer)  # they are importing torch


def saving(scripts, trainer):
    folder = scripts.runs_dir / "runs/r/checkpoints"
    scripts.wait_until(lambda: list_checkpoints(folder), trainer)
    scripts.wait_until(lambda: list(folder.glob("*.tmp")), trainer, pause=0.0)


@pytest.mark.parametrize(
    ("chapter", "moment"),
    [
        (A3C_DATA, starting_up),
        (IMPALA_WITH_HELPERS, under_way),
        *(pytest.param(chapter, under_way, marks=SLOW) for chapter in (A3C_DATA, A3C_GRAD, APEX_DQN, POPULATION, TASK)),
        *(pytest.param(chapter, starting_up, marks=SLOW) for chapter in (A3C_GRAD, APEX_DQN, IMPALA, TASK, POPULATION)),
    ],
    ids=row_id,
)
def test_a_parent_that_is_killed_leaves_no_process_and_no_shared_memory(scripts, chapter, moment):
    before = scripts.files()
    trainer = scripts.train(chapter, *(chapter.two_learners or work_of(chapter)))
    moment(scripts, trainer)
    family = family_of(trainer.pid)
    helpers = actors_with_helpers(scripts)
    assert bool(helpers) == (chapter.env_id == HELPER)
    trainer.kill()
    killed = time.monotonic()
    assert family
    while still_alive(family) and time.monotonic() < killed + BUSY_SECONDS:
        time.sleep(0.01)
    assert not still_alive(family)
    assert not left_of(scripts)
    # The other learner may lose the first one, and end its actors as usual, just before it is killed itself.
    assert not helpers or closed(scripts) < helpers
    trainer.communicate()
    assert not scripts.left(before)


INT, TERM, USR1, XCPU = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU
FEW = [  # every pair of two of the other choices occurs
    (TASK_WITH_HELPERS, INT, "group", 1, under_way),
    (IMPALA, TERM, "parent", 2, under_way),
    (A3C_DATA, INT, "parent", 1, saving),
    (APEX_DQN, TERM, "group", 2, saving),
    (A3C_GRAD, INT, "group", 2, starting_up),
    (TASK, TERM, "parent", 1, starting_up),
    (A3C_DATA, USR1, "group", 2, under_way),
]
ALL = [(chapter, USR1, "group", 1, starting_up) for chapter in (*SPAWNING, POPULATION)]
ALL += [
    (chapter, signum, target, times, moment)
    for chapter in (*SPAWNING, POPULATION)
    for signum in (INT, TERM, XCPU)
    for target in ("group", "parent")
    for times in (1, 2)
    for moment in (starting_up, under_way, saving)
]


@pytest.mark.parametrize(
    ("chapter", "signum", "target", "times", "moment"),
    [*FEW, *(pytest.param(*case, marks=SLOW) for case in ALL if case not in FEW)],
    ids=row_id,
)
def test_signals_end_a_run_with_checkpoint_and_summary(scripts, chapter, signum, target, times, moment):
    before = scripts.files()
    pace = ["--checkpoint-seconds", "0.1" if moment is saving else "60"]
    trainer = scripts.train(chapter, *work_of(chapter), *pace, start_new_session=True)
    moment(scripts, trainer)
    family, actors = family_of(trainer.pid), actors_with_helpers(scripts)
    assert bool(actors) == (chapter.env_id == HELPER)
    done = ended_by(scripts, trainer, signum, target, times)
    assert "Traceback" not in done.out + done.err
    assert "restart" not in done.out
    assert done.checkpoints or moment is starting_up
    assert done.summary["steps"] > 0 or moment is starting_up
    assert not still_alive(family)
    assert not left_of(scripts)
    assert closed(scripts) == actors
    assert not scripts.left(before)


def test_a_task_in_one_process_ends_in_the_middle_of_a_slow_rollout_or_with_its_environment(scripts, monkeypatch):
    flags = "--standalone", "--unroll-length", "1000", "--env-id"
    trainer = scripts.train(TASK, *flags, "envs:Slow-v0")
    scripts.wait_for("r", "run.log:the run ends at", trainer)
    time.sleep(1.0)
    ended_by(scripts, trainer, TERM)
    monkeypatch.setenv(MISHAPS, "left")
    done = scripts.run(TASK, *flags, "envs:Mishap-v0", name="s")
    assert (done.code, done.summary["exit_reason"]) == (1, "error: an environment ended the process, with sys.exit(0)")


def ended_by(scripts, process, signum, target="parent", times=1):
    """Send a signal to a run, so many times; see that it ends soon, and that it says why."""
    asked = time.monotonic()
    for _ in range(times):
        (os.killpg if target == "group" else os.kill)(process.pid, signum)
        time.sleep(0.2 * (times - 1))  # two signals at one instant are one
    done = scripts.finish(process, "r")
    assert time.monotonic() - asked < BUSY_SECONDS
    assert done.code == 128 + signum, done.out + done.err
    assert "play.py" in process.args[1] or done.summary["exit_reason"] == signum.name
    return done


@SLOW
@pytest.mark.parametrize("chapter", [c for c in SPAWNING if c.learners], ids=row_id)
def test_what_is_not_finite_is_skipped_by_all_learners_alike(scripts, chapter):
    flags = [*chapter.two_learners, "--no-reward-clip", "--total-steps", "6000"]
    done = scripts.run(chapter, "--env-id", "envs:NanReward-v0", *flags)
    assert done.code == 0, done.out + done.err
    assert done.not_finite >= 2, "it happens to the actors of both learners"
    assert "the reward is nan in envs:NanReward-v0" in done.out
    assert "contains NaN or inf; skipped" in done.out
    assert done.summary["updates"] > 10


@pytest.mark.parametrize(("signum", "times"), [(INT, 2), pytest.param(TERM, 1, marks=SLOW)])
def test_signals_end_an_evaluation_without_an_error(scripts, run_inline, monkeypatch, signum, times):
    assert run_inline.train(A3C_DATA, "--total-steps", "200").code == 0
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    player = scripts.start("play.py", "runs/r", "--episodes", "1000000", start_new_session=True)
    assert "steps of training" in player.stdout.readline()
    assert ended_by(scripts, player, signum, "group", times).err == ""
