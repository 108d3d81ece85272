"""Contexts: what the middleware of one iteration share, and what the tasks of several nodes share."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

running: ContextVar[tuple[str, ...]] = ContextVar("running", default=())  # names of nested middleware, outermost first


class Context:
    """Values that the middleware of one iteration pass on, as attributes. Each iteration has a new one.

    Attributes that were kept (`ctx.keep("train_iter")`) are in the contexts of all later iterations too. Any other
    attribute ends with its iteration, and reading it later raises an AttributeError that names who set it.
    """

    total_step: int  # number of this iteration, from 0
    finish: bool  # whether this is the last iteration
    _kept: set[str]
    _setters: dict[str, str]  # attribute -> middleware that set it in this iteration
    _lost: dict[str, str]  # attribute that was not kept -> who set it, and when

    def __init__(self, total_step: int = 0) -> None:
        self.__dict__.update(total_step=total_step, finish=False, _kept=set(), _setters={}, _lost={})

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self._setters[name] = running.get()[-1] if running.get() else ""

    def __getattr__(self, name: str) -> Any:
        """Called where there is no such attribute."""
        if lost := self.__dict__.get("_lost", {}).get(name):
            why = f"ctx.{name} is not set in iteration {self.total_step}; {lost}"
            raise AttributeError(f"{why} and did not keep it: call ctx.keep({name!r})")
        raise AttributeError(f"{name!r} is not set: no middleware of this iteration has set it")

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__ and not name.startswith("_")

    def get(self, name: str, default: Any = None) -> Any:
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
        new = Context(self.total_step + 1)
        new.__dict__.update(_kept=self._kept, _lost=self._lost)
        for name, setter in self._setters.items():
            if name in self._kept:
                new.__dict__[name], new._setters[name] = self.__dict__[name], setter
            else:
                self._lost[name] = f"{setter or 'other code'} set it in iteration {self.total_step}"
        return new


class SharedValues:
    """The newest values that other nodes share, as attributes or by `get`: `task.parallel_ctx.get("train_iter", 0)`.

    Names that are read one after the other have values of the same moment. Before a name is read again, as in a loop
    that waits for a change, messages are looked at.
    """

    def __init__(self, look: Callable[[], object]):
        self._look, self._values, self._read = look, dict[str, Any](), set[str]()

    def update(self, values: dict[str, Any]) -> None:
        """Take values that another node has sent; called as messages are handled."""
        self._values = self._values | values

    def __contains__(self, name: str) -> bool:
        if name in self._read:
            self._look()
            self._read.clear()
        self._read.add(name)
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        return self._values[name] if name in self else default

    def __getattr__(self, name: str) -> Any:
        """Called where there is no such attribute."""
        if name.startswith("_") or name not in self:
            raise AttributeError(f"{name!r} is not set: no other node has shared it so far")
        return self._values[name]
