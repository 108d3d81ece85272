"""`episodes.csv` has a line for every finished game; damage costs the damaged lines, never a resume."""

import os
from pathlib import Path

import pytest
from harness import files_no_longer_than

from a3c_mp.data.episodes import Episode
from a3c_mp.run.episode_log import HEADER, EpisodeLog, EpisodeRow, read_episodes


def an_episode_log(path, log, steps):
    """A log with an episode at each of `steps`, of that many points."""
    episodes = EpisodeLog(path, 0, log)
    for step in steps:
        episodes.add(step, step / 100, 1, Episode(float(step), 5))
    episodes.close()


def test_every_finished_game_is_a_line(tmp_path, log):
    path = tmp_path / "episodes.csv"
    episodes = EpisodeLog(path, 0, log)
    assert path.read_text() == HEADER + "\n"
    episodes.add(64, 1.234, 0, Episode(-21.0, 790))
    episodes.add(128, 2.0, 3, Episode(1234567.0, 4))
    assert path.read_text() == HEADER + "\n", "lines wait for the flush"
    episodes.flush()
    header, *lines = path.read_text().splitlines()
    names = header.split(",")
    rows = [dict(zip(names, map(float, line.split(",")), strict=True)) for line in lines]
    assert rows == [
        {"steps": 64, "seconds": 1.23, "actor": 0, "episode_return": -21.0, "length": 790},
        {"steps": 128, "seconds": 2.0, "actor": 3, "episode_return": 1234567.0, "length": 4},
    ]
    episodes.close()


def test_a_new_run_starts_the_file_again(tmp_path, log):
    path = tmp_path / "episodes.csv"
    an_episode_log(path, log, [100, 200])
    EpisodeLog(path, 0, log).close()
    assert path.read_text() == HEADER + "\n"


def steps_in(path):
    header, *lines = path.read_text().splitlines()
    assert header == HEADER
    return [int(line.split(",")[0]) for line in lines]


def test_on_resume_the_lines_that_will_be_lived_again_are_dropped(tmp_path, log):
    path = tmp_path / "episodes.csv"
    an_episode_log(path, log, [100, 200, 200, 300])
    episodes = EpisodeLog(path, 200, log)
    assert steps_in(path) == [100, 200, 200]
    episodes.add(250, 9.0, 0, Episode(1.0, 5))
    episodes.close()
    assert steps_in(path) == [100, 200, 200, 250]


def test_a_resumed_run_that_has_lost_its_file_starts_a_new_one(tmp_path, log):
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


@pytest.mark.parametrize("still_full_at_the_end", [False, True])
def test_a_full_disk_costs_a_warning_never_the_run_nor_the_lines_around_it(still_full_at_the_end, tmp_path, log, tape):
    path = tmp_path / "episodes.csv"
    episodes = EpisodeLog(path, 0, log)
    with files_no_longer_than(100):
        for step in range(100):
            episodes.add(step, 0.0, 0, Episode(1.0, 5))
        (episodes.close if still_full_at_the_end else episodes.flush)()
    (message,) = tape.messages
    assert str(path) in message
    if not still_full_at_the_end:
        episodes.add(100, 0.0, 0, Episode(1.0, 5))
        episodes.close()
        steps = steps_in(path)
        assert steps == sorted(set(steps)), "no line is torn or written twice"
        assert steps[-1] == 100


# ---- damage

DAMAGED_LINES = {
    "a word": b"15x,1.50,1,150,5",
    "too few fields": b"150,2.0",
    "too many fields": b"150,1.50,1,150,5,6",
    "no number": b"150,1.50,1,high,5",
    "not UTF-8": b"150,1.50,1,1\xff\xfe0,5",
    "zeros of a crash": b"\0" * 40,
    "blank": b"",
    "NaN": b"150,1.50,1,nan,5",
    "negative steps": b"-150,1.50,1,150,5",
    "steps beyond 64 bits": b"1" * 30 + b",1.50,1,150,5",
}


@pytest.mark.parametrize("line", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_a_damaged_line_costs_itself_and_is_counted(line, tmp_path, log, tape):
    path = tmp_path / "episodes.csv"
    an_episode_log(path, log, [100, 200])
    rows = read_episodes(path)
    header, first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([header, line, first, line, second, b""]))
    assert read_episodes(path) == rows
    EpisodeLog(path, 200, log).close()
    assert read_episodes(path) == rows
    assert steps_in(path) == [100, 200]
    (message,) = tape.messages
    assert str(path) in message
    assert "2 damaged lines" in message


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00", "steps,seconds\n".encode("utf-16")])
def test_a_file_without_a_whole_line_is_replaced(content, tmp_path, log):
    path = tmp_path / "episodes.csv"
    path.write_bytes(content)
    EpisodeLog(path, 200, log).close()
    assert steps_in(path) == []


def test_a_blank_file_holds_no_episodes_and_one_of_damage_alone_is_an_error(tmp_path):
    path = tmp_path / "episodes.csv"
    for content in (b"", (HEADER + "\n").encode()):
        path.write_bytes(content)
        assert read_episodes(path) == []
    path.write_bytes(b"\x00\xff\n1,2\n")
    with pytest.raises(ValueError, match=r"episodes.csv.*none of its 2 lines"):
        read_episodes(path)


def test_a_line_that_is_being_written_is_left_out(tmp_path, log):
    path = tmp_path / "episodes.csv"
    an_episode_log(path, log, [100])
    with path.open("a") as file:
        file.write("200,2.0,1,200")
    assert [row.steps for row in read_episodes(path)] == [100]


# ---- what is on disk, and when


def test_the_file_is_rewritten_as_a_whole_or_not_at_all(tmp_path, log, monkeypatch):
    path = tmp_path / "episodes.csv"
    an_episode_log(path, log, [100, 200])
    before = path.read_bytes()

    def power_cut(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="Input/output error"):
        EpisodeLog(path, 100, log)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["episodes.csv"]


def test_lines_are_synced_where_a_checkpoint_counts_them(tmp_path, log, monkeypatch):
    episodes = EpisodeLog(tmp_path / "episodes.csv", 0, log)
    synced = []

    def taped(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(name).name, [row.steps for row in read_episodes(Path(name))]))

    monkeypatch.setattr(os, "fsync", taped)
    episodes.add(100, 1.0, 0, Episode(1.0, 5))
    episodes.flush()
    assert synced == []
    episodes.flush(sync=True)
    episodes.add(200, 1.0, 0, Episode(1.0, 5))
    episodes.flush(sync=True)
    assert synced == [("episodes.csv", [100]), ("episodes.csv", [100, 200])]
    episodes.close()


def test_a_disk_that_cannot_sync_costs_a_warning(tmp_path, log, tape, monkeypatch):
    episodes = EpisodeLog(tmp_path / "episodes.csv", 0, log)

    def broken(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    episodes.flush(sync=True)
    assert "Input/output error" in tape.messages[0]
    episodes.close()


def test_a_file_that_cannot_be_read_is_an_error_of_the_system(tmp_path, log):
    (tmp_path / "episodes.csv").mkdir()
    for steps in (0, 200):
        with pytest.raises(OSError, match="Is a directory"):
            EpisodeLog(tmp_path / "episodes.csv", steps, log)


def test_a_row_is_what_was_logged(tmp_path, log):
    an_episode_log(tmp_path / "episodes.csv", log, [100])
    assert read_episodes(tmp_path / "episodes.csv") == [EpisodeRow(100, 1.0, 1, 100.0, 5)]
