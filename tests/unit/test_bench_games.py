"""Benchmarks of games, of rows that are run again, and of other libraries: what they read, count and compare."""

import dataclasses
import json
import subprocess
import sys

import pytest

from a3c_mp.cli import parse_own
from a3c_mp.cli.unused_flags import unused
from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import EpisodeRow
from a3c_mp.run.run_dir import as_recorded
from bench import common, games, peers, report, reproduce, solve

ROOT = common.ROOT

# ---- eight games


def test_human_normalised_scores_are_0_for_random_play_and_1_for_a_human():
    for game in games.GAMES.values():
        assert (game.normalised(game.random), game.normalised(game.human)) == (0.0, 1.0)
    assert games.GAMES["Breakout"].normalised(16.1) == pytest.approx(0.5)


def test_a_score_is_the_mean_of_the_last_100_games_that_had_ended():
    rows = [EpisodeRow(10 * i, 0.5 * i, 0, float(i), 10) for i in range(1, 251)]
    assert games.score_at(rows, 2_000) == sum(range(101, 201)) / 100
    assert games.score_at(rows, 10**6) == sum(range(151, 251)) / 100
    assert games.score_at(rows, 195) is None, "19 games are too few"


def run_of(game, seed, score):
    return {"game": game, "seed": seed, "scores": {"250000": None, "500000": None, "1000000": score}}


def test_the_median_over_games_has_an_interval_that_follows_from_the_seeds():
    human = [run_of(name, seed, game.human) for name, game in games.GAMES.items() for seed in (1, 2)]
    assert games.medians_of(human) == {"1000000": [1.0, 1.0, 1.0]}, "seeds that agree leave no doubt"
    runs = [run_of("Pong", 1, -20.7), run_of("Pong", 2, 14.6)]
    middle, low, high = games.medians_of(runs)["1000000"]
    assert (middle, low, high) == (0.5, 0.0, 1.0)
    text = games.table(human)
    assert "14.6 (1.00)" in text
    assert text.splitlines()[-1].split("|")[1].strip() == "median, normalised"
    assert games.median_cell([1.0, 0.8, 1.2]) == "1.00 (0.80 to 1.20)"
    assert "| 1.00 |" in " ".join(text.split()), "seeds that agree have no interval"


def test_all_games_have_the_flags_of_one_preset():
    constant = games.preset_flags(["train_a3c_data.py"])
    assert {"--anneal-steps=0", "--update-epochs=3"} <= set(constant), "what chapter 1 has for Pong alone is left out"
    flags = ["train_a3c_data.py", "--total-steps=9", "--stop-return=9", *constant]
    pong, boxing = (common.trainer_settings([*flags, f"--env-id={name}NoFrameskip-v4"]) for name in ("Pong", "Boxing"))
    assert dataclasses.replace(pong, env_id=boxing.env_id) == boxing
    without = common.trainer_settings([*flags[:3], "--env-id=BoxingNoFrameskip-v4"])
    assert boxing == without, "as users have it"
    assert games.preset_flags(["train_a3c_grad.py"]) == ["--explore-envs=0.25"]
    flags = games.preset_flags(["train_apex.py", "--algo", "dqn"])
    assert "--learning-starts=10000" in flags
    assert not [flag for flag in flags if "stop-return" in flag or "total-steps" in flag]


def test_games_go_on_where_they_stopped_and_refuse_other_flags(tmp_path, monkeypatch):
    args = games.Args(results=tmp_path, steps=1000)
    path, result = games.begin_or_continue(args, ["--a=1"], {"a": 1}, {})
    result["runs"].append(run_of("Pong", 1, 3.0))
    common.save(path, result)
    assert games.begin_or_continue(args, [], {"a": 1}, {})[1]["runs"] == result["runs"], "a default may say the same"
    newer = {"a": 1, "b": 0}
    assert games.begin_or_continue(args, [], newer, {"b": 0})[1]["runs"] == result["runs"], "a setting newer than it"
    with pytest.raises(ConfigError, match=r"has runs with other settings: b is 0 there"):
        games.begin_or_continue(args, [], newer | {"b": 2}, {"b": 0})
    with pytest.raises(ConfigError, match=r"has runs with other settings: a is 1 there"):
        games.begin_or_continue(args, ["--a=1"], {"a": 2}, {})  # by another default
    common.save(path, {name: value for name, value in result.items() if name != "settings"})
    with pytest.raises(ConfigError, match="is of an older version"):
        games.begin_or_continue(args, ["--a=1"], {"a": 1}, {})
    common.save(path, result)
    with pytest.raises(ConfigError, match=r"steps is 1000 there"):
        games.begin_or_continue(games.Args(results=tmp_path, steps=2000), ["--a=1"], {"a": 1}, {})
    started = []
    monkeypatch.setattr(games, "begin_or_continue", lambda *_: (path, result))
    monkeypatch.setattr(common, "run_script", lambda command: started.append(command) or 130)
    monkeypatch.setattr("sys.argv", ["games.py", "--games", "Pong", "Boxing", "--seeds", "1", "--sticky"])
    assert games.main() == 130, "Ctrl-C ends all"
    assert "--env-id=ALE/Boxing-v5" in started[0]
    assert len(started) == 1


