"""Chapter 7. The same on a cluster of machines, on Ray: a parameter server, actors, replay shards, a trainer.

Ray starts actors on the nodes of a cluster and carries what they send; the trainer decides what they do and when. What
an actor does, the losses and the loops are those of chapter 4 (`--algo impala`) and 3 (`--algo dqn`).

    impala:  actors --(unrolls)--> trainer                         trainer --(weights, version)--> parameter server
    dqn:     actors --(rows)--> replay shards --(batch)--> trainer            parameter server --> actors

With `--num-learners`, there are several trainers on different nodes, each with all of these of its own, and their
gradients are averaged. The process that you start is a driver then, not a trainer: if any trainer is lost, it starts
all of them again from the newest checkpoint.
"""

import a3c_mp  # noqa: F401  # isort: skip  (first: it prepares the process before torch is imported)

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import train_apex
import train_impala
from a3c_mp.algorithms import ray_trainer
from a3c_mp.algorithms.ray_settings import SETTINGS
from a3c_mp.chapter import Chapter
from a3c_mp.cli import parse_algo
from a3c_mp.cluster.fleet import Fleet
from a3c_mp.cluster.parameters import Publisher, Reader
from a3c_mp.cluster.remote_replay import Outbox
from a3c_mp.data.actor import Memory, SentStates
from a3c_mp.run.driver import run_driven
from a3c_mp.run.learner import Learner
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with

ALGORITHMS = {
    "impala": Chapter(*SETTINGS["impala"], train_impala.actor, train_impala.train, train_impala.main.setup),
    "dqn": Chapter(*SETTINGS["dqn"], train_apex.actor, train_apex.train, ray_trainer.RayDqnSetup),
}
"""`--algo` -> settings, presets, actor, loop, and what makes net, optimizer and slots; docs/ray.md adds one"""


def node_actor(channel: Any, make_actor: Callable[..., Any], args: Any, setup: tuple[Any, ...]) -> Callable[..., Any]:
    """An actor on some node: that of chapter 3 or 4, with memory of its own whose content is sent after each call."""
    packer, weights, replay, check_node = setup
    weights.device = check_node(channel.actor + 1)  # a GPU where Ray gives it one
    fields, states = packer.empty(), SentStates(args.deterministic)
    slots = defaultdict[int, Any](lambda: fields)  # one stands for all of the learner's
    rows = replay and Outbox(replay, args.block_length, args.n_step, channel.restored)  # dqn: for a replay shard
    channel.memory = memory = Memory(slots, weights, states, weights.dtype, args.in_order, rows and rows.ring)
    fill = make_actor(channel, args)

    def send(token: Any) -> tuple[Any, Any]:
        memory.running = channel.running  # dqn: it explores as one of so many
        version = fill(token)
        new_rows = rows and rows.take()
        payload = (version, new_rows.all_finite()) if new_rows else version
        return (payload, packer.pack(fields), states.sent), new_rows

    return send


class RayCarrier:
    """The carrier of a cluster: weights go through a parameter server, actors are Ray's."""

    def __init__(self, cluster: Any):
        self.cluster, self.session = cluster, cluster.session

    def share(self, net: Any, acting: Any, untrained: bool) -> Publisher:
        return Publisher(self.session, net, acting.dtype, untrained)  # starts the parameter server

    def start(self, make_actor: Callable[..., Any], args: Any, memory: Any, **pool: Any) -> Fleet:
        """Start the actors; what they send is copied into slots of the trainer, rows go from node to node."""

        def store(slot: int, result: tuple[Any, Any, Any], rows: Any) -> Any:
            payload, fields, state = result
            self.cluster.packer.unpack(fields, memory.slots[slot])
            memory.states.write(slot, lambda: state)
            return (*payload, rows) if memory.more else payload

        setup = self.cluster.packer, Reader(memory.weights), memory.more, self.cluster.check_node
        target = partial(node_actor, make_actor=make_actor, args=args, setup=setup)
        return Fleet(self.session, target, store, self.cluster.needs, **pool)


def train(args: Any, algorithm: Chapter, start: Any) -> Run:
    """Train on a cluster, as its trainer 0; returns the run once it is over."""
    setup = ray_trainer.make_setup(args, algorithm.setup, start)
    with (
        Run(args, args.algorithm, setup.net, setup.optimizer, setup.saved, setup.make_policy) as run,
        ray_trainer.join_cluster(run, setup, start) as cluster,
        cluster.learners(run, RayCarrier, algorithm) as group,
        Learner(args, run, setup, algorithm.actor, group, RayCarrier(cluster)) as trainer,
        cluster.watch(trainer),
    ):
        algorithm.train(args, trainer)
    return run


def main(algorithms: Mapping[str, Chapter] = ALGORITHMS) -> int:
    """Train with the algorithm that `--algo` names, or else the first; returns the exit code."""
    args, algorithm = parse_algo(algorithms, __doc__ or "")
    return run_driven(args, lambda start: train(args, algorithm, start))


if __name__ == "__main__":
    exit_with(main)
