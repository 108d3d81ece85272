"""What the bench of kills sees of a run, and that it finds what a run leaves."""

import sys

import psutil
import pytest

from bench import kills

LEAVES = """
import os, pathlib, subprocess, sys, tempfile
pathlib.Path(tempfile.gettempdir(), "a3c-left").mkdir()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path("/dev/shm", sys.argv[1]).touch()
"""


@pytest.fixture
def place(monkeypatch):
    monkeypatch.setattr(kills, "LEFT_SECONDS", 0)
    with kills.Place() as place:
        yield place


def test_what_a_run_leaves_is_found_and_ended(place):
    name = f"test-{place.folder.name}"
    assert place.start("-c", LEAVES, name).wait(30) == 0
    try:
        process, *paths = (found for found in place.left() if place.folder.name in found or "sleep" in found)
        assert "time.sleep(60)" in process
        assert paths == [str(place.folder / "a3c-left"), f"/dev/shm/{name}"]
        assert len(left := place.processes()) == 1
        place.__exit__()
        assert not psutil.wait_procs(left, timeout=30)[1]
    finally:
        (kills.Path("/dev/shm") / name).unlink(missing_ok=True)


def test_a_table_counts_what_ended_as_it_should(place):
    place.start("-c", "print('ready', flush=True); import time; time.sleep(60)", "train_ray.py")
    place.wait_for("ready")
    me = psutil.Process()
    child = psutil.Process(place.started[0].pid)
    assert kills.child([me, child]) == [child]
    assert sys.executable in kills.command_of(child)
    runs = [
        {"row": "shard", "kills": [["a"], ["b"]], "seconds": seconds, "problems": found}
        for seconds, found in ((3, []), (9, ["exit code 1"]))
    ]
    assert kills.table({"runs": runs}).splitlines()[-1].replace(" ", "") == "|shard|4|2|1|9|"
