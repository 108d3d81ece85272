"""Workers that die, hang or raise: named, replaced, and never in the way of the others."""

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

SPEC = {"count": ((1,), torch.int64)}


def count(channel, slots):
    """Fill slots with 0, 1, 2, ..."""
    for number, (slot, _) in enumerate(channel.tokens()):
        slots[slot]["count"].fill_(number)
        channel.beat()
        channel.send(slot, os.getpid())


def show_state(channel, slots):
    """Fill slots with 0, 1, 2, ..., each with the version of its token and what the worker was rebuilt from."""
    if channel.restored == "lost":
        channel.not_restored("a coin was missing")
    for number, (slot, version) in enumerate(channel.tokens()):
        slots[slot]["count"].fill_(number)
        channel.send(slot, (os.getpid(), version, channel.seed_key, channel.restored))


def fail_at_start(channel, slots):
    raise ArithmeticError("cannot begin")


def fail_in_the_third(channel, slots):
    for _ in range(2):
        slot, _ = channel.take()
        channel.send(slot, os.getpid())
    raise ArithmeticError("cannot go on")


def fail_in_the_third_and_then_at_start(channel, slots, has_failed):
    if has_failed.exists():
        fail_at_start(channel, slots)
    has_failed.touch()
    fail_in_the_third(channel, slots)


def freeze_in_the_third(channel, slots):
    for _ in range(2):
        slot, _ = channel.take()
        channel.send(slot, os.getpid())
    if channel.seed_key[-1] == 0:  # restarts
        os.kill(os.getpid(), signal.SIGSTOP)
    count(channel, slots)


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
    return Slots(SPEC, 4)


def test_slots_come_back_in_each_workers_own_order(slots):
    with Workers(count, 2, (slots,)) as workers:
        found = fill(workers, slots, 60)
    for worker in range(2):
        counts = [number for w, _, number in found if w == worker]
        assert counts == list(range(len(counts)))


def test_in_order_takes_the_workers_in_turn(slots):
    with Workers(count, 2, (slots,), options=WorkerOptions(in_order=True)) as workers:
        found = []
        for filled in rounds(workers, lambda: len(found) >= 10):
            found.append([worker for worker, _, _ in filled])
            workers.release(filled, 0)
    assert found == [[0, 1]] * 10


def test_a_round_has_as_many_slots_as_asked_for(slots):
    with Workers(count, 2, (slots,)) as workers:
        found = []
        for filled in rounds(workers, lambda: len(found) >= 10, size=3):
            found.append(len({slot for _, slot, _ in filled}))
            workers.release(filled, 0)
    assert found == [3] * 10


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGSEGV))]
)
def test_a_killed_worker_is_named_and_replaced_and_the_others_go_on(slots, signum):
    restart_messages = []
    with Workers(count, 2, (slots,), on_restart=restart_messages.append) as workers:
        fill(workers, slots, 10)
        victim, survivor = workers.pids
        os.kill(victim, signum)
        found = fill(workers, slots, 100)
        while not any(worker == 0 and pid != victim for worker, pid, _ in found[-100:]):
            found += fill(workers, slots, 100)
        assert workers.pids[1] == survivor
        assert workers.pids[0] != victim
    assert restart_messages == [WorkerEvent(0, f"worker 0 (pid {victim}) was killed by {signum.name}; restart 1 of 5")]
    new = [number for worker, pid, number in found if worker == 0 and pid != victim]
    assert new
    assert new == list(range(len(new))), "the new worker has its slots to itself"


def test_a_slot_held_by_the_learner_is_not_given_to_the_new_worker(slots):
    with Workers(count, 1, (slots,), on_restart=lambda message: None) as workers:
        [held] = next(iter(rounds(workers, lambda: False)))
        os.kill(workers.pids[0], signal.SIGKILL)
        seen = []
        for filled in rounds(workers, lambda: len(seen) >= 20):
            seen.append(filled[0].slot)
            workers.release(filled, 0)
        assert held.slot not in seen
        workers.release([held], 0)
        assert held.slot in take_slots(workers, 10)


