"""The code of the documentation: its shell lines parse, its flags exist, its Python compiles and runs."""

import ast
import dataclasses
import importlib
import json
import re
import shlex
import textwrap
from functools import cache
from pathlib import Path

import pytest
from harness import ALL_CHAPTERS, CONTINUOUS, POPULATION_PPO, ROOT

from a3c_mp.algorithms.actor_critic_settings import PPOArgs
from a3c_mp.cli import parse_own, parse_plain
from a3c_mp.cluster import __main__ as cluster
from a3c_mp.config import FORMAT, flag_name
from a3c_mp.errors import ConfigError
from a3c_mp.run.run_dir import as_recorded
from a3c_mp.task.parallel import runner
from a3c_mp.wrappers import make_env
from bench import common

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def blocks(page, language):
    """The fenced code of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


# ---- shell lines


ELSEWHERE = {"apt", ".", "cd", "cp", "echo", "exit", "export", "git", "mkdir", "nft", "nvidia-cuda-mps-control",
             "scontrol", "test", "wandb"}  # fmt: skip
"""programs that are not of this project"""


def commands(text):
    """The commands of a block of shell lines, each a list of words."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r"\s(?:&&|\|)\s", line):
            words = shlex.split(command, comments=True)
            while words and (words[0] == "srun" or re.match(r"[A-Z_]+=", words[0])):
                words.pop(0)
            if words:
                yield words


def check(words):
    """Raise an error for a command whose program, flags or values are not there."""
    program, *rest = words
    if program in ("accelerate", "torchrun"):
        program, rest = "python", rest[next(i for i, word in enumerate(rest) if word.endswith(".py")) :]
    if program == "a3c-mp":
        number = 2 if rest[0] == "train" else 1
        check_script(f"{'_'.join(rest[:number])}.py", rest[number:])
    elif Path(program).name in ("python", "python3"):
        if rest[:2] == ["-m", "a3c_mp.cluster"]:
            check_cluster(rest[2:])
        elif rest[:2] not in (["-m", "venv"], ["-m", "http.server"]):
            check_script(rest[0], rest[1:])
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in rest:
            pattern = rf"^{word.partition('=')[0]} \?=" if "=" in word else rf"^{word}:"
            assert re.search(pattern, makefile, re.MULTILINE), word
    elif program == "pip":
        check_packages([word for word in rest[1:] if not word.startswith("-")])
    elif program == "docker":
        if rest[0] == "run" and (own := rest[rest.index("a3c-mp") + 1 :]):
            check(own)
        for name in re.findall(r"--build-arg (\w+)=", " ".join(rest)):
            assert f"ARG {name}=" in (ROOT / "Dockerfile").read_text()
    else:
        assert program in ELSEWHERE, words


def check_script(script, flags):
    flags = [flag for flag in flags if flag != "--help"]
    if not (ROOT / script).exists():  # of a page, run by another test
        assert f'"{script}"' in all_tests(), f"no test runs {script}"
    elif script.startswith("train_"):
        common.trainer_settings([script, *flags])
    else:
        args_class = importlib.import_module(script.removesuffix(".py").replace("/", ".")).Args
        if not issubclass(args_class, common.Args):
            parse_plain(args_class, "", flags)
            return
        args, others = parse_own(args_class, "", flags)
        common.trainer_settings([*common.CHAPTERS[args.chapter], *others])


def check_cluster(flags):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("head", "join", "status"):
            command = lambda args: 0  # noqa: E731
            command.__name__ = name
            patch.setattr(cluster, name, command)
        patch.setattr("sys.argv", ["cluster", *flags])
        assert cluster.main() == 0


def check_packages(words):
    pyproject = (ROOT / "pyproject.toml").read_text()
    for word in words:
        path, _, extras = word.rstrip("]").partition("[")
        if path == "." or "/" in path:
            assert all(re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras.split(",") if extra)
        else:
            name = re.split("[=<>]", path)[0]
            assert name == "swig" or re.search(rf'"{name}[^\w-]', pyproject), word


@cache
def all_tests():
    return "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Run folders by the names that pages use, of chapter 1."""
    for name in ("NAME", "heater"):
        (folder := tmp_path / "runs" / name).mkdir(parents=True)
        args = as_recorded(common.trainer_settings(["train_a3c_data.py"]))
        (folder / "config.json").write_text(json.dumps({"format": FORMAT, "algorithm": "a3c_data", "args": args}))
    monkeypatch.chdir(tmp_path)


