"""How fast the replay takes in and gives out transitions of stacked 84x84 frames, beside cpprb.

At each size the replay is filled, then measured alone (inserting, drawing batches, updating priorities, one after the
other in one process, by its processor time) and together: a process of its own inserts as fast as it can, while this
one draws batches ahead and updates the priorities of each, by the clock on the wall. cpprb's buffers do the same work
twice: one stores single frames, as ours, but serves one process; the other is shared, and stores whole stacks.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import numpy as np
import torch
import torch.multiprocessing as mp
from gymnasium.spaces import Box, Discrete

from a3c_mp.cli import parse_plain
from a3c_mp.config import Between, Count, NonNegative
from a3c_mp.errors import ConfigError
from a3c_mp.replay import Batch, EnvStep, Prefetch, Replay, Shards, Writer, importance_weights
from a3c_mp.run.script import exit_with
from bench import common

STACK, SIDE, N_STEP, GAMMA, ALPHA, BETA = 4, 84, 3, 0.99, 0.6, 0.4
OBS_SPACE, ACTION_SPACE = Box(0, 255, (STACK, SIDE, SIDE), np.uint8), Discrete(6)
BLOCK = 20
"""steps of the environments between two calls of `Replay.ingest`"""
EPISODE = 800
"""steps in an episode"""
REEL = 40
"""different steps that the pictures show, over and over"""
TAKE = 64
"""cpprb: steps of one environment that are added at once"""
Rates = dict[str, float]


@dataclass(frozen=True)
class Args:
    chapter: ClassVar[str] = "apex"
    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """transitions in the replay"""
    num_envs: Count = 32
    """environments of the actor that inserts"""
    batch_size: Count = 512
    """transitions in a batch"""
    seconds: Annotated[float, Between(0.1)] = 5.0
    """how long each rate is measured (s)"""
    repeat: Count = 3
    """repetitions; ours and cpprb take turns, and medians are reported"""
    compare: bool = True
    """also measure cpprb"""
    reserve_gib: NonNegative = 4.0
    """memory to leave free: what would need more is left out (GiB)"""
    results: Path = common.RESULTS
    """folder of the result file"""


def rate(work: Callable[[], int], seconds: float) -> float:
    """Things done in a second, by calls that return how many they did; the first call is for warming up.

    The seconds are of this process's own processor time, which other processes do not shorten much.
    """
    work()
    done, start = 0, time.process_time()
    while (elapsed := time.process_time() - start) < seconds:
        done += work()
    return done / elapsed


class Environments:
    """Fake environments without the cost of an emulator: they repeat frames made beforehand."""

    def __init__(self, num_envs: int):
        frames = np.random.default_rng(0).integers(0, 256, (REEL, SIDE, SIDE), np.uint8)
        t = np.arange(REEL)[:, None, None] + np.arange(num_envs)[:, None] + np.arange(STACK)
        self.reel = frames[t % REEL]  # [REEL, num_envs, STACK, SIDE, SIDE]
        self.first = self.reel[0].copy()
        self.first[:, :-1] = 0
        self.num_envs, self.t = num_envs, 0
        self.rng = np.random.default_rng(1)

    def step(self) -> EnvStep:
        """The next step of every environment."""
        obs = self.reel[self.t % REEL] if self.t % EPISODE else self.first
        self.t += 1
        ended = np.full(self.num_envs, self.t % EPISODE == 0)
        reward, q, value = self.rng.random((3, self.num_envs), np.float32)
        return EnvStep(obs, np.zeros(self.num_envs, np.int64), reward, ended, np.zeros_like(ended), q, value)


# ---- ours


def lane_rows(size: int, num_envs: int) -> int:
    """Rows of each lane of two shards that hold `size` transitions, with room for two blocks."""
    return size // (2 * num_envs) + 2 * 2 * BLOCK + STACK + N_STEP


def ours(args: Args, size: int) -> Rates:
    shards = Shards(2, args.num_envs, lane_rows(size, args.num_envs), OBS_SPACE, ACTION_SPACE, STACK)
    replay = Replay(shards, ALPHA, seed=0)
    writers = [(Writer(shards, shard, N_STEP, GAMMA), Environments(args.num_envs)) for shard in range(2)]

    def insert() -> int:
        for shard, (writer, environments) in enumerate(writers):
            replay.make_room(shard, 2 * BLOCK)
            for _ in range(BLOCK):
                writer.step(environments.step())
            replay.ingest(shard)
        return 2 * BLOCK * args.num_envs

    out = Batch.empty(shards, args.batch_size)

    def sample() -> int:
        importance_weights(replay.sample(args.batch_size, out).probability, BETA)
        return args.batch_size

    priorities = torch.rand(args.batch_size)

    def update() -> int:
        replay.update(out.ids, priorities)
        return args.batch_size

    while int(shards.written.min()) < shards.rows:
        insert()
    rates = {"inserts": rate(insert, args.seconds), "samples": rate(sample, args.seconds)}
    rates["updates"] = rate(update, args.seconds)
    replay.make_room(0, 2 * 2 * BLOCK)
    with inserting(insert_ours, shards) as progress, Prefetch(replay, args.batch_size) as batches:

        def learn() -> int:
            batch = batches.next()
            importance_weights(batch.probability, BETA)
            replay.update(batch.ids, priorities)
            replay.make_room(0, 2 * 2 * BLOCK)
            replay.ingest(0)
            return args.batch_size

        rates |= together(learn, progress, args.seconds)
    rates["bytes"] = (shards.nbytes + sum(level.nbytes for level in replay.tree.levels)) / (
        shards.rows * shards.num_lanes
    )
    return rates


def insert_ours(progress: torch.Tensor, shards: Shards) -> None:
    """Spawned: write wherever the learner has made room."""
    writer, environments = Writer(shards, 0, N_STEP, GAMMA), Environments(shards.num_envs)
    while True:
        while (shards.writable_until[: shards.num_envs] - writer.row).min() < 2 * BLOCK:
            time.sleep(1e-4)
        for _ in range(BLOCK):
            writer.step(environments.step())
        note(progress, BLOCK * shards.num_envs)


# ---- cpprb


def cpprb_frames(args: Args, size: int) -> Rates:
    """Single frames; the next observation of a transition is that of the step after, not n steps on: less work."""
    from cpprb import PrioritizedReplayBuffer

    fields = {"obs": {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8}}
    buffer = PrioritizedReplayBuffer(size, fields | SMALL, alpha=ALPHA, stack_compress="obs", next_of="obs")
    reel = np.random.default_rng(0).integers(0, 256, (TAKE + STACK, SIDE, SIDE), np.uint8)
    obs = np.stack([np.moveaxis(reel[t : t + STACK], 0, -1) for t in range(TAKE + 1)])
    rest = small(TAKE)

    def insert() -> int:
        buffer.add(obs=obs[:-1], next_obs=obs[1:], **rest)
        return TAKE

    while buffer.get_stored_size() < size:
        insert()
    rates = alone(args, buffer, insert)
    return rates | {"bytes": SIDE * SIDE + 16 + 16 * 2}  # its fields, and two trees of doubles


def cpprb_shared(args: Args, size: int) -> Rates:
    """Between processes, with whole stacks."""
    from cpprb import MPPrioritizedReplayBuffer

    shape = {"shape": OBS_SPACE.shape, "dtype": np.uint8}
    context = mp.get_context("spawn")
    buffer = MPPrioritizedReplayBuffer(size, {"obs": shape, "next_obs": shape} | SMALL, alpha=ALPHA, ctx=context)
    obs = Environments(args.num_envs).step().obs
    rest = small(args.num_envs)

    def insert() -> int:
        buffer.add(obs=obs, next_obs=obs, **rest)
        return args.num_envs

    while buffer.get_stored_size() < size:
        insert()
    rates = alone(args, buffer, insert)
    priorities = np.random.default_rng(0).random(args.batch_size)
    with inserting(insert_cpprb, buffer, args.num_envs) as progress:

        def learn() -> int:
            buffer.update_priorities(buffer.sample(args.batch_size, beta=BETA)["indexes"], priorities)
            return args.batch_size

        rates |= together(learn, progress, args.seconds)
    return rates | {"bytes": 2 * STACK * SIDE * SIDE + 16 + 16 * 2}


SMALL = {"act": {"dtype": np.int64}, "rew": {}, "discount": {}}
"""fields beside the observations, for cpprb"""


def small(count: int) -> dict[str, np.ndarray]:
    """Values of those fields and the priorities."""
    zeros = np.zeros(count, np.int64)
    return {"act": zeros, "rew": zeros, "discount": zeros, "priorities": np.random.default_rng(0).random(count)}


def alone(args: Args, buffer: Any, insert: Callable[[], int]) -> Rates:
    """cpprb's rates in one process."""
    priorities = np.random.default_rng(0).random(args.batch_size)

    def sample() -> int:
        buffer.sample(args.batch_size, beta=BETA)
        return args.batch_size

    indexes = buffer.sample(args.batch_size, beta=BETA)["indexes"]

    def update() -> int:
        buffer.update_priorities(indexes, priorities)
        return args.batch_size

    works = {"inserts": insert, "samples": sample, "updates": update}
    return {name: rate(work, args.seconds) for name, work in works.items()}


