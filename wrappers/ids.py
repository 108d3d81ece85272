"""Environment ids: gymnasium's own, after `module:` if a module registers them, with keyword arguments after `?`.

`my_module:MyEnv-v0?size=5&walls=false` is `MyEnv-v0`, which `my_module` registers, made with size=5 and walls=False;
`my_module:MyEnv` is its class, or a function that makes one.
After `#` comes what is done to it besides (`Extras`): `MyEnv-v0#wrapper=my_module:MyWrapper&frame_size=84`.
Values may have the numbers of actor and environment in them: see `wrappers.identity`.
"""

import ast
import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qs, parse_qsl, urlencode

import gymnasium
from gymnasium.envs.registration import EnvSpec

from a3c_mp.wrappers.identity import with_numbers


class UnsupportedEnv(ValueError):
    """The environment keeps gymnasium's API, and has something that is not supported here; `flag` is to blame."""

    def __init__(self, why: str, fix: str = "choose another", flag: str = "env-id", value: Any = None):
        super().__init__(why)
        self.fix, self.flag, self.value = fix, flag, value


class Extras(NamedTuple):
    """What is done to an environment's observations and actions, besides what it does itself."""

    wrapper: tuple[str, ...] = ()  # module:Class[,name=value], the innermost first
    obs_keys: tuple[str, ...] = ()  # parts of its observations, in a `Dict`; none: all
    frame_size: int | None = None  # side of images (pixels); None: as they are, Atari's 84
    frame_stack: int | None = None  # frames in an observation; None: as they are, Atari's 4


OF_EXTRAS = re.compile(f"#(?=(?:{'|'.join(Extras._fields)})=)")


def find_spec(env_id: str) -> EnvSpec:
    """The spec of an id, with the id's keyword arguments. Raises gymnasium's own errors."""
    path, kwargs = split_id(env_id)
    module, _, name = path.rpartition(":")
    if module:
        maker = _imported(module, name)
        if callable(maker) and name not in gymnasium.registry:
            return EnvSpec(name, maker, kwargs=kwargs)
    spec = gymnasium.spec(name)
    return dataclasses.replace(spec, kwargs={**spec.kwargs, **kwargs}) if kwargs else spec


def _imported(module: str, name: str) -> Any:
    """What a module, installed or in the current folder, has under this name, or None."""
    if (here := os.getcwd()) not in sys.path:  # a script's own folder is all that Python adds
        sys.path.append(here)
    found, top = importlib.import_module(module), module.partition(".")[0]
    file = getattr(sys.modules[top], "__file__", None) or here
    for own in (os.path.join(here, f"{top}.py"), os.path.join(here, top, "__init__.py")):
        if os.path.exists(own) and not os.path.samefile(own, file):
            raise ImportError(f"{file} has the same name as {own}, and is found first; rename yours")
    return getattr(found, name, None)


def make_registered(env_id: str, **kwargs: Any) -> gymnasium.Env:
    """`gymnasium.make` for an id that may have keyword arguments of its own; `Extras` are left out."""
    spec = find_spec(env_id)
    return gymnasium.make(spec if {"?", ":", "#"} & {*env_id} else env_id, disable_env_checker=True, **kwargs)


def wrapped(env: gymnasium.Env, wrappers: Sequence[str]) -> gymnasium.Env:
    """An environment in wrappers, `module:Class[,name=value]`, the innermost first. Raises UnsupportedEnv."""
    for text in wrappers:
        name, *pairs = re.split(r",(?=[^\W\d]\w*=)", text)
        module, _, attribute = name.partition(":")
        fix = "must be module:Class[,name=value], of a module that is installed or in the current folder"
        try:
            kwargs = {key: parsed(value) for key, _, value in (pair.partition("=") for pair in pairs)}
            if (maker := _imported(module, attribute)) is None:
                raise AttributeError(f"{module} has no {attribute}")
            fix = "correct it, or its arguments"
            env = maker(env, **kwargs)
            if not isinstance(env, gymnasium.Env):
                raise TypeError(f"it returned a {type(env).__name__}, must be a gymnasium.Wrapper")
        except Exception as error:  # code of the user's own can raise anything
            raise UnsupportedEnv(f"{type(error).__name__}: {error}", fix, "wrapper", text) from error
    return env


def keep_rewards(wrappers: Sequence[str]) -> bool:
    """Whether wrappers, as of `wrapped`, are known to leave rewards as they are: by their kind, or gymnasium's own."""
    makers = [_imported(*text.partition(",")[0].split(":")) for text in wrappers]
    kinds = (gymnasium.ObservationWrapper, gymnasium.ActionWrapper)
    own = [m.__module__.startswith("gymnasium.") and "Reward" not in m.__name__ for m in makers]
    return all(is_own or (isinstance(m, type) and issubclass(m, kinds)) for m, is_own in zip(makers, own, strict=True))


def split_id(env_id: str) -> tuple[str, dict[str, Any]]:
    """`Env-v0?size=5` -> (`Env-v0`, {"size": 5}); values as `parsed`, which may raise ValueError."""
    name, _, query = OF_EXTRAS.split(env_id)[0].partition("?")
    return name, {key: parsed(text) for key, text in parse_qsl(query, keep_blank_values=True)}


def extras_of(env_id: str) -> Extras:
    """The `Extras` in an id. Raises ValueError for a name that is none of them, or a size that is no number."""
    found = parse_qs(env_id[match.end() :]) if (match := OF_EXTRAS.search(env_id)) else {}
    if unknown := found.keys() - {*Extras._fields}:
        raise ValueError(f"{min(unknown)} is none of {', '.join(Extras._fields)}")
    numbers = "frame_size", "frame_stack"
    values: Any = {name: int(texts[-1]) if name in numbers else tuple(texts) for name, texts in found.items()}
    return Extras(**values)


def with_extras(env_id: str, given: Mapping[str, Any]) -> str:
    """An id with those of `Extras` that are given and not empty; they replace those in it."""
    extras = extras_of(env_id)._replace(**{name: given[name] for name in Extras._fields if given.get(name)})
    pairs = {name: value for name, value in extras._asdict().items() if value}
    plain = OF_EXTRAS.split(env_id)[0]
    return f"{plain}#{urlencode(pairs, doseq=True, safe=':,=()[]')}" if pairs else plain


def with_kwargs(env_id: str, pairs: Sequence[str]) -> str:
    """An id with further keyword arguments, each `name=value`. Raises ValueError for any other form of one."""
    plain = OF_EXTRAS.split(env_id)[0]
    rest = env_id[len(plain) :]
    name, _, query = plain.partition("?")
    merged = dict(parse_qsl(query, keep_blank_values=True))
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (equals and key.isidentifier()):
            raise ValueError("must be name=value")
        merged[key] = text
    for text in merged.values():
        with_numbers(text)
    return (f"{name}?{urlencode(merged)}" if merged else name) + rest


def parsed(text: str) -> Any:
    """The value in a text, JSON or a Python literal, or the text itself. Raises ValueError as `with_numbers`."""
    text = with_numbers(text)
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return parse(text)
    return text
