"""Fixtures of all tests."""

import fcntl
import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
from envs import Env
from forked import fork_children
from harness import Scripts
from inline import Inline
from nodes import Net

from a3c_mp import wrappers
from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.processes.supervisor import Supervisor
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with


def pytest_collection_modifyitems(items):
    """Mark what `make test-fast` leaves out: whole runs, also in this process."""
    for item in items:
        if "run_inline" in item.fixturenames or "scripts" in item.fixturenames:
            item.add_marker("whole")


class Tape(logging.Handler):
    """Remembers messages of a level and above."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def tape():
    return Tape()


@pytest.fixture
def log(tape):
    log = logging.Logger("test")
    log.addHandler(tape)
    return log


@pytest.fixture
def net(log):
    """Routers of this process; see nodes.py."""
    net = Net(log)
    with net.stack:
        yield net


@pytest.fixture
def scripts(tmp_path):
    with Scripts(tmp_path) as scripts:
        yield scripts


@pytest.fixture
def cable():
    """A network namespace at 10.231.7.2 and the link to it, at 10.231.7.1: a function that runs `ip` for it.

    Tests that run at the same time take turns: names and addresses are the same for all.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")

    def ip(command):
        return subprocess.run(["ip", *command.split()], capture_output=True, text=True)

    with open(Path(tempfile.gettempdir(), "a3c-test-cable"), "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        made = [
            ip("netns add a3c-test"),
            ip("link add a3c-hub type veth peer name a3c-spoke netns a3c-test"),
            ip("addr add 10.231.7.1/30 dev a3c-hub"),
            ip("link set a3c-hub up"),
            ip("-n a3c-test addr add 10.231.7.2/30 dev a3c-spoke"),
            ip("-n a3c-test link set a3c-spoke up"),
        ]
        try:
            if any(done.returncode for done in made):
                pytest.skip(f"needs network namespaces: {[done.stderr for done in made]}")
            yield ip
        finally:
            ip("link del a3c-hub")  # with the namespace it would go later, when the next test makes its own
            ip("netns del a3c-test")


@pytest.fixture
def run_inline(tmp_path, monkeypatch, capsys):
    return Inline(tmp_path, monkeypatch, capsys)


@pytest.fixture
def forked(monkeypatch):
    """Children of this process are forked instead of spawned."""
    fork_children(monkeypatch)


@pytest.fixture
def each_round(monkeypatch):
    """Has a function called with the run after each round of a learner in this process."""

    def patch(act):
        end_round = Run.end_round

        def end_round_and_act(run):
            end_round(run)
            act(run)

        monkeypatch.setattr(Run, "end_round", end_round_and_act)

    return patch


@pytest.fixture
def register(monkeypatch):
    """As `gymnasium.register`, until the end of the test; without an id, a class with other attributes as Custom-v0."""
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry.copy())
    wrappers.NOT_MADE.clear()

    def register(env_id="Custom-v0", entry_point=Env, changes=None, **kwargs):
        entry_point = type("Custom", (entry_point,), changes) if changes is not None else entry_point
        gymnasium.register(env_id, entry_point=entry_point, kwargs=kwargs)
        return env_id

    return register


@pytest.fixture(autouse=True)
def same_signal_handlers():
    """What a script does about signals ends with the process where it is one of its own."""
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Runs a script's `main` on bad input, sees that it is refused before anything begins, and returns the one line."""

    def run(main, flags):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["script.py", *flags])
        monkeypatch.setattr(Supervisor, "start", lambda self: pytest.fail("a process was started"))
        with pytest.raises(SystemExit) as end:
            exit_with(main)
        printed = capfd.readouterr()
        assert end.value.code == 2
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        assert not (tmp_path / "runs").exists(), "nothing was started"
        return printed.err

    return run


@pytest.fixture
def clock(monkeypatch):
    """A run's clock, `clock[0]`, from whole seconds, which have exact differences; other threads have the real one."""
    now = [float(math.ceil(time.monotonic()) + 1)]
    for module in ("checkpointer", "display", "metrics", "progress", "run", "tracking"):
        monkeypatch.setattr(f"a3c_mp.run.{module}.time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]}))
    return now
