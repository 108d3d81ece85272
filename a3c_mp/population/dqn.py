"""DQN in a population: settings, and how a member gets transitions and batches, in a replay that all members share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from a3c_mp.algorithms import dqn
from a3c_mp.algorithms.apex import NORM_PERIOD, ladder, stacked_frames
from a3c_mp.algorithms.apex_settings import ReplayArgs
from a3c_mp.config import Count
from a3c_mp.data.rollout import write_step
from a3c_mp.data.transitions import clip
from a3c_mp.errors import ConfigError
from a3c_mp.nets.precision import autocast
from a3c_mp.population import settings
from a3c_mp.population.genes import COMMON, GENES
from a3c_mp.population.member import MemberGeneration
from a3c_mp.population.population import PopulationMemory
from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.replay import Batch, EnvStep, Replay, Shards, Writer
from a3c_mp.wrappers import GuardedEnvs


@dataclass(frozen=True)
class Args(settings.Args, ReplayArgs):
    """Settings of DQN in a population."""

    fixed = (*settings.Args.fixed, "replay_size", "reward_clip", "life_loss_terminal")  # as its replay holds them
    images: ClassVar = {
        "convolutions": (32, 8, 4, 64, 4, 2, 64, 3, 1),  # Mnih et al. 2015
        "hidden": (256,),
        "genes": ("learning_rate=5e-5:2e-3", "batch_size=16:128", "learn_every=8:64"),
        "init": "same",  # until the first points are won all are equally fit, and chance would choose among draws
        "checkpoint_seconds": 600.0,  # the replay is saved, too
        "population": 4, "generation_steps": 10_000, "eval_episodes": 4, "confirm_episodes": 20,
        "learning_starts": 10_000, "learning_rate": 2.5e-4, "batch_size": 64, "learn_every": 16,
        "n_step": 5, "epsilon": 0.1, "target_period": 200,
    }  # fmt: skip
    gene_table: ClassVar = {name: GENES[name] for name in (*COMMON, "learn_every", "target_period", "epsilon")}

    genes: tuple[str, ...] = ("learning_rate", "batch_size", "learn_every")
    """hyperparameters that mutate, NAME, or with range and step (a factor) NAME=LOW:HIGH or NAME=LOW:HIGH:STEP; also
    gamma, n_step, target_period, epsilon, max_grad_norm"""
    learn_every: Count = 4
    """agent steps for each update (train frequency), in the first generation"""
    n_step: Count = 1
    """first n of n-step returns: rewards in a return"""
    replay_size: Count = 100_000
    """transitions of earlier generations, of all members, that each member can sample"""
    learning_starts: Count = 1_000
    """transitions in the replay buffer before a member's first update; its actions are random until then"""
    target_period: Count = 100

    def check(self) -> None:
        if self.learning_starts > self.replay_size // 2:
            why = f"the replay has room for {self.replay_size}"
            raise ConfigError("learning-starts", self.learning_starts, why, "use half of it at most")


PRESETS: dict[str, dict[str, Any]] = {
    "PongNoFrameskip-v4": {"stop_return": 18.0, "total_steps": 4_000_000},
    "CartPole-v1": {"stop_return": 475.0, "total_steps": 400_000, "reward_scale": 0.05},
    "Acrobot-v1": {"stop_return": -90.0, "total_steps": 600_000, "reward_scale": 0.1},
    "LunarLander-v3": {
        "stop_return": 200.0, "total_steps": 1_000_000, "reward_scale": 0.05, "generation_steps": 8_000,
        "eval_episodes": 10,  # of up to 1,000 steps
        "hidden": (128, 128), "batch_size": 128,
    },
}  # fmt: skip


