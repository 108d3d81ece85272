"""The scripts as a user runs them, in processes of their own: what they leave, resume, refusals, several learners."""

import json
import math
import multiprocessing
import platform
import signal
import subprocess
import sys
import time

import pytest
from harness import (
    A3C_DATA,
    A3C_GRAD,
    APEX_DQN,
    IMPALA,
    RAY_IMPALA,
    ROOT,
    TASK,
    actors_of,
    episode_steps,
    row_id,
    scalars,
    still_alive,
    with_changes,
)

from a3c_mp.errors import ConfigError
from a3c_mp.processes.supervisor import START_SECONDS
from a3c_mp.run.episode_log import read_episodes

CURVES_OF_LEARNING = {
    *("charts/sps", "charts/policy_lag", "charts/learning_rate", "policy/entropy", "policy/approx_kl"),
    *("losses/policy", "losses/value", "losses/total"),
    *("values/advantage", "values/value", "values/target", "values/explained_variance"),
    *("time/waiting", "time/learning", "time/publishing"),
}
CURVES = CURVES_OF_LEARNING | {"charts/episodic_return", "charts/mean_return_100", "charts/episodic_length"}


@pytest.mark.parametrize(
    "chapter", [A3C_DATA, *(pytest.param(c, marks=pytest.mark.slow) for c in (A3C_GRAD, TASK, RAY_IMPALA))], ids=row_id
)
def test_a_run_leaves_what_it_promises(scripts, chapter):
    done = scripts.run(chapter, "--total-steps", "2000")
    assert done.code == 0, done.err
    summary = done.summary
    assert summary["exit_reason"] == "total_steps"
    assert summary["steps"] == summary["frames"] >= 2000
    assert summary["episodes"] == len(episode_steps(done.folder)) > 20
    assert not summary["solved"]
    assert summary["worker_restarts"] == 0
    assert done.config["args"]["num_envs"] == 4
    curves = scalars(done.folder)
    assert set(curves) >= CURVES | chapter.metrics
    assert 0 < len(curves["charts/episodic_return"]) <= summary["episodes"]
    parts = zip(*(curves[f"time/{part}"] for part in ("waiting", "learning", "publishing")), strict=True)
    shares = [sum(event.value for event in at_once) for at_once in parts]  # the last ones are of the shutdown too
    assert 0.5 < max(shares) <= 1.01, "the learner's time is accounted for"
    assert "--total-steps reached" in done.log
    assert len(done.checkpoints) == 2, "after the first round, and at the end"


def test_impala_with_a_memory_and_two_learners_is_trained_and_played(run_inline):
    flags = ["--lstm", *IMPALA.two_learners, "--replay-proportion", "0.5", "--total-steps", "1500"]
    done = run_inline.train(IMPALA, *flags, workers=None)
    assert done.code == 0, done.err
    assert set(scalars(done.folder)) >= CURVES_OF_LEARNING | {"values/rho", "values/rho_clipped"}
    played = run_inline("play.py", "runs/r", "--episodes", "3")
    assert played.code == 0, played.err


def test_two_learners_hold_the_replay_ratio_together(run_inline):
    done = run_inline.train(APEX_DQN, *APEX_DQN.two_learners, "--total-steps", "2000", workers=None)
    assert done.code == 0, done.err
    start = 400 + 4 * 32  # each learner has half of the transitions, and rounds its samples down to whole batches
    assert 2 * 32 * done.summary["updates"] == pytest.approx(4 * (done.summary["steps"] - start), abs=4 * 128)
    actors = {row.split(",")[2] for row in (done.folder / "episodes.csv").read_text().splitlines()[1:]}
    assert actors == {"0", "1"}, "each learner's actor is told of under its own number"


