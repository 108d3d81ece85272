"""An argparse parser of a dataclass: each field is a flag, its annotation the type, the docstring below it the help."""

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

import a3c_mp
from a3c_mp.cli.flags import suggestion
from a3c_mp.config import flag_name
from a3c_mp.errors import ConfigError

REPEATABLE = {"wrapper", "env_kwargs", "obs_keys"}  # fields whose flags add up; of others the last one counts
SWITCHES = "switches take no value: --NAME turns one on, --no-NAME off"


def read_flags(args_class: type, argv: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
    """Return (settings that a command line gives, "help" among them, other words). Raises ConfigError for bad ones."""
    words = [_plain(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        found, others = make_parser(args_class).parse_known_intermixed_args(words)
    except argparse.ArgumentError as error:
        name = (error.argument_name or "").partition("/")[0].lstrip("-")
        why = SWITCHES if error.message.startswith("ignored explicit argument") else error.message
        raise ConfigError(name, "", why) from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()}, others


def _plain(word: str) -> str:
    """A word of the command line as argparse takes it: `--num-envs=4` for `--num_envs=4`; " -1e6" is no flag."""
    name, equals, value = word.partition("=")
    if word.startswith("--"):
        return name.replace("_", "-") + equals + value
    return f" {word}" if re.match(r"-[.\d]", word) else word


def make_parser(args_class: type, description: str = "", default: Any = None) -> argparse.ArgumentParser:
    """Make the parser of a dataclass, whose result has only what the command line gives.

    Fields are flags; those without a default take words that stand alone. `default` has the values for `--help`.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]", description=textwrap.dedent(description).replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS,
        add_help=False, allow_abbrev=False, exit_on_error=False,
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    parser.add_argument("--version", action="version", version=f"a3c-mp {a3c_mp.__version__}", help="show the version")
    docs = field_docs(args_class) if default is not None else {}
    titles = dict.fromkeys(title for title, _ in docs.values() if title)
    groups = {title: parser.add_argument_group(title) for title in titles}
    hints = typing.get_type_hints(args_class)
    for field in dataclasses.fields(args_class):
        options, value = _options(field.name, hints[field.name]), getattr(default, field.name, None)
        title, text = docs.get(field.name, ("", ""))
        if field.default is dataclasses.MISSING:
            options |= {"help": text, "default": () if "nargs" in options else None}
            parser.add_argument(field.name, **{"nargs": "?", **options})
        else:
            shown = (" ".join(map(str, value)) or None) if isinstance(value, tuple) else value
            options["help"] = f"{text} (default: {shown})".replace("%", "%%")
            groups.get(title, parser).add_argument(f"--{flag_name(field.name)}", dest=field.name, **options)
    return parser


def _options(name: str, hint: Any) -> dict[str, Any]:
    kind = plain_type(hint)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is typing.Literal:
        none = [None] if type(None) in typing.get_args(hint) else []
        return {"type": partial(to_value, name, hint), "choices": [*typing.get_args(kind), *none]}
    if typing.get_origin(kind) is tuple:
        item, *others = typing.get_args(kind)
        several = "*" if others == [...] else 1 + len(others)
        options = {"type": partial(to_value, name, item), "nargs": several, "metavar": item.__name__.upper()}
        return options | ({"action": "extend"} if name in REPEATABLE else {})
    return {"type": partial(to_value, name, hint), "metavar": kind.__name__.upper()}


def plain_type(hint: Any) -> Any:
    """The type in an annotation: `int` in `int | None`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def is_flag_type(hint: Any) -> bool:
    """Whether words of a command line can say a value of this type: one kind of number, text or choice, or a tuple."""
    kind, several = plain_type(hint), typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and len({*several} - {type(None)}) > 1:
        return False
    if typing.get_origin(kind) is tuple:
        items = {*typing.get_args(kind)} - {...}
        kind = items.pop() if len(items) == 1 else None
    return kind in (bool, int, float, str, Path) or typing.get_origin(kind) is typing.Literal


def field_docs(args_class: type) -> dict[str, tuple[str, str]]:
    """field -> (what the class says that declares it, the docstring below it, also in a subclass)"""
    docs: dict[str, tuple[str, str]] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(args_class.__mro__)):
        definition = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0])
        title = re.split("[.:]", ast.get_docstring(definition) or "")[0]
        for field, below in itertools.pairwise(definition.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = docs.get(name, (title, ""))[0], " ".join(text.split())
    return docs


def to_value(name: str, hint: Any, text: str) -> Any:
    """The value of a field that a word stands for. Raises ConfigError."""
    text, kind = text.strip(), plain_type(hint)
    choices = {str(choice): choice for choice in ((True, False) if kind is bool else typing.get_args(kind))}
    text = text.capitalize() if kind is bool else text
    if type(None) in typing.get_args(hint) and text.lower() == "none":
        return None
    if choices and text not in choices:
        raise ConfigError(flag_name(name), text, f"must be one of {', '.join(map(repr, choices.values()))}")
    try:
        text = expanduser(text) if kind is Path else text  # in --flag=~/x a shell has not done it
        return choices[text] if choices else parse_int(text) if kind is int else kind(text)
    except ValueError:
        what = "a whole number, for instance 500000, 1e6 or 2M" if kind is int else "a number"
        raise ConfigError(flag_name(name), text, f"must be {what}") from None


def parse_int(text: str) -> int:
    """Whole numbers, also as 1_000_000, 1e6 or 1M. Raises ValueError for anything else."""
    with suppress(ValueError):
        return int(text)
    number = float(re.sub("k$", "e3", re.sub("m$", "e6", text.lower())))
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)


def refusal(others: Sequence[str], args_class: type) -> ConfigError:
    """The error of words on a command line that the parser of a class does not know."""
    docs = field_docs(args_class)
    flags = {flag_name(field.name): docs.get(field.name, ("", ""))[1] for field in dataclasses.fields(args_class)}
    if any("\r" in other for other in others):
        return ConfigError("arguments", "", "the script has Windows line ends", r"sed -i 's/\r$//' SCRIPT")
    word, *following = (other.strip() for other in others)
    name, _, value = word.partition("=")
    if name.startswith("-"):
        value = value or next((other for other in following[:1] if not other.startswith("-")), "")
        return ConfigError(name.lstrip("-"), value, "there is no such flag", suggestion(name.lstrip("-"), flags))
    fix = "see --help"
    if word.lower() in ("true", "false", "yes", "no", "on", "off"):
        fix = SWITCHES
    elif "env-id" in flags and re.fullmatch(r".+-v\d+(\?.*)?|\w+:.+", word):
        fix = f"perhaps --env-id {word}"
    return ConfigError("arguments", word, "a value without a flag", fix)
