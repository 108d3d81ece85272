"""Chapter 7's setups: what a trainer on a Ray cluster needs besides chapters 3 and 4, and the size of that cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import gymnasium
import numpy as np

from a3c_mp.algorithms import apex, dqn
from a3c_mp.algorithms.apex import ApexSetup
from a3c_mp.algorithms.impala import ImpalaSetup
from a3c_mp.algorithms.ray_settings import DqnArgs, ImpalaArgs, RayRunArgs, check
from a3c_mp.cluster import Packer, RemoteReplay, ReplayShard, ReplaySpec, Session
from a3c_mp.cluster.access import check_cluster, find_cluster
from a3c_mp.cluster.node import store_folder
from a3c_mp.errors import ConfigError
from a3c_mp.processes.pool import Filled
from a3c_mp.replay import Shards
from a3c_mp.run.learner import Learner, MessageStats, Setup
from a3c_mp.run.preflight import FOUND, check_replay_memory, probe_env
from a3c_mp.run.run import Run
from a3c_mp.seeds import DRAWS, SHARD, derive_seeds

MIB = 2**20
HELD = 2
"""further results that the object store may hold: one that is copied, one that is freed late"""
LEAST_STORE = 80 * MIB
"""smallest object store; Ray refuses less than 75 MiB"""


def save_run(setup: Setup, learner: Any, error: BaseException | None) -> None:
    """Save the run before the actors end: where the node ends too, Ray may end this process meanwhile."""
    learner.run.finish(error)


class RayImpalaSetup(ImpalaSetup):
    """The setup of chapter 4, and a packer for messages of unrolls."""

    spec = None
    end = save_run

    def __init__(self, args: ImpalaArgs):
        super().__init__(args)
        self.packer = Packer(self.slots.spec, apex.stacked_frames(args.env_id))

    def begin(self, learner: Learner) -> None:
        show_cluster(learner)

    def store_bytes(self, args: ImpalaArgs) -> int:
        """Return the bytes of unrolls in the object store, at most."""
        return (args.num_actors * args.slots_per_actor + HELD) * self.packer.nbytes


class RayDqnSetup(ApexSetup):
    """That of chapter 3 with DQN, but the replay lies in shards on the nodes of the cluster."""

    end = save_run

    def __init__(self, args: DqnArgs):
        super().__init__(args, dqn)
        self.packer, self.kept = Packer(self.slots.spec), {}

    def make_replay(self, args: Any, obs_space: gymnasium.Space, actions: gymnasium.Space, rank: int) -> None:
        """Check its size; `begin` starts the shards."""
        self.spec = ReplaySpec(args.num_envs, obs_space, actions, apex.stacked_frames(args.env_id))
        if args.address is None:
            needed = Shards.bytes_needed(*self.spec.sizes(args.num_actors, args.rows_per_lane))
            check_replay_memory(args.replay_size, needed)

    def begin(self, learner: Any) -> None:
        """Start the replay shards."""
        args, run, session = learner.args, learner.run, learner.carrier.session
        shard_class = session.actor_class(ReplayShard, num_cpus=0)

        def start(number: int) -> Any:
            actors, seed = len(range(number, args.num_actors, args.num_shards)), derive_seeds(args.seed, number, SHARD)
            return shard_class.remote(self.spec, actors, args.rows_per_lane, args.priority_exponent, seed[1])

        self.replay = replay = RemoteReplay(
            session, start, args.num_actors, args.num_shards, batch_size=args.batch_size,
            ahead=0 if args.deterministic else args.prefetch, seed=derive_seeds(args.seed, DRAWS)[1],
            max_restarts=args.max_restarts, should_stop=run.is_interrupted, device=learner.device,
        )  # fmt: skip
        show_cluster(learner)
        run.metrics.gauges["replay/size"] = lambda: float(replay.size)
        apex.show_replay(run, args, self.limiter, lambda: replay.size, "replay shards are not saved:")

    def sampler(self, args: Any) -> AbstractContextManager[Any]:
        return nullcontext(self.replay)  # which requests batches ahead

    def make_room(self, args: Any, shards: Any) -> None:
        pass  # shards do that themselves

    def ingest(self, learner: Learner, filled: Sequence[Filled]) -> list[MessageStats]:
        """Have the rows of a round of blocks inserted into their shards; return the statistics of each."""
        stats = []
        for actor, slot, (version, finite, rows) in filled:
            self.replay.insert(actor, rows)
            stats.append(self.stats_of(learner, slot, version, finite))
        return stats

    def store_bytes(self, args: DqnArgs) -> int:
        """Return the bytes of rows and batches in the object store, at most."""
        space: Any = self.spec.obs_space
        obs = int(np.prod(space.shape)) * space.dtype.itemsize
        block = 2 * args.block_length * args.num_envs * (obs // self.spec.stack + 64)
        batches = (args.prefetch + HELD) * args.batch_size * (2 * obs + 64)
        return args.num_actors * (args.blocks_in_flight + HELD) * block + batches


def make_setup(args: RayRunArgs) -> RayImpalaSetup | RayDqnSetup:
    """Make nets, optimizer and slots of the trainer. Raises ConfigError, also for a cluster that cannot be used."""
    check(args)
    setup: Any = RayImpalaSetup(args) if isinstance(args, ImpalaArgs) else RayDqnSetup(args)
    setup.spaces = None if args.address is None else FOUND[args.env_id][:2]  # on other machines they may be others
    if args.address is None:
        check_store(store_bytes(args, setup), args.num_actors, store_folder())
    else:
        check_cluster(find_cluster(args.address, args.token_file), args.insecure_cluster, args.num_actors)
    return setup


@contextmanager
def join_cluster(args: RayRunArgs, run: Run, setup: Any) -> Iterator[Session]:
    """Connect to a running cluster, or to one of its own."""
    address = None if args.address is None else find_cluster(args.address, args.token_file)
    with Session(address, run.log, args.num_actors, store_bytes(args, setup)) as session:
        nodes, where = len(session.state.nodes), f" at {address.address}" if address else ""
        size = f"{nodes} {'node' if nodes == 1 else 'nodes'}, {session.state.num_cpus:g} CPUs"
        run.log.info(f"Ray cluster{where}: {size}; {args.num_actors} actors wanted (--num-actors)")
        yield session


def check_spaces(args: RayRunArgs, expected: tuple[gymnasium.Space, gymnasium.Space] | None) -> None:
    """Raise ConfigError in an actor whose environment cannot be made, or has other spaces than the trainer's."""
    if expected is None:
        return
    for kind, own, theirs in zip(("observations", "actions"), probe_env(args.env_id), expected, strict=True):
        if own != theirs:
            why = f"its {kind} are {own} there, {theirs} here"
            raise ConfigError("env-id", args.env_id, why, "install the same environment on all nodes")


def show_cluster(learner: Any) -> None:
    session = learner.carrier.session
    learner.run.metrics.gauges |= {
        "cluster/actors": lambda: float(learner.pool.running),
        "cluster/nodes": lambda: float(len(session.state.nodes)),
        "cluster/object_store": lambda: session.state.store_bytes / MIB,
    }


def store_bytes(args: RayRunArgs, setup: Any) -> int:
    """Size of the object store of a cluster of its own: the most that lies in it at the same time."""
    weights = sum(4 * tensor.numel() for tensor in setup.net.state_dict().values())
    return max(setup.store_bytes(args) + 4 * weights + (args.num_actors + HELD) * MIB, LEAST_STORE)


def check_store(needed: int, num_actors: int, folder: str) -> None:
    """Raise ConfigError if an object store does not fit into the folder of shared memory."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        why = f"the object store needs {needed // MIB:,} MiB in {folder}, {free // MIB:,} MiB is free there"
        fix = "lower it or --num-envs, or enlarge it (docker run --shm-size)"
        raise ConfigError("num-actors", num_actors, why, fix)
