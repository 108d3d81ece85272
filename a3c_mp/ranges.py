"""Numbers of settings: how they are written, which are in range, and the error where one is not."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass
from typing import Annotated, Any


class ConfigError(Exception):
    """Bad input, found before any process starts: one line for the user, exit code 2.

    Args:
        what, value: the setting, as its flag is spelled, and what was given.
        why, fix: what is wrong with it, and what to do.
    """

    def __init__(self, what: str, value: object, why: str, fix: str = "see --help"):
        super().__init__(" ".join(f"{what}={value}: {why}; {fix}".split()))
        self.what, self.value, self.why, self.fix = what, value, why, fix


@dataclass(frozen=True)
class Between:
    """The values a numeric flag may take, both ends included."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.low:g} or more"
        return f"between {self.low:g} and {self.high:g}"


Count = Annotated[int, Between(1)]
NonNegative = Annotated[float, Between(0)]
Fraction = Annotated[float, Between(0, 1)]


def parse_int(text: str) -> int:
    """Whole numbers, also as 1e6 or 1_000_000. Raises ValueError for anything else."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)


def flag_name(field: str) -> str:
    return field.replace("_", "-")


def check_ranges(args: object) -> None:
    """Raise ConfigError for the first field outside the `Between` of its annotation, or not finite."""
    for name, hint in typing.get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ConfigError(flag_name(name), value, "must be a finite number")
        for bounds in bounds_of(hint):
            if not bounds.low <= value <= bounds.high:
                raise ConfigError(flag_name(name), value, f"must be {bounds}")


def bounds_of(hint: Any) -> list[Between]:
    """The `Between` of an annotation, also inside `X | None`."""
    found = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Between)]
    return found + [bounds for inner in typing.get_args(hint) for bounds in bounds_of(inner)]
