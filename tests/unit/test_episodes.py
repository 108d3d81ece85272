"""`episodes.csv` has a line for every finished game; damage costs the damaged lines, never a resume."""

import pytest
from support import files_no_longer_than

from a3c_mp.episodes import EpisodeLog
from a3c_mp.rollout import Episode


def an_episode_log(path, log, steps):
    """A log with an episode at each of `steps`, of that many points."""
    episodes = EpisodeLog(path, 0, log)
    for step in steps:
        episodes.add(step, step / 100, 1, Episode(float(step), 5))
    episodes.close()


def test_every_finished_game_is_a_line(tmp_path, log):
    path = tmp_path / "episodes.csv"
    episodes = EpisodeLog(path, 0, log)
    assert path.read_text() == EpisodeLog.HEADER + "\n"
    episodes.add(64, 1.234, 0, Episode(-21.0, 790))
    episodes.add(128, 2.0, 3, Episode(1234567.0, 4))
    assert path.read_text() == EpisodeLog.HEADER + "\n", "lines wait for the flush"
    episodes.flush()
    header, *lines = path.read_text().splitlines()
    names = header.split(",")
    rows = [dict(zip(names, map(float, line.split(",")), strict=True)) for line in lines]
    assert rows == [
        {"steps": 64, "seconds": 1.23, "actor": 0, "episode_return": -21.0, "length": 790},
        {"steps": 128, "seconds": 2.0, "actor": 3, "episode_return": 1234567.0, "length": 4},
    ]
    episodes.close()


def test_a_new_run_begins_the_file_anew(tmp_path, log):
    path = tmp_path / "episodes.csv"
    an_episode_log(path, log, [100, 200])
    EpisodeLog(path, 0, log).close()
    assert path.read_text() == EpisodeLog.HEADER + "\n"


def steps_in(path):
    header, *lines = path.read_text().splitlines()
    assert header == EpisodeLog.HEADER
    return [int(line.split(",")[0]) for line in lines]


def test_on_resume_the_lines_that_will_be_lived_again_are_dropped(tmp_path, log):
    path = tmp_path / "episodes.csv"
    an_episode_log(path, log, [100, 200, 200, 300])
    episodes = EpisodeLog(path, 200, log)
    assert steps_in(path) == [100, 200, 200]
    episodes.add(250, 9.0, 0, Episode(1.0, 5))
    episodes.close()
    assert steps_in(path) == [100, 200, 200, 250]


def test_a_resumed_run_that_has_lost_its_file_begins_a_new_one(tmp_path, log):
    EpisodeLog(tmp_path / "episodes.csv", 200, log).close()
    assert steps_in(tmp_path / "episodes.csv") == []


@pytest.mark.parametrize("torn", ["1", "150,2.0", "150,1.50,1,150,1", "15\0\0"])
def test_on_resume_a_line_torn_by_a_crash_is_dropped(torn, tmp_path, log):
    path = tmp_path / "episodes.csv"
    an_episode_log(path, log, [100])
    with path.open("a") as file:
        file.write(torn)
    EpisodeLog(path, 200, log).close()
    assert steps_in(path) == [100]


def test_a_full_disk_costs_a_warning_never_the_run_nor_the_lines_around_it(tmp_path, log, tape):
    path = tmp_path / "episodes.csv"
    episodes = EpisodeLog(path, 0, log)
    with files_no_longer_than(100):
        for step in range(100):
            episodes.add(step, 0.0, 0, Episode(1.0, 5))
        episodes.flush()
    assert len(tape.messages) == 1
    assert str(path) in tape.messages[0]
    episodes.add(100, 0.0, 0, Episode(1.0, 5))
    episodes.close()
    steps = steps_in(path)
    assert steps == sorted(set(steps)), "no line is torn or written twice"
    assert steps[-1] == 100


def test_a_disk_that_is_still_full_at_the_end_does_not_spoil_it(tmp_path, log, tape):
    path = tmp_path / "episodes.csv"
    episodes = EpisodeLog(path, 0, log)
    with files_no_longer_than(100):
        for step in range(100):
            episodes.add(step, 0.0, 0, Episode(1.0, 5))
        episodes.close()
    assert len(tape.messages) == 1
