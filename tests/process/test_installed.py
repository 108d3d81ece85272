"""The package: a wheel that is built and installed trains outside the source tree, where chapters import each other."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness import ALL_CHAPTERS, ROOT, TASK, Finished, row_id


def run(command, folder, *words):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(command), *words], cwd=folder, env=env, capture_output=True, text=True, timeout=170)
    return Finished(done.returncode, done.stdout, done.stderr, folder / "runs" / "r")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command a3c-mp in a virtual environment that has the installed wheel, and all other packages of this one."""
    folder = tmp_path_factory.mktemp("package")
    tree, venv = folder / "tree", folder / "venv"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "docs", "tests", "bench", "runs", "*.egg-info")
    )
    (tree / "own_env.py").touch()  # of the user, beside the scripts
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheel = ["wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(tree)]
    subprocess.run([*pip, *wheel], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "existing.pth").write_text(sysconfig.get_paths()["purelib"])
    install = [
        "--python",
        str(venv / "bin/python"),
        "install",
        "--no-index",
        "--no-deps",
        *map(str, folder.glob("*.whl")),
    ]
    subprocess.run([*pip, *install], check=True)
    found = run(venv / "bin/python", folder, "-c", "import a3c_mp; print(a3c_mp.__file__)").out
    assert Path(found).is_relative_to(venv), found
    scripts = {path.name for path in (packages / "a3c_mp/chapters").glob("*.py")}
    assert scripts == {"play.py", "plot.py", *(chapter.script for chapter in ALL_CHAPTERS)}
    return venv / "bin/a3c-mp"


OWN_ENV = """
import gymnasium
import gymnasium.envs.classic_control

gymnasium.register("Own-v0", gymnasium.envs.classic_control.CartPoleEnv, max_episode_steps=500)
"""


@pytest.mark.parametrize(
    "chapter", [pytest.param(c, marks=[] if c is TASK else pytest.mark.slow) for c in ALL_CHAPTERS], ids=row_id
)
def test_an_installed_package_trains_outside_the_source_tree(chapter, command, tmp_path):
    words = [Path(chapter.script).stem, "--run-name", "r", *chapter.flags, "--total-steps", "600"]
    if chapter is TASK:  # no other module of the package takes a name that a user may have given to one
        (tmp_path / "wrappers.py").write_text(OWN_ENV)
        words[words.index("--env-id") + 1] = "wrappers:Own-v0"
    done = run(command, tmp_path, *words)
    assert done.code == 0, done.err
    assert done.summary["steps"] >= 600
    if chapter is not TASK:
        played = run(command, tmp_path, "play", "runs/r", "--episodes", "1")
        assert played.code == 0, played.err


@pytest.mark.slow
def test_an_installed_package_trains_from_python(command, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_ENV)
    program = (
        "import a3c_mp, mine\nresult = a3c_mp.train('a3c_data', env_id='mine:Own-v0', run_name='r', total_steps=600)"
    )
    program += "\nprint(result.policy().env_id)"
    done = run(command.with_name("python"), tmp_path, "-c", program)
    assert done.code == 0, done.err
    assert done.out.endswith("mine:Own-v0\n")
    assert done.config["command"][0].endswith("site-packages/a3c_mp/chapters/train_a3c_data.py")
