"""Curves and logs: what is written can be read, a full disk costs curves only, and figures mean what they say."""

import time
from contextlib import suppress

import pytest
import torch
from harness import files_no_longer_than
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from a3c_mp.data.episodes import Episode
from a3c_mp.processes.console import console
from a3c_mp.run import averages, metrics
from a3c_mp.run.averages import Means, Timings
from a3c_mp.run.display import hms, open_log
from a3c_mp.run.metrics import GAMES as POINTS
from a3c_mp.run.metrics import EventFile, episode_points


def read_curve(folder, name):
    """[(step, value), ...] as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


# ---- TensorBoard


def test_tensorboard_reads_back_what_was_written(tmp_path, log):
    events = EventFile(tmp_path, None, log)
    events.scalars([("charts/sps", 100.0, 10), ("losses/value", 0.5, 10)])
    events.text("hyperparameters", "|gamma|0.9|", 10)
    events.scalars([("charts/sps", 200.0, 20)])
    assert read_curve(tmp_path, "charts/sps") == [(10, 100.0), (20, 200.0)], "before the file is closed, too"
    events.close()
    assert read_curve(tmp_path, "charts/sps") == [(10, 100.0), (20, 200.0)]
    assert read_curve(tmp_path, "losses/value") == [(10, 0.5)]
    (text,) = EventAccumulator(str(tmp_path)).Reload().Tensors("hyperparameters/text_summary")
    assert text.tensor_proto.string_val == [b"|gamma|0.9|"]


def test_on_resume_the_events_that_will_be_lived_again_are_hidden(tmp_path, log):
    first = EventFile(tmp_path, None, log)
    first.scalars([("charts/sps", float(step), step) for step in (10, 20, 30)])
    first.close()
    resumed = EventFile(tmp_path, 21, log)
    resumed.scalars([("charts/sps", -25.0, 25)])
    resumed.close()
    assert read_curve(tmp_path, "charts/sps") == [(10, 10.0), (20, 20.0), (25, -25.0)]


def test_two_event_files_of_one_second_do_not_overwrite_each_other(tmp_path, log):
    for step in (1, 2, 3):
        events = EventFile(tmp_path, None, log)
        events.scalars([("charts/sps", 0.0, step)])
        events.close()
    assert [step for step, _ in read_curve(tmp_path, "charts/sps")] == [1, 2, 3]


def test_a_full_disk_costs_curves_for_a_while_and_one_warning(tmp_path, log, tape, monkeypatch):
    events = EventFile(tmp_path, None, log)
    events.scalars([("charts/sps", 1.0, 1)])
    with files_no_longer_than(1000):
        for step in range(2, 100):
            events.scalars([("charts/sps", 1.0, step)])
    assert len(tape.messages) == 1
    assert "training continues without curves" in tape.messages[0]

    events.scalars([("charts/sps", 2.0, 100)])  # there is room again, but the pause is not over
    monkeypatch.setattr(events, "retry_at", time.monotonic() - 1)
    events.scalars([("charts/sps", 3.0, 101)])
    events.close()
    assert len(tape.messages) == 1
    curve = read_curve(tmp_path, "charts/sps")
    assert curve[0] == (1, 1.0)
    assert curve[-1] == (101, 3.0)
    assert (100, 2.0) not in curve


def test_a_disk_that_stays_full_is_reported_once_a_pause(tmp_path, log, tape, monkeypatch):
    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.0)
    (tmp_path / "folder").write_text("a file where the run's folder should be")
    events = EventFile(tmp_path / "folder", None, log)
    events.scalars([("charts/sps", 1.0, 1)])
    events.close()
    assert len(tape.messages) == 2


def test_only_the_disk_is_forgiven(tmp_path, log):
    """A programming error is no full disk."""
    events = EventFile(tmp_path, None, log)
    with pytest.raises((TypeError, ValueError)):
        events.scalars([("charts/sps", "fast", 1)])


# ---- run.log


def test_run_log_has_every_line_with_its_level_and_the_console_has_them_too(tmp_path, capsys):
    log = open_log(tmp_path)
    log.info("resumed from [bold]somewhere[/bold]")
    log.warning("actor 1 (pid 2) was killed by SIGKILL")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0].endswith("INFO resumed from [bold]somewhere[/bold]")
    assert lines[1].endswith("WARNING actor 1 (pid 2) was killed by SIGKILL")
    assert console.drain()
    assert capsys.readouterr().out.splitlines() == [
        "resumed from [bold]somewhere[/bold]",
        "actor 1 (pid 2) was killed by SIGKILL",
    ]


def test_a_full_disk_costs_lines_of_run_log_only(tmp_path, capsys):
    log = open_log(tmp_path)
    with files_no_longer_than(10):
        log.info("a line that is longer than ten bytes")
    assert console.drain()
    captured = capsys.readouterr()
    assert "a line that is longer than ten bytes" in captured.out
    assert "Traceback" not in captured.err


# ---- curves of single games


def test_up_to_so_many_games_are_a_point_each():
    games = [(8 * i, Episode(float(i), i + 1)) for i in range(POINTS)]
    points = episode_points(games)
    assert points[::2] == [("charts/episodic_return", game.episode_return, steps) for steps, game in games]
    assert points[1::2] == [("charts/episodic_length", game.length, steps) for steps, game in games]
    assert episode_points([]) == []


@given(st.lists(st.floats(-100, 100), min_size=POINTS + 1, max_size=50 * POINTS))
def test_of_more_games_a_point_is_the_mean_of_a_group(returns):
    games = [(i, Episode(value, i)) for i, value in enumerate(returns)]
    points = [point for point in episode_points(games) if point[0] == "charts/episodic_return"]
    assert len(points) == POINTS
    start, sizes = 0, []
    for _, mean, steps in points:
        assert mean == pytest.approx(sum(returns[start : steps + 1]) / (steps + 1 - start), abs=1e-9)
        sizes.append(steps + 1 - start)
        start = steps + 1
    assert start == len(games), "no game is left out"
    assert max(sizes) - min(sizes) <= 1


# ---- where the time went


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(averages.time, "monotonic", clock)
    return clock


def test_shares_are_of_all_time_since_they_were_last_asked_for(clock):
    timing = Timings()
    with timing("learning"):
        clock.wait(3.0)
    with timing("publishing"):
        clock.wait(1.0)
    with timing("learning"):
        clock.wait(2.0)
    clock.wait(4.0)  # in no section
    assert timing.shares() == {"learning": 0.5, "publishing": 0.1}
    with timing("learning"):
        clock.wait(1.0)
    clock.wait(3.0)
    assert timing.shares() == {"learning": 0.25}


def test_a_section_left_by_an_exception_still_counts(clock):
    timing = Timings()
    with suppress(KeyError), timing("learning"):
        clock.wait(2.0)
        raise KeyError
    clock.wait(2.0)
    assert timing.shares() == {"learning": 0.5}


# ---- means


def test_means_are_over_tensors_and_over_calls_and_begin_anew_when_popped():
    means = Means()
    means.add({"losses/value": torch.tensor([1.0, 3.0]), "charts/policy_lag": torch.tensor(4)})
    means.add({"losses/value": torch.tensor(8.0, requires_grad=True)})
    assert means.pop() == {"losses/value": 5.0, "charts/policy_lag": 4.0}
    assert means.pop() == {}
    means.add({"losses/value": torch.tensor(1.0).bfloat16()})
    assert means.pop() == {"losses/value": 1.0}


def test_means_keep_no_graph_alive():
    weight = torch.ones(3, requires_grad=True)
    means = Means()
    means.add({"losses/total": (weight * 2).sum()})
    assert not means.values["losses/total"][0].requires_grad


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (65, "0:01:05"), (3599.9, "0:59:59"), (90_061, "1 day, 1:01:01")]
)
def test_hms(seconds, text):
    assert hms(seconds) == text
