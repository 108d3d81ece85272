"""Runs from beginning to end and what is made of them: resume, play.py, plot.py; actors as threads.

The same with real processes, as far as these matter, is in tests/process.
"""

import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from envs import CountEnv
from gymnasium.spaces import Box
from harness import (
    A3C_DATA,
    A3C_GRAD,
    APEX_DDPG,
    APEX_DQN,
    EVALUATED,
    IMPALA,
    POPULATION,
    RAY_DQN,
    RAY_IMPALA,
    ROOT,
    TASK,
    episode_steps,
    row_id,
    scalars,
)

import play
from a3c_mp.api import policy
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError
from a3c_mp.run import metrics
from a3c_mp.run.episode_log import read_episodes
from a3c_mp.run.run import Run

ACTOR_CRITICS = pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, IMPALA, TASK, RAY_IMPALA], ids=row_id)

APEX_CURVES = {
    *("charts/episodic_return", "charts/sps", "charts/samples_per_second", "charts/policy_lag", "losses/total"),
    *("values/q", "values/target", "values/td_error", "replay/size", "replay/dropped_priorities"),
    *("memory/replay_gib", "memory/free_gib", "time/waiting", "time/drawing", "time/learning", "time/publishing"),
}


@pytest.mark.parametrize("chapter", [A3C_DATA, pytest.param(POPULATION, marks=pytest.mark.slow)], ids=row_id)
def test_resume_continues_counters_curves_and_settings(run_inline, monkeypatch, chapter):
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.2)  # so that either run has points of curves in its middle
    first = run_inline.train(chapter, "--total-steps", "3000", "--gamma", "0.97").summary
    second = run_inline(chapter.script, "--resume", "runs/r", "--total-steps", "9000")
    assert second.code == 0, second.err
    assert second.summary["steps"] >= 9000, "each environment has ended a game, which may take 500 steps"
    assert second.summary["updates"] > first["updates"] > 0
    assert second.summary["episodes"] > first["episodes"] > 0
    assert second.summary["wall_seconds"] > first["wall_seconds"]
    assert second.config["args"]["gamma"] == 0.97
    assert "changed: --total-steps 9000 (3000 before)" in second.log
    steps = episode_steps(second.folder)
    assert steps == sorted(steps)
    assert len(steps) == second.summary["episodes"], "no episode is missing or counted twice"
    for tag in ("charts/sps", "losses/value"):
        steps = [event.step for event in scalars(second.folder)[tag]]
        assert steps == sorted(set(steps)), "curves neither overlap nor go back"
        assert steps[0] < first["steps"] < steps[-1]


@pytest.mark.parametrize("chapter", [A3C_DATA, RAY_DQN], ids=row_id)
def test_one_command_starts_a_run_goes_on_with_it_and_leaves_it_once_it_has_ended(run_inline, chapter):
    starts = [run_inline.train(chapter, "--resume-or-start", "--total-steps", n) for n in ("600", "1200", "1200")]
    assert [done.code for done in starts] == [0, 0, 0]
    assert "resumed from runs/r/checkpoints/step_" in starts[1].out
    assert "has ended: --total-steps reached" in starts[2].out
    assert [start["args"]["total_steps"] for start in starts[2].config["starts"]] == [600, 1200]


def test_an_environment_that_leaves_the_current_folder_moves_neither_run_nor_resume_nor_export(run_inline, tmp_path):
    flags = ["--env-id", f"envs:Wandering-v0?where={tmp_path / 'elsewhere'}", "--total-steps", "600"]
    (tmp_path / "elsewhere").mkdir()
    done = run_inline.train(A3C_DATA, *flags)
    assert (done.code, done.checkpoints[0].exists()) == (0, True)
    for command in (
        [A3C_DATA.script, "--resume", "runs/r", "--total-steps", "1200"],
        ["play.py", "runs/r", "--export", "p.safetensors"],
    ):
        os.chdir(tmp_path)
        assert run_inline(*command).code == 0
    assert done.summary["steps"] >= 1200
    assert (tmp_path / "p.safetensors").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


