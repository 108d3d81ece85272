import importlib.util
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import EpisodeLog, EpisodeRow, read_episodes
from a3c_mp.run.run_dir import as_recorded
from bench import alternate, common, population, report, solve
from bench.stages import bound
from bench.throughput import sb3_flags, steady_sps
from train_a3c_data import Args


def one_actor(*returns):
    return [(0, episode_return) for episode_return in returns]


def test_machin_needs_33_perfect_episodes_of_one_actor():
    # s_n = 200 (1 - 0.9^n) is above 190 from n = 29 on: 0.9^28 = 0.0523, 0.9^29 = 0.0471
    assert solve.machin_episodes(one_actor(*[200.0] * 32)) is None
    assert solve.machin_episodes(one_actor(*[200.0] * 40)) == 33


def test_machin_counts_the_episodes_of_all_actors():
    both = [(actor, 200.0) for _ in range(40) for actor in (0, 1)]
    assert solve.machin_episodes(both) == 2 * 32 + 1  # actor 0 gets there first
    assert solve.machin_episodes([(0, 200.0)] * 32 + [(1, 200.0)] * 32) is None


def test_machin_wants_its_five_episodes_running():
    # s_31 = 200 - 200 * 0.9^31 = 192.37 is the third above 190; a 0 makes it 173.13; k perfect episodes later it is
    # 200 - 26.87 * 0.9^k, above 190 from k = 10 on (26.87 * 0.9^9 = 10.41, 0.9^10: 9.37), so the fifth is k = 14.
    returns = [200.0] * 31 + [0.0] + [200.0] * 13
    assert solve.machin_episodes(one_actor(*returns)) is None
    assert solve.machin_episodes(one_actor(*returns, 200.0)) == 31 + 1 + 14


def test_bound_pays_for_every_stage():
    rates = {"env": 3000.0, "act": 6000.0, "learn": 2000.0}
    # a step costs 1/3000 + 1/6000 + 1/2000 = 1 ms of one core
    assert bound(rates, cores=2, passes=1, learner_threads=1, cuda=False) == (pytest.approx(2000), "cores")
    # a second pass adds 0.5 ms: 2 / 1.5 ms = 1333 steps a second; but the learner alone does 2000 / 2
    assert bound(rates, cores=2, passes=2, learner_threads=1, cuda=False) == (pytest.approx(1000), "learner")
    assert bound(rates, cores=2, passes=2, learner_threads=2, cuda=False) == (pytest.approx(4000 / 3), "cores")
    assert bound(rates, cores=8, passes=1, learner_threads=3, cuda=False) == (pytest.approx(6000), "learner")
    # threads that have no core of their own add nothing
    assert bound(rates, cores=1, passes=4, learner_threads=8, cuda=False)[0] == pytest.approx(1000 / 2.5)
    assert bound(rates, cores=16, passes=4, learner_threads=1, cuda=True) == (48000, "environments")


def test_steady_rate_is_that_of_the_second_half():
    start_up = [(0.0, 0), (4.0, 10)]
    steady = [(5.0, 100), (7.0, 300), (10.0, 600)]
    assert steady_sps(start_up + steady) == pytest.approx(100)
    for too_short in ([], [(1.0, 100)], [(0.0, 0), (1.0, 100)]):
        with pytest.raises(ConfigError, match="raise --seconds"):
            steady_sps(too_short)


def test_a_rate_in_turns_counts_the_time_between_the_first_and_the_last_point_that_was_the_trainers_own(monkeypatch):
    points = [(3.0, 50), (9.0, 100), (21.0, 300), (33.0, 700)]
    events = [SimpleNamespace(wall_time=seconds, step=step) for seconds, step in points]
    monkeypatch.setattr(alternate, "elapsed_events", lambda folder: events)
    turns = alternate.Turns(Path("."), None, Path("run"), [(0.0, 10.0), (20.0, 22.0), (30.0, 34.0)])
    assert turns.rate() == (700 - 100) / (1 + 2 + 3)
    turns.times = [(0.0, 2.0), (20.0, 22.0)]
    with pytest.raises(ConfigError, match=r"^warm-up=2: nothing was learned"):
        turns.rate()
    turns.times = [(0.0, 10.0), (11.0, 12.0)]
    with pytest.raises(ConfigError, match=r"^windows=1: nothing was learned"):
        turns.rate()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--repeat"], "repeat: expected one argument"),
        (["--repeat", "x"], "repeat=x: must be a whole number"),
        (["--repeat", "0"], "repeat=0: must be 1 or more"),
        (["--trees", "."], "trees=.: name two checkouts or more"),
    ],
)
def test_a_benchmark_refuses_its_own_flags_in_one_line_and_leaves_others_to_the_trainer(flags, line, monkeypatch):
    monkeypatch.setattr("sys.argv", ["alternate.py", *flags, "--env-id", "CartPole-v1"])
    with pytest.raises(ConfigError, match=f"^{line}"):
        alternate.main()


