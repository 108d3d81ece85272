"""Checkpoints of a run: when they are due, and what they hold (net, optimizer, random numbers, progress, parts)."""

import copy
import errno
import io
import math
import pickle
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from a3c_mp.config import has_checkpoint
from a3c_mp.errors import CheckpointError, ConfigError
from a3c_mp.processes.learner_group import Stateful
from a3c_mp.run import checkpoint
from a3c_mp.run.run_dir import check_owned, name_of

BEST_SECONDS = 10.0  # shortest time between two files of the best net between checkpoints


def check_parts(parts: Mapping[str, Any]) -> None:
    """Raise ConfigError for a part whose state can be written, but not read, as one of numpy's values."""
    for name, part in parts.items():
        file = io.BytesIO()
        torch.save(tree_map_only(Tensor, lambda tensor: torch.empty(0), part), file)
        try:
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except pickle.UnpicklingError as error:
            kind = re.search(r"GLOBAL (\S+)", str(error))
            why = f"its state_dict has {kind[1] if kind else 'values'} that a checkpoint could not give back"
            fix = "make it of tensors, numbers, text, lists, tuples and dicts"
            raise ConfigError("saved", name, why, fix) from error


class Checkpointer:
    """Saves the state of a run at intervals; with `--resume`, restores the newest one that can be read.

    `extra` are the chapter's own parts; where the net has no optimizer, they include what trains it.
    """

    def __init__(self, run: Any, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Stateful]):
        self.net, self.optimizer, self.extra = run.net, optimizer, dict(extra)
        self.folder, self.log, self.args, self.progress = run.folder / "checkpoints", run.log, run.args, run.progress
        self.lock = run.lock
        self.origin: dict[str, Any] = {"algorithm": run.algorithm, "env_id": self.args.env_id}
        self.rng = torch.Generator().manual_seed(self.args.seed)
        self.newest: Path | None = None  # of this run
        self.saved_steps: int | None = None  # at the newest one
        self._unwritten: dict[str, Any] | None = None  # net of the best evaluation that there was no space for
        self._unclaimed: dict[str, Any] | None = None  # saved parts of a deterministic run, until `keep`
        if self.args.resume is not None:
            self._restore_newest()
        # A run saves after its first round: whatever happens to it then, it can be resumed from there.
        self._tried_steps, self._tried_seconds, self._best_seconds = self.progress.steps, -math.inf, -math.inf

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "rng": self.rng.get_state(),
            "torch_rng": torch.get_rng_state(),
            **self.progress.state_dict(),
            "extra": {name: part.state_dict() for name, part in self.extra.items()},
        }

    def _restore(self, state: dict[str, Any], path: Path) -> None:
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
            fix = "start a new run, restore the folder, or leave out flags that are new"
            if not has_checkpoint(self.folder.parent):
                fix += f"; --run-name {name_of(self.folder.parent)} --resume-or-start starts this one again"
            raise ConfigError("resume", self.args.resume, str(error), fix) from error
        self.newest, self.saved_steps = path, self.progress.steps
        checkpoint.set_aside_newer(path)

    def keep(self, **parts: Stateful) -> None:
        """Add the parts that an exact resume needs, and fill them from the checkpoint that the run resumed from."""
        parts = {"games": self.progress.window, **parts}
        self.extra |= parts
        saved, self._unclaimed = self._unclaimed, None
        if saved is None:
            return
        for name, part in parts.items():
            try:
                part.load_state_dict(saved[name])
            except (LookupError, ValueError, RuntimeError, TypeError) as error:
                why = f"the checkpoint has no {name} that fit these settings ({error})"
                self.log.warning(f"{why}; the run differs from one that was never interrupted")
                if name in ("games", "actors"):  # new games in a new order, with weights of version 0
                    self.progress.window.restart_games()
                    return

    @property
    def is_due(self) -> bool:
        """Whether `--checkpoint-steps` or `--checkpoint-seconds` passed since the last `save`, even if that failed."""
        period = self.args.checkpoint_steps
        steps_due = period is not None and self.progress.steps // period > self._tried_steps // period
        return steps_due or time.monotonic() - self._tried_seconds >= self.args.checkpoint_seconds

    def save(self) -> None:
        """Write a checkpoint; a failure costs a warning, and the previous one stays."""
        progress = self.progress
        if self._unwritten is not None:
            self._write_best(self._unwritten)
        best_evaluation = progress.evals.best
        if progress.is_best:
            progress.evals.best = {}  # its net is no longer the best one
        state, what = self.state_dict(), f"checkpoint at {progress.steps:,} steps"
        if self.newest is None:
            check_parts(state["extra"])
        # The best one first: the state says so already. It is without what only a resume needs.
        best = {name: part for name, part in state.items() if name != "extra"}
        if progress.is_best and not self._write(what, best):
            progress.evals.best = best_evaluation
        elif path := self._write(what, state, "step"):
            self.newest, self.saved_steps, progress.best_mean = path, progress.steps, state["best_mean"]
        self._tried_steps, self._tried_seconds = progress.steps, time.monotonic()
        self._best_seconds = self._tried_seconds

    def save_highest(self) -> None:
        """Write the net between two checkpoints if the mean return is higher than ever, which it may not be at the next
        one; at most every `BEST_SECONDS`."""
        if not self.progress.is_best or time.monotonic() - self._best_seconds < BEST_SECONDS:
            return
        best_evaluation, self.progress.evals.best = self.progress.evals.best, {}
        state, self._best_seconds = self.progress.state_dict(), time.monotonic()
        if self._write(f"best checkpoint at {self.progress.steps:,} steps", state | {"net": self.net.state_dict()}):
            self.progress.best_mean = state["best_mean"]
        else:
            self.progress.evals.best = best_evaluation

    def save_best(self, net: nn.Module, steps: int) -> None:
        """Write the net of the best evaluation, of weights after these agent steps; a failure costs a warning."""
        self._tried_seconds = -math.inf  # the next checkpoint is due: it knows the result that belongs to this file
        with suppress(OSError):  # where nothing can be written, a warning follows
            for path in checkpoint.list_checkpoints(self.folder, "best"):
                if int(checkpoint.steps_of(path)) > steps:  # by training, while the first evaluation played: it counts
                    path.with_suffix(".json").unlink(missing_ok=True)
        self._write_best({"net": net.state_dict(), "steps": steps})

    def _write_best(self, state: dict[str, Any]) -> None:
        """Write the net of the best evaluation, or keep a copy of it for the next checkpoint."""
        is_written = self._write(f"best checkpoint, of {state['steps']:,} steps,", state)
        self._unwritten = None if is_written else copy.deepcopy(state)

    def _write(self, what: str, state: dict[str, Any], kind: str = "best") -> Path | None:
        """Write a checkpoint file and return its path; a failure costs a warning."""
        try:
            check_owned(self.folder.parent, self.lock)
            if not (config := self.folder.parent / "config.json").exists():
                raise CheckpointError(f"{config} was deleted: without it the run cannot be resumed")
            return checkpoint.save(self.folder, state, kind, **self.origin)
        except (OSError, CheckpointError) as error:
            hint = " (ulimit -f)" if getattr(error, "errno", None) == errno.EFBIG else ""
            self.log.warning(f"{what} not written to {self.folder}: {error}{hint}")
            return None
