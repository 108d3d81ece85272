"""Runs from beginning to end and what is made of them: resume, play.py, plot.py; actors as threads.

The same with real processes, as far as these matter, is in tests/process.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
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
from torch import nn

import play
from a3c_mp.algorithms import dqn
from a3c_mp.algorithms.ray_trainer import RayTrainer
from a3c_mp.cluster.fleet import Fleet
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError, Stopped, WorkerError
from a3c_mp.processes.workers import WorkerEvent
from a3c_mp.run import metrics

APEX_CURVES = {
    *("charts/episodic_return", "charts/sps", "charts/samples_per_second", "charts/policy_lag", "losses/total"),
    *("values/q", "values/target", "values/td_error", "replay/size", "replay/dropped_priorities"),
    *("memory/replay_gib", "memory/free_gib", "time/waiting", "time/drawing", "time/learning", "time/publishing"),
}


@pytest.mark.parametrize("chapter", [A3C_DATA, pytest.param(POPULATION, marks=pytest.mark.slow)], ids=row_id)
def test_resume_continues_counters_curves_and_settings(run_inline, monkeypatch, chapter):
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.05)  # so that either run has points of curves in its middle
    first = run_inline.train(chapter, "--total-steps", "3000", "--gamma", "0.97").summary
    second = run_inline(chapter.script, "--resume", "runs/r", "--total-steps", "9000")
    assert second.code == 0, second.err
    assert second.summary["steps"] >= 9000, "each environment has ended a game, which may take 500 steps"
    assert second.summary["updates"] > first["updates"] > 0
    assert second.summary["episodes"] > first["episodes"] > 0
    assert second.summary["wall_seconds"] > first["wall_seconds"]
    assert second.config["args"]["gamma"] == 0.97
    steps = episode_steps(second.folder)
    assert steps == sorted(steps)
    assert len(steps) == second.summary["episodes"], "no episode is missing or counted twice"
    for tag in ("charts/sps", "losses/value"):
        steps = [event.step for event in scalars(second.folder)[tag]]
        assert steps == sorted(set(steps)), "curves neither overlap nor go back"
        assert steps[0] < first["steps"] < steps[-1]


@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, IMPALA, TASK, RAY_IMPALA], ids=row_id)
def test_the_learning_rate_follows_the_steps_before_each_rollout(run_inline, monkeypatch, chapter):
    monkeypatch.setattr(metrics, "FLUSH_SECONDS", 0.0)
    rollout, anneal, total = 8 * 4, 480, 640
    schedule = ["--learning-rate", "1e-3", "--learning-rate-end", "1e-4", "--anneal-steps", str(anneal)]
    done = run_inline.train(chapter, "--total-steps", str(total), *schedule)
    curve = scalars(done.folder)["charts/learning_rate"]
    assert curve[-1].step == total
    left = [max(0.0, 1 - (event.step - rollout) / anneal) for event in curve]
    assert [event.value for event in curve] == pytest.approx([1e-4 + 9e-4 * share for share in left])


@pytest.mark.parametrize(("chapter", "loss"), [(APEX_DQN, "loss"), (RAY_DQN, "dqn_loss")], ids=row_id)
def test_the_replay_has_clipped_and_scaled_rewards(run_inline, monkeypatch, chapter, loss):
    """The reward of the environment's step t is t."""
    rewards, original = set(), getattr(chapter.module, loss)

    def recording(args, learner, batch, importance):
        rewards.update(batch.reward.tolist())
        return original(args, learner, batch, importance)

    monkeypatch.setattr(chapter.module, loss, recording)
    flags = ["--reward-clip", "--reward-scale", "0.5", "--n-step", "1", "--total-steps", "1000"]
    assert run_inline.train(chapter, "--env-id", "envs:Count-v0", *flags).code == 0
    assert rewards == {0.0, 0.5}


def test_forced_lag_is_part_of_the_policy_lag(run_inline):
    done = run_inline.train(IMPALA, "--force-lag", "3", "--total-steps", "3200", "--deterministic")
    lags = [event.value for event in scalars(done.folder)["charts/policy_lag"]]
    assert 3 <= lags[-1] <= 5


class Scaled(nn.Module):
    """A net with a constant that is in no checkpoint."""

    def __init__(self, obs_space, action_space):
        super().__init__()
        self.policy, self.value = nn.Linear(4, 2), nn.Linear(4, 1)
        self.register_buffer("constant", torch.ones(4), persistent=False)

    def forward(self, obs):
        assert self.constant.eq(1).all()
        return self.policy(self.constant * obs), self.value(obs).squeeze(-1)


def test_an_evaluated_net_has_the_constants_of_the_trained_one(run_inline):
    done = run_inline.train(A3C_DATA, "--net", f"{__name__}:{Scaled.__name__}", *EVALUATED, "--total-steps", "3000")
    assert done.code == 0, done.err
    assert done.evals["count"] > 0, done.log


