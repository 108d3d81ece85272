"""Every chapter among mishaps: actors that die in every way, environments that raise, a parent that is killed, signals.

What each fault costs is promised in docs/reliability.md.
"""

import csv
import os
import re
import signal
import time
from datetime import datetime

import pytest
from fault_env import MISHAPS
from inline import InlineWorkers
from support import CARTPOLE, CHAPTERS, actors_of, family_of, scalars, still_alive

import train_a3c_data
from a3c_mp.run.checkpoint import list_checkpoints

HANG_SECONDS = 10
TWO_LEARNERS = ["--num-learners", "2"]
SLOW = pytest.mark.slow
ONE_IN_CI = pytest.mark.parametrize("algorithm", ["a3c_data", *(pytest.param(a, marks=SLOW) for a in [*CHAPTERS][1:])])


def said_at(log, text):
    """When a line with a text was written to run.log."""
    line = next(line for line in log.splitlines() if text in line)
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def episodes(folder):
    with (folder / "episodes.csv").open() as file:
        return list(csv.DictReader(file))


WAYS = {
    "killed at start": "was killed by SIGKILL",
    "killed in a step": "was killed by SIGKILL",  # a step is written to the slot as soon as it is taken
    "killed while sending": "was killed by SIGKILL",
    "raised": "raised an exception",
    "hung": rf"gave no sign of life for {HANG_SECONDS} s and was killed \(--hang-seconds\)",
    "stopped": rf"gave no sign of life for {HANG_SECONDS} s and was killed \(--hang-seconds\)",
}
"""what can happen to an actor -> how it is told"""
SOME = [
    ("a3c_data", ("killed while sending", "hung")),
    ("a3c_grad", ("raised",)),
    ("apex_dqn", ("stopped",)),
    ("impala", ("killed at start",)),
]


def check_mishaps(scripts, monkeypatch, algorithm, mishaps):
    """Actor 0 and its successors meet these mishaps, then one more, for which there is no budget left."""
    monkeypatch.setenv(MISHAPS, ",".join(mishaps))
    script, flags = CHAPTERS[algorithm]
    restarts, folder = len(mishaps), scripts.runs_dir / "runs/r"
    flags = [*flags, "--stop-return", "501", "--max-restarts", str(restarts), "--hang-seconds", str(HANG_SECONDS)]
    trainer = scripts.train("r", "--env-id", "fault_env:Mishap-v0", *flags, script=script)
    log = scripts.wait_for("r", f"run.log:restart {restarts} of {restarts}", trainer, timeout=600)
    before = len(episodes(folder))
    scripts.wait_until(lambda: [e for e in episodes(folder)[before:] if e["actor"] == "0"], trainer)
    (scripts.runs_dir / "enough").touch()
    done = scripts.finish(trainer, "r")

    restart_messages = [line for line in log.splitlines() if "restart" in line]
    for number, (line, mishap) in enumerate(zip(restart_messages, mishaps, strict=True), start=1):
        assert line.endswith(f"restart {number} of {restarts}")
        assert re.search(rf"actor 0 \(pid \d+\) {WAYS[mishap]}; restart", line)
        happened, told = (scripts.runs_dir / mishap).stat().st_mtime, said_at(log, line)
        if WAYS[mishap].startswith("gave"):
            assert HANG_SECONDS - 1 < told - happened < HANG_SECONDS + 5
            seconds = [event.wall_time for event in scalars(folder)["charts/sps"] if event.value > 0]
            assert any(happened + 1 < s < told - 1 for s in seconds), "the other actor goes on meanwhile"
        else:
            assert told - happened < 5
    if "raised" in mishaps:
        assert log.count("ArithmeticError: the pole caught fire") == 1
        assert re.search(r"\(raised by step\(\) of fault_env:Mishap-v0, seed \d+, after \d+ steps\)", log)
    assert done.code == 1
    assert f"was killed by SIGKILL; restart budget of {restarts} spent" in done.out
    assert done.summary["worker_restarts"] == restarts
    newest = list_checkpoints(done.folder / "checkpoints")[0]
    assert f"the last checkpoint is {newest.relative_to(scripts.runs_dir)}" in done.out
    assert "Traceback" not in done.err


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("algorithm", "mishaps"), SOME)
def test_an_actor_that_is_lost_is_named_and_replaced_until_the_budget_is_spent(
    scripts, monkeypatch, algorithm, mishaps
):
    check_mishaps(scripts, monkeypatch, algorithm, mishaps)


