"""Chapter 7's setups: what a trainer on a Ray cluster needs besides chapters 3 and 4, and the size of that cluster."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch

from a3c_mp.algorithms import apex, dqn
from a3c_mp.algorithms.apex import ApexSetup
from a3c_mp.algorithms.ray_settings import DqnArgs, check, check_shards
from a3c_mp.cluster import Packer, RemoteReplay, ReplayShard, ReplaySpec, Session
from a3c_mp.cluster.access import check_cluster, find_cluster
from a3c_mp.cluster.node import store_folder
from a3c_mp.cluster.placement import amount_of
from a3c_mp.errors import ConfigError
from a3c_mp.processes.pool import Filled
from a3c_mp.replay import Shards
from a3c_mp.run.gpu import open_gpu
from a3c_mp.run.learner import Learner, MessageStats, Setup
from a3c_mp.run.preflight import FOUND, check_replay_memory, probe_env
from a3c_mp.run.run import Run
from a3c_mp.seeds import DRAWS, SHARD, derive_seeds

MIB = 2**20
HELD = 2
"""further results that the object store may hold: one that is copied, one that is freed late"""
LEAST_STORE = 80 * MIB
"""smallest object store; Ray refuses less than 75 MiB"""


class RayDqnSetup(ApexSetup):
    """That of chapter 3 with DQN, but the replay lies in shards on the nodes of the cluster."""

    def __init__(self, args: DqnArgs):
        check_shards(args)
        super().__init__(args, dqn)
        self.kept = {}

    def make_replay(self, args: Any, obs_space: gymnasium.Space, actions: gymnasium.Space, rank: int) -> ReplaySpec:
        """Check its size, and return what actors share: the form of their rows. `begin` starts the shards."""
        spec = ReplaySpec(args.num_envs, obs_space, actions, apex.stacked_frames(args.env_id))
        if args.address is None:
            needed = Shards.bytes_needed(*spec.sizes(args.num_actors, args.rows_per_lane))
            check_replay_memory(args.replay_size, needed)
        return spec

    def begin(self, learner: Any) -> None:
        """Start the replay shards."""
        args, run, session = learner.args, learner.run, learner.carrier.session
        shard_class = session.actor_class(ReplayShard)

        def start(number: int) -> Any:
            actors, seed = len(range(number, args.num_actors, args.num_shards)), derive_seeds(args.seed, number, SHARD)
            size = Shards.bytes_needed(*self.more.sizes(actors, args.rows_per_lane))
            needs = {} if args.address is None else {"memory": size}  # that of this machine has been checked
            content = self.more, actors, args.rows_per_lane, args.priority_exponent, seed[1]
            return session.start(shard_class, content, needs, session.state.free, name=f"replay shard {number}")

        self.replay = replay = RemoteReplay(
            session, start, args.num_actors, args.num_shards, batch_size=args.batch_size,
            ahead=0 if args.deterministic else args.prefetch, seed=derive_seeds(args.seed, DRAWS)[1],
            max_restarts=args.max_restarts, should_stop=run.is_interrupted, device=learner.device,
        )  # fmt: skip
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


def make_setup(args: Any, make: Callable[[Any], Setup]) -> Setup:
    """Make nets, optimizer and slots of the trainer. Raises ConfigError, also for a cluster that cannot be used."""
    check(args)
    setup = make(args)
    assert setup.more is None or isinstance(setup.more, ReplaySpec), "nodes have no memory that actors could share"
    if args.actor_gpus:
        note = f"actors act on the GPUs of their nodes, each on {args.actor_gpus:g} of one (--actor-gpus)"
        setup.acting = setup.acting._replace(note=note)
    if args.address is None:
        check_store(store_bytes(args, setup), args.num_actors, store_folder())
    else:
        check_cluster(find_cluster(args.address, args.token_file), args.insecure_cluster, needs_of_actor(args))
    return setup


class Connection(NamedTuple):
    """A trainer's connection to its cluster, for its carrier."""

    session: Session
    packer: Packer
    needs: dict[str, float]  # of an actor
    spaces: tuple[gymnasium.Space, gymnasium.Space] | None  # of the environment; None: no other machine makes it

    @contextmanager
    def watch(self, trainer: Any) -> Iterator[None]:
        """Show the cluster in the curves of a run, and save the run before its actors end.

        Where the node ends too, Ray may end this process meanwhile.
        """

        def store_in_use() -> float:
            free, total = self.session.state.sums("object_store_memory")
            return (total - free) / MIB

        trainer.run.metrics.gauges |= {
            "cluster/actors": lambda: float(trainer.pool.running),
            "cluster/nodes": lambda: float(len(self.session.state.nodes)),
            "cluster/object_store": store_in_use,
        }
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: trainer.run.finish(error))
            yield


