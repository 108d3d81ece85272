"""Child processes: their group, their signals, and what is cleared away once their parent is gone."""

import errno
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe, Process, resource_tracker

import psutil
import pytest
import torch
from harness import ROOT

from a3c_mp.errors import WorkerError
from a3c_mp.processes.spawn import start_child
from a3c_mp.processes.supervisor import Child, Supervisor, await_end
from a3c_mp.processes.watchdog import WARNINGS, Watchdog


def ignores(pid, signum, field="SigIgn"):
    with open(f"/proc/{pid}/status") as status:
        mask = next(line for line in status if line.startswith(field)).split()[1]
    return int(mask, 16) & 1 << (signum - 1)


def test_the_watchdog_clears_registered_groups_and_files_at_the_end_of_its_parent_and_no_others(tmp_path):
    """Whatever is signalled to it; if it is killed, the next one does it."""
    kept, killed = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    folders, file = [tmp_path / name for name in ("kept", "removed")], tmp_path / "torch_7_1"
    file.touch()
    for folder in folders:
        folder.mkdir()
        (folder / "socket").touch()
    watchdog = Watchdog()
    watchdog.ensure_running()
    for charge in (kept.pid, killed.pid, *folders, tmp_path / "torch_7_*"):
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
    assert [path.exists() for path in (*folders, file)] == [True, False, False]
    kept.kill()
    kept.wait()


def wait(pipe):
    helper = Process(target=time.sleep, args=(600,))  # as an environment may start one
    helper.start()
    pipe.send(helper.pid)
    time.sleep(600)


def count(pipe, data):
    pipe.send(("length", len(data)))
    time.sleep(600)


def launch():
    """Start a process with a pipe, as `Child` does."""
    pipe, child_end = Pipe(duplex=False)
    with child_end:
        return start_child(wait, (child_end,), name="collector of games", daemon=True, group=True), pipe


def test_no_worker_hears_ctrl_c_or_the_warning_of_a_scheduler():
    """Whatever is signalled to the terminal's process group, from the first instruction of a worker on."""
    process, pipe = launch()
    for signum in (signal.SIGINT, *WARNINGS):
        assert ignores(process.pid, signum, "SigBlk"), "blocked"
    helper = psutil.Process(pipe.recv())
    for signum in (signal.SIGINT, *WARNINGS):
        assert ignores(process.pid, signum)
    assert not ignores(process.pid, signal.SIGUSR1, "SigBlk"), "an environment may have a handler of its own"
    assert psutil.Process(process.pid).name() == "collector of ga", "programs that list processes show 15 characters"
    await_end([process], 0)
    assert psutil.wait_procs([helper], 10)[1] == [], "it ends with the worker's process group"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_before_it_has_read_its_arguments_is_replaced(tmp_path, monkeypatch, signum):
    """As one that the kernel kills for memory while it imports torch, or that is stopped: its parent does not wait."""
    resource_tracker.ensure_running()  # by the real interpreter
    (tmp_path / "python").write_text(f'#!/bin/sh\nkill -{signum.name[3:]} $$\nexec {sys.executable} "$@"')
    (tmp_path / "python").chmod(0o755)
    executables = [str(tmp_path / "python"), sys.executable]

    def launch():
        monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(executables.pop(0)))
        pipe, child_end = Pipe(duplex=False)
        with child_end:
            args = (child_end, bytes(2**20))
            return start_child(count, args, name="actor", daemon=True, group=True), pipe

    child, lengths, reports = Child("actor 0", launch, "--num-actors"), [], []
    supervisor = Supervisor(
        [child], torch.zeros(1, dtype=torch.int64), max_restarts=1, hang_seconds=60,
        on_message=lambda number, message: lengths.append(message[1]),
        on_restart=lambda number, text: reports.append(text),
    )  # fmt: skip
    supervisor.start()
    if signum == signal.SIGSTOP:
        child.process.kill()
    while not lengths:
        supervisor.watch(lambda: False)
    assert lengths == [2**20]
    assert "was killed by SIGKILL; restart 1 of 1" in reports[0]
    supervisor.stop()


def test_a_process_that_the_machine_refuses_is_one_line_and_ends_those_already_started():
    def refuse():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    children = [Child("actor 0", launch, "--num-actors"), Child("actor 1", refuse, "--num-actors")]
    options = {"max_restarts": 5, "hang_seconds": 60, "on_message": None, "on_restart": None}
    with pytest.raises(WorkerError) as refused:
        Supervisor(children, torch.zeros(2, dtype=torch.int64), **options).start()
    assert str(refused.value).startswith("actor 1 cannot be started: Resource temporarily unavailable; lower --num-act")
    assert "ulimit -u" in str(refused.value)
    assert not psutil.pid_exists(children[0].process.pid)


SCRIPT = """import sys, threading
import train_a3c_data
sys.argv[1:] = {flags}
{call}
print("after it")
"""
SHORT = [
    "--env-id",
    "CartPole-v1",
    "--total-steps",
    "2000",
    "--num-envs",
    "4",
    "--unroll-length",
    "16",
    "--run-name",
    "r",
]
IN_A_THREAD = """if __name__ == "__main__":
    thread = threading.Thread(target=train_a3c_data.main)
    thread.start()
    thread.join()"""


@pytest.mark.parametrize(
    ("words", "call"),
    [
        pytest.param(
            ["-m", "cProfile", "-o", "profile", str(ROOT / "train_task.py"), *SHORT], None, marks=pytest.mark.slow
        ),
        (["script.py"], "train_a3c_data.main()"),  # without a guard
        pytest.param(["script.py"], IN_A_THREAD, marks=pytest.mark.slow),
        pytest.param(["-m", "pdb", str(ROOT / "train_a3c_data.py"), *SHORT], None, marks=pytest.mark.slow),
    ],
    ids=["profiler", "without a guard", "in a thread", "debugger"],
)
def test_other_ways_to_start_a_chapter(tmp_path, words, call):
    (tmp_path / "script.py").write_text(SCRIPT.format(flags=SHORT, call=call))
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, input="c\nq\n", capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "--total-steps reached after" in done.stderr + done.stdout, done.stderr
    assert done.stdout.count("after it") == (call is not None), "children do not run the script"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["r"]


NESTED = """from pathlib import Path
from a3c_mp.processes.spawn import start_child

def grandchild():
    Path("started").touch()

def child():
    start_child(grandchild, (), name="grandchild", daemon=False).join()

if __name__ == "__main__":
    start_child(child, (), name="child", daemon=False).join()
"""


def test_a_child_starts_a_child_with_a_function_of_the_script(tmp_path):
    """As a second learner starts actors of the chapter that is the script."""
    (tmp_path / "script.py").write_text(NESTED)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, timeout=100)
    assert (tmp_path / "started").exists()
