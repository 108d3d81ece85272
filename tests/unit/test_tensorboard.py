"""Curves and logs: what is written can be read, a full disk costs curves only, and figures mean what they say."""

import time
from contextlib import suppress

import pytest
import torch
from harness import files_no_longer_than, scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from a3c_mp.processes.console import console
from a3c_mp.run import tracking
from a3c_mp.run.display import open_log
from a3c_mp.run.metrics import Means
from a3c_mp.run.progress import Timings
from a3c_mp.run.tracking import EventFile


def curve_in(folder):
    """[(step, value), ...] as TensorBoard shows them."""
    return [(event.step, event.value) for event in scalars(folder)["charts/sps"]]


def test_each_start_has_a_file_and_hides_the_events_that_will_be_written_again(tmp_path, log):
    events = EventFile(tmp_path, None, log)
    events.text(10, "hyperparameters", "|gamma|0.9|")
    for step in (10, 20, 30):
        events.scalars(step, {"charts/sps": float(step), "losses/value": 0.5})
    for step, purge_step in ((25, 21), (26, None)):  # in the same second
        EventFile(tmp_path, purge_step, log).scalars(step, {"charts/sps": -25.0})
    assert curve_in(tmp_path) == [(10, 10.0), (20, 20.0), (25, -25.0), (26, -25.0)]
    (text,) = EventAccumulator(str(tmp_path)).Reload().Tensors("hyperparameters/text_summary")
    assert text.tensor_proto.string_val == [b"|gamma|0.9|"]


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

    monkeypatch.setattr(tracking, "RETRY_SECONDS", 0.0)
    (tmp_path / "a file").touch()
    events = EventFile(tmp_path / "a file", None, log)
    for _ in range(2):
        events.scalars(1, {"charts/sps": 1.0})
    assert len(tape.messages) == 3
    with pytest.raises((TypeError, ValueError)):  # a programming error is no full disk
        EventFile(tmp_path, None, log).scalars(1, {"charts/sps": "fast"})


def test_run_log_has_every_line_with_its_level_and_the_console_has_them_too(tmp_path, capsys):
    log = open_log(tmp_path)
    log.info("resumed from [bold]somewhere[/bold]")
    log.warning("actor 1 (pid 2) was killed by SIGKILL")
    with files_no_longer_than(10):  # a full disk costs lines of run.log only
        log.info("a line that is longer than ten bytes")
    first, second = (tmp_path / "run.log").read_text().splitlines()
    assert first.endswith("INFO resumed from [bold]somewhere[/bold]")
    assert second.endswith("WARNING actor 1 (pid 2) was killed by SIGKILL")
    assert console.drain()
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "resumed from [bold]somewhere[/bold]",
        "actor 1 (pid 2) was killed by SIGKILL",
        "a line that is longer than ten bytes",
    ]
    assert "Traceback" not in captured.err


def test_shares_are_of_all_time_since_they_were_last_asked_for(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    timing = Timings()
    for name, seconds in (("learning", 3.0), ("publishing", 1.0), ("learning", 2.0)):
        with suppress(KeyError), timing(name):
            now[0] += seconds
            raise KeyError  # a section that an exception ends still counts
    now[0] += 4.0  # in no section
    assert timing.shares() == {"learning": 0.5, "publishing": 0.1}
    with timing("learning"):
        now[0] += 1.0
    now[0] += 3.0
    assert timing.shares() == {"learning": 0.25}


def test_means_are_over_tensors_and_over_calls_until_they_are_popped_and_keep_no_graph():
    means = Means()
    means.add({"losses/value": torch.tensor([1.0, 3.0]), "charts/policy_lag": torch.tensor(4)})
    means.add({"losses/value": torch.tensor(8.0, requires_grad=True)})
    assert not means.values["losses/value"][1].requires_grad
    assert means.pop() == {"losses/value": 5.0, "charts/policy_lag": 4.0}
    assert means.pop() == {}
    means.add({"losses/value": torch.tensor(1.0).bfloat16()})
    assert means.pop() == {"losses/value": 1.0}
