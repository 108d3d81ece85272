"""What the soak sees of a run, and how it judges it."""

import os
import random
import subprocess
import sys
import time

import psutil
import pytest

from bench import outside
from bench.soak import Args, Limit, add_rates, drift, judge

MINUTES = [60.0 * i for i in range(46)]


def noisy(level, per_hour, noise, seed=0):
    rng = random.Random(seed)
    return [(t, level + per_hour * t / 3600 + rng.gauss(0, noise)) for t in MINUTES]


def test_the_slope_is_that_of_the_line():
    found = drift(noisy(500, 40, 0), Limit(0.05, 10))
    assert found.per_hour == pytest.approx(40)
    assert found.level == pytest.approx(500 + 40 * 22.5 / 60)
    assert found.error == pytest.approx(0, abs=1e-6)
    assert found.allowed == pytest.approx(0.05 * 515 + 10)
    assert not found.flat


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("per_hour", "flat"), [(0, True), (-200, True), (20, True), (60, False)])
def test_a_curve_may_not_grow_beyond_its_limit_and_a_rate_may_not_fall(sign, per_hour, flat):
    assert drift(noisy(500, sign * per_hour, 4), Limit(0.05, 10, sign)).flat == flat


def test_a_wave_is_no_drift():
    """Half a slow wave leans, but its samples resemble each other so much that there are hardly any."""
    wave = [100.0 + 10 * (i // 15 % 2) for i in range(46)]
    found = drift(list(zip(MINUTES, wave, strict=True)), Limit(0, 1))
    shuffled = random.Random(0).sample(wave, len(wave))
    white = drift(list(zip(MINUTES, shuffled, strict=True)), Limit(0, 1))
    assert found.error > 2 * white.error
    assert found.flat


STEADY = {"memory_mib": 700, "shm_mib": 60, "shm_files": 0, "spilled_files": 0, "queued_bytes": 40, "sps": 2000}
STEADY |= {"threads": 9, "fds": 40, "processes": 3}


def test_a_descriptor_for_each_kill_is_found():
    samples = [STEADY | {"seconds": t, "fds": 40 + i} for i, t in enumerate(MINUTES)]
    drifts = judge(samples, [], Args(warm_up=600))
    assert [name for name, d in drifts.items() if not d.flat] == ["fds"]
    assert drifts["fds"].per_hour == pytest.approx(60)


def test_samples_of_the_warm_up_and_of_restarts_do_not_count():
    samples = [STEADY | {"seconds": t} for t in MINUTES]
    samples[0]["memory_mib"] = 1
    samples[20] |= {"memory_mib": 1, "processes": 2}
    samples[30]["memory_mib"] = 1
    drifts = judge(samples, [MINUTES[30] - 1], Args(warm_up=60))
    assert drifts["memory_mib"].level == pytest.approx(700)
    assert judge(samples, [], Args(warm_up=44 * 60)) == {}, "too few to judge"


def test_rates_lie_between_samples():
    samples = [{"seconds": t} for t in (0.0, 10.0, 20.0, 30.0)]
    add_rates(samples, [(5.0, 0), (10.0, 500), (15.0, 1000), (25.0, 3000)])
    assert [s.get("sps") for s in samples] == [None, None, 150.0, None]  # 1,500 steps in 10 s
    add_rates(samples, [])


def test_processes_are_seen_from_outside_and_slowed():
    """A child holds a pipe with five unread bytes, ten descriptors and 50 MiB."""
    code = "import os, time; held = bytearray(os.urandom(50 << 20)); print('up', flush=True); time.sleep(60)"
    read_end, write_end = os.pipe()
    held = [os.dup(read_end) for _ in range(10)]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=[read_end, *held]) as child:
        child.stdout.readline()
        processes = [p for p in outside.processes_of(os.getpid()) if p.pid == child.pid]
        files = frozenset(os.listdir("/dev/shm"))
        before = outside.sample(processes, files)
        os.write(write_end, b"hello")
        after = outside.sample(processes, files)
        assert outside.actors_among(processes) == []
        process, deadline = psutil.Process(child.pid), time.monotonic() + 20
        with outside.slowed(child, 10, lambda: True):
            while process.status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline
        while process.status() == psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        child.kill()
    assert after["queued_bytes"] == before["queued_bytes"] + 5
    assert 50 < after["memory_mib"] < 100
    assert after["fds"] >= 11
    assert (after["threads"], after["processes"], after["shm_files"]) == (1, 1, 0)
    assert os.read(read_end, 9) == b"hello", "looking took nothing away"
    assert outside.processes_of(child.pid) == []
    for fd in (read_end, write_end, *held):
        os.close(fd)
