"""Heartbeats, hangs and the restart budget, with a clock and processes that the test makes up."""

import signal
from types import SimpleNamespace

import pytest
import torch

from a3c_mp.errors import WorkerError
from a3c_mp.processes import supervisor
from a3c_mp.processes.spawn import STARTING
from a3c_mp.processes.supervisor import PAUSE_SECONDS, START_SECONDS, Child, Supervisor

HANG_SECONDS = 12.0


class Scene:
    """A supervisor of processes that never end by themselves, and a tape of what it does with them."""

    def __init__(self, monkeypatch, number, max_restarts=5, evaluator=False):
        self.now, self.tape, self.lost, self.beats = 1000.0, [], [], torch.zeros(number, dtype=torch.int64)
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(supervisor, "cores", lambda: 2)
        children = [Child(f"actor {i}", self.launch, "--num-actors") for i in range(number - evaluator)]
        children += [Child("evaluator", self.launch, "--eval-every", self.lost.append)] * evaluator
        self.supervisor = Supervisor(
            children, self.beats, max_restarts=max_restarts, hang_seconds=HANG_SECONDS,
            on_message=None, on_restart=lambda number, text: self.tape.append(text),
        )  # fmt: skip
        self.supervisor.start()
        self.tape.clear()

    def launch(self):
        self.tape.append("start")
        process = SimpleNamespace(pid=7, exitcode=None, is_alive=lambda: False, join=lambda seconds: None)
        process.kill = lambda: self.tape.append("kill")
        return process, SimpleNamespace(poll=lambda: False)

    def look(self, *seconds):
        for passed in seconds:
            self.now += passed
            self.supervisor._check_heartbeats()

    def fail(self, number):
        self.supervisor._fail(self.supervisor.children[number], "Traceback")

    def end(self, number, code=-signal.SIGKILL):
        child = self.supervisor.children[number]
        child.process.exitcode = code
        self.supervisor._check_end(child)


def test_each_flag_has_a_restart_budget_and_a_child_that_may_be_lost_is_given_up(monkeypatch):
    scene = Scene(monkeypatch, 4, max_restarts=1, evaluator=True)
    text = "(pid 7) was killed by SIGKILL; restart"
    for number in (3, 1, 3, 3):
        scene.end(number)
    assert scene.tape == [f"evaluator {text} 1 of 1", "start", f"actor 1 {text} 1 of 1", "start"]
    assert [str(error) for error in scene.lost] == [f"evaluator {text} budget of 1 spent"], "once"
    assert scene.supervisor.children[3].is_done
    assert scene.supervisor.restarts.total() == 2
    with pytest.raises(WorkerError, match=r"^actor 0 \(pid 7\) was killed by signal 40; restart budget of 1 spent$"):
        scene.end(0, code=-40)  # a signal without a name


def test_an_exception_before_the_first_result_is_final(monkeypatch):
    final = Scene(monkeypatch, 4, evaluator=True)
    final.fail(3)
    assert [str(error) for error in final.lost] == ["evaluator (pid 7) failed before its first result:\nTraceback"]
    with pytest.raises(WorkerError, match=r"^actor 1 \(pid 7\) failed before its first result"):
        final.fail(1)


def test_a_successor_that_fails_at_start_uses_up_the_budget_and_says_so(monkeypatch):
    """The first process did not fail at start, so the cause may pass."""
    scene = Scene(monkeypatch, 1, max_restarts=3)
    scene.supervisor.children[0].record_result()
    scene.fail(0)
    scene.fail(0)
    scene.end(0, code=3)
    assert scene.tape[::2] == [
        "actor 0 (pid 7) raised an exception; restart 1 of 3\nTraceback",
        "actor 0 (pid 7) raised an exception before its first result; restart 2 of 3\nTraceback",
        "actor 0 (pid 7) ended with exit code 3 before its first result; restart 3 of 3",
    ]
    with pytest.raises(WorkerError, match="raised an exception before its first result; restart budget of 3 spent\n"):
        scene.fail(0)


def test_the_frames_of_a_traceback_are_printed_once_where_it_is_repeated(monkeypatch):
    text = '\nTraceback\n  File "a.py", line 1, in f\n    g()\nValueError: no\n(after {} steps)'
    shorten = Scene(monkeypatch, 1).supervisor._without_repetition
    assert shorten(text.format(3)) == text.format(3)
    assert shorten(text.format(4)) == "\nthe same traceback as the last one, then:\nValueError: no\n(after 4 steps)"
    assert [shorten(other) for other in ("", "\nTraceback")] == ["", "\nTraceback"]
    assert shorten(text.format(5)) != text.format(5), "one that was killed in between changes nothing"
    assert shorten(other := text.replace("line 1", "line 2")) == other


def test_a_process_that_makes_environments_later_has_the_time_of_a_start_until_its_next_heartbeat(monkeypatch):
    scene = Scene(monkeypatch, 1)
    scene.beats[0] += 1  # not looked at before the message arrives
    [child] = scene.supervisor.children
    child.pipe = SimpleNamespace(poll=iter([True, False]).__next__, recv=lambda: (STARTING,))
    scene.supervisor._receive(child)
    scene.look(*[PAUSE_SECONDS] * int(START_SECONDS / PAUSE_SECONDS))
    assert scene.tape == []
    scene.beats[0] += 1
    scene.look(*[PAUSE_SECONDS] * 4)
    assert scene.tape[0] == "kill", "12 s without a heartbeat"


def test_a_busy_parent_notices_a_hang_too_and_a_stopped_one_suspects_no_process(monkeypatch):
    """Looks that are 6 s apart count as 5 s of silence each; an hour during which the parent was stopped as 5 s too."""
    scene = Scene(monkeypatch, 1)
    scene.beats[0] += 1
    scene.look(1, 3600, 6)
    scene.beats[0] += 1
    scene.look(6, 6, 6)
    assert scene.tape == [], "it has had a heartbeat meanwhile"
    scene.look(6)
    text = "actor 0 (pid 7) sent no heartbeat for 12 s and was killed (--hang-seconds); restart 1 of 5"
    assert scene.tape == ["kill", text, "start"]


def test_many_processes_on_few_cores_may_take_long_to_start(monkeypatch):
    scene, limit = Scene(monkeypatch, 8, max_restarts=7), START_SECONDS * 8 / 2
    text = f"actor 7 (pid 7) took longer than {limit:.0f} s to start or to make an environment and was killed"
    text += " (raise --hang-seconds)"
    scene.look(*[PAUSE_SECONDS] * int(limit / PAUSE_SECONDS))
    assert scene.tape == []
    with pytest.raises(WorkerError) as error:  # none of them has had a heartbeat
        scene.look(PAUSE_SECONDS)
    assert str(error.value) == f"{text}; restart budget of 7 spent"