def take_slots(workers, number):
    seen = []
    for filled in rounds(workers, lambda: len(seen) >= number):
        seen.append(filled[0].slot)
        workers.release(filled, 0)
    return seen


def test_a_spent_restart_budget_ends_the_run(slots):
    options = WorkerOptions(max_restarts=2)
    with Workers(fail_in_the_third, 1, (slots,), options=options, on_restart=lambda message: None) as workers:
        with pytest.raises(WorkerError, match="restart budget of 2 spent"):
            fill(workers, slots, 100)
        assert workers.restarts == 2


def test_a_successor_that_fails_at_start_uses_up_the_budget_and_says_so(slots, tmp_path):
    """The first worker did not fail at start, so the cause may pass."""
    restart_messages, options = [], WorkerOptions(max_restarts=2)
    with (
        Workers(
            fail_in_the_third_and_then_at_start,
            1,
            (slots, Path(tmp_path, "has failed")),
            options=options,
            on_restart=restart_messages.append,
        ) as workers,
        pytest.raises(WorkerError) as caught,
    ):
        fill(workers, slots, 100)
    first, second = (message.text for message in restart_messages)
    assert "raised an exception; restart 1 of 2\n" in first
    assert "raised an exception before its first result; restart 2 of 2\n" in second
    assert "raised an exception before its first result; restart budget of 2 spent\n" in str(caught.value)
    assert "ArithmeticError: cannot begin" in str(caught.value)


def test_an_exception_at_start_is_fatal_at_once_with_its_traceback(slots):
    with Workers(fail_at_start, 2, (slots,)) as workers:
        with pytest.raises(WorkerError, match="cannot begin") as caught:
            fill(workers, slots, 1)
        assert workers.restarts == 0
    assert "fail_at_start" in str(caught.value)


def test_a_frozen_worker_is_noticed_and_replaced(slots):
    restart_messages, options = [], WorkerOptions(hang_seconds=1.5)
    with Workers(freeze_in_the_third, 1, (slots,), options=options, on_restart=restart_messages.append) as workers:
        fill(workers, slots, 30)
    assert len(restart_messages) == 1
    assert "sent no heartbeat" in restart_messages[0].text


def test_restart_messages_name_the_actor_by_its_number_in_the_whole_run(slots):
    restart_messages, options = [], WorkerOptions(role="actor", first_actor=6)
    with Workers(count, 1, (slots,), options=options, on_restart=restart_messages.append) as workers:
        fill(workers, slots, 2)
        os.kill(workers.pids[0], signal.SIGKILL)
        fill(workers, slots, 4)
    assert restart_messages[0].actor == 6
    assert restart_messages[0].text.startswith("actor 6 (pid ")


def test_no_worker_is_replaced_once_the_run_is_to_stop(slots):
    restart_messages, stopping = [], []
    with Workers(count, 2, (slots,), on_restart=restart_messages.append) as workers:
        fill(workers, slots, 4)
        processes = [psutil.Process(pid) for pid in workers.pids]
        for process in processes:
            process.terminate()
        stopping.append(True)
        psutil.wait_procs(processes, timeout=20)
        assert not list(rounds(workers, lambda: bool(stopping)))
    assert not restart_messages


def test_leaving_the_block_leaves_nothing_behind(slots):
    before = set(Path("/dev/shm").iterdir())
    with Workers(count, 2, (slots,)) as workers:
        fill(workers, slots, 4)
        pids = workers.pids
        os.kill(pids[0], signal.SIGSTOP)  # not even a stopped one
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not left_in_shm(before)


class States:
    """Gives workers what a test says they are rebuilt from."""

    start = 7

    def __init__(self, state):
        self.state, self.lost = state, []

    def record_start(self, actor):
        return self.state

    def forget(self, actor):
        self.lost.append(actor)


