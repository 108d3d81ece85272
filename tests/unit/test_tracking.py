"""Experiment trackers get every point of every curve; what they fail at costs a warning."""

import importlib.machinery
import io
import sys
import threading
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import A3C_DATA, scalars
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError
from a3c_mp.run import tracking
from a3c_mp.run.run import Run


class Module(types.ModuleType):
    """Has the interface of wandb, and remembers what it was called with."""

    def __init__(self, broken=""):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.calls, self.broken = [], broken
        for name in ("init", "define_metric", "log", "finish"):
            setattr(self, name, partial(self.call, name))

    def call(self, function, /, *args, **named):
        self.calls.append((function, args, named, sys.stdin.isatty()))
        if function == self.broken:
            raise ConnectionError("no\nnetwork")


@pytest.fixture
def args(tmp_path):
    return CommonArgs(env_id="CartPole-v1", runs_dir=tmp_path, run_name="r", track="wandb")


def a_run(args):
    net = nn.Linear(1, 1)
    with Run(args, "test", net, torch.optim.SGD(net.parameters(), lr=0.1)) as run:
        run.record_rollout(10, [Episode(7.0, 5)], 0, 0)
        run.metrics.flush()
        run.record_rollout(10, [Episode(9.0, 5)], 0, 0)
    return run


def test_a_tracker_gets_the_points_that_tensorboard_gets_and_cannot_ask_for_a_login(args, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", module := Module())
    monkeypatch.setattr(sys, "stdin", typed := io.StringIO("3"))
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    run = a_run(args)
    (first, *_, last) = module.calls
    assert (first[0], first[3], last[0], last[3]) == ("init", False, "finish", True)
    assert sys.stdin is typed
    assert (first[2]["name"], first[2]["resume"]) == ("r", "never"), "another run of this name may be there"
    assert first[2]["id"] == (run.folder / "tracker_id").read_text(), "with which a resumed run continues"
    assert first[2]["config"]["env_id"] == "CartPole-v1"
    logged = [args[0] for name, args, *_ in module.calls if name == "log"]
    sent = {(name, points["steps"]): value for points in logged for name, value in points.items() if name != "steps"}
    assert sent.keys() == {(tag, point.step) for tag, curve in scalars(run.folder).items() for point in curve}
    assert sent["charts/episodic_return", 10] == 7.0


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_costs_one_warning(broken, args, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Module(broken))
    run = a_run(args)
    assert run.exit_code == 0
    assert (run.folder / "run.log").read_text().count("wandb fails (ConnectionError: no network); the run goes on") == 1


def test_a_tracker_that_does_not_come_back_is_not_waited_for(args, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", module := Module())
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 0.2)
    module.finish = (released := threading.Event()).wait
    run = a_run(args)
    released.set()
    assert run.exit_code == 0
    lines = (run.folder / "run.log").read_text()
    assert "wandb has not sent everything after 0 s; TensorBoard has all curves" in lines
    assert "steps" in lines.splitlines()[-1], "how the run ended comes last"


def test_a_tracker_that_is_not_installed_is_bad_input(args, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"track=trackio: trackio is not installed; pip install trackio"):
        a_run(replace(args, track="trackio"))


def test_wandb_offline(run_inline, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = run_inline.train(A3C_DATA, "--total-steps", "1000", "--track", "wandb")
    assert done.code == 0
    assert "wandb fails" not in done.log
    (found,) = (done.folder / "wandb").glob("offline-run-*/*.wandb")
    assert found.stat().st_size > 1000
