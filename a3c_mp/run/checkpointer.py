"""Checkpoints of a run: when they are due, and what they hold (net, optimizer, random numbers, progress, parts)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from a3c_mp.errors import CheckpointError, ConfigError, DoesNotFit
from a3c_mp.maths.schedules import passes_multiple
from a3c_mp.processes.learner_group import Stateful
from a3c_mp.run import checkpoint
from a3c_mp.run.evaluation import Evaluation
from a3c_mp.run.progress import Progress
from a3c_mp.run.run_dir import as_recorded, changed_settings, settings_before

DIFFERS = "the run differs from one that was never interrupted"


class Checkpointer:
    """Saves the state of a run at intervals; with `--resume`, restores the newest one that can be read.

    Args:
        folder: for the checkpoints.
        algorithm: name of the chapter.
        net, optimizer, progress, log: of the run; without an optimizer, `extra` has what trains the net.
        extra: the chapter's own parts, by name.
    """

    def __init__(
        self, folder: Path, algorithm: str, net: nn.Module, optimizer: torch.optim.Optimizer | None, progress: Progress,
        extra: Mapping[str, Stateful], log: logging.Logger,
    ):  # fmt: skip
        self.folder, self.net, self.optimizer, self.progress, self.log = folder, net, optimizer, progress, log
        self.args, self.extra = progress.args, dict(extra)
        self.origin: dict[str, Any] = {"algorithm": algorithm, "env_id": self.args.env_id}
        self.rng = torch.Generator().manual_seed(self.args.seed)
        self.newest: Path | None = None  # of this run
        self.saved_steps: int | None = None  # at the newest one
        self._unclaimed: dict[str, Any] | None = None  # saved parts of a deterministic run, until `keep`
        if self.args.resume is not None:
            self._restore_newest()
        # A new run saves after its first round: whatever happens to it then, it can be resumed.
        self._tried_seconds = time.monotonic() if self.args.resume is not None else -math.inf
        self._tried_steps = progress.steps

    def state_dict(self) -> dict[str, Any]:
        """Everything that a checkpoint holds."""
        return {
            "net": self.net.state_dict(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
            "torch_rng": torch.get_rng_state(),
            **self.progress.state_dict(),
            "extra": {name: part.state_dict() for name, part in self.extra.items()},
        }

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        """Continue from the state that was saved in a file; raises where it does not fit."""
        self.net.load_state_dict(state["net"])
        if self.optimizer is not None:
            checkpoint.restore_optimizer(self.optimizer, state["optimizer"])
        saved = state["extra"]
        for name, part in self.extra.items():
            if name in saved:
                part.load_state_dict(saved[name])
            else:
                self.log.warning(f"{path} holds no {name}: it starts empty")
        self.rng.set_state(state["rng"])
        torch.set_rng_state(state["torch_rng"])
        self.progress.load_state_dict(state)
        if self.args.deterministic:
            self._unclaimed = {name: part for name, part in saved.items() if name not in self.extra}

    def _restore_newest(self) -> None:
        try:
            path = checkpoint.load_newest(self.folder, self._restore, self.log.warning, **self.origin)
        except CheckpointError as error:
            fix = "start a new run, or restore the folder"
            saved = settings_before(self.folder.parent, 0)
            if isinstance(error, DoesNotFit) and (changed := changed_settings(as_recorded(self.args), saved)):
                fix = f"settings that differ from the run's: {' '.join(changed)}; leave out what does not fit"
            raise ConfigError("resume", self.args.resume, str(error), fix) from error
        self.newest, self.saved_steps = path, self.progress.steps
        checkpoint.set_aside_newer(path)
        if not self.args.evaluates_in_order:  # else it is played again, at the same step
            self.progress.evals.restore_best(checkpoint.best_evaluation(self.folder))

    def keep(self, **parts: Stateful) -> None:
        """Add the parts that an exact resume needs, and fill them from the checkpoint that the run resumed from."""
        parts = {"games": self.progress.window, **parts}
        self.extra |= parts
        saved, self._unclaimed = self._unclaimed, None
        if saved is None:
            return
        if "actors" not in saved:
            why = "the checkpoint holds no games (it is from a run without --deterministic)"
            self.log.warning(f"{why}: actors start new ones; {DIFFERS}")
            return
        for name, part in parts.items():
            try:
                part.load_state_dict(saved[name])
            except (LookupError, ValueError, RuntimeError, TypeError) as error:
                self.log.warning(f"the checkpoint's {name} do not fit these settings ({error}); {DIFFERS}")
                if name in ("games", "actors"):  # new games in a new order, with weights of version 0
                    self.progress.window.restart_games()
                    return

    @property
    def is_due(self) -> bool:
        """Whether, since the last `save`, the steps passed a multiple of `--checkpoint-steps` or its seconds are over.

        A `save` that failed counts too: it is not tried again in every round.
        """
        period = self.args.checkpoint_steps
        steps_due = period is not None and passes_multiple(self._tried_steps, self.progress.steps, period)
        return steps_due or time.monotonic() - self._tried_seconds >= self.args.checkpoint_seconds

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint has the current state."""
        return self.saved_steps == self.progress.steps

    def save(self) -> None:
        """Write a checkpoint; a failure costs a warning, and the previous one stays."""
        progress, state = self.progress, self.state_dict()
        try:
            if progress.is_best:  # first: the state says so already; without what only a resume needs
                best = {name: part for name, part in state.items() if name != "extra"}
                checkpoint.save(self.folder, best, "best", **self.origin)
            self.newest = checkpoint.save(self.folder, state, **self.origin)
            self.saved_steps, progress.best_mean = progress.steps, state["best_mean"]
        except (OSError, CheckpointError) as error:
            self.log.warning(f"checkpoint at {progress.steps:,} steps not written to {self.folder}: {error}")
        self._tried_steps, self._tried_seconds = progress.steps, time.monotonic()

    def save_best(self, net: nn.Module, evaluation: Evaluation) -> None:
        """Write the net of the best evaluation; a failure costs a warning."""
        state, result = {"net": net.state_dict(), "steps": evaluation.steps}, evaluation.description
        try:
            checkpoint.save(self.folder, state, "best", evaluation=result, **self.origin)
        except (OSError, CheckpointError) as error:
            what = f"best checkpoint, of {evaluation.steps:,} steps,"
            self.log.warning(f"{what} not written to {self.folder}: {error}")
