"""Free memory as the kernel tells of it, and the limit of open files, which may be raised up to a point."""

import resource
from typing import NamedTuple

import pytest
import torch

from a3c_mp.algorithms.actor_critic_settings import PPOArgs as A3cArgs
from a3c_mp.algorithms.ray_settings import ImpalaArgs as RayArgs
from a3c_mp.algorithms.roles import RoleArgs as TaskArgs
from a3c_mp.errors import ConfigError
from a3c_mp.processes import free_memory
from a3c_mp.run import preflight as limits
from a3c_mp.run.preflight import check_limits, check_open_files

GIB = 2**30
NEEDED = limits.FILES + 20 * limits.FILES_PER_ACTOR
"""open files of a run with 20 actors"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 4 GiB available, in a container that may use 3 GiB and uses 2, one of them to cache files."""
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "CONTAINER", tmp_path)
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {4 * 2**20} kB\nHugePages: 0\n")
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nactive_file 5\ninactive_file {GIB}\n")
    return tmp_path


def test_what_caches_files_is_as_good_as_free(machine):
    assert free_memory.free_memory() == 2 * GIB


def test_a_container_without_a_limit_has_what_the_machine_has(machine):
    (machine / "memory.max").write_text("max\n")
    assert free_memory.free_memory() == 4 * GIB


def test_where_the_kernel_says_nothing_there_is_no_limit(machine):
    for path in machine.iterdir():
        path.unlink()
    assert free_memory.free_memory() == 2**63


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch):
    limit = [(1024, 4096)]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: limit[0])
    monkeypatch.setattr(limits.resource, "setrlimit", lambda what, pair: limit.__setitem__(0, pair))
    check_open_files(20)
    assert limit == [(4096, 4096)]


def test_where_it_may_not_be_raised_so_far_the_figure_needed_is_told(monkeypatch):
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: (100, NEEDED - 1))
    with pytest.raises(
        ConfigError, match=f"num-actors=20: that takes {NEEDED} open files, {NEEDED - 1} are allowed; lower it"
    ):
        check_open_files(20)


class Sizes(NamedTuple):
    """As much of a chapter's settings as limits depend on."""

    num_actors: int
    num_learners: int
    cuda: bool
    eval_every: int = 0
    actors_flag: str = "num-actors"

    local_actors = property(lambda self: self.num_actors)
    gpu_actors = property(lambda self: self.num_actors * self.cuda)


def check_with(monkeypatch, args, free, free_on_gpu=2**63):
    monkeypatch.setattr(limits, "free_memory", lambda: free)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_on_gpu, 2**63))
    check_limits(args, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("num_learners", [1, 2])
@pytest.mark.parametrize("eval_every", [0, 1000])
def test_every_process_besides_the_first_learner_takes_memory_and_with_cuda_a_context(
    cuda, num_learners, eval_every, monkeypatch
):
    """The evaluator has no context: it plays on the CPU."""
    args = Sizes(6, num_learners, cuda, eval_every)
    needed = (6 + num_learners - 1) * (limits.ACTOR_BYTES + (limits.CONTEXT_BYTES if cuda else 0))
    needed += limits.ACTOR_BYTES if eval_every else 0
    check_with(monkeypatch, args, needed)
    with pytest.raises(ConfigError, match=f"num-actors=6: that takes {needed // 2**20:,} MiB of memory at least"):
        check_with(monkeypatch, args, needed - 2**20)


@pytest.mark.parametrize("num_learners", [1, 2])
def test_with_cuda_the_actors_of_a_learner_have_contexts_on_its_gpu(num_learners, monkeypatch):
    args = Sizes(6, num_learners, cuda=True)
    needed = 6 // num_learners * limits.CONTEXT_GPU_BYTES
    check_with(monkeypatch, args, 2**63, needed)
    message = (
        f"num-actors=6: that takes {needed // 2**20:,} MiB of a GPU's memory at least, {needed // 2**20 - 1:,} MiB"
    )
    with pytest.raises(ConfigError, match=message):
        check_with(monkeypatch, args, 2**63, needed - 2**20)
    check_with(monkeypatch, args._replace(cuda=False), 2**63, 0)


def test_actors_that_act_on_cpus_need_no_gpu_memory():
    assert A3cArgs(num_actors=6, cuda=True).gpu_actors == 6
    assert A3cArgs(num_actors=6).gpu_actors == 0
    assert RayArgs(num_actors=6, cuda=True).gpu_actors == 0
    assert TaskArgs(num_actors=6, cuda=True, standalone=True).gpu_actors == 0
    assert TaskArgs(num_actors=6, cuda=True).gpu_actors == 6


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "ppc64le", "riscv64"])
def test_other_processors_are_refused_as_they_may_reorder_what_is_written_without_locks(machine, monkeypatch):
    check_with(monkeypatch, Sizes(1, 1, cuda=False), 2**63)
    monkeypatch.setattr(limits.platform, "machine", lambda: machine)
    with pytest.raises(ConfigError, match=f"machine={machine}: .* memory order of x86-64"):
        check_with(monkeypatch, Sizes(1, 1, cuda=False), 2**63)


def test_infinity_is_what_the_tests_take_it_for():
    assert resource.RLIM_INFINITY == -1
