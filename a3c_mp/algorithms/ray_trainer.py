"""Chapter 7's setups: what a trainer on a Ray cluster needs besides chapters 3 and 4, and the size of that cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch

from a3c_mp.algorithms import apex, dqn
from a3c_mp.algorithms.apex import ApexSetup
from a3c_mp.algorithms.ray_settings import DqnArgs, check, check_shards
from a3c_mp.cluster.access import check_cluster, find_cluster
from a3c_mp.cluster.learners import RayLearners
from a3c_mp.cluster.node import store_folder
from a3c_mp.cluster.placement import amount_of
from a3c_mp.cluster.ray_worker import Packer
from a3c_mp.cluster.remote_replay import RemoteReplay, ReplayShard, ReplaySpec
from a3c_mp.cluster.session import Session
from a3c_mp.errors import ConfigError
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.pool import Filled, WorkerEvent
from a3c_mp.processes.slots import MIB
from a3c_mp.replay import Shards
from a3c_mp.run.driver import Start
from a3c_mp.run.gpu import open_gpu
from a3c_mp.run.learner import Learner, MessageStats, Setup
from a3c_mp.run.preflight import FOUND, check_replay_memory, probe_env
from a3c_mp.run.progress import RunState
from a3c_mp.run.run import Run
from a3c_mp.seeds import DRAWS, SHARD, derive_seeds

HELD = 2  # further results that the object store may hold: one that is copied, one that is freed late
TRAINER_MEMORY = 300 * MIB
"""of a trainer with a small net; Ray would put one that needs nothing on a random node, whatever it is asked for"""
LEAST_STORE = 80 * MIB  # smallest object store; Ray refuses less than 75 MiB


class RayDqnSetup(ApexSetup):
    """That of chapter 3 with DQN, but the replay lies in shards on the nodes of the cluster."""

    def __init__(self, args: DqnArgs, rank: int = 0):
        check_shards(args)
        super().__init__(args, dqn, rank)
        self.kept = {}

    def make_replay(self, args: Any, obs_space: gymnasium.Space, actions: gymnasium.Space, rank: int) -> ReplaySpec:
        """Check its size, and return what actors share: the form of their rows. `begin` starts the shards."""
        spec = ReplaySpec(args.num_envs, obs_space, actions, apex.stacked_frames(args.env_id))
        if args.address is None and rank == 0:
            check_replay_memory(args.replay_size, Shards.bytes_needed(*spec.sizes(args.num_actors, args.rows_per_lane)))
        return spec

    def begin(self, learner: Any) -> None:
        """Start the learner's replay shards."""
        args, run, session, rank = learner.args, learner.run, learner.carrier.session, learner.group.rank
        shard_class, own = session.actor_class(ReplayShard), learner.group.own_share(args.num_shards)

        def start(number: int) -> Any:
            in_run = own.start + number
            actors, seeds = len(learner.own[number :: len(own)]), derive_seeds(args.seed, in_run, SHARD)
            size = Shards.bytes_needed(*self.more.sizes(actors, args.rows_per_lane))
            needs = {} if args.address is None else {"memory": size}  # that of this machine has been checked
            content = self.more, actors, args.rows_per_lane, args.priority_exponent, seeds[1]
            return session.start(shard_class, content, needs, session.state.free, name=f"replay shard {in_run}")

        self.replay = replay = RemoteReplay(
            session, start, args, own, learner.own, seed=derive_seeds(args.seed + rank, DRAWS)[1],
            should_stop=run.is_interrupted, device=learner.device,
        )  # fmt: skip
        if rank == 0:
            run.metrics.gauges["replay/size"] = lambda: float(replay.size)
            why = "replay shards are not saved:"
            apex.show_replay(run, args, self.limiter, lambda: args.num_learners * replay.size, why)

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


