"""Tasks in one process: order, errors, the end of a run, threads, events, labels."""

import copy
import os
import random
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from a3c_mp.errors import ConfigError
from a3c_mp.task.context import Context
from a3c_mp.task.events import JOINED, Cancelled
from a3c_mp.task.sharing import SHARE
from a3c_mp.task.task import FINISH, Task
from a3c_mp.task.timing import StepTimer
from a3c_mp.task.wire import Message


def recorder(tape, name, *, yields=True, fail=None, handle=False, backward_fail=None, sleep=0.0):
    """A middleware that records its halves and the errors thrown into it."""

    def generator(ctx):
        tape.append(f"{name}+")
        time.sleep(random.random() * sleep)
        if fail:
            raise fail
        try:
            yield
        except Exception as error:
            tape.append(f"{name}!{error}")
            if not handle:
                raise
        finally:
            tape.append(f"{name}-")
        if backward_fail:
            raise backward_fail

    def plain(ctx):
        tape.append(name)
        time.sleep(random.random() * sleep)
        if fail:
            raise fail

    return generator if yields else plain


def run(*middleware, max_step=1, **task_args):
    with Task(**task_args) as task:
        for fn in middleware:
            task.use(fn)
        return task.run(max_step=max_step)


# ---- the context


def test_kept_attributes_survive_and_others_end_with_their_iteration():
    def first(ctx):
        ctx.keep("train_iter")
        ctx.setdefault("train_iter", 0)
        assert ctx.get("data", "none") == "none"
        assert "data" not in ctx
        if ctx.total_step == 0:
            ctx.data = 1

    def second(ctx):
        ctx.train_iter += 1

    ctx = run(first, second, max_step=1001)
    assert (ctx.train_iter, ctx.total_step) == (1001, 1000)
    with pytest.raises(
        AttributeError, match=r"first set it in iteration 0 and did not keep it: call ctx.keep\('data'\)"
    ):
        ctx.data  # noqa: B018
    with pytest.raises(AttributeError, match="no middleware of this iteration has set it"):
        ctx.never  # noqa: B018


def test_what_is_kept_later_was_not_lost_before():
    ctx = Context()
    ctx.x = 1
    ctx = ctx.renew()
    assert ctx.setdefault("x", 2) == 2
    ctx.keep("x")
    assert ctx.renew().renew().x == 2


# ---- order


def test_the_way_back_is_the_reverse_of_the_way_forward():
    tape = []
    run(recorder(tape, "A"), recorder(tape, "B"), recorder(tape, "C", yields=False), max_step=2)
    assert tape == ["A+", "B+", "C", "B-", "A-"] * 2


@pytest.mark.parametrize("_", range(20))
def test_the_way_back_of_async_middleware_is_in_reverse_order_of_registration(_):
    tape = []
    run(recorder(tape, "A", sleep=0.004), recorder(tape, "B", sleep=0.004), recorder(tape, "C", sleep=0.004),
        async_mode=True)  # fmt: skip
    assert sorted(tape[:3]) == ["A+", "B+", "C+"]
    assert tape[3:] == ["C-", "B-", "A-"]


def test_a_middleware_that_returns_before_its_yield_has_no_way_back():
    def early(ctx):
        if ctx.total_step >= 0:
            return
        yield

    assert run(early, max_step=2).total_step == 1


@pytest.mark.parametrize("async_mode", [False, True])
def test_a_second_yield_is_an_error(async_mode):
    def twice(ctx):
        yield
        yield

    with pytest.raises(RuntimeError, match="middleware twice has a second yield"):
        run(twice, async_mode=async_mode)


def test_serial_parallel_and_wrap_nest():
    tape = []
    a, b, c, d, e = (recorder(tape, name) for name in "ABCDE")
    with Task() as task:

        def outer(ctx):
            back = task.wrap(a)(ctx)
            tape.append("outer")
            yield
            back()
            tape.append("outer back")

        task.use(outer)
        task.use(task.serial(b, task.parallel(c, task.serial(d, e))))
        task.run(max_step=2)
    assert len(tape) == 24
    for iteration in (tape[:12], tape[12:]):
        assert iteration[:3] == ["A+", "outer", "B+"]
        assert sorted(iteration[3:6]) == ["C+", "D+", "E+"]
        assert iteration[6:] == ["E-", "D-", "C-", "B-", "A-", "outer back"]