def test_sb3_gets_as_many_environments_and_no_smaller_a_batch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    flags = sb3_flags(Args(env_id="PongNoFrameskip-v4", num_actors=2, num_envs=32, batch_size=256), cores=2.5)
    assert " ".join(flags) == "--env-id PongNoFrameskip-v4 --num-envs 64 --n-steps 5 --threads 2", "its own five steps"
    flags = sb3_flags(Args(env_id="PongNoFrameskip-v4", num_actors=2, num_envs=32, batch_size=346), cores=2)
    assert "--n-steps 6" in " ".join(flags)
    with pytest.raises(ConfigError, match="not an Atari game"):
        sb3_flags(Args(env_id="CartPole-v1"), cores=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        sb3_flags(Args(env_id="PongNoFrameskip-v4"), cores=2)


def episodes(returns):
    return [EpisodeRow(10 * i, 0.5 * i, 0, float(value), 10) for i, value in enumerate(returns, start=1)]


def test_rows_that_were_stopped_at_different_steps_are_compared_after_the_same(tmp_path):
    log = EpisodeLog(tmp_path / "episodes.csv", 0, logging.getLogger("test"))
    for number in range(1, 301):
        log.add(10 * number, float(number), 0, Episode(float(number), 10))
    log.close()
    names = ("exit_reason", "solved", "wall_seconds", "sps", "weights_sha256")
    summary = {**dict.fromkeys(names), "steps": 3_000, "episodes": 300, "mean_return_100": 250.5}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    stopped, whole = solve.outcome(tmp_path, 1, "stop-return", 2_000), solve.outcome(tmp_path, 1, "stop-return")
    assert (stopped["mean_return_100"], stopped["episodes"], stopped["late_return"]) == (150.5, 200, 150.5)
    assert (whole["mean_return_100"], whole["episodes"], whole["late_return"]) == (250.5, 300, 225.5)
    assert stopped["curve"][-1][0] == 2_000
    assert solve.outcome(tmp_path, 1, "stop-return", 5)["mean_return_100"] is None, "no game had ended by then"


def test_curve_is_the_mean_of_the_last_100_games():
    rows = episodes(range(250))
    points = solve.curve(rows, points=1000)
    assert len(points) == 250 - 20 + 1  # the first 19 games are too few for a mean
    assert points[0] == (200, 10.0, sum(range(20)) / 20)
    assert points[100] == (1200, 60.0, sum(range(20, 120)) / 100)
    assert points[-1] == (2500, 125.0, sum(range(150, 250)) / 100)


def test_curve_is_thinned_out_evenly_between_its_ends():
    points = solve.curve(episodes(range(419)), points=5)
    assert [steps for steps, _, _ in points] == [200, 1200, 2200, 3190, 4190]
    assert solve.curve(episodes(range(19))) == []
    assert solve.curve([]) == []


def test_medians_take_an_unsolved_seed_for_endless():
    def run(seconds, solved):
        return {"wall_seconds": seconds, "steps": 10 * seconds, "sps": 10.0, "solved": solved}

    mostly = solve.medians([run(60.0, True), run(30.0, False), run(50.0, True)], "stop-return")
    assert mostly == {"wall_seconds": 60.0, "steps": 600.0, "sps": 10.0}
    rarely = solve.medians([run(60.0, True), run(30.0, False), run(50.0, False)], "stop-return")
    assert rarely == {"wall_seconds": None, "steps": None, "sps": 10.0}


def test_episodes_are_read_as_a_run_writes_them(tmp_path):
    (tmp_path / "episodes.csv").write_text("steps,seconds,actor,episode_return,length\n2048,3.25,1,-21,824\n")
    assert read_episodes(tmp_path / "episodes.csv") == [EpisodeRow(2048, 3.25, 1, -21.0, 824)]


def throughput(date, sps):
    medians = {"env": 1.0, "act": 1.0, "learn": 1.0, "bound": 4000.0, "trainer": sps, "ratio": sps / 4000}
    head = {"kind": "throughput", "chapter": "a3c_data", "env_id": "Pong", "date": date, "machine": {"name": "box"}}
    return {**head, "medians": medians}


def test_report_shows_the_newest_result():
    table = report.main_table([throughput("2026-01-02 10:00:00", 3000.0), throughput("2026-01-01 10:00:00", 2000.0)])
    row = [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
    assert row == ["a3c_data", "Pong", "box", "", "", "", "3,000", "75%", ""]


def solved_at(machine, date, *runs, env_id="CartPole-v1"):
    runs = [
        {"seed": i + 1, "solved": bool(seconds), "wall_seconds": seconds, "steps": 7e4}
        for i, seconds in enumerate(runs)
    ]
    wall = runs[0]["wall_seconds"]
    head = {"kind": "solve", "rule": "stop-return", "chapter": "a3c_data", "env_id": env_id, "date": date}
    place = {"name": machine, "cpu": machine, "cores": 2.0}
    return {**head, "machine": place, "runs": runs, "medians": {"wall_seconds": wall, "steps": wall and 7e4}}


def test_report_takes_the_newest_result_of_each_chapter_and_names_machines_that_differ():
    pong = solved_at("old", "2026-01-01 10:00:00", 660.0, 600.0, None, env_id="PongNoFrameskip-v4")
    old, new = solved_at("old", "2026-01-01 11:00:00", 20.0, 19.0), solved_at("new", "2026-01-02 10:00:00", 10.0)
    others = [solved_at("old", "2026-01-01 12:00:00", 30.0) | {"chapter": name} for name in ("a3c_grad", "impala")]
    table = report.chapter_table([new, pong, old, *others])
    assert "| 11.0 min, 0.07M steps (2 of seeds 1 to 3) | 10 s, 70k steps (seed 1), new |" in table
    assert table.count("| 30 s, 70k steps (seed 1) |") == 2
    assert table.count("not run") == 2 * len(report.CHAPTERS) - 4
    when = "PongNoFrameskip-v4: old, 2026-01-01; CartPole-v1: old, 2026-01-01"
    assert table.endswith(f"Where a cell names no other machine: {when}.")
    assert "0 of 1 solved (seed 1)" in report.chapter_table([solved_at("box", "2026-01-01 10:00:00", None)])
    assert report.chapter_table([throughput("2026-01-01 10:00:00", 2000.0)]) == ""


def test_report_keeps_results_with_other_flags_apart_and_out_of_the_readme(tmp_path):
    preset = solved_at("box", "2026-01-01 10:00:00", 20.0) | {"command": ["solve.py", "--env-id", "CartPole-v1"]}
    flags = ["--chapter=a3c_data", "--seeds", "1", "--net", "nature", "--env-id=CartPole-v1", "--lr=1e-3"]
    other = solved_at("box", "2026-01-02 10:00:00", 10.0) | {"command": ["solve.py", *flags]}
    assert report.trainer_flags(other) == "--net nature --lr=1e-3"
    assert report.chosen([preset, other]) == {("a3c_data", "CartPole-v1"): preset}
    assert len(report.newest([preset, other], "solve", "stop-return")) == 2
    today = as_recorded(common.trainer_settings(["train_a3c_data.py", "--env-id=CartPole-v1"]))
    other["settings"] = {"default": today}
    assert report.chosen([preset, other]) == {("a3c_data", "CartPole-v1"): other}, "they have become the preset"
    other["settings"] = {"default": {name: value for name, value in today.items() if name != "update_epochs"}}
    assert report.chosen([preset, other]) == {("a3c_data", "CartPole-v1"): preset}, "one epoch, before the setting"
    other["settings"] = {"default": today | {"net": "a3c"}}
    assert report.chosen([preset, other]) == {("a3c_data", "CartPole-v1"): preset}
    interrupted = solved_at("box", "2026-01-03 10:00:00", 9.0) | {"bench": {"seeds": 2}}
    assert report.chosen([preset, interrupted]) == {("a3c_data", "CartPole-v1"): preset}
    alike = throughput("2026-01-03 10:00:00", 3000.0) | {"flags": ["--net=nature"]}
    assert report.trainer_flags(alike) == "--net=nature"


def test_report_draws_what_has_curves(tmp_path):
    runs = [{"wall_seconds": 10.0, "curve": [(100, 1.0, 20.0), (200, 2.0, 30.0)]}, {"wall_seconds": 1.0, "curve": []}]
    report.draw(tmp_path / "a" / "curves.png", {("a3c_data", "CartPole-v1"): {"runs": runs}})
    assert (tmp_path / "a" / "curves.png").stat().st_size > 10_000


def test_report_replaces_what_is_between_the_markers():
    text = "# Title\n<!-- results -->\nold\n<!-- /results -->\n<!-- games -->\nrest\n<!-- /games -->\n"
    assert report.replace_between(text, "| new |") == text.replace("old", "| new |")
    assert report.replace_between(text, "| new |", "games") == text.replace("rest", "| new |")
    assert report.replace_between("# Title\n", "| new |") is None


def test_a_result_names_no_folder_of_the_machine():
    flags = [
        "--seeds",
        "3",
        "--runs-dir",
        "/home/me/runs",
        "--lr=1",
        "--results=/tmp/r",
        "--runs_dir=/x",
        "--trees",
        "../before",
        ".",
        "--env-id",
        "E",
    ]
    assert common.without_folders(flags) == ["--seeds", "3", "--lr=1", "--env-id", "E"]


def test_a_comparison_of_populations_goes_on_with_equal_settings_only(tmp_path):
    settings, path = {"evolution": {"seed": 1, "folder": tmp_path}}, tmp_path / "r.json"
    start = {"settings": settings, "machine": {"name": "one"}, "bench": {"seeds": 2}, "runs": []}
    interrupted = start | {"bench": {"seeds": 1}, "runs": [{"row": "evolution", "seed": 1}]}
    common.save(path, interrupted)
    found = population.read_interrupted(path, start)
    assert (found["runs"], found["bench"]) == (interrupted["runs"], {"seeds": 2})
    with pytest.raises(ConfigError, match="other settings"):
        population.read_interrupted(path, start | {"settings": {"evolution": {"seed": 2, "folder": tmp_path}}})
    with pytest.raises(ConfigError, match="another machine, one"):
        population.read_interrupted(path, start | {"machine": {"name": "two"}})
    for broken in ("{", "[]"):
        path.write_text(broken)
        with pytest.raises(ConfigError, match="no result file"):
            population.read_interrupted(path, start)


def test_results_without_a_goal_have_no_row():
    goal = {"kind": "solve", "rule": "stop-return", "settings": {"default": {"stop_return": 18.0}}, "runs": [{}]}
    none = goal | {"settings": {"default": {"stop_return": None}}}
    played = none | {"runs": [{"played_mean": 3.0}]}
    found = [report.has_goal(r) for r in (goal, goal | {"settings": {}}, none, none | {"rule": "machin"}, played)]
    assert found == [True, True, False, True, True]


def test_results_are_saved_whole_and_finite(tmp_path):
    result = throughput("2026-01-02 10:20:30", 3000.0)
    path = common.result_path(tmp_path, result, with_env=True)
    assert path.name == "throughput_a3c_data_Pong_box_20260102-1020.json"
    common.save(path, result)
    assert json.loads(path.read_text()) == result
    with pytest.raises(ValueError, match="not JSON compliant"):
        common.save(path, {"sps": float("nan")})
    assert json.loads(path.read_text()) == result


def test_a_row_of_settings_becomes_flags():
    assert solve.flags_of("default") == []
    assert solve.flags_of("entropy-coef=0.02 no-normalize-obs") == ["--entropy-coef=0.02", "--no-normalize-obs"]
    for row in ("--entropy-coef=0.02", "entropy-coef =0.02", "entropy-coef="):
        with pytest.raises(ConfigError, match="without their dashes"):
            solve.flags_of(row)


def test_a_run_of_a_search_ends_at_its_steps_or_by_itself(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "last, wait = int(sys.argv[1]), float(sys.argv[2])\n"
        "rows = [f'{steps},1.0,0,0.0,10' for steps in range(0, last + 1, 10)]\n"
        "path = pathlib.Path(sys.argv[3]) / 'episodes.csv'\n"
        "path.write_text('\\n'.join(['steps,seconds,actor,episode_return,length', *rows, '9999']))\n"  # a torn line
        "time.sleep(wait)\n"
        "sys.exit(3)\n"
    )
    assert solve.train([str(script), "100", "60", str(tmp_path)], tmp_path, steps=100) == 0
    assert solve.train([str(script), "100", "0", str(tmp_path)], tmp_path, steps=110) == 3


def test_a_search_counts_what_was_not_reached_as_endless():
    def run(row, seed, curve):
        end = {"exit_reason": "SIGTERM", "solved": False, "wall_seconds": 120.0, "steps": 600_000, "sps": 5000.0}
        means = {"mean_return_100": curve[-1][2], "late_return": None}
        return {"row": row, "seed": seed, "curve": curve, **end, **means}

    fast, slow = [(100_000, 1.0, -15.0), (300_000, 2.0, 1.0)], [(200_000, 1.0, -14.0), (600_000, 2.0, -3.0)]
    runs = [run("a", 1, fast), run("b", 1, slow), run("a", 2, slow)]
    lines = solve.table(runs, "stop-return", marks=(-15.0, 0.0)).splitlines()
    header, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert header[3:] == ["mean return", "second half", "minutes", "steps", "sps", "to -15", "to 0"]
    assert cells == [
        ["a", "1", "steps", "1.0", "-", "2.0", "600,000", "5,000", "100,000", "300,000"],
        ["a", "2", "steps", "-3.0", "-", "2.0", "600,000", "5,000", "200,000", "-"],
        ["a", "median", "", "-1.0", "-", "-", "-", "5,000", "150,000", "-"],
        ["b", "1", "steps", "-3.0", "-", "2.0", "600,000", "5,000", "200,000", "-"],
        ["b", "median", "", "-3.0", "-", "-", "-", "5,000", "200,000", "-"],
    ]


@pytest.mark.parametrize("chapter", common.CHAPTERS)
def test_the_settings_of_each_chapter_can_be_told(chapter):
    command = [*common.CHAPTERS[chapter], "--seed=7"]
    assert common.trainer_settings(command).seed == 7


def test_the_second_half_of_a_run_is_that_of_its_steps():
    assert solve.late_return(episodes([0.0, 0.0, 1.0, 3.0])) == 2.0  # ended after 10, 20, 30 and 40 steps
    assert solve.late_return([]) is None


def test_rows_differ_and_machins_flags_yield_to_given_ones():
    rows = solve.commands_of(solve.Args(rows=("default", "seed=3"), rule="machin"), ["--stop_return=100"])
    machin = ["train_a3c_data.py", "--env-id=CartPole-v0", "--total-steps=1_000_000", "--stop_return=100"]
    assert rows == {"default": machin, "seed=3": [*machin, "--seed=3"]}
    with pytest.raises(ConfigError, match="occurs twice"):
        solve.commands_of(solve.Args(rows=("default", "default")), [])


def test_what_is_searched_includes_the_chapters_own_values():
    from bench import tune

    own = SimpleNamespace(update_epochs=10, learning_rate=3e-2, entropy_coef=0.0, batch_size=64, unroll_length=20)
    assert tune.searched(own, ["--batch-size=64"]) == {
        "learning_rate": ("log", 1e-4, 3e-2),
        "unroll_length": ("choice", 8, 16, 20, 32, 64, 128),
        "update_epochs": ("choice", 1, 2, 4, 8, 10),
    }


def test_a_search_begins_with_the_chapters_settings_and_finds_better_ones(tmp_path, monkeypatch, capsys):
    """A trial's return is the higher, the closer the learning rate is to 3e-3."""
    optuna = pytest.importorskip("optuna")
    from bench import tune

    def train(trial, command, folder, settings):
        rate = next(float(flag.partition("=")[2]) for flag in command if flag.startswith("--learning-rate="))
        value = -abs(math.log(rate / 3e-3))
        trial.report(value, 1)
        if trial.should_prune():
            raise optuna.TrialPruned
        return value

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "train", train)
    flags = ["--env-id", "CartPole-v1", "--batch-size=64"]
    monkeypatch.setattr(
        "sys.argv", ["tune.py", "--sampler-seed", "0", "--trials", "12", "--", "train_a3c_data.py", *flags]
    )
    for _ in range(2):  # the second process continues the study
        assert tune.main() == 0
    study = optuna.load_study(study_name="study", storage=f"sqlite:///{tmp_path}/tune.sqlite3")
    assert len(study.trials) == 24
    assert study.trials[0].params["learning_rate"] == 1e-3
    assert not {"batch_size", "n_step", "replay_ratio"} & set(study.trials[0].params)
    assert study.best_value > study.trials[0].value
    assert any(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    monkeypatch.setattr("sys.argv", ["tune.py", "--", "train_a3c_data.py", "--env-id", "Acrobot-v1"])
    with pytest.raises(ConfigError, match="study=study: its trials are of another command: train_a3c_data"):
        tune.main()
    assert "study: " in capsys.readouterr().out


@pytest.mark.parametrize(("value", "hint"), [("impala", "see --help"), ("CartPole-v1", "see --help")])
def test_a_chapter_without_its_flag_is_refused_with_a_hint(monkeypatch, value, hint):
    monkeypatch.setattr("sys.argv", ["solve.py", value])
    with pytest.raises(ConfigError, match=f"arguments={value}: a value without a flag; {hint}"):
        solve.main()
