"""Examples and links in the docs: functions that are named are there, and code runs."""

import ast
import math
import re
from pathlib import Path

import pytest
from harness import A3C_DATA, scalars

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


def test_the_example_of_an_environment_can_be_trained_on(run_inline, tmp_path):
    text = (ROOT / "docs" / "environments.md").read_text()
    code = re.search(r"```python\n(# corridor.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "corridor.py").write_text(code[1])
    flags = ["--env-id", "corridor:Corridor-v0", "--env-kwargs", "length=3", "--total-steps", "2000"]
    done = run_inline(A3C_DATA.script, *flags, "--num-envs", "4", "--batch-size", "32")
    assert done.code == 0, done.err
    assert done.config["args"]["env_id"] == "corridor:Corridor-v0?length=3"
    first = done.log.splitlines()[1]
    assert "obs (1,) · Discrete(2) · MLP 2x64 · " in first
    assert "rewards as they are · lr 5e-4 -> 0" in first
    played = run_inline("play.py", "runs/r", "--episodes", "3")
    assert played.code == 0, played.err
    assert "training's mean return at this checkpoint" in played.out


def test_the_example_of_an_algorithm_can_be_trained_and_resumed(scripts, tmp_path):
    page = (ROOT / "docs" / "algorithm.md").read_text()
    script = (ROOT / A3C_DATA.script).read_text()
    for hunk in re.search(r"```diff\n@@\n(.*?)\n```", page, re.DOTALL)[1].split("\n@@\n"):
        lines = [(line[:1], line[1:]) for line in hunk.split("\n")]
        old, new = ("\n".join(text for sign, text in lines if sign in ("", " ", own)) for own in "-+")
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    (tmp_path / "train_reward.py").write_text(script)
    few = ["--num-envs", "2", "--num-actors", "1", "--batch-size", "32", "--total-steps", "200"]
    started = scripts.start(str(tmp_path / "train_reward.py"), "--run-name", "r", "--prediction-cost", "0.3", *few)
    done = scripts.finish(started, "r")
    assert done.code == 0, done.err
    assert (done.config["algorithm"], done.config["args"]["prediction_cost"]) == ("reward", 0.3)
    losses = [event.value for event in scalars(done.folder)["losses/prediction"]]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    before = done.state["extra"]["predict"]["weight"]
    again = scripts.start(str(tmp_path / "train_reward.py"), "--resume", "runs/r", "--total-steps", "400")
    done = scripts.finish(again, "r")
    assert done.code == 0, done.err
    assert "it starts empty" not in done.log
    assert (done.state["extra"]["predict"]["weight"] - before).abs().max() > 0, "it is trained"
