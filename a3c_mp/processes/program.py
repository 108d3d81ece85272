"""What this program is: its versions and its commit, which nodes of one run compare."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import a3c_mp


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, of this project and of other packages."""
    own = {"python": platform.python_version(), "a3c_mp": a3c_mp.__version__}
    return own | {name: importlib.metadata.version(name) for name in packages}


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
