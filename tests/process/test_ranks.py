"""Ranks, started as a user would: they meet on the loopback interface, and end together."""

import signal
import sys
import time
from contextlib import nullcontext

import psutil
import pytest
from harness import still_alive

from a3c_mp.errors import ConfigError
from a3c_mp.population import ranks

ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2")
MULTI_GPU = (*ACCELERATE, "--multi_gpu", "--main_process_port", "0")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
RANKS = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}
ONE_PROCESS = {"ACCELERATE_MIXED_PRECISION": "no"}


@pytest.fixture
def launch(scripts, monkeypatch, tmp_path):
    """Starts two ranks by a launcher."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no settings of the user's
    return lambda launcher, mode: scripts.start("tests/rank_script.py", mode, prefix=(*launcher, "--no_python"))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, 1)),
        (ONE_PROCESS, (0, 1)),
        (RANKS, (1, 2)),
        (RANKS | {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "192.0.2.1"}, (0, 1)),
        (ONE_PROCESS | {"MASTER_ADDR": "127.0.0.1"}, "num_processes=2 or more: accelerate launch has started one"),
    ],
)
def test_the_rank_is_that_of_the_launcher_and_a_launch_that_cannot_work_is_refused(env, expected):
    with nullcontext() if isinstance(expected, tuple) else pytest.raises(ConfigError, match=expected):
        assert ranks.read_ranks(env) == expected


@pytest.mark.parametrize(
    ("address", "local", "expected"),
    [
        ("203.0.113.1", "2", "lo"),  # all on one machine, whatever torchrun calls it
        ("127.0.0.1", None, "lo"),  # variables that were set by hand
        ("localhost", None, "lo"),
        ("127.0.1.1", "1", "ranks on other machines cannot reach it"),  # what Debian calls itself in /etc/hosts
        ("0.0.0.0", "1", "ranks on other machines cannot reach it"),
        ("", None, "ranks on other machines cannot reach it"),
        ("8.8.8.8", "1", "it is public, and what ranks exchange is neither encrypted nor authenticated|Network is unr"),
        (
            "nowhere.invalid",
            "1",
            "it cannot be reached over IPv4 .*; give the address of rank 0's machine in a private",
        ),
        ("rank0..invalid", "1", "it cannot be reached over IPv4 .*; give the address of rank 0's machine in a private"),
    ],
)
def test_ranks_meet_on_the_interface_towards_rank_0_in_a_private_network(address, local, expected):
    env = RANKS | {"MASTER_ADDR": address} | ({} if local is None else {"LOCAL_WORLD_SIZE": local})
    with nullcontext() if expected == "lo" else pytest.raises(ConfigError, match=expected):
        assert ranks.find_interface(env) == expected


@pytest.mark.parametrize(
    "ended_by", [None, *(pytest.param(signum, marks=pytest.mark.slow) for signum in (signal.SIGTERM, signal.SIGINT))]
)
def test_a_rank_whose_others_never_come_says_so_and_ends(scripts, monkeypatch, ended_by):
    for name, value in (RANKS | {"RANK": "0", "MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    process = scripts.start("train_population.py", "--hang-seconds", "3" if ended_by is None else "60")
    assert process.stderr.readline() == "rank 0 waits for the other 1 (WORLD_SIZE=2) at 127.0.0.1:0\n"
    if ended_by is not None:
        process.send_signal(ended_by)
    _, err = process.communicate(timeout=10)
    assert process.returncode == (2 if ended_by is None else 128 + ended_by)
    assert ("error: WORLD_SIZE=2: rank 0 has waited 3 s for the other 1" in err) == (ended_by is None)
    assert "Traceback" not in err


def pids_of(process):
    """Processes of the ranks, once they have met."""
    first, second = process.stdout.readline().removeprefix("rank 0:").split()
    return [psutil.Process(int(first)), psutil.Process(int(second))]


@pytest.mark.parametrize("launcher", [MULTI_GPU, pytest.param(TORCHRUN, marks=pytest.mark.slow)])
def test_two_ranks_meet_on_loopback_and_one_of_them_prints(launch, launcher):
    process = launch(launcher, "meet")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    first, second = out.splitlines()
    assert len(set(first.removeprefix("rank 0:").split())) == 2
    assert second == "listening: 127.0.0.1"


@pytest.mark.slow  # without a launcher, see above
def test_the_launch_that_starts_one_process_for_two_is_refused(launch):
    out, err = launch((*ACCELERATE, "--cpu"), "meet").communicate(timeout=60)
    assert out == ""
    assert "error: num_processes=2 or more: accelerate launch has started one process only" in err
    assert "non-zero exit status 2" in err


def test_ranks_with_different_settings_are_refused_in_one_line(launch):
    out, err = launch(MULTI_GPU, "differ").communicate(timeout=60)
    assert out == ""
    assert err.count("error: ") == 1
    assert "error: RANK=1: differs from rank 0: seed 1 instead of 0; start all ranks with the same flags" in err
    assert "exitcode  : 2" in err


@pytest.mark.slow  # of a rank that is killed in a population, see test_generations
@pytest.mark.parametrize("lost", ["rank", "launcher"])
def test_everything_ends_within_ten_seconds_of_a_kill(launch, lost):
    process = launch(MULTI_GPU, "run" if lost == "launcher" else "run, ignore SIGTERM")
    pids = pids_of(process)
    since = time.monotonic()
    (pids[1] if lost == "rank" else process).kill()
    _, err = process.communicate(timeout=60)
    psutil.wait_procs(pids, timeout=10)
    assert not still_alive(pids)
    assert time.monotonic() - since < 10
    assert lost == "launcher" or "PeerLost: another process of the group has died" in err


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nobody_waits_for_a_rank_that_raises(launch, rank):
    process = launch(MULTI_GPU, f"rank {rank} raises")
    pids = pids_of(process)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"ArithmeticError: rank {rank} cannot go on" in err
    assert ("PeerLost" in err) == (rank == 1), "rank 1 does not report the loss of rank 0, which has said why"
    assert not still_alive(pids)
