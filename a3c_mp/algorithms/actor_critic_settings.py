"""Settings and presets of the actor-critics: what chapters 1, 2, 4, 5 and 7 share, A3C's (1, 2, 5) and PPO's (1, 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from a3c_mp.config import Between, CommonArgs, Count, Fraction, NonNegative, Positive
from a3c_mp.data.exploration import STRETCH
from a3c_mp.data.rollout import InfoField
from a3c_mp.nets.build import NetSpec

CARTPOLE: dict[str, Any] = {"total_steps": 1_000_000, "num_envs": 8, "batch_size": 64, "learning_rate": 1e-3}
CONTINUOUS: dict[str, Any] = {
    "total_steps": 300_000, "num_envs": 8, "unroll_length": 200, "batch_size": 64,
    "learning_rate": 1e-3, "entropy_coef": 0.0, "value_coef": 1.0, "reward_scale": None,
}  # fmt: skip
MUJOCO = {"total_steps": 2_000_000, "unroll_length": 256, "learning_rate": 3e-4}
VECTORS = {"total_steps": 2_000_000, "num_envs": 8, "unroll_length": 128, "batch_size": 64}
CONTINUOUS_EPOCHS, VECTOR_EPOCHS, IMAGE_EPOCHS = 10, 4, 3
"""epochs of each rollout, where it can be learned from several times"""
SPARSE: dict[str, Any] = {"explore_envs": 0.06, "explore_steps": 100, "explore_after": 2_048}
"""exploration where no rewards come by chance, as in Freeway: one of 16 environments"""


@dataclass(frozen=True)
class RolloutArgs(CommonArgs):
    """Settings of rollouts and of nets that are a policy and a value: chapters 1, 2, 4, 5 and 7."""

    fixed = (*CommonArgs.fixed, "optimizer", "net", "hidden", "lstm", "mean_limit", "log_std_init")

    unroll_length: Count = 32
    """rollout length: steps of each environment in one rollout (T)"""
    slots_per_actor: Annotated[int, Between(1, 64)] = 1
    """rollouts in flight for each actor: with 1 it waits while the learner uses its rollout, with 2 it keeps acting"""
    learning_rate: NonNegative = 5e-4
    """learning rate at step 0 of the run, also of a resumed one, annealed linearly to learning-rate-end over
    anneal-steps"""
    learning_rate_end: NonNegative = 0.0
    """learning rate after anneal-steps; as high as learning-rate, it stays constant"""
    anneal_steps: Annotated[int, Between(0)] = 0
    """agent steps over which the learning rate is annealed, then it stays; 0: total-steps"""
    optimizer: Literal["adam", "rmsprop"] = "adam"
    """optimizer; the A3C and IMPALA papers use rmsprop"""
    adam_eps: Annotated[float, Between(1e-12)] = 1e-5
    """Adam epsilon"""
    rmsprop_eps: Annotated[float, Between(1e-12)] = 1e-5
    """RMSProp epsilon (decay 0.99); the papers' 0.01 and 0.1 are for summed losses, here losses are means"""
    max_grad_norm: Positive = 1.0
    """max gradient norm: gradients are clipped to this norm; 1e9: not clipped"""
    entropy_coef: NonNegative = 0.01
    """entropy coefficient: weight of the entropy bonus in the loss"""
    value_coef: NonNegative = 2.0
    """value loss coefficient, of half the squared error (2.0 is SB3's vf_coef 1.0)"""
    normalize_advantages: bool = True
    """normalize advantages to mean 0 and variance 1, over a whole rollout, in IMPALA over each batch"""
    net: str = "nature"
    """net for images: nature (DQN's, 3 convolutions), a3c (2), resnet (9) or deep (IMPALA's, 15); or module:function"""
    hidden: tuple[int, ...] = (64, 64)
    """units of each hidden layer of the MLPs for policy and value (observations that are vectors)"""
    log_std_init: Annotated[float, Between(-20, 2)] = 0.0
    """continuous actions: initial log standard deviation of the Gaussian policy (0: half the distance of two bounds)"""
    mean_limit: Positive = 3.0
    """continuous actions with bounds: limit of the mean of the Gaussian policy; 1: the bounds"""
    noise_steps: Count = 1
    """resample the noise of actions every N steps of an environment (SB3: sde_sample_freq); 1: each step"""
    explore_envs: Fraction = 0.0
    """share of environments, of four or more one at least, that repeat random actions; the mean return omits them"""
    explore_steps: Annotated[int, Between(1, STRETCH)] = 20
    """longest time that an exploring environment repeats an action (agent steps)"""
    explore_after: Annotated[int, Between(0)] = 0
    """explore only after the actor's other environments have had no reward for this many steps in total; 0: always"""
    lstm = False  # a flag of IMPALA only
    rollout_fields: ClassVar[Mapping[str, InfoField]] = {}
    """fields that a chapter adds to its rollouts, by the name that `infos` has them under"""

    @property
    def net_spec(self) -> NetSpec:
        return NetSpec(self.net, self.lstm, tuple(self.hidden), self.log_std_init, self.mean_limit)


