"""The command `a3c-mp` of an installed package: `a3c-mp train a3c_data --cuda` runs train_a3c_data.py, and so on."""

import importlib
import sys

import a3c_mp
from a3c_mp._bootstrap import CHAPTERS
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with


def run_script() -> int:
    """Run the script that the command line names, with the flags that follow; returns its exit code."""
    scripts = sorted(path.stem for path in CHAPTERS.glob("*.py") if path.stem.startswith(("train_", "play", "plot")))
    command = sys.argv[1:3] if sys.argv[1:2] == ["train"] else sys.argv[1:2]
    name = "_".join(command)
    if name == "--version":
        print(f"a3c-mp {a3c_mp.__version__}")
        return 0
    if {"-h", "--help"} & {*command}:
        names = " | ".join(name.replace("train_", "train ") for name in scripts)
        print(f"usage: a3c-mp SCRIPT [--help]   SCRIPT: {names}")
        return 0
    if name not in scripts:
        raise ConfigError("script", " ".join(command), f"must be one of {', '.join(scripts)}", "see a3c-mp --help")
    is_installed = CHAPTERS.name == "chapters"
    module = importlib.import_module(f"a3c_mp.chapters.{name}" if is_installed else name)
    sys.argv = [" ".join(["a3c-mp", *command]), *sys.argv[1 + len(command) :]]
    return module.main()


def main() -> None:
    exit_with(run_script)
