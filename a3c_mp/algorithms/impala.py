"""IMPALA (Espeholt et al. 2018): settings, presets, batches of unrolls, and replay of unrolls."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import gymnasium
import torch
from torch import Tensor

from a3c_mp.algorithms.actor_critic import allocate_slots, make_optimizer
from a3c_mp.algorithms.actor_critic_settings import RolloutArgs
from a3c_mp.config import Between, Count, NonNegative
from a3c_mp.data.rollout import Rollout, minibatches, rollout_spec
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.processes.slots import Slots, Spec, layout
from a3c_mp.run.preflight import check_learners, check_replay_memory, probe_env, set_up_torch
from a3c_mp.run.progress import RunState

CARTPOLE: dict[str, Any] = {
    "total_steps": 1_000_000,
    "replay_proportion": 0.9375,
    "learning_rate": 1e-3,
    "reward_scale": 0.05,
    "normalize_advantages": False,
}
FALLING_RATE = {"anneal_steps": 100_000, "learning_rate_end": 1e-4}
"""where good policies otherwise stay just below the goal: each learned step moves them too far"""
MOUNTAIN_CAR: dict[str, Any] = {
    "total_steps": 300_000,
    "num_envs": 8,
    "unroll_length": 32,
    "entropy_coef": 0.0,
    "value_coef": 1.0,
    "reward_scale": 0.1,
    "replay_proportion": 0.875,
    "noise_steps": 16,
}
CONTINUOUS: dict[str, Any] = {
    "total_steps": 2_000_000,
    "num_envs": 8,
    "unroll_length": 16,
    "batch_unrolls": 4,
    "entropy_coef": 0.0,
    "value_coef": 1.0,
    "reward_scale": 0.03,
    "normalize_advantages": False,  # small batches have too few for a mean and a deviation
}
PENDULUM = {**CONTINUOUS, "total_steps": 1_000_000, "unroll_length": 5, "gamma": 0.9, "learning_rate": 1e-3}
VECTORS = {"num_envs": 8, "replay_proportion": 0.875, "reward_scale": 0.1}
IMAGES = {"net": "a3c", "num_envs": 16, "replay_proportion": 0.75}  # each step is learned from four times


@dataclass(frozen=True)
class Args(RolloutArgs):
    """Settings of IMPALA: chapter 4."""

    chapter = "impala"
    continuous: ClassVar = CONTINUOUS
    vectors: ClassVar = VECTORS
    images: ClassVar = IMAGES

    unroll_length: Count = 20
    """steps of each environment in one unroll (T)"""
    batch_unrolls: Count = 16
    """batch size: unrolls (T steps of one environment) in a gradient of each learner; without replay an upper limit"""
    lstm: bool = False
    """recurrent policy: add an LSTM to the network"""
    vtrace: bool = True
    """apply V-trace; without it, data is treated as on-policy"""
    clip_rho: NonNegative = 1.0
    """V-trace rho-bar: max importance weight of a TD error"""
    clip_c: NonNegative = 1.0
    """V-trace c-bar: max importance weight of the trace; below 1 it acts like GAE lambda"""
    clip_pg_rho: NonNegative = 1.0
    """V-trace pg-rho-bar: max importance weight of a policy-gradient advantage"""
    replay_proportion: Annotated[float, Between(0, 0.99)] = 0.0
    """share of a batch that is sampled from the replay buffer; more where new unrolls do not divide evenly"""
    replay_size: Count = 1000
    """replay buffer size (unrolls), for --replay-proportion"""
    num_learners: Annotated[int, Between(1, 64)] = 1
    """learner processes, each with its share of the actors; gradients are averaged (all-reduce)"""
    force_lag: Annotated[int, Between(0, 1000)] = 0
    """artificial policy lag: actors use weights that many versions old, to measure the effect of V-trace"""

    @property
    def clips(self) -> tuple[float, float, float]:
        """Rho-bar, c-bar and pg-rho-bar of V-trace."""
        return self.clip_rho, self.clip_c, self.clip_pg_rho

    @property
    def fresh_unrolls(self) -> int:
        """Number of new unrolls in a batch."""
        return max(1, round(self.batch_unrolls * (1 - self.replay_proportion)))


PRESETS: dict[str, dict[str, Any]] = {
    "PongNoFrameskip-v4": {"stop_return": 18.0, "total_steps": 2_000_000},
    "BreakoutNoFrameskip-v4": {"stop_return": 400.0},
    "CartPole-v0": {**CARTPOLE, "num_envs": 1, "stop_return": 195.0},
    "CartPole-v1": {**CARTPOLE, **FALLING_RATE, "num_envs": 4, "stop_return": 475.0},
    "Pendulum-v1": {**PENDULUM, "stop_return": -200.0},
    "MountainCarContinuous-v0": {**MOUNTAIN_CAR, "stop_return": 90.0},
}


def rollouts_per_round(args: Args) -> int:
    """Return how many rollouts, of B unrolls each, a learner takes at a time: enough for a batch.

    In a deterministic run it takes one rollout of each of its actors.

    Raises:
        ConfigError: a learner's actors collect too few new unrolls for a batch, or the replay has too little room.
    """
    num_actors = args.num_actors // args.num_learners
    if args.replay_proportion and args.fresh_unrolls == args.batch_unrolls:
        why = f"rounded, it leaves no replayed unroll among {args.batch_unrolls}"
        raise ConfigError("replay-proportion", args.replay_proportion, why, "raise --batch-unrolls, or set it to 0")
    if args.fresh_unrolls > num_actors * args.num_envs:
        why = f"{args.fresh_unrolls} new unrolls are needed, a learner's actors have {num_actors} * {args.num_envs}"
        raise ConfigError("batch-unrolls", args.batch_unrolls, why, "lower it, or raise --num-envs")
    rollouts = num_actors if args.deterministic else -(-args.fresh_unrolls // args.num_envs)
    if args.replay_proportion and args.replay_size < rollouts * args.num_envs:
        why = f"a learner takes {rollouts} * {args.num_envs} unrolls at a time"
        raise ConfigError("replay-size", args.replay_size, why, "raise it")
    return rollouts


class UnrollReplay:
    """Replay buffer of the newest `capacity` unrolls (Espeholt et al. 2018, section 5.2.2).

    Args:
        spec: shapes and dtypes of a rollout.
        capacity: unrolls; 0 keeps none.
    """

    def __init__(self, spec: Spec, capacity: int, device: torch.device):
        self.unrolls = Rollout(
            **{
                name: torch.zeros(time, capacity, *shape, dtype=dtype, device=device)
                for name, ((time, _, *shape), dtype) in spec.items()
            }
        )
        self.capacity = capacity
        self.added = 0

    def state_dict(self) -> dict[str, Any]:
        """Return all stored unrolls, without the room that is still empty."""
        held = min(self.added, self.capacity)
        kept = {"added": self.added, "capacity": self.capacity}
        # Slices would be saved with the whole memory that they are slices of.
        fields = {n: f if held == self.capacity else f[:, :held].clone() for n, f in self.unrolls._asdict().items()}
        return {**kept, **fields}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`. Raises ValueError for another capacity, RuntimeError for other shapes."""
        if state["capacity"] != self.capacity:
            raise ValueError(f"it has room for {state['capacity']} unrolls, not {self.capacity}")
        for name, field in self.unrolls._asdict().items():
            field[:, : state[name].shape[1]] = state[name]
        self.added = state["added"]

    def add(self, unrolls: Rollout) -> None:
        """Store the unrolls of a rollout in place of the oldest ones."""
        num_unrolls = unrolls.action.shape[1]
        if self.capacity == 0:
            return
        assert num_unrolls <= self.capacity, (num_unrolls, self.capacity)
        places = (self.added + torch.arange(num_unrolls, device=unrolls.action.device)) % self.capacity
        for stored, new in zip(self.unrolls, unrolls, strict=True):
            stored[:, places] = new
        self.added += num_unrolls

    def sample(self, num_unrolls: int, rng: torch.Generator) -> Rollout:
        """Sample unrolls uniformly, with replacement."""
        drawn = torch.randint(min(self.added, self.capacity), (num_unrolls,), generator=rng)
        return select(self.unrolls, drawn.to(self.unrolls.action.device))


