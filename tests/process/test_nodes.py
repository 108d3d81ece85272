"""Nodes of a task without any learning: events, shared values, errors, restarts, and how all of them end.

As a script, `test_nodes.py NAME` runs the function NAME on three nodes, and `test_nodes.py NAME ADDRESS` on one that
listens there.
"""

import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from envs import note
from harness import family_of, still_alive
from nodes import free_port

from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.task import node as node_module
from a3c_mp.task.parallel import runner
from a3c_mp.task.task import Task

pytestmark = pytest.mark.usefixtures("forked")

HANG_SECONDS = 2.0
SCRIPT = "tests/process/test_nodes.py"


def wait_for_the_end(node):
    """Middleware that waits until the task ends."""

    def _wait(ctx):
        while not node.finishing:
            node.wait()

    return _wait


# ---- messages between tasks


def converse(node):
    """Node 0 sends notes and shares what it learns; node 2 ends the task once that is enough."""
    heard, ways_back, tape = [], [], {}
    node.handle("note", lambda sender, to: heard.append(to))
    node.handle("tape", lambda sender, *content: tape.update({sender: content}))

    def step(ctx):
        if node.name == "node.0":
            for to in ("*", "node.1") if ctx.total_step == 0 else ():
                node.send("note", to, to=to)
            ctx.train_iter, ctx.weights = ctx.total_step, torch.full([2], ctx.total_step)
            node.wait(0.01)
        while node.name == "node.2" and task.parallel_ctx.get("train_iter", 0) < 3:
            node.wait()
        ctx.finish = node.name == "node.2"
        if node.name == "node.1":
            wait_for_the_end(node)(ctx)
        yield
        ways_back.append(ctx.finish)

    with Task(router=node) as task:
        task.share("train_iter", "weights")
        task.use(step, filter_labels=["distributed"]).run()
    if node.name != "node.0":
        node.send("tape", heard, ways_back, task.parallel_ctx.weights)
    while node.name == "node.0" and not {"node.1", "node.2"} <= tape.keys():
        node.wait()
    return {**tape, "node.0": (heard, ways_back, None)}


def test_events_and_shared_values_reach_the_nodes_that_are_meant_and_one_node_ends_all():
    tape = runner(3)(converse)
    heard, ways_back, weights = zip(*(tape[f"node.{number}"] for number in range(3)), strict=True)
    assert heard == ([], ["*", "node.1"], ["*"])
    assert weights[2].tolist() >= [3, 3]
    assert ways_back[2] == [True]
    for tail in ways_back:
        assert tail == [False] * (len(tail) - 1) + [True], "each knows of its last iteration, and only of that"


def play_rounds(node):
    """Runs the task twice: node 0 sends the number of each round, and the others answer before the next one begins."""
    steps, rng = [], random.Random(node.name)

    def step(ctx):
        steps.append(ctx.total_step)
        if node.name == "node.0":
            node.send("round", ctx.total_step)
            answers = [node.wait_for("answer", 20) for _ in range(2)]
            assert [answer.args for answer in answers] == [[ctx.total_step]] * 2
        else:
            time.sleep(rng.random() * 0.01)
            task.router.look()  # as between two middlewares: the event may come before anybody waits for it
            if (message := node.wait_for("round")) is not None:
                node.send("answer", *message.args)

    with Task(router=node) as task:
        task.use(step)
        for _ in range(2):
            task.run(max_step=10 if node.name == "node.0" else None)
    if node.name != "node.0":
        node.send("steps", steps)
        return None
    return steps, [sorted(node.wait_for("steps", 20).args[0]) for _ in range(2)]


def test_no_event_is_lost_between_middlewares_and_a_task_can_be_run_again():
    steps, others = runner(3)(play_rounds)
    assert steps == list(range(20))
    for theirs in others:
        assert theirs == list(range(len(theirs)))
        assert len(theirs) >= 20


