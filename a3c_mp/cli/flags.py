"""Flags by group, for `--help`, and their names in other libraries, for error messages."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
    "anneal-steps": "lr-decay-steps lr-anneal-steps decay-steps",
    "entropy-coef-end": "entropy-cost-end",
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
    "clip-rho": "rho-bar rho-hat vtrace-clip-rho-threshold vtrace-rho",
    "clip-c": "c-bar c-hat vtrace-c",
    "env-id": "env gym-id environment task",
    "env-kwargs": "env-args env-config",
    "cuda": "device gpu",
    "deterministic": "torch-deterministic",
    "track": "wandb with-wandb use-wandb tracker",
    "run-name": "exp-name experiment name",
    "runs-dir": "tensorboard-log logdir log-dir log-folder output-dir save-dir train-dir",
    "stop-return": "target-return reward-threshold",
    "checkpoint-seconds": "save-freq save-frequency save-every save-model",
    "eval-every": "eval-freq eval-interval evaluate",
    "eval-episodes": "n-eval-episodes num-eval-episodes",
    "resume": "load checkpoint restore load-model trained-agent",
    "replay-size": "buffer-size memory-size",
    "replay-ratio": "train-frequency train-freq gradient-steps",
    "target-rate": "tau polyak",
    "target-period": "target-network-frequency target-update-interval target-update-freq policy-frequency",
    "epsilon": "start-e end-e exploration-fraction exploration-final-eps",
    "noise": "exploration-noise action-noise",
    "policy-learning-rate": "actor-lr policy-lr",
    "priority-exponent": "prioritized-replay-alpha per-alpha",
    "importance-exponent": "prioritized-replay-beta per-beta",
    "reward-clip": "clip-rewards clip-reward",
}
"""flag here -> its names in CleanRL, SB3, RLlib, Sample Factory and others"""
MEANINGS = {"value-coef": ", of half the squared error (as in CleanRL; twice SB3's vf_coef)"}
"""flag here -> in what it differs from some of them"""
ONLY_IN = {
    "a3c_data a3c_grad apex impala ray task": "num-actors eval-every stop-eval-return optimizer",
    "a3c_data a3c_grad impala population ray task": "hidden",
    "a3c_data a3c_grad apex population ray task": "batch-size",
    "a3c_data a3c_grad impala ray task": "unroll-length slots-per-actor learning-rate-end anneal-steps rmsprop-eps "
    "entropy-coef value-coef normalize-advantages net log-std-init noise-steps explore-envs explore-steps "
    "explore-after",
    "a3c_data a3c_grad apex ray task": "n-step",
    "a3c_data a3c_grad task": "returns gae-lambda clip-ratio",
    "a3c_data task": "update-epochs repeat-fraction entropy-coef-end entropy-steps",
    "a3c_grad": "grads-per-step max-lag sync",
    "apex impala population ray": "replay-size",
    "apex population ray": "learning-starts epsilon ladder-exponent target-period target-rate",
    "apex impala ray": "num-learners",
    "apex ray": "algo block-length blocks-per-actor replay-ratio prefetch priority-exponent importance-exponent noise "
    "noise-exponent noise-memory policy-learning-rate save-replay",
    "impala ray": "batch-unrolls lstm vtrace clip-rho clip-c clip-pg-rho replay-proportion force-lag",
    "task": "standalone async-mode print-per-step listen remote-actors attach-to role key-file",
    "ray": "address token-file insecure-cluster num-shards",
    "population": "population generation-steps confirm-episodes init evolve keep-default "
    "tournament-size elitism mutate-none mutate-architecture mutate-parameters mutate-activation "
    "mutate-hyperparameters parameter-noise grow-factor shrink-factor resample touch new-layer learning-rate-range "
    "batch-size-range learn-every learn-every-range units-range layers-range activation",
}
"""chapters, as their scripts are called without `train_` -> flags that the others do not have"""
VIDEO_FLAGS = "capture-video record-video video render"
"""flags of other libraries for what `play.py --video` does here"""


def peek(argv: list[str], flag: str) -> str | None:
    """Value of a flag in `argv`, read before the parser runs; the last one counts."""
    for position, token in reversed(list(enumerate(argv))):
        name, equals, value = token.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else next(iter(argv[position + 1 :]), None)
    return None


def peek_all(argv: list[str], flag: str) -> list[str]:
    """Values of a flag that takes several; the last one of its name counts."""
    found: list[str] = []
    values: list[str] | None = None  # of the flag that is being read, if it is this one
    for token in argv:
        name, equals, value = token.partition("=")
        if token.startswith("--"):
            values = None
            if name.replace("_", "-") == flag:
                found = values = [value] if equals else []
        elif values is not None:
            values.append(token)
    return found


def suggestion(name: str, flags: Collection[str]) -> str:
    """What to write instead of an unknown flag.

    Args:
        name: the unknown flag, without dashes.
        flags: those that there are, without dashes.
    """
    negative = name.removeprefix("no-")
    here = next((flag for flag, others in OTHER_NAMES.items() if negative in others.split()), negative)
    if here in flags and here != negative:
        return f"here it is --{here}{MEANINGS.get(here, '')}"
    if chapters := next((chapters for chapters, names in ONLY_IN.items() if here in names.split()), ""):
        *others, last = [f"train_{chapter}" for chapter in chapters.split()]
        scripts = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        return f"only {scripts} it" if here == negative else f"here it is --{here}, which only {scripts}"
    close = difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
    if close:
        return f"perhaps you meant --{close[0]}"
    return "play.py --video records one" if negative in VIDEO_FLAGS.split() else "see --help"


def group_of(flag: str) -> str:
    """The title of a flag's group."""
    return next((title for title, flags in GROUPS.items() if flag in flags.split()), "learning")


@contextmanager
def grouped_help() -> Iterator[None]:
    """Have tyro show flags by group. Its function for that is private, so its version is pinned."""
    from tyro._backends import _tyro_help_formatting as formatting

    format_help, order = formatting.format_help, [*GROUPS, "learning"]

    def by_group(*, args: list[Any], **others: Any) -> list[str]:
        titles = [group_of(arg.arg.display_name().lstrip("-")) for arg in args]
        grouped = sorted(zip(titles, args, strict=True), key=lambda pair: order.index(pair[0]))
        return format_help(args=[with_title(arg, title) for title, arg in grouped], **others)

    def with_title(arg: Any, title: str) -> Any:
        parser = dataclasses.replace(arg.source_parser, extern_prefix=title, description="")
        return dataclasses.replace(arg, source_parser=parser)

    with mock.patch.object(formatting, "format_help", by_group):
        yield
