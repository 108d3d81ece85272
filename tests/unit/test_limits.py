"""Free memory as the kernel tells of it, and the limit of open files, which may be raised up to a point."""

import resource

import pytest

from a3c_mp import limits
from a3c_mp.config import ConfigError
from a3c_mp.limits import check_open_files, free_memory, free_shared_memory

GIB = 2**30
NEEDED = limits.FILES + 20 * limits.FILES_PER_ACTOR
"""open files of a run with 20 actors"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 4 GiB available, in a container that may use 3 GiB and uses 2, one of them to cache files."""
    monkeypatch.setattr(limits, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "CONTAINER", tmp_path)
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {4 * 2**20} kB\nHugePages: 0\n")
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nactive_file 5\ninactive_file {GIB}\n")
    return tmp_path


def test_what_caches_files_is_as_good_as_free(machine):
    assert free_memory() == 2 * GIB


def test_a_container_without_a_limit_has_what_the_machine_has(machine):
    (machine / "memory.max").write_text("max\n")
    assert free_memory() == 4 * GIB


def test_where_the_kernel_says_nothing_there_is_no_limit(machine):
    for path in machine.iterdir():
        path.unlink()
    assert free_memory() == 2**63


def test_shared_memory_is_memory_and_has_a_limit_of_its_own(machine, monkeypatch):
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: type("Usage", (), {"free": GIB}))
    assert free_shared_memory() == GIB
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 9 * GIB}))
    assert free_shared_memory() == 2 * GIB


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [(1024, 4096, 1024), (100, 4096, NEEDED), (100, -1, NEEDED), (-1, -1, -1), (NEEDED, NEEDED, NEEDED)],
)
def test_the_limit_of_open_files_is_raised_as_far_as_needed(soft, hard, then, monkeypatch):
    limit = [(soft, hard)]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: limit[0])
    monkeypatch.setattr(limits.resource, "setrlimit", lambda what, pair: limit.__setitem__(0, pair))
    check_open_files(20)
    assert limit == [(then, hard)]


def test_where_it_may_not_be_raised_so_far_the_figure_needed_is_told(monkeypatch):
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (100, NEEDED - 1))
    with pytest.raises(
        ConfigError, match=f"num-actors=20: that takes {NEEDED} open files, {NEEDED - 1} are allowed; lower it"
    ):
        check_open_files(20)


def test_infinity_is_what_the_tests_take_it_for():
    assert resource.RLIM_INFINITY == -1