@ACTOR_CRITICS
def test_the_learning_rate_follows_the_steps_before_each_rollout(run_inline, monkeypatch, chapter):
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.0)
    rollout, anneal, total = 8 * 4, 480, 640
    schedule = ["--learning-rate", "1e-3", "--learning-rate-end", "1e-4", "--anneal-steps", str(anneal)]
    schedule += ["--optimizer", "rmsprop"] if chapter is IMPALA else []
    done = run_inline.train(chapter, "--total-steps", str(total), *schedule)
    curve = scalars(done.folder)["charts/learning_rate"]
    assert curve[-1].step == total
    left = [max(0.0, 1 - (event.step - rollout) / anneal) for event in curve]
    assert [event.value for event in curve] == pytest.approx([1e-4 + 9e-4 * share for share in left])


def test_the_learning_rate_of_chapter_3_follows_the_steps(run_inline, monkeypatch):
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.0)
    schedule = ["--learning-rate", "1e-3", "--learning-rate-end", "1e-4"]
    curve = scalars(run_inline.train(APEX_DQN, "--total-steps", "640", *schedule).folder)["charts/learning_rate"]
    assert curve[-1].step == 640
    assert [event.value for event in curve] == pytest.approx([1e-3 - 9e-4 * event.step / 640 for event in curve])


@pytest.mark.parametrize("chapter", [A3C_DATA, APEX_DQN, IMPALA], ids=row_id)
def test_an_error_in_the_learning_ends_the_round_without_what_follows_it(run_inline, monkeypatch, chapter):
    """The checkpoint has the weights so far, and no thread draws from the replay while it is saved."""
    finish, end_round, step, rounds = Run.finish, Run.end_round, chapter.module.gradient_step, []

    def failing(*args):
        if len(rounds) == 40:
            raise ArithmeticError("the gradient caught fire")
        return step(*args)

    def checked(run, error):
        assert len(rounds) == 40
        assert "prefetch" not in [thread.name for thread in threading.enumerate()]
        finish(run, error)

    monkeypatch.setattr(chapter.module, "gradient_step", failing)
    monkeypatch.setattr(Run, "end_round", lambda run: (rounds.append(run.updates), end_round(run)))
    monkeypatch.setattr(Run, "finish", checked)
    with pytest.raises(ArithmeticError):
        run_inline.train(chapter, "--total-steps", "100000")
    summary = json.loads((run_inline.folder() / "summary.json").read_text())
    assert summary["updates"] >= rounds[-1] > 0


@pytest.mark.parametrize("mode", [(), ("--async-mode",)])
def test_a_task_in_one_process_learns_is_timed_and_evaluated(run_inline, mode):
    done = run_inline.train(TASK, *EVALUATED, "--print-per-step", "20", "--total-steps", "3000", *mode)
    assert done.code == 0, done.err
    updates = done.config["args"]["update_epochs"] * done.summary["steps"] / 32  # a rollout is a batch of 8 * 4 samples
    assert done.summary["updates"] == updates
    assert done.evals["count"] >= 3
    assert TASK.metrics | {"time/task/collect", "time/task/evaluate", "eval/return_mean"} <= scalars(done.folder).keys()
    assert done.log.count("mean ms  share") >= 3000 // 64 // 20


def test_the_replay_ratio_is_held_and_a_resumed_run_refills_its_replay(run_inline):
    done = run_inline.train(APEX_DQN, "--total-steps", "4000")
    assert done.code == 0, done.err
    summary = done.summary
    start = 400 + 2 * 32  # transitions become ready n steps late, and a block of 32 steps at a time
    assert 32 * summary["updates"] == pytest.approx(4 * (summary["steps"] - start), abs=4 * 64)
    assert set(scalars(done.folder)) >= APEX_CURVES
    resumed = run_inline("train_apex.py", "--resume", "runs/r", "--total-steps", "5000")
    assert resumed.code == 0, resumed.err
    assert "the replay is empty: learning starts once it holds 400 transitions" in resumed.out
    learned = 32 * (resumed.summary["updates"] - summary["updates"])
    assert learned == pytest.approx(4 * (resumed.summary["steps"] - summary["steps"] - start), abs=4 * 64)


