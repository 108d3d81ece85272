"""Contexts: what the middleware of one iteration share, and what the other nodes share of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

current_middleware: ContextVar[str] = ContextVar("current_middleware", default="")
"""name of the middleware that runs in this thread"""
_OWN = ("_kept", "_set_by", "_lost")


class Context:
    """Values that the middleware of one iteration pass on, as attributes. Each iteration has a new one.

    Attributes that were kept (`ctx.keep("train_iter")`) are in the contexts of all later iterations too. Any other
    attribute ends with its iteration, and reading it later raises an AttributeError that names who set it.

    Attributes:
        total_step: number of this iteration, from 0.
        finish: whether this is the last iteration.
    """

    total_step: int
    finish: bool
    _kept: set[str]
    _set_by: dict[str, str]
    _lost: dict[str, tuple[str, int]]

    def __init__(self) -> None:
        own = self.__dict__
        own["_kept"], own["_set_by"], own["_lost"] = set(), {}, {}
        own["total_step"], own["finish"] = 0, False

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self._set_by[name] = current_middleware.get()

    def __getattr__(self, name: str) -> Any:
        """Called where there is no such attribute."""
        if (lost := self.__dict__.get("_lost", {})) and name in lost:
            setter, step = lost[name]
            who = f"{setter} set it" if setter else "it was set"
            why = f"ctx.{name} is not set in iteration {self.total_step}; {who} in iteration {step}"
            raise AttributeError(f"{why} and did not keep it: call ctx.keep({name!r})")
        raise AttributeError(f"ctx.{name} is not set: no middleware of this iteration has set it before")

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__ and name not in _OWN

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default if it is not set in this iteration."""
        return self.__dict__[name] if name in self else default

    def setdefault(self, name: str, default: Any) -> Any:
        """Return an attribute; set it to the default first if it is not set in this iteration."""
        if name not in self:
            setattr(self, name, default)
        return self.__dict__[name]

    def keep(self, *names: str) -> None:
        """Carry attributes over to all later iterations, whether they are set yet or not."""
        self._kept.update(names)

    def renew(self) -> Context:
        """Return the context of the next iteration: kept attributes, and no others."""
        new = type(self)()
        own, kept = new.__dict__, self._kept
        own["_kept"], own["_lost"] = kept, self._lost
        for name, setter in self._set_by.items():
            if name not in kept:
                self._lost[name] = (setter, self.total_step)
        for name in kept:
            if name in self.__dict__:
                own[name] = self.__dict__[name]
                own["_set_by"][name] = self._set_by.get(name, "")
        own["total_step"] = self.total_step + 1
        return new


class ParallelContext:
    """The newest values that other nodes share, as attributes: `task.parallel_ctx.train_iter`.

    Where several nodes share one name, the value that arrived last counts; `of(node)` has those of one node.
    """

    def __init__(self) -> None:
        self._newest: dict[str, Any] = {}
        self._nodes: dict[str, dict[str, Any]] = {}

    def update(self, node: str, values: Mapping[str, Any]) -> None:
        """Take values that a node shares."""
        self._newest.update(values)
        self._nodes.setdefault(node, {}).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._newest:
            raise AttributeError(f"no other node has shared {name!r} yet; nodes share by task.share({name!r})")
        return self._newest[name]

    def __contains__(self, name: str) -> bool:
        return name in self._newest

    def get(self, name: str, default: Any = None) -> Any:
        """Return the newest value of a name, or the default if no node has shared it yet."""
        return self._newest.get(name, default)

    def of(self, node: str) -> dict[str, Any]:
        """Return a copy of what one node shares, by name."""
        return dict(self._nodes.get(node, {}))