@pytest.mark.parametrize("mode", [(), ("--async-mode",)])
def test_a_task_in_one_process_learns_is_timed_and_evaluated(run_inline, mode):
    flags = [*EVALUATED, "--print-per-step", "20", "--total-steps", "3000", *mode]
    done = run_inline.train(TASK, *flags)
    assert done.code == 0, done.err
    assert done.summary["steps"] >= 3000
    updates = done.config["args"]["update_epochs"] * done.summary["steps"] / 32  # a rollout is a batch of 8 * 4 samples
    assert done.summary["updates"] == updates
    assert done.evals["count"] >= 3
    curves = scalars(done.folder)
    assert TASK.metrics | {"time/task/collect", "time/task/evaluate", "eval/return_mean"} <= curves.keys()
    assert all(event.value > 0 for event in curves["time/task/learner/learn"])
    assert done.log.count("forward ms  backward ms") >= 3000 // 64 // 20
    table = done.log[done.log.index("forward ms") :]
    for name in ("collect", "learner", "  take", "  learn", "evaluate"):
        assert f"\n{name} " in table


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


def test_a_run_that_has_learned_nothing_acts_at_random_when_it_is_resumed_too(run_inline, monkeypatch):
    at_random, act = [], dqn.Policy.act

    def noted(policy, obs, mask, warm_up=False):
        at_random.append(warm_up)
        return act(policy, obs, mask, warm_up)

    monkeypatch.setattr(dqn.Policy, "act", noted)
    first = run_inline.train(APEX_DQN, "--total-steps", "200")
    assert all(at_random)
    for total_steps in (500, 4000, 4200):
        at_random.clear()
        resumed = run_inline("train_apex.py", "--resume", "runs/r", "--total-steps", str(total_steps))
        assert resumed.code == 0, resumed.err
        if total_steps == 500:
            assert resumed.summary["updates"] == first.summary["updates"] == 0, "less than 400 transitions each"
            assert all(at_random)
    assert resumed.summary["updates"] > 0
    assert not any(at_random), "though the replay is empty"


def test_a_resume_with_another_n_leaves_the_unfinished_transitions_behind(run_inline):
    assert run_inline.train(APEX_DQN, "--deterministic", "--save-replay", "--total-steps", "480").code == 0
    resumed = run_inline("train_apex.py", "--resume", "runs/r", "--total-steps", "800", "--n-step", "2")
    assert resumed.code == 0, resumed.err
    assert "the checkpoint has no actors that fit these settings" in resumed.out


def test_a_saved_replay_goes_on(run_inline):
    flags = ["--deterministic", "--save-replay", "--replay-size", "1000", "--total-steps", "1600"]  # it has come round
    first = run_inline.train(APEX_DQN, *flags)
    assert first.code == 0, first.err
    assert first.summary["updates"] > 100
    resumed = run_inline("train_apex.py", "--resume", "runs/r", "--total-steps", "1760")
    assert resumed.code == 0, resumed.err
    for words in ("starts empty", "the replay is empty", "start new games"):
        assert words not in resumed.out
    learned = resumed.summary["updates"] - first.summary["updates"]
    assert learned == 4 * (resumed.summary["steps"] - first.summary["steps"]) / 32, "it learns on at once"
    assert scalars(resumed.folder)["replay/size"][-1].value > 600


def test_a_saved_replay_of_other_sizes_names_the_flag_that_leaves_it_out(run_inline):
    first = run_inline.train(APEX_DQN, "--save-replay", "--replay-size", "8000", "--total-steps", "600")
    assert first.code == 0, first.err
    larger = ["--resume", "runs/r", "--replay-size", "9000", "--total-steps", "700"]
    with pytest.raises(ConfigError, match=r"does not fit these settings: the saved replay has .*--no-save-replay"):
        run_inline("train_apex.py", *larger)
    assert run_inline("train_apex.py", *larger, "--no-save-replay").code == 0


@pytest.mark.parametrize("chapter", [RAY_IMPALA, RAY_DQN], ids=row_id)
def test_a_run_on_ray_is_saved_before_its_actors_end(run_inline, monkeypatch, chapter):
    """Where the node ends too, Ray may end the trainer in the rest."""
    saved, end = [], Fleet.__exit__

    def noted(fleet, *exc):
        saved.append((run_inline.folder() / "summary.json").exists())
        return end(fleet, *exc)

    monkeypatch.setattr(Fleet, "__exit__", noted)
    done = run_inline.train(chapter, "--total-steps", "600")
    assert done.code == 0, done.err
    assert saved == [True]
    assert done.state["steps"] == done.summary["steps"]


