"""Stable-Baselines3's A2C, PPO or TD3 on Atari or with continuous actions: prints points of its curve, see points.py.

Settings are those of its zoo (for Pendulum-v1 its A2C settings of Pendulum-v0; of MuJoCo's newest versions those of
older ones, TD3 without a feature for the time), or those of CleanRL's ppo_atari.py:
of the zoo's they differ in a clip range that does not fall, in clipped values, and in half the weight of their loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ale_py
import gymnasium
import numpy as np
import torch
from points import STEPS, Points, parser
from stable_baselines3 import A2C, PPO, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

gymnasium.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # not a banner for each environment

BUDGET = 10_000_000
"""agent steps over which the zoo's schedules for Atari fall to 0"""


class Curve(BaseCallback):
    """Prints a point before each rollout, and ends the run when it is over."""

    def __init__(self, points: Points):
        super().__init__()
        self.points, self.goes_on = points, True

    def _on_rollout_start(self) -> None:
        games = self.model.ep_info_buffer or []
        self.goes_on = self.points.add(self.num_timesteps, [game["r"] for game in games])

    def _on_step(self) -> bool:
        return self.goes_on


def fall_from(value: float, budget: int = BUDGET) -> Callable[[float], float]:
    """A schedule from `value` to 0, which SB3 calls with the share of all steps that is left."""
    return lambda left: value * max(0.0, 1 - (1 - left) * STEPS / budget)


class ZooSettings(NamedTuple):
    """How the zoo trains with continuous actions."""

    num_envs: int
    normalize: bool  # observations and rewards
    settings: dict[str, Any]


WIDE: dict[str, Any] = {
    "policy_kwargs": {
        "log_std_init": -2, "ortho_init": False, "activation_fn": torch.nn.ReLU,
        "net_arch": {"pi": [256, 256], "vf": [256, 256]},
    },
}  # fmt: skip
CONTINUOUS = {
    ("a2c", "Pendulum-v1"): ZooSettings(8, True, {
        "n_steps": 8, "gamma": 0.99, "gae_lambda": 0.9, "learning_rate": fall_from(7e-4, 1_000_000),
        "ent_coef": 0.0, "vf_coef": 0.4, "max_grad_norm": 0.5, "use_rms_prop": True, "normalize_advantage": False,
        "use_sde": True, "policy_kwargs": {"log_std_init": -2, "ortho_init": False},
    }),
    ("ppo", "Pendulum-v1"): ZooSettings(4, False, {
        "n_steps": 1024, "gamma": 0.9, "gae_lambda": 0.95, "n_epochs": 10, "ent_coef": 0.0,
        "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4,
    }),
    ("a2c", "MountainCarContinuous-v0"): ZooSettings(4, True, {
        "n_steps": 100, "ent_coef": 0.0, "use_sde": True, "sde_sample_freq": 16,
        "policy_kwargs": {"log_std_init": 0.0, "ortho_init": False},
    }),
    ("ppo", "MountainCarContinuous-v0"): ZooSettings(1, True, {
        "n_steps": 8, "batch_size": 256, "gamma": 0.9999, "gae_lambda": 0.9, "learning_rate": 7.77e-5,
        "ent_coef": 0.00429, "clip_range": 0.1, "n_epochs": 10, "max_grad_norm": 5, "vf_coef": 0.19,
        "use_sde": True, "policy_kwargs": {"log_std_init": -3.29, "ortho_init": False},
    }),
    ("ppo", "HalfCheetah-v5"): ZooSettings(1, True, {
        "n_steps": 512, "batch_size": 64, "gamma": 0.98, "gae_lambda": 0.92, "learning_rate": 2.0633e-5,
        "ent_coef": 0.000401762, "clip_range": 0.1, "n_epochs": 20, "max_grad_norm": 0.8, "vf_coef": 0.58096, **WIDE,
    }),
    ("ppo", "Hopper-v5"): ZooSettings(1, True, {
        "n_steps": 512, "batch_size": 32, "gamma": 0.999, "gae_lambda": 0.99, "learning_rate": 9.80828e-5,
        "ent_coef": 0.00229519, "clip_range": 0.2, "n_epochs": 5, "max_grad_norm": 0.7, "vf_coef": 0.835671, **WIDE,
    }),
    **{("td3", f"{name}-v5"): ZooSettings(1, False, {"learning_starts": 10_000}) for name in ("HalfCheetah", "Hopper")},
}  # fmt: skip


def settings_of(args: Any) -> dict[str, Any]:
    """Arguments of the algorithm."""
    if args.algo == "ppo":
        fixed = {"batch_size": 256, "n_epochs": 4, "ent_coef": 0.01, "vf_coef": 0.5}
        schedules = {"learning_rate": fall_from(2.5e-4), "clip_range": fall_from(0.1)}
        cleanrl = {"clip_range": 0.1, "clip_range_vf": 0.1, "vf_coef": 0.25} if args.cleanrl else {}
        return {"n_steps": 128, **fixed, **schedules, **cleanrl}
    optimizer = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}}
    return {"n_steps": 5, "ent_coef": 0.01, "vf_coef": 0.25, "policy_kwargs": optimizer}


def make_env(args: Any, zoo: ZooSettings | None) -> VecEnv:
    if zoo is None:
        num_envs = {"a2c": 16, "ppo": 8}[args.algo]
        return VecFrameStack(make_atari_env(args.env_id, n_envs=num_envs, seed=args.seed), n_stack=4)
    env = make_vec_env(args.env_id, n_envs=zoo.num_envs, seed=args.seed)
    return VecNormalize(env, gamma=zoo.settings.get("gamma", 0.99)) if zoo.normalize else env


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--algo", choices=("a2c", "ppo", "td3"), default="a2c")
    flags.add_argument("--cleanrl", action="store_true", help="PPO on Atari with CleanRL's settings")
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    zoo = CONTINUOUS.get((args.algo, args.env_id))
    if zoo is None and "NoFrameskip" not in args.env_id:
        flags.error(f"there are no settings for {args.env_id}")
    settings = zoo.settings if zoo else settings_of(args)
    env = make_env(args, zoo)
    algorithm = {"a2c": A2C, "ppo": PPO, "td3": TD3}[args.algo]
    if args.algo == "td3":
        num_actions = env.action_space.shape[0]
        settings["action_noise"] = NormalActionNoise(np.zeros(num_actions), np.full(num_actions, 0.1))
    model = algorithm("MlpPolicy" if zoo else "CnnPolicy", env, device="cpu", seed=args.seed, **settings)
    model.learn(total_timesteps=STEPS, callback=Curve(Points(args)))
    env.close()


if __name__ == "__main__":
    main()