def make_setup(args: Any, make: Callable[[Any], Setup], start: Start) -> Setup:
    """Make nets, optimizer and slots of the trainer. Raises ConfigError, also for a cluster that cannot be used."""
    check(args)
    setup = make(args)
    assert setup.more is None or isinstance(setup.more, ReplaySpec), "nodes have no memory that actors could share"
    if args.cuda or args.actor_gpus:
        share = args.actor_gpus
        on = f"GPUs of their nodes, each on {share:g} of one" if share else "CPUs of their nodes"
        setup.acting = setup.acting._replace(note=f"actors act on the {on} (--actor-gpus)")
    if args.address is None:
        check_store(store_bytes(args, setup), args.num_actors, store_folder())
    else:  # its places may not be free again yet where this is a restart
        needs = None if start.restarts else needs_of_actor(args)
        check_cluster(find_cluster(args.address, args.token_file, args.insecure_cluster), needs)
    return setup


@contextmanager
def join_cluster(run: Run, setup: Setup, start: Start) -> Iterator[Connection]:
    """Connect to a running cluster, or to one of its own. Raises ConfigError, also without the trainer's GPU."""
    args: Any = run.args
    run.count_time_from(start.since)
    address = None if args.address is None else find_cluster(args.address, args.token_file, args.insecure_cluster)
    num_gpus = torch.cuda.device_count() if args.trainer_gpus or args.actor_gpus else 0
    sizes = {"num-cpus": args.num_actors, "num-gpus": num_gpus, "object-store-memory": store_bytes(args, setup)}
    own_node = [f"--{name}={size}" for name, size in sizes.items()]
    with Session(address, run.log.warning, own_node) as session:
        session.placement, session.is_restart = args.placement, start.restarts > 0
        if args.trainer_gpus:
            check_gpu(args, session.reserve_gpu(args.trainer_gpus))
        nodes, where = len(session.state.nodes), f" at {address.address}" if address else ""
        (_, cpus), (_, gpus) = map(session.state.sums, ("CPU", "GPU"))
        size = f"{nodes} {'node' if nodes == 1 else 'nodes'}, {cpus:g} CPUs"
        size += f", {amount_of('GPU', gpus)}" if gpus else ""
        run.log.info(f"Ray cluster{where}: {size}; {args.num_actors} actors wanted (--num-actors)")
        yield Connection(args, session, setup)


class Connection:
    """A trainer's connection to its cluster, for its carrier."""

    def __init__(self, args: Any, session: Session, setup: Setup):
        self.session, self.needs = session, needs_of_actor(args)
        self.packer = packer_of(args, setup)
        spaces = FOUND[args.env_id][:2] if args.address else None  # None: no other machine makes the environment
        self.check_node = partial(check_node, args, spaces)
        self._explain: Callable[[Any], Any] = lambda error: error

    def learners(self, run: Run, make_carrier: Callable[[Connection], Any], algorithm: Any) -> AbstractContextManager:
        """Start the trainers besides this one, if there are to be any; entered, it gives their group."""
        args: Any = run.args
        if getattr(args, "num_learners", 1) == 1:
            return nullcontext(LearnerGroup())
        session = self.session
        # A run that has just ended may hold its places for a moment.
        # The actors of one trainer might take all places, and those of another would wait for ever.
        needed = args.num_actors
        if not session.is_restart and not session.wait_for(lambda: session.state.sums("CPU")[0] >= needed):
            why = f"actors need {needed} places at least, the cluster has {int(session.state.sums('CPU')[0])} free"
            raise ConfigError("num-actors", needed, why, "lower it, or add a node")
        needs = {"memory": TRAINER_MEMORY, "GPU": args.trainer_gpus}
        parts = make_carrier, algorithm.actor, algorithm.train, algorithm.setup
        learners = RayLearners(session, needs, run, peer, *parts)
        self._explain = learners.explain
        return learners

    @contextmanager
    def watch(self, trainer: Any) -> Iterator[None]:
        """Show the cluster in a run's curves; save the run before its actors end: Ray may end this process then."""

        def store_in_use() -> float:
            free, total = self.session.state.sums("object_store_memory")
            return (total - free) / MIB

        trainer.run.metrics.gauges |= {
            "cluster/actors": lambda: float(trainer.pool.running),
            "cluster/nodes": lambda: float(len(self.session.state.nodes)),
            "cluster/object_store": store_in_use,
        }
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: trainer.run.finish(self._explain(error)))
            yield


