"""Means of metrics between two writes, and shares of the learner's time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Timings:
    """A timer of named sections of code; `with timings("learning"):` adds to one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.since = time.monotonic()
        self.ended = 0.0  # when the last section ended

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.ended = time.monotonic()
            self.seconds[name] += self.ended - start

    def shares(self) -> dict[str, float]:
        """The share of each section in the time since the last call."""
        now = time.monotonic()
        shares = {name: seconds / (now - self.since) for name, seconds in self.seconds.items()}
        self.seconds.clear()
        self.since = now
        return shares


class Means:
    """Means of named values between flushes; tensors stay on their device until then."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor | float]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self.values[name].append(value.detach().float().mean() if isinstance(value, Tensor) else value)

    def pop(self) -> dict[str, float]:
        """The means, which start again from nothing."""
        means = {
            name: torch.stack([torch.as_tensor(v) for v in values]).mean().item()
            for name, values in self.values.items()
        }
        self.values.clear()
        return means
