"""Child processes that lead a group: what a terminal and a watchdog mean to them."""

import os
import pty
import signal
import subprocess
import sys
import termios
import time

from a3c_mp.processes import watchdog
from a3c_mp.processes.spawn import start_child


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


def test_the_watchdog_kills_registered_groups_at_the_end_of_its_parent_and_no_others():
    kept, killed = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    command = [sys.executable, "-I", "-S", watchdog.__file__, str(os.getpid())]
    dog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    text = f"+{kept.pid}\n+{killed.pid}\n-{kept.pid}\n".encode()
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
    kept.kill()
    kept.wait()


def ignores(pid, signum):
    with open(f"/proc/{pid}/status") as status:
        mask = next(line for line in status if line.startswith("SigIgn")).split()[1]
    return int(mask, 16) & 1 << (signum - 1)
