"""Blocks: what an actor of the replay chapter does between two messages, and what it tells of it.

The transitions themselves go to the replay. A block, a slot in shared memory, says which episodes ended meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from a3c_mp.config import LearningArgs
from a3c_mp.replay import Writer
from a3c_mp.rollout import Episode, EpisodeStats
from a3c_mp.slots import Spec


class Policy(Protocol):
    """How an actor explores; see `dqn.Policy` and `ddpg.Policy`."""

    def act(self, obs: np.ndarray, warm_up: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def value(self, obs: np.ndarray) -> np.ndarray: ...
    def to_env(self, action: np.ndarray) -> np.ndarray: ...


class BlockCollector:
    """B environments of the replay chapter, from one block of steps to the next.

    Args:
        args: what is learned from.
        env: from `make_vec_env`.
        writer: of the actor's shard, where everything seen goes.
        beat: called once for each environment step.
    """

    def __init__(self, args: LearningArgs, env: VectorEnv, writer: Writer, beat: Callable[[], None]):
        self.args, self.env, self.writer, self.beat = args, env, writer, beat
        self.obs, _ = env.reset()
        self.stats = EpisodeStats(env.num_envs)

    def collect(self, block: dict[str, Tensor], policy: Policy, warm_up: bool = False) -> None:
        """Take a block of steps; the transitions go to the shard, what became of episodes into `block`."""
        for t in range(len(block["done"])):
            action, q, value = policy.act(self.obs, warm_up)
            next_obs, reward, terminated, truncated, infos = self.env.step(policy.to_env(action))
            final_obs = infos["final_obs"] if truncated.any() else None
            self.writer.step(
                self.obs, action, reward_to_learn(self.args, reward), terminated, truncated, q, value,
                final_obs=final_obs, final_value=None if final_obs is None else policy.value(final_obs),
                life_lost=infos.get("life_lost") if self.args.life_loss_terminal else None,
            )  # fmt: skip
            self.stats.step(reward, terminated | truncated)
            write_stats(block, t, self.stats)
            self.obs = next_obs
            self.beat()


def reward_to_learn(args: LearningArgs, reward: np.ndarray) -> np.ndarray:
    """The reward [B] as the settings want it learned from."""
    return args.reward_scale * (np.sign(reward) if args.reward_clip else reward)


def block_spec(block_length: int, num_envs: int) -> Spec:
    """Shapes and dtypes of what an actor tells of each step of a block, for `Slots`: episodes that ended."""
    steps = (block_length, num_envs)
    return {
        "done": (steps, torch.bool),
        "episode_return": (steps, torch.float32),
        "episode_length": (steps, torch.int32),
    }


def write_stats(block: dict[str, Tensor], t: int, stats: EpisodeStats) -> None:
    """Note in step t of a block which episodes have just ended, and how."""
    block["done"][t] = torch.from_numpy(stats.done)
    block["episode_return"][t] = torch.from_numpy(stats.returns)
    block["episode_length"][t] = torch.from_numpy(stats.lengths)


def finished_episodes(block: dict[str, Tensor]) -> list[Episode]:
    """The episodes that ended inside a block, in order of time."""
    done = block["done"]
    returns, lengths = block["episode_return"][done].tolist(), block["episode_length"][done].tolist()
    return [Episode(*pair) for pair in zip(returns, lengths, strict=True)]
