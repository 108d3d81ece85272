"""plot.py: groups, means and table of learning curves; with --lineage what it reads, draws and refuses."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import plot
from a3c_mp.run import curves
from a3c_mp.run.curves import Curve, read_curve
from a3c_mp.run.episode_log import HEADER

LINEAGE = """generation,place,id,parent,kind,learning_rate,fitness,steps
0,0,0,,first,1e-3,nan,600
0,1,1,,first,1e-2,20.5,600
1,0,1,1,elite,1e-2,30,1200
1,1,2,1,hyperparameters,3e-3,inf,1200
2,0,3,2,none,3e-3,40,1800
2,1,1,1,of a later version,1e-2,nan,1800
"""


BROKEN = [
    ("learning_rate,", "", "cannot be read (KeyError: 'learning_rate')"),
    ("1e-3,nan,600", "1e-3", "cannot be read (TypeError: "),
    ("1e-3,nan,600", "1e-3,x,600", "cannot be read (ValueError: could not convert string to float: 'x')"),
    ("0,0,0", "\xff", "cannot be read (UnicodeDecodeError: "),
    (LINEAGE[LINEAGE.index("0,0,0") :], "", "no generation has ended in this run"),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN)
def test_plot_names_a_broken_lineage(old, new, message, tmp_path, refused):
    (tmp_path / "lineage.csv").write_bytes(LINEAGE.replace(old, new).encode("latin1"))
    assert message in refused(plot.main, [".", "--lineage"])


def test_plot_draws_several_lineages_and_the_line_of_the_last_fittest_member(tmp_path, run_inline):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lineage.csv").write_text(LINEAGE)
    done = run_inline("plot.py", "a", "b", "c", "--lineage", "--out", "x.png")
    assert (done.code, done.out) == (0, "x.png\n")
    assert "skipped: runs=c: there is no lineage.csv in this folder" in done.err
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    lineage = plot.read_lineage(tmp_path / "a")
    assert {(member.generation, member.id) for member in lineage.line} == {(0, 1), (1, 2), (2, 3)}
    tree, rates = (figure := Figure()).subplots(2)
    plot.draw_lineage(figure, tree, rates, lineage)
    thick = [list(line.get_xdata()) for line in tree.get_lines() if line.get_linewidth() > 1]
    assert sorted(thick) == [[0, 1], [1, 2]]
    assert len(tree.get_lines()) == len(rates.get_lines()) == 4, "a line from each parent to each child"
    shown = [text.get_text() for text in tree.get_legend().get_texts()]
    assert shown == ["first", "elite", "none", "hyperparameters", "of a later version"]
    assert rates.get_yscale() == "log"
    (tmp_path / "a" / "lineage.csv").write_text(LINEAGE.replace("1,1,2,1,hyper", "1,1,2,7,hyper"))
    assert len(plot.read_lineage(tmp_path / "a").parents) == 3, "one parent was lost with a line"


# ---- curves


SEEDS = itertools.count(100)


def curve(env_id="CartPole-v1", solved_at=None, end=100.0, slope=1.0, name="", seed=None, **settings):
    """A run whose return is the number of steps, times `slope`; each has a seed of its own unless it is given."""
    seed = next(SEEDS) if seed is None else seed
    steps = np.linspace(0, end, 11)
    settings = {"learning_rate": 1e-3, "commit": "0123456789", **settings}
    algorithm, goal = settings.pop("algorithm", "impala"), settings.pop("stop_return", 50.0)
    figures = steps, steps / 60, slope * steps, steps >= 0
    return Curve(name or f"r{seed}", seed, bool(name), algorithm, env_id, settings, goal, solved_at, *figures)


def read(folder, *rows, args=None):
    """Read the folder of a run with these lines in its episodes.csv."""
    folder.mkdir(exist_ok=True)
    config = {"algorithm": "a", "args": {"env_id": "E", "seed": 1, **(args or {})}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "episodes.csv").write_text(HEADER + "".join(f"{row}\n" for row in rows))
    return read_curve(folder, 100)


def table(runs, goal=None):
    """Final mean, steps and minutes of the one group of some runs."""
    ((_, _, *cells),) = plot.table(curves.grouped(runs), goal)
    return tuple(cells)


def labels(runs, env_id="CartPole-v1"):
    return [label for label, _ in curves.grouped(runs)[env_id]]


def test_a_curve_has_a_point_for_each_step_at_which_games_ended_and_reaches_a_goal_by_a_mean_of_enough(tmp_path):
    found = read(tmp_path / "r", "10,1.0,0,1.0,5", "10,1.0,1,3.0,5", "30,2.0,0,5.0,5")
    assert found.steps.tolist() == [10, 30]
    assert found.mean_return.tolist() == [2.0, 3.0], "of all games so far"
    absurd = read(tmp_path / "r", *(f"{i},{i}.0,0,{1e30 if i == 3 else 5.0},5" for i in range(200)))
    assert absurd.mean_return[-50:].tolist() == [5.0] * 50, "one game counts in 100 means"
    found = read(tmp_path / "r", *(f"{10 * i},{i}.0,0,{1.0 if i in (1, 30) else 0.0},5" for i in range(1, 31)))
    one_of_20, one_of_30 = 0.05, 2 / 30
    assert [table([found], goal)[1] for goal in (one_of_20, one_of_30, 0.5)] == ["200 (1/1)", "300 (1/1)", "- (0/1)"]


def test_a_run_that_was_solved_by_another_rule_than_the_mean_of_training_reached_its_goal_then(tmp_path):
    (tmp_path / "summary.json").write_text('{"solved": false, "solved_at_steps": null, "solved_at_seconds": null}')
    unsolved = read(tmp_path, *(f"{10 * i},{i}.0,0,9.0,5" for i in range(1, 31)), args={"stop_return": 9.0})
    assert table([unsolved])[1:] == ("- (0/1)", "-"), "a mean of 30 games is another rule"
    (tmp_path / "summary.json").write_text('{"solved_at_steps": 72000, "solved_at_seconds": 90.0}')
    found = read(tmp_path, "10,1.0,0,1.0,5", args={"stop_return": 9.0})
    assert table([found])[1:] == ("72,000 (1/1)", "1.5")
    assert table([found], 9.0)[1:] == ("- (0/1)", "-"), "a goal that is given is one of training"


def test_the_table_has_final_means_and_median_times_to_the_goal():
    runs = [curve(), curve(slope=0.6), curve(slope=0.2)]
    assert labels(runs) == ["impala (3 runs)"]
    assert table(runs) == ("60.0 ± 40.0", "90 (2/3)", "1.5")
    assert table(runs, 1000.0)[1:] == ("- (0/3)", "-")
    assert table([curve(stop_return=None)]) == ("100.0", "- (0/1)", "-")


def test_curves_are_grouped_and_labels_name_what_differs_but_not_what_only_ends_or_evaluates_a_run(tmp_path):
    runs = [curve(), curve(), curve(learning_rate=0.01), curve(commit="abcdef0123+"), curve(algorithm="task")]
    runs.append(curve(commit="0123456789 -> abcdef0123+"))
    runs.append(curve(env_id="Acrobot-v1"))
    assert labels(runs) == [
        "impala, learning-rate 0.001, commit 01234567 (2 runs)",
        "impala, learning-rate 0.01, commit 01234567",
        "impala, learning-rate 0.001, commit abcdef01+",
        "task",
        "impala, learning-rate 0.001, commit 01234567 -> abcdef01+",
    ]
    assert labels(runs, "Acrobot-v1") == ["impala"]
    alike = [{"stop_return": 3.0}, {"max_seconds": 5.0, "seed": 2}, {"seed": 3, "eval_every": 100, "eval_max_steps": 9}]
    runs = [read(tmp_path, "10,1.0,0,1.0,5", args=args) for args in alike]
    assert [run.goal for run in runs] == [3.0, None, None]
    assert labels(runs, "E") == ["a (3 runs)"]


def test_runs_of_one_seed_are_not_averaged_and_names_of_ones_own_are_shown(tmp_path):
    by_default = read(tmp_path / "a-CartPole-v1-s1-20261127-060423", "10,1.0,0,1.0,5")
    assert (by_default.is_named, read(tmp_path / "mine", "10,1.0,0,1.0,5").is_named) == (False, True)
    one, again, two = curve(seed=1), curve(seed=1, name="again"), curve(seed=2)
    assert labels([one, again, two]) == ["impala, r1, ... (2 runs)", "impala, again"]
    assert labels([curve(name="mine"), curve(algorithm="task")]) == ["impala, mine", "task"]


def test_names_are_drawn_and_shown_as_they_are(tmp_path, monkeypatch, capsys):
    runs = {name: curve(name=name, seed=1) for name in ("a$5_vs_$b", "gamma[red]9")}
    monkeypatch.setattr(plot, "read_curve", lambda folder, window: runs[folder.name])
    figure = plot.plot_curves(plot.Args(tuple(map(Path, runs))))
    figure.savefig(tmp_path / "x.png")  # reads labels
    shown = capsys.readouterr().out
    assert all(f"impala, {name}" in shown for name in runs)


def test_the_goal_is_a_line_where_all_runs_have_the_same():
    other = ("other", [curve(stop_return=10.0)])
    for groups, goal, line in (
        ([("one", [curve(), curve()])], None, "goal 50"),
        ([("one", [curve()]), other], None, None),
        ([("one", [curve()]), ("endless", [curve(stop_return=None)])], None, "goal 50"),
        ([("one", [curve()]), other], 7.5, "goal 7.5"),
        ([("never", [curve(stop_return=1e9)])], None, None),
        ([("flat", [curve(slope=0.0)._replace(mean_return=np.full(11, 52.0))])], None, "goal 50"),
    ):
        axis = Figure().subplots()
        plot.draw(axis, groups, "steps")
        plot.draw_goal(axis, groups, goal)
        assert [drawn.get_label() for drawn in axis.get_lines()[len(groups) :]] == ([] if line is None else [line])


def test_an_aborted_run_does_not_cut_the_mean_and_a_solved_one_keeps_its_last_value():
    aborted, solved, whole = curve(end=50.0, slope=2.0), curve(end=50.0, solved_at=(50, 0.8)), curve()
    band = curves.band_of([aborted, whole], "steps")
    np.testing.assert_allclose(band.mean, np.where(band.x <= 50, 1.5, 1.0) * band.x)
    np.testing.assert_array_equal(band.number, np.where(band.x <= 50, 2, 1))
    band = curves.band_of([solved, whole], "minutes")
    assert band.mean[-1] == 75.0
    assert set(band.number) == {2}


@pytest.mark.parametrize("algorithm", ["a3c_data", "population_dqn"])
def test_settings_that_a_resume_has_changed_are_both_there_and_evaluation_is_one_of_populations(algorithm):
    def start(rate, total_steps):
        own = {"seed": 1, "stop_return": 5.0, "eval_episodes": 20}
        return {"args": own | {"learning_rate": rate, "total_steps": total_steps}, "commit": "abc"}

    found = curves.settings_of({"algorithm": algorithm, **start(0.1, 9), "starts": [start(0.2, 5), start(0.1, 9)]})
    expected = {"learning_rate": "0.2 -> 0.1", "total_steps": 9, "commit": "abc"}
    assert found == expected | ({"eval_episodes": 20} if algorithm == "population_dqn" else {})
