"""Chapter 2 with an actor that is killed at the worst moment: its gradient is written, the slot not yet sent."""

import json
import os
import signal
from pathlib import Path

import pytest
from inline import InlineWorkers

import train_a3c_grad
from a3c_mp.processes.channel import WorkerChannel
from a3c_mp.processes.workers import Workers


def killed_before_it_sends(channel: WorkerChannel, *args):
    """The chapter's actor 1, killed once; its successor is rebuilt to the beginning of the lost rollout."""
    if channel.worker == 1 and not Path("killed").exists():
        channel.send = lambda slot, payload: (Path("killed").touch(), os.kill(os.getpid(), signal.SIGKILL))
    train_a3c_grad.actor(channel, *args)


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(name, actor, workers):
        flags = ["--env-id", "CartPole-v1", "--num-envs", "4", "--unroll-length", "8", "--batch-size", "32"]
        flags += ["--deterministic", "--total-steps", "1280", "--runs-dir", str(tmp_path), "--run-name", name]
        monkeypatch.setattr("sys.argv", ["", *flags])
        monkeypatch.setattr(train_a3c_grad, "actor", actor)
        monkeypatch.setattr("a3c_mp.run.actors.Workers", workers)
        assert train_a3c_grad.main() == 0
        return json.loads((tmp_path / name / "summary.json").read_text())

    return run


def test_an_actor_killed_between_gradient_and_message_leaves_no_trace_in_the_weights(train):
    """The run ends with the very bits of an undisturbed one, whose actors are threads of this process."""
    undisturbed = train("a", train_a3c_grad.actor, InlineWorkers)
    disturbed = train("b", killed_before_it_sends, Workers)
    assert (undisturbed["worker_restarts"], disturbed["worker_restarts"]) == (0, 1)
    for figure in ("weights_sha256", "steps", "updates", "episodes", "mean_return_100"):
        assert undisturbed[figure] == disturbed[figure], figure