def select(unrolls: Rollout, columns: Tensor) -> Rollout:
    """Return the unrolls [T, B, ...] at int64 indices into B."""
    return Rollout(*(field.index_select(1, columns) for field in unrolls))


def batches(args: Args, unrolls: Rollout, replay: UnrollReplay, rng: torch.Generator) -> Iterator[Rollout]:
    """Store new unrolls in the replay, and yield batches with each of them once, filled up with replayed ones."""
    num_unrolls, device = unrolls.action.shape[1], unrolls.action.device
    replay.add(unrolls)
    for columns in minibatches(num_unrolls, args.fresh_unrolls, 1, rng, device):
        batch = select(unrolls, columns)
        if replay.capacity and args.batch_unrolls > args.fresh_unrolls:
            old = replay.sample(args.batch_unrolls - len(columns), rng)
            batch = Rollout(*(torch.cat(fields, 1) for fields in zip(batch, old, strict=True)))
        yield batch


class DelayLine:
    """Delayed copy of a net, as it was `delay` calls ago, for `--force-lag`; with a delay of 0 the net itself."""

    def __init__(self, delay: int):
        self.past: deque[ActorCritic] = deque(maxlen=delay + 1)

    def __call__(self, net: ActorCritic) -> ActorCritic:
        if self.past.maxlen == 1:
            return net
        self.past.append(copy.deepcopy(net))
        return self.past[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the stored copies of the net, oldest first."""
        return {"past": [net.state_dict() for net in self.past]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; call this object with a net before."""
        nets = [copy.deepcopy(self.past[0]) for _ in state["past"]]
        for net, saved in zip(nets, state["past"], strict=True):
            net.load_state_dict(saved)
        self.past.clear()
        self.past.extend(nets)


def warn_of_lost_unrolls(args: Args, run: RunState) -> None:
    """Log a warning if a resumed deterministic run has lost the replayed unrolls of learners 1, 2, ..."""
    if args.deterministic and run.steps and args.replay_proportion and args.num_learners > 1:
        run.log.warning("checkpoints hold no replayed unrolls of learners 1, 2, ...; determinism is lost from here on")


class LearnerState(NamedTuple):
    """State of an IMPALA learner: network, optimizer, slots and replay."""

    net: ActorCritic
    optimizer: torch.optim.Optimizer
    slots: Slots
    replay: UnrollReplay  # of the newest unrolls
    action_space: gymnasium.Space


def build_learner(args: Args, rank: int = 0) -> LearnerState:
    """Build network, optimizer, slots and replay of learner `rank`. Raises ConfigError for inconsistent settings."""
    check_learners(args.num_learners, args.num_actors, args.cuda)
    rollouts_per_round(args)
    if args.explorers and not args.vtrace:
        raise ConfigError("explore-envs", args.explore_envs, "V-trace corrects for it", "leave out --no-vtrace")
    obs_space, action_space = probe_env(args.env_id)
    device = set_up_torch(args, rank)
    net = make_actor_critic(obs_space, action_space, args.net_spec).to(device)
    spec = rollout_spec(args.unroll_length, args.num_envs, obs_space, action_space, net.lstm_size)
    slots = allocate_slots(args, spec, args.num_actors // args.num_learners)
    capacity = args.replay_size if args.replay_proportion else 0
    if device.type == "cpu" and rank == 0:
        check_replay_memory(capacity, args.num_learners * capacity * layout(spec)[1] // args.num_envs)
    try:
        replay = UnrollReplay(spec, capacity, device)
    except torch.OutOfMemoryError as error:  # of the GPU
        raise ConfigError("replay-size", args.replay_size, one_line(error), "lower it") from error
    return LearnerState(net, make_optimizer(args, net), slots, replay, action_space)
