"""Benchmarks that run chapters: rows of settings, runs that go on, what a run came to, rates in turns, searches."""

import json
import math
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from a3c_mp.errors import ConfigError
from bench import common, peers, records, scale, solve, throughput, tune
from bench.scale_model import JITTER, Cluster, Costs, fit, predict


def games_of(returns):
    return [common.Game(10 * i, 0.5 * i, float(value)) for i, value in enumerate(returns, start=1)]


def run_folder(path, games, **summary):
    """A folder as a finished run leaves it."""
    rows = [f"{game.steps},{game.seconds},0,{game.episode_return},10" for game in games]
    (path / "episodes.csv").write_text("\n".join(["steps,seconds,actor,episode_return,length", *rows, "9999"]))
    names = ("exit_reason", "solved", "wall_seconds", "sps", "weights_sha256", "episodes", "steps", "mean_return_100")
    (path / "summary.json").write_text(json.dumps(dict.fromkeys(names) | summary))
    return path


# ---- rows and settings


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("default", ("", [])),
        ("entropy-coef=0.02 no-normalize-obs", ("", ["--entropy-coef=0.02", "--no-normalize-obs"])),
        ("task eval-every=0", ("task", ["--eval-every=0"])),
        ("--entropy-coef=0.02", None),
        ("entropy-coef=", None),
    ],
)
def test_a_row_is_a_chapter_and_flags(row, expected):
    with nullcontext() if expected else pytest.raises(ConfigError, match="without their dashes"):
        assert common.split_row(row, common.CHAPTERS) == expected


def test_rows_differ_and_have_one_environment():
    args = common.RowArgs(chapter="a3c_grad", rows=("default", "task seed=3"))
    commands = common.commands_of(args, ["--env-id=CartPole-v1"])
    assert [*commands.values()] == [
        ["train_a3c_grad.py", "--env-id=CartPole-v1"],
        ["train_task.py", "--env-id=CartPole-v1", "--seed=3"],
    ]
    assert [found["seed"] for found in common.settings_of(commands).values()] == [1, 3]
    twice, mixed = common.RowArgs(rows=("default", "default")), common.RowArgs(rows=("a3c_data", "apex_ddpg"))
    for args, message in (twice, "occurs twice"), (mixed, "different environments"):
        with pytest.raises(ConfigError, match=message):
            common.settings_of(common.commands_of(args, []))


