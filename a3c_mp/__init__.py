"""a3c-mp: distributed deep reinforcement learning: A3C, Ape-X, IMPALA, tasks of middleware, populations, Ray."""

from typing import Any

from a3c_mp import _bootstrap  # noqa: F401  (sets up the process; must come before torch)

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name in ("train", "Callback", "load_policy"):  # loaded when they are used: chapters need none of them
        from a3c_mp import api

        return getattr(api, name)
    raise AttributeError(f"module 'a3c_mp' has no attribute {name!r}")