@pytest.mark.parametrize(
    ("chapter", "why"), [(APEX_DQN, "without --save-replay"), (RAY_DQN, "replay shards are not saved:")], ids=row_id
)
def test_a_deterministic_run_without_its_replay_warns_that_it_will_differ(run_inline, chapter, why):
    assert run_inline.train(chapter, "--deterministic", "--total-steps", "480").code == 0
    resumed = run_inline(chapter.script, "--resume", "runs/r", "--total-steps", "800")
    assert resumed.code == 0, resumed.err
    assert f"{why} a resumed run differs from one that was never interrupted" in resumed.out


@pytest.mark.parametrize("chapter", [A3C_DATA, APEX_DQN, POPULATION], ids=row_id)
def test_small_rewards_after_a_large_one_are_part_of_the_return(run_inline, register, chapter):
    def step(self, action):
        obs, reward, *others = CountEnv.step(self, action)
        return obs, -0.01 if reward else 1e6, *others

    evaluated = [] if chapter is POPULATION else ["--eval-every", "400", "--eval-episodes", "2"]
    flags = ["--env-id", register("Custom-v0", CountEnv, {"step": step}), "--stop-return", "none", *evaluated]
    done = run_inline.train(chapter, *flags, "--total-steps", "400")
    assert {row.episode_return for row in read_episodes(done.folder / "episodes.csv")} == {999_999.94}
    assert done.evals["best_return_mean"] == pytest.approx(999_999.94, abs=1e-6)


def test_learning_starts_where_the_replay_cannot_hold_enough_transitions(run_inline, register):
    """Truncated games of one step take two rows for each transition: some 330 fill the 800 rows."""
    env_id = register(changes={"rest": (1.0, False, True, {})})
    flags = ["--env-id", env_id, "--stop-return", "none", "--replay-size", "800", "--learning-starts", "390"]
    done = run_inline.train(APEX_DQN, *flags, "--total-steps", "1200")
    assert (done.code, done.summary["exit_reason"]) == (0, "total_steps"), done.log
    assert done.summary["updates"] == pytest.approx((1200 - 800) * 4 / 32, abs=16)


def test_a_smaller_replay_than_the_saved_one_is_refused_and_no_older_checkpoint_taken(run_inline):
    flags = ["--checkpoint-steps", "400", "--total-steps", "800"]
    run_inline.train(APEX_DQN, *flags)
    saved = run_inline(APEX_DQN.script, "--resume", "runs/r", "--save-replay", "--total-steps", "1200")
    assert len(saved.checkpoints) > 1, "the older ones hold no replay, and would fit"
    with pytest.raises(ConfigError, match=r"the saved replay has .*--no-save-replay"):
        run_inline(APEX_DQN.script, "--resume", "runs/r", "--replay-size", "4000", "--total-steps", "1600")


@pytest.fixture
def trained_and_played(run_inline):
    """Trains a chapter and plays, greedily and as it acts; returns the weights."""

    def check(chapter, *flags):
        done = run_inline.train(chapter, "--total-steps", "64", *flags)
        assert done.code == 0, done.err
        assert done.summary["updates"] > 0 == done.not_finite
        for more in ([], ["--sampled"]):
            played = run_inline("play.py", "runs/r", "--episodes", "1", *more)
            assert played.code == 0, played.err
        return done.state["net"]

    return check


@ACTOR_CRITICS
def test_the_net_of_a_run_is_the_one_that_is_played(trained_and_played, chapter, register):
    image = {"observation_space": Box(0, 255, (1, 36, 36), np.uint8), "obs": np.ones((1, 36, 36), np.uint8)}
    env_id = register(changes=image | {"rest": (1.0, True, False, {})})
    weights = trained_and_played(chapter, "--env-id", env_id, "--net", "a3c")
    assert weights["torso.0.0.weight"].shape == (16, 1, 8, 8)


@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, IMPALA, TASK, RAY_IMPALA, APEX_DQN], ids=row_id)
def test_a_net_of_the_users_own_is_trained_resumed_and_played(run_inline, trained_and_played, chapter, monkeypatch):
    example = (ROOT / "docs/nets.md").read_text().split("```python\n")[1].split("```")[0]
    Path("my_nets.py").write_text(example)  # in the current folder
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name, weight, starts = "small", "policy", []
    if chapter is APEX_DQN:
        name, weight, starts = "small_q", "3", ["--learning-starts", "16", "--total-steps", "256"]
    weights = trained_and_played(chapter, "--net", f"my_nets:{name}", *starts)
    assert weights[f"body.{weight}.weight"].shape == (2, 32)
    assert run_inline.resume(chapter).code == 0


