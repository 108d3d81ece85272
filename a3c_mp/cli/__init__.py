"""Command line: settings from flags, presets and a resumed run; each input error is one line."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gymnasium.spaces import Box

import a3c_mp
import wrappers
from a3c_mp.cli.flags import grouped_help, peek, peek_all
from a3c_mp.cli.messages import UnknownFlag, parse_error, stray_value
from a3c_mp.cli.unused_flags import check_unused
from a3c_mp.config import CommonArgs, RewardArgs, check_ranges, flag_name
from a3c_mp.errors import ConfigError, Stopped
from a3c_mp.nets.layers import is_image

if TYPE_CHECKING:
    from tyro._errors import ParseErrorEvent

EXPONENTS = {"k": "e3", "m": "e6"}
"""last letter of a number -> what it stands for"""

A = TypeVar("A", bound="CommonArgs")
P = TypeVar("P")


def parse_args(
    args_class: type[A], presets: Mapping[str, Mapping[str, Any]], description: str, argv: Sequence[str] | None = None
) -> A:
    """Parse the command line over the defaults of the chapter, the preset of the environment, or a resumed run.

    Args:
        args_class: the chapter's frozen dataclass; its fields are the flags.
        presets: env id -> settings that differ from the class's defaults.
        description: shown by `--help`.

    Raises:
        ConfigError: anything unknown, malformed or out of range.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    resume, env_id = peek(argv, "--resume"), peek(argv, "--env-id")
    description = f"{description}\nDefaults depend on --env-id; there are presets for {', '.join(presets)}."
    if resume is not None:
        default = _saved_args(args_class, Path(resume), argv)
    else:
        env_id = env_id or args_class.env_id
        preset = presets.get(wrappers.split_id(env_id)[0])
        with_kwargs = env_id
        with suppress(ValueError):  # `_name_kwargs` says what is wrong
            with_kwargs = wrappers.with_kwargs(env_id, peek_all(argv, "--env-kwargs"))
        default = args_class(**{**_defaults(args_class, with_kwargs, preset), "env_id": env_id})
        if {"-h", "--help"} & {*argv} and not _is_registered(env_id):
            description += f" {env_id} is not registered, so these are the chapter's own."
    args = _cli(args_class, default, description, argv)
    check_ranges(args)
    check_unused(args, argv)
    return _name_kwargs(args)


def _name_kwargs(args: A) -> A:
    """Settings whose environment id has the arguments of `--env-kwargs`."""
    try:
        return dataclasses.replace(args, env_id=wrappers.with_kwargs(args.env_id, args.env_kwargs), env_kwargs=())
    except ValueError as error:
        fix = "for instance --env-kwargs size=5 walls=false"
        raise ConfigError("env-kwargs", " ".join(args.env_kwargs), str(error), fix) from None


def parse_algo(
    settings: Mapping[str, tuple[type[A], Mapping[str, Mapping[str, Any]]]], description: str,
    argv: Sequence[str] | None = None,
) -> A:  # fmt: skip
    """Parse the command line of a chapter whose `--algo` decides which settings there are; the first is the default.

    Args:
        settings: algorithm -> (settings, presets), as for `parse_args`.
        description, argv: as for `parse_args`.

    Raises:
        ConfigError: as `parse_args` does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    algo, resume = peek(argv, "--algo"), peek(argv, "--resume")
    if resume is not None:
        with suppress(OSError, ValueError, LookupError, TypeError):  # `parse_args` says what is wrong
            algo = json.loads((Path(resume) / "config.json").read_text())["args"]["algo"]
    args_class, presets = settings.get(str(algo), next(iter(settings.values())))
    try:
        return parse_args(args_class, presets, description, argv)
    except UnknownFlag as error:
        name = error.what.removeprefix("no-").replace("-", "_")
        others = [other for other, (their_class, _) in settings.items() if name in flags_of(their_class)]
        if not others:
            raise
        fix = f"add --algo {others[0]}, or leave it out"
        raise ConfigError(error.what, error.value, f"only --algo {' and '.join(others)} has this flag", fix) from None


def _defaults(args_class: type[CommonArgs], env_id: str, preset: Mapping[str, Any] | None) -> dict[str, Any]:
    """Defaults that depend on the environment: Atari or not, and its preset or else its goal and its spaces."""
    defaults: dict[str, Any] = {}
    try:
        is_atari = wrappers.is_atari(env_id)
        if issubclass(args_class, RewardArgs):
            defaults["reward_clip"] = is_atari
        if preset is None:
            goal = wrappers.find_spec(env_id).reward_threshold
            defaults["stop_return"] = None if goal is None else float(goal)
        if is_atari:
            defaults |= args_class.images
        elif preset is None and (args_class.continuous or args_class.vectors or args_class.images):
            obs_space, action_space = wrappers.spaces(env_id)
            if isinstance(action_space, Box):
                defaults |= args_class.continuous
            elif not is_image(obs_space):
                defaults |= args_class.vectors
            if is_image(obs_space):
                defaults |= args_class.images
            if isinstance(action_space, Box):
                defaults.pop("explore_envs", None)  # it repeats discrete actions
    except Stopped:
        raise
    except (Exception, SystemExit):  # an unknown id, or a module of the user's own: `probe_env` says what is wrong
        pass
    return defaults | dict(preset or {})


def _is_registered(env_id: str) -> bool:
    try:
        wrappers.find_spec(env_id)
    except Stopped:
        raise
    except (Exception, SystemExit):  # of a module of the user's own
        return False
    return True


def parse_plain(args_class: type[P], description: str, argv: Sequence[str] | None = None) -> P:
    """Parse the command line of a script without presets and resume. Raises ConfigError as `parse_args` does."""
    args: P = _cli(args_class, None, description, list(sys.argv[1:] if argv is None else argv))
    check_ranges(args)
    return args


def parse_own(args_class: type[P], description: str) -> tuple[P, list[str]]:
    """Parse a script's own flags of the command line; return (settings, what is left). Raises ConfigError likewise."""
    argv = sys.argv[1:]
    args, others = _cli(args_class, None, description, argv, return_unknown_args=True)
    if others and not others[0].startswith("-"):
        raise stray_value(others[0], argv, [flag_name(name) for name in flags_of(args_class)])
    check_ranges(args)
    return args, others


