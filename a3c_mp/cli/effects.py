"""Flags that have no effect beside the other settings are refused: something was expected of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Rule("explore-envs", "num_envs", lambda num_envs: num_envs > 1, "raise --num-envs: one of them never explores"),
    Rule("explore-steps explore-after", "explore_envs", bool, "add --explore-envs"),
    Rule("eval-episodes", "eval_every", bool, "add --eval-every"),
    Rule("replay-size", "replay_proportion", bool, "raise --replay-proportion"),
    Rule("importance-exponent", "priority_exponent", bool, "raise --priority-exponent"),
    Rule("blocks-per-actor prefetch", "deterministic", lambda ordered: not ordered, "leave out --deterministic"),
    Rule(
        "tournament-size keep-default mutate-none mutate-architecture mutate-parameters mutate-activation "
        "mutate-hyperparameters parameter-noise",
        "evolve",
        bool,
        "leave out --no-evolve",
    ),
)


OF_A_JOINED_NODE = {"attach_to", "role", "key_file", "num_actors", "max_restarts", "hang_seconds", "env_id"}
"""settings of a node that joins the task of another machine; all others are that task's. The environment is too, but
naming it does no harm
"""
REFUSED_ELSEWHERE = {"listen", "standalone", "async_mode", "transport", "remote_actors"}
"""flags for which `roles.check_roles` has reasons of their own"""


def check_effects(args: CommonArgs, argv: Sequence[str]) -> None:
    """Raise ConfigError for a flag of the command line that has no effect beside the other settings."""
    settings = vars(args)
    if settings.get("attach_to") is not None:
        for name in settings.keys() - OF_A_JOINED_NODE - REFUSED_ELSEWHERE:
            if (given := peek(list(argv), f"--{flag_name(name)}")) is not None:
                why = "a node that joins has the settings of the task there"
                raise ConfigError(flag_name(name), given, why, "leave it out")
    for rule in RULES:
        concerned = {rule.setting, rule.beside or rule.setting} <= settings.keys()
        if not concerned or rule.acts(value := settings[rule.setting]):
            continue
        for flag in rule.flags.split():
            given = peek(list(argv), f"--{flag}")
            if given is not None and settings[flag.replace("-", "_")]:  # 0 turns something off
                name = flag_name(rule.setting)
                other = f"--{name} {value}" if not isinstance(value, bool) else f"--{name}" if value else f"--no-{name}"
                raise ConfigError(flag, given, f"{other} does not use it", f"{rule.fix}, or leave it out")
