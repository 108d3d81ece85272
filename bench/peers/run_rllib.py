"""RLlib's IMPALA on Atari: prints points of its learning curve, see points.py.

Settings are those of its tuned example for Pong (rllib/tuned_examples/impala/pong_impala.py), with as many environment
runners as there are cores but one for the learner, and no GPU.
"""

from __future__ import annotations

from typing import Any

import ale_py
import gymnasium
import ray
from points import WINDOW, Points, parser
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env

RESULTS = "env_runners"
"""key of what environment runners report"""


def make_env(settings: Any) -> gymnasium.Env:
    gymnasium.register_envs(ale_py)
    return wrap_atari_for_new_api_stack(gymnasium.make(settings["id"]), dim=64, framestack=4)


def config(args: Any) -> IMPALAConfig:
    net = {
        "vf_share_layers": True,
        "conv_filters": [[16, 4, 2], [32, 4, 2], [64, 4, 2], [128, 4, 2]],
        "conv_activation": "relu",
        "post_fcnet_hiddens": [256],
    }
    return (
        IMPALAConfig()
        .environment("atari", env_config={"id": args.env_id}, clip_rewards=True)
        .env_runners(num_env_runners=max(1, args.threads - 1), num_envs_per_env_runner=5)
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=500, lr=0.007, vf_loss_coeff=0.5, entropy_coeff=0.008, broadcast_interval=5
        )
        .training(grad_clip=40.0, grad_clip_by="global_norm")
        .rl_module(model_config=net)
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=args.seed)
    )


def main() -> None:
    args = parser(__doc__).parse_args()
    register_env("atari", make_env)
    ray.init(num_cpus=args.threads, include_dashboard=False, logging_level="error")
    algorithm, points = config(args).build_algo(), Points(args)
    goes_on = True
    while goes_on:
        found = algorithm.train()[RESULTS]
        mean = found.get("episode_return_mean")  # of the last 100 games by itself
        played = int(found.get("num_episodes_lifetime", 0))
        means = [] if mean is None or mean != mean else [mean] * min(played, WINDOW)
        goes_on = points.add(int(found.get("num_env_steps_sampled_lifetime", 0)), means)
    algorithm.stop()


if __name__ == "__main__":
    main()
