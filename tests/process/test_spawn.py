"""Child processes: those that lead a group, a terminal and a watchdog; those that a supervisor restarts and stops."""

import errno
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from functools import partial
from multiprocessing import Pipe

import psutil
import pytest

from a3c_mp.errors import WorkerError
from a3c_mp.processes import watchdog
from a3c_mp.processes.pool import WorkerOptions
from a3c_mp.processes.spawn import start_child
from a3c_mp.processes.supervised import run_supervised
from a3c_mp.processes.supervisor import Child, Supervisor
from a3c_mp.processes.workers import Workers


def write_to_the_terminal():
    with open("/dev/tty", "w") as terminal:
        terminal.write("written")


def test_a_child_may_write_to_a_terminal_that_stops_background_groups():
    """`stty tostop`: the terminal's foreground group is the parent's, not the child's."""
    pid, terminal = pty.fork()
    if pid == 0:  # a session of its own, with this terminal
        mode = termios.tcgetattr(0)
        mode[3] |= termios.TOSTOP
        termios.tcsetattr(0, termios.TCSANOW, mode)
        child = start_child(write_to_the_terminal, (), name="writer", daemon=True, group=True)
        child.join(20)
        code = child.exitcode
        child.kill()
        child.join()
        os._exit(9 if code is None else code)
    text = b""
    try:
        while chunk := os.read(terminal, 1024):
            text += chunk
    except OSError:  # the other end is closed
        pass
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, text
    assert b"written" in text


def send_own_name(pipe):
    pipe.send(psutil.Process().name())


def test_programs_that_list_processes_show_the_name_of_a_child():
    ours, its_end = Pipe()
    child = start_child(send_own_name, (its_end,), name="evaluator of games", daemon=True)
    assert ours.recv() == "evaluator of ga"  # Linux keeps 15 characters
    child.join()


def test_the_watchdog_clears_registered_groups_and_folders_at_the_end_of_its_parent_and_no_others(tmp_path):
    kept, killed = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    command = [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid())]
    dog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    folders = [tmp_path / name for name in ("kept", "removed")]
    for folder in folders:
        folder.mkdir()
        (folder / "socket").touch()
    text = f"+{kept.pid}\n+{killed.pid}\n-{kept.pid}\n"
    text = f"{text}+{folders[0]}\n+{folders[1]}\n-{folders[0]}\n".encode()
    for part in (text[:3], text[3:]):  # lines may arrive in parts
        dog.stdin.write(part)
        dog.stdin.flush()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        deadline = time.monotonic() + 10
        while not ignores(dog.pid, signum) and time.monotonic() < deadline:
            time.sleep(0.01)
        dog.send_signal(signum)
    assert killed.poll() is None
    dog.stdin.close()
    assert dog.wait(10) == 0
    assert killed.wait(10) == -signal.SIGKILL
    assert kept.poll() is None
    assert [folder.exists() for folder in folders] == [True, False]
    kept.kill()
    kept.wait()


def ignores(pid, signum, field="SigIgn"):
    with open(f"/proc/{pid}/status") as status:
        mask = next(line for line in status if line.startswith(field)).split()[1]
    return int(mask, 16) & 1 << (signum - 1)


def fill(channel):
    for slot, _ in channel.tokens():
        channel.send(slot, None)


def test_no_worker_hears_ctrl_c():
    """Whatever is signalled to the terminal's process group, from the first instruction of a worker on."""
    with Workers(fill, 2, (), options=WorkerOptions(in_order=True)) as workers:
        assert all(ignores(pid, signal.SIGINT, "SigBlk") for pid in workers.pids), "blocked"
        assert len(workers.take(lambda: False)) == 2  # from then on they are past their own first instructions
        assert all(ignores(pid, signal.SIGINT) for pid in workers.pids)


def test_a_process_that_the_machine_refuses_is_one_line_and_ends_those_already_started(monkeypatch):
    spawn, pids = multiprocessing.util.spawnv_passfds, []

    def refuse_the_second(*args):
        if pids:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        pids.append(spawn(*args))
        return pids[-1]

    multiprocessing.resource_tracker.ensure_running()
    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refuse_the_second)
    with pytest.raises(WorkerError) as refused, Workers(fill, 2, ()):
        pass
    assert str(refused.value).startswith("worker 1 cannot be started: Resource temporarily unavailable; lower")
    assert "--num-actors" in str(refused.value)
    assert "ulimit -u" in str(refused.value)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])


def work(pipe, fail):
    """Send a message, then raise an exception or wait."""
    pipe.send(("works", os.getpid()))
    if fail:
        raise ArithmeticError("the lamp went out")
    time.sleep(600)


def supervised(pipe, closed, fail):
    run_supervised(partial(work, pipe, fail), pipe, close=lambda: closed.send(os.getpid()))


@pytest.mark.usefixtures("forked")
def test_roles_are_restarted_by_name_and_closed_at_the_end():
    """A collector and an evaluator: one is killed, the other raises an exception, each is replaced."""
    closed, closed_end = Pipe(duplex=False)
    works, restarts = [], []

    def launch(role):
        pipe, child_end = Pipe(duplex=False)
        fail = role == "evaluator" and not restarts
        with child_end:
            return start_child(supervised, (child_end, closed_end, fail), name=role, daemon=True), pipe

    def receive(number, message):
        works.append((number, message[1]))
        supervisor.children[number].record_result()

    roles = ["collector", "evaluator"]
    supervisor = Supervisor(
        [Child(role, partial(launch, role), "--num-nodes") for role in roles],
        max_restarts=2,
        on_message=receive,
        on_restart=lambda number, text: restarts.append(text),
    )
    supervisor.start()
    try:
        first = supervisor.pids
        while len(works) < 3:
            supervisor.watch(lambda: False)
        os.kill(first[0], signal.SIGKILL)
        while len(works) < 4:
            supervisor.watch(lambda: False)
        last = supervisor.pids
        os.kill(last[1], signal.SIGKILL)
        with pytest.raises(
            WorkerError, match=rf"evaluator \(pid {last[1]}\) was killed by SIGKILL; restart budget of 2"
        ):
            watch_for_ever(supervisor)
    finally:
        supervisor.stop()
    raised, killed = restarts
    assert raised.startswith(f"evaluator (pid {first[1]}) raised an exception; restart 1 of 2\nTraceback")
    assert raised.endswith("ArithmeticError: the lamp went out")
    assert killed == f"collector (pid {first[0]}) was killed by SIGKILL; restart 2 of 2"
    assert works[3:] == [(0, last[0])]
    assert [closed.recv() for _ in range(2)] == [first[1], last[0]], "those that raise, and those that are stopped"
    assert not any(psutil.pid_exists(pid) for pid in last)


def watch_for_ever(supervisor):
    while True:
        supervisor.watch(lambda: False)