def tutorial(node):
    """The distributed example of DI-engine's tutorial: the evaluator takes the learner's weights, and ends the task."""
    saved, evaluated, received, model = [], [], [], {}
    node.handle("evaluated", lambda sender, results: received.extend(results))

    def evaluate(ctx):
        nonlocal last_train_iter
        while True:
            if ctx.finish:
                return
            if task.parallel_ctx.get("state_dict") and task.parallel_ctx.get("train_iter") > last_train_iter:
                model.update(task.parallel_ctx.state_dict)
                ctx.train_iter = task.parallel_ctx.train_iter
                last_train_iter = task.parallel_ctx.get("train_iter")
                break
            time.sleep(0.001)
        evaluated.append((ctx.train_iter, model["weight"].tolist()))
        if ctx.train_iter >= 5:
            ctx.finish = True

    def train(ctx):
        ctx.keep("train_iter")
        ctx.train_iter = ctx.get("train_iter", -1) + 1
        ctx.state_dict = {"weight": torch.full([2], ctx.train_iter)}
        time.sleep(0.01)  # in which the end may come
        if ctx.finish:
            saved.append(ctx.train_iter)

    last_train_iter = -1
    with Task(router=node) as task:
        task.share("state_dict", "train_iter")
        task.use(evaluate, filter_labels=["standalone", "node.1"])
        task.use(train, filter_labels=["standalone", "node.0"])
        train_iter = task.run(max_step=1000).total_step
    if node.name == "node.1":
        node.send("evaluated", evaluated)
    while node.name == "node.0" and not received:
        node.wait()
    return saved, train_iter, received


def test_the_example_of_the_tutorial_evaluates_newest_weights_and_saves_the_last_ones():
    saved, train_iter, evaluated = runner(2)(tutorial)
    assert saved == [train_iter]
    assert train_iter < 999
    assert [iteration for iteration, _ in evaluated] == sorted({iteration for iteration, _ in evaluated})
    assert all(weight == [iteration] * 2 for iteration, weight in evaluated)


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
            os.kill(os.getpid(), signal.SIGKILL)
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


class Broken:
    """Ends the process that unpickles it, as the import of a script without `if __name__ == "__main__"` does."""

    def __reduce__(self):
        return os._exit, (1,)


def test_a_node_that_cannot_be_started_is_not_started_again():
    with pytest.raises(WorkerError, match=r"^node 1 \(pid \d+\) ended with exit code 1 before its first result"):
        runner(2)(stay, Broken())


# ---- nodes that attach


def gather(node):
    """The task that others attach to: it works once five have attached, of which the fifth replaces another one."""
    senders = []
    while len(senders) < 5:
        senders.append(node.wait_for("here", 60).sender)
        if len(senders) == 4:
            node.send("all here")
    print(*senders, flush=True)
    time.sleep(60)


