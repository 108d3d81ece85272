"""Transition collection for replay (chapter 3): act for a block of steps, append n-step transitions to the replay.

The transitions go to the actor's shard of the replay; a slot in shared memory holds the block's episode statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from a3c_mp.config import RewardArgs
from a3c_mp.data.actor import Games
from a3c_mp.data.episodes import Episode, EpisodeStats, episodes_at
from a3c_mp.processes.pool import ActorChannel, Token
from a3c_mp.processes.slots import Spec
from a3c_mp.replay import EnvStep, Writer
from a3c_mp.seeds import derive_seeds
from wrappers import action_mask


class Policy(Protocol):
    """Interface of an exploration policy: epsilon-greedy (`dqn.Policy`) or action noise (`ddpg.Policy`).

    Masks, bool [B, A], say which discrete actions are allowed; None: all.
    """

    def start_block(self, seed: int) -> None: ...
    def fields(self) -> dict[str, np.ndarray]: ...
    def act(
        self, obs: np.ndarray, mask: np.ndarray | None = None, warm_up: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
    def value(self, obs: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray: ...
    def to_env(self, action: np.ndarray) -> np.ndarray: ...


class TransitionCollector:
    """Transition collector: steps B environments for a block at a time and writes transitions to the replay.

    Args:
        args: `ReplayArgs` of the chapter, with the n of n-step transitions.
        env: from `make_envs`.
        net: of the policy; the newest weights are loaded into it.
        make_policy: `dqn.Policy` or `ddpg.Policy`, the exploration policy.
        channel: to the learner, with the memory that both share.
    """

    def __init__(
        self, args: Any, env: VectorEnv, net: nn.Module, make_policy: Callable[..., Policy], channel: ActorChannel
    ):
        self.args, self.env, self.channel, self.memory = args, env, channel, channel.memory
        self.net = net.to(self.memory.weights.device, self.memory.dtype)
        self.games = games = Games(env, channel)
        self.stats, self.obs, self.blocks = games.stats, games.obs, games.rollouts
        self.writer = Writer(self.memory.more, channel.worker, args.n_step, args.gamma, games.successor_state)
        self.policy = make_policy(
            args, self.net, env.single_action_space, self.obs, channel.actor, games.successor_state
        )

    def fill(self, token: Token) -> int:
        """Append a block of steps to the replay, its statistics to a slot; return the version of the weights."""
        version = self.memory.load(self.net, token)
        nothing_learned = self.memory.weights.untrained and version == 0  # dqn then acts at random
        self.collect(block := self.memory.slots[token.slot], warm_up=nothing_learned)
        self.memory.states.write(token.slot, self.state_fields, block)
        return version

    def collect(self, block: dict[str, Tensor], warm_up: bool = False) -> None:
        """Take a block of steps: transitions go to the shard, episode statistics to `block`."""
        policy = self.policy
        policy.start_block(derive_seeds(self.args.seed, *self.channel.seed_key, self.blocks)[1])
        self.actions = []  # as the environments get them
        for t in range(len(block["done"])):
            mask = action_mask(self.env)
            action, q, value = policy.act(self.obs, mask, warm_up)
            self.actions.append(policy.to_env(action))
            next_obs, reward, terminated, truncated, infos = self.env.step(self.actions[-1])
            final_obs = infos["final_obs"] if truncated.any() else None
            final_mask = infos.get("final_mask")
            final_value = None if final_obs is None else policy.value(final_obs, final_mask)
            life_lost = infos.get("life_lost") if self.args.life_loss_terminal else None
            reward_learned = reward_to_learn(self.args, reward)
            step = EnvStep(self.obs, action, reward_learned, terminated, truncated, q, value)
            step = step._replace(life_lost=life_lost, mask=mask, final_mask=final_mask)
            self.writer.step(step._replace(final_obs=final_obs, final_value=final_value))
            self.stats.step(reward, terminated | truncated)
            write_stats(block, t, self.stats)
            self.obs = next_obs
            self.channel.beat()
        self.blocks += 1

    def state_fields(self, block: dict[str, Tensor]) -> dict[str, Any]:
        """Return the state after a block, for `ResumeStates.write`."""
        actions = torch.from_numpy(np.stack(self.actions))
        games = self.games.state_fields(actions, block["done"], torch.from_numpy(self.obs))
        return {**games, **self.writer.fields(), **self.policy.fields()}


def reward_to_learn(args: RewardArgs, reward: np.ndarray) -> np.ndarray:
    """Clip and scale rewards [B] for learning, as the settings say."""
    return args.reward_scale * (np.sign(reward) if args.reward_clip else reward)


def episode_stats_spec(block_length: int, num_envs: int) -> Spec:
    """Return shapes and dtypes of a block's episode statistics, for `Slots`."""
    steps = (block_length, num_envs)
    return {
        "done": (steps, torch.bool),
        "episode_return": (steps, torch.float32),
        "episode_length": (steps, torch.int32),
    }


def write_stats(block: dict[str, Tensor], t: int, stats: EpisodeStats) -> None:
    """Write to step t of a block which episodes ended there, with the return and length of every episode."""
    block["done"][t] = torch.from_numpy(stats.done)
    block["episode_return"][t] = torch.from_numpy(stats.returns)
    block["episode_length"][t] = torch.from_numpy(stats.lengths)


def finished_episodes(block: dict[str, Tensor]) -> list[Episode]:
    """Return the episodes that ended inside a block, in order of time."""
    return episodes_at(block["done"], block["episode_return"], block["episode_length"])
