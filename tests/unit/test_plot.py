"""plot.py: groups, means and table of learning curves; with --lineage what it reads, draws and refuses."""

import json

import numpy as np
import pytest

import plot
from a3c_mp.run import curves
from a3c_mp.run.curves import Curve, read_curve
from a3c_mp.run.episode_log import EpisodeRow

LINEAGE = """generation,place,id,parent,kind,learning_rate,fitness,steps
0,0,0,,first,1e-3,nan,600
0,1,1,,first,1e-2,20.5,600
1,0,1,1,elite,1e-2,30,1200
1,1,2,1,hyperparameters,3e-3,inf,1200
2,0,3,2,none,3e-3,40,1800
2,1,1,1,of a later version,1e-2,nan,1800
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("learning_rate,", "", "cannot be read (KeyError: 'learning_rate')"),
        ("1,1,2,1,hyper", "1,1,2,7,hyper", "cannot be read (KeyError: (0, 7))"),
        ("1e-3,nan", "0,nan", "cannot be read (ValueError: learning_rate 0.0)"),
        ("1e-3,nan,600", "1e-3", "cannot be read (TypeError: "),
        ("1e-3,nan,600", "1e-3,x,600", "cannot be read (ValueError: could not convert string to float: 'x')"),
        ("0,0,0", "\xff", "cannot be read (UnicodeDecodeError: "),
        (LINEAGE[LINEAGE.index("0,0,0") :], "", "no generation has ended in this run"),
    ],
)
def test_plot_names_a_broken_lineage(old, new, message, tmp_path, refused):
    (tmp_path / "lineage.csv").write_bytes(LINEAGE.replace(old, new).encode("latin1"))
    assert message in refused(plot.main, [".", "--lineage"])


def test_plot_draws_the_line_of_the_last_fittest_member(tmp_path):
    (tmp_path / "lineage.csv").write_text(LINEAGE)
    lineage = plot.read_lineage(tmp_path)
    assert {(member.generation, member.id) for member in lineage.line} == {(0, 1), (1, 2), (2, 3)}
    plt = plot.pyplot(tmp_path / "x.png")
    figure, (tree, rates) = plt.subplots(2)
    plot.draw_lineage(figure, tree, rates, lineage)
    thick = [list(line.get_xdata()) for line in tree.get_lines() if line.get_linewidth() > 1]
    assert sorted(thick) == [[0, 1], [1, 2]]
    assert len(tree.get_lines()) == len(rates.get_lines()) == 4, "a line from each parent to each child"
    shown = [text.get_text() for text in tree.get_legend().get_texts()]
    assert shown == ["first", "elite", "none", "hyperparameters", "of a later version"]
    assert rates.get_yscale() == "log"
    plt.close("all")


def test_plot_writes_several_lineages(tmp_path, run_inline):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lineage.csv").write_text(LINEAGE)
    done = run_inline("plot.py", "a", "b", "c", "--lineage", "--out", "x.png")
    assert done.code == 0
    assert done.out == "x.png: 2 runs, 8 members\n"
    assert "skipped: runs=c: there is no lineage.csv in this folder" in done.err
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def curve(name="a", env_id="CartPole-v1", seed=1, solved_at=None, end=100.0, slope=1.0, **settings):
    """A run whose return is the number of steps, times `slope`."""
    steps = np.linspace(0, end, 11)
    settings = {"learning_rate": 1e-3, "commit": "0123456789", **settings}
    algorithm, goal = settings.pop("algorithm", "impala"), settings.pop("stop_return", 50.0)
    mean_return = slope * steps
    return Curve(name, algorithm, env_id, seed, settings, goal, solved_at, steps, steps / 60, mean_return, steps >= 0)


def test_a_curve_whose_games_all_ended_at_one_step_is_visible(tmp_path):
    plt = plot.pyplot(tmp_path / "x.png")
    _, axis = plt.subplots()
    step = np.full(11, 64.0)
    plot.draw(axis, [("one step", [curve()._replace(steps=step)]), ("a curve", [curve()])], "steps")
    assert [line.get_marker() for line in axis.get_lines()] == ["o", "None"]
    plt.close("all")


def test_a_curve_has_one_point_for_games_that_ended_at_the_same_step(tmp_path):
    (tmp_path / "config.json").write_text('{"algorithm": "a", "args": {"env_id": "E", "seed": 1}}')
    header = ",".join(EpisodeRow._fields)
    ended = [(10, 1.0, 0, 1.0, 5), (10, 1.0, 1, 3.0, 5), (30, 2.0, 0, 5.0, 5)]
    (tmp_path / "episodes.csv").write_text("\n".join([header, *(",".join(map(str, row)) for row in ended), ""]))
    found = read_curve(tmp_path, window=100)
    assert found.steps.tolist() == [10, 30]
    assert found.mean_return.tolist() == [2.0, 3.0], "of all games so far"


def test_a_goal_is_reached_by_a_mean_of_enough_games_and_its_median_is_over_all_runs(tmp_path):
    (tmp_path / "config.json").write_text('{"algorithm": "a", "args": {"env_id": "E", "seed": 1}}')
    rows = [f"{10 * i},{i}.0,0,{1.0 if i in (1, 30) else 0.0},5" for i in range(1, 31)]
    (tmp_path / "episodes.csv").write_text("\n".join([",".join(EpisodeRow._fields), *rows, ""]))
    one_of_20, one_of_30 = 0.05, 2 / 30
    found = read_curve(tmp_path, window=100)
    for goal, steps in ((one_of_20, [200]), (one_of_30, [300]), (0.5, [])):
        (row,) = curves.table(curves.grouped([found]), goal)
        assert row.steps.tolist() == steps
    cells = [curves.cells(row._replace(final=np.zeros(3), steps=s, minutes=s)) for s in np.split(np.arange(3.0), [1])]
    assert [cell[3] for cell in cells] == ["- (1/3)", "2 (2/3)"]


def test_a_run_that_was_solved_by_another_rule_than_the_mean_of_training_reached_its_goal_then(tmp_path):
    config = {"algorithm": "population", "args": {"env_id": "E", "seed": 1, "stop_return": 9.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "episodes.csv").write_text(f"{','.join(EpisodeRow._fields)}\n10,1.0,0,1.0,5\n")
    (tmp_path / "summary.json").write_text('{"solved": true, "solved_at_steps": 72000, "solved_at_seconds": 90.0}')
    games = curves.grouped([read_curve(tmp_path, window=100)])
    (row,), (asked,) = curves.table(games, None), curves.table(games, 9.0)
    assert curves.cells(row)[3:] == ("72,000 (1/1)", "1.5")
    assert curves.cells(asked)[3:] == ("- (0/1)", "-"), "a goal that is given is one of training"


def test_what_only_ends_or_evaluates_a_run_makes_no_curve_of_its_own(tmp_path):
    ended = [
        ("r1", 1, {"stop_return": 3.0}),
        ("r2", 2, {"max_seconds": 5.0}),
        ("r3", 3, {"eval_every": 100, "eval_max_steps": 9}),
    ]
    for name, seed, settings in ended:
        (tmp_path / name).mkdir()
        config = {"algorithm": "a", "args": {"env_id": "E", "seed": seed, **settings}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "episodes.csv").write_text(f"{','.join(EpisodeRow._fields)}\n10,1.0,0,1.0,5\n")
    runs = [read_curve(tmp_path / name, window=100) for name, *_ in ended]
    assert [run.goal for run in runs] == [3.0, None, None]
    assert [label for label, _ in curves.grouped(runs)["E"]] == ["a (3 seeds)"]


def test_a_label_names_what_a_resume_changed(tmp_path):
    args = {"env_id": "E", "seed": 1, "learning_rate": 1e-3, "total_steps": 10}
    newest = {**args, "learning_rate": 1e-4, "total_steps": 20}
    config = {"algorithm": "a", "args": newest, "starts": [{"args": args}, {"args": newest}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "episodes.csv").write_text(f"{','.join(EpisodeRow._fields)}\n10,1.0,0,1.0,5\n")
    (group,) = curves.grouped([read_curve(tmp_path, window=100)])["E"]
    assert group.label == "a, resumed with other --learning-rate"


def test_labels_of_many_groups_leave_out_what_is_usual():
    rates = [1e-3] * 4 + [2e-3]
    runs = [curve(str(i), learning_rate=rate, num_envs=8 if i else 16, n=i) for i, rate in enumerate(rates)]
    labels = [label for label, _ in curves.grouped(runs)["CartPole-v1"]]
    assert labels[0].startswith("impala, num-envs 16")
    assert labels[-1] == "impala, learning-rate 0.002, n 4"
    assert not any("num-envs 8" in label or "0.001" in label for label in labels)


def test_the_goal_is_a_line_where_all_runs_have_the_same(tmp_path):
    plt = plot.pyplot(tmp_path / "x.png")
    other = ("other", [curve(stop_return=10.0)])
    for groups, goal, line in (
        ([("one", [curve(), curve(seed=2)])], None, "goal 50"),
        ([("one", [curve()]), other], None, None),
        ([("one", [curve()]), other], 7.5, "goal 7.5"),
        ([("none", [curve(stop_return=None)])], None, None),
        ([("never", [curve(stop_return=1e9)])], None, None),
        ([("flat", [curve(slope=0.0)._replace(mean_return=np.full(11, 52.0))])], None, "goal 50"),
    ):
        _, axis = plt.subplots()
        plot.draw(axis, groups, "steps")
        plot.draw_goal(axis, groups, goal)
        assert [drawn.get_label() for drawn in axis.get_lines()[len(groups) :]] == ([] if line is None else [line])
    plt.close("all")


def test_curves_are_grouped_and_labels_name_what_differs():
    runs = [curve(), curve(seed=2), curve(learning_rate=0.01), curve(commit="abcdef0123+"), curve(algorithm="task")]
    runs.append(curve(env_id="Acrobot-v1"))
    labels = {env_id: [group.label for group in groups] for env_id, groups in curves.grouped(runs).items()}
    assert labels["CartPole-v1"] == [
        "impala, learning-rate 0.001, commit 01234567 (2 seeds)",
        "impala, learning-rate 0.01, commit 01234567",
        "impala, learning-rate 0.001, commit abcdef01+",
        "task",
    ]
    assert labels["Acrobot-v1"] == ["impala"]


def test_a_seed_counts_once():
    short, long, other = curve("short", end=50.0), curve("long"), curve("other", seed=2)
    runs, messages = curves.one_for_each_seed([short, long, other])
    assert runs == [long, other]
    assert messages == ["short: seed 1 of the same settings is in long; other seeds are averaged"]


def test_an_aborted_run_does_not_cut_the_mean_and_a_solved_one_keeps_its_last_value():
    aborted, solved, whole = curve(end=50.0, slope=2.0), curve(end=50.0, solved_at=(50, 0.8)), curve()
    band = curves.band_of([aborted, whole], "steps")
    np.testing.assert_allclose(band.mean, np.where(band.x <= 50, 1.5, 1.0) * band.x)
    assert set(band.number[band.x <= 50]) == {2}
    assert set(band.number[band.x > 50]) == {1}
    band = curves.band_of([solved, whole], "minutes")
    assert band.mean[-1] == 75.0
    assert set(band.number) == {2}


def test_the_table_has_final_means_and_first_times_at_the_goal():
    games = curves.grouped([curve(), curve(seed=2, slope=0.6), curve(seed=3, slope=0.2)])
    (row,) = curves.table(games, None)
    assert curves.cells(row) == ("CartPole-v1", "impala (3 seeds)", "60.0 ± 40.0", "90 (2/3)", "1.5")
    (row,) = curves.table(games, 1000.0)
    assert curves.cells(row)[3:] == ("- (0/3)", "-")
    assert curves.cells(curves.table(curves.grouped([curve(stop_return=None)]), None)[0])[2:] == (
        "100.0",
        "- (0/1)",
        "-",
    )