@ACTOR_CRITICS
def test_continuous_actions_are_learned_and_played(trained_and_played, chapter):
    weights = trained_and_played(chapter, "--env-id", "Pendulum-v1", "--noise-steps", "3")
    assert weights["head.log_std"].any(), "the deviation is learned"


def test_play_and_plot_read_a_run(run_inline, monkeypatch):
    run_inline.train(A3C_DATA, "--env-id", "MountainCar-v0", "--total-steps", "64", name="short")  # games of 200 steps
    done = run_inline.train(A3C_GRAD, "--hidden", "24", "16", "--total-steps", "4000")
    assert done.code == 0, done.err
    played, again = (run_inline("play.py", "runs/r", "--episodes", "5", "--sampled") for _ in range(2))
    assert played.code == 0, played.err
    scores = next(line for line in played.out.splitlines() if line.startswith("raw scores:")).split()[2:]
    assert len(scores) == 5
    assert again.out == played.out, "a seed fixes the evaluation"

    plotted = run_inline("plot.py", "runs/r", "runs/short", "docs", "--out", "cart.png")
    assert plotted.code == 0, plotted.err
    assert "skipped: runs=runs/short: no game has ended in this run" in plotted.err
    assert "skipped: runs=docs: not a run folder" in plotted.err
    assert Path("cart.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.chdir(done.folder / "checkpoints")
    newest = max(Path().glob("step_*.pt"))
    assert policy.find_checkpoint(newest) == (done.folder.absolute(), newest), (
        "a bare name is one of the current folder"
    )


@pytest.mark.parametrize(
    ("score", "flags", "is_named"),
    [(234.0, {}, True), (1100.0, {}, False), (234.0, {"sampled": True}, False), (234.0, {"max_steps": 9}, False)],
)
def test_play_names_sampled_where_greedy_play_is_much_worse(score, flags, is_named, monkeypatch, capsys):
    run = policy.TrainedRun(Path("r"), "a3c_data", None, "CartPole-v1", None, {"returns": 50 * [1000.0, 1364.0]})
    monkeypatch.setattr(play, "play_episodes", lambda *args: iter(20 * [Episode(score, 9)]))
    play.play(run, None, play.Args(Path("r"), **flags))
    assert ("--sampled plays" in capsys.readouterr().out) == is_named


@pytest.mark.parametrize("chapter", [A3C_DATA, APEX_DQN, APEX_DDPG, POPULATION], ids=row_id)
def test_an_exported_policy_plays_as_the_run_does(run_inline, chapter):
    pytest.importorskip("safetensors")
    done = run_inline.train(chapter, "--total-steps", "200")
    config = done.folder / "config.json"  # chapter 7 runs algorithms with names of their own
    config.write_text(config.read_text().replace('"algo": "dqn"', '"algo": "own"'))
    exported = run_inline("play.py", "runs/r", "--export", "policy.safetensors")
    assert exported.code == 0, exported.err
    assert exported.out.startswith(
        f"policy.safetensors: {done.config['algorithm']} on {done.config['args']['env_id']}, "
    )
    played = [run_inline("play.py", run, "--episodes", "3").out for run in ("runs/r", "policy.safetensors")]
    first, again = ([line for line in out.split("\n") if "raw scores:" in line] for out in played)
    assert first == again
    assert len(first) == 1


def test_play_records_a_game_of_breakout(run_inline):
    imageio = pytest.importorskip("imageio.v2")
    run_inline.train(A3C_DATA, "--env-id", "BreakoutNoFrameskip-v4", "--total-steps", "64")
    cut = run_inline("play.py", "runs/r", "--episodes", "1", "--max-steps", "60", "--video", "cut.mp4")
    assert "cut.mp4: a game of 60 steps" in cut.out
    with imageio.get_reader("cut.mp4") as video:
        frame = video.get_data(50)
    assert frame.shape == (420, 320, 3)
    assert frame.std() > 10, "there is something to see"