def attend(node):
    assert set(node.labels) == ({"first"} if node.name == "node.1" else {"other", "spare"})
    node.send("here")
    while not node.finishing:
        if node.name == "node.3" and node.wait_for("all here") and first_time("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        node.wait()


def test_all_nodes_of_a_runner_attach_and_are_replaced_and_end_when_node_0_is_killed(scripts, monkeypatch, capfd):
    monkeypatch.chdir(scripts.runs_dir)
    monkeypatch.setattr(node_module, "GONE_SECONDS", 0.2)
    address = f"tcp://127.0.0.1:{free_port()}"
    hub = scripts.start(SCRIPT, "gather", address)
    scripts.wait_until(Path("key").exists, hub)
    killer = threading.Thread(target=lambda: print(hub.stdout.readline()) or hub.kill())
    killer.start()
    attach = runner(4, labels=["first", *[["other", "spare"]] * 3], attach_to=address, key_file="key")
    with pytest.raises(WorkerError, match=rf"^{address} refuses connections: the task there was killed"):
        attach(attend)
    killer.join()
    out = capfd.readouterr().out
    assert sorted(re.findall(r"node\.\d", out)) == [f"node.{number}" for number in range(1, 6)]
    assert re.findall(r"(node \d) \(pid \d+\) (.*)", out) == [("node 3", "was killed by SIGKILL; restart 1 of 5")]


# ---- nodes that fail


def go_on(node):
    """A second task shares a value while node 1 is still in the first one."""
    with Task(router=node) as first:
        first.use(lambda ctx: time.sleep(0.5 * (node.name == "node.1")))
        first.use(lambda ctx: None)  # before it the node looks at what has arrived, which is for the second task
        first.run(max_step=1)
    with Task(router=node) as second:
        second.share("weights")

        def step(ctx):
            if node.name != "node.0":
                deadline = time.monotonic() + 10
                while "weights" not in second.parallel_ctx:
                    assert time.monotonic() < deadline, "nothing was shared"
                node.send("read")
                wait_for_the_end(node)(ctx)
            elif ctx.total_step == 0:
                ctx.weights = 7
            else:
                ctx.finish = node.wait_for("read", 20) is not None

        second.use(step).run()


def test_a_node_that_comes_late_from_one_task_gets_what_the_next_one_has_shared():
    runner(2)(go_on)


def stumble(node):
    """The first node 1 raises an exception, the first node 2 hangs; their successors wait longer than a hang.

    Before that, all run another task to its end, which the successors leave out.
    """
    back = set()
    with Task(router=node) as earlier:
        earlier.use(wait_for_the_end(node) if node.name != "node.0" else lambda ctx: None)
        earlier.run(max_step=1 if node.name == "node.0" else None)
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

    with Task(router=node) as task:
        task.use(step).run()


def test_nodes_that_raise_or_hang_are_named_and_replaced_and_those_that_wait_are_not(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    runner(3, max_restarts=2, middleware_seconds=HANG_SECONDS)(stumble)
    out = capfd.readouterr().out
    assert re.findall(r"node (\d) \(pid \d+\) (.*); restart (\d) of 2", out) == [
        ("1", "raised an exception", "1"),
        ("2", "sent no heartbeat for 2 s and was killed (middleware_seconds)", "2"),
    ]
    assert out.count("ArithmeticError: the node caught fire") == 1


# ---- bad settings


def mistype(node):
    with Task(router=node) as task:
        task.use(lambda ctx: None).use(lambda ctx: None, filter_labels=["colector"])
        return task.run(max_step=1).total_step


@pytest.mark.parametrize("number", [1, 3])
def test_a_filter_that_no_node_matches_is_refused_in_one_line(number, capfd):
    with pytest.raises(ConfigError) as refusal:
        runner(number, labels=["learner", "collector", ("collector", "spare")][:number])(mistype)
    known = (
        "standalone, node.0, learner"
        if number == 1
        else "collector, distributed, learner, node.0, node.1, node.2, spare"
    )
    why = f"no node has such a label; there are {known}; name one of these"
    assert str(refusal.value) == f"filter-labels=colector: {why}"
    assert capfd.readouterr() == ("", "")


def test_where_nodes_may_join_such_a_filter_is_a_warning(tmp_path, caplog):
    listen = f"tcp://127.0.0.1:{free_port()}"
    assert runner(2, listen=listen, key_file=tmp_path / "key")(mistype) == 0
    warning = "filter-labels=colector: waits for a node with such a label to join (1 so far)"
    assert [record.getMessage() for record in caplog.records] == [warning]


WRONG = [
    ({"n_parallel_workers": 0}, "n_parallel_workers=0: there is at least one node"),
    ({"n_parallel_workers": 1, "labels": ["a", "b"]}, "n_parallel_workers=1: .* one for each of 2 lists of labels"),
    (
        {"n_parallel_workers": 1, "listen": "tcp://a:1", "attach_to": "tcp://b:1"},
        "attach-to=tcp://b:1: a node that joins",
    ),
    ({"n_parallel_workers": 4, "attach_to": "tcp://127.0.0.1:9"}, "attach-to=.*: TCP needs a key"),
    ({"n_parallel_workers": 4, "listen": "nonsense"}, "listen=nonsense: is not tcp://HOST:PORT"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_settings_are_refused_before_any_node_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        runner(**settings)(mistype)


# ---- node 0 is killed


def endless(node):
    if node.name == "node.0":
        print("running", flush=True)
    wait_for_the_end(node)(None)


def test_all_nodes_end_with_node_0_and_leave_nothing(scripts):
    before = scripts.files()
    hub = scripts.start(SCRIPT, "endless")
    assert hub.stdout.readline() == "running\n"
    family, asked = family_of(hub.pid), time.monotonic()
    assert len(family) == 2
    assert scripts.files() - before
    hub.kill()
    done = scripts.finish(hub, "r")
    while still_alive(family) and time.monotonic() < asked + 10:
        time.sleep(0.01)
    assert not still_alive(family)
    assert (done.code, done.out, done.err) == (-9, "", "")
    assert not scripts.left(before)


if __name__ == "__main__":
    _, name, *address = sys.argv
    settings = (
        {"n_parallel_workers": 1, "listen": address[0], "key_file": "key"} if address else {"n_parallel_workers": 3}
    )
    runner(**settings)(globals()[name])