@SLOW
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("algorithm", CHAPTERS)
def test_an_actor_may_be_lost_in_every_way_in_every_chapter(scripts, monkeypatch, algorithm):
    check_mishaps(scripts, monkeypatch, algorithm, tuple(WAYS))


@ONE_IN_CI
def test_where_every_actor_fails_at_start_the_run_ends_at_once_with_one_traceback(scripts, algorithm):
    script, flags = CHAPTERS[algorithm]
    trainer = scripts.train("r", "--env-id", "fault_env:Unmakeable-v0", *flags, script=script)
    done = scripts.finish(trainer, "r")
    since = (scripts.runs_dir / "failed").stat().st_mtime  # what comes before is loading torch, twice
    assert time.time() - since < 10
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
    [
        ("a3c_data", starting_up),
        ("impala", under_way),
        ("apex_dqn", under_way),
        *(pytest.param(name, under_way, marks=SLOW) for name in ("a3c_data", "a3c_grad")),
        *(pytest.param(name, starting_up, marks=SLOW) for name in ("a3c_grad", "apex_dqn", "impala")),
    ],
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
    left = set(os.listdir("/dev/shm")) - before  # other tests, run at the same time, remove theirs when they end
    while left and time.monotonic() < killed + 60:
        time.sleep(0.1)
        left &= set(os.listdir("/dev/shm"))
    assert not left


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


@SLOW
@pytest.mark.parametrize(
    ("algorithm", "signum", "target", "times", "moment"), [case for case in ALL if case not in FEW]
)
def test_signals_of_every_kind_end_a_run(scripts, algorithm, signum, target, times, moment):
    check_signal(scripts, algorithm, signum, target, times, moment)


@SLOW
@pytest.mark.parametrize(("algorithm", "signum"), [("apex_dqn", INT), ("impala", TERM)])
def test_signals_end_a_run_that_waits_for_a_frozen_learner(scripts, algorithm, signum):
    script, flags = CHAPTERS[algorithm]
    trainer = scripts.train("r", *CARTPOLE, *flags, *TWO_LEARNERS, script=script)
    under_way(scripts, trainer)
    family = family_of(trainer.pid)
    learner = next(process for process in actors_of(trainer.pid) if actors_of(process.pid))
    learner.suspend()
    time.sleep(1)
    asked = time.monotonic()
    trainer.send_signal(signum)
    done = scripts.finish(trainer, "r")
    assert time.monotonic() - asked < 10
    assert done.code == 128 + signum, done.out + done.err
    assert done.summary["exit_reason"] == signum.name
    assert list_checkpoints(done.folder / "checkpoints")
    assert not still_alive(family)


@SLOW
@pytest.mark.parametrize("algorithm", ["apex_dqn", "impala"])
def test_what_is_not_finite_is_skipped_by_all_learners_alike(scripts, algorithm):
    script, flags = CHAPTERS[algorithm]
    flags = [*flags, *TWO_LEARNERS, "--no-reward-clip", "--total-steps", "6000"]
    done = scripts.run("r", "--env-id", "fault_env:NanReward-v0", *flags, script=script)
    assert done.code == 0, done.out + done.err
    skipped = {name: count for name, count in done.summary.items() if name.endswith("_not_finite")}
    assert sum(skipped.values()) >= 2, "it happens to the actors of both learners"
    assert "contains NaN or inf; skipped" in done.out
    assert done.summary["updates"] > 10


@pytest.mark.parametrize(("signum", "times"), [(INT, 2), (TERM, 1)])
def test_signals_end_an_evaluation_without_a_word(scripts, monkeypatch, signum, times):
    monkeypatch.chdir(scripts.runs_dir)
    monkeypatch.setattr("a3c_mp.run.actors.Workers", InlineWorkers)
    flags = ["--run-name", "r", "--total-steps", "200"]
    monkeypatch.setattr("sys.argv", ["", *CARTPOLE, *CHAPTERS["a3c_data"][1], *flags])
    assert train_a3c_data.main() == 0
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    player = scripts.start("play.py", "runs/r", "--episodes", "1000000", start_new_session=True)
    assert "steps of training" in player.stdout.readline()
    asked = time.monotonic()
    for _ in range(times):
        os.killpg(player.pid, signum)
        time.sleep(0.1 * (times - 1))
    done = scripts.finish(player, "r")
    assert time.monotonic() - asked < 10
    assert (done.code, done.err) == (128 + signum, "")
