"""Nodes of a task without any learning: events, shared values, errors, restarts, and how all of them end.

As a script, `test_nodes.py NAME` runs the function NAME on three nodes.
"""

import multiprocessing
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from envs import note
from harness import family_of, still_alive

from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.task.parallel import runner
from a3c_mp.task.task import Task

pytestmark = pytest.mark.usefixtures("forked")

LABELS = [("learner",), ("collector",), ("collector", "spare")]
PATTERNS = ("*", "collector", "spare", "node.1", "nobody")
HANG_SECONDS = 2.0
SLOW = pytest.mark.slow
SCRIPT = "tests/process/test_nodes.py"


def task_of(node):
    """The task of a node."""
    return Task(router=node, labels=node.labels, known_labels=node.known_labels)


def wait_for_the_end(node):
    """Middleware that waits until the task ends."""

    def _wait(ctx):
        while not node.finishing:
            node.wait()

    return _wait


# ---- messages between tasks


def converse(node):
    """Node 0 sends notes to patterns and shares what it learns; node 2 ends the task once that is enough."""
    heard, ways_back, tape = [], [], {}
    node.handle("note", lambda sender, pattern: heard.append(pattern))
    node.handle("tape", lambda sender, *content: tape.update({sender: content}))

    def step(ctx):
        if node.name == "node.0":
            for pattern in PATTERNS if ctx.total_step == 0 else ():
                node.send("note", pattern, to=pattern)
            ctx.train_iter, ctx.weights = ctx.total_step, torch.full([2], ctx.total_step)
            node.wait(0.01)
        while node.name == "node.2" and task.parallel_ctx.get("train_iter", 0) < 3:
            node.wait()
        ctx.finish = node.name == "node.2"
        if node.name == "node.1":
            wait_for_the_end(node)(ctx)
        yield
        ways_back.append(ctx.finish)

    with task_of(node) as task:
        task.share("train_iter", "weights")
        task.use(step).run()
    if node.name != "node.0":
        node.send("tape", heard, ways_back, task.parallel_ctx.weights)
    while node.name == "node.0" and not {"node.1", "node.2"} <= tape.keys():
        node.wait()
    return {**tape, "node.0": (heard, ways_back, None)}


def test_events_and_shared_values_reach_the_nodes_that_are_meant_and_one_node_ends_all():
    tape = runner(3, labels=LABELS)(converse)
    heard, ways_back, weights = zip(*(tape[f"node.{number}"] for number in range(3)), strict=True)
    assert heard == ([], ["*", "collector", "node.1"], ["*", "collector", "spare"])
    assert weights[2].tolist() >= [3, 3]
    assert ways_back[2] == [True]
    for tail in ways_back:
        assert tail == [False] * (len(tail) - 1) + [True], "each knows of its last iteration, and only of that"


def limited(node):
    """Node 0 runs three iterations, and the others until it ends."""
    with task_of(node) as task:
        if node.name != "node.0":
            task.use(wait_for_the_end(node)).run()
            return None
        lasts = []
        task.use(lambda ctx: (yield lasts.append(ctx.finish)) or lasts.append(ctx.finish))
        ctx = task.run(max_step=3)
        node.supervisor.await_own_end(30)
        return ctx.total_step, lasts, [child.process.exitcode for child in node.supervisor.children]


def test_a_limit_of_one_node_ends_all():
    total_step, lasts, codes = runner(3)(limited)
    assert (total_step, lasts) == (2, [False] * 5 + [True])
    assert codes == [0, 0]


def mislabelled(node):
    with task_of(node) as task:
        if node.name == "node.0":
            task.use(print, filter_labels=["node.[345]", "colector"])
        task.use(wait_for_the_end(node)).run()


@SLOW
def test_a_filter_that_no_node_matches_is_an_error_that_names_the_labels():
    known = "collector, distributed, learner, node.0, node.1, node.2, spare"
    with pytest.raises(ConfigError) as error:
        runner(3, labels=LABELS)(mislabelled)
    why = f"no node has such a label; there are {known}"
    assert str(error.value) == f"filter-labels=node.[345], colector: {why}; name one of these"


# ---- how they begin


def first_time(what):
    """Whether no process has been here before."""
    if Path(what).exists():
        return False
    note(what)
    return True


