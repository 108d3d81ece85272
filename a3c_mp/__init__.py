"""a3c-mp: distributed deep reinforcement learning: A3C, Ape-X, IMPALA, tasks of middleware, populations, Ray."""

from typing import TYPE_CHECKING, Any

from a3c_mp import _bootstrap, errors  # noqa: F401  (the first sets up the process; it must come before torch)

if TYPE_CHECKING:
    from a3c_mp.api.training import Callback, Result, load_policy, train

__version__ = "0.3.0.dev0"
__all__ = ["Callback", "Result", "errors", "load_policy", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded when they are used: chapters need none of them
        from a3c_mp.api import training

        return getattr(training, name)
    raise AttributeError(f"module 'a3c_mp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