@contextmanager
def join_cluster(args: Any, run: Run, setup: Setup) -> Iterator[Connection]:
    """Connect to a running cluster, or to one of its own. Raises ConfigError, also without the trainer's GPU."""
    address = None if args.address is None else find_cluster(args.address, args.token_file)
    num_gpus = torch.cuda.device_count() if args.trainer_gpus or args.actor_gpus else 0
    sizes = {"num-cpus": args.num_actors, "num-gpus": num_gpus, "object-store-memory": store_bytes(args, setup)}
    own_node = [f"--{name}={size}" for name, size in sizes.items()]
    with Session(address, run.log, own_node, args.placement) as session:
        if args.trainer_gpus:
            check_gpu(args, session.reserve_gpu(args.trainer_gpus))
        nodes, where = len(session.state.nodes), f" at {address.address}" if address else ""
        cpus, gpus = session.state.sums("CPU")[1], session.state.sums("GPU")[1]
        size = f"{nodes} {'node' if nodes == 1 else 'nodes'}, {cpus:g} CPUs" + (
            f", {amount_of('GPU', gpus)}" if gpus else ""
        )
        run.log.info(f"Ray cluster{where}: {size}; {args.num_actors} actors wanted (--num-actors)")
        spaces = FOUND[args.env_id][:2] if address else None
        yield Connection(session, packer_of(args, setup), needs_of_actor(args), spaces)


def check_gpu(args: Any, reserved: str) -> None:
    """Raise ConfigError if Ray has reserved another GPU for the trainer than the one on which its net is."""
    if reserved != (own := os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]):
        why = f"Ray has reserved GPU {reserved} of this machine, the trainer's net is on GPU {own}"
        raise ConfigError("trainer-gpus", args.trainer_gpus, why, f"start it with CUDA_VISIBLE_DEVICES={reserved}")


def check_node(args: Any, expected: tuple[gymnasium.Space, gymnasium.Space] | None) -> torch.device:
    """Return the device on which the net of an actor acts: the GPU that Ray gives it, if it gives one.

    Raises ConfigError if torch cannot use it, the environment cannot be made or has other spaces than the trainer's.
    """
    own_spaces = probe_env(args.env_id) if expected else ()
    for kind, own, theirs in zip(("observations", "actions"), own_spaces, expected or (), strict=False):
        if own != theirs:
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
    weights = sum(4 * tensor.numel() for tensor in setup.net.state_dict().values())
    messages = args.num_actors * setup.layout.slots_per_actor + HELD
    size = messages * packer_of(args, setup).nbytes + 4 * weights + (args.num_actors + HELD) * MIB
    return max(size + (replay_bytes(args, setup.more) if setup.more else 0), LEAST_STORE)


def replay_bytes(args: Any, spec: ReplaySpec) -> int:
    """Bytes of rows and batches of a replay in the object store, at most."""
    space: Any = spec.obs_space
    obs = int(np.prod(space.shape)) * space.dtype.itemsize
    block = 2 * args.block_length * args.num_envs * (obs // spec.stack + 64)
    batches = (args.prefetch + HELD) * args.batch_size * (2 * obs + 64)
    return args.num_actors * (args.blocks_in_flight + HELD) * block + batches


def check_store(needed: int, num_actors: int, folder: str) -> None:
    """Raise ConfigError if an object store does not fit into the folder of shared memory."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        why = f"the object store needs {needed // MIB:,} MiB in {folder}, {free // MIB:,} MiB is free there"
        fix = "lower it or --num-envs, or enlarge it (docker run --shm-size)"
        raise ConfigError("num-actors", num_actors, why, fix)