def test_forward_and_backward_within_a_middleware_and_by_hand():
    tape = []
    a, b = recorder(tape, "A"), recorder(tape, "B")
    with Task() as task:

        def both(ctx):
            task.forward(a, ctx)
            task.forward(b, ctx)
            task.backward()
            task.forward(a, ctx)
            tape.append("end")

        task.use(both)
        task.run(max_step=1)
        assert tape == ["A+", "B+", "B-", "A-", "A+", "end", "A-"]
        tape.clear()
        ctx = task.forward(a)
        task.forward(b, ctx)
        task.backward()
    assert tape == ["A+", "B+", "B-", "A-"]


def test_a_wrapped_middleware_whose_way_back_was_forgotten_goes_it_anyway():
    tape = []
    with Task() as task:
        task.use(lambda ctx: task.wrap(recorder(tape, "A"))(ctx) and None)
        task.run(max_step=1)
    assert tape == ["A+", "A-"]


# ---- errors


@pytest.mark.parametrize("async_mode", [False, True])
def test_an_error_goes_back_through_what_is_suspended(async_mode):
    tape = []
    fail = ArithmeticError("third")
    with pytest.raises(ArithmeticError, match="third"):
        run(recorder(tape, "A"), recorder(tape, "B"), recorder(tape, "C", yields=False, fail=fail),
            async_mode=async_mode, n_async_workers=1)  # fmt: skip
    assert tape == ["A+", "B+", "C", "B!third", "B-", "A!third", "A-"]


@pytest.mark.parametrize("async_mode", [False, True])
def test_a_handled_error_stays_handled(async_mode):
    tape, fail = [], ArithmeticError("x")
    ctx = run(recorder(tape, "A"), recorder(tape, "B", handle=True), recorder(tape, "C", yields=False, fail=fail),
              recorder(tape, "D"), max_step=2, async_mode=async_mode, n_async_workers=1)  # fmt: skip
    assert tape == ["A+", "B+", "C", "B!x", "B-", "A-"] * 2
    assert ctx.finish


def test_an_error_on_the_way_back_goes_on_from_there():
    tape = []
    with pytest.raises(ArithmeticError, match="back"):
        run(recorder(tape, "A"), recorder(tape, "B", backward_fail=ArithmeticError("back")), recorder(tape, "C"))
    assert tape == ["A+", "B+", "C+", "C-", "B-", "A!back", "A-"]


def test_an_error_ends_the_wait_of_another_middleware():
    def waits(ctx):
        task.wait_for("what never comes")

    def fails(ctx):
        time.sleep(0.1)
        raise ArithmeticError("failed")

    with Task(async_mode=True) as task:
        task.use(waits)
        task.use(fails)
        with pytest.raises(ArithmeticError, match="failed"):  # without it, the first one would wait for ever
            task.run()


def test_the_first_error_is_raised_and_what_has_not_started_is_not_run():
    tape = []

    def fails(ctx):
        raise ArithmeticError("failed")

    with pytest.raises(ArithmeticError):
        run(fails, recorder(tape, "B"), async_mode=True, n_async_workers=1)
    assert not tape


def test_a_cancelled_wait_names_the_error_of_the_other_middleware():
    seen = []

    def waits(ctx):
        try:
            task.wait_for("what never comes")
        except Cancelled as error:
            seen.append(str(error.__cause__))
            raise

    def fails(ctx):
        raise ArithmeticError("failed")

    with Task(async_mode=True) as task:
        task.use(waits)
        task.use(fails)
        with pytest.raises(ArithmeticError):
            task.run()
    assert seen == ["failed"]


# ---- the end