class Late:
    """Kills the first node 2 as it starts, and holds up the second for a second, or until another runs `main`."""

    def __reduce__(self):
        return come_late, ()


def come_late():
    if multiprocessing.current_process().name == "node-2":
        if first_time("died"):
            os._exit(3)
        deadline = time.monotonic() + 1
        while not Path("main").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def stay(node, late):
    """Returns whom node 0 sees connected when it begins."""
    note("main")
    if node.name != "node.0":
        wait_for_the_end(node)(None)
    return sorted(node.router.peers)


def test_node_0_begins_once_all_are_connected_though_one_dies_and_one_is_late(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runner(3)(stay, Late()) == ["node.1", "node.2"]


# ---- nodes that fail


def stumble(node):
    """The first node 1 raises an exception, the first node 2 hangs; their successors wait longer than a hang."""
    back = set()
    node.handle("here", back.add)

    def step(ctx):
        if node.name == "node.1" and first_time("raised"):
            raise ArithmeticError("the node caught fire")
        if node.name == "node.2" and first_time("hung"):
            time.sleep(3600)
        if node.name != "node.0":
            node.send("here")
            wait_for_the_end(node)(ctx)
            return
        while back != {"node.1", "node.2"}:
            node.wait()
        deadline = time.monotonic() + HANG_SECONDS + 1
        while time.monotonic() < deadline:
            node.wait()
        ctx.finish = True

    with task_of(node) as task:
        task.use(step).run()


def test_nodes_that_raise_or_hang_are_named_and_replaced_and_those_that_wait_are_not(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    runner(3, max_restarts=2, hang_seconds=HANG_SECONDS)(stumble)
    out = capfd.readouterr().out
    assert re.findall(r"node (\d) \(pid \d+\) (.*); restart (\d) of 2", out) == [
        ("1", "raised an exception", "1"),
        ("2", "sent no heartbeat for 2 s and was killed (--hang-seconds)", "2"),
    ]
    assert out.count("ArithmeticError: the node caught fire") == 1


def burn(node):
    with task_of(node) as task:
        task.use(wait_for_the_end(node) if node.name != "node.1" else lambda ctx: 1 / 0).run()


def test_without_a_restart_budget_a_node_that_raises_ends_all_with_its_traceback():
    with pytest.raises(WorkerError, match=r"node 1 \(pid \d+\) raised an exception; restart budget of 0") as error:
        runner(3, max_restarts=0)(burn)
    assert "ZeroDivisionError: division by zero" in str(error.value)


def burn_hub(node):
    with task_of(node) as task:
        if node.name == "node.0":
            raise ArithmeticError("the hub caught fire", [p.pid for p in node.supervisor.processes], time.monotonic())
        task.use(wait_for_the_end(node)).run()


@SLOW
def test_node_0_that_raises_ends_all():
    with pytest.raises(ArithmeticError, match="the hub caught fire") as error:
        runner(3)(burn_hub)
    _, pids, since = error.value.args
    assert time.monotonic() - since < 5
    assert not any(psutil.pid_exists(pid) for pid in pids)


# ---- node 0 is told to end


def endless(node):
    with task_of(node) as task:
        if node.name == "node.0":
            task.use(lambda ctx: print("running", flush=True))
        task.use(wait_for_the_end(node)).run()


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, *(pytest.param(signum, marks=SLOW) for signum in (signal.SIGINT, signal.SIGTERM))]
)
def test_all_nodes_end_with_node_0_and_leave_nothing(scripts, signum):
    before = scripts.files()
    hub = scripts.start(SCRIPT, "endless", start_new_session=True)
    assert hub.stdout.readline() == "running\n"
    family, asked = family_of(hub.pid), time.monotonic()
    assert len(family) == 2
    assert scripts.files() - before
    if signum == signal.SIGKILL:
        hub.kill()
    else:  # to all processes, as a terminal does
        os.killpg(hub.pid, signum)
    done = scripts.finish(hub, "r")
    while still_alive(family) and time.monotonic() < asked + 10:
        time.sleep(0.01)
    assert not still_alive(family)
    assert (done.code, done.out, done.err) == (-9 if signum == signal.SIGKILL else 0, "", "")
    assert not scripts.left(before)


if __name__ == "__main__":
    runner(3)(globals()[sys.argv[1]])
