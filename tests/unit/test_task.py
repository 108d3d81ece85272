"""Tasks in one process: order, errors, the end of a run, shared values, threads, labels, the timer."""

import contextlib
import copy
import random
import threading
import time

import pytest
import torch

from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.task.middleware import Context, StepTimer
from a3c_mp.task.task import SHARE, Task
from a3c_mp.task.wire import FINISH, JOINED, OVER


def recorder(tape, name, *, yields=True, fail=None, handle=False, backward_fail=None, sleep=0.0):
    """A middleware that records its halves and the errors thrown into it."""

    def generator(ctx):
        tape.append(f"{name}+")
        time.sleep(random.random() * sleep)
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
        ctx.keep("train_iter", "_buffer")
        ctx.setdefault("train_iter", 0)
        ctx.setdefault("_buffer", []).append(ctx.total_step)
        assert ctx.get("data", "none") == "none"
        assert "data" not in ctx
        if ctx.total_step == 0:
            ctx.data = 1

    def second(ctx):
        ctx.train_iter += 1

    ctx = run(first, second, max_step=1001)
    assert (ctx.train_iter, ctx.total_step, ctx.get("_buffer")) == (1001, 1000, list(range(1001)))
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


# ---- order and errors


def test_the_way_back_is_the_reverse_of_the_way_forward():
    tape = []
    run(recorder(tape, "A"), recorder(tape, "B"), recorder(tape, "C", yields=False), max_step=2)
    assert tape == ["A+", "B+", "C", "B-", "A-"] * 2


@pytest.mark.parametrize("_", range(10))
def test_the_way_back_of_async_middleware_is_in_reverse_order_of_registration(_):
    tape = []
    run(*(recorder(tape, name, sleep=0.004) for name in "ABC"), async_mode=True)
    assert sorted(tape[:3]) == ["A+", "B+", "C+"]
    assert tape[3:] == ["C-", "B-", "A-"]


def test_a_middleware_that_returns_before_its_yield_has_no_way_back():
    def early(ctx):
        if ctx.total_step >= 0:
            return
        yield

    assert run(early, max_step=2).total_step == 1


@pytest.mark.parametrize("async_mode", [False, True])
def test_what_is_no_middleware_is_an_error_that_names_it(async_mode):
    def twice(ctx):
        yield
        yield

    async def asynchronous(ctx):
        yield

    with pytest.raises(RuntimeError, match=r"generator didn't stop\n\(in the middleware twice\)$"):
        run(twice, async_mode=async_mode)
    with pytest.raises(TypeError, match=r"async def.*\n\(in the middleware asynchronous\)$"):
        run(asynchronous, async_mode=async_mode)


def test_serial_nests():
    tape = []
    a, b, c, d = (recorder(tape, name) for name in "ABCD")
    with Task() as task:
        task.use(a)
        task.use(task.serial(b, task.serial(c, d)))
        task.run(max_step=2)
    assert tape == ["A+", "B+", "C+", "D+", "D-", "C-", "B-", "A-"] * 2


FAILING = {"yields": False, "fail": ArithmeticError("failed")}
FAILING_BACK = {"backward_fail": ArithmeticError("failed back")}


@pytest.mark.parametrize(
    ("how", "expected", "error"),
    [
        ([{}, {}, FAILING, {}], "A+ B+ C B!failed B- A!failed A-", r"^failed\n\(in the middleware plain\)$"),
        ([{}, {"handle": True}, FAILING, {}], "A+ B+ C B!failed B- A-", None),
        ([{}, FAILING_BACK, {}], "A+ B+ C+ C- B- A!failed back A-", r"^failed back\n\(in the middleware generator\)$"),
    ],
    ids=["on the way forward", "handled", "on the way back"],
)
def test_an_error_goes_back_through_what_is_suspended_until_it_is_handled(how, expected, error):
    tape = []
    middleware = [recorder(tape, name, **kwargs) for name, kwargs in zip("ABCD", how, strict=False)]
    with pytest.raises(ArithmeticError, match=error) if error else contextlib.nullcontext():
        assert run(*middleware, max_step=2).total_step == 1, "a handled error ends its iteration only"
    assert " ".join(tape) in (expected, f"{expected} {expected}")


