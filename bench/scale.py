"""How far chapter 7 scales: costs are measured on small Ray clusters of this machine and put into a model.

Actors that sleep as long as collecting would take send rollouts of the environment's size, so a few cores host all
nodes (`scale_measure.py`). The model (`scale_model.py`) gets its costs from the smaller clusters and predicts the last
one, which it has not seen. Then it predicts clusters of machines whose actors are as fast as one core of this machine.

    python bench/scale.py
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import torch
from gymnasium.spaces import Discrete

from a3c_mp.algorithms.ray_trainer import stack_of
from a3c_mp.cli import parse_plain
from a3c_mp.cluster import Packer
from a3c_mp.cluster.node import check_installed
from a3c_mp.config import Between, Count
from a3c_mp.data.rollout import rollout_spec
from a3c_mp.errors import ConfigError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.run.preflight import probe_env
from a3c_mp.run.script import exit_with
from bench import common, stages
from bench.scale_measure import Message, Row, Settings, measure_clusters
from bench.scale_model import Cluster, Costs, collect_time, predict

MACHINES = (1, 2, 4, 7, 10, 20, 50, 100)
"""sizes of the clusters that are predicted"""
STAGE_SECONDS = 3.0
"""how long each stage of an actor is measured (s)"""
SLOW_WEIGHTS = 0.5
"""time between two versions of the weights in the row that publishes less often (s)"""


@dataclass(frozen=True)
class Args:
    chapter: ClassVar[str] = "ray_impala"
    env_id: str = "PongNoFrameskip-v4"
    """whose rollouts and nets are sent"""
    nodes: tuple[int, ...] = (1, 2, 4, 10)
    """sizes of the measured clusters, without the trainer's node; the last one is predicted from the others"""
    actors_per_node: Count = 3
    """actors on each node of a measured cluster"""
    collect_seconds: Annotated[float, Between(0.01)] = 2.0
    """time that these actors sleep for a rollout (s)"""
    learn_seconds: Annotated[float, Between(0)] = 0.08
    """time that the trainer sleeps for a rollout, as for a GPU (s)"""
    seconds: Annotated[float, Between(1)] = 25.0
    """how long each cluster is measured (s)"""
    cores: Count = 16
    """actors on each node of a predicted cluster"""
    gbit: Annotated[float, Between(0.1)] = 10.0
    """network link of the trainer's node in a predicted cluster (Gbit/s)"""
    results: Path = common.RESULTS
    """folder of the result file"""


def fit(args: Args, rows: Sequence[Row], costs: Costs) -> Costs:
    """Costs, of which these have the sizes, by which the model gives the rates of measured clusters."""
    trainer = statistics.mean(row.trainer_ms for row in rows) / 1000
    publish = statistics.mean(row.publish_ms for row in rows) / 1000
    costs = dataclasses.replace(costs, trainer=trainer, publish=publish, learn=args.learn_seconds)
    found = [
        collect_time(costs, Cluster(row.nodes, args.actors_per_node), row.rollouts_per_second * costs.steps)
        for row in rows
    ]
    return dataclasses.replace(costs, collect=statistics.mean(found))


def predict_machines(args: Args, rows: dict[str, tuple[Costs, float]]) -> list[dict[str, Any]]:
    """Agent steps a second on clusters of machines, and what limits them.

    Args:
        args: of the benchmark.
        rows: name -> (costs, shortest time between two versions of the weights).
    """
    found = []
    for nodes in MACHINES:
        for name, (costs, publish_every) in rows.items():
            cluster = Cluster(nodes, args.cores, args.gbit * 1e9 / 8, publish_every)
            prediction = predict(costs, cluster, rounds=12)
            found.append({"nodes": nodes, "row": name, **prediction._asdict(), "bottleneck": prediction.bottleneck})
    return found


def table(predictions: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(found["row"] for found in predictions))
    lines = []
    for nodes in MACHINES:
        here = [found for found in predictions if found["nodes"] == nodes]
        cells = [f"{found['sps']:,.0f} ({found['bottleneck']})" for found in here]
        lines.append([str(nodes), f"{here[0]['supply']:,.0f}", *cells])
    return common.markdown_table(["nodes", "actors alone", *names], lines)


def core_sps(args: Args) -> tuple[float, float]:
    """Agent steps a second of an actor on one core, and of a learner on one core, without their processes."""
    settings = common.trainer_settings(["train_impala.py", f"--env-id={args.env_id}"])
    setup = stages.Setup("impala", settings, torch.device("cpu"), torch.float32, STAGE_SECONDS)
    rates = stages.measure(setup)
    return 1 / (1 / rates["env"] + 1 / rates["act"]), rates["learn"]


def main() -> int:
    args = parse_plain(Args, __doc__)
    if list(args.nodes) != sorted(set(args.nodes)) or len(args.nodes) < 2 or args.nodes[0] < 1:
        raise ConfigError("nodes", args.nodes, "must be two or more sizes that grow", "for instance --nodes 1 2 4 10")
    check_installed()
    settings = common.trainer_settings(["train_ray.py", f"--env-id={args.env_id}"])
    spaces = probe_env(args.env_id, Discrete)
    spec = rollout_spec(settings.unroll_length, settings.num_envs, *spaces)
    message = Message(spec, spaces, settings.net_spec, stack_of(settings))
    frames, stacks = Packer(spec, message.stack).nbytes, Packer(spec).nbytes
    weights = sum(4 * tensor.numel() for tensor in make_actor_critic(*spaces, settings.net_spec).state_dict().values())
    steps = settings.unroll_length * settings.num_envs
    result = common.begin("scale", args, args.env_id)
    actor_sps, learner_sps = core_sps(args)
    sizes = args.nodes, args.actors_per_node, args.collect_seconds, args.learn_seconds, args.seconds
    rows, whole, look = measure_clusters(Settings(*sizes), message)

    costs, last = fit(args, rows[:-1], Costs(steps, frames, weights, 0.0, 0.0)), rows[-1]
    expected = predict(costs, Cluster(last.nodes, args.actors_per_node), rounds=100)
    error = expected.sps / (last.rollouts_per_second * steps) - 1
    overhead = max(costs.collect - args.collect_seconds, 0.0)
    there = dataclasses.replace(costs, collect=steps / actor_sps + overhead, learn=0.0, wait=look)
    whole_there = dataclasses.replace(there, rollout_bytes=stacks, trainer=whole.trainer_ms / 1000)
    variants = {"frames": (there, 0.0), "stacks": (whole_there, 0.0), "frames, fewer weights": (there, SLOW_WEIGHTS)}
    predictions = predict_machines(args, variants)
    result |= {"rows": [row._asdict() for row in rows], "whole": whole._asdict(), "look_seconds": look}
    result |= {"actor_sps": actor_sps, "learner_sps": learner_sps, "costs": asdict(costs), "costs_there": asdict(there)}
    result |= {"held_out": {"predicted_sps": expected.sps, "error": error}, "predictions": predictions}
    path = common.result_path(args.results, result, with_env=True)
    common.save(path, result)
    print(
        f"{last.actors} actors: predicted {expected.sps / steps:.2f} rollouts/s ({error:+.1%}), {expected.bottleneck}"
    )
    print(
        f"one core: actor {actor_sps:,.0f}, learner {learner_sps:,.0f} steps/s; one look {1e6 * look:.1f} us a request"
    )
    print(table(predictions))
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
