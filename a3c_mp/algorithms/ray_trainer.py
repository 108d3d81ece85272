"""Chapter 7's trainer: what a learner needs of a Ray cluster, and the size of cluster that it needs."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.algorithms import apex, dqn, impala
from a3c_mp.algorithms.actor_critic import rollout_layout
from a3c_mp.algorithms.ray_settings import DqnArgs, ImpalaArgs, RayRunArgs, check
from a3c_mp.cluster import Fleet, Packer, Publisher, Reader, RemoteReplay, ReplayShard, ReplaySpec, Result, Session
from a3c_mp.cluster.access import check_cluster, find_cluster
from a3c_mp.config import CommonArgs
from a3c_mp.data.resume_states import ActorLayout, ResumeStates
from a3c_mp.data.rollout import Rollout, is_finite
from a3c_mp.data.rollout import finished_episodes as episodes_of
from a3c_mp.data.transitions import episode_stats_spec, finished_episodes
from a3c_mp.errors import ConfigError
from a3c_mp.maths.losses import Metrics
from a3c_mp.nets.precision import compute_dtype
from a3c_mp.nets.q_values import DuelingQ
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.workers import Filled, WorkerEvent
from a3c_mp.replay import Shards, writer_state_spec
from a3c_mp.run.actors import Actors, MessageStats
from a3c_mp.run.device import set_up_torch
from a3c_mp.run.guard import NonFiniteFilter, update_norm
from a3c_mp.run.preflight import check_replay_memory, probe_env
from a3c_mp.run.run import Run
from a3c_mp.seeds import DRAWS, SHARD, derive_seeds
from wrappers import is_atari

MIB = 2**20
HELD = 2  # results in the object store beside those in flight: one that is copied, one that is freed late
LEAST_STORE = 80 * MIB  # Ray refuses less than 75 MiB


class DqnLearner(NamedTuple):
    """State of a DQN learner on Ray."""

    net: DuelingQ
    target_net: DuelingQ  # equal to `net` at the start
    optimizer: torch.optim.Optimizer
    slots: Slots  # of episode statistics, a block of steps each
    spec: ReplaySpec
    action_space: gymnasium.Space


def build_learner(args: RayRunArgs) -> Any:
    """Build nets, optimizer and slots of the trainer. Raises ConfigError, also for a cluster that cannot be used."""
    check(args)
    learner = impala.build_learner(args) if isinstance(args, ImpalaArgs) else _build_dqn(args)
    if args.address is None:
        check_store(store_bytes(args, learner), args.num_actors)
    else:
        check_cluster(find_cluster(args.address, args.token_file), args.insecure_cluster, args.num_actors)
    return learner


def _build_dqn(args: DqnArgs) -> DqnLearner:
    obs_space, action_space = probe_env(args.env_id, dqn.ACTIONS)
    rows = apex.rows_per_lane(args)
    spec = ReplaySpec(args.num_envs, obs_space, dqn.stored_actions(action_space), stack_of(args))
    if args.address is None:
        check_replay_memory(args.replay_size, Shards.bytes_needed(*spec.sizes(args.num_actors, rows)))
    device = set_up_torch(args)
    net = dqn.make_net(obs_space, action_space).to(device)
    target_net = copy.deepcopy(net).requires_grad_(False)
    blocks = args.num_actors * apex.blocks_in_flight(args)
    try:
        slots = Slots(episode_stats_spec(args.block_length, args.num_envs), blocks)
    except MemoryError as error:
        raise ConfigError("block-length", args.block_length, str(error), "lower it, or --num-envs") from error
    return DqnLearner(net, target_net, dqn.make_optimizer(args, net), slots, spec, action_space)


def make_run(args: RayRunArgs, learner: Any) -> Run:
    """Make the run; checkpoints of DQN hold the target net too."""
    extra = () if isinstance(args, ImpalaArgs) else ({"target_net": learner.target_net}, dqn.make_policy)
    return Run(args, f"{args.chapter}_{args.algo}", learner.net, learner.optimizer, *extra)


def stack_of(args: CommonArgs) -> int:
    """How many frames an observation is a stack of."""
    return apex.FRAMES if is_atari(args.env_id) else 1


def packer_of(args: RayRunArgs, learner: Any) -> Packer:
    """The packer of what actors send to the trainer."""
    return Packer(learner.slots.spec, stack_of(args) if isinstance(args, ImpalaArgs) else 1)


def layout_of(args: RayRunArgs, learner: Any) -> ActorLayout:
    """Layout of the states that deterministic actors send."""
    if isinstance(args, ImpalaArgs):
        return rollout_layout(args, learner.action_space, learner.net.lstm_size)
    successor_state = writer_state_spec(args.num_envs, args.n_step)
    return ActorLayout(learner.action_space, args.block_length, successor_state, apex.blocks_in_flight(args))


def store_bytes(args: RayRunArgs, learner: Any) -> int:
    """Size of the object store of a cluster of its own: the most that lies in it at the same time."""
    weights = sum(4 * tensor.numel() for tensor in learner.net.state_dict().values())
    if isinstance(args, ImpalaArgs):
        results = (args.num_actors * args.slots_per_actor + HELD) * packer_of(args, learner).nbytes
    else:
        obs = int(np.prod(learner.spec.obs_space.shape)) * learner.spec.obs_space.dtype.itemsize
        block = 2 * args.block_length * args.num_envs * (obs // learner.spec.stack + 64)
        batches = (args.prefetch + HELD) * args.batch_size * (2 * obs + 64)
        results = args.num_actors * (apex.blocks_in_flight(args) + HELD) * block + batches
    return max(results + 4 * weights + (args.num_actors + HELD) * MIB, LEAST_STORE)


def check_store(needed: int, num_actors: int, folder: str = "/dev/shm") -> None:
    """Raise ConfigError if an object store does not fit into shared memory."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        why = f"the object store needs {needed // MIB:,} MiB in {folder}, {free // MIB:,} MiB is free there"
        fix = "lower it or --num-envs, or enlarge it (docker run --shm-size)"
        raise ConfigError("num-actors", num_actors, why, fix)


class RayTrainer:
    """The trainer of a run on a Ray cluster, in a `with` block: its session, actors, replay and gradient steps."""

    def __init__(self, args: RayRunArgs, run: Run, learner: Any):
        self.args, self.run, self.learner = args, run, learner
        self.device = next(learner.net.parameters()).device
        cluster = None if args.address is None else find_cluster(args.address, args.token_file)
        self.session = Session(cluster, run.log, args.num_actors, store_bytes(args, learner))
        self.guard = NonFiniteFilter(run, "grads_not_finite")
        if isinstance(args, ImpalaArgs):
            self.data_guard = NonFiniteFilter(run, "rollouts_not_finite")
        else:
            self.data_guard = NonFiniteFilter(run, "blocks_not_finite", in_a_row=apex.bad_blocks_in_a_row(args))

    def __enter__(self) -> RayTrainer:
        self.session.__enter__()
        cluster, nodes = self.session.cluster, len(self.session.state.nodes)
        size = f"{nodes} {'node' if nodes == 1 else 'nodes'}, {self.session.state.num_cpus:g} CPUs"
        where = "" if cluster is None else f" at {cluster.address}"
        self.run.log.info(f"Ray cluster{where}: {size}; {self.args.num_actors} actors wanted (--num-actors)")
        return self

    def __exit__(self, *exc: Any) -> None:
        self.session.__exit__(*exc)

    @contextmanager
    def start_actors(self, target: Callable[..., Any], *args: Any, **kept: Any) -> Iterator[Actors]:
        """Publish the weights and start a fleet of `target(channel, args, packer, reader, ...)`, with states to resume.

        At the end the run is saved before the fleet and the session end: where the node ends too, as at the shutdown
        of a machine, Ray may end this process meanwhile.
        """
        run, net, session, slots = self.run, self.learner.net, self.session, self.learner.slots
        dtype = compute_dtype(self.args.precision, torch.device("cpu"), net.norm.image)  # where actors compute
        self.weights = weights = Publisher(session, net, dtype, untrained=run.updates == 0)
        states = ResumeStates(self.args, layout_of(self.args, self.learner), start=run.steps)
        run.keep(actors=states, weights=weights, **kept)
        packer, updates = packer_of(self.args, self.learner), run.updates

        def store(slot: int, result: Result) -> Any:
            packer.unpack(result.fields, slots[slot])
            for name, place in {} if states.slots is None else states.slots[slot].items():
                place.numpy()[...] = result.state[name]
            return result.payload

        def warn_if_too_few(event: WorkerEvent) -> None:
            if event.left and run.updates == updates and (warning := warning_of_too_few(self.args, fleet.placed)):
                run.log.warning(warning)

        make_fleet = partial(Fleet, session, target, (self.args, packer, Reader(weights), *args), store)
        actors = Actors(make_fleet, weights, states, run, warn_if_too_few)
        fleet = cast(Fleet, actors.workers)
        run.metrics.gauges["cluster/actors"] = lambda: float(fleet.running)
        run.metrics.gauges["cluster/nodes"] = lambda: float(len(session.state.nodes))
        run.metrics.gauges["cluster/object_store"] = lambda: session.state.store_bytes / MIB
        with actors, ExitStack() as saving:
            saving.push(lambda kind, error, trace: run.finish(error))
            yield actors

    def publish(self) -> None:
        """Publish the weights of the net to the parameter server."""
        with self.run.timing("publishing"):
            self.weights.publish(self.learner.net)

    def start_replay(self) -> RemoteReplay:
        """Start the replay shards of DQN."""
        args, spec = self.args, self.learner.spec
        assert isinstance(args, DqnArgs)
        rows, shard_class = apex.rows_per_lane(args), self.session.actor_class(ReplayShard, num_cpus=0)

        def start(number: int) -> Any:
            actors, seed = (
                len(range(number, args.num_actors, args.num_shards)),
                derive_seeds(args.seed, number, SHARD)[1],
            )
            return shard_class.remote(spec, actors, rows, args.priority_exponent, seed)

        ahead = 0 if args.deterministic else args.prefetch
        replay = RemoteReplay(
            self.session, start, args.num_actors, args.num_shards, batch_size=args.batch_size, ahead=ahead,
            seed=derive_seeds(args.seed, DRAWS)[1], max_restarts=args.max_restarts,
            should_stop=self.run.is_interrupted, device=self.device,
        )  # fmt: skip
        self.run.metrics.gauges["replay/size"] = lambda: float(replay.size)
        apex.log_empty_replay(self.run, args, "replay shards are not saved:")
        apex.show_collecting(self.run, args, lambda: replay.size)
        return replay

    # ---- what every learner does

    def pick(self, **train: Callable[..., None]) -> Callable[..., None]:
        """Return the one of these functions that is named as `--algo` says."""
        return train[self.args.algo]

    def step(self, total: Tensor, metrics: Metrics, samples: int = 0) -> bool:
        """Take a gradient step on a loss of `samples` samples, unless it is not finite; returns whether it did."""
        run, net, optimizer = self.run, self.learner.net, self.learner.optimizer
        with run.timing("learning"):
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            metrics["losses/total"] = total
            metrics["losses/grad_norm"] = norm = nn.utils.clip_grad_norm_(net.parameters(), self.args.max_grad_norm)
            finite = self.guard.check(norm + total.detach(), "the trainer", f"gradient {run.updates + 1}")
            if finite:
                optimizer.step()
                run.record_update(metrics, samples)
        return finite

    def update_norm(self, obs: Tensor) -> None:
        """Update the running mean and variance of observations with these [N, *obs_shape], with --normalize-obs."""
        if self.args.normalize_obs:
            source = "new unrolls" if isinstance(self.args, ImpalaArgs) else "the replay"
            update_norm(self.run, self.learner.net.norm, obs, source)

    def read_rollouts(self, filled: Sequence[Filled], version: int) -> tuple[list[Rollout], list[MessageStats]]:
        """Return a round of rollouts, and the statistics of each; a payload has the version that was acted with."""
        rollouts = [Rollout(**self.learner.slots[slot]) for _, slot, _ in filled]
        stats = [
            MessageStats(rollout.num_steps, episodes_of(rollout), version - acted_with, is_finite(rollout))
            for rollout, (_, _, (acted_with, _)) in zip(rollouts, filled, strict=True)
        ]
        return rollouts, stats

    def insert_blocks(self, replay: RemoteReplay, filled: Sequence[Filled], version: int) -> list[MessageStats]:
        """Have the rows of a round of blocks inserted into their shards, and return the statistics of each."""
        args, stats = self.args, []
        assert isinstance(args, DqnArgs)
        for actor, slot, ((acted_with, finite), rows) in filled:
            replay.insert(actor, rows)
            episodes = finished_episodes(self.learner.slots[slot])
            stats.append(MessageStats(args.block_length * args.num_envs, episodes, version - acted_with, finite))
        return stats


def warning_of_too_few(args: RayRunArgs, placed: int) -> str:
    """Return a warning if with one actor less DQN's replay cannot be filled to `--learning-starts`; else ""."""
    if not isinstance(args, DqnArgs) or args.deterministic:
        return ""
    held, with_one_more = (apex.transitions_held(args, number) for number in (placed, placed + 1))
    if not held < args.learning_starts <= with_one_more:
        return ""
    why = f"the replay of {placed} of {args.num_actors} actors may never hold {args.learning_starts:,} transitions"
    return f"{why} (--learning-starts), so learning may not start: lower it, or --num-actors, or add nodes"


def state_of(args: CommonArgs, fields: Callable[..., dict[str, Any]], *of: Any) -> dict[str, Any]:
    """What a deterministic actor sends of its state: `fields(*of)`; nothing in other runs."""
    if not args.deterministic:
        return {}
    return {name: torch.as_tensor(value).numpy() for name, value in fields(*of).items()}