@dataclass(frozen=True)
class A3CArgs(RolloutArgs):
    """Settings of A3C: chapters 1, 2 and 5."""

    continuous: ClassVar = {**CONTINUOUS, **MUJOCO}
    vectors: ClassVar = VECTORS

    batch_size: Count = 128
    """minibatch size: samples in one gradient; at most the whole rollout, T * B"""
    returns: Literal["gae", "nstep"] = "gae"
    """advantage estimator: GAE or n-step returns"""
    gae_lambda: Fraction = 0.95
    """GAE lambda (--returns gae)"""
    n_step: Count = 4
    """n of n-step returns: rewards in a return (--returns nstep)"""
    clip_ratio: NonNegative = 0.2
    """PPO clip range: no gradient once the advantage has moved the ratio of probabilities this far from 1"""


@dataclass(frozen=True)
class PPOArgs(A3CArgs):
    """Settings of chapters 1 and 5, which learn from a rollout several times."""

    continuous: ClassVar = {**CONTINUOUS, **MUJOCO, "update_epochs": CONTINUOUS_EPOCHS}
    vectors: ClassVar = {**VECTORS, "update_epochs": VECTOR_EPOCHS}
    images: ClassVar = {"net": "a3c", "num_envs": 16, "update_epochs": IMAGE_EPOCHS, **SPARSE}

    update_epochs: Count = 1
    """PPO epochs: passes over a rollout; the first one takes every sample"""
    entropy_coef_end: NonNegative | None = None
    """entropy coefficient after entropy-steps, annealed linearly from entropy-coef; None: it stays constant"""
    entropy_steps: Annotated[int, Between(0)] = 0
    """agent steps over which the entropy coefficient is annealed, then it stays; 0: total-steps"""
    repeat_fraction: Fraction = 1.0
    """share of the samples that epochs after the first repeat, largest absolute advantages first; 1: plain PPO"""


PRESETS: dict[str, dict[str, Any]] = {
    "PongNoFrameskip-v4": {"stop_return": 18.0, "total_steps": 2_000_000},
    "BreakoutNoFrameskip-v4": {"stop_return": 400.0},
    "CartPole-v0": {**CARTPOLE, "stop_return": 195.0},
    "CartPole-v1": {**CARTPOLE, "stop_return": 475.0},
    "Pendulum-v1": {**CONTINUOUS, "gamma": 0.9, "stop_return": -200.0},
    "MountainCarContinuous-v0": {
        **CONTINUOUS, "unroll_length": 256, "batch_size": 256, "learning_rate": 3e-4, "noise_steps": 16,
        "stop_return": 90.0,
    },
    "HalfCheetah-v5": {  # no game ends early, so little noise explores enough, and none of it is lost at the bounds
        **CONTINUOUS, **MUJOCO, "total_steps": 1_000_000, "gamma": 0.98, "gae_lambda": 0.92, "log_std_init": -2.0,
    },
    "Hopper-v5": {**CONTINUOUS, **MUJOCO, "total_steps": 1_000_000},
}  # fmt: skip
PPO_PRESETS = PRESETS | {
    name: preset | {"update_epochs": VECTOR_EPOCHS if "CartPole" in name else CONTINUOUS_EPOCHS}
    for name, preset in PRESETS.items()
    if "NoFrameskip" not in name
}
# Fewer passes; schedules for runs of some 500,000 steps, in which a policy that only loses stays random for longer.
PPO_PRESETS["PongNoFrameskip-v4"] = PRESETS["PongNoFrameskip-v4"] | {
    "update_epochs": 2, "repeat_fraction": 0.5, "anneal_steps": 800_000, "learning_rate_end": 1e-4,
    "entropy_coef": 0.03, "entropy_coef_end": 0.005, "entropy_steps": 400_000,
}  # fmt: skip
# A net that sees the ball, and less exploration in the end: one random action late in a game loses it.
PPO_PRESETS["BreakoutNoFrameskip-v4"] = PRESETS["BreakoutNoFrameskip-v4"] | {
    "total_steps": 5_000_000, "net": "resnet", "update_epochs": 2, "repeat_fraction": 0.5,
    "entropy_coef_end": 0.001, "entropy_steps": 2_400_000,
}  # fmt: skip
