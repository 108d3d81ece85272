"""Tables of results, the eight games, rows that are run again, and the files that they are made from."""

import itertools
import json
import re

import pytest

from a3c_mp.cli.flags import unused
from a3c_mp.errors import ConfigError
from bench import common, games, pictures, records, report, reproduce, scale

ROOT = common.ROOT
FILES = sorted(records.RESULTS.glob("*.json"))
PAGES, DESIGNS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], (ROOT / "docs" / "design").glob("*.md")


# ---- files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_file_has_commit_settings_machine_and_its_runs(path):
    result = json.loads(path.read_text())
    assert result["commit"]
    assert result["machine"]["name"]
    assert result["settings"]
    assert all({"row", "seed", "commit"} <= run.keys() for run in result["runs"])
    if result["kind"] in ("solve", "search", "peers", "soak"):
        assert {run["row"] for run in result["runs"]} <= result["settings"].keys()


def test_each_file_is_shown_by_a_page_and_each_that_is_shown_exists():
    def shown(*pages):
        return {name for page in pages for name in re.findall(r"bench/results/([\w.\-]+\.\w+)", page.read_text())}

    files = {path.name for path in records.RESULTS.iterdir()}
    assert shown(*PAGES, *DESIGNS) <= files
    unseen = {name for name in files - shown(*PAGES) if name.replace(".json", ".png") not in shown(*PAGES)}
    assert unseen <= {"README.md"}, "files that only design notes show are in the history"


def test_the_pages_have_the_tables_that_the_files_make():
    pytest.importorskip("Box2D")  # whether settings of LunarLander are its preset
    results = [json.loads(path.read_text()) | {"file": path.name} for path in FILES]
    rows = report.rows_of(results)
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results.md").read_text()
    assert (table := report.chapter_table(rows)) in readme
    assert max(map(len, table.splitlines())) <= 140
    assert report.main_table(rows) in page
    scored = report.best_scores(result for result in results if result["kind"] == "games")
    assert all(report.games_table(result) in page for result in scored)
    assert report.peers_tables(*report.peers_of(results)) in page
    ray = (ROOT / "docs" / "ray.md").read_text()
    assert all(scale.tables(result) in ray for result in results if result["kind"] == "scale")


# ---- tables of solving


def solved(machine, date, *runs, chapter="a3c_data", env_id="CartPole-v1", seeds=None, **settings):
    preset = common.trainer_settings([*common.CHAPTERS[chapter], f"--env-id={env_id}"])
    rows = [{"row": "default", "seed": seed, "solved": bool(seconds), "wall_seconds": seconds, "steps": 7e4, "sps": 9.0}
            for seed, seconds in enumerate(runs, 1)]  # fmt: skip
    about = {"kind": "solve", "chapter": chapter, "env_id": env_id, "date": date, "machine": {"name": machine}}
    settings = {"default": common.as_recorded(preset) | settings}
    return about | {"settings": settings, "bench": {"seeds": seeds or len(runs)}, "runs": rows, "file": "f"}


def test_the_readme_has_presets_of_the_machine_with_most_of_them():
    pong = "PongNoFrameskip-v4"
    results = [
        solved("old", "2026-01-01", 660.0, 600.0, None, env_id=pong), solved("old", "2026-01-01", 20.0, 19.0, 21.0),
        solved("new", "2026-01-02", 10.0), solved("old", "2026-01-03", 9.0, seeds=2),
        solved("old", "2026-01-04", 8.0, update_epochs=1), solved("old", "2026-01-05", None, chapter="a3c_grad"),
    ]  # fmt: skip
    table = report.chapter_table(report.rows_of(results))
    assert "| 11.0 min, 0.07M steps (2 of 3 seeds) | 20 s, 70k steps (3 seeds) |" in table
    assert "| - | 0 of 1 seed solved |" in table
    assert "on old, 2026-01-01 to 2026-01-05." in table
    results.append(solved("old", "2026-01-06", 30.0))
    assert "30 s, 70k steps (1 seed)" in report.chapter_table(report.rows_of(results)), "the newest counts"


def test_the_page_names_settings_that_differ_from_todays_preset():
    older = {"update_epochs": 9, "batch_size": 8, "gamma": 0.5, "clip_ratio": 0.7}
    results = [solved("box", "2026-01-01", 1.0), solved("box", "2026-01-02", 2.0, gamma=0.5)]
    results += [solved("box", "2026-01-03", 3.0, **older), solved("box", "2026-01-04", 4.0, stop_return=None)]
    *_, first, second, third = report.main_table(report.rows_of(results)).splitlines()
    assert [line.split(" | ")[3] for line in (first, second, third)] == ["preset", "`gamma=0.5`", "older preset"]


