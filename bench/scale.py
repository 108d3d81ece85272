"""How far chapter 7 scales: costs are measured on small clusters of this machine, and put into a model.

    python bench/scale.py            # twelve minutes on two idle cores

Actors and trainers that sleep (`sleepers.py`) let few cores host many nodes. The model (`scale_model.py`) gets its
costs from the smaller clusters and predicts the larger ones, which it has not seen. Then it predicts clusters of other
machines, with costs of sending as they are here. With `--out`, a complete file is only evaluated again.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it
import a3c_mp  # noqa: F401  # isort: skip  (first: it sets the number of threads before torch is imported)

import torch
import torch.multiprocessing as mp

from a3c_mp.algorithms.impala import PRESETS
from a3c_mp.cli import parse_args, parse_plain
from a3c_mp.cluster.access import HOME_VARIABLE
from a3c_mp.cluster.node import check_installed
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError, WorkerError
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.run.script import exit_with
from bench import common, sleepers
from bench.records import Result, begin, markdown_table, measure, save
from bench.scale_model import FITTED, KINDS, Cluster, Costs, fit, predict

ENV_ID, UPDATES = "PongNoFrameskip-v4", 4
"""whose rollouts and net are sent; gradients for each rollout, as in its preset"""
MACHINES, TRAINERS = (1, 2, 4, 10, 20, 50, 100), (1, 2, 4, 8)
"""clusters that are predicted: nodes with actors, trainers"""
AGREE = "agree"
"""row of what trainers need to agree in a round"""
SIZES = {"rollout_bytes": "a rollout", "weights_bytes": "the weights", "gradient_bytes": "a gradient"}
REPEAT, MB = 30, 1e6


@dataclass(frozen=True)
class Args:
    clusters: tuple[str, ...] = ("1x1", "2x1", "2x2", "4x1", "4x2")
    """measured clusters from which costs are found: nodes x trainers"""
    unseen: tuple[str, ...] = ("8x2", "8x4")
    """measured clusters that are predicted"""
    actors_per_node: Count = 3
    """actors on each node of a measured cluster"""
    collect_seconds: Annotated[float, Between(0.01)] = 2.5
    """time that these actors sleep for a rollout (s)"""
    gradient_seconds: Annotated[float, Between(0)] = 0.125
    """time that these trainers sleep for a gradient (s)"""
    seconds: Annotated[float, Between(1)] = 30.0
    """how long each cluster is measured (s)"""
    cores: Count = 16
    """actors on each node of a predicted cluster"""
    collect_ms: tuple[float, ...] = (190.0, 190.0, 1900.0)
    """time that they need for a rollout (ms), in each case: 20 steps of 9.5 ms (docs/gpu.md), or a slow environment"""
    gradient_ms: tuple[float, ...] = (0.0, 9.1, 9.1)
    """time of a gradient (ms), in each case: 0 for sending alone, or an H200 without CUDA graph (docs/gpu.md)"""
    gbit: Annotated[float, Between(0.1)] = 10.0
    """network link of each trainer there (Gbit/s)"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    out: Path | None = None
    """result file; an existing one is continued with what it lacks; default: a new one in bench/results"""


# ---- measuring


@contextmanager
def local_cluster(places: int) -> Iterator[Callable[[int], str]]:
    """A Ray cluster on this machine, of a head without actors and nodes with so many places.

    Gives a function that has nodes join until there are so many, and returns the address of the head.
    """
    nodes: list[subprocess.Popen] = []
    with ExitStack() as stack, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        os.environ[HOME_VARIABLE] = stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-"))

        def grow(number: int) -> str:
            free.close()
            while len(nodes) <= number:
                words = ["join", f"127.0.0.1:{port}", f"--num-cpus={places}"] if nodes else ["head", "--num-cpus=0"]
                words += [] if nodes else ["--port", port]
                command = [sys.executable, "-m", "a3c_mp.cluster", *words]
                nodes.append(subprocess.Popen(command, cwd=common.ROOT, stdout=subprocess.PIPE, text=True))
                stack.callback(nodes[-1].wait)
                stack.callback(nodes[-1].terminate)
                if "cluster at" not in nodes[-1].stdout.readline():  # type: ignore[union-attr]
                    raise WorkerError("a node of the cluster has not started; see the error above")
            return f"127.0.0.1:{port}"

        yield grow


