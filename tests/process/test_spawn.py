"""Child processes: their group, their signals, and what is cleared away once their parent is gone."""

import errno
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pty
import signal
import subprocess
import termios
import time
from multiprocessing import Pipe

import psutil
import pytest
import torch

from a3c_mp.errors import WorkerError
from a3c_mp.processes.spawn import start_child
from a3c_mp.processes.supervisor import Child, Supervisor, await_end
from a3c_mp.processes.watchdog import Watchdog


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


def ignores(pid, signum, field="SigIgn"):
    with open(f"/proc/{pid}/status") as status:
        mask = next(line for line in status if line.startswith(field)).split()[1]
    return int(mask, 16) & 1 << (signum - 1)


def test_the_watchdog_clears_registered_groups_and_folders_at_the_end_of_its_parent_and_no_others(tmp_path):
    """Whatever is signalled to it; if it is killed, the next one does it."""
    kept, killed = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    folders = [tmp_path / name for name in ("kept", "removed")]
    for folder in folders:
        folder.mkdir()
        (folder / "socket").touch()
    watchdog = Watchdog()
    watchdog.ensure_running()
    for charge in (kept.pid, killed.pid, *folders):
        watchdog.add(charge)
    watchdog._process.kill()
    watchdog._process.wait()
    watchdog.discard(kept.pid)
    watchdog.ensure_running()
    watchdog.discard(folders[0])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        deadline = time.monotonic() + 10
        while not ignores(watchdog._process.pid, signum) and time.monotonic() < deadline:
            time.sleep(0.01)
        watchdog._process.send_signal(signum)
    assert killed.poll() is None
    watchdog._process.stdin.close()
    assert watchdog._process.wait(10) == 0
    assert killed.wait(10) == -signal.SIGKILL
    assert kept.poll() is None
    assert [folder.exists() for folder in folders] == [True, False]
    kept.kill()
    kept.wait()


def wait(pipe):
    pipe.send(os.getpid())
    time.sleep(600)


def launch():
    """Start a process with a pipe, as `Child` does."""
    pipe, child_end = Pipe(duplex=False)
    with child_end:
        return start_child(wait, (child_end,), name="collector of games", daemon=True, group=True), pipe


def test_no_worker_hears_ctrl_c():
    """Whatever is signalled to the terminal's process group, from the first instruction of a worker on."""
    process, pipe = launch()
    assert ignores(process.pid, signal.SIGINT, "SigBlk"), "blocked"
    pipe.recv()
    assert ignores(process.pid, signal.SIGINT)
    assert psutil.Process(process.pid).name() == "collector of ga", "programs that list processes show 15 characters"
    await_end([process], 0)


def test_a_process_that_the_machine_refuses_is_one_line_and_ends_those_already_started(monkeypatch):
    spawn, pids = multiprocessing.util.spawnv_passfds, []

    def refuse_the_second(*args):
        if pids:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        pids.append(spawn(*args))
        return pids[-1]

    multiprocessing.resource_tracker.ensure_running()
    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refuse_the_second)
    children = [Child(f"actor {i}", launch, "--num-actors") for i in range(2)]
    beats, options = torch.zeros(2), {"max_restarts": 5, "hang_seconds": 60, "on_message": None, "on_restart": None}
    with pytest.raises(WorkerError) as refused:
        Supervisor(children, beats, **options).start()
    assert str(refused.value).startswith("actor 1 cannot be started: Resource temporarily unavailable; lower --num-act")
    assert "ulimit -u" in str(refused.value)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])