def test_a_table_replaces_what_is_between_its_markers(tmp_path, capsys):
    page = tmp_path / "page.md"
    text = "# Title\n<!-- results -->\nold\n<!-- /results -->\n<!-- games -->\n<!-- /games -->\n"
    page.write_text(text)
    report.put(page, "| new |")
    assert page.read_text() == text.replace("old", "| new |")
    report.put(tmp_path / "none.md", "| printed |")
    assert "| printed |" in capsys.readouterr().out


# ---- eight games


def test_scores_are_means_of_100_games_normalised_by_random_play_and_a_human():
    for game in games.GAMES.values():
        assert (game.normalised(game.random), game.normalised(game.human)) == (0.0, 1.0)
    assert games.GAMES["Breakout"].normalised(16.1) == pytest.approx(0.5)
    rows = [common.Game(5_000 * i, 0.5 * i, float(i)) for i in range(1, 121)]
    assert games.scores_of(rows, 600_000) == {"250000": 25.5, "500000": 50.5}
    assert games.scores_of(rows[:19], 250_000) == {"250000": None}, "19 games are too few"


def run_of(game, seed, score):
    return {"row": game, "seed": seed, "scores": {"250000": None, "500000": None, "1000000": score}, "commit": "c0ffee"}


def test_aggregates_over_games_have_intervals_that_follow_from_the_seeds():
    human = [run_of(name, seed, game.human) for name, game in games.GAMES.items() for seed in (1, 2)]
    text = games.table({"runs": human})
    assert "14.6 (1.00)" in text
    for line in text.splitlines()[-2:]:
        assert "| 1.00 |" in " ".join(line.split()), "seeds that agree have no interval"
    assert games.aggregate_cell({"Pong": [-20.7, 14.6]}, "median") == "0.50 (0.00 to 1.00)"
    assert games.aggregate_cell({}, "IQM") == "-"


def test_median_and_interquartile_mean_are_those_of_rliable():
    """Literally: the median over games of means over runs; the mean of the middle half of all runs of all games."""
    scores = {"Pong": [-20.7, 14.6, 32.25], "Freeway": [0.0, 29.6, 14.8], "Boxing": [0.1, 12.1, 120.1]}
    runs = sorted([0.0, 1.0, 1.5, 0.0, 1.0, 0.5, 0.0, 1.0, 10.0])
    median, *_ = games.with_interval(scores, "median")
    assert median == pytest.approx(2.5 / 3)
    iqm, low, high = games.with_interval(scores, "IQM")
    assert iqm == pytest.approx(sum(runs[2:-2]) / 5), "a quarter of nine is two, rounded down"
    assert low < iqm < high
    best = {name: [game.iqn_impala] for name, game in games.GAMES.items()}
    assert [games.aggregate_cell(best, name) for name in ("median", "IQM")] == ["0.70", "0.67"], "as published"


@pytest.mark.parametrize(("chapter", "like"), [("a3c_data", "Boxing"), ("a3c_grad", "Pong"), ("apex_dqn", "Pong")])
def test_all_games_have_the_same_settings(chapter, like):
    commands = games.commands_of(games.Args(chapter=chapter, like=like, sticky=True), ["--seed=7"])
    found = [common.as_recorded(common.trainer_settings(command)) for command in commands.values()]
    assert {settings.pop("env_id") for settings in found} == {f"ALE/{game}-v5" for game in games.GAMES}
    assert all(settings == found[0] for settings in found)
    env_id = games.env_id_of(like)
    own = common.as_recorded(common.trainer_settings([*common.CHAPTERS[chapter], f"--env-id={env_id}"]))
    differing = {name for name, value in found[0].items() if own[name] != value}
    assert differing <= {"seed", "total_steps", "stop_return"}


def test_the_page_has_the_scores_of_most_runs_of_each_chapter():
    def scored(date, *scores, chapter="a3c_data", sticky=False, game="Pong", file="f", net="a3c"):
        runs = [run_of(game, seed, score) for seed, score in enumerate(scores)]
        about = {"chapter": chapter, "date": date, "machine": {"name": "A"}, "protocol": ["raw"]}
        settings = {"default": {"net": net}}
        return about | {"bench": {"sticky": sticky}, "settings": settings, "runs": runs, "file": file}

    results = [scored("2026-01-02", 14.6, 14.6), scored("2026-01-01", 0.0, 0.0), scored("2026-01-03", 2.0)]
    results += [scored("2026-01-04", 2.0, sticky=True), scored("2026-01-01", 4.0, chapter="impala")]
    results += [scored("2026-01-01", 5.0, game="Boxing"), scored("2026-01-05", 12.1, game="Boxing", file="again")]
    results += [scored("2026-01-04", 9.0, chapter="impala", net="resnet")]
    best = report.best_scores(results)
    assert [games.by_game(result["runs"], 10**6)["Pong"] for result in best] == [[14.6, 14.6], [4.0], [9.0], [2.0]]
    assert report.games_table(best[2]).startswith("**impala, --net resnet**")
    text = report.games_table(best[0])
    assert "A, commit c0ffee; raw; [file](../bench/results/f) of Pong; [file](../bench/results/again) of Boxing" in text


