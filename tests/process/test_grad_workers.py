"""Chapter 2 with an actor that is killed at the worst moment: its gradient is written, the slot not yet sent."""

import os
import signal
from pathlib import Path

from harness import A3C_GRAD

import train_a3c_grad
from a3c_mp.processes.workers import WorkerChannel, Workers


def killed_before_it_sends(channel: WorkerChannel, *args):
    """The chapter's actor 1, killed once; its successor is rebuilt to the beginning of the lost rollout."""
    if channel.worker == 1 and not Path("killed").exists():
        channel.send = lambda slot, payload: (Path("killed").touch(), os.kill(os.getpid(), signal.SIGKILL))
    train_a3c_grad.actor(channel, *args)


def test_an_actor_killed_between_gradient_and_message_leaves_no_trace_in_the_weights(run_inline, monkeypatch):
    """The run ends with the very bits of an undisturbed one, whose actors are threads of this process."""
    flags = ["--deterministic", "--total-steps", "1280"]
    undisturbed = run_inline.train(A3C_GRAD, *flags, name="a").summary
    monkeypatch.setattr(train_a3c_grad, "actor", killed_before_it_sends)
    disturbed = run_inline.train(A3C_GRAD, *flags, name="b", workers=Workers).summary
    assert (undisturbed["worker_restarts"], disturbed["worker_restarts"]) == (0, 1)
    for figure in ("weights_sha256", "steps", "updates", "episodes", "mean_return_100"):
        assert undisturbed[figure] == disturbed[figure], figure
