"""Stable-Baselines3's A2C or PPO on Atari or with continuous actions: prints points of its curve, see points.py.

Settings are those of its zoo (for Pendulum-v1 its A2C settings of Pendulum-v0). With `--net matched` A2C has the net
of `--net nature`: shared convolutions, then 512 units each for policy and value; `bench/throughput.py --compare sb3`
uses that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ale_py
import gymnasium
import torch
from points import STEPS, Points, parser
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize
from torch import Tensor, nn

gymnasium.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # not a banner for each environment

BUDGET = 10_000_000
"""agent steps over which the zoo's schedules for Atari fall to 0"""


class Convolutions(BaseFeaturesExtractor):
    """The convolutions of Mnih et al. 2015, flattened, without the linear layer that SB3's `NatureCNN` adds.

    Written again: importing a3c_mp here would pin the threads of SB3 too.
    """

    def __init__(self, observation_space: gymnasium.spaces.Box):
        channels = observation_space.shape[0]
        convs = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            features = convs(torch.zeros(1, *observation_space.shape)).shape[1]
        super().__init__(observation_space, features)
        self.convs = convs

    def forward(self, obs: Tensor) -> Tensor:
        return self.convs(obs)


MATCHED = {"features_extractor_class": Convolutions, "net_arch": {"pi": [512], "vf": [512]}, "activation_fn": nn.ReLU}


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


SMALL_NOISE = {"log_std_init": -2, "ortho_init": False}
CONTINUOUS = {
    ("a2c", "Pendulum-v1"): ZooSettings(
        8,
        True,
        {
            "n_steps": 8, "gamma": 0.99, "gae_lambda": 0.9, "learning_rate": fall_from(7e-4, 1_000_000),
            "ent_coef": 0.0, "vf_coef": 0.4, "max_grad_norm": 0.5, "use_rms_prop": True, "normalize_advantage": False,
            "use_sde": True, "policy_kwargs": SMALL_NOISE,
        },
    ),
    ("ppo", "Pendulum-v1"): ZooSettings(
        4,
        False,
        {
            "n_steps": 1024, "gamma": 0.9, "gae_lambda": 0.95, "n_epochs": 10, "ent_coef": 0.0,
            "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4,
        },
    ),
    ("a2c", "MountainCarContinuous-v0"): ZooSettings(
        4,
        True,
        {
            "n_steps": 100, "ent_coef": 0.0, "use_sde": True, "sde_sample_freq": 16,
            "policy_kwargs": {"log_std_init": 0.0, "ortho_init": False},
        },
    ),
    ("ppo", "MountainCarContinuous-v0"): ZooSettings(
        1,
        True,
        {
            "n_steps": 8, "batch_size": 256, "gamma": 0.9999, "gae_lambda": 0.9, "learning_rate": 7.77e-5,
            "ent_coef": 0.00429, "clip_range": 0.1, "n_epochs": 10, "max_grad_norm": 5, "vf_coef": 0.19,
            "use_sde": True, "policy_kwargs": {"log_std_init": -3.29, "ortho_init": False},
        },
    ),
}  # fmt: skip


def settings_of(args: Any) -> dict[str, Any]:
    """Arguments of the algorithm."""
    if args.algo == "ppo":
        fixed = {"batch_size": 256, "n_epochs": 4, "ent_coef": 0.01, "vf_coef": 0.5}
        schedules = {"learning_rate": fall_from(2.5e-4), "clip_range": fall_from(0.1)}
        return {"n_steps": args.n_steps or 128, **fixed, **schedules}
    if args.net == "matched":
        return {"n_steps": args.n_steps or 5, "ent_coef": 0.01, "policy_kwargs": MATCHED}
    optimizer = {"optimizer_class": RMSpropTFLike, "optimizer_kwargs": {"eps": 1e-5}}
    return {"n_steps": args.n_steps or 5, "ent_coef": 0.01, "vf_coef": 0.25, "policy_kwargs": optimizer}


def make_atari(args: Any) -> VecEnv:
    env = make_atari_env(
        args.env_id,
        n_envs=args.num_envs or {"a2c": 16, "ppo": 8}[args.algo],
        seed=args.seed,
        vec_env_cls=SubprocVecEnv if args.vec_env == "subproc" else DummyVecEnv,
        vec_env_kwargs={"start_method": "fork"} if args.vec_env == "subproc" else None,  # seconds faster than spawn
    )
    return VecFrameStack(env, n_stack=4)


def make_continuous(args: Any, zoo: ZooSettings) -> VecEnv:
    env = make_vec_env(args.env_id, n_envs=zoo.num_envs, seed=args.seed)
    return VecNormalize(env, gamma=zoo.settings.get("gamma", 0.99)) if zoo.normalize else env


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--algo", choices=("a2c", "ppo"), default="a2c")
    flags.add_argument("--net", choices=("zoo", "matched"), default="zoo")
    flags.add_argument("--num-envs", type=int, default=0, help="environments in all (Atari); 0: the zoo's number")
    flags.add_argument("--n-steps", type=int, default=0, help="steps of each environment in a rollout; 0: the zoo's")
    flags.add_argument("--vec-env", choices=("dummy", "subproc"), default="dummy", help="one process, or one for each")
    flags.add_argument("--cuda", action="store_true", help="keep the net on the GPU")
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    zoo = CONTINUOUS.get((args.algo, args.env_id))
    if zoo is None and "NoFrameskip" not in args.env_id:
        flags.error(f"there are no settings for {args.env_id}")
    settings = zoo.settings if zoo else settings_of(args)
    env = make_continuous(args, zoo) if zoo else make_atari(args)
    algorithm = {"a2c": A2C, "ppo": PPO}[args.algo]
    policy, device = "MlpPolicy" if zoo else "CnnPolicy", "cuda" if args.cuda else "cpu"
    model = algorithm(policy, env, device=device, seed=args.seed, **settings)
    model.learn(total_timesteps=STEPS, callback=Curve(Points(args)))
    env.close()


if __name__ == "__main__":
    main()