class RecordingRouter:
    """Gives a task the messages in `arrived`, and keeps what it sends."""

    is_active, finishing, name = True, False, "node.1"

    def __init__(self, *arrived):
        self.arrived, self.sent, self.values, self.handlers = list(arrived), [], [], {}

    def send(self, event, *args, to="*"):
        self.sent.append(event)
        self.values.append(copy.deepcopy(args))

    def handle(self, event, handler):
        self.handlers[event] = handler

    def receive(self):
        found, self.arrived = self.arrived, []
        return found

    def on_arrival(self, callback):
        pass


@pytest.mark.parametrize("arrived", [(), (Message("node.0", FINISH, []),)], ids=["here", "elsewhere"])
def test_only_the_node_that_ends_a_task_tells_the_others(arrived):
    router = RecordingRouter(*arrived)
    ctx = run(lambda ctx: None, max_step=3, router=router)
    assert ctx.finish
    assert ctx.total_step == (0 if arrived else 2)
    assert router.sent == ([] if arrived else [FINISH])


def test_what_is_shared_is_sent_when_it_changes_and_to_nodes_that_join():
    router, notes = RecordingRouter(), []

    def note(ctx):
        ctx.notes, ctx.weights = notes, np.full(2, len(notes))
        if ctx.total_step in (0, 2):
            notes.append(ctx.total_step)
        if ctx.total_step == 4:
            router.handlers[JOINED]("node.2")

    with Task(router=router) as task:
        task.share("notes", "weights")
        task.use(note).run(max_step=6)
    values = [args[0] for event, args in zip(router.sent, router.values, strict=True) if event == SHARE]
    assert [value.get("notes") for value in values] == [[0], None, [0, 2], None, [0, 2]]
    assert [value["weights"].tolist() for value in values if "weights" in value] == [[0, 0], [1, 1], [2, 2], [2, 2]]


def ends_itself(task, ctx):
    ctx.finish = True


def ends_by_signal(task, ctx):
    os.kill(os.getpid(), signal.SIGTERM)


def ends_from_elsewhere(task, ctx):
    thread = threading.Thread(target=task.finish)
    thread.start()
    thread.join()