class Generation(MemberGeneration):
    """One generation of a member. It samples its own new transitions and those of all finished generations."""

    metrics = ("losses/value", "values/q")
    actions = dqn.ACTIONS

    @classmethod
    def share(cls, args: Args, spaces: tuple[Any, Any]) -> Shards:
        """Allocate the replay; a lane has its share of it, and room for a generation of at most two rows a step."""
        num, stack = args.population, stacked_frames(args.env_id)
        rows = -(-args.replay_size // (num * args.num_envs)) + 2 * args.rounds + 1 + stack
        return Shards(num, args.num_envs, rows, *spaces, stack)

    def __init__(self, args: Any, memory: PopulationMemory, channel: WorkerChannel, env: GuardedEnvs, seed: int):
        super().__init__(args, memory, channel, env, seed)
        shards = memory.shards.at(memory.rows.numpy())  # what others write from now on stays unseen
        self.exploration = np.random.default_rng(seed)
        self.replay = Replay(shards, priority_exponent=0.0, seed=seed + 1)
        for shard in range(shards.num_shards):
            self.replay.make_room(shard, 2 * args.rounds)
            self.replay.ingest(shard)
        self.writer = Writer(shards, self.place, n_step=1, gamma=1.0)  # n and discount factor are each learner's own
        self.counts["transitions_not_finite"] -= self.replay.rejected  # those of earlier generations are counted
        self.learning_steps = 0
        self.epsilons = ladder(self.args.epsilon, self.args.ladder_exponent, 0, args.num_envs, 1)
        self.obs, self.t = env.reset()[0], 0

    def act(self) -> None:
        """Take a step in all environments, epsilon-greedy or at first random, and store its transitions."""
        obs, mask, learning_starts = self.obs, self.env.mask, self.args.learning_starts
        with torch.inference_mode(), autocast(self.args.precision, self.net):
            q = dqn.allowed_q(self.net(torch.from_numpy(obs).to(self.device))[0].cpu().numpy(), mask)
        explores = self.exploration.random(len(q)) < (self.epsilons if self.replay.size >= learning_starts else 1.0)
        action = np.where(explores, dqn.random_actions(self.exploration, q.shape, mask), q.argmax(axis=1))
        self.obs, reward, terminated, truncated, infos = self.env.step(action)
        done = terminated | truncated
        self.stats.step(reward, done)
        write_step(self.result, self.t, done=done, **self.stats.totals())
        self.scale_rewards(torch.from_numpy(reward)[None], torch.from_numpy(done)[None])
        self.t += 1
        self.steps += len(q)
        # The end of a generation interrupts games as a time limit does: they are worth what would have followed.
        truncated = truncated | (self.t == self.args.rounds)
        final_obs, final_mask = self.obs.copy(), self.env.mask
        if done.any():
            final_obs[done] = infos["final_obs"][done]
            if final_mask is not None:
                final_mask = np.where(done[:, None], infos["final_mask"], final_mask)
        unknown = np.zeros(len(q), np.float32)  # values would give priorities, which uniform sampling does not need
        life_lost = infos.get("life_lost") if self.args.life_loss_terminal else None
        learned = clip(reward) if self.args.reward_clip else reward
        step = EnvStep(obs, action, learned, terminated, truncated, unknown, unknown, final_obs, unknown)
        self.writer.step(step._replace(life_lost=life_lost, mask=mask, final_mask=final_mask))
        self.replay.ingest(self.place)
        if self.replay.size >= learning_starts:
            self.learning_steps += len(q)

    def batches(self) -> Iterator[Batch]:
        """Sample a batch for each update that is due: one for every `learn_every` steps, of all generations."""
        args = self.args
        before = self.number * args.rounds * args.num_envs
        due = (before + self.learning_steps) // args.learn_every - before // args.learn_every
        while self.counts["updates"] < due:
            batch = self.replay.extend(self.replay.sample(args.batch_size), args.n_step, args.gamma)
            if args.normalize_obs and self.counts["updates"] % NORM_PERIOD == 0:
                self.counts["obs_values_far"] += self.net.norm.update(batch.obs)
            yield batch._replace(reward=self.reward_scale * batch.reward).to(self.device)

    def end(self) -> None:
        self.counts["transitions_not_finite"] += self.replay.rejected
        self.result["rows"][:] = torch.from_numpy(self.writer.row)
        super().end()


PARTS = (Args, PRESETS, Generation)  # of an `Algorithm`, besides what a member does
