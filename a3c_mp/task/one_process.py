"""Collectors and learner in one process: the interfaces of `NodePool` and `NodeChannel`, without messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from a3c_mp.processes.pool import Closing, Filled, SlotLedger, StateSource, Token, WorkerEvent, WorkerOptions
from a3c_mp.task.exchange import Setup


class LocalPool:
    """Collectors, slots and learner in one process: their channels, and the rounds that they have filled.

    Args:
        num_workers, states, options, on_restart: as of `Workers`.
    """

    def __init__(
        self, num_workers: int, *, states: StateSource, options: WorkerOptions,
        on_restart: Callable[[WorkerEvent], None],
    ):  # fmt: skip
        self.ledger = SlotLedger(num_workers, replace(options, in_order=True))
        self.channels = [
            LocalChannel(self, Setup(worker, (states.start, worker, 0), states.record_start(worker)))
            for worker in range(num_workers)
        ]
        for channel, tokens in zip(self.channels, self.ledger.given, strict=True):
            channel.tokens.extend(tokens)
        self.states, self.on_restart = states, on_restart

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *exc: object) -> None:
        for channel in self.channels:
            channel.close()

    def take(self, should_stop: Callable[[], bool], size: int = 1) -> list[Filled]:
        """Return the next round, or an empty one if it is not complete yet."""
        return [] if should_stop() else self.ledger.take(size)

    def release(self, filled: Iterable[Filled], version: int) -> None:
        """Give slots back to their collectors."""
        for message in filled:
            self.channels[message.worker].tokens.append(self.ledger.give(message, version))


class LocalChannel(Closing):
    """A collector's end in the process of the learner; see `NodeChannel`."""

    def __init__(self, pool: LocalPool, setup: Setup):
        self.pool, self.worker, self.actor = pool, setup.worker, setup.worker
        self.seed_key, self.restored = setup.seed_key, setup.restored
        self.memory: Any = None
        self.tokens: list[Token] = []
        super().__init__()

    def take(self) -> Token | None:
        """Return the next token; None if all slots are filled."""
        return self.tokens.pop(0) if self.tokens else None

    def send(self, slot: int, payload: Any) -> None:
        self.pool.ledger.fill(self.worker, slot, payload)

    def not_restored(self, reason: str) -> None:
        self.pool.states.forget(self.worker)
        text = f"collector {self.worker} cannot be rebuilt: {reason}"
        self.pool.on_restart(WorkerEvent(self.worker, text, replaced=False))

    def beat(self) -> None:
        pass