def agree(rank: int, size: int, place: str, numel: int, times: torch.Tensor) -> None:
    """One of several processes that do what trainers do together in a round; writes (time, CPU time) of a round (s)."""
    group, gradient = LearnerGroup(rank, size), [torch.zeros(numel)]
    group.connect(place, None, 60.0)
    for number in range(REPEAT + 1):  # the first one makes connections
        if number == 1:
            began = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
        group.all_gather_object([torch.zeros(20, 16), torch.zeros(20, 16, dtype=torch.bool)])  # rewards, ends of games
        for _ in range(UPDATES):
            group.all_reduce_mean(gradient)
    times[rank] = (torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64) - began) / REPEAT
    group.leave()


def measure_agreeing(numel: int) -> Result:
    """Number of trainers -> their time and CPU time in which they agree on a gradient of so many values (s)."""
    found = {}
    for size in TRAINERS[1:]:
        times = torch.zeros(size, 2).share_memory_()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(agree, (size, f"{folder}/store", numel, times), nprocs=size)
        found[str(size)] = times.mean(dim=0).tolist()
    return found


def cluster_of(args: Args, row: str) -> Cluster:
    """The cluster of `4x2`, which has four nodes and two trainers."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", row)
    if found is None or int(found[1]) * args.actors_per_node % int(found[2]):
        raise ConfigError("clusters", row, "must be nodes x trainers that share the actors evenly", "for instance 4x2")
    return Cluster(int(found[1]), args.actors_per_node, int(found[2]))


def flags_of(args: Args, row: str) -> list[str]:
    """Flags of `sleepers.py` for a cluster, besides its address. Replays are left out: they lie with the trainer."""
    cluster = cluster_of(args, row)
    values = {
        "env-id": ENV_ID, "num-learners": cluster.trainers, "num-actors": cluster.nodes * cluster.actors_per_node,
        "batch-unrolls": 16 // UPDATES, "replay-proportion": 0, "collect-seconds": args.collect_seconds,
        "gradient-seconds": args.gradient_seconds, "measure-seconds": args.seconds,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


# ---- the model


def evaluate(args: Args, result: Result) -> Result:
    """Costs, what the model says of the measured clusters, and what it predicts of other machines."""
    runs, clusters = {run["row"]: run for run in result["runs"]}, {}
    agreeing, first = runs.pop(AGREE)["agree"], runs[args.clusters[0]]
    rates = {row: run["steps"] / run["seconds"] for row, run in runs.items()}
    sizes: dict[str, Any] = {name: first[name] for name in ("rollout_steps", *SIZES)}
    guesses: dict[str, Any] = dict.fromkeys(FITTED, 0.01)
    agree = {int(size): wall for size, (wall, _) in agreeing.items()}
    learn = UPDATES * args.gradient_seconds
    costs = Costs(**sizes, **guesses, updates=UPDATES, collect=args.collect_seconds, learn=learn, agree=agree)
    costs = fit(costs, [(cluster_of(args, row), rates[row]) for row in args.clusters])
    for row, rate in rates.items():
        found = predict(costs, cluster_of(args, row), rounds=60)
        clusters[row] = {**found._asdict(), "error": found.sps / rate - 1}
    there = costs._replace(skew=0.0, agree={int(size): cpu for size, (_, cpu) in agreeing.items()})
    predictions = []
    for case, (collect, gradient) in enumerate(zip(args.collect_ms, args.gradient_ms, strict=True)):
        here = there._replace(collect=collect / 1000, learn=UPDATES * gradient / 1000)
        for nodes, trainers in product(MACHINES, TRAINERS):
            found = predict(here, Cluster(nodes, args.cores, trainers, args.gbit * 1e9 / 8), rounds=12)
            about = {"case": case, "trainers": trainers, "nodes": nodes, "bottleneck": found.bottleneck}
            predictions.append(about | found._asdict())
    return {"costs": costs._asdict(), "costs_there": there._asdict(), "model": clusters, "predictions": predictions}


# ---- tables


def measured_table(result: Result) -> str:
    """A line for each measured cluster, with what the model says of it once there is one."""
    lines = []
    for run in (run for run in result["runs"] if run["row"] != AGREE):
        row, said = run["row"], result.get("model", {}).get(run["row"])
        rollouts = run["steps"] / run["rollout_steps"]
        own = rollouts / int(row.split("x")[1])  # of trainer 0
        cells = [
            f"{rollouts / run['seconds']:.2f}", f"{1000 * run['trainer_cpu'] / own:.1f}",
            f"{1000 * run['reducing'] / own / UPDATES:.1f}", f"{run['machine_cpu'] / run['seconds']:.2f}",
            f"{run['loopback'] / run['steps'] / 1000:.1f}", f"{run['store'] / MB:.0f}",
        ]  # fmt: skip
        if said:
            cells[0] += f" ({said['error']:+.1%}{', unseen' * (row in result['bench']['unseen'])})"
            cells[4] += f" ({sum(said['carried'].values()) / 1000:.1f})"
            cells[5] += f" ({said['stores'] / MB:.0f})"
        lines.append([row, *cells])
    titles = ["rollouts/s", "trainer (ms)", "all-reduce (ms)", "busy cores", "KB/step", "stores (MB)"]
    return markdown_table(["nodes x trainers", *titles], lines)


def predicted_tables(result: Result, case: int) -> list[str]:
    """Steps a second by nodes and trainers; then what is carried with the most nodes."""
    here = {(each["nodes"], each["trainers"]): each for each in result["predictions"] if each["case"] == case}
    cell = "{sps:,.0f} ({bottleneck})".format
    rates = [[str(n), f"{here[n, 1]['supply']:,.0f}", *(cell(**here[n, t]) for t in TRAINERS)] for n in MACHINES]
    titles = ["nodes", "actors alone", *(f"{t} trainer{'s' * (t > 1)}" for t in TRAINERS)]
    loads, costs = [], result["costs"]
    for trainers in TRAINERS:
        column = [here[nodes, trainers] for nodes in MACHINES]
        most, last = max(each["sps"] for each in column), column[-1]
        enough = next(each["nodes"] for each in column if each["sps"] > 0.95 * most)
        put = last["sps"] / costs["rollout_steps"] / trainers * (costs["rollout_bytes"] + costs["weights_bytes"])
        carried = " + ".join(f"{last['carried'][kind] / 1000:.1f}" for kind in KINDS)
        sizes = last["link_in"], last["link_out"], put, last["trainer_store"], last["stores"]
        loads.append([f"{trainers}", f"{enough}", carried, *(f"{size / MB:,.0f}" for size in sizes)])
    about = ["from nodes", "KB/step", "in (MB/s)", "out (MB/s)", "store (MB/s)", "store (MB)", "all stores (MB)"]
    return [markdown_table(titles, rates), markdown_table(["trainers", *about], loads)]


def tables(result: Result) -> str:
    """What was measured, and what follows from it for each time of a gradient."""
    costs, machine = result["costs"], f"{result['machine']['name']}, commit {result['commit'][:8]}"
    found = [f"{1e-6 * costs[name]:.2f} MB for {what}" for name, what in SIZES.items()]
    found += [f"{name} {1000 * costs[name]:.1f} ms" for name in FITTED]
    found += [f"{size} trainers agree in {1000 * seconds:.1f} ms" for size, seconds in costs["agree"].items()]
    parts = [f"{machine} ([file](../bench/results/{result['file']})): {', '.join(found)}.", measured_table(result)]
    times = zip(result["bench"]["collect_ms"], result["bench"]["gradient_ms"], strict=True)
    for case, (collect, gradient) in enumerate(times):
        parts += [f"{collect:g} ms for a rollout, {gradient:g} ms for a gradient:", *predicted_tables(result, case)]
    return "\n\n".join(parts)


def main() -> int:
    args = parse_plain(Args, __doc__)
    check_installed()
    if len(args.collect_ms) != len(args.gradient_ms):
        raise ConfigError(
            "gradient-ms", args.gradient_ms, f"--collect-ms has {len(args.collect_ms)} cases", "give as many"
        )
    rows = sorted({*args.clusters, *args.unseen}, key=lambda row: cluster_of(args, row)[::2])  # nodes only join
    parsed = {row: parse_args(sleepers.Args, PRESETS, "", flags_of(args, row)) for row in rows}
    path, result = begin("scale", args, ENV_ID, {row: common.as_recorded(found) for row, found in parsed.items()})
    with local_cluster(args.actors_per_node) as grow:

        def run(row: str, seed: int) -> Result:
            if row == AGREE:
                first = next(run for run in result["runs"] if run["row"] == rows[0])
                return {"agree": measure_agreeing(first["gradient_bytes"] // 4)}
            address = grow(cluster_of(args, row).nodes)
            command = ["bench/sleepers.py", *flags_of(args, row), f"--address={address}"]
            return json.loads((common.train(command, args, f"scale-{row}") / "scale.json").read_text())

        measure(path, result, [(row, 1) for row in (*rows, AGREE)], run, measured_table)
    result |= evaluate(args, result)
    save(path, result)
    print(tables({**result, "file": path.name}))
    return 0


if __name__ == "__main__":
    exit_with(main)
