"""Command line: settings from flags, presets and a resumed run; each input error is one line."""

import argparse
import dataclasses
import json
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gymnasium.spaces import Box

from a3c_mp import wrappers
from a3c_mp.cli.flags import as_flag, check_unused
from a3c_mp.cli.parser import is_flag_type, make_parser, plain_type, read_flags, refusal
from a3c_mp.config import PLACE, CommonArgs, check_name, check_ranges, flag_name, format_error, has_checkpoint
from a3c_mp.errors import ConfigError, Stopped, start_here
from a3c_mp.nets.layers import is_image

A = TypeVar("A")
FLAG_TYPES = "use bool, int, float, str, Path, a Literal, a tuple of one of them, or one of them and None"
OF_AN_ID = ("env_kwargs", *wrappers.Extras._fields)  # settings that become part of the environment's id
Presets = Mapping[str, Mapping[str, Any]]  # environment id -> settings that differ from the defaults


def parse_args(args_class: type[A], presets: Presets, description: str, argv: Sequence[str] | None = None) -> A:
    """Parse the command line over the defaults of an environment, or a resumed run's settings. Raises ConfigError."""
    _check_class(args_class)
    given, others = read_flags(args_class, argv)
    if others:
        raise refusal(others, args_class)
    if given.get("resume", "") is None:
        del given["resume"]
    wants_help, make, here = given.pop("help", False), typing.cast(Any, args_class), start_here()
    if (folder := run_to_continue(given, make.runs_dir)) is not None and "resume" not in given:
        given = {name: value for name, value in given.items() if name not in PLACE} | {"resume": folder}
    own = {name: getattr(make, name) for name in OF_AN_ID}  # a class may have defaults of its own
    if "resume" in given:
        default = make(**_saved_settings(args_class, given))
        if "env_id" in given:  # as where the run was started: a class may have defaults of its own
            found = defaults_for(args_class, _whole_id(given["env_id"], own | given), presets)
            given["env_id"] = _whole_id(given["env_id"], {name: found.get(name, own[name]) for name in own} | given)
    else:
        env_id = _whole_id(given.pop("env_id", make.env_id), given)
        with_own = _whole_id(env_id, own | given)
        defaults = defaults_for(args_class, with_own, presets, given.get("algo", getattr(make, "algo", None)))
        if unknown := sorted(defaults.keys() - _fields(args_class)):
            raise ConfigError(flag_name(unknown[0]), "", f"a preset of {env_id} sets it, and there is no such setting")
        default = make(**{**defaults, "env_id": env_id})
    if wants_help:
        note = textwrap.fill(f"Defaults depend on --env-id; there are presets for {', '.join(presets)}.", 120)
        _print_help(make_parser(args_class, f"{description}\n{note}", default))
    args = dataclasses.replace(default, **given)
    check_ranges(args)
    check_unused(args, given)
    paths = {name: here / value for name, value in vars(args).items() if isinstance(value, Path)}
    parts = {name: getattr(CommonArgs, name) for name in OF_AN_ID}
    return dataclasses.replace(args, **parts, env_id=_whole_id(args.env_id, vars(args)), **paths)


def run_to_continue(given: Mapping[str, Any], runs_dir: Path) -> Path | None:
    """The folder of the run that flags continue: `--resume`, or with `--resume-or-start` one with a checkpoint."""
    if "resume" in given or not given.get("resume_or_start"):
        return given.get("resume")
    if (name := given.get("run_name")) is None:
        raise ConfigError("resume-or-start", "", "it needs the name of the run", "add --run-name NAME")
    check_name(name)
    folder = given.get("runs_dir", runs_dir) / name
    return folder if has_checkpoint(folder) else None


def parse_algo(algorithms: Mapping[str, Any], description: str, argv: Sequence[str] | None = None) -> tuple[Any, Any]:
    """Parse the command line of a chapter with several algorithms: (settings, the one of `--algo`, or the first)."""
    first, algo = next(iter(algorithms.values())), None
    # What has to be known first: --algo, and which run goes on.
    early = dataclasses.make_dataclass("Early", [("algo", str | None, None)], bases=(CommonArgs,), frozen=True)
    with suppress(ConfigError, OSError, ValueError, LookupError, TypeError):  # `parse_args` says what is wrong
        given, _ = read_flags(early, argv)
        algo = given.get("algo")
        if (folder := run_to_continue(given, first.args_class.runs_dir)) is not None:
            algo = json.loads((folder / "config.json").read_text())["args"]["algo"]
    algorithm = algorithms.get(str(algo), first)
    args = parse_args(algorithm.args_class, algorithm.presets, description, argv)
    algo = algo or vars(args).get("algo")  # by its own default a run could not be resumed
    if algo is not None and algo not in algorithms:
        raise ConfigError("algo", algo, "this script does not have it", f"choose of {', '.join(algorithms)}")
    return args, algorithm


