"""Processes that are killed at random moments while they save as fast as they can: what was saved can be read."""

import os
import random
import signal
import time

import pytest
import torch
import torch.multiprocessing as mp
from harness import CHAPTERS, EVERY_CHAPTER

from a3c_mp.run import checkpoint
from a3c_mp.run.checkpoint import list_checkpoints

ORIGIN = {"algorithm": "a3c_data", "env_id": "CartPole-v1"}
KILLS = 50


def save_without_end(folder, steps, done):
    """Save states of megabytes, the next one of `steps + 1`, and tell of each that is on disk."""
    while True:
        steps += 1
        state = {"net": {"weight": torch.full((300_000,), float(steps))}, "steps": steps}
        if steps % 3 == 0:
            checkpoint.save(folder, state, "best", **ORIGIN)
        checkpoint.save(folder, state, **ORIGIN)
        done.send(steps)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kills", [8, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_a_save_killed_at_any_moment_costs_that_one_save(tmp_path, kills):
    context = mp.get_context("forkserver")  # no time for fifty imports of torch
    rng, folder, steps, in_the_middle = random.Random(0), tmp_path / "checkpoints", 0, 0
    for _ in range(kills):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=save_without_end, args=(folder, steps, sender), daemon=True)
        process.start()
        sender.close()
        promised = receiver.recv()  # it is at work
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        while receiver.poll():
            try:
                promised = receiver.recv()
            except EOFError:
                break
        in_the_middle += any(folder.glob("*.tmp"))
        skipped = []
        path = checkpoint.load_newest(folder, lambda state, path: None, skipped.append, **ORIGIN)
        steps = (state := checkpoint.load(path, **ORIGIN))["steps"]
        assert promised <= steps <= promised + 1
        assert not skipped
        assert (state["net"]["weight"] == steps).all()
        for best in list_checkpoints(folder, "best")[:1]:
            assert 0 < checkpoint.load(best, **ORIGIN)["steps"] <= steps + 1, "it is written before the checkpoint"
    assert in_the_middle > kills / 10, "many were killed while they wrote"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@EVERY_CHAPTER
def test_a_trainer_killed_at_any_moment_goes_on_from_its_newest_checkpoint(scripts, chapter):
    rng, folder = random.Random(chapter.algorithm), scripts.runs_dir / "runs/r/checkpoints"
    command = [*chapter.flags, "--run-name", "r", "--checkpoint-seconds", "0.1", "--total-steps", "1e8"]
    for _ in range(int(os.environ.get("KILLS", KILLS // len(CHAPTERS) + 1))):
        trainer = scripts.start(chapter.script, *command)
        before = list_checkpoints(folder)
        scripts.wait_until(lambda: list_checkpoints(folder)[:1] != before[:1], trainer)  # noqa: B023
        time.sleep(rng.uniform(0, 1))
        trainer.kill()
        trainer.communicate()
        newest, killed = list_checkpoints(folder)[0], time.time()
        assert killed - newest.with_suffix(".json").stat().st_mtime < 60, "it saved up to its end"
        log = (folder.parent / "run.log").read_text()
        if before:
            assert f"resumed from {before[0].relative_to(scripts.runs_dir)} at " in log
        assert "skipped" not in log
        command = ["--resume", "runs/r"]
