"""Chapter 7 whose actors sleep as long as collecting takes, and whose trainers sleep as long as gradients take.

All else is chapter 7: Ray, rollouts, weights, counts, and gradients, which are averaged but hold zeros. So a few cores
host many nodes. Trainer 0 writes what it has measured to `scale.json` in the run folder, for `bench/scale.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it
import a3c_mp  # noqa: F401  # isort: skip  (first: it sets the number of threads before torch is imported)

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import psutil
import torch

import train_ray
from a3c_mp.algorithms.impala import PRESETS, ImpalaSetup
from a3c_mp.algorithms.ray_settings import ImpalaArgs
from a3c_mp.chapter import Chapter
from a3c_mp.config import Between, NonNegative
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.run.preflight import probe_env
from a3c_mp.run.script import exit_with
from bench.records import save
from bench.scale_model import JITTER

SETTLE = 3
"""rollouts of each actor, once all of them run, before the measurement"""


@dataclass(frozen=True)
class Args(ImpalaArgs):
    """Settings of the sleepers."""

    collect_seconds: Annotated[float, Between(0.01)] = 2.5
    """an actor's sleep for a rollout (s), plus or minus a tenth"""
    gradient_seconds: NonNegative = 0.125
    """a trainer's sleep for a gradient (s)"""
    measure_seconds: Annotated[float, Between(1)] = 30.0
    """how long the cluster is measured once all actors run (s)"""


def actor(channel: Any, args: Args) -> Callable[..., int]:
    """An actor without environments: it loads the newest weights, sleeps, and sends zeros."""
    net = channel.memory.place(make_actor_critic(*probe_env(args.env_id), args.net_spec))
    rng = random.Random(channel.actor)

    def fill(token: Any) -> int:
        version = channel.memory.load(net, token)
        time.sleep(args.collect_seconds * rng.uniform(1 - JITTER, 1 + JITTER))
        return version

    return fill


def train(args: Args, trainer: Any) -> None:
    """Learn nothing; trainer 0 measures once all actors of all trainers run, and ends the run."""
    gradient, session = [torch.zeros_like(each) for each in trainer.net.parameters()], trainer.carrier.session
    begin, reducing, store = math.inf, 0.0, 0.0
    first: dict[str, float] = {}
    for batches in trainer.rounds():
        for _ in batches:
            time.sleep(args.gradient_seconds)
            running, before = torch.tensor([trainer.pool.running / len(trainer.own)]), time.perf_counter()
            trainer.group.all_reduce_mean([*gradient, running])
            reducing += time.perf_counter() - before
        if trainer.group.rank > 0 or running < 1:
            continue
        cores, free = psutil.cpu_times(), session.state.sums("object_store_memory")
        now = {
            "seconds": time.perf_counter(), "steps": trainer.steps, "trainer_cpu": time.thread_time(),
            "reducing": reducing, "machine_cpu": sum(cores) - cores.idle - cores.iowait,
            "loopback": psutil.net_io_counters(pernic=True)["lo"].bytes_recv,
        }  # fmt: skip
        begin = min(begin, now["seconds"] + SETTLE * args.collect_seconds)
        if now["seconds"] < begin:
            continue
        first, store = first or now, max(store, free[1] - free[0])
        if now["seconds"] - first["seconds"] > args.measure_seconds:
            sizes = {
                "store": store, "rollout_steps": args.unroll_length * args.num_envs,
                "rollout_bytes": trainer.carrier.cluster.packer.nbytes,
                "weights_bytes": trainer.weights.buffers[0].nbytes, "gradient_bytes": sum(g.nbytes for g in gradient),
            }  # fmt: skip
            save(trainer.run.folder / "scale.json", {name: now[name] - first[name] for name in now} | sizes)
            return


def main() -> int:
    return train_ray.main({"impala": Chapter(Args, PRESETS, actor, train, ImpalaSetup)})


if __name__ == "__main__":
    exit_with(main)
