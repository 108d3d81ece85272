"""Workers that die or raise: named, replaced, and never in the way of the others."""

import os
import signal
import sys
import time
from collections import deque
from types import SimpleNamespace

import psutil
import pytest
import torch
from harness import rounds

from a3c_mp.errors import WorkerError
from a3c_mp.processes.pool import SlotLedger, WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.workers import Workers

pytestmark = pytest.mark.usefixtures("forked")


def count(channel, slots):
    """Fill slots with 0, 1, 2, ..."""
    for number, (slot, _) in enumerate(channel.tokens()):
        slots[slot]["count"].fill_(number)
        channel.beat()
        channel.send(slot, os.getpid())


def show_state(channel, slots):
    """Fill slots, and send the version of each token and what the worker was rebuilt from."""
    for slot, version in channel.tokens():
        channel.send(slot, (os.getpid(), version, channel.seed_key, channel.restored))


def call(channel, slots, function, argument):
    function(argument)


def pids(workers):
    return [process.pid for process in workers.supervisor.processes]


def fill(workers, slots, number):
    """(worker, pid, count) of the next `number` filled slots, each released."""
    found = []
    deadline = time.monotonic() + 60
    for [filled] in rounds(workers, lambda: len(found) >= number or time.monotonic() > deadline):
        worker, slot, pid = filled
        found.append((worker, pid, int(slots[slot]["count"])))
        workers.release([filled], 0)
    assert len(found) == number
    return found


@pytest.fixture
def slots():
    return Slots({"count": ((1,), torch.int64)}, 4)


@pytest.fixture
def start(slots):
    """Makes workers that run `target(channel, slots, *args)`, with a list of what has happened to them."""

    def start(target, num_workers, *args, states=None, **options):
        args, options, events = (slots, *args), WorkerOptions(**options), []
        workers = Workers(target, num_workers, args, states=states, options=options, on_restart=events.append)
        workers.events = events
        return workers

    return start


def test_a_slow_learner_takes_as_many_slots_of_each_worker(start, slots):
    taken = []
    with start(count, 2, slots_per_worker=2) as workers:
        while len({worker for worker, *_ in fill(workers, slots, 4)}) < 2:  # until both have started
            pass
        for [filled] in rounds(workers, lambda: len(taken) == 60):
            taken.append(filled.worker)
            time.sleep(0.01)
            workers.release([filled], 0)
    assert 25 <= sum(taken) <= 35, taken


def test_the_ledger_hands_out_rounds_and_gives_a_successor_what_the_caller_does_not_have():
    in_order, any_order = (SlotLedger(2, WorkerOptions(in_order=each, versions=[4, 5])) for each in (True, False))
    for worker, slot in ((1, 2), (1, 3), (0, 0)):
        in_order.fill(worker, slot, None)
        any_order.fill(worker, slot, None)
    assert [(filled.worker, filled.slot) for filled in in_order.take(3)] == [(0, 0), (1, 2)], "one of each"
    assert not in_order.take(1), "worker 0 has none"
    [held, _] = any_order.take(2)
    assert (held.worker, held.slot) == (1, 2)
    assert not any_order.take(2)
    any_order.forget(0)
    assert not any_order.take(1), "it is lost with worker 0"
    assert any_order.given[0] == deque([(0, 4), (1, 5)]), "whose successor fills it again"
    assert not any_order.given[1], "the caller has both"
    assert any_order.give(held, 6) == (2, 6)
    assert any_order.given[1] == deque([(2, 6)])
    assert any_order.due(1) == 2


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGSEGV))]
)
def test_a_killed_worker_is_named_and_replaced_and_the_others_go_on(start, slots, signum):
    with start(count, 2, role="actor", first_actor=6) as workers:
        fill(workers, slots, 10)
        victim, survivor = pids(workers)
        os.kill(victim, signum)
        found = fill(workers, slots, 100)
        while not any(worker == 0 and pid != victim for worker, pid, _ in found[-100:]):
            found += fill(workers, slots, 100)
        assert pids(workers)[1] == survivor
        assert pids(workers)[0] != victim
        os.kill(survivor, signal.SIGSTOP)  # such a one ends, too
    assert not any(psutil.pid_exists(pid) for pid in pids(workers))
    assert workers.events == [WorkerEvent(6, f"actor 6 (pid {victim}) was killed by {signum.name}; restart 1 of 5")]
    new = [number for worker, pid, number in found if worker == 0 and pid != victim]
    assert new == list(range(len(new))), "the new worker has its slots to itself"


@pytest.mark.parametrize(
    ("function", "argument", "reason"),
    [
        (int, "none", r"failed before its first result:\n(?s:.*)in call\n(?s:.*)ValueError: invalid literal"),
        (sys.exit, 0, r"failed before its first result:\n(?s:.*)in call\n(?s:.*)SystemExit: 0"),
        (os._exit, 0, "ended with exit code 0 before its first result"),
    ],
)
def test_an_end_before_the_first_result_is_fatal(start, slots, function, argument, reason):
    with start(call, 2, function, argument) as workers, pytest.raises(WorkerError, match=reason):
        fill(workers, slots, 1)
    assert not workers.events


def states_of(state):
    """Gives workers what they are rebuilt from."""
    return SimpleNamespace(start=7, record_start=lambda actor: state)


def test_a_successor_is_given_what_it_is_rebuilt_from_and_the_tokens_of_the_dead_one(start):
    """Its versions too, and those of slots that it had filled, but that the caller had not got."""
    states = states_of("a state")
    with start(show_state, 1, states=states, versions=[4, 5]) as workers:
        [first] = workers.take(lambda: False)
        pid, *payload = first.payload
        assert payload == [4, (7, 0, 0), "a state"]
        workers.release([first], 6)
        while len(workers._ledger.ready[0]) < 2:  # both have been filled, and are lost with the worker
            workers.supervisor.watch(lambda: False)
        states.record_start = lambda actor: "a later state"
        os.kill(pid, signal.SIGKILL)
        while pids(workers) == [pid]:
            workers.supervisor.watch(lambda: False)
        found = [workers.take(lambda: False)[0] for _ in range(2)]
    assert [(filled.slot, *filled.payload[1:]) for filled in found] == [
        (1, 5, (7, 0, 0), "a later state"),
        (0, 6, (7, 0, 0), "a later state"),
    ]


def test_without_a_state_a_successor_has_other_seeds(start):
    with start(show_state, 1, states=states_of(None), slots_per_worker=1) as workers:
        [first] = workers.take(lambda: False)
        os.kill(first.payload[0], signal.SIGKILL)
        workers.release([first], 0)
        [second] = workers.take(lambda: False)
    assert (first.payload[2], second.payload[2]) == ((7, 0, 0), (7, 0, 1))
