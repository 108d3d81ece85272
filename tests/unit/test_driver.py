"""The driver of several trainers, with small scripts in the place of trainer 0."""

import json
import re
import signal
import sys
from types import SimpleNamespace

import pytest

from a3c_mp import errors
from a3c_mp.errors import PeerLost
from a3c_mp.processes.console import console
from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.run import driver, script
from a3c_mp.run.driver import VARIABLE, Start, drive, run_driven

TRAINER = f"""
import json, os, signal, sys
from pathlib import Path

def write(name, **content):
    Path("runs/r").mkdir(parents=True, exist_ok=True)
    Path("runs/r", name).write_text(json.dumps(content))

has_driver, restarts, since = json.loads(os.environ["{VARIABLE}"])
assert (since is None) == (restarts == 0), since
flags = ["--resume", "runs/r"] if "--resume" in sys.argv else ["--run-name=r", "--resume-or-start"][:1 + (restarts > 0)]
assert sys.argv[1:] == flags, sys.argv
exec(json.loads(os.environ["STARTS"])[restarts])
"""
KILLED, ENDS = "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"
PEER_LOST = "write('summary.json', exit_reason='error: learner 1 died; all end'); sys.exit(3)"
ENDED_BY_RAY = "write('config.json'); os._exit(1)"
SIGNALLED = "os.kill(os.getppid(), signal.SIGTERM); signal.pause()"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Drives trainers that do one of these things at each start; returns the exit code and what is printed."""
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}

    def run(*starts, resume=None):
        monkeypatch.setenv("STARTS", json.dumps(starts))
        monkeypatch.setattr(errors, "STARTED_IN", [tmp_path])
        monkeypatch.setattr(driver, "STARTED_IN", [tmp_path])
        command = ["python", "-c", TRAINER, *(["--resume", "runs/r"] if resume else [])]
        monkeypatch.setattr(sys, "orig_argv", command)
        place = {"runs_dir": tmp_path / "runs", "run_name": "r", "resume": resume}
        code = drive(
            SimpleNamespace(algorithm="ray_impala", max_restarts=2, num_actors=2, num_learners=2, cuda=False, **place)
        )
        assert console.drain(60)
        return code, capsys.readouterr().out

    yield run
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("starts", "code", "lines"),
    [
        ([ENDS], 0, []),
        (["sys.exit(2)"], 2, []),
        (["write('config.json'); write('summary.json', exit_reason='error: none'); sys.exit(1)"], 1, []),
        (["sys.exit(1)"], 1, []),
        (["write('config.json'); sys.exit(4)"], 1, []),
        ([KILLED, KILLED, ENDS], 0, [f"learner 0 (pid N) was killed by SIGKILL; restart {n} of 2" for n in (1, 2)]),
        (
            [KILLED, "sys.exit(2)", ENDS],
            0,
            [
                "learner 0 (pid N) was killed by SIGKILL; restart 1 of 2",
                "learner 0 (pid N) was refused where it started again; restart 2 of 2",
            ],
        ),
        ([PEER_LOST, ENDS], 0, ["learner 1 died; all end; restart 1 of 2"]),
        ([ENDED_BY_RAY, "sys.exit(130)"], 130, ["learner 0 (pid N) ended with exit code 1; restart 1 of 2"]),
        (
            [KILLED, PEER_LOST, KILLED],
            1,
            [
                "learner 0 (pid N) was killed by SIGKILL; restart 1 of 2",
                "learner 1 died; all end; restart 2 of 2",
                "error: learner 0 (pid N) was killed by SIGKILL; restart budget of 2 spent",
            ],
        ),
        ([SIGNALLED], 143, []),
        ([f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); {SIGNALLED}"], 7, []),
        ([f"signal.signal(signal.SIGTERM, lambda *_: {KILLED}); {SIGNALLED}"], 143, []),
        (["os.kill(os.getpid(), signal.SIGTERM)"], 143, []),
    ],
)
def test_trainer_0_is_started_again_where_it_or_another_is_lost(run, starts, code, lines):
    found, out = run(*starts)
    assert found == code
    assert re.sub(r"pid \d+", "pid N", out).splitlines() == lines


def test_a_resumed_run_is_resumed_again_and_its_log_says_why(run, tmp_path):
    (folder := tmp_path / "runs/r").mkdir(parents=True)
    assert run(KILLED, ENDS, resume=folder)[0] == 0
    assert "was killed by SIGKILL; restart 1 of 2" in (folder / "run.log").read_text()


def test_only_a_script_with_several_trainers_has_a_driver_and_its_child_has_none(monkeypatch):
    several, one = SimpleNamespace(num_learners=2), SimpleNamespace(num_learners=1)
    starts, error = [], PeerLost("learner 1 died")

    def train(start):
        starts.append(start)
        return SimpleNamespace(failed=error is not None, error=error, exit_code=1)

    monkeypatch.setattr(driver, "drive", lambda args: "driver")
    assert run_driven(several, train) == 1, "another program has called `main`"
    monkeypatch.setattr(script, "RUNNING", [print])
    assert run_driven(one, train) == run_driven(SimpleNamespace(), train) == 1
    assert run_driven(several, train) == "driver"
    monkeypatch.setenv(VARIABLE, "[true, 2, 17.5]")
    assert run_driven(several, train) == 3
    monkeypatch.setenv(VARIABLE, "[true, 2, 17.5]")
    error = None
    assert run_driven(several, train) == 4, "such as a full disk, with which trainers would only fail again"
    assert run_driven(several, train) == "driver", "what the child starts has a driver of its own"
    assert starts == [Start(), Start(), Start(), Start(True, 2, 17.5), Start(True, 2, 17.5)]
