"""rl_games' PPO with EnvPool on Atari: prints points of its learning curve, see points.py.

Settings are those of its configuration for Pong (rl_games/configs/atari/ppo_pong_envpool.yaml), on the CPU.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from points import WINDOW, Points, parser
from rl_games.common.algo_observer import AlgoObserver
from rl_games.torch_runner import Runner

CONV = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
"""filters, kernel size, stride"""


class Finished(Exception):
    """The run is over."""


class Curve(AlgoObserver):
    """Prints a point after each rollout, and ends the run when it is over."""

    def __init__(self, points: Points):
        self.points, self.games = points, deque(maxlen=WINDOW)

    def after_init(self, algo: Any) -> None:
        self.algo = algo

    def process_infos(self, infos: Any, done_indices: Any) -> None:
        done = done_indices.cpu().numpy().flatten()
        self.games.extend(infos["scores"][done].tolist())

    def after_steps(self) -> None:
        if not self.points.add(self.algo.frame, self.games):
            raise Finished


def network() -> dict[str, Any]:
    """The net of Mnih et al. 2015 with 512 units, shared by policy and value."""
    convs = [{"filters": n, "kernel_size": size, "strides": stride, "padding": 0} for n, size, stride in CONV]
    cnn = {"permute_input": False, "type": "conv2d", "activation": "elu", "convs": convs}
    cnn |= {"initializer": {"name": "default"}, "regularizer": {"name": "None"}}
    orthogonal = {"name": "orthogonal_initializer", "gain": 2**0.5}
    mlp = {"units": [512], "activation": "elu", "initializer": orthogonal}
    return {"name": "actor_critic", "separate": False, "space": {"discrete": None}, "cnn": cnn, "mlp": mlp}


def config(args: Any) -> dict[str, Any]:
    game = args.env_id.removesuffix("NoFrameskip-v4")
    env = {"env_name": f"{game}-v5", "episodic_life": True, "num_threads": args.threads, "seed": args.seed}
    return {
        "name": "peer", "device": "cpu", "device_name": "cpu", "env_name": "envpool", "env_config": env,
        "reward_shaper": {"min_val": -1, "max_val": 1}, "score_to_win": 1e9, "max_epochs": 10**6,
        "normalize_advantage": True, "normalize_value": True, "normalize_input": True,
        "gamma": 0.999, "tau": 0.95, "learning_rate": 3e-4, "lr_schedule": "adaptive", "kl_threshold": 0.01,
        "grad_norm": 10, "truncate_grads": True, "entropy_coef": 0.01, "critic_coef": 1,
        "ppo": True, "e_clip": 0.2, "clip_value": False,
        "num_actors": 24, "horizon_length": 256, "minibatch_size": 768, "mini_epochs": 3,
    }  # fmt: skip


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    runner = Runner(Curve(Points(args)))
    algo, model = {"name": "a2c_discrete"}, {"name": "discrete_a2c"}
    params = {"seed": args.seed, "algo": algo, "model": model, "network": network(), "config": config(args)}
    runner.load({"params": params})
    try:
        runner.run({"train": True, "play": False})
    except Finished:
        return


if __name__ == "__main__":
    main()
