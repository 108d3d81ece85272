"""Flags: their names elsewhere and in older versions, and those that have no effect."""

import ast
import difflib
import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from a3c_mp.config import flag_name
from a3c_mp.errors import ConfigError
from a3c_mp.wrappers.identity import EXPRESSION
from a3c_mp.wrappers.ids import parsed

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
    "checkpoint-steps": "save-freq save-frequency save-every",
    "checkpoint-seconds": "save-model save-every-sec",
    "hidden": "net-arch hidden-sizes hidden-size fcnet-hiddens encoder-mlp-layers",
    "eval-every": "eval-freq eval-interval evaluate",
    "resume-or-start": "auto-resume autoresume restart-behavior requeue",
    "resume": "load checkpoint restore load-model trained-agent",
    "replay-size": "buffer-size memory-size",
    "replay-ratio": "train-frequency train-freq gradient-steps",
    "target-rate": "tau polyak",
    "target-period": "target-network-frequency target-update-interval target-update-freq",
    "policy-delay": "policy-frequency policy-freq",
    "target-noise": "policy-noise target-policy-noise",
    "target-noise-clip": "noise-clip",
    "genes": "learning-rate-range batch-size-range learn-every-range",
    "epsilon": "start-e end-e exploration-final-eps",
    "noise": "exploration-noise action-noise",
    "noise-memory": "ou-noise ornstein-uhlenbeck",
    "lstm": "use-lstm use-rnn recurrent",
    "algo": "algorithm",
}
"""flag here -> its names in CleanRL, SB3, RLlib, Sample Factory and others, and in older versions"""


ANSWERS = {
    "play.py --video records one": "capture-video record-video video",
    "train_impala.py has it": "lstm",
    "train_apex.py has it, for dqn, ddpg and td3": "algo",
    "leave it out: in chapter 3 each environment has an epsilon of its own": "exploration-fraction",
    "give it by the environment variable WANDB_PROJECT": "wandb-project-name wandb-project",
}
"""answer -> flags that this chapter does not have, under any name"""


def suggestion(name: str, flags: Mapping[str, str]) -> str:
    """What to do about a flag that is not among `flags`: flag -> its help."""
    plain = name.removeprefix("no-")
    here = next((flag for flag, others in OTHER_NAMES.items() if plain in others.split()), plain)
    if here in flags:
        return f"here it is --{here} ({flags[here]})"  # its number may mean something else
    if close := difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
        return f"perhaps you meant --{close[0]}"
    return next((answer for answer, others in ANSWERS.items() if here in others.split()), "see --help")


class Rule(NamedTuple):
    """Flags, and the setting that they need to have an effect."""

    flags: str
    setting: str  # a field; in chapters that lack it, the flags have an effect
    acts: Callable[[Any], bool]  # value of the setting -> whether they do
    fix: str
    beside: str = ""  # a field without which, too, the flags have an effect


