"""Chapter 3 as a user runs it: the replay ratio, resume with and without the replay, determinism, kills."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = "train_apex.py"
SMALL = ["--num-actors", "2", "--num-envs", "4", "--replay-size", "8000", "--learning-starts", "400"]
CARTPOLE = ["--env-id", "CartPole-v1", "--stop-return", "501", *SMALL, "--replay-ratio", "4", "--batch-size", "32"]
"""never solved, the game has 500 steps"""
CURVES = {
    *("charts/episodic_return", "charts/sps", "charts/samples_per_second", "charts/policy_lag", "losses/total"),
    *("values/q", "values/target", "values/td_error", "replay/size", "replay/dropped_priorities"),
    *("memory/replay_gib", "memory/free_gib", "time/waiting", "time/drawing", "time/learning", "time/publishing"),
}


def scalars(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_saved_replay_goes_on(scripts):
    flags = ["--deterministic", "--save-replay", "--replay-size", "1000", "--total-steps", "1600"]  # it has come round
    first = scripts.run("a", *CARTPOLE, *flags, script=SCRIPT)
    assert first.code == 0, first.err
    assert first.summary["updates"] > 100
    resumed = scripts.finish(scripts.start(SCRIPT, "--resume", "runs/a", "--total-steps", "1760"), "a")
    assert resumed.code == 0, resumed.err
    assert "starts anew" not in resumed.out
    learned = resumed.summary["updates"] - first.summary["updates"]
    assert learned == 4 * (resumed.summary["steps"] - first.summary["steps"]) / 32, "it learns on at once"
    assert scalars(resumed.folder)["replay/size"][-1] > 600


def test_the_replay_ratio_is_held_and_a_resumed_run_refills_its_replay(scripts):
    done = scripts.run("r", *CARTPOLE, "--total-steps", "4000", script=SCRIPT)
    assert done.code == 0, done.err
    summary = done.summary
    start = 400 + 2 * 32  # transitions become ready n steps late, and a block of 32 steps at a time
    assert 32 * summary["updates"] == pytest.approx(4 * (summary["steps"] - start), abs=4 * 64)
    curves = scalars(done.folder)
    assert set(curves) >= CURVES
    resumed = scripts.finish(scripts.start(SCRIPT, "--resume", "runs/r", "--total-steps", "5000"), "r")
    assert resumed.code == 0, resumed.err
    assert "the replay is empty: learning goes on once it holds 400 transitions" in resumed.out
    learned = 32 * (resumed.summary["updates"] - summary["updates"])
    assert learned == pytest.approx(4 * (resumed.summary["steps"] - summary["steps"] - start), abs=4 * 64)


def test_two_learners_hold_the_ratio_together(scripts):
    done = scripts.run("r", *CARTPOLE, "--num-learners", "2", "--total-steps", "2000", script=SCRIPT)
    assert done.code == 0, done.err
    start = 400 + 4 * 32  # each learner has half of the transitions, and rounds its samples down to whole batches
    learned = 2 * 32 * done.summary["updates"]
    assert learned == pytest.approx(4 * (done.summary["steps"] - start), abs=4 * 128)
    actors = {row.split(",")[2] for row in (done.folder / "episodes.csv").read_text().splitlines()[1:]}
    assert actors == {"0", "1"}, "each learner's actor is told of under its own number"


def test_ddpg_trains_and_is_played(scripts):
    flags = ["--env-id", "Pendulum-v1", *SMALL, "--replay-ratio", "1", "--total-steps", "2000"]
    done = scripts.run("r", *flags, script=SCRIPT)
    assert done.code == 0, done.err
    assert json.loads((done.folder / "config.json").read_text())["algorithm"] == "apex_ddpg"
    assert {"losses/policy", "losses/value"} <= set(scalars(done.folder))
    played = scripts.finish(scripts.start("play.py", "runs/r", "--episodes", "3", "--epsilon", "0.1"), "r")
    assert played.code == 0, played.err
    assert "greedy and 10.0% random actions" in played.out
