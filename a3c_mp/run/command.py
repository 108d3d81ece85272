"""The command `a3c-mp` of an installed package: the scripts by name.

    a3c-mp train a3c_data --env-id CartPole-v1      train_a3c_data.py
    a3c-mp play runs/NAME                           play.py
    a3c-mp plot runs/NAME                           plot.py

A package has the scripts in `a3c_mp/chapters`, the source tree at its root.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import a3c_mp
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with

INSTALLED, SOURCE = Path(__file__).parents[1] / "chapters", Path(__file__).parents[2]
"""folders of the scripts"""
HELP = ("-h", "--help")


def script_names() -> list[str]:
    """Names of all scripts, as modules of their folder."""
    folder = INSTALLED if INSTALLED.is_dir() else SOURCE
    return sorted(path.stem for path in folder.glob("*.py") if path.stem.startswith(("train_", "play", "plot")))


def find_script(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return (name of a script, its flags). Raises ConfigError for a command or chapter that there is not."""
    command, *rest = words or [""]
    chapters = [name.removeprefix("train_") for name in script_names() if name.startswith("train_")]
    if command in ("play", "plot"):
        return command, rest
    if command != "train":
        raise ConfigError("command", command, "must be train, play or plot", "see a3c-mp --help")
    if not rest or rest[0] not in chapters:
        raise ConfigError("chapter", rest[0] if rest else "", f"must be one of {', '.join(chapters)}")
    return f"train_{rest[0]}", rest[1:]


def run_script() -> int:
    """Run the script that the command line names; its exit code."""
    words = sys.argv[1:]
    if (words[:1] and words[0] in HELP) or words in (["train", flag] for flag in HELP):
        chapters = " | ".join(name.removeprefix("train_") for name in script_names() if name.startswith("train_"))
        print(f"usage: a3c-mp train CHAPTER [--help]   CHAPTER: {chapters}")
        print("       a3c-mp play RUN [--help]\n       a3c-mp plot RUN ... [--help]\n       a3c-mp --version")
        return 0
    if words == ["--version"]:
        print(f"a3c-mp {a3c_mp.__version__}")
        return 0
    name, flags = find_script(words)
    if not INSTALLED.is_dir():
        sys.path.insert(0, str(SOURCE))  # an editable install finds the packages only
    module = importlib.import_module(f"a3c_mp.chapters.{name}" if INSTALLED.is_dir() else name)
    sys.argv = [" ".join(["a3c-mp", *words[: len(words) - len(flags)]]), *flags]
    return module.main()


def main() -> None:
    exit_with(run_script)