def peer(
    group: LearnerGroup, session: Session, args: Any, steps: int, updates: int,
    make_carrier: Callable[[Connection], Any], actor: Any, train: Any, make: Any,
) -> None:  # fmt: skip
    """Run a trainer besides the first, in its process."""
    setup, run = make(args, group.rank), RunState(args, group.rank, steps, updates)
    with Learner(args, run, setup, actor, group, make_carrier(Connection(args, session, setup))) as learner:
        session.warn = lambda text: learner.report(WorkerEvent(-1, text, replaced=False))  # the first one logs it
        train(args, learner)


def check_gpu(args: Any, reserved: str) -> None:
    """Raise ConfigError if Ray has reserved another GPU for the trainer than the one on which its net is."""
    if reserved != (own := os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]):
        why = f"Ray has reserved GPU {reserved} of this machine, the trainer's net is on GPU {own}"
        raise ConfigError("trainer-gpus", args.trainer_gpus, why, f"start it with CUDA_VISIBLE_DEVICES={reserved}")


def check_node(args: Any, expected: tuple[gymnasium.Space, gymnasium.Space] | None, number: int = 0) -> torch.device:
    """Return the device on which the net of an actor acts: the GPU that Ray gives it, if it gives one.

    Raises ConfigError if torch cannot use it, the environment cannot be made or has other spaces than the trainer's.
    """
    own_spaces = probe_env(args.env_id, number=number) if expected else ()
    for kind, own, theirs in zip(("observations", "actions"), own_spaces, expected or (), strict=False):
        if (own, str(own)) != (theirs, str(theirs)):  # the text says whether actions are masked
            why = f"its {kind} are {own} there, {theirs} here"
            raise ConfigError("env-id", args.env_id, why, "install the same environment on all nodes")
    try:
        return open_gpu(0) if args.actor_gpus else torch.device("cpu")
    except ConfigError as error:
        raise ConfigError("actor-gpus", args.actor_gpus, error.why, "leave it out, or see docs/platforms.md") from error


def needs_of_actor(args: Any) -> dict[str, float]:
    return {"CPU": 1.0, "GPU": args.actor_gpus}


def packer_of(args: Any, setup: Setup) -> Packer:
    """What packs the messages of an algorithm: with the newest frame only of rollouts of stacked frames."""
    return Packer(setup.slots.spec, apex.stacked_frames(args.env_id))


def store_bytes(args: Any, setup: Setup) -> int:
    """Size of the object store of a cluster of its own: the most that lies in it at the same time."""
    learners = args.local_learners
    weights = learners * sum(4 * tensor.numel() for tensor in setup.net.state_dict().values())
    messages = args.num_actors * setup.layout.slots_per_actor + HELD * learners
    size = messages * packer_of(args, setup).nbytes + 4 * weights + (args.num_actors + HELD) * MIB
    if setup.more is not None:  # rows and batches of a replay
        obs = int(np.prod(setup.more.obs_space.shape)) * setup.more.obs_space.dtype.itemsize
        block = 2 * args.block_length * args.num_envs * (obs // setup.more.stack + 64)
        size += args.num_actors * (args.blocks_in_flight + HELD) * block
        size += learners * (args.prefetch + HELD) * args.batch_size * (2 * obs + 64)
    return max(size, LEAST_STORE)


def check_store(needed: int, num_actors: int, folder: str) -> None:
    """Raise ConfigError if an object store does not fit into the folder of shared memory."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        why = f"the object store needs {needed // MIB:,} MiB in {folder}, {free // MIB:,} MiB is free there"
        fix = "lower it or --num-envs, or enlarge it (docker run --shm-size)"
        raise ConfigError("num-actors", num_actors, why, fix)
