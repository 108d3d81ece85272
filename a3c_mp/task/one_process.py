"""Collectors in the process of the learner, and what their pool shares with that of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Self

from a3c_mp.processes.pool import Closing, Filled, SlotLedger, StateSource, Token, WorkerEvent, WorkerOptions


class Pool:
    """The learner's end of its collectors.

    Args:
        num_workers, states, options, on_restart: as of `Workers`.
    """

    def __init__(
        self, num_workers: int, *, states: StateSource, options: WorkerOptions,
        on_restart: Callable[[WorkerEvent], None],
    ):  # fmt: skip
        self.ledger = SlotLedger(num_workers, options)
        self.states, self.on_restart = states, on_restart
        self.seed_keys: list[tuple[int, ...]] = [()] * num_workers
        """numbers that the seeds of each collector follow from, as of a `WorkerChannel`"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def prepare(self, worker: int, restarts: int = 0) -> Any:
        """Called before a collector of this machine starts; returns the state that it continues from."""
        restored = self.states.record_start(worker)
        self.seed_keys[worker] = self.states.start, worker, 0 if restored is not None else restarts
        return restored

    def forget_state(self, worker: int, reason: str) -> None:
        """A collector cannot be rebuilt, and plays new games."""
        self.states.forget(worker)
        self.on_restart(WorkerEvent(worker, f"collector {worker} cannot be rebuilt: {reason}", replaced=False))


class LocalPool(Pool):
    """Collectors and learner in one process: a round is complete once each collector has filled a slot."""

    def __init__(self, num_workers: int, *, options: WorkerOptions, **others: Any):
        super().__init__(num_workers, options=replace(options, in_order=True), **others)
        self.channels = [LocalChannel(self, worker) for worker in range(num_workers)]

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
    """A collector's end in the process of the learner; used as `NodeChannel` is."""

    def __init__(self, pool: LocalPool, worker: int):
        super().__init__()
        self.memory: Any = None
        self.pool, self.worker, self.actor = pool, worker, worker
        self.restored = pool.prepare(worker)
        self.seed_key, self.tokens = pool.seed_keys[worker], list(pool.ledger.given[worker])

    def take(self) -> Token | None:
        """Return the next token; None if all slots are filled."""
        return self.tokens.pop(0) if self.tokens else None

    def send(self, slot: int, payload: Any) -> None:
        self.pool.ledger.fill(self.worker, slot, payload)

    def not_restored(self, reason: str) -> None:
        self.pool.forget_state(self.worker, reason)

    def beat(self) -> None:
        pass