@pytest.mark.parametrize(("signal", "code"), [(None, 1), ("SIGTERM", 143)])
def test_a_run_on_ray_that_is_stuck_says_how_it_ended(run_inline, monkeypatch, signal, code):
    ended = []

    def stuck(trainer):
        trainer.run.exit_reason = signal
        ended.append(trainer.session.watchdog.on_stuck("the head is lost"))
        ended.append((run_inline.folder() / "run.log").read_text())
        trainer.run.report_end = lambda error: None  # a real process has ended by now
        raise WorkerError("the head is lost")

    monkeypatch.setattr(RayTrainer, "publish", stuck)
    done = run_inline.train(RAY_IMPALA, "--total-steps", "6000")
    assert ended[0] == code
    assert ("ERROR error: the head is lost" in ended[1]) == (code == 1)
    assert "continue with " in ended[1]
    assert done.summary["exit_reason"] == (signal or "error: the head is lost")
    assert done.state["steps"] == done.summary["steps"] > 0


@pytest.mark.parametrize(("learning_starts", "warned"), [("400", 0), ("2000", 1)])
def test_too_few_actors_to_fill_the_replay_are_warned_of_once(run_inline, monkeypatch, learning_starts, warned):
    """Actor 1 of two has no place. The lanes of actor 0 can hold 400 transitions, but not 2,000."""
    start = Fleet._start

    def start_first(fleet, number):
        if number == 0:
            start(fleet, number)
        else:
            fleet.actors[number].is_waiting = True
            fleet.on_restart(WorkerEvent(number, "actor 1 waits", replaced=False, left=True))

    monkeypatch.setattr(Fleet, "_start", start_first)
    sizes = ["--num-actors", "2", "--num-shards", "1", "--replay-size", "4000", "--learning-starts", learning_starts]
    done = run_inline.train(RAY_DQN, "--total-steps", "2400", *sizes)
    assert done.code == 0, done.err
    log = (done.folder / "run.log").read_text()
    warning = f"the replay of 1 of 2 actors may never hold {int(learning_starts):,} transitions (--learning-starts)"
    assert log.count(warning) == warned
    assert (done.summary["updates"] == 0) == bool(warned)


def test_ddpg_trains_and_is_played(run_inline):
    done = run_inline.train(APEX_DDPG, "--total-steps", "1000")
    assert done.code == 0, done.err
    assert done.config["algorithm"] == "apex_ddpg"
    assert {"losses/policy", "losses/value"} <= set(scalars(done.folder))
    played = run_inline("play.py", "runs/r", "--episodes", "3")
    assert played.code == 0, played.err
    assert "greedy actions" in played.out


def test_an_evaluation_that_is_stopped_tells_the_scores_so_far(run_inline, monkeypatch, capsys):
    def interrupted(*_, **options):
        yield from (Episode(9.0, 9), Episode(11.0, 11))
        raise Stopped(130)

    assert run_inline.train(A3C_DATA, "--total-steps", "200").code == 0
    monkeypatch.setattr(play, "play_episodes", interrupted)
    with pytest.raises(Stopped):
        run_inline("play.py", "runs/r", "--episodes", "3")
    out = capsys.readouterr().out
    assert "stopped after 2 of 3 games" in out
    assert "raw scores: 9 11\nmean 10.00" in out


@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, IMPALA, TASK, RAY_IMPALA], ids=row_id)
def test_the_net_of_a_run_is_the_one_that_is_played(run_inline, chapter, register, monkeypatch):
    image = {"observation_space": Box(0, 255, (1, 36, 36), np.uint8), "obs": np.ones((1, 36, 36), np.uint8)}
    register(changes=image | {"rest": (1.0, True, False, {})})
    flags = ["--env-id", "Custom-v0", "--net", "a3c", "--total-steps", "32"]
    done = run_inline.train(chapter, *flags)
    assert done.code == 0, done.err
    assert done.state["net"]["torso.0.0.weight"].shape == (16, 1, 8, 8)
    played = run_inline("play.py", "runs/r", "--episodes", "2")
    assert played.code == 0, played.err
    monkeypatch.chdir(done.folder / "checkpoints")
    newest = max(Path().glob("step_*.pt"))
    assert play.find_checkpoint(newest) == (done.folder.absolute(), newest), "a bare name is one of the current folder"


@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, IMPALA, TASK, RAY_IMPALA], ids=row_id)
def test_a_net_of_the_users_own_is_trained_resumed_and_played(run_inline, chapter, monkeypatch):
    example = (ROOT / "docs/nets.md").read_text().split("```python\n")[1].split("```")[0]
    Path("my_nets.py").write_text(example)  # in the current folder
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = run_inline.train(chapter, "--net", "my_nets:small", "--total-steps", "200")
    assert done.code == 0, done.err
    assert done.state["net"]["body.policy.weight"].shape == (2, 32)
    assert run_inline.resume(chapter).code == 0
    played = run_inline("play.py", "runs/r", "--episodes", "2")
    assert played.code == 0, played.err


