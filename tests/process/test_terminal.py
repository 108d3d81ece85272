"""The console of a whole trainer: output that nobody reads, a terminal that closes, streams that are missing."""

import fcntl
import json
import os
import pty
import signal
import termios
import time

from envs import CHATTER, STEPS
from harness import A3C_DATA, actors_of

from a3c_mp.run.checkpoint import list_checkpoints

END_SECONDS = 10


def full_pipe():
    """Both ends of a pipe that takes nothing more until somebody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(writer, True)
            return reader, writer


def under_way(scripts, trainer, timeout=60):
    scripts.wait_for("r", "episodes.csv:,1,", trainer, timeout)


def ended(scripts, trainer, signum):
    """See that a trainer ends soon with checkpoint and summary, as after any signal."""
    folder, asked = scripts.runs_dir / "runs/r", time.monotonic()
    assert trainer.wait(60) == 128 + signum
    assert time.monotonic() - asked < END_SECONDS
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == signum.name
    assert summary["steps"] > 0
    assert list_checkpoints(folder / "checkpoints")


def test_a_run_whose_output_is_not_read_trains_and_heeds_signals(scripts):
    reader, writer = full_pipe()
    trainer = scripts.train(A3C_DATA, stdout=writer)
    under_way(scripts, trainer)
    trainer.send_signal(signal.SIGTERM)
    ended(scripts, trainer, signal.SIGTERM)
    os.close(reader)
    os.close(writer)


def test_a_terminal_that_closes_costs_neither_checkpoint_nor_summary(scripts):
    terminal, stdio = pty.openpty()
    os.set_blocking(terminal, False)
    shown = bytearray()

    def own_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(stdio, termios.TIOCSCTTY, 0)

    def read_until_under_way():
        with_data = True
        while with_data:
            try:
                shown.extend(os.read(terminal, 4096))
            except BlockingIOError:
                with_data = False
        episodes = scripts.runs_dir / "runs/r/episodes.csv"
        return episodes.exists() and ",1," in episodes.read_text()

    trainer = scripts.train(
        A3C_DATA, stdout=stdio, stderr=stdio, stdin=stdio, start_new_session=True, preexec_fn=own_terminal
    )
    os.close(stdio)
    scripts.wait_until(read_until_under_way, trainer)
    assert b"sps" in shown, "there is a bar"
    os.close(terminal)
    ended(scripts, trainer, signal.SIGHUP)


def test_what_an_environment_leaves_in_the_trainer_does_not_keep_it_alive_or_deaf(scripts):
    trainer = scripts.train(A3C_DATA, "--env-id", "envs:Thread-v0")
    under_way(scripts, trainer)
    trainer.send_signal(signal.SIGTERM)
    ended(scripts, trainer, signal.SIGTERM)


def test_a_run_without_stdout_and_stderr_keeps_other_files_out_of_their_places(scripts):
    trainer = scripts.train(A3C_DATA, prefix=["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"])
    under_way(scripts, trainer)
    for pid in (trainer.pid, *(actor.pid for actor in actors_of(trainer.pid))):
        opened = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)]
        assert all(name == os.devnull or name.startswith("pipe:") for name in opened), opened
    trainer.send_signal(signal.SIGTERM)
    ended(scripts, trainer, signal.SIGTERM)


def test_what_the_output_cannot_encode_is_escaped(scripts, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    name = "läuft"
    done = scripts.run(A3C_DATA, "--env-id", "envs:Surrogate-v0", "--max-restarts", "0", name=name)
    assert done.code == 1
    escaped = "a broken name: " + "\udcff".encode(errors="backslashreplace").decode()
    for text in (done.out, (done.folder / "run.log").read_text()):
        assert f"ArithmeticError: {escaped}" in text, done.err
    assert f"in runs/{name}".encode("ascii", "backslashreplace").decode() in done.out
    assert "UnicodeEncodeError" not in done.out + done.err


def test_an_environment_that_prints_is_not_held_up_and_its_crash_is_shown(scripts):
    steps = 6 * STEPS
    flags = ["--env-id", "envs:Chatty-v0", "--total-steps", str(steps), "--max-restarts", "100"]
    done = scripts.run(A3C_DATA, *flags)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert 0 < len(lines) < steps * CHATTER / 10
    assert any("printed lines dropped" in line for line in lines)
    assert done.out.count("the emulator crashed") >= done.summary["worker_restarts"] > 0
    assert "Fatal Python error: Aborted" in done.out
