"""IMPALA (Espeholt et al. 2018): settings, presets, batches of unrolls, and replay of unrolls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from a3c_mp.algorithms.actor_critic import A3CSetup, action_metrics, obs_for_stats, stats_of
from a3c_mp.algorithms.actor_critic_settings import RolloutArgs
from a3c_mp.config import Between, Count, NonNegative
from a3c_mp.data.rollout import Rollout, join, minibatches, to_device
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.maths.schedules import set_learning_rate
from a3c_mp.processes.slots import Spec
from a3c_mp.run.learner import Learner
from a3c_mp.run.preflight import check_learners, check_replay_memory

CARTPOLE: dict[str, Any] = {
    "total_steps": 1_000_000, "replay_proportion": 0.9375, "learning_rate": 1e-3,
    "reward_scale": 0.05, "normalize_advantages": False,
}  # fmt: skip
CONTINUOUS: dict[str, Any] = {
    "total_steps": 2_000_000, "num_envs": 8, "unroll_length": 16, "replay_proportion": 0.875,
    "entropy_coef": 0.0, "value_coef": 1.0, "reward_scale": None,
    "mean_limit": 1.0,  # with more, policies get stuck at the bounds: no clipped ratio slows them down
    "normalize_advantages": False,  # with them, means drift out of the bounds before values are known
}  # fmt: skip


@dataclass(frozen=True)
class Args(RolloutArgs):
    """Settings of IMPALA: chapter 4."""

    chapter = "impala"
    continuous: ClassVar = CONTINUOUS
    vectors: ClassVar = {"total_steps": 2_000_000, "num_envs": 8, "replay_proportion": 0.875}
    images: ClassVar = {"net": "a3c", "num_envs": 16, "replay_proportion": 0.75}  # each step is learned from four times

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
    """share of a batch that is sampled from the replay buffer: of all its unrolls but one at most, and more where new
    unrolls do not divide evenly"""
    replay_size: Count = 1000
    """replay buffer size (unrolls), for --replay-proportion"""
    num_learners: Annotated[int, Between(1, 64)] = 1
    """learner processes, each with its share of the actors; gradients are averaged (all-reduce)"""

    @property
    def fresh_unrolls(self) -> int:
        """Number of new unrolls in a batch."""
        return max(1, round(self.batch_unrolls * (1 - self.replay_proportion)))


PRESETS: dict[str, dict[str, Any]] = {
    "PongNoFrameskip-v4": {"stop_return": 18.0, "total_steps": 2_000_000},
    "BreakoutNoFrameskip-v4": {"stop_return": 400.0},
    "CartPole-v0": {**CARTPOLE, "num_envs": 1, "stop_return": 195.0},
    "CartPole-v1": {  # at a constant 1e-3, policies stay just below the goal
        **CARTPOLE, "num_envs": 4, "anneal_steps": 100_000, "learning_rate_end": 1e-4, "stop_return": 475.0,
    },
    "Pendulum-v1": {**CONTINUOUS, "total_steps": 600_000, "gamma": 0.9, "stop_return": -200.0},
    "MountainCarContinuous-v0": {
        "total_steps": 300_000, "num_envs": 8, "unroll_length": 32,
        "entropy_coef": 0.0, "value_coef": 1.0, "reward_scale": 0.1, "replay_proportion": 0.875, "noise_steps": 16,
        "stop_return": 90.0,
    },
}  # fmt: skip


def rollouts_per_round(args: Args) -> int:
    """Return how many rollouts, of B unrolls each, a learner takes at a time: enough for a batch, or one of each actor.

    Raises ConfigError if its actors collect too few new unrolls for a batch, or the replay has too little room.
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
    """Replay buffer of the newest `capacity` unrolls, 0 for none (Espeholt et al. 2018, section 5.2.2)."""

    def __init__(self, spec: Spec, capacity: int, device: torch.device):
        self.capacity, self.added = capacity, 0
        fields = {
            name: torch.zeros(time, capacity, *shape, dtype=dtype, device=device)
            for name, ((time, _, *shape), dtype) in spec.items()
        }
        self.unrolls = Rollout.of(fields)

    def state_dict(self) -> dict[str, Any]:
        held = min(self.added, self.capacity)
        # Without the empty room: a slice would be saved with the whole memory that it is a slice of. Copies may not fit
        # on a GPU.
        kept = self.unrolls
        if held < self.capacity:
            kept = kept.map(lambda field: torch.stack([step[:held].cpu() for step in field]))
        return {"added": self.added, "capacity": self.capacity, "unrolls": kept.fields()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError for another capacity, RuntimeError for other shapes."""
        if state["capacity"] != self.capacity:
            raise ValueError(f"it has room for {state['capacity']} unrolls, not {self.capacity}")
        for name, field in self.unrolls.fields().items():
            saved = state["unrolls"][name]
            field[:, : saved.shape[1]] = saved
        self.added = state["added"]

    def add(self, unrolls: Rollout) -> Tensor:
        """Store the unrolls of a rollout in place of the oldest ones; return where, int64 [B] on the CPU."""
        num_unrolls = unrolls.action.shape[1]
        assert num_unrolls <= self.capacity, (num_unrolls, self.capacity)
        places = (self.added + torch.arange(num_unrolls)) % self.capacity
        on_device = to_device(places, unrolls.action.device)
        for stored, new in zip(self.unrolls.fields().values(), unrolls.fields().values(), strict=True):
            stored[:, on_device] = new
        self.added += num_unrolls
        return places

    def draw(self, num_unrolls: int, rng: torch.Generator) -> Tensor:
        """Draw the places of unrolls uniformly, with replacement, int64 [num_unrolls] on the CPU."""
        return torch.randint(min(self.added, self.capacity), (num_unrolls,), generator=rng)


def select(unrolls: Rollout, columns: Tensor) -> Rollout:
    """Return the unrolls [T, B, ...] at int64 indices into B."""
    return unrolls.map(lambda field: field.index_select(1, columns))


def batches(
    args: Args, unrolls: Rollout, replay: UnrollReplay, rng: torch.Generator, num_whole: int = 0
) -> Iterator[Rollout]:
    """Store new unrolls in the replay, and yield batches with each of them once, filled up with replayed ones.

    They are as many as of `num_whole` unrolls, those of a whole round: learners take as many steps as others also where
    some of their actors have no place.
    """
    num_unrolls, device = unrolls.action.shape[1], unrolls.action.device
    number = -(-(num_whole or num_unrolls) // args.fresh_unrolls)
    source, places = (replay.unrolls, replay.add(unrolls)) if replay.capacity else (unrolls, torch.arange(num_unrolls))
    for new in minibatches(num_unrolls, -(-num_unrolls // number), rng, torch.device("cpu")):
        columns = places[new]
        if replay.capacity:
            columns = torch.cat([columns, replay.draw(args.batch_unrolls - len(new), rng)])
        yield select(source, to_device(columns, device))


class ImpalaSetup(A3CSetup):
    """What a learner of IMPALA makes before a run: also the replay of unrolls."""

    def __init__(self, args: Args, rank: int = 0):
        check_learners(args)
        rollouts_per_round(args)
        if args.explorers and not args.vtrace:
            raise ConfigError("explore-envs", args.explore_envs, "V-trace corrects for it", "leave out --no-vtrace")
        super().__init__(args, rank)
        capacity, device = args.replay_size if args.replay_proportion else 0, next(self.net.parameters()).device
        if device.type == "cpu" and rank == 0:
            check_replay_memory(capacity, args.local_learners * capacity * self.slots.slot_bytes // args.num_envs)
        try:
            self.replay = UnrollReplay(self.slots.spec, capacity, device)
        except torch.OutOfMemoryError as error:  # of the GPU
            raise ConfigError("replay-size", args.replay_size, one_line(error), "lower it") from error
        self.kept = {"replay": self.replay}

    def begin(self, learner: Learner) -> None:
        args = learner.args
        if args.replay_proportion - (share := 1 - args.fresh_unrolls / args.batch_unrolls) > 0.02:
            text = f"{args.fresh_unrolls} of the {args.batch_unrolls} unrolls in a batch are new, at least"
            text += f": {share:g} of it is replayed, not {args.replay_proportion:g}; raise --batch-unrolls"
            learner.run.log.warning(text)
        if args.deterministic and learner.steps and self.replay.capacity and learner.group.size > 1:
            text = "checkpoints hold no replayed unrolls of learners 1, 2, ...; determinism is lost from here on"
            learner.run.log.warning(text)

    def rounds(self, learner: Learner) -> Iterator[Iterator[Rollout]]:
        """Yield, for each round, the batches of its finite unrolls; several learners need all of them to be."""
        args, size = learner.args, rollouts_per_round(learner.args)
        while filled := learner.take(size):
            rollouts = [Rollout.of(self.slots[slot]) for _, slot, _ in filled]
            stats = list(map(stats_of, rollouts, [learner.lag(version) for _, _, version in filled]))
            set_learning_rate(learner)
            is_finite = learner.record(filled, stats).finite  # in all learners, which take steps together
            num_whole = size * args.num_envs
            if not is_finite and learner.group.size == 1:  # the others of the round can be learned from
                rollouts = [rollout for rollout, each in zip(rollouts, stats, strict=True) if each.finite]
                is_finite, num_whole = bool(rollouts), 0
            if is_finite:
                with learner.run.timing("learning"):
                    unrolls = join([rollout.to(learner.device) for rollout in rollouts])
                    learner.update_norm(obs_for_stats(unrolls.obs, learner.net.norm.has_images), "new unrolls")
                    learner.run.record_metrics(action_metrics(learner.setup.layout.action_space, unrolls))
                    yield batches(args, unrolls, self.replay, learner.rng, num_whole)
            if not learner.end_round():
                return
            learner.release(filled)