def test_an_error_in_a_thread_is_raised_once_all_have_ended():
    tape = []

    def end_later(ctx):
        time.sleep(0.2)
        tape.append("ended")

    with pytest.raises(ArithmeticError, match="failed"):
        run(recorder(tape, "A"), recorder(tape, "B", **FAILING), end_later, async_mode=True)
    assert tape[2:] == ["ended", "A!failed", "A-"]


# ---- the end


class StubNode:
    """Stands in for a connected node: keeps what a task sends, and does something in each look."""

    is_active, finishing = True, False

    def __init__(self, name="node.1", on_look=lambda node: None, labels=(), known_labels=(), others_may_join=False):
        self.name, self.look, self.sent, self.handlers = name, lambda: on_look(self), [], {}
        self.labels, self.known_labels, self.others_may_join = labels, known_labels, others_may_join

    def begin_run(self):
        return 1

    def send(self, event, *args, to="*"):
        self.sent.append((event, *copy.deepcopy(args)))

    def handle(self, event, handler, types=None):
        self.handlers[event] = handler


def end(node):
    node.finishing = True


@pytest.mark.parametrize(
    ("node", "step", "sent"),
    [(StubNode(), 2, [(FINISH, 1)]), (StubNode("node.1", end), 0, []), (StubNode("node.0", end), 0, [(FINISH, 1)])],
    ids=["here", "elsewhere", "elsewhere, and node 0 passes it on"],
)
def test_the_end_of_a_task_reaches_all_nodes(node, step, sent):
    ctx = run(lambda ctx: None, max_step=3, router=node)
    assert ctx.finish
    assert (ctx.total_step, node.sent) == (step, sent)
    node.handlers[JOINED]("node.2")  # during a later run of node 0
    assert node.sent == ([*sent, (OVER, 1)] if node.name == "node.0" else sent)


def test_what_is_shared_is_sent_when_it_changes_and_to_nodes_that_join():
    node, notes = StubNode(), []

    def note(ctx):
        ctx.notes, ctx.weights = notes, torch.full([2], len(notes))
        if ctx.total_step == 0:
            ctx.at_start = True
        if ctx.total_step in (0, 2):
            notes.append(ctx.total_step)
        if ctx.total_step == 4:
            node.handlers[JOINED]("node.2")
            node.handlers[JOINED]("node.3")

    with Task(router=node) as task:
        task.share("notes", "weights", "at_start", "never")
        task.use(note).run(max_step=6)
    values = [message[1] for message in node.sent if message[0] == SHARE]
    starts = ["at_start" in value for value in values]
    assert starts == [True, False, False, False, True, True, True], "at once, as each node may wait"
    assert [value["notes"] for value in values if "notes" in value] == [[0], [0, 2], [0, 2], [0, 2], [0, 2]]
    weights = [value["weights"].tolist() for value in values if "weights" in value]
    assert weights == [[0, 0], [1, 1], [2, 2], [2, 2], [2, 2], [2, 2]]
    node.handlers[SHARE]("node.2", {"x": 1})
    node.handlers[SHARE]("node.2", {"x": 2})
    assert (task.parallel_ctx.x, task.parallel_ctx.get("x"), task.parallel_ctx.get("y", 3)) == (2, 2, 3)


@pytest.mark.parametrize("async_mode", [False, True])
@pytest.mark.parametrize("max_step", [3, None])
@pytest.mark.parametrize("half", ["forward", "back"])
def test_finish_is_true_on_the_last_way_back_unless_a_middleware_assigns_it_there(max_step, async_mode, half):
    seen = []

    def watch(ctx):
        yield
        seen.append(ctx.finish)

    def end(ctx):
        if half == "back":
            yield
        ctx.finish = max_step is None and ctx.total_step == 2
        if half == "forward":
            yield

    run(watch, end, max_step=max_step, async_mode=async_mode)
    assert seen == [False, False, half == "forward" or max_step is None]


def test_a_second_run_goes_on_where_the_first_one_ended():
    steps, started = [], []

    def count(ctx):
        ctx.keep("total")
        ctx.total = ctx.get("total", 0) + 1
        ctx.scratch = None
        if ctx.total_step == 0:
            started.append(True)
        steps.append((ctx.total_step, ctx.finish))
        yield
        steps[-1] += (ctx.finish,)

    with Task() as task:
        task.use(count)
        for max_step, total in ((3, 3), (2, 5), (1, 6)):
            ctx = task.run(max_step=max_step)
            assert (ctx.total, ctx.total_step, ctx) == (total, total - 1, task.ctx)
    assert [step for step, _, _ in steps] == list(range(6))
    assert [step for step, _, last in steps if last] == [2, 4, 5]
    assert not any(at_start for _, at_start, _ in steps)
    assert started == [True]


