"""Environment ids: gymnasium's own, after `module:` if a module registers them, with keyword arguments after `?`.

`my_module:MyEnv-v0?size=5&walls=false` is `MyEnv-v0`, which `my_module` registers, made with size=5 and walls=False;
`my_module:MyEnv` is its class, or a function that makes one.
Values may have the numbers of actor and environment in them: see `wrappers.identity`.
"""

import ast
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

import gymnasium
from gymnasium.envs.registration import EnvSpec

from a3c_mp.wrappers.identity import with_numbers


class UnsupportedEnv(ValueError):
    """The environment keeps gymnasium's API, and has something that is not supported here."""


def find_spec(env_id: str) -> EnvSpec:
    """The spec of an id, with the id's keyword arguments. Raises gymnasium's own errors."""
    path, kwargs = split_id(env_id)
    module, _, name = path.rpartition(":")
    if module:
        if (here := os.getcwd()) not in sys.path:  # a script's own folder is all that Python adds
            sys.path.append(here)
        maker = getattr(importlib.import_module(module), name, None)
        if callable(maker) and name not in gymnasium.registry:
            return EnvSpec(name, maker, kwargs=kwargs)
    spec = gymnasium.spec(name)
    return dataclasses.replace(spec, kwargs={**spec.kwargs, **kwargs}) if kwargs else spec


def make_registered(env_id: str, **kwargs: Any) -> gymnasium.Env:
    """`gymnasium.make` for an id that may have keyword arguments of its own."""
    spec = find_spec(env_id)
    return gymnasium.make(spec if {"?", ":"} & {*env_id} else env_id, disable_env_checker=True, **kwargs)


def split_id(env_id: str) -> tuple[str, dict[str, Any]]:
    """`Env-v0?size=5` -> (`Env-v0`, {"size": 5}); values are JSON or Python literals, else text.

    Raises ValueError as `with_numbers`.
    """
    name, _, query = env_id.partition("?")
    return name, {key: _parse_value(with_numbers(text)) for key, text in parse_qsl(query, keep_blank_values=True)}


def with_kwargs(env_id: str, pairs: Sequence[str]) -> str:
    """An id with further keyword arguments, each `name=value`. Raises ValueError for any other form of one."""
    name, _, query = env_id.partition("?")
    merged = dict(parse_qsl(query, keep_blank_values=True))
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (equals and key.isidentifier()):
            raise ValueError("must be name=value")
        merged[key] = text
    for text in merged.values():
        with_numbers(text)
    return f"{name}?{urlencode(merged)}" if merged else name


def _parse_value(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError):
            pass
    return text