def _saved_args(args_class: type[A], folder: Path, argv: list[str]) -> A:
    """Settings from a run's config.json, parsed and checked like flags; those that `argv` overrides take defaults."""
    path = folder / "config.json"
    if folder.suffix == ".pt" and folder.is_file():
        fix = f"name its run folder, --resume {folder.absolute().parent.parent}: it goes on from the newest"
        raise ConfigError("resume", folder, "it is a checkpoint", fix)
    try:
        content = json.loads(path.read_text())
        saved = dict(content["args"])
    except FileNotFoundError:
        raise ConfigError("resume", folder, "there is no run in this folder", hint_of_runs(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("resume", folder, f"{path} cannot be read ({error})") from None
    hints = typing.get_type_hints(args_class)
    if not (algorithm := str(content.get("algorithm", ""))).startswith(args_class.chapter):
        why = f"{path} belongs to another chapter, {algorithm}"
        raise ConfigError("resume", folder, why, "resume it with the script that started it")
    if foreign := set(saved) - set(flags_of(args_class)):
        why = f"{path} has {min(map(str, foreign))}, which this version does not know; written by a newer version?"
        raise ConfigError("resume", folder, why, "resume it with the version that wrote it")
    given = {token.partition("=")[0].replace("_", "-").replace("--no-", "--") for token in argv}
    if (name := peek(argv, "--run-name")) not in (None, folder.resolve().name):
        raise ConfigError("run-name", name, f"--resume goes on in {folder}", "leave it out")
    try:
        flags = [
            token
            for name, value in saved.items()
            if _flag(name) not in given
            for token in _saved_flag(name, value, hints[name])
        ]
        args: A = _cli(args_class, args_class(), "", flags)
        check_ranges(args)
    except ConfigError as error:
        why = f"{path} has {error.given}: {error.why}"
        raise ConfigError("resume", folder, why, f"correct it there, or give --{error.what} now") from None
    return args


def hint_of_runs(folder: Path) -> str:
    """What to name instead of a folder that holds no run: the run that it is part of, or the newest of those in it."""
    if (folder.parent / "config.json").exists():
        return f"name the run folder, {folder.parent}"
    runs = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if runs:
        return f"name one of its runs, for instance the newest, {runs[-1].parent}"
    return "name a run folder, runs/<name>"


def _saved_flag(name: str, value: object, hint: object) -> list[str]:
    """A saved setting as the tokens of a flag. Raises ConfigError for a bool that is neither true nor false."""
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        return [_flag(name), *map(str, value)]
    if hint is not bool:
        return [f"{_flag(name)}={value}"]
    if not isinstance(value, bool):
        raise ConfigError(flag_name(name), value, "must be true or false")
    return [_flag(name) if value else f"--no-{flag_name(name)}"]


def flags_of(args_class: type[Any]) -> list[str]:
    """Names of the fields, which are flags."""
    return [field.name for field in dataclasses.fields(args_class)]


def _flag(name: str) -> str:
    return f"--{flag_name(name)}"


def _cli(args_class: type[P], default: P | None, description: str, argv: list[str], **options: Any) -> Any:
    """Run tyro's parser, with options of its own. Raises ConfigError where tyro would print a box and exit."""
    import tyro  # here, so that spawned actors need not load it
    from tyro._errors import on_parse_error

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

    @registry.primitive_rule
    def none_in_any_case(info: tyro.constructors.PrimitiveTypeInfo):
        if info.type is not type(None):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="None",
            instance_from_str=lambda tokens: parse_none(tokens[0]),
            is_instance=lambda value: value is None,
            str_from_instance=lambda value: ["None"],
        )

    def refuse(event: ParseErrorEvent) -> None:
        raise parse_error(event, argv, [flag_name(name) for name in flags_of(args_class)])

    if "--version" in argv:
        print(f"a3c-mp {a3c_mp.__version__}")
        sys.exit(0)
    shows_help = bool({"-h", "--help"} & set(argv))
    with on_parse_error(refuse), ExitStack() as stack:
        if shows_help:
            stack.enter_context(_default_sigpipe())
            stack.enter_context(grouped_help() if issubclass(args_class, CommonArgs) else nullcontext())
        return tyro.cli(
            args_class,
            args=argv,
            default=tyro.MISSING_NONPROP if default is None else default,
            description=textwrap.dedent(description),
            registry=registry,
            **options,
        )


@contextmanager
def _default_sigpipe() -> Iterator[None]:
    """Let a closed pipe end the process, so that `--help | head` shows no traceback."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        sys.stdout.flush()
        signal.signal(signal.SIGPIPE, before)


def parse_int(text: str) -> int:
    """Whole numbers, also as 1_000_000, 1e6 or 1M. Raises ValueError for anything else."""
    try:
        return int(text)
    except ValueError:
        pass
    exponent = EXPONENTS.get(text[-1:].lower())
    try:
        number = float(text if exponent is None else text[:-1] + exponent)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError("must be a whole number, for instance 500000, 1e6 or 2M")
    return int(number)


def parse_none(text: str) -> None:
    """None for the word none, in any case. Raises ValueError for anything else."""
    if text.lower() != "none":
        raise ValueError("must be None")
