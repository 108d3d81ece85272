"""What this program is: versions of it and of what its results depend on, and the commit of its source."""

import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import a3c_mp

PACKAGES = ("torch", "gymnasium", "numpy", "ale-py", "mujoco", "box2d", "ray")
MUST_AGREE = {"protocol": 9, "a3c_mp": 9, "torch": 2, "gymnasium": 2, "ale-py": 2, "mujoco": 2, "numpy": 1}
"""name -> how many numbers of its version must be the same in all processes of a run; of all others none"""
EVERYWHERE = ("protocol", "a3c_mp", "torch")  # those that cannot be absent at one end


def describe_program() -> dict[str, str]:
    """Name -> version of this program, Python and the packages that are installed; `commit` if there is one.

    Builds of a package for CPU and CUDA count as the same.
    """
    found = {"a3c_mp": a3c_mp.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package).split("+")[0]
    return found | ({"commit": commit} if (commit := git_commit()) else {})


def differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], must_agree: Mapping[str, int] = MUST_AGREE
) -> tuple[str, str]:
    """What must agree and does not, and what else differs: `gymnasium 0.29.1 instead of 1.2.2`; empty if nothing."""
    fatal, harmless = list[str](), list[str]()
    for name in sorted(theirs.keys() | ours.keys()):
        here, there = (str(versions.get(name)) for versions in (ours, theirs))
        if here == there or (not (name in theirs and name in ours) and name not in EVERYWHERE):
            continue  # a package that only one of them has is for other environments
        numbers = must_agree.get(name, 0)
        agrees = here.split(".")[:numbers] == there.split(".")[:numbers]
        (harmless if agrees else fatal).append(f"{name} {there:.50} instead of {here}")
    return ", ".join(fatal), ", ".join(harmless)


@cache
def git_commit() -> str | None:
    """Commit of the source tree, with "+" when it differs from the commit; None if git does not track it."""
    here = Path(__file__)

    def git(*command: str) -> str:
        run = subprocess.run(["git", *command], cwd=here.parent, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # installed packages may lie in a repository of the user's own
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.CalledProcessError):
        return None
