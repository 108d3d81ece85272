"""The end of a script: by the interpreter's own way out, or at once where that could wait without limit."""

import errno
import functools
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest

from a3c_mp.errors import ConfigError, NothingToDo, Stopped
from a3c_mp.run import command
from a3c_mp.run import script as ending
from a3c_mp.run.script import exit_with


class EndedAtOnce(BaseException):
    """Stands in for `os._exit`."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    def end(code):
        raise EndedAtOnce(code)

    monkeypatch.setattr(ending.os, "_exit", end)
    monkeypatch.setattr(ending.atexit, "_run_exitfuncs", lambda: None)


def run(main, end=SystemExit):
    """The code with which a script ends whose `main` this is."""
    with pytest.raises(end) as ended:
        exit_with(main)
    return ended.value.code if end is SystemExit else ended.value.args[0]


def raises(error):
    def main(*_):
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code", "out", "err"),
    [
        (lambda: 130, 130, "", ""),
        (raises(ConfigError("num-envs", 0, "must be 1")), 2, "", "error: num-envs=0: must be 1\n"),
        (raises(NothingToDo("it has ended")), 0, "it has ended\n", ""),
        (raises(SystemExit(3)), 3, "", ""),
        (raises(KeyError("none")), 1, "", "KeyError: 'none'\n"),
    ],
)
def test_a_script_ends_with_a_code_and_says_why(main, code, out, err, capsys):
    assert run(main) == code
    printed = capsys.readouterr()
    assert printed.out == out
    assert printed.err.endswith(err)
    assert "Traceback (most recent call last)" in printed.err if code == 1 else printed.err == err


def test_a_full_disk_and_a_limit_of_threads_do_not_hide_why_a_script_ends(monkeypatch, capsys):
    monkeypatch.setattr(threading.Thread, "start", raises(RuntimeError("can't start new thread")))
    assert run(raises(OSError(errno.ENOSPC, "full"))) == 1
    assert run(raises(OSError(errno.ENOSPC, "full", "scores.txt"))) == 1
    assert run(raises(ConfigError("num-envs", 0, "must be 1"))) == 2
    *ends, last = capsys.readouterr().err.splitlines()
    for name, end in zip(("the output", "scores.txt"), ends, strict=True):
        assert re.fullmatch(rf"error: {name} cannot be written \(full; test_script\.py:\d+\)", end)
    assert last == "error: num-envs=0: must be 1"


def test_a_thread_is_waited_for_if_it_ends_soon():
    over = threading.Event()

    def main():
        threading.Thread(target=over.wait).start()
        return 3

    try:
        assert run(main, EndedAtOnce) == 3
    finally:
        over.set()
    assert run(main) == 3


def test_a_group_of_learners_that_is_still_there_is_left_behind(monkeypatch):
    monkeypatch.setattr(ending.dist, "is_initialized", lambda: True)
    assert run(lambda: 1, EndedAtOnce) == 1


class Output(io.StringIO):
    """A stdout that does something when it is flushed."""

    def __init__(self, flush):
        super().__init__()
        self.flush = flush


def test_output_that_cannot_be_written_does_not_delay_the_end_or_change_the_code(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(sys, "stdout", Output(over.wait))
    assert run(lambda: 0, EndedAtOnce) == 0
    over.set()
    monkeypatch.setattr(sys, "stdout", Output(raises(OSError(errno.ENOSPC, "full"))))
    assert run(lambda: 0) == 0


def test_output_that_nobody_reads_ends_a_script_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Output(raises(BrokenPipeError(errno.EPIPE, "closed"))))
    assert run(raises(BrokenPipeError(errno.EPIPE, "closed"))) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stdout", Output(lambda: None))
    assert run(raises(BrokenPipeError(errno.EPIPE, "of a socket"))) == 1
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as unread:  # the failed write has left nothing to flush
        monkeypatch.setattr(sys, "stdout", unread)
        assert run(raises(BrokenPipeError(errno.EPIPE, "not yet closed"))) == 1
        os.close(reader)
        assert run(raises(BrokenPipeError(errno.EPIPE, "closed"))) == 128 + signal.SIGPIPE


def test_signals_that_an_environment_ignores_end_a_script_that_was_not_started_so(monkeypatch):
    monkeypatch.setattr(ending, "IGNORED_AT_START", {signal.SIGHUP})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def main():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)

    assert run(main) == 128 + signal.SIGTERM


def test_a_program_that_is_started_without_ends_of_children_sees_those_of_its_own():
    code = "import a3c_mp, os, sys; sys.exit(os.waitstatus_to_exitcode(os.system('exit 3')))"
    ignore = functools.partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    assert subprocess.run([sys.executable, "-c", code], preexec_fn=ignore).returncode == 3


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU])
def test_the_warning_of_a_scheduler_ends_a_script(signum):
    assert run(lambda: signal.raise_signal(signum)) == 128 + signum


# ---- the command a3c-mp


@pytest.mark.parametrize("words", [["train", "a3c_data"], ["train_a3c_data"], ["plot"]])
def test_the_command_runs_a_script_with_its_own_flags_and_name(words, monkeypatch):
    for script in ("train_a3c_data", "plot"):
        monkeypatch.setattr(f"{script}.main", lambda: list(sys.argv))
    monkeypatch.setattr("sys.argv", ["a3c-mp", *words, "runs/x", "--help"])
    assert command.run_script() == [" ".join(["a3c-mp", *words]), "runs/x", "--help"]


def test_the_command_names_the_scripts_there_are(monkeypatch, capsys):
    for words in (["--help"], ["train", "-h"]):
        monkeypatch.setattr("sys.argv", ["a3c-mp", *words])
        assert command.run_script() == 0
        assert "train a3c_data | train a3c_grad | train apex" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["a3c-mp", "trian", "impala"])
    with pytest.raises(ConfigError, match=r"^script=trian: must be one of play, plot, train_a3c_data, .*; see a3c-mp"):
        command.run_script()


def test_the_package_has_every_folder_of_the_library():
    root = Path(__file__).parents[2]
    folders = {".".join(file.parent.relative_to(root).parts) for file in root.glob("a3c_mp/**/__init__.py")}
    with (root / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]
    assert set(packages) == folders | {"a3c_mp.chapters", "a3c_mp.wrappers"}


def test_an_environment_may_swallow_a_signal_and_a_later_one_ends_what_waits_for_ever(monkeypatch):
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    with pytest.raises(Stopped, match="130"):
        ending._on_signal(signal.SIGINT, None)
    with pytest.raises(Stopped, match="130"):
        ending.raise_received()
    ending.raise_received()  # once
    handlers[signal.SIGINT](signal.SIGINT, None)  # a shell may send it twice
    later = time.monotonic() + 1.5 * ending.PATIENCE_SECONDS
    monkeypatch.setattr(ending.time, "monotonic", lambda: later)
    with pytest.raises(EndedAtOnce, match=str(128 + signal.SIGTERM)):
        handlers[signal.SIGTERM](signal.SIGTERM, None)
