"""Error messages of the command line: one line for each error of the parser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from a3c_mp.cli.flags import peek, suggestion
from a3c_mp.errors import ConfigError

if TYPE_CHECKING:
    from tyro._arguments import ArgumentDefinition
    from tyro._errors import ParseErrorEvent

OFTEN_LEFT_OUT = {"env-id": r".+-v\d+(\?.*)?|\w+:.+", "chapter": r"[a-z0-9_]+"}
"""flags that are easily left out before their value, and what such values look like"""
SWITCH_VALUES = ("yes", "no", "true", "false", "on", "off", "0", "1")
"""what is easily given to a switch"""


class UnknownFlag(ConfigError):
    """A flag that a script does not have."""


def parse_error(event: ParseErrorEvent, argv: list[str], flags: list[str]) -> ConfigError:
    """One line for an error event of tyro's parser. The events are private to tyro, so its version is pinned."""
    from tyro import _errors

    match event:
        case _errors.UnrecognizedArgs(tokens=[token, *_]) | _errors.MissingArgs(unrecognized_tokens=[token, *_]):
            name, _, value = token.partition("=")
            name = name.replace("_", "-")
            if not name.startswith("-"):
                return stray_value(token, argv, flags)
            fix = suggestion(name.lstrip("-"), flags)
            following = peek(argv, name) or ""
            value = value or ("" if following.startswith("--") else following)
            return UnknownFlag(name.lstrip("-"), value, "there is no such flag", fix)
        case _errors.MissingArgs(missing_arguments=[missing, *_]):
            return ConfigError(_name(missing.arg), "", "must be given")
        case _errors.BadValue(argument=argument):
            return ConfigError(_name(argument), "", "a value is missing")
        case _errors.InvalidChoice(argument=argument, value=value, choices=choices):
            return ConfigError(_name(argument), value, f"must be one of {', '.join(map(repr, choices))}")
        case _errors.InstantiationFailure(argument=argument, message=message) if argument is not None:
            why = "must be a number" if "string to float" in message else message.rpartition(": ")[2]
            if why.startswith("["):  # a flag with several values
                why = "must be whole numbers, with spaces between them"
            return ConfigError(_name(argument), peek(argv, f"--{_name(argument)}"), why)
    return ConfigError("arguments", " ".join(argv), getattr(event, "message", type(event).__name__))


def stray_value(token: str, argv: list[str], flags: list[str]) -> ConfigError:
    """The error of a value that belongs to no flag."""
    before = argv[argv.index(token) - 1] if token in argv[1:] else ""
    joined = next((word for word in argv if word.startswith("--") and word.endswith(f"={token}")), "")
    fix = "see --help"
    if token.lower() in SWITCH_VALUES and (joined or before.startswith("--")):
        token = joined or token
        fix = "leave it out: switches take no value, and --no-NAME turns one off"
    elif "resume" in flags and (Path(token) / "config.json").exists():
        fix = f"perhaps --resume {token}"
    elif name := next((n for n, form in OFTEN_LEFT_OUT.items() if n in flags and re.fullmatch(form, token)), None):
        fix = f"perhaps --{name} {token}"
    return ConfigError("arguments", token, "a value without a flag", fix)


def _name(argument: ArgumentDefinition) -> str:
    return argument.display_name().lstrip("-")
