"""Workers that die or raise: named, replaced, and never in the way of the others."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from harness import left_in_shm, rounds

from a3c_mp.errors import WorkerError
from a3c_mp.processes.pool import WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.supervisor import WAIT_SECONDS
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
    if channel.restored == "lost":
        channel.not_restored("a coin was missing")
    for slot, version in channel.tokens():
        channel.send(slot, (os.getpid(), version, channel.seed_key, channel.restored))


def fail_at_start(channel, slots):
    raise ArithmeticError("cannot begin")


def fail_in_the_third_and_then_at_start(channel, slots, has_failed):
    if has_failed.exists():
        fail_at_start(channel, slots)
    has_failed.touch()
    for _ in range(2):
        channel.send(channel.take().slot, os.getpid())
    raise ArithmeticError("cannot go on")


def end_with_system_exit(channel, slots):
    sys.exit(0)


def end_with_exit_code_0(channel, slots):
    os._exit(0)


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
def events():
    """What has happened to the workers of `start`."""
    return []


@pytest.fixture
def start(slots, events):
    """Makes workers that run `target(channel, slots, *args)`."""

    def start(target, num_workers, *args, states=None, **options):
        return Workers(
            target, num_workers, (slots, *args), states=states, options=WorkerOptions(**options),
            on_restart=events.append,
        )  # fmt: skip

    return start


def test_slots_come_back_in_each_workers_own_order(start, slots):
    with start(count, 2) as workers:
        found = fill(workers, slots, 60)
    for worker in range(2):
        counts = [number for w, _, number in found if w == worker]
        assert counts == list(range(len(counts)))


@pytest.mark.parametrize(("in_order", "size"), [(False, 3), (True, 2)])
def test_a_round_has_as_many_slots_as_asked_for_or_one_of_each_worker_in_turn(start, in_order, size):
    with start(count, 2, in_order=in_order) as workers:
        found = []
        for filled in rounds(workers, lambda: len(found) >= 10, size=3):
            found.append([message.worker for message in filled])
            assert len({message.slot for message in filled}) == size
            workers.release(filled, 0)
    assert found == [[0, 1]] * 10 or not in_order


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGSEGV))]
)
def test_a_killed_worker_is_named_and_replaced_and_the_others_go_on(start, slots, events, signum):
    with start(count, 2, role="actor", first_actor=6) as workers:
        fill(workers, slots, 10)
        victim, survivor = pids(workers)
        os.kill(victim, signum)
        found = fill(workers, slots, 100)
        while not any(worker == 0 and pid != victim for worker, pid, _ in found[-100:]):
            found += fill(workers, slots, 100)
        assert pids(workers)[1] == survivor
        assert pids(workers)[0] != victim
    assert events == [WorkerEvent(6, f"actor 6 (pid {victim}) was killed by {signum.name}; restart 1 of 5")]
    new = [number for worker, pid, number in found if worker == 0 and pid != victim]
    assert new == list(range(len(new))), "the new worker has its slots to itself"


def test_a_slot_held_by_the_learner_is_not_given_to_the_new_worker(start):
    def take_slots(number):
        seen = []
        for filled in rounds(workers, lambda: len(seen) >= number):
            seen.append(filled[0].slot)
            workers.release(filled, 0)
        return seen

    with start(count, 1) as workers:
        [held] = workers.take(lambda: False)
        os.kill(held.payload, signal.SIGKILL)
        assert held.slot not in take_slots(20)
        workers.release([held], 0)
        assert held.slot in take_slots(10)


def test_a_successor_that_fails_at_start_uses_up_the_budget_and_says_so(start, slots, events, tmp_path):
    """The first worker did not fail at start, so the cause may pass."""
    with (
        start(fail_in_the_third_and_then_at_start, 1, Path(tmp_path, "has failed"), max_restarts=2) as workers,
        pytest.raises(WorkerError) as caught,
    ):
        fill(workers, slots, 100)
    first, second = (event.text for event in events)
    assert "raised an exception; restart 1 of 2\n" in first
    assert "raised an exception before its first result; restart 2 of 2\n" in second
    assert "raised an exception before its first result; restart budget of 2 spent\n" in str(caught.value)
    assert "ArithmeticError: cannot begin" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (fail_at_start, r"failed before its first result:\n(?s:.*)fail_at_start(?s:.*)ArithmeticError: cannot begin"),
        (end_with_system_exit, r"failed before its first result:\n(?s:.*)end_with_system_exit(?s:.*)SystemExit: 0"),
        (end_with_exit_code_0, "ended with exit code 0 before its first result"),
    ],
)
def test_an_end_before_the_first_result_is_fatal_whatever_the_exit_code(start, slots, events, target, reason):
    with start(target, 2) as workers, pytest.raises(WorkerError, match=reason):
        fill(workers, slots, 1)
    assert not events


def test_no_worker_is_replaced_once_the_run_is_to_stop(start, slots, events):
    stopping = []
    with start(count, 2) as workers:
        fill(workers, slots, 4)
        processes = [psutil.Process(pid) for pid in pids(workers)]
        for process in processes:
            process.terminate()
        stopping.append(True)
        psutil.wait_procs(processes, timeout=20)
        assert not workers.take(lambda: bool(stopping))
    assert not events


def test_leaving_the_block_leaves_nothing_behind(start, slots):
    before = set(Path("/dev/shm").iterdir())
    with start(count, 2) as workers:
        fill(workers, slots, 4)
        os.kill(pids(workers)[0], signal.SIGSTOP)  # not even a stopped one
    assert not any(psutil.pid_exists(pid) for pid in pids(workers))
    assert not left_in_shm(before)


def test_polling_does_not_wait_for_a_frozen_worker_and_replaces_a_dead_one(start, events):
    with start(count, 1, slots_per_worker=1, name="evaluator") as workers:
        [first] = workers.take(lambda: False)
        os.kill(first.payload, signal.SIGSTOP)
        workers.release([first], 0)
        started = time.monotonic()
        assert not any(workers.poll(lambda: False) for _ in range(100))
        assert time.monotonic() - started < 100 * WAIT_SECONDS / 2
        os.kill(first.payload, signal.SIGKILL)
        while not (filled := workers.poll(lambda: False)):
            pass
    assert filled[0].payload != first.payload
    assert events[0].text == f"evaluator (pid {first.payload}) was killed by SIGKILL; restart 1 of 5"


class States:
    """Gives workers what a test says they are rebuilt from."""

    start = 7

    def __init__(self, state):
        self.state, self.lost = state, []

    def record_start(self, actor):
        return self.state

    def forget(self, actor):
        self.lost.append(actor)


def test_a_successor_is_given_what_it_is_rebuilt_from_and_the_tokens_of_the_dead_one(start):
    """Its versions too, and those of slots that it had filled, but that the caller had not got."""
    states = States("a state")
    with start(show_state, 1, states=states, versions=[4, 5]) as workers:
        [first] = workers.take(lambda: False)
        pid, *payload = first.payload
        assert payload == [4, (7, 0, 0), "a state"]
        workers.release([first], 6)
        while len(workers._ledger.ready[0]) < 2:  # both have been filled, and are lost with the worker
            workers.supervisor.watch(lambda: False)
        states.state = "a later state"
        os.kill(pid, signal.SIGKILL)
        while pids(workers) == [pid]:
            workers.supervisor.watch(lambda: False)
        found = [workers.take(lambda: False)[0] for _ in range(2)]
    assert [(filled.slot, *filled.payload[1:]) for filled in found] == [
        (1, 5, (7, 0, 0), "a later state"),
        (0, 6, (7, 0, 0), "a later state"),
    ]


def test_without_a_state_a_successor_has_other_seeds(start):
    with start(show_state, 1, states=States(None), slots_per_worker=1) as workers:
        [first] = workers.take(lambda: False)
        os.kill(first.payload[0], signal.SIGKILL)
        workers.release([first], 0)
        [second] = workers.take(lambda: False)
    assert (first.payload[2], second.payload[2]) == ((7, 0, 0), (7, 0, 1))


def test_a_worker_that_cannot_be_rebuilt_says_so_before_anything_else(start, events):
    states = States("lost")
    with start(show_state, 1, states=states, role="actor", first_actor=3) as workers:
        [first] = workers.take(lambda: False)
    text = f"actor 3 (pid {first.payload[0]}) cannot be rebuilt: a coin was missing"
    assert events == [WorkerEvent(3, text, replaced=False)]
    assert states.lost == [3]