def test_a_run_after_one_that_failed_begins_with_a_new_iteration():
    def fail_once(ctx):
        ctx.x = ctx.get("x", 0) + 1
        if ctx.total_step == 1:
            raise ArithmeticError

    with Task() as task:
        task.use(fail_once)
        with pytest.raises(ArithmeticError):
            task.run(max_step=5)
        ctx = task.run(max_step=1)
    assert (ctx.total_step, ctx.x) == (2, 1)


# ---- values of other nodes


class Arrivals:
    """Of each look at messages: deliver what has arrived then."""

    def __init__(self, *looks):
        self.looks = iter(looks)

    def __call__(self, node):
        values = next(self.looks, {})
        if values is None:
            end(node)
            node.handlers[FINISH]("node.0", 1)
        elif values:
            node.handlers[SHARE]("node.0", values)


def seeds_loop(task, loaded):
    """The loop by which an evaluator of DI-engine's tutorial waits for weights, to the letter but for one misprint."""
    last_train_iter = -1

    def _evaluate(ctx):
        ctx.setdefault("envstep", -1)
        ctx.setdefault("train_iter", -1)
        if task.router.is_active:
            nonlocal last_train_iter
            while True:
                if ctx.finish:
                    return
                if task.parallel_ctx.get("state_dict") and task.parallel_ctx.get("train_iter") > last_train_iter:
                    loaded.append(task.parallel_ctx.state_dict)
                    ctx.train_iter = task.parallel_ctx.train_iter
                    ctx.envstep = task.parallel_ctx.envstep
                    last_train_iter = task.parallel_ctx.get("train_iter")
                    break
                time.sleep(0.001)
        loaded.append((ctx.train_iter, ctx.envstep))

    return _evaluate


def weights(number):
    return {"state_dict": {"version": number}, "train_iter": number, "envstep": 10 * number}


@pytest.mark.parametrize("async_mode", [False, True])
def test_values_of_other_nodes_and_the_end_are_seen_by_a_middleware_that_polls(async_mode):
    node, loaded = (
        StubNode(on_look=Arrivals({}, {}, weights(0), {}, {}, {}, {}, {}, {}, weights(1), {}, {}, {}, None)),
        [],
    )
    with Task(router=node, async_mode=async_mode) as task:
        ctx = task.use(seeds_loop(task, loaded)).run()
    assert loaded == [{"version": 0}, (0, 0), {"version": 1}, (1, 10)]
    assert ctx.finish


def test_names_that_are_read_one_after_the_other_have_values_of_one_moment():
    task = Task(router=StubNode(on_look=Arrivals(weights(1), weights(2), weights(3), weights(4))))
    shared = task.parallel_ctx
    for number in range(1, 5):
        assert shared.get("state_dict", {"version": None})["version"] == (number - 1 or None)
        assert "state_dict" in shared  # as it is read again, the next ones are there
        assert (shared.train_iter, shared.envstep) == (number, 10 * number)
        shared._read.clear()
    with pytest.raises(AttributeError, match="'other' is not set: no other node has shared it so far"):
        shared.other  # noqa: B018


def test_the_end_is_seen_by_what_runs_later_or_waits_and_after_the_last_middleware_in_a_whole_iteration():
    seen = []

    def note(ctx):
        seen.append(ctx.finish)

    def wait(ctx):
        while ctx.total_step == 2 and not ctx.finish:
            node.look()
        note(ctx)

    for looks, expected in (
        ([None], [True, True]),
        ([{}, None], [False, True]),
        ([{}, {}, None], [False, False, True, True]),
        ([{}] * 9 + [None], [False, False, False, False, False, True]),
    ):
        node = StubNode(on_look=Arrivals(*looks))
        run(note, wait, max_step=None, router=node)
        assert seen == expected
        seen.clear()


# ---- threads


