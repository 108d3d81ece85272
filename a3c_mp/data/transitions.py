"""Transition collection for replay (chapter 3): transitions go to the actor's shard, episode statistics to a slot."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.data.actor import Collector
from a3c_mp.data.rollout import write_step
from a3c_mp.processes.pool import Token
from a3c_mp.processes.slots import Spec
from a3c_mp.replay import EnvStep, Writer
from a3c_mp.wrappers import GuardedEnvs


class TransitionCollector(Collector):
    """Transition collector: steps B environments for a block at a time and writes transitions to the replay.

    `env` is from `make_envs`, `make_policy` makes the exploration policy: `dqn.Policy` or `ddpg.Policy`, also td3's.
    """

    def __init__(self, args: Any, env: GuardedEnvs, net: nn.Module, make_policy: Callable[..., Any], channel: Any):
        self.net = channel.memory.place(net)
        super().__init__(args, env, channel)
        restored = self.successor_state
        self.writer = Writer(self.memory.more, channel.worker, args.n_step, args.gamma, restored)
        self.writer.largest_error = args.largest_error
        self.policy = make_policy(args, self.net, env.single_action_space, self.obs, channel.actor, restored)

    def fill(self, token: Token) -> int:
        """Append a block of steps to the replay, its statistics to a slot; return the version of the weights."""
        version = self.memory.load(self.net, token)
        self.writer.reward_scale = float(self.net.reward_scale)  # 1 until weights are published: first priorities only
        if self.memory.running is not None:  # the ladder of exploration spans the actors that run
            self.policy.place(*self.memory.running)
        nothing_learned = self.memory.weights.untrained and version == 0  # dqn then acts at random
        self.collect(block := self.memory.slots[token.slot], warm_up=nothing_learned)
        self.memory.states.write(token.slot, self.state_fields, block)
        return version

    def collect(self, block: dict[str, Tensor], warm_up: bool = False) -> None:
        """Take a block of steps: transitions go to the shard, episode statistics to `block`."""
        policy = self.policy
        rng = np.random.default_rng(self.seeds(self.rollouts)[1])
        self.actions = []  # as the environments get them
        for t in range(len(block["done"])):
            mask = self.env.mask
            action, q, value = policy.act(self.obs, rng, mask, warm_up)
            self.actions.append(policy.to_env(action))
            given = self.actions[-1].copy()  # environments may write to theirs
            next_obs, reward, terminated, truncated, infos = self.env.step(given)
            final_obs, final_mask = infos["final_obs"] if truncated.any() else None, infos.get("final_mask")
            step = EnvStep(
                self.obs, action, clip(reward) if self.args.reward_clip else reward, terminated, truncated, q, value,
                final_obs=final_obs,
                final_value=None if final_obs is None else policy.value(final_obs, final_mask),
                life_lost=infos.get("life_lost") if self.args.life_loss_terminal else None,
                mask=mask,
                final_mask=final_mask,
            )  # fmt: skip
            self.writer.step(step)
            self.stats.step(reward, terminated | truncated)
            write_step(block, t, reward=reward, done=self.stats.done, **self.stats.totals())
            self.obs = next_obs
        self.rollouts += 1

    def state_fields(self, block: dict[str, Tensor]) -> dict[str, Any]:
        """The state after a block, for `ResumeStates.write`."""
        games = self.game_fields(np.stack(self.actions), block["done"])
        return {**games, **self.writer.fields(), **self.policy.fields()}


def clip(reward: np.ndarray) -> np.ndarray:
    """The sign of rewards; NaN of infinite ones, too, which are not to be learned from."""
    return np.where(np.isfinite(reward), np.sign(reward), np.float32(math.nan))


def block_spec(block_length: int, num_envs: int) -> Spec:
    """Shapes and dtypes of what an actor sends with each block: raw rewards, and episode statistics."""
    return {"reward": ((block_length, num_envs), torch.float64), **episode_stats_spec(block_length, num_envs)}


def episode_stats_spec(block_length: int, num_envs: int) -> Spec:
    """Shapes and dtypes of a block's episode statistics."""
    steps = (block_length, num_envs)
    return {
        "done": (steps, torch.bool),
        "episode_return": (steps, torch.float64),
        "episode_length": (steps, torch.int32),
    }
