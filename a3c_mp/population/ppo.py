"""PPO in a population: settings, and how a member gets its rollouts, with chapter 1's collector."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from a3c_mp.algorithms.actor_critic import obs_for_stats
from a3c_mp.algorithms.actor_critic_settings import CONTINUOUS, CONTINUOUS_EPOCHS, PPOArgs
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.rollout import Rollout, empty_rollout, is_finite, rollout_spec
from a3c_mp.errors import ConfigError
from a3c_mp.nets.precision import acting_dtype
from a3c_mp.population import settings
from a3c_mp.population.genes import COMMON, GENES, Gene
from a3c_mp.population.member import MemberGeneration
from a3c_mp.population.population import PopulationMemory
from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.wrappers import GuardedEnvs

VECTORS: dict[str, Any] = {
    "generation_steps": 16_384, "unroll_length": 128, "update_epochs": 4, "learning_rate": 5e-4, "eval_episodes": 10,
}  # fmt: skip


@dataclass(frozen=True)
class Args(settings.Args, PPOArgs):
    """Settings of PPO in a population."""

    family = "actor_critic"
    gene_table: ClassVar = {
        **{name: GENES[name] for name in (*COMMON, "update_epochs", "clip_ratio", "entropy_coef")},
        "learning_rate": Gene(1e-5, 1e-2),
        "batch_size": Gene(32, 256, integer=True),
    }
    continuous: ClassVar = {**PPOArgs.continuous, "generation_steps": 16_384}
    vectors: ClassVar = VECTORS
    images: ClassVar = {
        "convolutions": (16, 8, 4, 32, 4, 2),  # Mnih et al. 2016
        "hidden": (128,),  # of policy and value each
        "genes": ("learning_rate=1e-4:1e-3", "entropy_coef=0.003:0.05"),
        "init": "same",  # until the first points are won all are equally fit, and chance would choose among draws
        "population": 4, "num_envs": 16, "generation_steps": 40_000, "eval_episodes": 4, "confirm_episodes": 20,
        "learning_rate": 5e-4, "batch_size": 128, "update_epochs": 3,
    }  # fmt: skip

    algo: Literal["dqn", "ppo"] = "ppo"
    genes: tuple[str, ...] = ("learning_rate", "batch_size", "update_epochs")
    """hyperparameters that mutate, NAME, or with range and step (a factor) NAME=LOW:HIGH or NAME=LOW:HIGH:STEP; also
    gamma, n_step, max_grad_norm, clip_ratio, entropy_coef"""
    # Flags of chapter 1 that members do not have: schedules are what genes are for.
    slots_per_actor: ClassVar = 1  # type: ignore[misc]
    learning_rate_end: ClassVar = 0.0  # type: ignore[misc]
    anneal_steps: ClassVar = 0  # type: ignore[misc]
    entropy_coef_end: ClassVar = None  # type: ignore[misc]
    entropy_steps: ClassVar = 0  # type: ignore[misc]
    optimizer: ClassVar = "adam"  # type: ignore[misc]
    rmsprop_eps: ClassVar = 0.0  # type: ignore[misc]
    net: ClassVar = "nature"  # type: ignore[misc]
    log_std_init: ClassVar = 0.0  # type: ignore[misc]
    mean_limit: ClassVar = 3.0  # type: ignore[misc]
    explore_envs: ClassVar = 0.0  # type: ignore[misc]
    explore_steps: ClassVar = 0  # type: ignore[misc]
    explore_after: ClassVar = 0  # type: ignore[misc]

    def check(self) -> None:
        if self.batch_size > self.unroll_length * self.num_envs:
            why = f"a rollout has only {self.unroll_length} * {self.num_envs} samples"
            raise ConfigError("batch-size", self.batch_size, why, "lower it, or raise --unroll-length or --num-envs")
        if "n_step" in self.evolving and self.returns != "nstep":
            raise ConfigError("genes", "n_step", f"--returns={self.returns} does not use it", "add --returns nstep")

    @property
    def rounds(self) -> int:
        """A multiple of the unroll length."""
        return -(-super().rounds // self.unroll_length) * self.unroll_length


PRESETS: dict[str, dict[str, Any]] = {
    "PongNoFrameskip-v4": {
        "stop_return": 18.0, "total_steps": 8_000_000,
        "update_epochs": 2, "repeat_fraction": 0.5, "entropy_coef": 0.02,
    },
    "CartPole-v1": {"stop_return": 475.0, "total_steps": 1_000_000, "update_epochs": 4},
    "Pendulum-v1": {**CONTINUOUS, "gamma": 0.9, "stop_return": -200.0, "update_epochs": CONTINUOUS_EPOCHS},
    "LunarLander-v3": {**VECTORS, "stop_return": 200.0, "total_steps": 4_000_000, "reward_scale": None},
}  # fmt: skip


class Generation(MemberGeneration):
    """One generation of a member, from its own rollouts alone."""

    metrics = ("losses/policy", "losses/value", "policy/entropy")

    def __init__(self, args: Any, memory: PopulationMemory, channel: WorkerChannel, env: GuardedEnvs, seed: int):
        super().__init__(args, memory, channel, env, seed)
        dtype = acting_dtype(args.precision, self.net)
        # A function that held `self` would be a cycle: a finished generation would keep its memory on a GPU for long.
        memory_view = SimpleNamespace(place=lambda net: net.to(dtype))
        view = SimpleNamespace(memory=memory_view, actor=self.place, restored=None, seed_key=(seed,))
        self.collector = RolloutCollector(self.args, env, view, copy.deepcopy(self.net))
        spaces, extra = (env.single_observation_space, env.single_action_space), args.rollout_fields
        self.rollout = empty_rollout(rollout_spec(args.unroll_length, args.num_envs, *spaces, extra=extra))

    def rollouts(self) -> Iterator[Rollout]:
        """Collect the generation's rollouts, each with the newest weights; yields those that are finite."""
        num = self.args.unroll_length
        for start in range(0, self.args.rounds, num):
            self.collector.net.load_state_dict(self.net.state_dict())
            self.collector.collect(rollout := self.rollout)
            self.steps += rollout.reward.numel()
            for name in ("done", "episode_return", "episode_length"):
                self.result[name][start : start + num] = getattr(rollout, name)
            self.scale_rewards(rollout.reward, rollout.done)
            if not is_finite(rollout):
                self.counts["transitions_not_finite"] += rollout.reward.numel()
                continue
            if self.args.normalize_obs:
                obs = obs_for_stats(rollout.obs, self.net.norm.has_images)
                self.counts["obs_values_far"] += self.net.norm.update(obs)
            yield rollout


PARTS = (Args, PRESETS, Generation)  # of an `Algorithm`, besides what a member does
