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

from a3c_mp.config import CommonArgs
from a3c_mp.errors import CheckpointError, ConfigError, DoesNotFit
from a3c_mp.processes.learner_group import Stateful
from a3c_mp.run import checkpoint
from a3c_mp.run.eval_progress import Evaluation
from a3c_mp.run.progress import Progress
from a3c_mp.run.run_dir import as_recorded, changed_settings, settings_before


class TrainingState:
    """Everything that a checkpoint holds.

    Args:
        net, optimizer, progress: of the run; without an optimizer, `extra` has what trains the net.
        extra: the chapter's own parts, by name.
        log: where a warning names what a checkpoint lacks.
    """

    def __init__(
        self, net: nn.Module, optimizer: torch.optim.Optimizer | None, progress: Progress,
        extra: Mapping[str, Stateful], log: logging.Logger,
    ):  # fmt: skip
        self.net, self.optimizer, self.progress, self.extra, self.log = net, optimizer, progress, dict(extra), log
        self.rng = torch.Generator().manual_seed(progress.args.seed)
        self._unclaimed: dict[str, Any] | None = None  # saved parts of a deterministic run, until `keep`

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
            "torch_rng": torch.get_rng_state(),
            **self.progress.state_dict(),
            "extra": {name: part.state_dict() for name, part in self.extra.items()},
        }

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Continue from the state that was saved in a file; raises where it does not fit."""
        self.net.load_state_dict(state["net"])
        if self.optimizer is not None:
            checkpoint.restore_optimizer(self.optimizer, state["optimizer"])
        saved = state.get("extra", {})
        for name, part in self.extra.items():
            if name in saved:
                part.load_state_dict(saved[name])
            else:
                self.log.warning(f"{path} holds no {name}: it starts empty")
        self.rng.set_state(state["rng"])
        torch.set_rng_state(state["torch_rng"])
        self.progress.load_state_dict(state)
        if self.progress.args.deterministic:
            self._unclaimed = {name: part for name, part in saved.items() if name not in self.extra}

    def keep(self, **parts: Stateful) -> None:
        """Add the parts that an exact resume needs, and fill them from the checkpoint that the run resumed from."""
        parts = {"games": self.progress.window.games, **parts}
        self.extra |= parts
        saved, self._unclaimed = self._unclaimed, None
        if saved is None:
            return
        differs = "the run differs from one that was never interrupted"
        if "actors" not in saved:
            whose = "it is from a run without --deterministic, or from an older version"
            self.log.warning(f"the checkpoint holds no games ({whose}): actors start new ones; {differs}")
            return
        for name, part in parts.items():
            try:
                part.load_state_dict(saved[name])
            except (LookupError, ValueError, RuntimeError, TypeError) as error:
                self.log.warning(f"the checkpoint's {name} do not fit these settings ({error}); {differs}")
                if name in ("games", "actors"):  # new games in a new order, with weights of version 0
                    self.extra["games"] = self.progress.window.forget_games()
                    return


class Checkpointer:
    """Saves a `TrainingState` at intervals, and restores the newest one that can be read.

    Args:
        folder: for the checkpoints.
        state: what they hold.
        algorithm: name of the chapter.
    """

    def __init__(self, folder: Path, state: TrainingState, algorithm: str):
        args = state.progress.args
        self.folder, self.state, self.args = folder, state, args
        self.origin: dict[str, Any] = {"algorithm": algorithm, "env_id": args.env_id}
        self.newest: Path | None = None  # of this run
        self.saved_steps: int | None = None  # at the newest one
        if args.resume is not None:
            self._restore(args)
        # A new run saves after its first round: whatever happens to it then, it can be resumed.
        self._tried_seconds = time.monotonic() if args.resume is not None else -math.inf
        self._tried_steps = state.progress.steps

    def _restore(self, args: CommonArgs) -> None:
        warn = self.state.log.warning
        try:
            _, path = checkpoint.load_newest(self.folder, **self.origin, warn=warn, restore=self.state.restore)
        except CheckpointError as error:
            fix = "start a new run, or restore the folder"
            saved = settings_before(self.folder.parent, 0)
            if isinstance(error, DoesNotFit) and (changed := changed_settings(as_recorded(args), saved)):
                fix = f"settings that differ from the run's: {' '.join(changed)}; leave out what does not fit"
            raise ConfigError("resume", args.resume, str(error), fix) from error
        self.newest, self.saved_steps = path, self.state.progress.steps
        checkpoint.set_aside_newer(path)
        if not args.evaluates_in_order:  # else it is played again, at the same step
            self.state.progress.evals.restore_best(checkpoint.best_evaluation(self.folder))

    @property
    def is_due(self) -> bool:
        """Whether, since the last `save`, the steps passed a multiple of `--checkpoint-steps` or its seconds are over.

        A `save` that failed counts too: it is not tried again in every round.
        """
        period = self.args.checkpoint_steps
        steps_due = period is not None and self.state.progress.steps // period > self._tried_steps // period
        return steps_due or time.monotonic() - self._tried_seconds >= self.args.checkpoint_seconds

    def save(self) -> None:
        """Write a checkpoint; a failure costs a warning, and the previous one stays."""
        progress, state = self.state.progress, self.state.state_dict()
        try:
            self.newest = checkpoint.save(
                self.folder, state, steps=progress.steps, best=progress.is_best, **self.origin
            )
            self.saved_steps, progress.best_mean = progress.steps, state["best_mean"]
        except (OSError, CheckpointError) as error:
            self.state.log.warning(f"checkpoint at {progress.steps:,} steps not written to {self.folder}: {error}")
        self._tried_steps, self._tried_seconds = progress.steps, time.monotonic()

    def save_best(self, net: nn.Module, evaluation: Evaluation) -> None:
        """Write the net of the best evaluation; a failure costs a warning."""
        try:
            checkpoint.save_best(self.folder, net.state_dict(), evaluation.description, **self.origin)
        except (OSError, CheckpointError) as error:
            what = f"best checkpoint, of {evaluation.steps:,} steps,"
            self.state.log.warning(f"{what} not written to {self.folder}: {error}")

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint has the current state."""
        return self.saved_steps == self.state.progress.steps
