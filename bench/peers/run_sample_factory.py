"""Sample Factory's asynchronous PPO on Atari: prints points of its learning curve, see points.py.

Its Atari settings, but for what its documentation says makes it fast: asynchronous, two splits of the environments of
each worker, rollouts of 32 steps and batches of 1,024.
"""

from __future__ import annotations

import sys
import tempfile

import ale_py  # noqa: F401  (registers the games)
from points import STEPS, Points, parser
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.train import make_runner
from sf_examples.atari.train_atari import parse_atari_args, register_atari_components

RETURN = "RecordEpisodeStatistics_reward"
"""raw return of a whole game, before clipping and episodic life"""


class Curve(AlgoObserver):
    """Prints points, and ends the run when it is over."""

    def __init__(self, points: Points):
        self.points = points

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        games = runner.policy_avg_stats.get(RETURN, [[]])[0]
        if not self.points.add(runner.env_steps.get(0, 0), map(float, games)):
            runner.cfg.train_for_env_steps = 0  # `train_for_seconds` has no effect in 2.1.1: nothing counts them


def main() -> int:
    args = parser(__doc__).parse_args()
    register_atari_components()
    name = "atari_" + args.env_id.removesuffix("NoFrameskip-v4").lower()
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "env": name, "algo": "APPO", "experiment": "peer", "train_dir": folder, "device": "cpu", "seed": args.seed,
            "async_rl": True, "serial_mode": False, "num_workers": args.threads, "num_envs_per_worker": 16,
            "worker_num_splits": 2, "rollout": 32, "batch_size": 1024, "normalize_input": True,
            "decorrelate_envs_on_one_worker": False, "train_for_env_steps": STEPS, "save_every_sec": 10**6,
            "summaries_use_frameskip": False,  # agent steps
        }  # fmt: skip
        cfg = parse_atari_args([f"--{key}={value}" for key, value in flags.items()])
        cfg, runner = make_runner(cfg)
        runner.register_observer(Curve(Points(args)))
        if runner.init() != ExperimentStatus.SUCCESS:
            return 1
        return 0 if runner.run() == ExperimentStatus.SUCCESS else 1


if __name__ == "__main__":
    sys.exit(main())