def test_hidden_layers_have_the_sizes_that_were_asked_for(run_inline):
    done = run_inline.train(A3C_DATA, "--hidden", "24", "16", "8", "--total-steps", "64")
    assert [tuple(done.state["net"][f"policy.{i}.weight"].shape) for i in (0, 2, 4, 6)] == [
        (24, 4),
        (16, 24),
        (8, 16),
        (2, 8),
    ]
    assert run_inline.resume(A3C_DATA).code == 0
    assert run_inline("play.py", "runs/r", "--episodes", "2").code == 0


@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, IMPALA, TASK, RAY_IMPALA], ids=row_id)
def test_continuous_actions_are_learned_and_played(run_inline, chapter):
    done = run_inline.train(chapter, "--env-id", "Pendulum-v1", "--noise-steps", "3", "--total-steps", "64")
    assert done.code == 0, done.err
    assert done.summary["updates"] > 0 == done.not_finite
    assert done.state["net"]["head.log_std"].any(), "the deviation is learned"
    for flags in ([], ["--sampled"]):
        played = run_inline("play.py", "runs/r", "--episodes", "1", *flags)
        assert played.code == 0, played.err


@pytest.mark.parametrize("space", [MultiDiscrete([2, 4]), MultiBinary(3)], ids=str)
def test_several_choices_at_a_time_are_learned_and_played(run_inline, register, space):
    taken = []

    def step(self, action):
        taken.append(action)
        return self.obs, 1.0, True, False, {}

    register(changes={"action_space": space, "step": step})
    done = run_inline.train(A3C_DATA, "--env-id", "Custom-v0", "--total-steps", "64")
    assert done.code == 0, done.err
    assert run_inline("play.py", "runs/r", "--episodes", "3").code == 0
    assert len(taken) >= 64 + 3
    assert all(space.contains(action) for action in taken)


def test_play_and_plot_read_a_run(run_inline, tmp_path):
    run_inline.train(A3C_DATA, "--env-id", "MountainCar-v0", "--total-steps", "64", name="short")  # games of 200 steps
    assert run_inline.train(A3C_GRAD, "--total-steps", "4000").code == 0

    played = run_inline("play.py", "runs/r", "--episodes", "5", "--sampled")
    assert played.code == 0, played.err
    scores = next(line for line in played.out.splitlines() if line.startswith("raw scores:")).split()[2:]
    assert len(scores) == 5
    again = run_inline("play.py", "runs/r", "--episodes", "5", "--sampled")
    assert again.out == played.out, "a seed fixes the evaluation"

    plotted = run_inline("plot.py", "runs/r", "runs/short", "docs", "--out", "cart.png")
    assert plotted.code == 0, plotted.err
    assert "skipped: runs=runs/short: no game has ended in this run" in plotted.err
    assert "skipped: runs=docs: not a run folder" in plotted.err
    assert (tmp_path / "cart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", ["onnx", "safetensors"])
def test_play_exports_a_policy_with_what_it_is_of(run_inline, tmp_path, suffix):
    onnxruntime = pytest.importorskip("onnxruntime") if suffix == "onnx" else pytest.importorskip("safetensors")
    done = run_inline.train(A3C_DATA, "--total-steps", "200")
    exported = run_inline("play.py", "runs/r", "--export", f"policy.{suffix}")
    assert exported.code == 0, exported.err
    assert exported.out.startswith(f"policy.{suffix}: a3c_data on CartPole-v1, {done.summary['steps']:,} steps, ")
    path = tmp_path / f"policy.{suffix}"
    if suffix == "onnx":
        metadata = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    else:
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")  # of the header, which is JSON
        metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    assert (json.loads(metadata["algorithm"]), json.loads(metadata["env_id"])) == ("a3c_data", "CartPole-v1")
    assert json.loads(metadata["action_space"]) == "Discrete(2)"


def test_play_records_a_game_of_breakout(run_inline, tmp_path):
    imageio = pytest.importorskip("imageio.v2")
    run_inline.train(A3C_DATA, "--env-id", "BreakoutNoFrameskip-v4", "--total-steps", "64")
    done = run_inline("play.py", "runs/r", "--episodes", "1", "--sampled", "--video", "game.mp4")
    assert done.code == 0, done.err
    cut = run_inline("play.py", "runs/r", "--episodes", "1", "--max-steps", "7", "--video", "cut.mp4")
    assert "cut.mp4: a game of 7 steps" in cut.out
    with imageio.get_reader(tmp_path / "game.mp4") as video:
        frame = video.get_data(50)
        assert video.get_meta_data()["duration"] > 5
    assert frame.shape == (420, 320, 3)
    assert frame.std() > 10, "there is something to see"
