"""Flags by group, for `--help`, and their names elsewhere and in older versions, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection

GROUPS = {
    "run": "total-steps stop-return max-seconds eval-every eval-episodes eval-max-steps stop-eval-return "
    "confirm-episodes seed deterministic run-name runs-dir resume checkpoint-seconds checkpoint-steps save-replay "
    "track cuda precision learner-threads num-learners print-per-step standalone async-mode listen attach-to "
    "role key-file remote-actors address token-file insecure-cluster",
    "environment": "env-id env-kwargs reward-clip reward-scale life-loss-terminal normalize-obs",
    "collection": "num-actors population num-envs unroll-length slots-per-actor block-length blocks-per-actor "
    "replay-size learning-starts num-shards generation-steps explore-envs explore-steps explore-after epsilon "
    "ladder-exponent noise noise-exponent noise-memory max-restarts hang-seconds",
}
"""title of a group in `--help` -> its flags; all others are in the last group, `learning`"""

OTHER_NAMES = {
    "total-steps": "total-timesteps n-timesteps total-env-steps train-for-env-steps max-steps num-timesteps timesteps",
    "learning-rate": "lr alpha-lr step-size",
    "learning-rate-end": "anneal-lr lr-end final-lr final-learning-rate lr-schedule",
    "entropy-coef": "ent-coef entropy-cost entropy-coeff exploration-loss-coeff beta-entropy entropy-coefficient",
    "value-coef": "vf-coef value-cost vf-loss-coeff value-loss-coeff baseline-cost",
    "clip-ratio": "clip-coef clip-range ppo-clip-ratio clip-param",
    "max-grad-norm": "clip-grad grad-clip grad-norm-clipping",
    "unroll-length": "num-steps n-steps rollout rollout-length rollout-fragment-length",
    "update-epochs": "n-epochs num-epochs epochs num-sgd-iter",
    "batch-size": "minibatch-size num-minibatches nminibatches",
    "num-envs": "n-envs num-envs-per-worker envs-per-actor local-num-envs",
    "num-actors": "num-workers workers num-env-runners num-processes",
    "gae-lambda": "lam lambda",
    "normalize-advantages": "norm-adv normalize-advantage",
    "normalize-obs": "norm-obs normalize-input vec-normalize",
    "env-id": "env gym-id environment task",
    "cuda": "device gpu",
    "deterministic": "torch-deterministic",
    "track": "wandb with-wandb use-wandb tracker",
    "run-name": "exp-name experiment name",
    "runs-dir": "tensorboard-log logdir log-dir log-folder output-dir save-dir train-dir",
    "stop-return": "target-return reward-threshold",
    "checkpoint-seconds": "save-freq save-frequency save-every save-model",
    "eval-every": "eval-freq eval-interval evaluate",
    "resume": "load checkpoint restore load-model trained-agent",
    "replay-size": "buffer-size memory-size",
    "replay-ratio": "train-frequency train-freq gradient-steps",
    "target-rate": "tau polyak",
    "target-period": "target-network-frequency target-update-interval target-update-freq policy-frequency",
    "epsilon": "start-e end-e exploration-fraction exploration-final-eps",
    "noise": "exploration-noise action-noise",
}
"""flag here -> its names in CleanRL, SB3, RLlib, Sample Factory and others, and in older versions"""


def suggestion(name: str, flags: Collection[str]) -> str:
    """What to write instead of an unknown flag; all names without dashes."""
    plain = name.removeprefix("no-")
    here = next((flag for flag, others in OTHER_NAMES.items() if plain in others.split()), None)
    if here in flags:
        return f"here it is --{here}"
    if close := difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
        return f"perhaps you meant --{close[0]}"
    return "play.py --video records one" if plain in ("capture-video", "record-video", "video") else "see --help"


def group_of(flag: str) -> str:
    """The title of a flag's group."""
    return next((title for title, flags in GROUPS.items() if flag in flags.split()), "learning")
