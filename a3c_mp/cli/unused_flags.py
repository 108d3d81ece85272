"""Flags that have no effect beside the other settings are refused: something was expected of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from a3c_mp.config import flag_name
from a3c_mp.errors import ConfigError


class Rule(NamedTuple):
    """Flags, and the setting that they need to have an effect."""

    flags: str
    setting: str  # a field; in chapters that lack it, the flags have an effect
    acts: Callable[[Any], bool]  # value of the setting -> whether they do
    fix: str


RULES = (
    Rule("n-step", "returns", lambda returns: returns == "nstep", "add --returns nstep"),
    Rule("gae-lambda", "returns", lambda returns: returns == "gae", "add --returns gae"),
    Rule("rmsprop-eps", "optimizer", lambda optimizer: optimizer == "rmsprop", "add --optimizer rmsprop"),
    Rule("epsilon ladder-exponent", "algo", lambda algo: algo != "ddpg", "add --algo dqn"),
    Rule("noise noise-exponent noise-memory policy-learning-rate", "algo", lambda algo: algo == "ddpg", "use ddpg"),
    Rule("repeat-fraction", "update_epochs", lambda epochs: epochs > 1, "raise --update-epochs"),
    Rule("entropy-steps", "entropy_coef_end", lambda end: end is not None, "add --entropy-coef-end"),
    Rule("explore-envs", "num_envs", lambda num_envs: num_envs > 1, "raise --num-envs: one of them never explores"),
    Rule("explore-steps explore-after", "explore_envs", bool, "add --explore-envs"),
    Rule("eval-episodes eval-max-steps", "eval_every", bool, "add --eval-every"),
    Rule("replay-size", "replay_proportion", bool, "raise --replay-proportion"),
    Rule("importance-exponent", "priority_exponent", bool, "raise --priority-exponent"),
    Rule("blocks-per-actor prefetch", "deterministic", lambda ordered: not ordered, "leave out --deterministic"),
    Rule("tournament-size keep-default parameter-noise", "evolve", bool, "leave out --no-evolve"),
    Rule("mutate-none mutate-architecture mutate-parameters", "evolve", bool, "leave out --no-evolve"),
    Rule("mutate-activation mutate-hyperparameters", "evolve", bool, "leave out --no-evolve"),
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
            why = f"{' '.join(as_flag(rule.setting, settings[rule.setting]))} does not use it"
            raise ConfigError(flag, settings[name], why, f"{rule.fix}, or leave out --{flag}")


def unused(settings: Mapping[str, Any]) -> dict[str, Rule]:
    """The settings that have no effect beside the others -> the rule that says so."""
    idle = [rule for rule in RULES if rule.setting in settings and not rule.acts(settings[rule.setting])]
    return {flag.replace("-", "_"): rule for rule in idle for flag in rule.flags.split()}


def as_flag(name: str, value: Any) -> list[str]:
    """A setting as the words of a command line: `--name=value`, `--name`, `--no-name`, or `--name` and some values.

    A space before each of these says that it is no flag, whatever it begins with.
    """
    flag = flag_name(name)
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *(f" {each}" for each in value)] if isinstance(value, list | tuple) else [f"--{flag}={value}"]