def insert_cpprb(progress: torch.Tensor, buffer: Any, num_envs: int) -> None:
    """Spawned: add as fast as it goes."""
    environments, rest = Environments(num_envs), small(num_envs)
    obs = environments.step().obs
    while True:
        step = environments.step()
        rest["priorities"] = np.abs(step.q - step.value)
        buffer.add(obs=obs, next_obs=step.obs, **rest)
        obs = step.obs
        note(progress, num_envs)


# ---- both at once


@contextmanager
def inserting(target: Callable[..., None], *args: Any) -> Iterator[torch.Tensor]:
    """A process that inserts, and its progress: transitions inserted so far, processor time spent so far (s)."""
    progress = torch.zeros(2, dtype=torch.float64).share_memory_()
    process = mp.get_context("spawn").Process(target=target, args=(progress, *args), daemon=True)
    process.start()
    try:
        while progress[0] == 0:
            if not process.is_alive():
                raise RuntimeError(f"the process that inserts ended with code {process.exitcode}")
            time.sleep(0.01)
        yield progress
    finally:
        process.kill()
        process.join()


def note(progress: torch.Tensor, inserted: int) -> None:
    """Add to the progress of the process that inserts, which calls this."""
    progress += torch.tensor([inserted, time.process_time() - progress[1]])


