"""Examples and links in the docs: functions that are named are there, and code runs."""

import ast
import csv
import importlib
import re
from pathlib import Path

import pytest
import torch
from harness import A3C_DATA
from nodes import free_port

import train_population
from a3c_mp.run.episode_log import read_episodes
from a3c_mp.task.parallel import runner
from bench import common

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./]+\.py)\)")
PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if LINK.search(path.read_text()))


def defined(path: Path) -> set[str]:
    """Functions of a file, methods as `Class.method`."""
    tree = ast.parse(path.read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        names |= {f"{cls.name}.{node.name}" for node in cls.body if isinstance(node, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_functions_that_a_page_links_to_are_there(page):
    for name, target in LINK.findall(page.read_text()):
        assert name in defined((page.parent / target).resolve()), (name, target)


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], ids=lambda path: path.stem)
def test_tests_that_a_page_names_are_there(page):
    files = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert set(re.findall(r"`(?:\w+/)*(test_\w+\.py)", page.read_text())) <= files


def test_the_table_of_settings_has_those_of_chapter_1():
    text = (ROOT / "docs" / "a3c_data.md").read_text().partition("## Settings")[2].partition("**How many")[0]
    header, _, *rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    for column, title in enumerate(header[1:], 1):
        settings = common.trainer_settings([A3C_DATA.script, "--env-id", title.strip().partition(",")[0]])
        for row in rows:
            name, shown = re.match(r"`(\w+)`", row[0])[1], row[column].strip()
            number = shown.partition(",")[0] if " " in shown else shown.replace(",", "")
            assert (None if shown == "by the deviation of returns" else float(number)) == getattr(settings, name)
            assert name != "reward_scale" or settings.reward_clip == ("of the sign" in shown)


def test_settings_on_the_page_for_users_of_other_libraries_are_there():
    page = (ROOT / "docs" / "coming_from.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    named = {name.replace("-", "_") for row in rows if len(row) == 4 for name in re.findall(r"`--([\w-]+)", row[2])}
    named |= {name for row in rows if len(row) == 2 for name in re.findall(r"(\w+)=", row[1].split("for `")[0])}
    names = "a3c_data", "a3c_grad", "apex_dqn", "impala"
    chapters = [common.trainer_settings(common.CHAPTERS[name]) for name in names]
    assert len(named) > 20
    assert named - {"sampled", "algo"} <= {name for settings in chapters for name in vars(settings)}


def test_the_example_of_an_environment_can_be_trained_on(run_inline, tmp_path):
    text = (ROOT / "docs" / "environments.md").read_text()
    code = re.search(r"```python\n(# corridor.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "corridor.py").write_text(code[1])
    flags = ["--env-id", "corridor:Corridor-v0", "--env-kwargs", "length=3", "--total-steps", "2000"]
    done = run_inline(A3C_DATA.script, *flags, "--num-envs", "4", "--batch-size", "32")
    assert done.code == 0, done.err
    assert done.config["args"]["env_id"] == "corridor:Corridor-v0?length=3"
    (described,) = (line for line in done.log.splitlines() if "obs (1,) · Discrete(2) · MLP 64 64 · " in line)
    assert "rewards by the deviation of returns · lr 0.0005 -> 0" in described
    played = run_inline("play.py", "runs/r", "--episodes", "3", "--video", "game.mp4")
    assert played.code == 0, played.err
    assert (tmp_path / "game.mp4").stat().st_size > 0
    assert "training's mean return at this checkpoint" in played.out


def example_of_ray(folder: Path) -> Path:
    """Write the algorithm of docs/ray.md into a folder; returns its path."""
    code = re.search(r"```python\n(# train_ray_ppo.py\n.*?)```", (ROOT / "docs" / "ray.md").read_text(), re.DOTALL)
    assert code[1].count("\n") <= 60
    (path := folder / "train_ray_ppo.py").write_text(code[1])
    return path


def test_the_example_of_an_algorithm_on_ray_has_the_bits_of_chapter_1_and_can_be_resumed(
    run_inline, tmp_path, monkeypatch
):
    script = example_of_ray(tmp_path).name
    monkeypatch.syspath_prepend(tmp_path)
    flags = [*A3C_DATA.flags, "--deterministic", "--total-steps", "1000"]
    on_ray, alone = run_inline(script, *flags), run_inline(A3C_DATA.script, *flags, name="alone")
    assert on_ray.code == 0, on_ray.err
    assert on_ray.config["algorithm"] == "ray_ppo"
    assert on_ray.summary["weights_sha256"] == alone.summary["weights_sha256"]
    assert "resumed from runs/r/" in run_inline(script, "--resume", "runs/r", "--total-steps", "1200").out


@pytest.mark.slow
def test_the_example_of_an_algorithm_on_ray_learns(scripts):
    script = str(example_of_ray(scripts.runs_dir))
    flags = ["--env-id", "CartPole-v1", "--run-name", "r", "--total-steps", "40000"]
    done = scripts.finish(scripts.start(script, *flags), "r")
    assert done.code == 0, done.err
    returns = [episode.episode_return for episode in read_episodes(done.folder / "episodes.csv")]
    assert sum(returns[-20:]) > 3 * sum(returns[:20])


def test_the_example_of_an_algorithm_of_a_population_trains_resumes_and_plays(run_inline, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "population.md").read_text()
    code = re.search(r'```python\n("""Advantage actor-critic in a population.*?)```', text, re.DOTALL)
    (tmp_path / "train_population_a2c.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("train_population_a2c")
    module.main = lambda: train_population.main(module.ALGORITHMS)  # what its last line calls
    flags = ["--population", "2", "--num-envs", "4", "--generation-steps", "400", "--eval-episodes", "2"]
    flags += ["--mutate-hyperparameters", "9", "--unroll-length", "50", "--env-id", "CartPole-v1"]
    done = run_inline("train_population_a2c.py", *flags, "--total-steps", "1600")
    assert done.code == 0, done.err
    assert (done.config["algorithm"], done.summary["steps"]) == ("population_a2c", 1600)
    rows = list(csv.DictReader((done.folder / "lineage.csv").open()))
    assert len({row["gae_lambda"] for row in rows}) > 2
    again = run_inline("train_population_a2c.py", "--resume", "runs/r", "--total-steps", "2400")
    assert (again.code, again.summary["steps"]) == (0, 2400), again.err
    assert run_inline("play.py", "runs/r", "--episodes", "2").code == 0


def test_the_example_of_a_task_learns_on_two_runners_and_goes_on_from_its_checkpoint(
    scripts, forked, monkeypatch, capfd
):
    """The learner's runner is a script; the other one, which joins it over TCP, is this process."""
    text = (ROOT / "docs" / "task.md").read_text()
    code = re.search(r"```python\n(# my_task.py\n.*?)```", text, re.DOTALL)
    (scripts.runs_dir / "my_task.py").write_text(code[1])
    monkeypatch.chdir(scripts.runs_dir)
    monkeypatch.syspath_prepend(scripts.runs_dir)
    address = f"tcp://127.0.0.1:{free_port()}"
    learner = scripts.start(str(scripts.runs_dir / "my_task.py"), "learn", address)
    scripts.wait_until(Path("key").exists, learner)
    my_task = importlib.import_module("my_task")
    my_task.start("join", address)
    done = scripts.finish(learner, "r")
    assert (done.code, done.err) == (0, "")
    begin, *found, games = done.out.splitlines()
    assert begin == "begins at iteration 0"
    results = [re.fullmatch(r"iteration (\d+): mean return ([\d.]+)", line).groups() for line in found]
    iterations, returns = [int(iteration) for iteration, _ in results], [float(value) for _, value in results]
    assert iterations == sorted(set(iterations)), "new weights each time"
    assert returns[0] < 100 < my_task.GOAL <= max(returns)
    assert re.search(r"node\.1: .*node\.[34]: ", games), "the own collector, and one that has joined at least"
    saved = torch.load("my_task.pt")
    capfd.readouterr()
    runner(3, labels=["learner", "collector", "evaluator"])(my_task.main)
    begin, first, *_ = capfd.readouterr().out.splitlines()
    iteration = int(re.fullmatch(r"begins at iteration (\d+)", begin)[1])
    assert iteration == saved["train_iter"] >= iterations[-1] > 0
    assert first.startswith(f"iteration {iteration}: mean return ")
    assert float(first.rpartition(" ")[2]) > returns[0], "with the weights of the checkpoint"