@pytest.mark.parametrize("end", [None, ends_itself, ends_by_signal, ends_from_elsewhere])
@pytest.mark.parametrize("async_mode", [False, True])
def test_finish_is_true_on_the_last_way_back_whatever_the_cause(end, async_mode):
    seen = []

    def watches(ctx):
        yield
        seen.append(ctx.finish)

    def ends(ctx):
        if end is not None and ctx.total_step == 2:
            end(task, ctx)

    with Task(async_mode=async_mode) as task:
        task.use(watches)
        task.use(ends)
        task.run(max_step=3 if end is None else None)
    assert seen == [False, False, True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_ends_a_wait():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it

    def waits(ctx):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert task.wait_for("what never comes") is None

    with Task() as task:
        task.use(waits)
        assert task.run().finish
    signal.signal(signal.SIGINT, before)


# ---- threads


def sleeper(seconds):
    return lambda ctx: time.sleep(seconds)


@pytest.mark.parametrize(("settings", "meet"), [
    ({}, False), ({"async_mode": True}, True), ({"async_mode": True, "n_async_workers": 1}, False),
])  # fmt: skip
def test_async_middleware_runs_at_the_same_time(settings, meet):
    barrier = threading.Barrier(3, timeout=20 if meet else 0.2)
    middleware = [lambda ctx: barrier.wait() for _ in range(3)]
    if meet:
        run(*middleware, **settings)
    else:
        with pytest.raises(threading.BrokenBarrierError):
            run(*middleware, **settings)


def test_middleware_with_a_lock_is_never_run_beside_another():
    running, most = [], []

    def enters(ctx):
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()

    with Task(async_mode=True) as task:
        for _ in range(3):
            task.use(enters, lock=True)
        task.run(max_step=3)
    assert max(most) == 1
    assert len(most) == 9


# ---- events


def test_listeners_hear_each_event_until_they_are_removed():
    heard = []
    with Task() as task:
        task.on("data", heard.append)
        task.once("data", lambda value: heard.append(-value))
        task.emit("data", 1)
        task.emit("data", 2)
        task.emit("data", 3, to="node.7")
        task.emit("data", 4, to="standalone")
        task.off("data", heard.append)
        task.off("other")
        task.emit("data", 5)
    assert heard == [1, -1, 2, 4]


@pytest.mark.parametrize("before", [True, False])
def test_an_event_is_found_whether_it_comes_before_the_wait_or_after_it(before):
    found = []

    def waits(ctx):
        thread = threading.Thread(target=task.emit, args=("event", ctx.total_step))
        thread.start()
        if before:
            thread.join()
        found.append(task.wait_for("event", timeout=10)[0])
        thread.join()

    with Task() as task:
        task.use(waits)
        task.run(max_step=1000)
    assert found == list(range(1000))


def test_a_wait_ends_with_its_timeout_and_does_not_see_events_of_earlier_iterations():
    def waits(ctx):
        if ctx.total_step == 0:
            task.emit("event")
        else:
            task.wait_for("event", timeout=0.05)

    with Task() as task:
        task.use(waits)
        with pytest.raises(TimeoutError, match=r"no event 'event' within 0.05 s"):
            task.run(max_step=2)


# ---- labels


def test_a_middleware_is_used_where_a_label_matches():
    tape = []
    with Task(labels=["collector", "node.3"]) as task:
        for name, labels in {"a": None, "b": ["standalone", "learner"], "c": ["node.[12]"], "d": ["coll*"]}.items():
            task.use(recorder(tape, name, yields=False), filter_labels=labels)
        task.run(max_step=1)
    assert tape == ["a", "b", "d"]


def test_a_filter_that_no_node_can_match_is_an_error():
    with Task(known_labels=["learner", "collector"]) as task:
        task.use(recorder([], "a"), filter_labels=["evaluator", "collector"])
        with pytest.raises(ConfigError, match=r"filter-labels=colector: no node has such a label; there are collector"):
            task.use(recorder([], "a"), filter_labels=["colector"])


# ---- wrappers and the timer


def test_a_wrapper_runs_around_both_halves_whenever_it_is_added():
    tape = []

    class Wrapper:
        @contextmanager
        def __call__(self, name, half):
            tape.append(f"<{name} {half}")
            yield
            tape.append(">")

        def end_iteration(self, step):
            tape.append(f"end {step}")

    def collect(ctx):
        yield

    def learn(ctx):
        pass

    with Task() as task:
        task.use(collect)
        task.use_wrapper(Wrapper())
        task.use(learn, name="named")
        task.run(max_step=1)
    assert tape == ["<collect forward", ">", "<named forward", ">", "<collect backward", ">", "end 0"]


def test_step_timer_counts_both_halves_and_shows_nested_middleware_below_their_own():
    def slow(ctx):
        time.sleep(0.01)
        yield
        time.sleep(0.05)

    tables, records = [], []
    with Task() as task:
        task.use(task.serial(slow, sleeper(0.001)))
        task.use_wrapper(StepTimer(2, log=tables.append, record=records.append))
        task.use(sleeper(0.02), name="last")
        task.run(max_step=4)
    header, serial, nested, other, last = tables[0].splitlines()
    assert len(tables) == 2
    assert header.split() == ["iteration", "1", "forward", "ms", "backward", "ms", "mean", "ms", "share"]
    _, forward, backward, mean, _ = nested.split()
    assert nested.startswith("  slow")
    assert float(forward) >= 10
    assert float(backward) >= 50
    assert float(mean) == pytest.approx(float(forward) + float(backward), abs=0.02)
    assert [line.split()[0] for line in (serial, other, last)] == ["serial", "sleeper", "last"]
    assert int(serial.split()[-1][:-1]) + int(last.split()[-1][:-1]) == pytest.approx(100, abs=1)
    assert len(records) == 4
    assert set(records[0]) == {
        "time/task/serial",
        "time/task/serial/slow",
        "time/task/serial/sleeper",
        "time/task/last",
    }
    assert records[0]["time/task/serial/slow"] >= 0.06