@pytest.mark.parametrize(
    ("module", "flags", "line"),
    [
        (throughput, ["--repeat", "x"], "repeat=x: must be a whole number"),
        (throughput, ["--repeat", "0"], "repeat=0: must be 1 or more"),
        (throughput, ["--trees", "/proc"], "trees=/proc: it has no such chapter"),
        (solve, ["impala"], "arguments=impala: a value without a flag; see --help"),
        (solve, ["--seed", "3"], "seed: each run gets one of its own here"),
        (solve, ["--rows", "default seed=3"], "seed: each run gets one of its own here"),
        (peers, ["--rows", "a3c_data run-name=x"], "run-name: each run gets one of its own here"),
        (peers, ["--rows", "impalla"], "rows=impalla: no such library here"),
        (peers, ["--rows", "rllib", "--env-id", "Pendulum-v1"], "rows=rllib: it has no settings for Pendulum-v1"),
        (
            peers,
            ["--rows", "sb3_a2c", "--env-id", "Hopper-v5"],
            "rows=sb3_a2c: it has no settings for Hopper-v5; of the",
        ),
        (peers, ["--rows", "sb3_td3"], "rows=sb3_td3: its actions are continuous; choose --env-id HalfCheetah-v5 or"),
        (peers, ["--rows", "agilerl"], "rows=agilerl: it has no settings for PongNoFrameskip-v4"),
        (peers, ["--rows", "sb3_a2c", "--environments", "/proc"], "rows=sb3_a2c: it is not installed in /proc"),
    ],
)
def test_a_benchmark_refuses_bad_flags_in_one_line(module, flags, line, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench.py", *flags])
    with pytest.raises(ConfigError, match=f"^{line}"):
        module.main()


# ---- result files


def begin(path, **changes):
    args = solve.Args(out=path, **{"seeds": 2, **changes.pop("bench", {})})
    return records.begin(changes.pop("kind", "solve"), args, "E", {"default": {"seed": 1}} | changes)


def test_a_benchmark_goes_on_where_it_was_interrupted(tmp_path):
    path, seen = tmp_path / "new" / "r.json", []

    def run(row, seed):
        seen.append((row, seed))
        if seed == 2:
            raise SystemExit(130)
        return {"sps": 1.0}

    plan = records.in_turns(["a", "b"], 2)
    assert plan == [("a", 1), ("b", 1), ("b", 2), ("a", 2)], "every second round goes backwards"
    with pytest.raises(SystemExit):
        records.measure(*begin(path), plan, run, lambda result: "")
    _, result = begin(path, bench={"seeds": 3}, default={"seed": 1, "of_newer_code": None, "eval_envs": 8})
    assert [(each["row"], each["seed"], each["sps"]) for each in result["runs"]] == [("a", 1, 1.0), ("b", 1, 1.0)]
    assert {"commit", "date", "machine", "versions", "load_at_start", "settings"} <= result.keys()
    assert "runs_dir" not in result["bench"], "folders of one machine are not recorded"
    records.measure(path, result, plan, lambda row, seed: seen.append((row, seed)) or {}, lambda result: "")
    assert seen == [("a", 1), ("b", 1), ("b", 2), ("b", 2), ("a", 2)]


def test_a_benchmark_does_not_go_on_with_something_else(tmp_path):
    records.save(*begin(path := tmp_path / "r.json"))
    others = {"settings": {"default": {"seed": 2}}, "flags": {"bench": {"steps": 9}}, "kind": {"kind": "games"}}
    for what, changes in others.items():
        with pytest.raises(ConfigError, match=f"its runs have other {what}"):
            begin(path, **changes)
    records.save(path, json.loads(path.read_text()) | {"versions": {"torch": "1.0"}})
    with pytest.raises(ConfigError, match="its runs have other versions"):
        begin(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not a result file"):
        begin(path)


def test_a_commit_is_marked_where_the_code_differs_and_not_where_a_page_or_a_result_does(tmp_path):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@y.z", *words], check=True)

    git("init", "--quiet")
    for name in ("train_task.py", "README.md"):
        (tmp_path / name).write_text("first\n")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    commit = records.commit_of(tmp_path)
    (tmp_path / "README.md").write_text("second\n")
    assert records.commit_of(tmp_path) == commit
    assert not records.code_differs(commit, tmp_path)
    (tmp_path / "train_task.py").write_text("second\n")
    assert records.commit_of(tmp_path) == f"{commit}+"
    for unknown in (None, f"{commit}+", "f" * 40):
        assert records.code_differs(unknown, tmp_path)
    assert records.commit_of(tmp_path / "none") is None


def test_results_are_saved_whole_and_finite(tmp_path):
    result = {"kind": "solve", "chapter": "task", "env_id": "A/B-v1", "date": "2026-01-02 10:20:30"}
    result["machine"] = {"name": "AMD EPYC 2 cores"}
    assert records.default_path(result).name == "solve_task_A-B-v1_amd-epyc-2-cores_20260102-102030.json"
    records.save(path := tmp_path / "r.json", result)
    with pytest.raises(ValueError, match="not JSON compliant"):
        records.save(path, {"sps": float("nan")})
    assert json.loads(path.read_text()) == result


# ---- what a run came to


def test_a_run_ends_at_its_steps_or_by_itself(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text("""
import pathlib, sys, time
flags = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
folder = pathlib.Path(flags["runs-dir"]) / flags["run-name"]
folder.mkdir()
rows = [f"{steps},1.0,0,0.0,10" for steps in range(0, 101, 10)] + ["9999"]  # a torn line
(folder / "episodes.csv").write_text("\\n".join(["steps,seconds,actor,episode_return,length", *rows]))
time.sleep(float(flags["wait"]))
sys.exit(3)
""")
    args = SimpleNamespace(runs_dir=tmp_path)
    folder = common.train([str(script), "--wait=60"], args, "A/B no-clip", steps=100)
    assert folder.name.startswith("A-B-no-clip-"), "a plain name"
    assert common.steps_taken(folder) == 100
    with pytest.raises(SystemExit, match="3"):
        common.train([str(script), "--wait=0"], args, "failed", steps=110)


def test_rows_that_were_stopped_at_different_steps_are_compared_after_the_same(tmp_path):
    run_folder(tmp_path, games_of(range(1, 301)), steps=3_000, episodes=300, mean_return_100=250.5)
    stopped, whole = solve.outcome(tmp_path, 2_000), solve.outcome(tmp_path)
    assert (stopped["mean_return_100"], stopped["episodes"], stopped["late_return"]) == (150.5, 200, 150.5)
    assert (whole["mean_return_100"], whole["episodes"], whole["late_return"]) == (250.5, 300, 225.5)
    assert stopped["curve"][-1][0] == 2_000
    assert solve.outcome(tmp_path, 5)["mean_return_100"] is None, "no game had ended by then"


def test_a_curve_is_the_mean_of_the_last_100_games():
    points = common.curve_of(games_of(range(250)), points=1000)
    assert points[0] == (200, 10.0, sum(range(20)) / 20), "the first 19 games are too few for a mean"
    assert points[100] == (1200, 60.0, sum(range(20, 120)) / 100)
    assert points[-1] == (2500, 125.0, sum(range(150, 250)) / 100)
    thin = common.curve_of(games_of(range(419)), points=5)
    assert [steps for steps, _, _ in thin] == [200, 1200, 2200, 3190, 4190], "evenly, with both ends"


def test_a_population_is_judged_by_its_members(tmp_path):
    run_folder(tmp_path, [common.Game(90, 4.0, 1.0), common.Game(100, 5.0, 1.0)], evaluation_steps=70)
    rows = "0,100,1", "0,100,nan", "0,100,3", "1,200,5", "1,200,9", "1,200,1"
    (tmp_path / "lineage.csv").write_text("\n".join(["generation,steps,fitness", *rows]))
    found = {"evaluation_steps": 70, "best_fitness": 9.0, "last_median": 5.0}
    found["best_curve"] = [(100, 5.0, 3.0), (200, 5.0, 9.0)]
    assert solve.population_outcome(tmp_path, 4.0) == found | {"first_steps": 200}
    assert solve.population_outcome(tmp_path, None) == found | {"first_steps": None}


@pytest.mark.parametrize(("num_solved", "seconds", "steps"), [(2, 60.0, 600_000), (1, None, None)])
def test_medians_count_what_was_not_solved_as_endless(num_solved, seconds, steps):
    run = {"wall_seconds": 60.0, "steps": 600_000, "sps": 5e3}
    runs = [run | {"solved": seed <= num_solved} for seed in (1, 2, 3)]
    assert solve.medians(runs) == {"wall_seconds": seconds, "steps": steps, "sps": 5e3}


# ---- rates


def test_a_rate_in_turns_counts_the_time_that_was_the_trainers_own(monkeypatch):
    points = [(3.0, 50), (9.0, 100), (21.0, 300), (33.0, 700), (99.0, 9999)]  # the last one is of the shutdown
    events = [SimpleNamespace(wall_time=seconds, step=step, value=0.75) for seconds, step in points]
    monkeypatch.setattr(common, "scalars", lambda folder, name: events)
    turns, cpu = [(0.0, 10.0), (20.0, 22.0), (30.0, 34.0)], [(5.0, 1.0), (6.0, 2.0), (8.0, 4.0)]
    found = throughput.Contestant(None, Path("run"), turns, cpu).figures()
    assert found["sps"] == (700 - 100) / (1 + 2 + 3)
    assert (found["learner_ms"], found["others_ms"]) == (3000 / 600, 3000 / 600), "of the 6 s after the warm-up"
    assert throughput.at_most(2, found) == 2 / 0.010, "the cores are the limit"
    assert throughput.at_most(16, found) == 100 / (1 - 0.75), "the learner is, which may wait for a GPU"
    with pytest.raises(ConfigError, match=r"^warm-up=\d+: nothing was learned"):
        throughput.Contestant(None, Path("run"), [(0.0, 2.0), (20.0, 22.0)], cpu).figures()


def test_rates_relate_to_the_first_row_of_the_same_repetition():
    figures = [{"old": 100.0, "new": 110.0}, {"old": 50.0, "new": 60.0}, {"old": 80.0, "new": 80.0}]
    rest = {"learner_ms": 1.0, "others_ms": 3.0}
    runs = [{"figures": {name: {"sps": sps, **rest} for name, sps in each.items()}} for each in figures]
    assert throughput.medians(runs)["new"]["ratio"] == pytest.approx(1.1)


# ---- other libraries


def test_a_peers_run_has_a_rate_and_reaches_its_goal_or_not():
    text = 'banner\n[0.5, 100, null]\n{"a": 1}\n[1, 2]\n[1.5, 300, -20.5]\n3\n'
    assert peers.read_points(text) == [(0.5, 100, None), (1.5, 300, -20.5)]
    points = [(0.0, 0, None), (4.0, 10, 1.0), (5.0, 100, 2.0), (7.0, 300, 3.0), (10.0, 600, 2.5)]
    found = peers.figures(points, 3.0)
    assert (found["sps"], found["solved"], found["seconds"], found["steps"]) == (100.0, True, 7.0, 300)
    assert not peers.figures(points, None)["solved"]
    assert peers.figures(points[:1], 3.0)["sps"] is None


def test_each_peer_has_a_script_and_pinned_versions():
    for peer in peers.PEERS.values():
        assert (peers.FOLDER / f"run_{peer.environment}.py").exists()
        pins = [line for line in (peers.FOLDER / f"{peer.environment}.txt").read_text().splitlines() if line[0] != "#"]
        assert all(line.count("==") == 1 for line in pins)


# ---- searches


def test_what_is_searched_has_the_chapters_own_values():
    own = SimpleNamespace(update_epochs=10, learning_rate=3e-2, entropy_coef=0.0, batch_size=64, unroll_length=20)
    searched = tune.searched(own, ["--batch-size=64"])
    assert searched == {"learning_rate": 3e-2, "unroll_length": 20, "update_epochs": 10}
    asked = {}
    trial = SimpleNamespace(
        suggest_float=lambda name, low, high, log: asked.update({name: (low, high)}),
        suggest_categorical=lambda name, values: asked.update({name: values}),
    )
    tune.suggest(trial, searched)
    lengths, epochs = [8, 16, 20, 32, 64, 128], [1, 2, 4, 8, 10]
    assert asked == {"learning_rate": (1e-4, 3e-2), "unroll_length": lengths, "update_epochs": epochs}


def test_a_search_begins_with_the_chapters_settings_and_finds_better_ones(tmp_path, monkeypatch):
    """A trial's return is the higher, the closer the learning rate is to 3e-3."""
    optuna = pytest.importorskip("optuna")

    def train(trial, command, folder, total_steps):
        rate = next(float(flag.partition("=")[2]) for flag in command if flag.startswith("--learning-rate="))
        return -abs(math.log(rate / 3e-3))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "train", train)
    flags = ["--sampler-seed=0", "--trials=12", "--env-id=CartPole-v1", "--batch-size=64"]
    monkeypatch.setattr("sys.argv", ["tune.py", *flags])
    for _ in range(2):  # the second process continues the study
        assert tune.main() == 0
    study = optuna.load_study(study_name="study", storage=f"sqlite:///{tmp_path}/tune.sqlite3")
    assert len(study.trials) == 24
    assert study.trials[0].params["learning_rate"] == 1e-3
    assert study.best_value > study.trials[0].value
    for flags, message in (
        (["--env-id=Acrobot-v1"], "study=study: its trials are of another command: train_a3c_data"),
        (["--trials=0", "--study=none"], "out=tune.sqlite3: study none cannot be opened there"),
        (["--trials=0", "--out=none.sqlite3"], "out=none.sqlite3: there is no such file"),
        (["--out=none/x.sqlite3", "--env-id=CartPole-v1"], "out=none/x.sqlite3: study study cannot be opened there"),
    ):
        monkeypatch.setattr("sys.argv", ["tune.py", *flags])
        with pytest.raises(ConfigError, match=re.escape(message)):
            tune.main()
    assert [path.name for path in tmp_path.iterdir()] == ["tune.sqlite3"]


def test_a_search_that_a_signal_ended_still_tries_the_chapters_settings(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")

    def train(*of_a_trial):
        raise SystemExit(130)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "train", train)
    monkeypatch.setattr("sys.argv", ["tune.py", "--trials=1", "--env-id=CartPole-v1"])
    with pytest.raises(SystemExit):
        tune.main()
    monkeypatch.setattr(tune, "train", lambda *of_a_trial: 1.0)
    assert tune.main() == 0
    study = optuna.load_study(study_name="study", storage=f"sqlite:///{tmp_path}/tune.sqlite3")
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    assert study.trials[0].params == study.trials[1].params
    Path("runs/study-trial-2-s1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"study=study: .*runs/study-trial-2-s1 is there already"):
        tune.main()


# ---- how far chapter 7 scales

COSTS = Costs(10, rollout_bytes=1e6, weights_bytes=4e6, gradient_bytes=1e6, updates=1, collect=1.0, messages=0.01)
BUSY = {"messages": 0.2, "learn": 0.3, "agree": {2: 0.0}}
SLOW = {"bandwidth": 1e7}  # bytes/s: 0.1 s for a rollout, 0.4 s for the weights


@pytest.mark.parametrize(
    ("costs", "cluster", "rollouts", "bottleneck"),
    [
        ({}, {}, 8 / 1.01, "actors"),
        (BUSY, {}, 2.0, "learning"),
        (BUSY, {"trainers": 2}, 4.0, "learning"),
        ({**BUSY, "agree": {2: 0.5}}, {"trainers": 2}, 2.0, "all-reduce"),
        ({**BUSY, "weights_bytes": 0.0, "rollout_bytes": 0.0}, {**SLOW, "trainers": 2}, 2 / 0.6, "learning"),
        ({"weights_bytes": 0.0}, SLOW, 8 / 1.11, "actors"),
        ({"weights_bytes": 0.0}, {**SLOW, "nodes": 9}, 1e7 / 1e6, "link in"),
        ({}, {**SLOW, "nodes": 8, "actors_per_node": 1}, 1e7 / 4e6, "link out"),
        ({}, {"bandwidth": 2e7, "nodes": 8, "actors_per_node": 1}, 2e7 / 4e6, "link out"),
    ],
    ids=["actors", "trainer", "two", "all-reduce", "gradients", "link not full", "rollouts", "weights", "faster link"],
)
def test_a_cluster_is_as_fast_as_what_is_slowest(costs, cluster, rollouts, bottleneck):
    found = predict(COSTS._replace(**costs), Cluster(**{"nodes": 2, "actors_per_node": 4, **cluster}), rounds=60)
    assert found.sps / COSTS.rollout_steps == pytest.approx(rollouts, rel=0.04)
    assert found.bottleneck == bottleneck or (bottleneck, found.busy["messages"]) == (
        "learning",
        found.busy["learning"],
    )


def test_a_barrier_costs_what_the_slowest_of_several_takes_longer():
    for trainers in (2, 4, 8):  # with one actor each, whose times are uniform: the mean of the largest of them
        costs = COSTS._replace(messages=0.0, agree={trainers: 0.0})
        found = predict(costs, Cluster(trainers, 1, trainers), rounds=200)
        longest = 1 + JITTER * (trainers - 1) / (trainers + 1)
        assert found.sps / COSTS.rollout_steps == pytest.approx(trainers / longest, rel=0.005)


def test_what_network_and_object_stores_carry_is_counted():
    found = predict(COSTS._replace(agree={4: 0.0}), Cluster(2, 4, 4, bandwidth=1e12), rounds=60)
    assert found.carried == pytest.approx({"rollouts": 1e5, "weights": 4e5, "gradients": 1.5e5}, rel=0.05)
    assert found.link_in == pytest.approx(found.sps / 4 * (1e5 + 1.5e5), rel=1e-6)
    assert found.stores >= 2 * 4e6 * (4 + 2 * 4), "two versions of each trainer, there and on each node"
    assert 1e6 <= found.trainer_store - 2 * 4e6 <= 2e6, "one or both of its actors' rollouts"


def test_costs_are_found_again_from_rates():
    true = COSTS._replace(collect=0.5, learn=0.2, messages=0.03, transport=0.2, skew=0.02, agree={2: 0.01})
    clusters = [Cluster(nodes, 2, trainers) for nodes, trainers in ((1, 1), (2, 1), (2, 2))]
    rates = [(cluster, predict(true, cluster, rounds=40).sps) for cluster in clusters]
    found = fit(true._replace(messages=0.01, transport=0.1, skew=0.01), rates)
    unseen = Cluster(3, 3, 2)
    assert predict(found, unseen).sps == pytest.approx(predict(true, unseen).sps, rel=0.02)
    assert found.transport == pytest.approx(0.2, rel=0.1)


def test_a_cluster_is_nodes_and_trainers():
    assert scale.cluster_of(scale.Args(), "4x2") == Cluster(4, 3, 2)
    for row in ("4", "x2", "4x0", "1x2"):
        with pytest.raises(ConfigError, match=f"clusters={row}: must be nodes x trainers"):
            scale.cluster_of(scale.Args(), row)
