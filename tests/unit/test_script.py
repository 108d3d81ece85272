"""The end of a script: by the interpreter's own way out, or at once where that could wait without limit."""

import errno
import io
import signal
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from a3c_mp.errors import ConfigError, NothingToDo
from a3c_mp.run import command
from a3c_mp.run import script as ending
from a3c_mp.run.script import exit_with


class EndedAtOnce(BaseException):
    """Stands in for `os._exit`."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    def end(code):
        raise EndedAtOnce(code)

    monkeypatch.setattr(ending, "END_SECONDS", 0.1)
    monkeypatch.setattr(ending.os, "_exit", end)
    monkeypatch.setattr(ending.atexit, "_run_exitfuncs", lambda: None)


def test_a_thread_that_ends_soon_is_waited_for():
    def main():
        threading.Thread(target=lambda: None).start()
        return 3

    with pytest.raises(SystemExit) as end:
        exit_with(main)
    assert end.value.code == 3


def test_a_thread_that_does_not_end_is_left_behind():
    over = threading.Event()

    def main():
        threading.Thread(target=over.wait).start()
        return 3

    try:
        with pytest.raises(EndedAtOnce) as end:
            exit_with(main)
        assert end.value.args == (3,)
    finally:
        over.set()


def test_a_group_of_learners_that_is_still_there_is_left_behind(monkeypatch):
    monkeypatch.setattr(ending.dist, "is_initialized", lambda: True)
    with pytest.raises(EndedAtOnce) as end:
        exit_with(lambda: 1)
    assert end.value.args == (1,)


class Output(io.StringIO):
    """A stdout that waits or fails when it is flushed."""

    def __init__(self, over=None):
        super().__init__()
        self.over = over

    def flush(self):
        if self.over is None:
            raise OSError(errno.ENOSPC, "full")
        self.over.wait()


def test_output_that_is_not_read_does_not_delay_the_end(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(sys, "stdout", Output(over))
    with pytest.raises(EndedAtOnce) as end:
        exit_with(lambda: 0)
    over.set()
    assert end.value.args == (0,)


def test_output_that_cannot_be_written_does_not_change_the_code(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Output())
    with pytest.raises(SystemExit) as end:
        exit_with(lambda: 0)
    assert end.value.code == 0


def test_nothing_to_do_is_one_line_and_code_0(capsys):
    def main():
        raise NothingToDo("it has ended")

    with pytest.raises(SystemExit) as end:
        exit_with(main)
    assert end.value.code == 0
    assert capsys.readouterr() == ("it has ended\n", "")


def test_an_error_is_a_traceback_and_code_1(capsys):
    with pytest.raises(SystemExit) as end:
        exit_with(lambda: {}["no such key"])
    assert end.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last)")
    assert printed.endswith("KeyError: 'no such key'\n")


def test_signals_that_an_environment_ignores_end_a_script_that_was_not_started_so(monkeypatch):
    monkeypatch.setattr(ending, "IGNORED_AT_START", {signal.SIGHUP})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def main():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        return 0

    with pytest.raises(SystemExit) as end:
        exit_with(main)
    assert end.value.code == 128 + signal.SIGTERM


# ---- the command a3c-mp


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train", "a3c_data", "--env-id", "X"], ("train_a3c_data", ["--env-id", "X"])),
        (["play", "runs/r", "--help"], ("play", ["runs/r", "--help"])),
        (["plot"], ("plot", [])),
    ],
)
def test_the_command_names_every_script(words, found):
    assert command.find_script(words) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "command: must be train, play or plot; see a3c-mp --help"),
        (["trian", "impala"], "command=trian: must be train, play or plot"),
        (["train"], "chapter: must be one of a3c_data, a3c_grad, apex, "),
        (["train", "--env-id"], "chapter=--env-id: must be one of"),
    ],
)
def test_the_command_refuses_what_there_is_not(words, message):
    with pytest.raises(ConfigError, match=message):
        command.find_script(words)


def test_the_command_runs_a_script_with_its_own_flags_and_name(monkeypatch, capsys):
    called = []
    monkeypatch.setattr("plot.main", lambda: called.append(list(sys.argv)) or 3)
    monkeypatch.setattr("sys.argv", ["a3c-mp", "plot", "runs/x", "--help"])
    assert command.run_script() == 3
    assert called == [["a3c-mp plot", "runs/x", "--help"]]
    monkeypatch.setattr("sys.argv", ["a3c-mp", "train", "--help"])
    assert command.run_script() == 0
    assert "a3c_data | a3c_grad | apex" in capsys.readouterr().out


def test_the_package_has_every_folder_of_the_library():
    root = Path(__file__).parents[2]
    folders = {".".join(file.parent.relative_to(root).parts) for file in root.glob("a3c_mp/**/__init__.py")}
    with (root / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]
    assert set(packages) == folders | {"a3c_mp.chapters", "wrappers"}
