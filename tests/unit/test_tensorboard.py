"""Curves and logs: what is written can be read, a full disk or a tracker costs points of curves only."""

import importlib.machinery
import io
import sys
import threading
import time
import types
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import files_no_longer_than, scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG as CONFIG_TAG
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError
from a3c_mp.processes.console import console
from a3c_mp.run import tracking
from a3c_mp.run.display import open_log
from a3c_mp.run.metrics import Means
from a3c_mp.run.progress import Timings
from a3c_mp.run.run import Run
from a3c_mp.run.tracking import EventFile


def curve_in(folder):
    """[(step, value), ...] as TensorBoard shows them."""
    return [(event.step, event.value) for event in scalars(folder)["charts/sps"]]


def test_each_start_has_a_file_and_hides_the_events_that_will_be_written_again(tmp_path, log):
    events = EventFile(tmp_path, None, log)
    events.describe(10, {"gamma": 0.9})
    for step in (10, 20, 30):
        events.scalars(step, {"charts/sps": float(step), "losses/value": 0.5})
    for step, purge_step in ((25, 21), (26, None)):  # in the same second
        EventFile(tmp_path, purge_step, log).scalars(step, {"charts/sps": -25.0})
    assert curve_in(tmp_path) == [(10, 10.0), (20, 20.0), (25, -25.0), (26, -25.0)]
    shown = EventAccumulator(str(tmp_path)).Reload()
    (text,) = shown.Tensors("hyperparameters/text_summary")
    assert text.tensor_proto.string_val == [b"|setting|value|\n|-|-|\n|gamma|0.9|"]
    (layout,) = shown.Tensors(CONFIG_TAG)
    (group,) = Layout.FromString(layout.tensor_proto.string_val[0]).category
    assert [list(plot.multiline.tag) for plot in group.chart] == list(tracking.MAIN_CURVES.values())
    assert group.chart[0].multiline.tag[0] == "charts/mean_return_100"


def test_a_full_disk_costs_curves_for_a_while_and_one_warning_for_each_pause(tmp_path, log, tape, monkeypatch):
    events = EventFile(tmp_path, None, log)
    events.scalars(1, {"charts/sps": 1.0})
    with files_no_longer_than(1000):
        for step in range(2, 100):
            events.scalars(step, {"charts/sps": 1.0})
    assert len(tape.messages) == 1
    assert "training continues without curves" in tape.messages[0]

    events.scalars(100, {"charts/sps": 2.0})  # there is room again, but the pause is not over
    monkeypatch.setattr(events, "retry_at", time.monotonic() - 1)
    events.scalars(101, {"charts/sps": 3.0})
    assert len(tape.messages) == 1
    curve = curve_in(tmp_path)
    assert (curve[0], curve[-1]) == ((1, 1.0), (101, 3.0))
    assert (100, 2.0) not in curve


def test_a_line_of_the_log_is_text_whatever_it_looks_like(tmp_path, capsys):
    log = open_log(tmp_path)
    log.warning("resumed from [bold]somewhere[/bold]")
    with files_no_longer_than(10):  # a full disk costs lines of run.log only
        log.info("another")
    assert (tmp_path / "run.log").read_text().endswith("WARNING resumed from [bold]somewhere[/bold]\n")
    assert console.drain()
    assert capsys.readouterr() == ("resumed from [bold]somewhere[/bold]\nanother\n", "")


def test_shares_are_of_all_time_since_they_were_last_asked_for(clock):
    timing = Timings()
    for name, seconds in (("learning", 3.0), ("publishing", 1.0), ("learning", 2.0)):
        with suppress(KeyError), timing(name):
            clock[0] += seconds
            raise KeyError  # a section that an exception ends still counts
    clock[0] += 4.0  # in no section
    assert timing.shares() == {"learning": 0.5, "publishing": 0.1}
    with timing("learning"):
        clock[0] += 1.0
    clock[0] += 3.0
    assert timing.shares() == {"learning": 0.25}


def test_means_are_over_tensors_and_over_calls_until_they_are_popped_and_keep_no_graph():
    means = Means()
    means.add({"losses/value": torch.tensor([1.0, 3.0]), "charts/policy_lag": torch.tensor(4)})
    means.add({"losses/value": torch.tensor(8.0, requires_grad=True)})
    assert not means.values["losses/value"][1].requires_grad
    assert means.pop() == {"losses/value": 5.0, "charts/policy_lag": 4.0}
    assert means.pop() == {}
    means.add({"losses/value": torch.tensor(1.0).bfloat16(), "samples": 3, "is_late": True})
    assert means.pop() == {"losses/value": 1.0, "samples": 3.0, "is_late": 1.0}


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