@pytest.mark.parametrize("where", ["look", "middleware"])
def test_an_error_beside_async_middleware_ends_what_waits_for_messages(where):
    looks = iter(range(2))

    def look(node):
        if where == "look" and next(looks, None) is None:
            raise WorkerError("node 1 is lost")

    def collect(ctx):
        if where == "middleware":
            raise WorkerError("node 1 is lost")

    def wait_for_games(ctx):
        while not ctx.finish:
            time.sleep(0.001)

    with pytest.raises(WorkerError, match="node 1 is lost"):
        run(wait_for_games, collect, async_mode=True, router=StubNode(on_look=look))


def test_no_iteration_is_run_where_none_is_asked_for_and_a_kept_attribute_may_go():
    def use_once(ctx):
        ctx.keep("x")
        ctx.x = ctx.get("x", 0) + 1
        if ctx.total_step == 1:
            del ctx.x

    with Task() as task:
        task.use(use_once)
        before = task.run(max_step=0).total_step
        assert task.run(max_step=3).total_step == before + 3
        assert task.ctx.x == 1


def test_async_middleware_runs_at_the_same_time():
    barrier = threading.Barrier(3, timeout=20)
    run(*[lambda ctx: barrier.wait()] * 3, async_mode=True)


# ---- labels


ONE = {"e": "collector", "f": "node.1*"}  # patterns that stand alone


def test_a_middleware_is_used_where_a_label_matches():
    tape = []
    with Task(router=StubNode("node.3", labels=("collector",))) as task:
        for name, labels in {
            "a": None,
            "b": ["distributed", "learner"],
            "c": ["node.[12]"],
            "d": ["coll*"],
            **ONE,
        }.items():
            task.use(recorder(tape, name, yields=False), filter_labels=labels)
        task.run(max_step=1)
    assert tape == ["a", "b", "d", "e"]


def test_a_filter_that_no_node_can_match_is_an_error():
    with Task(router=StubNode(known_labels=("collector", "learner"))) as task:
        task.use(recorder([], "a"), filter_labels=["evaluator", "collector"])
        with pytest.raises(ConfigError, match=r"filter-labels=colector: no node has such a label; there are collector"):
            task.use(recorder([], "a"), filter_labels=["colector"])
        with pytest.raises(ConfigError, match="no node has such a label"):
            task.use(recorder([], "a"), filter_labels=[])


def test_a_filter_is_checked_without_known_labels_too_where_there_are_no_other_nodes():
    with Task() as task:
        for mode in ("standalone", "distributed", "async", "node.0"):
            task.use(recorder([], "a"), filter_labels=[mode])
        with pytest.raises(ConfigError, match=r"filter-labels=node.1: .* there are standalone, node.0; name one"):
            task.use(recorder([], "a"), filter_labels=["node.1"])


@pytest.mark.parametrize("number", [0, 1])
def test_a_filter_that_a_node_could_match_that_joins_is_a_warning_of_node_0(number, log, tape):
    node = StubNode(f"node.{number}", known_labels=("collector",), others_may_join=True)
    node.log = log
    Task(router=node).use(recorder([], "a"), filter_labels=["evaluator"])
    expected = ["filter-labels=evaluator: waits for a node with such a label to join"]
    assert tape.messages == (expected if number == 0 else [])


# ---- the timer


def test_step_timer_counts_both_halves_and_shows_nested_middleware_below_their_own():
    def slow(ctx):
        time.sleep(0.01)
        yield
        time.sleep(0.05)

    def quick(ctx):
        time.sleep(0.001)

    tables, records = [], []
    with Task() as task:
        task.use(task.serial(slow, quick))
        task.use_wrapper(StepTimer(2, log=tables.append, record=records.append))
        task.use(quick, name="last")
        task.run(max_step=4)
    header, serial, nested, other, last = tables[0].splitlines()
    assert len(tables) == 2
    assert header.split() == ["iteration", "1", "mean", "ms", "share"]
    assert nested.startswith("  slow")
    assert float(nested.split()[1]) >= 60
    assert [line.split()[0] for line in (serial, other, last)] == ["serial", "quick", "last"]
    assert int(serial.split()[-1][:-1]) + int(last.split()[-1][:-1]) == pytest.approx(100, abs=1)
    assert len(records) == 4
    paths = {"serial", "serial/slow", "serial/quick", "last"}
    assert set(records[0]) == {f"time/task/{path}" for path in paths}
    assert records[0]["time/task/serial/slow"] >= 0.06