CONTINUOUS = ("ddpg", "td3")
USE_TD3 = "use --algo td3 (chapter 3)"
RULES = (  # values of one's own, as of `algo`, may use all flags
    Rule("run-name runs-dir resume-or-start", "resume", lambda folder: not folder, "start a new run without --resume"),
    Rule("n-step", "returns", lambda returns: returns != "gae", "add --returns nstep"),
    Rule("gae-lambda", "returns", lambda returns: returns != "nstep", "add --returns gae"),
    Rule("rmsprop-eps", "optimizer", lambda optimizer: optimizer != "adam", "add --optimizer rmsprop"),
    Rule("adam-eps", "optimizer", lambda optimizer: optimizer != "rmsprop", "use --rmsprop-eps", beside="rmsprop_eps"),
    Rule("epsilon ladder-exponent net num-quantiles", "algo", lambda algo: algo not in CONTINUOUS, "add --algo dqn"),
    Rule("noise noise-exponent noise-memory policy-learning-rate", "algo", lambda algo: algo != "dqn", "see --algo"),
    Rule("target-noise target-noise-clip policy-delay", "algo", lambda algo: algo not in ("dqn", "ddpg"), USE_TD3),
    Rule("repeat-fraction", "update_epochs", lambda epochs: epochs > 1, "raise --update-epochs"),
    Rule("entropy-steps", "entropy_coef_end", lambda end: end is not None, "add --entropy-coef-end"),
    Rule("explore-steps explore-after", "explore_envs", bool, "add --explore-envs"),
    Rule("eval-episodes eval-max-steps eval-envs", "eval_every", bool, "add --eval-every"),
    Rule("confirm-episodes", "stop_return", lambda goal: goal is not None, "add --stop-return"),
    Rule("placement", "address", bool, "add --address"),
    Rule("replay-size", "replay_proportion", bool, "raise --replay-proportion"),
    Rule("importance-exponent", "priority_exponent", bool, "raise --priority-exponent"),
    Rule("blocks-per-actor prefetch", "deterministic", lambda ordered: not ordered, "leave out --deterministic"),
    Rule("tournament-size parameter-noise mutate-none mutate-architecture", "evolve", bool, "leave out --no-evolve"),
    Rule("mutate-parameters mutate-activation mutate-hyperparameters", "evolve", bool, "leave out --no-evolve"),
    Rule("elitism resample grow-factor shrink-factor new-layer remove-layer", "evolve", bool, "leave out --no-evolve"),
    Rule("max-restarts hang-seconds", "standalone", lambda alone: not alone, "leave out --standalone"),
)
OF_A_JOINED_NODE = {
    *("attach_to", "role", "key_file", "num_actors", "max_restarts", "hang_seconds", "env_id", "env_kwargs"),
    *("listen", "standalone", "async_mode", "remote_actors"),  # refused by `roles.check_roles` with their own reasons
}
"""settings of a node that joins the task of another machine; all others are that task's"""


def check_unused(args: Any, given: Collection[str]) -> None:
    """Raise ConfigError for a setting that the command line gives and that has no effect beside the others."""
    settings = vars(args)
    if settings.get("attach_to") is not None:
        for name in given:
            if name not in OF_A_JOINED_NODE:
                why = "a node that joins has the settings of the task there"
                raise ConfigError(flag_name(name), settings[name], why, "leave it out")
    for name, rule in unused(settings).items():
        if name in given and settings[name]:  # 0 turns something off
            flag = flag_name(name)
            why = "it has no effect"
            if (other := settings[rule.setting]) is not None:
                why = f"{' '.join(as_flag(rule.setting, other))} does not use it"
            raise ConfigError(flag, settings[name], why, f"{rule.fix}, or leave out --{flag}")
    if "explore_envs" in given and settings["explore_envs"] and not args.explorers:
        why = f"that is none of {args.num_envs} environments"
        raise ConfigError("explore-envs", settings["explore_envs"], why, "raise it or --num-envs, or leave it out")


def unused(settings: Mapping[str, Any]) -> dict[str, Rule]:
    """The settings that have no effect beside the others -> the rule that says so."""
    held = [rule for rule in RULES if {rule.setting, rule.beside or rule.setting} <= settings.keys()]
    idle = [rule for rule in held if not rule.acts(settings[rule.setting])]
    return {flag.replace("-", "_"): rule for rule in idle for flag in rule.flags.split()}


def as_flag(name: str, value: Any) -> list[str]:
    """A setting as the words of a command line; a space before each of several values says that it is no flag."""
    flag = flag_name(name)
    if isinstance(value, Mapping):  # keyword arguments of an environment
        value = [f"{key}={_as_text(each)}" for key, each in value.items()]
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool":  # numpy's, too
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *(f" {each}" for each in value)] if isinstance(value, list | tuple) else [f"--{flag}={value}"]


def _as_text(value: Any) -> str:
    """A value as `parsed` reads it again, numpy's and paths too; what stands in braces in text is computed there."""
    if isinstance(value, str) and value == value.strip() and (EXPRESSION.search(value) or parsed(value) == value):
        return value
    text = json.dumps(value, default=_as_json)
    if isinstance(value, list | tuple | dict):  # JSON has neither tuples nor keys that are no text
        with suppress(ValueError, SyntaxError):  # it holds numpy's values, or others that are no literals
            is_lost, is_literal = json.loads(text) != value, ast.literal_eval(repr(value)) == value
            return repr(value) if is_lost and is_literal else text
    return text


def _as_json(value: Any) -> Any:
    """A value of another kind as JSON has it. Raises ConfigError for what it has not."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy's, torch's
        return value.tolist()
    raise ConfigError("env-kwargs", value, "must be a number, text, True, False, None, or a list or dict of them")
