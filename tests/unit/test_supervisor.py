"""Heartbeats, hangs and the restart budget, with a clock and processes that the test makes up."""

import errno
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from a3c_mp.errors import WorkerError
from a3c_mp.processes import supervisor
from a3c_mp.processes.supervised import STARTING
from a3c_mp.processes.supervisor import PAUSE_SECONDS, START_SECONDS, Child, Supervisor, how_ended

HANG_SECONDS = 12.0


class Family:
    """Three collectors and an evaluator that can be given up, on one supervisor with a budget of one restart."""

    def __init__(self, **evaluator):
        self.restarts, self.lost = [], []
        children = [Child(f"collector {i}", self.launch, "--num-actors") for i in range(3)]
        children.append(Child("evaluator", self.launch, "--eval-every", self.lost.append, **evaluator))
        self.supervisor = Supervisor(
            children, max_restarts=1, on_restart=lambda number, text: self.restarts.append((number, text))
        )
        self.supervisor.start()

    def launch(self):
        ended = SimpleNamespace(pid=7, exitcode=None, is_alive=lambda: False)
        return ended, SimpleNamespace(poll=lambda: False)

    def kill(self, number):
        self.supervisor.children[number].process.exitcode = -signal.SIGKILL
        self.supervisor._check_end(number)

    def fail(self, number):
        self.supervisor._fail(number, "Traceback")


def test_each_flag_has_a_restart_budget_of_its_own():
    family = Family()
    family.kill(3)
    family.kill(1)
    text = "(pid 7) was killed by SIGKILL; restart 1 of 1"
    assert family.restarts == [(3, f"evaluator {text}"), (1, f"collector 1 {text}")]
    assert family.supervisor.restarts == 2
    with pytest.raises(WorkerError, match=r"collector 0 \(pid 7\) was killed by SIGKILL; restart budget of 1 spent"):
        family.kill(0)


def test_a_child_that_may_be_lost_is_given_up_and_the_others_go_on():
    family = Family()
    family.kill(3)
    family.kill(3)
    assert [str(error) for error in family.lost] == [
        "evaluator (pid 7) was killed by SIGKILL; restart budget of 1 spent"
    ]
    assert family.supervisor.children[3].is_done
    family.kill(3)
    assert len(family.lost) == 1
    family.kill(1)
    assert [number for number, _ in family.restarts] == [3, 1]


def test_an_exception_before_the_first_result_is_final_unless_none_is_needed():
    final, repeated = Family(), Family(needs_result=False)
    final.fail(3)
    assert [str(error) for error in final.lost] == ["evaluator (pid 7) failed before its first result:\nTraceback"]
    repeated.fail(3)
    assert (repeated.lost, repeated.restarts) == (
        [],
        [(3, "evaluator (pid 7) raised an exception; restart 1 of 1\nTraceback")],
    )
    final.supervisor.children[0].record_result()
    final.fail(0)
    assert final.restarts == [(0, "collector 0 (pid 7) raised an exception; restart 1 of 1\nTraceback")]
    with pytest.raises(WorkerError, match=r"collector 1 \(pid 7\) failed before its first result"):
        final.fail(1)


class Scene:
    """A supervisor of evaluators that never end by themselves, and a tape of what it does with them."""

    def __init__(self, monkeypatch, number, max_restarts=5):
        self.now, self.tape, self.beats = 1000.0, [], torch.zeros(number, dtype=torch.int64)
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(supervisor.os, "sched_getaffinity", lambda pid: {0, 1})
        self.supervisor = Supervisor(
            [Child(f"evaluator {i}", lambda i=i: self.launch(i), "--num-evaluators") for i in range(number)],
            self.beats,
            max_restarts=max_restarts,
            hang_seconds=HANG_SECONDS,
            on_restart=lambda number, text: self.tape.append(text),
        )

    def launch(self, number):
        self.tape.append(f"start {number}")
        process = SimpleNamespace(
            pid=7, exitcode=None, kill=lambda: self.tape.append("kill"), join=lambda: self.tape.append("join")
        )
        return process, None

    def look(self, seconds):
        self.now += seconds
        self.supervisor._check_heartbeats()


def test_a_process_that_makes_environments_later_has_the_time_of_a_start_until_its_next_heartbeat(monkeypatch):
    scene = Scene(monkeypatch, 1)
    scene.supervisor.start()
    scene.beats[0] += 1  # not looked at before the message arrives
    scene.supervisor.children[0].pipe = SimpleNamespace(poll=iter([True, False]).__next__, recv=lambda: (STARTING,))
    scene.supervisor._receive(0)
    for _ in range(int(START_SECONDS / PAUSE_SECONDS)):
        scene.look(PAUSE_SECONDS)
    assert scene.tape == ["start 0"]
    scene.beats[0] += 1
    for _ in range(4):
        scene.look(PAUSE_SECONDS)
    assert scene.tape[1:3] == ["kill", "join"], "12 s without a heartbeat"


def test_a_busy_parent_notices_a_hang_too_and_a_stopped_one_suspects_no_process(monkeypatch):
    """Looks that are 6 s apart count as 5 s of silence each; an hour during which the parent was stopped as 5 s too."""
    scene = Scene(monkeypatch, 1)
    scene.supervisor.start()
    scene.beats[0] += 1
    scene.look(1)
    for seconds in (3600, 6):
        scene.look(seconds)
    scene.beats[0] += 1
    for _ in range(3):
        scene.look(6)
    assert scene.tape == ["start 0"], "it has had a heartbeat meanwhile"
    scene.look(6)
    text = "evaluator 0 (pid 7) sent no heartbeat for 12 s and was killed (--hang-seconds); restart 1 of 5"
    assert scene.tape == ["start 0", "kill", "join", text, "start 0"]


def test_many_processes_on_few_cores_may_take_long_to_start(monkeypatch):
    scene = Scene(monkeypatch, 8, max_restarts=8)
    scene.supervisor.start()
    del scene.tape[:]
    limit = START_SECONDS * 8 / 2
    while not scene.tape:
        scene.look(PAUSE_SECONDS)
    assert scene.now - 1000.0 == pytest.approx(limit, abs=2 * PAUSE_SECONDS)
    text = f"evaluator 0 (pid 7) took longer than {limit:.0f} s to start and was killed (lower --num-evaluators)"
    assert scene.tape[2] == f"{text}; restart 1 of 8"
    assert scene.supervisor.restarts == 8, "none of them has had a heartbeat"


def test_the_budget_is_for_all_children_together(monkeypatch):
    scene = Scene(monkeypatch, 2, max_restarts=1)
    scene.supervisor.start()
    scene.beats += 1
    for _ in range(4):
        scene.look(4)
    with pytest.raises(WorkerError, match=r"^evaluator 1 \(pid 7\) sent no heartbeat .*; restart budget of 1 spent$"):
        scene.look(4)


def test_a_child_that_cannot_be_started_is_named_and_has_nothing_to_stop():
    def refuse():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    supervisor = Supervisor([Child("evaluator", refuse, "--num-evaluators")])
    reason = "evaluator cannot be started: Resource temporarily unavailable; lower --num-evaluators, or"
    with pytest.raises(WorkerError, match=reason):
        supervisor.start()
    supervisor.stop()
    assert supervisor.pids == []


@pytest.mark.parametrize(
    ("code", "text"), [(0, "ended with exit code 0"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")]
)
def test_exit_codes_in_words(code, text):
    assert how_ended(code) == text
