"""Command line: settings from flags, presets and the run to be resumed; every mistake becomes one line."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import wrappers
from a3c_mp.config import CommonArgs, LearningArgs, check_ranges, flag_name
from a3c_mp.errors import ConfigError

A = TypeVar("A", bound="CommonArgs")


P = TypeVar("P")


def parse_args(
    args_class: type[A], presets: Mapping[str, Mapping[str, Any]], description: str, argv: Sequence[str] | None = None
) -> A:
    """Parse the command line over the defaults of the chapter, the preset of the environment, or the run to be resumed.

    Args:
        args_class: the chapter's frozen dataclass.
        presets: env id -> settings that differ from the class's defaults.
        description: shown by `--help`.

    Raises:
        ConfigError: anything unknown, malformed or out of range.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    resume, env_id = _peek(argv, "--resume"), _peek(argv, "--env-id")
    description = f"{description}\nDefaults depend on --env-id; there are presets for {', '.join(presets)}."
    if resume is not None:
        default = _saved_args(args_class, Path(resume), argv)
    else:
        env_id = env_id or args_class.env_id
        default = args_class(**{**_defaults(args_class, env_id), **presets.get(env_id, {}), "env_id": env_id})
    args = _cli(args_class, default, description, argv)
    check_ranges(args)
    return args


def _defaults(args_class: type[CommonArgs], env_id: str) -> dict[str, Any]:
    """Defaults that depend on the kind of environment: rewards are clipped on Atari games only."""
    if not issubclass(args_class, LearningArgs):
        return {}
    try:
        return {"reward_clip": wrappers.is_atari(env_id)}
    except (Exception, SystemExit):  # an unknown id, or a module of the user's own: `check_env` says what is wrong
        return {}


def parse_plain(args_class: type[P], description: str, argv: Sequence[str] | None = None) -> P:
    """Parse the command line of a script without presets and resume. Raises ConfigError as `parse_args` does."""
    args = _cli(args_class, None, description, list(sys.argv[1:] if argv is None else argv))
    check_ranges(args)
    return args


def _peek(argv: list[str], flag: str) -> str | None:
    """The value of a flag that decides about the defaults of others; the last one counts."""
    for position, token in reversed(list(enumerate(argv))):
        name, equals, value = token.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else next(iter(argv[position + 1 :]), None)
    return None


def _saved_args(args_class: type[A], folder: Path, argv: list[str]) -> A:
    """The settings of a run, checked as flags are; those that `argv` replaces take their defaults."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text())
        saved = dict(content["args"])
    except FileNotFoundError:
        raise ConfigError("resume", folder, "there is no run in this folder", "name a folder below runs/") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("resume", folder, f"{path} cannot be read ({error})") from None
    hints = typing.get_type_hints(args_class)
    if foreign := set(saved) - set(hints):
        field = min(map(str, foreign))
        if set(hints) <= set(saved):
            why = f"{path} has {field}, which this version does not know; written by a newer version?"
            raise ConfigError("resume", folder, why, "resume it with the version that wrote it")
        why = f"{path} is of another chapter, {content.get('algorithm', '?')} (it has {field})"
        raise ConfigError("resume", folder, why, "resume it with the script that started it")
    given = {token.partition("=")[0].replace("_", "-").replace("--no-", "--") for token in argv}
    try:
        flags = [_saved_flag(name, value, hints[name]) for name, value in saved.items() if _flag(name) not in given]
        args = _cli(args_class, args_class(), "", flags)
        check_ranges(args)
    except ConfigError as error:
        why = f"{path} has {error.what}={error.value}: {error.why}"
        raise ConfigError("resume", folder, why, f"correct it there, or give --{error.what} now") from None
    return args


def _saved_flag(name: str, value: object, hint: object) -> str:
    """A setting as the flag that gives it. Raises ConfigError for a switch that is neither on nor off."""
    if hint is not bool:
        return f"{_flag(name)}={value}"
    if not isinstance(value, bool):
        raise ConfigError(flag_name(name), value, "must be true or false")
    return _flag(name) if value else f"--no-{flag_name(name)}"


def _flag(name: str) -> str:
    return f"--{flag_name(name)}"


def _cli(args_class: type[P], default: P | None, description: str, argv: list[str]) -> P:
    """tyro's parser, its framed error messages folded into one line."""
    import tyro  # here, so that spawned actors need not load it

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def whole_number(info: tyro.constructors.PrimitiveTypeInfo):
        if info.type is not int:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda tokens: parse_int(tokens[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    parse = partial(
        tyro.cli,
        args_class,
        args=argv,
        default=tyro.MISSING_NONPROP if default is None else default,
        description=textwrap.dedent(description),
        registry=registry,
    )
    if {"-h", "--help"} & set(argv):
        before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
        try:
            return parse()
        finally:
            sys.stdout.flush()
            signal.signal(signal.SIGPIPE, before)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed), redirect_stdout(printed):
            return parse()
    except SystemExit:
        raise _parse_error(printed.getvalue(), argv) from None


def _parse_error(printed: str, argv: list[str]) -> ConfigError:
    """The one line that says what a framed message of tyro's says."""
    text = " ".join(re.sub(r"[│╭╰╮╯─]|-{3,}", " ", printed).split())
    hint = re.search(r"(?:Perhaps you meant|Arguments similar to \S+): (--[\w-]+)", text)
    if match := re.search(r"Unrecognized options: (\S+?)(?:,|$| )", text):
        name = match[1]
        if not name.startswith("-"):
            return ConfigError("arguments", name, "unexpected positional argument")
        fix = f"perhaps you meant {hint[1]}" if hint else "see --help"
        return ConfigError(name.lstrip("-"), _peek(argv, name) or "", "there is no such flag", fix)
    if match := re.search(r"Error parsing --([\w-]+): (.*?)(?: Argument helptext| For full|$)", text):
        why = re.sub(r"could not convert string to float: '.*'", "is not a number", match[2])
        return ConfigError(match[1], _peek(argv, f"--{match[1]}"), why)
    if match := re.search(r"invalid choice '(.*?)' for argument '--([\w-]+)'. Expected one of \((.*?)\)", text):
        return ConfigError(match[2], match[1], f"must be one of {match[3]}")
    if match := re.search(r"Missing value for argument '--([\w-]+)'", text):
        return ConfigError(match[1], "", "a value is missing")
    if match := re.search(r"Missing from .*?: (\S+)", text):
        return ConfigError(match[1].lower().lstrip("-"), "", "must be given")
    return ConfigError("arguments", " ".join(argv), text.split("For full helptext")[0].strip())


def parse_int(text: str) -> int:
    """Whole numbers, also as 1e6 or 1_000_000. Raises ValueError for anything else."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)