def together(learn: Callable[[], int], progress: torch.Tensor, seconds: float) -> Rates:
    """Rates of both sides at once, by the clock on the wall, and by the processor time that each had."""
    learn()
    before, start, cpu = progress.clone(), time.perf_counter(), time.process_time()
    samples = 0
    while (wall := time.perf_counter() - start) < seconds:
        samples += learn()
    cpu = time.process_time() - cpu
    inserted, inserting_cpu = (progress - before).tolist()
    return {
        "inserts_together": inserted / wall,
        "samples_together": samples / wall,
        "inserts_together_cpu": inserted / inserting_cpu,
        "samples_together_cpu": samples / cpu,
    }


def free_gib() -> float:
    """Memory that is free or would be, were it asked for (GiB); /dev/shm counts where it has less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            available = int(line.split()[1]) / 2**20
    shm = os.statvfs("/dev/shm")
    return min(available, shm.f_bavail * shm.f_frsize / 2**30)


COMPETITORS: dict[str, tuple[Callable[[Args, int], Rates], int]] = {
    "ours": (ours, SIDE**2),
    "cpprb_frames": (cpprb_frames, SIDE**2),
    "cpprb_shared": (cpprb_shared, 2 * STACK * SIDE**2),
}
"""name -> (what measures it, bytes of frames for a transition)"""
COLUMNS = (
    "inserts", "samples", "updates", "inserts_together", "samples_together", "inserts_together_cpu",
    "samples_together_cpu", "bytes",
)  # fmt: skip


def main() -> int:
    args = parse_plain(Args, __doc__ or "")
    if args.compare and importlib.util.find_spec("cpprb") is None:
        raise ConfigError("compare", True, "cpprb is not installed", "pip install 'cpprb>=11', or --no-compare")
    torch.set_num_threads(1)
    result = common.begin("replay", args, f"uint8 {OBS_SPACE.shape}")
    result["sizes"] = {}
    path = common.result_path(args.results, result, with_env=False)
    for size in args.sizes:
        measured: dict[str, list[Rates]] = {}
        left_out = {}
        for i in range(args.repeat):
            for name, (measure, frame_bytes) in COMPETITORS.items():
                if name != "ours" and not args.compare:
                    continue
                needed, free = size * frame_bytes / 2**30, free_gib() - args.reserve_gib
                if needed > free:
                    left_out[name] = f"needs {needed:.1f} GiB, {free:.1f} GiB is free"
                    continue
                rates = measure(args, size)
                measured.setdefault(name, []).append(rates)
                print(
                    f"{size:,} {i + 1}/{args.repeat} {name}", *(f"{k} {v:,.0f}" for k, v in rates.items()), flush=True
                )
        medians = {
            name: {key: statistics.median(rates[key] for rates in repetitions) for key in repetitions[0]}
            for name, repetitions in measured.items()
        }
        result["sizes"][size] = {"repetitions": measured, "medians": medians, "left_out": left_out}
        common.save(path, result)
    rows = [
        [f"{size:,} {name}", *(f"{medians[key]:,.0f}" if key in medians else "-" for key in COLUMNS)]
        for size, found in result["sizes"].items()
        for name, medians in found["medians"].items()
    ]
    print(common.markdown_table(["transitions", *COLUMNS], rows))
    for size, found in result["sizes"].items():
        for name, why in found["left_out"].items():
            print(f"{size:,} {name} left out: {why}")
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
