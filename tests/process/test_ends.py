"""How an actor ends: its environments are closed, and their helper processes do not outlive it."""

import os
import re
import signal
import time
from contextlib import suppress

import psutil
import pytest
from envs import MISHAPS
from harness import A3C_DATA, APEX_DQN, BUSY_SECONDS, EVALUATED, IMPALA, TASK, actors_of, row_id, still_alive

HELPER = ["--env-id", "envs:Helper-v0", "--num-actors", "1"]
TWO_LEARNERS = ["--num-actors", "2", *IMPALA.two_learners]


def helpers(scripts, actor="*"):
    """The helper processes of an actor's environments, or of all so far, that have not ended."""
    pids = [int(path.name.split("-")[1]) for path in (scripts.runs_dir / "helpers").glob(f"{actor}-*")]
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found.append(psutil.Process(pid))
    return still_alive(found)


def left_of(scripts, actor="*", seconds=BUSY_SECONDS):
    """Those that are still there a little later."""
    deadline = time.monotonic() + seconds
    while (left := helpers(scripts, actor)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def closed(scripts):
    """The actors whose environments have been closed."""
    return {int(path.name) for path in (scripts.runs_dir / "closed").glob("*")}


def actors_with_helpers(scripts):
    return {int(path.name.split("-")[0]) for path in (scripts.runs_dir / "helpers").glob("*")}


@pytest.mark.slow  # two more ways: see test_faults.py
@pytest.mark.parametrize(
    ("chapter", "way", "flags"),
    [
        (A3C_DATA, "total_steps", ()),  # ends as after SIGTERM
        (APEX_DQN, signal.SIGTERM, ()),
        (A3C_DATA, signal.SIGKILL, ()),
        (A3C_DATA, signal.SIGTERM, EVALUATED),
        (A3C_DATA, signal.SIGKILL, EVALUATED),
        (TASK, signal.SIGTERM, EVALUATED),
        (TASK, signal.SIGKILL, ()),
        (IMPALA, signal.SIGINT, TWO_LEARNERS),
        (IMPALA, signal.SIGKILL, TWO_LEARNERS),
    ],
    ids=row_id,
)
def test_no_helper_process_of_an_environment_outlives_the_run(scripts, chapter, way, flags):
    steps = "3000" if way == "total_steps" else "1000000"
    trainer = scripts.train(chapter, *HELPER, *flags, "--total-steps", steps)
    processes = 2 if flags else 1
    scripts.wait_for_game(trainer)
    scripts.wait_until(lambda: len(actors_with_helpers(scripts)) == processes, trainer)
    actors = actors_with_helpers(scripts)
    if way != "total_steps":
        trainer.send_signal(way)
    trainer.wait(60)  # not for the end of its output, which a helper may hold
    assert not left_of(scripts)
    assert closed(scripts) == (actors if way != signal.SIGKILL else set())


def test_no_helper_process_of_an_environment_outlives_its_actor(scripts, monkeypatch):
    """The actor is killed, then its successor raises, then the next one is terminated."""
    monkeypatch.setenv(MISHAPS, "killed in a step,raised")
    trainer = scripts.train(A3C_DATA, *HELPER)
    scripts.wait_for("r", "run.log:restart 2 of", trainer)
    stepped = scripts.runs_dir / "stepped"
    scripts.wait_until(lambda: len(list(stepped.glob("*"))) == 3, trainer)
    [actor] = actors_of(trainer.pid)
    os.kill(actor.pid, signal.SIGTERM)
    log = scripts.wait_for("r", "run.log:restart 3 of", trainer)
    killed, raised, terminated = (int(pid) for pid in re.findall(r"actor 0 \(pid (\d+)\)", log))
    assert re.search(rf"\(pid {terminated}\) was killed by SIGTERM;", log)
    for actor in (killed, raised, terminated):
        assert not left_of(scripts, actor)
    assert closed(scripts) == {raised, terminated}
    trainer.kill()