def parse_plain(args_class: type[A], description: str, argv: Sequence[str] | None = None) -> A:
    """Parse the command line of a script without presets and resume."""
    args, others = parse_own(args_class, description, argv)
    if others:
        raise refusal(others, args_class)
    return args


def parse_own(args_class: type[A], description: str, argv: Sequence[str] | None = None) -> tuple[A, list[str]]:
    """Parse a script's own flags of the command line; return (settings, other flags)."""
    given, others = read_flags(args_class, argv)
    if others and not others[0].startswith("-"):
        raise refusal(others, args_class)
    if given.pop("help", False):
        _print_help(make_parser(args_class, description, args_class))
    for field in dataclasses.fields(args_class):  # type: ignore[arg-type]
        if given.get(field.name, field.default) is None and field.default is dataclasses.MISSING:
            raise ConfigError(flag_name(field.name), "", "must be given")
        if given.get(field.name) == () and isinstance(field.default, tuple) and field.default:
            raise ConfigError(flag_name(field.name), "", "has no values", "name some, or leave it out")
    args = args_class(**given)
    check_ranges(args)
    return args, others


def _print_help(parser: argparse.ArgumentParser) -> NoReturn:
    with suppress(BrokenPipeError):  # `--help | head`
        print(parser.format_help(), end="", flush=True)
    sys.exit(0)


def _check_class(args_class: Any) -> None:
    """Refuse settings of a chapter of one's own that would have no effect. Raises ConfigError."""
    if "__dataclass_params__" not in vars(args_class):
        fix = "put @dataclass(frozen=True) above it"
        raise ConfigError(args_class.__name__, "", "its settings have no effect", fix)
    hints = typing.get_type_hints(args_class)
    for field in dataclasses.fields(args_class):
        if field.default is dataclasses.MISSING:
            raise ConfigError(flag_name(field.name), "", "it has no plain default", "give one, such as a tuple or None")
        if not is_flag_type(hints[field.name]):
            raise ConfigError(flag_name(field.name), "", f"no flag can be a {field.type}", FLAG_TYPES)
        if (value := getattr(args_class, field.name)) is not field.default:
            owner = next(each for each in args_class.__mro__ if field.name in vars(each))
            fix = f"write {field.name}: {getattr(field.type, '__name__', field.type)} = {value!r}"
            if "__dataclass_params__" not in vars(owner):
                fix += ", with @dataclass(frozen=True) above the class"
            raise ConfigError(flag_name(field.name), value, f"{owner.__name__} sets it without effect", fix)


def _fields(args_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(args_class)}


def _whole_id(env_id: str, settings: Mapping[str, Any]) -> str:
    """An environment's id with the settings `OF_AN_ID`."""
    pairs = settings.get("env_kwargs", ())
    try:
        env_id = wrappers.with_kwargs(env_id, pairs)
    except ValueError as error:
        fix = "for instance --env-kwargs size=5 walls=false"
        raise ConfigError("env-kwargs", " ".join(pairs), str(error), fix) from None
    try:
        env_id = wrappers.with_extras(env_id, settings)
        check_ranges(dataclasses.replace(CommonArgs(), **wrappers.extras_of(env_id)._asdict()))
    except ValueError as error:
        raise ConfigError("env-id", env_id, str(error), "see docs/environments.md") from None
    return env_id


