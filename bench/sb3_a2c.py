"""Stable-Baselines3's A2C on Atari, for `bench/throughput.py --compare sb3`: prints (seconds, steps) pairs as JSON.

The net is that of `ConvActorCritic`: shared convolutions, then 512 units each for policy and value. Environments,
optimizer and everything else are as Stable-Baselines3 has them. It imports nothing of a3c_mp, which would limit OpenMP
to one thread.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Literal

import ale_py
import gymnasium
import torch
import tyro
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack
from torch import Tensor, nn

gymnasium.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # not a banner for each environment


@dataclass(frozen=True)
class Args:
    env_id: str = "PongNoFrameskip-v4"
    """Atari id with frame skip 1"""
    num_envs: int = 64
    """environments in all"""
    n_steps: int = 5
    """agent steps of each environment in one gradient"""
    seconds: float = 40
    """how long to train (s)"""
    vec_env: Literal["dummy", "subproc"] = "dummy"
    """one after the other in this process, or a process each"""
    threads: int = 1
    """CPU threads of torch"""
    cuda: bool = False
    """keep the net on the GPU"""
    seed: int = 1
    """seed of weights, environments and sampling"""


class Convolutions(BaseFeaturesExtractor):
    """The convolutions of Mnih et al. 2015, flattened, without the linear layer that SB3's `NatureCNN` adds."""

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


class Clock(BaseCallback):
    """Notes the time and the steps learned from before each rollout, and ends the run after `seconds`."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.started = seconds, time.perf_counter()
        self.points: list[tuple[float, int]] = []

    def _on_rollout_start(self) -> None:
        self.points.append((time.perf_counter() - self.started, self.num_timesteps))

    def _on_step(self) -> bool:
        return time.perf_counter() - self.started < self.seconds


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(args.threads)
    env = make_atari_env(
        args.env_id,
        n_envs=args.num_envs,
        seed=args.seed,
        vec_env_cls=SubprocVecEnv if args.vec_env == "subproc" else DummyVecEnv,
        vec_env_kwargs={"start_method": "fork"} if args.vec_env == "subproc" else None,  # seconds faster than spawn
    )
    model = A2C(
        "CnnPolicy",
        VecFrameStack(env, n_stack=4),
        n_steps=args.n_steps,
        ent_coef=0.01,
        policy_kwargs={
            "features_extractor_class": Convolutions,
            "net_arch": {"pi": [512], "vf": [512]},
            "activation_fn": nn.ReLU,
        },
        device="cuda" if args.cuda else "cpu",
        seed=args.seed,
    )
    clock = Clock(args.seconds)
    model.learn(total_timesteps=10**9, callback=clock)
    env.close()
    print(json.dumps(clock.points))


if __name__ == "__main__":
    main()
