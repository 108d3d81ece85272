"""`episodes.csv` has a line for every finished game; damage costs the damaged lines, never a resume."""

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
    episodes.add(128, 2.0, 3, Episode(1.5e-7, 4))
    assert path.read_text() == HEADER == "steps,seconds,actor,episode_return,length\n"
    episodes.flush()
    assert path.read_text() == HEADER + "64,1.23,0,-21,790\n128,2.00,3,1234567,4\n128,2.00,3,1.5e-07,4\n"
    rows = [(64, 1.23, 0, -21.0, 790), (128, 2.0, 3, 1234567.0, 4), (128, 2.0, 3, 1.5e-7, 4)]
    assert read_episodes(path) == [EpisodeRow(*row) for row in rows]
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


@pytest.mark.parametrize("still_full_at_the_end", [False, True])
def test_a_full_disk_costs_a_warning_never_the_run_nor_the_lines_around_it(still_full_at_the_end, path, log, tape):
    episodes = EpisodeLog(path, 0, log)
    with files_no_longer_than(100):
        for step in range(100):
            episodes.add(step, 0.0, 0, Episode(1.0, 5))
        episodes.flush()
        episodes.add(100, 0.0, 0, Episode(1.0, 5))
        (episodes.close if still_full_at_the_end else episodes.flush)()
    (message,) = tape.messages
    assert str(path) in message
    if not still_full_at_the_end:
        episodes.add(101, 0.0, 0, Episode(1.0, 5))
        episodes.close()
        steps = steps_in(path)
        assert steps == sorted(set(steps)), "no line is torn or written twice"
        assert steps[-1] == 101


def test_a_return_of_any_size_is_a_line(path, log):
    episodes = EpisodeLog(path, 0, log)
    returns = [1e-131, -1e-300, 1e300, -1e-05, 0.0]
    for value in returns:
        episodes.add(10, 1.0, 0, Episode(value, 5))
    episodes.close()
    assert [row.episode_return for row in read_episodes(path)] == returns


DAMAGED_LINES = {
    "no finite number": b"150,1.50,1,1e+999,5",
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
def test_a_damaged_line_costs_itself_and_is_counted_and_one_without_an_end_is_left_out(line, path, log, tape):
    an_episode_log(path, log, [100, 200])
    rows = read_episodes(path)
    header, first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([header, line, first, line, second, b"150,1.50,1,150,1"]))
    assert read_episodes(path) == rows
    EpisodeLog(path, 200, log).close()
    assert read_episodes(path) == rows
    assert tape.messages == [f"{path}: 2 damaged lines removed"]


def test_a_file_without_a_whole_line_holds_no_episodes_or_is_an_error_and_is_replaced_on_resume(path, log):
    for content in (b"", HEADER.encode(), b"\n", b"\x00\xff\n1,2\n", "steps,seconds\n".encode("utf-16")):
        path.write_bytes(content)
        if content in (b"", HEADER.encode()):
            assert read_episodes(path) == []
        else:
            with pytest.raises(ValueError, match=r"episodes.csv.*none of its \d lines"):
                read_episodes(path)
        EpisodeLog(path, 200, log).close()
        assert path.read_text() == HEADER
