"""Free memory as the kernel reports it, and the limit of open files, which may be raised up to a point."""

import math
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from a3c_mp import wrappers
from a3c_mp.errors import ConfigError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.processes import slots
from a3c_mp.run import gpu
from a3c_mp.run import preflight as limits
from a3c_mp.run.preflight import check_limits, check_processes
from a3c_mp.wrappers import ImageAndVector
from train_a3c_data import Args as DataArgs
from train_a3c_grad import Args as GradArgs

GIB = 2**30
NEEDED = limits.FILES + 20 * limits.FILES_PER_ACTOR
"""open files of a run with 20 actors"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 4 GiB available, in a container that may use 3 GiB and uses 2, one of them to cache files."""
    monkeypatch.setattr(slots, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(slots, "CONTAINER", tmp_path)
    monkeypatch.setattr(slots, "CGROUP", tmp_path / "cgroup")
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {4 * 2**20} kB\nHugePages: 0\n")
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\nactive_file 5\ninactive_file {GIB}\n")
    return tmp_path


def test_memory_that_caches_files_is_as_good_as_free_and_a_container_may_have_no_limit(machine):
    assert slots.free_memory() == 2 * GIB
    (machine / "memory.max").write_text("max\n")
    assert slots.free_memory() == 4 * GIB
    for path in machine.iterdir():
        path.unlink()
    assert slots.free_memory() == 2**63, "where the kernel says nothing there is no limit"


def write_limit(folder, limit, used, version=2):
    """The files of a control group with a limit, GiB, in which a quarter of a GiB caches files."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{size if isinstance(size, str) else int(size * GIB)}\n")
    inactive = "inactive_file" if version == 2 else "inactive_file 0\ntotal_inactive_file"
    (folder / "memory.stat").write_text(f"{inactive} {GIB // 4}\n")


@pytest.mark.parametrize(
    ("groups", "limits", "free"),
    [
        ("0::/job\n", {"job": (1, 0.75)}, 0.5),
        ("0::/user/job/step\n", {"user/job": (2, 1), "user/job/step": ("max", 1)}, 1.25),
        ("0::/user/job/step\n", {"user": (1, 2), "user/job/step": (8, 0)}, 0),
        ("0::/../other\n", {"other": (1, 1)}, 2),
        ("0::/docker/unknown\n", {}, 2),
        ("4:cpu,cpuacct:/a\n3:memory:/slurm/job\n", {"memory/slurm": (1, 0.5), "memory/a": (0.25, 0)}, 0.75),
        ("3:hugetlb,memory:/x\n0::/y\n", {"memory": (1, 0.25), "memory/x": (9, 9)}, 0.25),
        ("nonsense\n", {"memory": (1, 0.25)}, 1),
    ],
)
def test_limits_of_nested_groups_and_of_version_1_count(groups, limits, free, machine, monkeypatch):
    monkeypatch.setattr(slots, "CGROUP", machine / "cgroup")
    (machine / "cgroup").write_text(groups)
    for name, (limit, used) in limits.items():
        write_limit(machine / name, limit, used, version=1 if name.startswith("memory") else 2)
    assert slots.free_memory() == free * GIB


@pytest.mark.parametrize(
    ("groups", "limits", "number"),
    [
        ("0::/job\n", {}, 8),
        ("0::/job\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000"}, 3),
        ("0::/user/job/step\n", {"user/job/cpu.max": "50000 100000", "user/job/step/cpu.max": "400000 100000"}, 1),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_a_quota_of_processor_time_counts_as_fewer_cores(groups, limits, number, machine, monkeypatch):
    monkeypatch.setattr(slots.os, "sched_getaffinity", lambda pid: set(range(8)))
    (machine / "cgroup").write_text(groups)
    for name, text in limits.items():
        (machine / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / name).write_text(f"{text}\n")
    assert slots.cores() == number


@pytest.mark.parametrize(("soft", "hard"), [(1024, 4096), (100, NEEDED), (100, -1), (-1, -1), (100, NEEDED - 1)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(soft, hard, monkeypatch):
    limit = [(soft, hard)]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda what: limit[0])
    monkeypatch.setattr(limits.resource, "setrlimit", lambda what, pair: limit.__setitem__(0, pair))
    if hard == NEEDED - 1:
        with pytest.raises(
            ConfigError, match=f"num-actors=20: that takes {NEEDED} open files, {hard} are allowed; lower"
        ):
            check_processes(20)
        return
    check_processes(20)
    assert limit == [(hard, hard)]


@pytest.mark.parametrize(
    ("args_class", "flags", "nets", "learners"),
    [
        (GradArgs, {}, 2, 3),
        (GradArgs, {"cuda": True}, 2, 2),  # its actors learn on the CPU
        (GradArgs, {"cuda": True, "act_on": "cuda"}, 0, 0),
        (DataArgs, {}, 2, 1),
        (DataArgs, {"cuda": True}, 2, 0),
    ],
)
def test_memory_is_counted_where_actors_and_learners_compute(args_class, flags, nets, learners, monkeypatch):
    """Of two actors and a learner; `nets` and `learners` are those whose nets, or gradients too, are on the CPU."""
    space = Box(-np.inf, np.inf, (width := 50_000,))
    monkeypatch.setitem(limits.FOUND, "Wide-v0", (space, Discrete(2), ""))
    monkeypatch.setattr(limits, "free_memory", lambda: 0)
    net = make_actor_critic(space, Discrete(2))
    params = sum(tensor.numel() for tensor in net.state_dict().values())
    rollout, stats = limits.OBS_COPIES * 32 * 129 * width, limits.STATS * width
    learning = limits.NET_COPIES * params + rollout + stats
    numbers = nets * params + 2 * limits.ENV_COPIES * 32 * width + learners * learning
    numbers += stats * bool(flags)  # those of a learner on a GPU
    numbers += 2 * (rollout // limits.OBS_COPIES) * ("act_on" in flags)  # rollouts of actors that learn on one
    with pytest.raises(ConfigError, match=f"take about {math.ceil(40 * numbers / GIB) / 10:.1f} GiB"):
        limits.check_memory(args_class(env_id="Wide-v0", num_envs=32, unroll_length=128, **flags), net)


def test_a_trial_leaves_the_numbers_of_an_environment_that_makes_it():
    before = wrappers.assume_identity(3, 2)
    limits.probe_env("CartPole-v1")
    wrappers.spaces("CartPole-v1")
    assert wrappers.assume_identity(*before) == (3, 2)


@pytest.mark.parametrize("num_learners", [1, 2])
@pytest.mark.parametrize("eval_every", [0, 1000])
def test_every_process_besides_the_first_learner_takes_memory(num_learners, eval_every, monkeypatch):
    args = SimpleNamespace(local_actors=6, local_learners=num_learners, eval_every=eval_every, actors_flag="num-actors")
    needed = (6 + num_learners - 1 + (eval_every > 0)) * limits.ACTOR_BYTES
    monkeypatch.setattr(limits, "free_memory", lambda: needed)
    check_limits(args)
    monkeypatch.setattr(limits, "free_memory", lambda: needed - 2**20)
    with pytest.raises(ConfigError, match=f"num-actors=6: that takes {needed // 2**20:,} MiB of memory at least"):
        check_limits(args)
    args.standalone = True  # no process but the learner
    check_limits(args)


# ---- where actors act


@pytest.mark.parametrize(
    ("act_on", "image", "refusal", "device", "note"),
    [
        ("auto", True, "", "meta", "actors act on meta, with the learner's weights in shared GPU memory"),
        ("auto", "beside a vector", "", "meta", "actors act on meta, with the learner's weights in shared GPU memory"),
        ("auto", True, "no handle", "cpu", "actors act on the CPU (processes cannot share memory of the GPU: no ha"),
        ("auto", False, "", "cpu", "actors act on the CPU (a net for vectors is faster there)"),
        ("cuda", False, "", "meta", "actors act on meta, with the learner's weights in shared GPU memory"),
        ("cpu", True, "", "cpu", "actors act on the CPU (--act-on cpu)"),
    ],
)  # fmt: skip
def test_actors_act_on_the_gpu_where_that_is_faster_and_possible(act_on, image, refusal, device, note, monkeypatch):
    """A net on torch's device meta stands for one on a GPU: what is not the CPU."""
    monkeypatch.setattr(gpu, "why_not_shared", lambda device: refusal)
    space = Box(0, 255, (4, 84, 84) if image is True else (4,), np.uint8)
    space = ImageAndVector((3, 84, 84), space) if image == "beside a vector" else space
    net = make_actor_critic(space, Discrete(2)).to("meta")
    found = gpu.choose_acting(SimpleNamespace(act_on=act_on, precision="fp32"), net)
    assert (found.device, found.dtype) == (torch.device(device), torch.float32)
    assert found.note.startswith(note)


def test_a_gpu_that_is_asked_for_and_cannot_be_shared_is_refused(monkeypatch):
    monkeypatch.setattr(gpu, "why_not_shared", lambda device: "no handle")
    net = make_actor_critic(Box(0, 1, (4,)), Discrete(2)).to("meta")
    with pytest.raises(
        ConfigError, match=r"^act-on=cuda: processes cannot share memory of the GPU: no handle; use auto"
    ):
        gpu.choose_acting(SimpleNamespace(act_on="cuda", precision="fp32"), net)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("reduced", "why"),
    [
        ((torch.full, ((1,), 7.0)), ""),
        ((torch.full, ((1,), 0.0)), "it reads as 0.0, not as 7"),
        ((int, ("x",)), "ValueError: invalid literal for int() with base 10: 'x'"),
        ((os._exit, (3,)), "a process that opened it ended with code 3"),
    ],
    ids=["opens", "another memory", "raises", "crashes"],
)
def test_a_child_process_finds_out_whether_memory_is_shared(reduced, why, monkeypatch):
    """Of a GPU; here what is sent to the child is given."""
    pickled = pickle.dumps(type("Handle", (), {"__reduce__": lambda self: reduced})())
    monkeypatch.setattr(gpu.ForkingPickler, "dumps", lambda tensor: pickled)
    assert gpu.why_not_shared(torch.device("cpu")) == why
