"""`episodes.csv` has a line for every finished game; damage costs the damaged lines, never a resume."""

import os
from pathlib import Path

import pytest
from harness import files_no_longer_than

from a3c_mp.data.episodes import Episode
from a3c_mp.run.episode_log import HEADER, EpisodeLog, EpisodeRow, read_episodes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "episodes.csv"


def an_episode_log(path, log, steps):
    """A log with an episode at each of `steps`, with that return."""
    episodes = EpisodeLog(path, 0, log)
    for step in steps:
        episodes.add(step, step / 100, 1, Episode(float(step), 5))
    episodes.close()


def steps_in(path):
    header, *lines = path.read_text().splitlines()
    assert header + "\n" == HEADER
    return [int(line.split(",")[0]) for line in lines]


def test_every_finished_game_is_a_line_once_it_is_flushed_and_a_new_run_starts_the_file_again(path, log):
    episodes = EpisodeLog(path, 0, log)
    episodes.add(64, 1.234, 0, Episode(-21.0, 790))
    episodes.add(128, 2.0, 3, Episode(1234567.0, 4))
    assert path.read_text() == HEADER == "steps,seconds,actor,episode_return,length\n"
    episodes.flush()
    assert path.read_text() == HEADER + "64,1.23,0,-21,790\n128,2.00,3,1234567,4\n"
    assert read_episodes(path) == [EpisodeRow(64, 1.23, 0, -21.0, 790), EpisodeRow(128, 2.0, 3, 1234567.0, 4)]
    episodes.close()
    EpisodeLog(path, 0, log).close()
    assert path.read_text() == HEADER


def test_on_resume_the_lines_of_games_that_will_be_played_again_are_dropped(path, log):
    EpisodeLog(path, 200, log).close()
    assert steps_in(path) == [], "a run that has lost its file starts a new one"
    an_episode_log(path, log, [100, 200, 200, 300])
    episodes = EpisodeLog(path, 200, log)
    assert steps_in(path) == [100, 200, 200]
    episodes.add(250, 9.0, 0, Episode(1.0, 5))
    episodes.close()
    assert steps_in(path) == [100, 200, 200, 250]


@pytest.mark.parametrize("torn", ["1", "150,2.0", "150,1.50,1,150,1", "15\0\0"])
def test_a_line_that_is_being_written_or_torn_by_a_crash_is_left_out(torn, path, log):
    an_episode_log(path, log, [100])
    with path.open("a") as file:
        file.write(torn)
    assert [row.steps for row in read_episodes(path)] == [100]
    EpisodeLog(path, 200, log).close()
    assert steps_in(path) == [100]


@pytest.mark.parametrize("still_full_at_the_end", [False, True])
def test_a_full_disk_costs_a_warning_never_the_run_nor_the_lines_around_it(still_full_at_the_end, path, log, tape):
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
def test_a_damaged_line_costs_itself_and_is_counted(line, path, log, tape):
    an_episode_log(path, log, [100, 200])
    rows = read_episodes(path)
    header, first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([header, line, first, line, second, b""]))
    assert read_episodes(path) == rows
    EpisodeLog(path, 200, log).close()
    assert read_episodes(path) == rows
    assert tape.messages == [f"{path}: 2 damaged lines removed"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00", "steps,seconds\n".encode("utf-16")])
def test_a_file_without_a_whole_line_is_replaced(content, path, log):
    path.write_bytes(content)
    EpisodeLog(path, 200, log).close()
    assert path.read_text() == HEADER


def test_a_blank_file_holds_no_episodes_and_one_of_damage_alone_is_an_error(path):
    for content in ("", HEADER):
        path.write_text(content)
        assert read_episodes(path) == []
    path.write_bytes(b"\x00\xff\n1,2\n")
    with pytest.raises(ValueError, match=r"episodes.csv.*none of its 2 lines"):
        read_episodes(path)


def test_lines_are_synced_where_a_checkpoint_counts_them_and_a_disk_that_cannot_costs_a_warning(
    path, log, tape, monkeypatch
):
    episodes, synced = EpisodeLog(path, 0, log), []

    def taped(descriptor):
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, len(read_episodes(path))))
        if len(synced) == 3:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", taped)
    episodes.add(100, 1.0, 0, Episode(1.0, 5))
    episodes.flush()
    assert synced == []
    for _ in range(3):
        episodes.add(200, 1.0, 0, Episode(1.0, 5))
        episodes.flush(sync=True)
    assert synced == [("episodes.csv", 2), ("episodes.csv", 3), ("episodes.csv", 4)]
    assert [message.partition("cannot")[2] for message in tape.messages] == [
        " be written: [Errno 5] Input/output error"
    ]
    episodes.close()


def test_the_file_is_rewritten_as_a_whole_or_not_at_all(path, log, monkeypatch):
    an_episode_log(path, log, [100, 200])
    before = path.read_bytes()

    def power_cut(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="Input/output error"):
        EpisodeLog(path, 100, log)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["episodes.csv"]