def test_polling_does_not_wait_for_a_frozen_worker_and_replaces_a_dead_one(slots):
    restart_messages, options = [], WorkerOptions(slots_per_worker=1, name="evaluator")
    with Workers(count, 1, (slots,), options=options, on_restart=restart_messages.append) as workers:
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
    assert restart_messages[0].text == f"evaluator (pid {first.payload}) was killed by SIGKILL; restart 1 of 5"


def test_a_successor_is_given_what_it_is_rebuilt_from_and_the_tokens_of_the_dead_one():
    """Its versions too, and those of slots that it had filled, but that the caller had not got."""
    slots, states = Slots(SPEC, 2), States("a state")
    options = WorkerOptions(versions=[4, 5])
    with Workers(show_state, 1, (slots,), states=states, options=options, on_restart=lambda message: None) as workers:
        taken = rounds(workers, lambda: False)
        [first] = next(taken)
        pid, version, seed_key, restored = first.payload
        assert (version, seed_key, restored) == (4, (7, 0, 0), "a state")
        workers.release([first], 6)
        while len(workers._ledger.ready[0]) < 2:  # both have been filled, and are lost with the worker
            workers._supervisor.watch(lambda: False)
        states.state = "a later state"
        os.kill(pid, signal.SIGKILL)
        while workers.pids == [pid]:
            workers._supervisor.watch(lambda: False)
        found = [next(taken)[0] for _ in range(2)]
    assert [(filled.slot, *filled.payload[1:]) for filled in found] == [
        (1, 5, (7, 0, 0), "a later state"),
        (0, 6, (7, 0, 0), "a later state"),
    ]


def test_without_a_state_a_successor_has_other_seeds():
    slots, options = Slots(SPEC, 1), WorkerOptions(slots_per_worker=1)
    with Workers(
        show_state, 1, (slots,), states=States(None), options=options, on_restart=lambda message: None
    ) as workers:
        taken = rounds(workers, lambda: False)
        [first] = next(taken)
        os.kill(first.payload[0], signal.SIGKILL)
        workers.release([first], 0)
        [second] = next(taken)
    assert (first.payload[2], second.payload[2]) == ((7, 0, 0), (7, 0, 1))


def test_a_worker_that_cannot_be_rebuilt_says_so_before_anything_else(slots):
    restart_messages, states, options = [], States("lost"), WorkerOptions(role="actor", first_actor=3)
    with Workers(
        show_state, 1, (slots,), states=states, options=options, on_restart=restart_messages.append
    ) as workers:
        next(iter(rounds(workers, lambda: False)))
        pid = workers.pids[0]
    text = f"actor 3 (pid {pid}) cannot be rebuilt: a coin was missing"
    assert restart_messages == [WorkerEvent(3, text, replaced=False)]
    assert states.lost == [3]


def end_with_system_exit(channel, slots):
    sys.exit(0)


def end_with_exit_code_0(channel, slots):
    os._exit(0)


def end_by_a_nameless_signal(channel, slots):
    if channel.seed_key[-1] == 0:
        os.kill(os.getpid(), 40)
    count(channel, slots)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (end_with_system_exit, r"failed before its first result:\n(?s:.*)end_with_system_exit(?s:.*)SystemExit: 0"),
        (end_with_exit_code_0, "ended with exit code 0 before its first result"),
    ],
)
def test_an_end_before_the_first_result_is_an_error_whatever_the_exit_code(slots, target, reason):
    with Workers(target, 1, (slots,)) as workers, pytest.raises(WorkerError, match=reason):
        fill(workers, slots, 1)


def test_a_signal_without_a_name_is_reported_by_its_number(slots):
    restart_messages = []
    with Workers(end_by_a_nameless_signal, 1, (slots,), on_restart=restart_messages.append) as workers:
        fill(workers, slots, 2)
    assert len(restart_messages) == 1
    assert "was killed by signal 40; restart 1 of 5" in restart_messages[0].text
