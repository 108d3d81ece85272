"""The evaluator's process: what becomes of a run whose evaluator is killed, is frozen or raises; several learners."""

import multiprocessing
import os
import re
import signal
import time

import psutil
import pytest
from harness import A3C_DATA, APEX_DQN, BUSY_SECONDS, EVALUATED, IMPALA, TASK, family_of, row_id, still_alive

from a3c_mp.processes import supervisor
from a3c_mp.run.checkpoint import sha256_of_weights

SLOW = pytest.mark.slow
FEW = ["--num-actors", "1", "--num-envs", "2", "--batch-size", "16"]
HANG_SECONDS = 4
EITHER = pytest.mark.parametrize("chapter", [A3C_DATA, pytest.param(TASK, marks=SLOW)], ids=row_id)
"""an evaluator that is a process of the run, and one that is a node"""


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    """A run looks after its evaluator in each round, so that it sees as many kills as there are."""
    monkeypatch.setattr("a3c_mp.run.evaluate.LOOK_SECONDS", 0.0)


def evaluator():
    """The evaluator of a run in this process; None while there is none."""
    children = multiprocessing.active_children()
    return next((child for child in children if child.name == "evaluator"), None)


def kill_evaluators(each_round, times):
    """Kill each evaluator as soon as it is there, so many of them; returns their process ids as they come."""
    killed = []

    def kill(run):
        process = evaluator() if len(killed) < times else None
        if process is not None and process.pid not in killed:
            process.kill()
            killed.append(process.pid)

    each_round(kill)
    return killed


@EITHER
def test_a_killed_evaluator_is_named_replaced_and_changes_no_bit_of_the_training(run_inline, each_round, chapter):
    flags = [*FEW, "--deterministic", "--total-steps", "1500"]
    without = run_inline.train(chapter, *flags, name="without")
    killed = kill_evaluators(each_round, times=3)
    done = run_inline.train(chapter, *flags, *EVALUATED, workers=None)
    assert done.code == 0, done.out + done.err
    assert len(killed) == done.summary["evaluator_restarts"] == 3
    for number, pid in enumerate(killed, start=1):
        assert f"evaluator (pid {pid}) was killed by SIGKILL; restart {number} of 5" in done.log
    assert done.evals["count"] >= 1, "the last one has played"
    assert sha256_of_weights(done.load(done.best)["net"]) == done.evals["best_weights_sha256"]
    assert done.summary["weights_sha256"] == without.summary["weights_sha256"]
    assert done.summary["worker_restarts"] == 0


@EITHER
def test_training_goes_on_beside_a_frozen_evaluator_which_then_plays_the_same_weights_again(
    run_inline, each_round, monkeypatch, chapter
):
    monkeypatch.setattr(supervisor, "START_SECONDS", 6.0)  # it may be stopped while it makes its environments
    frozen, pauses, last = [], [], []

    def freeze(run):
        pauses.extend(time.monotonic() - before for before in last[-1:])
        last.append(time.monotonic())
        process = evaluator()
        if not frozen and run.progress.evals.finished == 1 and run.progress.evals.running and process:
            os.kill(process.pid, signal.SIGSTOP)
            frozen.append((process.pid, run.progress.evals.running))
        if run.progress.evals.finished == 2 and run.exit_reason is None:
            os.kill(os.getpid(), signal.SIGTERM)

    each_round(freeze)
    done = run_inline.train(chapter, *FEW, *EVALUATED, "--hang-seconds", str(HANG_SECONDS), workers=None)
    assert done.code == 143, done.out + done.err
    [(pid, steps)] = frozen
    slow = "took longer than 6 s to start or to make an environment"
    silent = rf"(sent no heartbeat for {HANG_SECONDS} s|{slow}) and was killed"
    assert re.search(rf"evaluator \(pid {pid}\) {silent} .*; restart 1 of 5", done.log)
    assert re.search(rf"evaluation 2: .*; weights of {steps:,} steps, 10 games", done.log)
    assert len(pauses) > 10
    assert max(pauses) < HANG_SECONDS - 1, "the learner does not wait for it"
    assert evaluator() is None


@EITHER
def test_a_run_whose_evaluator_is_killed_too_often_or_raises_goes_on_without(run_inline, each_round, chapter):
    flags = [*FEW, *EVALUATED, "--max-restarts", "1", "--total-steps", "1500"]
    raising = run_inline.train(chapter, "--env-id", "envs:Unplayable-v0", *flags, name="raising", workers=None)
    assert raising.log.count("ArithmeticError: no coin for another player") == 1
    killed = kill_evaluators(each_round, times=2)
    done = run_inline.train(chapter, *flags, workers=None)
    reason = f"evaluator (pid {killed[1]}) was killed by SIGKILL; restart budget of 1 spent"
    for run, why in ((raising, "evaluator (pid "), (done, reason)):
        assert f"no further evaluation in this run, training continues: {why}" in run.log
        assert (run.code, run.summary["exit_reason"]) == (0, "total_steps")
        assert (run.evals["count"], run.summary["worker_restarts"]) == (0, 0)


@EITHER
@pytest.mark.slow
def test_a_run_that_evaluation_is_to_end_fails_where_that_cannot_be(run_inline, chapter):
    flags = ["--env-id", "envs:Unplayable-v0", *EVALUATED, "--stop-eval-return", "5"]
    done = run_inline.train(chapter, *flags, workers=None)
    assert done.code == 1
    assert re.match(r"error: evaluator \(pid \d+\) failed before its first result:", done.summary["exit_reason"])
    assert done.checkpoints


@pytest.mark.parametrize("chapter", [IMPALA, *(pytest.param(c, marks=SLOW) for c in (APEX_DQN, TASK))], ids=row_id)
@pytest.mark.parametrize("how", [(), pytest.param(("--deterministic",), marks=pytest.mark.slow)])
def test_learners_stop_together_once_an_evaluation_has_passed(run_inline, chapter, how):
    flags = [*chapter.two_learners, *EVALUATED, "--stop-eval-return", "5", "--total-steps", "1000000", *how]
    done = run_inline.train(chapter, *flags, workers=None)
    assert (done.code, done.summary["exit_reason"]) == (0, "solved"), done.out + done.err
    assert sha256_of_weights(done.load(done.best)["net"]) == done.evals["weights_sha256"]


@SLOW
@pytest.mark.parametrize("target", ["group", "parent"])
def test_a_signal_ends_the_wait_of_a_deterministic_run_for_its_evaluation(scripts, target):
    flags = ["--eval-every", "100", "--eval-episodes", "10000", "--deterministic", "--stop-eval-return", "501"]
    flags += ["--num-actors", "1", "--checkpoint-steps", "192"]
    trainer = scripts.train(A3C_DATA, *flags, start_new_session=True)
    scripts.wait_for("r", "checkpoints/step_000000000192.json:steps", trainer)  # in the next round, 200 are reached
    process = psutil.Process(trainer.pid)
    scripts.wait_until(lambda: process.cpu_percent(interval=0.5) < 20, trainer)  # it waits there
    family, asked = family_of(trainer.pid), time.monotonic()
    assert len(family) == 2
    (os.killpg if target == "group" else os.kill)(trainer.pid, signal.SIGTERM)
    done = scripts.finish(trainer, "r")
    assert time.monotonic() - asked < BUSY_SECONDS
    assert (done.code, done.summary["exit_reason"]) == (143, "SIGTERM")
    assert "Traceback" not in done.out + done.err
    assert "restart" not in done.out
    assert "steps since step_000000000192 are not saved" in done.out
    assert (done.state["steps"], done.summary["steps"]) == (192, 224)
    assert not still_alive(family)