# ---- pictures


def test_a_populations_curve_is_its_best_member_so_far():
    all_members = {"curve": [(1, 10.0, 5.0), (2, 20.0, 1.0), (3, 30.0, 7.0)], "steps": 3, "wall_seconds": 31.0}
    assert pictures.curve_of(all_members, "a3c_data") == all_members["curve"]
    assert [mean for *_, mean in pictures.curve_of(all_members, "population")] == [5.0, 5.0, 7.0]
    with_end = all_members | {"best_fitness": 18.0}
    assert pictures.curve_of(with_end, "population_ppo")[-1] == (3, 31.0, 18.0)
    found = pictures.curve_of(with_end | {"best_curve": [(1, 9.0, 2.0), (3, 30.0, 1.5)]}, "population_ppo")
    assert found == [(1, 9.0, 2.0), (3, 30.0, 2.0)]


def test_the_pictures_are_drawn_from_the_files_alone(tmp_path, monkeypatch):
    """Every number that is drawn is in a file, and labels of the logarithmic axis keep apart on a phone."""
    drawn = {}
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.update({path.name: figure}))
    for name in ("readme", "page"):
        (tmp_path / name).touch()
    flags = [f"--readme={tmp_path / 'readme'}", f"--page={tmp_path / 'page'}", f"--pictures={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["report.py", *flags])
    assert report.main() == 0
    assert sorted(drawn) == ["curves.png", "games.png", "peers.png", "pong.png"]
    results = [json.loads(path.read_text()) for path in FILES]
    known = {round(run["sps"]) for each in results for run in each["runs"] if run.get("sps")}
    rates = {round(bar.get_width()) for bar in drawn["peers.png"].axes[0].patches}
    assert rates <= known
    assert max(rates) in known
    for figure in drawn.values():
        figure.canvas.draw()
        for axis in figure.axes:
            low, high = axis.get_xlim()
            shown = [label for label in axis.get_xticklabels() if low <= label.get_position()[0] <= high]
            boxes = [label.get_window_extent() for label in shown if label.get_text()]
            assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
            assert label_pixels(axis, figure) >= 9


def label_pixels(axis, figure):
    """Size of the smallest label where the picture is 360 pixels wide."""
    labels = [*axis.get_xticklabels(), *axis.get_yticklabels(), axis.title]
    return min(label.get_fontsize() for label in labels) * 360 / (72 * figure.get_figwidth())


# ---- rows that are run again


def runs_of(*runs):
    return [{"seed": i, "solved": done, "steps": steps, "wall_seconds": 60.0, "mean_return_100": 18.0}
            | {"weights_sha256": sha256} for i, (steps, done, sha256) in enumerate(runs, 1)]  # fmt: skip


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
    recorded = runs_of((100, True, "a"), (200, True, "a"))
    text, is_reproduced = reproduce.compare(recorded, runs_of(*again), deterministic)
    assert is_reproduced == expected
    assert "seed 2, recorded" in text


@pytest.mark.parametrize("path", records.RESULTS.glob("solve_*.json"), ids=lambda path: path.stem)
def test_every_file_is_run_again_with_the_settings_of_its_time(path):
    recorded = json.loads(path.read_text())
    (row,) = recorded["settings"]
    _, seeds, *flags = reproduce.command_of(recorded, row, seeds=2)
    assert seeds == "--seeds=2"
    again = common.as_recorded(common.trainer_settings([*common.CHAPTERS[recorded["chapter"]], *flags]))
    then = recorded["settings"][row]
    differing = {name for name in again.keys() & then.keys() - {"seed"} if again[name] != then[name]}
    assert differing <= unused(then).keys()


def test_a_row_is_found_by_chapter_and_game():
    path = reproduce.find(["a3c_data", "CartPole-v1"])
    assert json.loads(path.read_text())["chapter"] == "a3c_data"
    with pytest.raises(ConfigError, match=r"row=a3c_data Tetris: no such row; choose one of: .*a3c_data CartPole-v1, "):
        reproduce.find(["a3c_data", "Tetris"])