def test_the_page_has_the_scores_of_most_runs_of_each_chapter_and_a_picture(tmp_path):
    def scored(date, *scores, chapter="a3c_data", sticky=False, game="Pong", file="f"):
        runs = [run_of(game, seed, score) | {"commit": "c0ffee"} for seed, score in enumerate(scores)]
        about = {"chapter": chapter, "date": date, "machine": {"name": "A"}, "protocol": ["raw"], "flags": ["--x=1"]}
        return about | {"bench": {"sticky": sticky}, "runs": runs, "file": file}

    results = [scored("2026-01-02", 14.6, 14.6), scored("2026-01-01", 0.0, 0.0), scored("2026-01-03", 2.0)]
    results += [scored("2026-01-04", 2.0, sticky=True), scored("2026-01-01", 4.0, chapter="impala")]
    results += [scored("2026-01-01", 5.0, game="Boxing"), scored("2026-01-05", 12.1, game="Boxing", file="again")]
    best = report.best_scores(results)
    assert [games.by_game(result["runs"], 10**6)["Pong"] for result in best] == [[14.6, 14.6], [4.0], [2.0]]
    assert "14.6 (1.00)" in (text := report.games_table(best[0]))
    assert "`a3c_data` with --x=1, A, commit c0ffee" in text
    assert "12.1 (1.00)" in text, "of as many runs of a game the newest"
    assert "[file](../bench/results/f) of Pong; [file](../bench/results/again) of Boxing" in text
    ours, *theirs = report.draw_scores(tmp_path / "games.png", best[0])
    assert ours == pytest.approx([1.0, 1.0])
    assert [heights[0] for heights in theirs] == [games.GAMES["Pong"].normalised(s) for s in (-13.9, -16.5, -1.8)]
    assert (tmp_path / "games.png").exists()


# ---- rows that are run again


def solved(*runs, command=("solve.py", "--chapter", "a3c_data"), **more):
    rows = [{"seed": i, "solved": done, "steps": steps, "wall_seconds": 60.0, "mean_return_100": 18.0}
            | {"weights_sha256": sha256} for i, (steps, done, sha256) in enumerate(runs, 1)]  # fmt: skip
    return {"runs": rows, "command": list(command), "chapter": "a3c_data", "env_id": "CartPole-v1", **more}


@pytest.mark.parametrize(
    ("again", "deterministic", "expected"),
    [
        ([(150, True, "b"), (250, True, "b")], False, True),
        ([(150, True, "b"), (450, True, "b")], False, False),
        ([(150, True, "b"), (200, False, "b")], False, False),
        ([(100, True, "a"), (200, True, "a")], True, True),
        ([(100, True, "a"), (200, True, "b")], True, False),
    ],
)
def test_a_row_is_reproduced_by_the_same_bits_or_else_by_as_many_seeds_in_similar_steps(again, deterministic, expected):
    recorded = solved((100, True, "a"), (200, True, "a"), command=["solve.py", *["--deterministic"] * deterministic])
    text, is_reproduced = reproduce.compare(recorded, solved(*again))
    assert is_reproduced == expected
    assert "seed 2, recorded" in text


def test_a_row_is_run_again_with_the_settings_that_were_recorded():
    command = ("solve.py", "--chapter", "a3c_data", "--env-id", "CartPole-v1", "--runs-dir", "/x", "--seeds", "5")
    flags = reproduce.command_of(solved(command=command), seeds=2)
    assert flags == ["--chapter", "a3c_data", "--env-id", "CartPole-v1", "--seeds", "5", "--seeds=2"]
    today = dataclasses.asdict(common.trainer_settings(["train_a3c_data.py", "--env-id=CartPole-v1"]))
    same = json.loads(json.dumps(today, default=str))  # tuples are lists in a file
    assert reproduce.command_of(solved(command=command, settings={"default": same}), seeds=5)[-1] == "--seeds=5"
    recorded = same | {"gamma": 0.5, "reward_clip": not today["reward_clip"], "no_such_flag_today": 3, "seed": 7}
    flags = reproduce.command_of(solved(command=command, settings={"default": recorded}), seeds=5)
    assert flags[-2:] == ["--gamma=0.5", "--no-reward-clip" if today["reward_clip"] else "--reward-clip"]


