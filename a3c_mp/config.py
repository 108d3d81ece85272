"""Settings: the flags that all chapters share, how they are parsed and checked, and the errors a user can mend."""

from __future__ import annotations

import difflib
import io
import json
import re
import signal
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import gymnasium
import torch

import wrappers
from a3c_mp.ending import Stopped, run_to_end
from a3c_mp.ranges import Between, ConfigError, Count, Fraction, NonNegative, check_ranges, flag_name, parse_int

A = TypeVar("A", bound="CommonArgs")
P = TypeVar("P")

FIX_ENV = "fix the environment, or choose another"


@dataclass(frozen=True)
class CommonArgs:
    env_id: str = "PongNoFrameskip-v4"
    """gymnasium id; module:Env-v0 imports the module first"""
    cuda: bool = False
    """keep the nets on the GPU that torch calls cuda:0"""
    num_actors: Annotated[int, Between(1, 1024)] = 2
    """actor processes"""
    num_envs: Annotated[int, Between(1, 4096)] = 32
    """environments in each actor (B)"""
    total_steps: Count = 10_000_000
    """stop after this many agent steps"""
    stop_return: float | None = None
    """solved when the mean return of the last 100 games (at least 20) reaches this"""
    max_seconds: NonNegative | None = None
    """stop this long after the start, or after the resumption (s)"""
    seed: Annotated[int, Between(0, 2**31 - 1)] = 1
    """seed of weights, environments and sampling"""
    run_name: str | None = None
    """folder of the run inside runs-dir; the default is made of chapter, environment, seed and time"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    resume: Path | None = None
    """run folder to continue, with its own settings except for flags given now"""
    checkpoint_seconds: Annotated[float, Between(0.1)] = 60.0
    """time between checkpoints (s)"""
    checkpoint_steps: Count | None = None
    """also write a checkpoint each time this many agent steps have passed"""
    deterministic: bool = False
    """fixed order of rollouts and weights: two runs with one seed end bit-identical"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """number format of nets on images (on vectors: fp32); auto takes bf16 where the hardware has it"""
    learner_threads: Annotated[int, Between(1, 1024)] = 1
    """CPU threads of the learner"""
    max_restarts: Annotated[int, Between(0)] = 5
    """how many dead or hanging actors each learner replaces before the run fails"""
    hang_seconds: Annotated[float, Between(1)] = 60.0
    """an actor that takes no step for so long is killed and replaced (s); until its first step it has 120"""


@dataclass(frozen=True)
class LearningArgs(CommonArgs):
    """What is learned from, in every chapter."""

    gamma: Fraction = 0.99
    """discount for each agent step"""
    reward_clip: bool = True
    """learn from the sign of rewards, by default on Atari games only; the returns shown stay raw"""
    reward_scale: NonNegative = 1.0
    """what rewards are multiplied by for learning, after clipping"""
    life_loss_terminal: bool = True
    """a lost life ends the return, though not the game"""
    normalize_obs: bool = True
    """subtract from every pixel or input its running mean and divide by its deviation"""


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


def check_env(env_id: str, actions: type[gymnasium.Space]) -> tuple[gymnasium.Space, gymnasium.Space]:
    """(observation space, action space) of an environment, made once to see that it can be.

    Raises:
        ConfigError: it cannot, its actions are of another kind than the chapter's, or it ends the process.
    """
    try:
        env = wrappers.make_env(env_id)
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # an environment of the user's own can raise anything
        why = _told(error).split(" Did you mean:")[0].rstrip(".")  # gymnasium's guess leaves out the version
        raise ConfigError("env-id", env_id, why, _suggestion(env_id)) from error
    try:
        spaces = env.observation_space, env.action_space
        if not isinstance(spaces[1], actions) or getattr(spaces[1], "start", 0) != 0:
            needed = "Discrete from 0" if actions is gymnasium.spaces.Discrete else actions.__name__
            fix = (
                "choose another" if actions is gymnasium.spaces.Discrete else "choose another, for instance Pendulum-v1"
            )
            raise ConfigError("env-id", env_id, f"its actions are {spaces[1]}, this needs {needed}", fix)
        _check_contract(env, env_id)
    finally:
        with suppress(Exception):
            env.close()
    return spaces


def _check_contract(env: gymnasium.Env, env_id: str) -> None:
    try:
        wrappers.check_contract(env)
    except (KeyboardInterrupt, Stopped):
        raise
    except Exception as error:
        if isinstance(error, wrappers.BrokenContract):
            raise ConfigError("env-id", env_id, _told(error), FIX_ENV) from error
        # an actor reports what the environment raises itself, with the traceback
    except BaseException as error:
        raise ConfigError("env-id", env_id, _told(error), FIX_ENV) from error


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if not isinstance(error, Exception):  # SystemExit: an environment must not decide about the process
        return f"it raises {type(error).__name__}({text})"
    return (text or type(error).__name__).rstrip(".")


def _suggestion(env_id: str) -> str:
    """What to do about an environment that cannot be made: the id that was meant, if there is one like it."""
    if env_id in gymnasium.registry:
        return "choose another"
    known = {name.casefold(): name for name in gymnasium.registry}
    wanted = env_id.casefold()
    alike = [name for name in known if name.startswith(f"{wanted}-v")][-1:]  # the newest version
    alike = alike or difflib.get_close_matches(wanted, known, n=1, cutoff=0.8)
    if alike:
        return f"perhaps you meant {known[alike[0]]}"
    return "check the spelling, or see gymnasium.pprint_registry()"


def check_device(cuda: bool) -> torch.device:
    """The device of the nets. Raises ConfigError for `--cuda` without CUDA."""
    if cuda and not torch.cuda.is_available():
        raise ConfigError(
            "cuda", True, "torch sees no CUDA device", "leave --cuda out, or install a CUDA build of torch"
        )
    return torch.device("cuda" if cuda else "cpu")


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main` and end the process with its exit code; bad input becomes one line and code 2."""
    run_to_end(main, ConfigError)
