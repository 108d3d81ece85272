"""Every chapter among mishaps: actors that die in every way, environments that raise, a parent that is killed, signals.

What each fault costs is promised in docs/reliability.md.
"""

import csv
import os
import signal
import time
from datetime import datetime

import pytest
from fault_env import MISHAPS
from support import CARTPOLE, CHAPTERS, family_of, still_alive

from a3c_mp.checkpoint import list_checkpoints

HANG_SECONDS = 10
TWO_LEARNERS = ["--num-learners", "2"]
SCRIPTS = pytest.mark.parametrize(("script", "flags"), CHAPTERS.values(), ids=CHAPTERS)


def said_at(log, text):
    """When a line with a text was written to run.log."""
    line = next(line for line in log.splitlines() if text in line)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def episodes(folder):
    with (folder / "episodes.csv").open() as file:
        return list(csv.DictReader(file))


@SCRIPTS
def test_an_actor_that_meets_every_mishap_is_named_and_replaced_until_the_budget_is_spent(scripts, script, flags):
    restarts = len(MISHAPS)
    flags = [*flags, "--stop-return", "501", "--max-restarts", str(restarts), "--hang-seconds", str(HANG_SECONDS)]
    trainer = scripts.train("r", "--env-id", "fault_env:Mishap-v0", *flags, script=script)
    log = scripts.wait_for("r", f"run.log:restart {restarts} of {restarts}", trainer, timeout=150)
    folder = scripts.runs_dir / "runs/r"
    before = len(episodes(folder))
    scripts.wait_until(lambda: [e for e in episodes(folder)[before:] if e["actor"] == "0"], trainer)
    (scripts.runs_dir / "enough").touch()
    done = scripts.finish(trainer, "r")

    ways = dict.fromkeys(MISHAPS, "was killed by SIGKILL") | {"raised": "raised an exception"}
    ways |= dict.fromkeys(["hung", "stopped"], f"gave no sign of life for {HANG_SECONDS} s and was killed")
    began = said_at(log, "seed 1, in ") - float(episodes(folder)[0]["seconds"])
    for restart, mishap in enumerate(MISHAPS, start=1):
        line = next(line for line in log.splitlines() if f"restart {restart} of {restarts}" in line)
        if mishap != "raised":
            assert f"actor 0 (pid {line.split('(pid ')[1].split(')')[0]}) {ways[mishap]}; restart" in line
        happened = (scripts.runs_dir / mishap).stat().st_mtime if mishap != "raised" else None
        if happened is not None:
            allowed = 5 + HANG_SECONDS * (mishap in ("hung", "stopped"))
            assert said_at(log, line) - happened < allowed, line
    hung = (scripts.runs_dir / "hung").stat().st_mtime - began
    meanwhile = [e for e in episodes(folder) if e["actor"] == "1" and hung + 1 < float(e["seconds"]) < hung + 9]
    assert meanwhile, "the other actor goes on while one hangs"
    assert log.count("ArithmeticError: the pole caught fire") == 1
    assert "(raised by step() of fault_env:Mishap-v0, seed " in log
    assert done.code == 1
    assert f"restart budget of {restarts} spent" in done.out
    assert done.summary["worker_restarts"] == restarts
    newest = list_checkpoints(done.folder / "checkpoints")[0]
    assert f"the last checkpoint is {newest.relative_to(scripts.runs_dir)}" in done.out
    assert "Traceback" not in done.err


@SCRIPTS
def test_where_every_actor_fails_at_start_the_run_ends_at_once_with_one_traceback(scripts, script, flags):
    trainer = scripts.train("r", "--env-id", "fault_env:Unmakeable-v0", *flags, script=script)
    scripts.wait_for("r", "run.log:seed 1", trainer)
    began = time.monotonic()
    done = scripts.finish(trainer, "r")
    assert time.monotonic() - began < 10
    assert done.code == 1
    assert (done.out + done.err).count("Traceback") == 1
    assert "ArithmeticError: no coin in the slot" in done.out
    assert "(raised by the constructor of fault_env:Unmakeable-v0, seed " in done.out
    assert done.summary["worker_restarts"] == 0
    assert done.summary["exit_reason"].startswith("error: actor ")


