"""Settings and presets of Ape-X, chapter 3, shared by DQN, DDPG and TD3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from a3c_mp.config import Between, CommonArgs, Count, Fraction, NonNegative, Positive
from a3c_mp.maths.return_stats import LARGEST_REWARD
from a3c_mp.nets.build import NetSpec

CONTINUOUS: dict[str, Any] = {
    "total_steps": 500_000, "algo": "ddpg", "num_envs": 4,
    "replay_size": 100_000, "learning_starts": 1_000, "replay_ratio": 16.0, "batch_size": 128,
    "learning_rate": 1e-3, "policy_learning_rate": 1e-3, "adam_eps": 1e-8, "target_period": 1, "target_rate": 0.01,
}  # fmt: skip
TD3: dict[str, Any] = {
    **CONTINUOUS, "total_steps": 1_000_000, "algo": "td3",
    "replay_size": 1_000_000, "learning_starts": 8_000, "replay_ratio": 64.0, "batch_size": 256, "noise": 0.2,
    "noise_exponent": 1.0, "learning_rate": 3e-4, "policy_learning_rate": 3e-4,
    "target_period": 2, "target_rate": 0.005,
}  # fmt: skip
VECTORS: dict[str, Any] = {
    "total_steps": 1_000_000, "replay_size": 100_000, "learning_starts": 1_000, "replay_ratio": 16.0, "batch_size": 64,
    "learning_rate": 5e-4, "adam_eps": 1e-5, "target_period": 200,
}  # fmt: skip


@dataclass(frozen=True)
class ReplayArgs(CommonArgs):
    """Settings of learning from a replay buffer: chapter 3, its form on Ray, and populations."""

    replay_size: Count = 200_000
    """replay buffer size (transitions); on Atari each takes 7 KB of shared memory"""
    learning_starts: Count = 20_000
    """transitions in the replay buffer before the first update"""
    epsilon: Fraction = 0.4
    """dqn: epsilon of epsilon-greedy exploration in the first environment; the others have less"""
    ladder_exponent: NonNegative = 7.0
    """dqn: environment i of all N (of one member, in a population) has epsilon ** (1 + this * i / (N - 1))"""
    adam_eps: Annotated[float, Between(1e-12)] = 1.5e-4
    """Adam or RMSProp epsilon"""
    max_grad_norm: Positive = 10.0
    """max gradient norm: gradients are clipped to it; 1e9: not at all"""
    target_period: Count = 2_000
    """target network update interval (updates)"""
    target_rate: Fraction = 1.0
    """Polyak tau of a target network update; 1 copies the online network"""

    @property
    def largest_error(self) -> float:
        """TD errors count as at most this in priorities: an outlier that the scale of rewards does not know yet (see
        `ReturnStats`) would be drawn again and again."""
        return LARGEST_REWARD if self.reward_scale is None else math.inf

    @property
    def error_width(self) -> float:
        """Errors up to this are squared: scaled rewards reach it. Beyond it the sign alone of an error counts, and a
        value that is learned from signs is a median of returns, not their mean."""
        return LARGEST_REWARD if self.reward_scale is None and vars(self).get("num_quantiles", 1) == 1 else 1.0


@dataclass(frozen=True)
class Args(ReplayArgs):
    """Settings of Ape-X: chapter 3."""

    chapter = "apex"
    fixed = (*ReplayArgs.fixed, "algo", "optimizer", "net", "hidden", "num_quantiles")
    continuous = CONTINUOUS
    continuous_td3 = TD3
    vectors = VECTORS

    algo: Literal["dqn", "ddpg", "td3"] = "dqn"
    """dqn: Q-learning for discrete actions; ddpg: deterministic policy gradients for continuous ones (default: of those
    without a preset); td3: the same with two critics, smoothed targets and a delayed policy"""
    num_envs: Annotated[int, Between(1, 4096)] = 16
    """environments for each actor (B)"""
    block_length: Count = 4
    """steps of each environment between two messages of an actor"""
    blocks_per_actor: Annotated[int, Between(1, 64)] = 2
    """blocks of steps in flight for each actor: with 1 it waits for the learner, with 2 it keeps acting"""
    replay_ratio: Annotated[float, Between(0.001)] = 4.0
    """samples per insert: 4 with batches of 32 is an update for every 8 steps; actors or learner wait"""
    batch_size: Count = 32
    """transitions in one gradient, for each learner"""
    prefetch: Annotated[int, Between(0)] = 2
    """batches sampled ahead by a thread; 0 samples each when it is needed, as deterministic runs do"""
    n_step: Count = 3
    """n of n-step returns: rewards in a return"""
    priority_exponent: Fraction = 0.6
    """prioritized replay alpha: 0 samples uniformly, 1 in proportion to TD errors"""
    importance_exponent: Fraction = 0.4
    """prioritized replay beta (importance weights) at the start, annealed linearly to 1 at total-steps"""
    noise: Fraction = 0.4
    """ddpg, td3: standard deviation of the first environment's action noise (1 is half the range of actions)"""
    noise_exponent: NonNegative = 2.0
    """ddpg, td3: environment i of all N has noise ** (1 + this * i / (N - 1))"""
    noise_memory: Annotated[float, Between(0, 0.999)] = 0.0
    """ddpg, td3: correlation of the action noise between steps (Ornstein-Uhlenbeck); 0 is white noise"""
    target_noise: NonNegative = 0.2
    """td3: standard deviation of the noise on the target policy's actions (1 is half the range of actions)"""
    target_noise_clip: NonNegative = 0.5
    """td3: this noise is clipped to it"""
    policy_delay: Count = 2
    """td3: updates of the critics for each one of the policy"""
    learning_rate: NonNegative = 2.5e-4
    """learning rate; in ddpg and td3 that of the critics"""
    learning_rate_end: NonNegative | None = None
    """learning rate at total-steps, annealed linearly from learning-rate, in ddpg and td3 a policy's in proportion;
    None: it stays constant"""
    policy_learning_rate: NonNegative = 1e-4
    """ddpg, td3: learning rate of the policy (actor)"""
    save_replay: bool = False
    """save the replay buffer in checkpoints; without it, a resumed run fills it again before it learns"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """dqn: optimizer; the paper uses rmsprop"""
    net: str = "nature"
    """dqn: net for images: nature (DQN's, 3 convolutions), a3c (A3C's, 2), resnet (9) or deep (IMPALA's, 15); or
    module:function"""
    hidden: tuple[int, ...] = ()
    """units of each hidden layer; default: 128 128 for vectors, 256 for images (dqn), 256 256 (ddpg, td3)"""
    num_quantiles: Annotated[int, Between(1, 200)] = 1
    """dqn: quantiles of the distribution of returns that the net learns (QR-DQN); 1: plain Q-learning, of the mean"""
    num_learners: Annotated[int, Between(1, 64)] = 1
    """learner processes, each with its share of actors and replay; gradients are averaged (all-reduce)"""

    @property
    def games_explore(self) -> bool:  # type: ignore[override]
        return (self.epsilon if self.algo == "dqn" else self.noise) > 0

    @property
    def net_spec(self) -> NetSpec:
        return NetSpec(self.net, hidden=tuple(self.hidden), num_quantiles=self.num_quantiles)

    @property
    def blocks_in_flight(self) -> int:  # for each actor
        return 1 if self.deterministic else self.blocks_per_actor

    @property
    def rows_per_lane(self) -> int:
        """Rows of the replay for each environment."""
        return -(-self.replay_size // (self.num_actors * self.num_envs))

    @property
    def rows_in_flight(self) -> int:
        """Most rows of a lane that blocks in flight can fill: two for each step (see `Replay.make_room`)."""
        return 2 * self.block_length * self.blocks_in_flight


ATARI: dict[str, Any] = {
    "net": "a3c", "learning_starts": 10_000, "replay_ratio": 1.25, "batch_size": 64,  # on two cores all are busy
    "n_step": 5, "epsilon": 0.1, "learning_rate": 5e-4, "adam_eps": 1e-5, "target_period": 200,
}  # fmt: skip
CARTPOLE: dict[str, Any] = {
    "total_steps": 500_000, "num_envs": 4, "replay_size": 50_000, "learning_starts": 500, "replay_ratio": 8.0,
    "batch_size": 64, "n_step": 5, "reward_scale": 0.05,
    "epsilon": 0.1, "learning_rate": 1e-3, "adam_eps": 1e-5, "target_period": 50,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "PongNoFrameskip-v4": {**ATARI, "stop_return": 18.0, "total_steps": 1_200_000},
    "BreakoutNoFrameskip-v4": {**ATARI, "stop_return": 400.0},
    "CartPole-v0": {**CARTPOLE, "stop_return": 195.0},
    "CartPole-v1": {**CARTPOLE, "stop_return": 475.0},
    "Pendulum-v1": {**CONTINUOUS, "total_steps": 25_000, "stop_return": -200.0, "reward_scale": 0.1},
    "HalfCheetah-v5": {**TD3, "reward_scale": 0.1},
    "Hopper-v5": {**TD3, "reward_scale": 0.1},
}
