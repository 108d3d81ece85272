"""Flags that have no effect beside the other settings are refused: something was expected of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from a3c_mp.cli.flags import peek
from a3c_mp.config import CommonArgs, flag_name
from a3c_mp.errors import ConfigError


class Rule(NamedTuple):
    """Flags, and the setting that they need to have an effect."""

    flags: str
    setting: str  # a field; in chapters that lack it, the flags have an effect
    acts: Callable[[Any], bool]  # value of the setting -> whether they do
    fix: str
    beside: str = ""  # a field; in chapters that lack it, the flags have an effect too


RULES = (
    Rule("n-step", "returns", lambda returns: returns == "nstep", "add --returns nstep"),
    Rule("gae-lambda", "returns", lambda returns: returns == "gae", "add --returns gae"),
    Rule("rmsprop-eps", "optimizer", lambda optimizer: optimizer == "rmsprop", "add --optimizer rmsprop"),
    Rule("adam-eps", "optimizer", lambda optimizer: optimizer == "adam", "use --rmsprop-eps", beside="rmsprop_eps"),
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
    Rule(
        "tournament-size mutate-none mutate-architecture mutate-parameters mutate-activation "
        "mutate-hyperparameters parameter-noise",
        "evolve",
        bool,
        "leave out --no-evolve",
    ),
)

OF_A_JOINED_NODE = {
    "attach_to", "role", "key_file", "num_actors", "max_restarts", "hang_seconds", "env_id", "env_kwargs",
}  # fmt: skip
"""settings of a node that joins the task of another machine; all others are that task's. Its environment is too, but
naming it does no harm
"""
REFUSED_ELSEWHERE = {"listen", "standalone", "async_mode", "remote_actors"}
"""flags for which `roles.check_roles` has reasons of their own"""


def check_unused(args: CommonArgs, argv: Sequence[str]) -> None:
    """Raise ConfigError for a flag of the command line that has no effect beside the other settings."""
    settings = vars(args)
    if settings.get("attach_to") is not None:
        for name in settings:
            if name not in OF_A_JOINED_NODE | REFUSED_ELSEWHERE and (given := given_as(name, settings, argv)):
                why = "a node that joins has the settings of the task there"
                raise ConfigError(flag_name(name), given, why, "leave it out")
    for name, rule in unused(settings).items():
        if settings.get(name) and (given := given_as(name, settings, argv)) is not None:  # 0 turns something off
            flag = flag_name(name)
            why = f"{as_flag(rule.setting, settings[rule.setting])} does not use it"
            raise ConfigError(flag, given, why, f"{rule.fix}, or leave out --{flag}")


def unused(settings: Mapping[str, Any]) -> dict[str, Rule]:
    """The settings that have no effect beside the others -> the rule that says so."""
    idle = [
        rule
        for rule in RULES
        if {rule.setting, rule.beside or rule.setting} <= settings.keys() and not rule.acts(settings[rule.setting])
    ]
    return {flag.replace("-", "_"): rule for rule in idle for flag in rule.flags.split()}


def as_flag(name: str, value: Any) -> str:
    """A setting as the command line has it: `--name value`, `--name` or `--no-name`."""
    flag = flag_name(name)
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def given_as(name: str, settings: Mapping[str, Any], argv: Sequence[str]) -> str | None:
    """The value with which the command line gives a flag; None if it does not."""
    flag = flag_name(name)
    if not isinstance(settings[name], bool):
        return peek(list(argv), f"--{flag}")
    names = {token.replace("_", "-") for token in argv}
    return str(settings[name]) if {f"--{flag}", f"--no-{flag}"} & names else None
