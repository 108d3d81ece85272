"""The console of a whole trainer: output that nobody reads, a terminal that closes, streams that are missing."""

import fcntl
import json
import os
import pty
import signal
import termios
import time

from envs import CHATTER, STEPS
from harness import A3C_DATA, BUSY_SECONDS, TASK, actors_of

from a3c_mp.run.checkpoint import list_checkpoints


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


def ended(scripts, trainer, signum):
    """See that a trainer ends soon with checkpoint and summary, as after any signal."""
    folder, asked = scripts.runs_dir / "runs/r", time.monotonic()
    assert trainer.wait(60) == 128 + signum
    assert time.monotonic() - asked < BUSY_SECONDS
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == signum.name
    assert summary["steps"] > 0
    assert list_checkpoints(folder / "checkpoints")


def test_a_run_whose_output_is_not_read_trains_and_heeds_signals(scripts):
    reader, writer = full_pipe()
    trainer = scripts.train(TASK, "--standalone", stdout=writer)
    scripts.wait_for_game(trainer)
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
        return episodes.exists() and episodes.read_text().count("\n") > 1

    streams = {"stdout": stdio, "stderr": stdio, "stdin": stdio}
    trainer = scripts.train(TASK, "--standalone", **streams, start_new_session=True, preexec_fn=own_terminal)
    os.close(stdio)
    scripts.wait_until(read_until_under_way, trainer)
    assert b"sps" in shown, "there is a bar"
    os.close(terminal)
    ended(scripts, trainer, signal.SIGHUP)


def test_neither_closed_streams_nor_what_an_environment_leaves_keeps_the_trainer_alive_or_deaf(scripts):
    """The environment leaves a thread and ignores SIGTERM; other files do not take the places of the streams."""
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    trainer = scripts.train(A3C_DATA, "--env-id", "envs:Thread-v0", "--num-actors", "1", prefix=closed)
    scripts.wait_for_game(trainer)
    for pid in (trainer.pid, *(actor.pid for actor in actors_of(trainer.pid))):
        opened = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)]
        assert all(name == os.devnull or name.startswith("pipe:") for name in opened), opened
    trainer.send_signal(signal.SIGTERM)
    ended(scripts, trainer, signal.SIGTERM)


def test_what_the_output_cannot_encode_is_escaped(scripts, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = scripts.run(
        A3C_DATA, "--env-id", "envs:Surrogate-v0", "--num-actors", "1", "--max-restarts", "0", name="läuft"
    )
    assert done.code == 1
    for text in (done.out, (done.folder / "run.log").read_text()):
        assert r"ArithmeticError: a broken name: \udcff" in text, done.err
    assert r"in runs/l\xe4uft" in done.out
    assert "UnicodeEncodeError" not in done.out + done.err


def test_an_environment_that_prints_is_not_held_up_and_its_crash_is_shown(run_inline):
    steps = 6 * STEPS
    flags = ["--env-id", "envs:Chatty-v0", "--total-steps", str(steps), "--max-restarts", "100"]
    done = run_inline.train(A3C_DATA, *flags, workers=None)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert 0 < len(lines) < steps * CHATTER / 10
    assert any("printed lines dropped" in line for line in lines)
    assert done.out.count("the emulator crashed") >= done.summary["worker_restarts"] > 0
    assert "Fatal Python error: Aborted" in done.out
    assert "PRINTED Fatal Python error: Aborted" in done.log