def defaults_for(args_class: Any, env_id: str, presets: Presets, algo: str | None = None) -> dict[str, Any]:
    """The settings that an environment changes, with `algo`.

    A default in the class body of a chapter holds for all environments. Presets, and the library's settings for a kind
    of environment, change the fields that the class inherits; what changes the others stands in the body as well:
    `changes`, environment id -> settings, or settings for a kind of environment.
    """
    name, kwargs = wrappers.split_id(env_id)
    found: dict[str, Any] = {}
    kinds: list[str] = []  # class attributes that hold settings
    wrappers.NOT_MADE.pop(env_id, None)
    try:
        is_atari = wrappers.is_atari(env_id)
        has_own_rewards = is_atari or wrappers.ids.keep_rewards(wrappers.extras_of(env_id).wrapper)
        found = {"reward_clip": is_atari}
        kinds = ["images"] if is_atari else []
        if not is_atari and (name not in presets or kwargs or wrappers.extras_of(env_id).wrapper):
            obs_space, action_space = wrappers.spaces(env_id)
            kinds = ["images"] if is_image(obs_space) else []
            if name in presets and _kinds(obs_space, action_space) != _kinds(*wrappers.spaces(name)):
                presets = {}  # a wrapper, or an argument, has made others
        if not has_own_rewards:
            presets = {}
        if name not in presets:
            goal = wrappers.find_spec(env_id).reward_threshold if has_own_rewards else None
            found["stop_return"] = None if goal is None else float(goal)
        if name not in presets and not is_atari:
            if type(None) in typing.get_args(typing.get_type_hints(args_class).get("reward_scale")):
                found["reward_scale"] = None
            kinds = ["continuous", *kinds] if isinstance(action_space, Box) else kinds or ["vectors"]
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException:  # an unknown id, or a module of the user's own: `probe_env` says what is wrong
        pass
    module = args_class.__module__
    own = vars(args_class) if module.startswith("a3c_mp.chapters.") or not module.startswith("a3c_mp.") else {}
    layers = [("", found), *(_layer(args_class, kind, algo) for kind in kinds), ("", presets.get(name, {}))]
    layers.append(("changes", getattr(args_class, "changes", {}).get(name, {})))
    settings: dict[str, Any] = {}
    for where, layer in layers:
        if where == "images" and "continuous" in kinds:
            layer = {name: value for name, value in layer.items() if name != "genes"}  # of entropy_coef above 0
        settings |= {field: value for field, value in layer.items() if where in own or field not in own}
    if "continuous" in kinds:
        settings.pop("explore_envs", None)  # it repeats discrete actions
    return settings


def _layer(args_class: Any, kind: str, algo: str | None) -> tuple[str, Mapping[str, Any]]:
    """The class attribute for a kind of environment, with this algorithm if there is one, and its value."""
    names = f"{kind}_{algo}", kind
    return next((name, vars(cls)[name]) for cls in args_class.__mro__ for name in names if name in vars(cls))


def _kinds(obs_space: Any, action_space: Any) -> tuple[bool, bool]:
    return is_image(obs_space), isinstance(action_space, Box)


def _saved_settings(args_class: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the config.json of a run that is resumed, checked like flags, without those in `given`."""
    folder: Path = given["resume"]
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text())
        saved = {**content["args"]}
    except (FileNotFoundError, NotADirectoryError):
        fix = "name a run folder, runs/<name>"
        raise ConfigError("resume", folder, "there is no run in this folder", fix) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        lacks = "it has no " if isinstance(error, KeyError) else ""
        raise ConfigError("resume", folder, f"{path} cannot be read ({lacks}{error})") from None
    if why := format_error(path, content.get("format")):
        raise ConfigError("resume", folder, why, "start a new run")
    if not (algorithm := str(content.get("algorithm", ""))).startswith(args_class.chapter):
        why = f"{path} belongs to another chapter, {algorithm}"
        raise ConfigError("resume", folder, why, "resume it with the script that started it")
    kinds = {name: plain_type(hint) for name, hint in typing.get_type_hints(args_class).items()}
    unset = {name for name in saved if kinds.get(name) is bool or getattr(args_class, name, 0) is None}  # by None
    left_out = {name for name, value in saved.items() if name in given or (value is None and name in unset)}
    words = [word for name, value in saved.items() if name not in left_out for word in as_flag(name, value)]
    others: list[str] = []
    try:
        settings, others = read_flags(args_class, words)
        if others:
            raise refusal(others, args_class)
        check_ranges(args_class(**settings))
    except ConfigError as error:
        why = f"{path} has {error.given}: {error.why}"
        fix = "remove it there" if others else "correct it there, or give its flag now"
        raise ConfigError("resume", folder, why, fix) from None
    before = {name.partition("=")[0].replace("-", "_") for name in map(str, saved.get("genes") or ())}
    members_own = before & set(getattr(args_class(**{**settings, **given}), "evolving", ()))
    for name in (*args_class.fixed, *members_own):
        if name in given and name in saved and json.loads(json.dumps(given[name], default=str)) != saved[name]:
            raise ConfigError(flag_name(name), given[name], f"the run in {folder} has {saved[name]}", "leave it out")
    return settings