@EACH_PAGE
def test_each_shell_line_of_a_page_is_one_that_works(page, runs):
    for words in (words for block in blocks(page, "bash") for words in commands(block)):
        try:
            check(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{shlex.join(words)}: {error}") from error


@pytest.mark.parametrize(
    "line",
    [
        "python train_a3c_data.py --num-env 3", "python play.py runs/NAME --episodes 0", "make tests", "python x.py",
        "pip install gymnasiun", "a3c-mp train a3c --cuda", "python bench/tune.py --trails 2", "pip install '.[plots]'",
        "python -m a3c_mp.cluster join", "accelerate launch --num_processes 2 train_population.py --populations 3",
    ],
)  # fmt: skip
def test_a_line_that_does_not_work_is_found(line):
    found = [*commands(line)]
    assert found
    for words in found:
        with pytest.raises((ConfigError, AssertionError, SystemExit)):
            check(words)


# ---- flags in the text


OTHERS_FLAGS = {"cpu", "cpus", "gpus", "init", "logdir", "memory", "nnodes", "requeue", "shm-size", "signal"}
"""flags of docker, Slurm and torchrun that pages name; those with a "_", which no flag here has, are launchers'"""


@cache
def known_flags():
    classes = [chapter.args_class for chapter in (*ALL_CHAPTERS, *CONTINUOUS, POPULATION_PPO)]
    for path in [ROOT / "play.py", ROOT / "plot.py", *(ROOT / "bench").glob("*.py")]:
        module = importlib.import_module(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."))
        classes += [module.Args] if hasattr(module, "Args") else []
    known = {flag_name(field.name) for cls in classes for field in dataclasses.fields(cls)}
    known |= set(re.findall(r'"--([\w-]+)"', (ROOT / "a3c_mp" / "cluster" / "__main__.py").read_text()))
    examples = "".join(block for page in PAGES for kind in ("python", "diff") for block in blocks(page, kind))
    known |= {flag_name(name) for name in re.findall(r"^\+?    (\w+): \w+ = ", examples, re.MULTILINE)}
    return known | {"help", "version"} | OTHERS_FLAGS


@EACH_PAGE
def test_flags_that_a_page_names_are_there(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    if page.stem == "coming_from":  # the third column is ours
        text = "".join(line.split("|")[3] for line in text.splitlines() if line.startswith("|") and line.count("|") > 4)
    code = " ".join(re.findall(r"`[^`]+`", text))
    named = {name.removeprefix("no-") for name in re.findall(r"(?<![\w-])--([a-z][\w-]*\w)(?![\w-])", code)}
    assert {name for name in named if "_" not in name} <= known_flags()


# ---- code


@EACH_PAGE
def test_python_on_a_page_compiles_and_imports_what_is_there(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in ("a3c_mp", "train_a3c_data"):
                module = importlib.import_module(node.module)
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)], node.module


def test_what_pages_import_is_in_the_reference():
    """Constants aside."""
    used = set()
    for block in (block for page in PAGES for block in [*blocks(page, "python"), *blocks(page, "diff")]):
        block = re.sub(r"^[+ -]", "", block, flags=re.MULTILINE) if "\n@@" in block or block[:2] == "@@" else block
        used |= set(re.findall(r"^from a3c_mp\.(?!\w+ import ppo)[\w.]+ import ([\w, ]+)", block, re.MULTILINE))
    names = {name.strip() for line in used for name in line.split(",")}
    listed = set(re.findall(r"^- \[`(\w+)`\]", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert len(names) > 10
    assert {name for name in names if name and not name.isupper() and name != "ppo"} - listed <= {
        *("Positive", "NonNegative")
    }, "annotations of settings, which are listed under `Between`"


def test_the_environment_of_the_readme_and_the_field_of_rollouts_are_examples_that_work(tmp_path, monkeypatch):
    (code,) = blocks("README.md", "python")
    (tmp_path / "my_env.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("my_env:Walk-v0")
    env.reset(seed=0)
    assert env.step(0)[1] == pytest.approx(1.0, abs=0.2)
    (code,) = blocks("docs/algorithm.md", "python")
    exec(code, names := {"PPOArgs": PPOArgs})
    assert names["Args"].rollout_fields["angle"].shape == (2,)


def test_the_task_without_learning_counts(capsys):
    exec(blocks("docs/task.md", "python")[0], names := {"__name__": "page"})
    runner(1)(names["main"])
    totals = re.findall(r"iteration \d: (\d+)", capsys.readouterr().out)
    assert [int(total) for total in totals] == sorted({int(total) for total in totals})
    assert len(totals) == 5