def under_way(scripts, trainer):
    scripts.wait_for("r", "episodes.csv:,1,", trainer)  # actor 1, of learner 1 if there are two, has finished a game


def starting_up(scripts, trainer):
    scripts.wait_for("r", "run.log:seed 1", trainer)
    scripts.wait_until(lambda: family_of(trainer.pid), trainer)  # they are importing torch


def saving(scripts, trainer):
    folder = scripts.runs_dir / "runs/r/checkpoints"
    scripts.wait_until(lambda: list_checkpoints(folder), trainer)
    scripts.wait_until(lambda: list(folder.glob("*.tmp")), trainer, pause=0.0)


@pytest.mark.parametrize(
    ("algorithm", "moment"),
    [*((name, under_way) for name in CHAPTERS), ("a3c_data", starting_up), ("impala", starting_up)],
)
def test_a_parent_that_is_killed_leaves_no_process_and_no_shared_memory(scripts, algorithm, moment):
    script, flags = CHAPTERS[algorithm]
    before = set(os.listdir("/dev/shm"))
    trainer = scripts.train("r", *CARTPOLE, *flags, *TWO_LEARNERS * (algorithm == "impala"), script=script)
    moment(scripts, trainer)
    family = family_of(trainer.pid)
    trainer.kill()
    killed = time.monotonic()
    assert family
    while still_alive(family) and time.monotonic() < killed + 2:
        time.sleep(0.01)
    assert not still_alive(family)
    trainer.communicate()
    assert set(os.listdir("/dev/shm")) <= before


INT, TERM = signal.SIGINT, signal.SIGTERM
FEW = [  # every pair of two of these choices occurs
    ("a3c_data", INT, "group", 1, under_way),
    ("a3c_data", TERM, "parent", 2, saving),
    ("a3c_grad", TERM, "group", 1, starting_up),
    ("a3c_grad", INT, "parent", 2, under_way),
    ("apex_dqn", INT, "group", 2, saving),
    ("apex_dqn", TERM, "parent", 1, starting_up),
    ("impala", TERM, "group", 2, under_way),
    ("impala", INT, "parent", 1, starting_up),
]
ALL = [
    (algorithm, signum, target, times, moment)
    for algorithm in CHAPTERS
    for signum in (INT, TERM)
    for target in ("group", "parent")
    for times in (1, 2)
    for moment in (starting_up, under_way, saving)
]


def check_signal(scripts, algorithm, signum, target, times, moment):
    script, flags = CHAPTERS[algorithm]
    flags = [*CARTPOLE, *flags, *TWO_LEARNERS * (algorithm == "impala")]
    before = set(os.listdir("/dev/shm"))
    pace = ["--checkpoint-seconds", "0.1" if moment is saving else "60"]
    trainer = scripts.train("r", *flags, *pace, script=script, start_new_session=True)
    moment(scripts, trainer)
    family = family_of(trainer.pid)
    asked = time.monotonic()
    for _ in range(times):
        (os.killpg if target == "group" else os.kill)(trainer.pid, signum)
        time.sleep(0.2 * (times - 1))  # two signals at one instant are one
    done = scripts.finish(trainer, "r")
    assert time.monotonic() - asked < 10
    assert done.code == 128 + signum, done.out + done.err
    assert done.summary["exit_reason"] == signum.name
    assert "Traceback" not in done.out + done.err
    assert "restart" not in done.out
    assert list_checkpoints(done.folder / "checkpoints") or moment is starting_up
    assert done.summary["steps"] > 0 or moment is starting_up
    assert not still_alive(family)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize(("algorithm", "signum", "target", "times", "moment"), FEW)
def test_signals_end_a_run_with_checkpoint_and_summary(scripts, algorithm, signum, target, times, moment):
    check_signal(scripts, algorithm, signum, target, times, moment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "signum", "target", "times", "moment"), [case for case in ALL if case not in FEW]
)
def test_signals_of_every_kind_end_a_run(scripts, algorithm, signum, target, times, moment):
    check_signal(scripts, algorithm, signum, target, times, moment)