def test_a_setting_that_is_newer_than_a_file_is_run_again_as_it_was_then():
    command = ("solve.py", "--env-id", "PongNoFrameskip-v4")
    today = dataclasses.asdict(common.trainer_settings(["train_a3c_data.py", "--env-id=PongNoFrameskip-v4"]))
    recorded = json.loads(json.dumps(today, default=str))
    assert recorded.pop("explore_envs") > 0
    flags = reproduce.command_of(solved(command=command, settings={"default": recorded}), seeds=1)
    assert flags[-1] == "--explore-envs=0.0"


def test_every_file_of_pong_can_be_run_again_with_the_settings_of_its_time():
    paths = [path for path in common.RESULTS.glob("solve_*Pong*.json") if "settings" in json.loads(path.read_text())]
    assert len(paths) > 10
    for path in paths:
        result = json.loads(path.read_text())
        command = [*common.CHAPTERS[result["chapter"]], "--env-id=PongNoFrameskip-v4"]
        flags = reproduce.command_of(result, seeds=1)
        _, flags = parse_own(solve.Args, "", flags)
        again, then = as_recorded(common.trainer_settings([*command, *flags])), result["settings"]["default"]
        differing = {name for name in again.keys() & then.keys() - reproduce.SAME if again[name] != then[name]}
        assert differing <= unused(then).keys(), path.name


def test_every_row_of_the_readme_has_a_file():
    path = reproduce.find(["a3c_data", "CartPole-v1"], common.RESULTS)
    assert json.loads(path.read_text())["chapter"] == "a3c_data"
    with pytest.raises(ConfigError, match="row=a3c_data Tetris: no such row; choose one of: a3c_data CartPole-v1, "):
        reproduce.find(["a3c_data", "Tetris"], common.RESULTS)


# ---- other libraries


def test_the_points_of_a_peer_are_told_from_what_else_it_prints():
    text = 'banner\n[0.5, 100, null]\n{"a": 1}\n[1, 2]\n[1.5, 300, -20.5]\n3\n'
    assert common.read_points(text) == [(0.5, 100, None), (1.5, 300, -20.5)]


def test_a_peer_prints_at_most_one_point_a_second_and_ends_at_its_goal_or_time():
    code = """
import sys, time
sys.path.insert(0, "bench/peers")
import points
clock = [0.0]
points.time.perf_counter = lambda: clock[0]
def run(*flags, mean, until):
    curve = points.Points(points.parser("").parse_args(flags))
    for number in range(until):
        clock[0] = float(number)
        for _ in range(3):
            if not curve.add(10 * number, [mean] * 100):
                return print("end")
run("--seconds", "2", mean=1.0, until=9)
clock[0] = 0.0
run("--seconds", "9", "--stop-return", "1", mean=1.0, until=9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == [
        "[0.0, 0, 1.0]",
        "[1.0, 10, 1.0]",
        "[2.0, 20, 1.0]",
        "end",
        "[0.0, 0, 1.0]",
        "end",
    ]


def test_each_peer_has_a_script_and_pinned_versions():
    for peer in peers.PEERS.values():
        assert (peers.FOLDER / peer.script).exists()
        pins = [line for line in (peers.FOLDER / f"{peer.environment}.txt").read_text().splitlines() if line[0] != "#"]
        assert all(line.count("==") == 1 for line in pins)


def test_tables_of_peers_relate_rates_to_the_first_and_say_what_was_not_reached():
    text = peers.table_of_rates({"ours": [900.0, 1000.0, 1100.0], "sb3_a2c": [400.0, 300.0, 500.0]})
    assert [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]] == [
        "sb3_a2c",
        "400",
        "0.40",
        "400, 300, 500",
    ]
    runs = {"ours": [{"seed": 1, "solved": False, "minutes": None, "steps": None, "last": (2700.0, 10**6, 12.5)}]}
    assert "| ours    |    1 | not reached |     - | 12.5 after 45.0 min, 1,000,000 steps |" in peers.table_of_runs(
        runs
    )