def test_impala_with_a_lost_learner_ends_with_a_checkpoint_to_go_on_from(run_inline, each_round):
    orphans, killed = [], []

    def kill_learner(run):
        if not killed and 1 in {episode.actor for episode in read_episodes(run_inline.folder() / "episodes.csv")}:
            learner = next(child for child in multiprocessing.active_children() if child.name == "learner-1")
            orphans.extend(actors_of(learner.pid))
            learner.kill()
            killed.append((learner.pid, time.monotonic()))

    each_round(kill_learner)
    done = run_inline.train(IMPALA, *IMPALA.two_learners, workers=None)
    [(pid, since)] = killed
    assert time.monotonic() - since < START_SECONDS / 2, "it is not waited for like a frozen one"
    assert done.code == 1
    assert f"learner 1 (pid {pid}) was killed by SIGKILL" in done.out
    newest = done.checkpoints[0]
    command = f"{sys.orig_argv[0]} train_impala.py --resume runs/r"
    assert f"the last checkpoint is {newest.relative_to(run_inline.runs_dir)}; continue with {command}\n" in done.out
    assert len(orphans) == 1
    assert not still_alive(orphans)
    assert done.state["steps"] == done.summary["steps"]


def test_a_second_run_in_the_same_folder_is_refused(scripts, run_inline):
    trainer = scripts.train(TASK, "--standalone")
    scripts.wait_for("r", "config.json:args", trainer)
    trainer.send_signal(signal.SIGSTOP)  # its work is not needed
    with pytest.raises(ConfigError, match=f"in use by process {trainer.pid} on {platform.node()}; wait for it"):
        run_inline.resume(TASK)
    trainer.send_signal(signal.SIGCONT)
    trainer.send_signal(signal.SIGINT)
    assert scripts.finish(trainer, "r").code == 130


def test_bad_input_of_a_real_process(scripts):
    done = scripts.resume(A3C_DATA, name="nothing")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: resume=runs/nothing: there is no run in this folder; name a run folder, runs/<name>\n"


def test_a_run_goes_on_when_the_reader_of_its_output_goes(scripts):
    trainer = scripts.train(TASK, "--standalone", "--total-steps", "2000")
    assert "in runs/r" in trainer.stdout.readline()
    trainer.stdout.close()
    assert trainer.stderr.read() == ""
    assert trainer.wait(60) == 0
    summary = json.loads((scripts.runs_dir / "runs/r/summary.json").read_text())
    assert (summary["exit_reason"], summary["worker_restarts"]) == ("total_steps", 0)
    assert "--total-steps reached after" in (scripts.runs_dir / "runs/r/run.log").read_text(), (
        "what nobody read is kept"
    )


@pytest.mark.parametrize("script", ["train_a3c_data.py", "play.py", "plot.py"])
def test_a_python_without_the_packages_gets_one_line(script):
    done = subprocess.run([sys.executable, "-ES", ROOT / script, "x"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this Python has no torch and no gymnasium and no rich; . .venv/bin/activate")
    assert done.stderr.count("\n") == 1


def test_help_into_a_pipe_that_closes_ends_without_a_word(scripts):
    helper = scripts.start("train_a3c_data.py", "--help")
    helper.stdout.close()
    assert helper.stderr.read() == ""
    assert helper.wait(60) == 0


def test_the_example_of_an_algorithm_can_be_trained_and_resumed(run_inline, monkeypatch, tmp_path):
    """That of docs/algorithm.md, whose changes are made to chapter 1."""
    (tmp_path / "train_reward.py").write_text(with_changes(A3C_DATA.script, "algorithm.md"))
    monkeypatch.syspath_prepend(tmp_path)
    few = ["--num-envs", "2", "--num-actors", "1", "--batch-size", "32", "--total-steps", "200"]
    done = run_inline("train_reward.py", "--prediction-coef", "0.3", *few)
    assert done.code == 0, done.err
    assert (done.config["algorithm"], done.config["args"]["prediction_coef"]) == ("reward", 0.3)
    losses = [event.value for event in scalars(done.folder)["losses/prediction"]]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    before = done.state["extra"]["predict"]["weight"]
    done = run_inline("train_reward.py", "--resume", "runs/r", "--total-steps", "400")
    assert done.code == 0, done.err
    assert "it starts empty" not in done.log
    assert (done.state["extra"]["predict"]["weight"] - before).abs().max() > 0, "it is trained"
