"""Checkpoint files: each is complete or not there at all.

`step_<steps>.pt` and its manifest `step_<steps>.json`, with the SHA-256 of the bytes, are written to temporary files,
synced and renamed, the manifest last. A checkpoint exists once its manifest does. The last three are kept, and as
`best_<steps>.pt` the best one so far and that as of each of the three. It holds the net; if it was chosen by the mean
return of training, also the run's progress.
"""

import copy
import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from a3c_mp.config import FORMAT, format_error
from a3c_mp.errors import CheckpointError
from a3c_mp.run.run_dir import write_together

KEEP = 3
OURS = re.compile(r"(step|best)_\d{12}\.(pt|json)(\.tmp|\.unused)?")  # names of own files; all others are ignored


def save(folder: Path, state: dict[str, Any], kind: str = "step", **origin: str) -> Path:
    """Write a checkpoint of kind "step" or "best", prune old ones, return its path.

    `state` is what `torch.load(weights_only=True)` reads back: "steps" name the file, "net" has the weights. `origin`
    (`algorithm` and `env_id`) is checked on loading.

    Raises:
        CheckpointError: a tensor of `state["net"]` holds NaN or infinity, or the run folder was deleted.
        OSError: the disk is full or the folder not writable; older checkpoints are untouched.
    """
    _check_finite(state["net"], "the weights to be saved")
    if not folder.parent.is_dir():
        raise CheckpointError(f"the run folder {folder.parent} was deleted")
    folder.mkdir(exist_ok=True)
    manifest = {"format": FORMAT, "steps": state["steps"], **origin}

    def write_state(file: BinaryIO) -> None:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's own, in place of the disk's
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.seek(0)  # of what is in the file: actors append to a replay while it is saved
        manifest["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]

    def write_manifest(file: BinaryIO) -> None:
        file.write(json.dumps(manifest, indent=2).encode())

    path = folder / f"{kind}_{state['steps']:012d}.pt"
    write_together({path: write_state, path.with_suffix(".json"): write_manifest})
    _prune(folder)
    return path


def list_checkpoints(folder: Path, kind: str = "step") -> list[Path]:
    """Checkpoints with a manifest, newest first; of kind "step" or "best"."""
    return sorted((path.with_suffix(".pt") for path in _ours(folder, f"{kind}_*.json")), reverse=True)


def _ours(folder: Path, pattern: str) -> list[Path]:
    """This module's files that match a pattern, without any that users have added, each manifest before its file."""
    return sorted(path for path in folder.glob(pattern) if OURS.fullmatch(path.name))


def steps_of(path: Path) -> str:
    return path.stem[len("step_") :]  # twelve digits: they sort like numbers


def _prune(folder: Path) -> None:
    """Delete all but the newest three, the best now and as of each of them, and files that killed processes left."""
    newest, best = list_checkpoints(folder)[:KEEP], list_checkpoints(folder, "best")
    kept = {*newest, *best[:1]}
    for path in newest:  # a run may be resumed from any of them
        kept |= set([other for other in best if steps_of(other) <= steps_of(path)][:1])
    for path in _ours(folder, "*"):
        if path.suffix == ".tmp" or (path.suffix != ".unused" and path.with_suffix(".pt") not in kept):
            path.unlink(missing_ok=True)


def set_aside_newer(path: Path) -> None:
    """Rename the checkpoints newer than the one that a run resumes from, so that they are not used again."""
    for old in (*_ours(path.parent, "*.unused"), *_ours(path.parent, "*.tmp")):  # of earlier starts: they may be large
        old.unlink(missing_ok=True)
    for file in _ours(path.parent, "*"):
        if steps_of(file) > steps_of(path):
            file.replace(file.with_suffix(file.suffix + ".unused"))


def load(path: Path, *, algorithm: str, env_id: str) -> dict[str, Any]:
    """Read one checkpoint onto the CPU; code in it is never executed. Raises CheckpointError if it cannot be used."""
    try:
        manifest = json.loads(path.with_suffix(".json").read_text())
        with path.open("rb") as file:
            if why := format_error(path, manifest["format"]):
                raise CheckpointError(why)
            for name, wanted in {"algorithm": algorithm, "env_id": env_id}.items():
                if manifest[name] != wanted:
                    raise CheckpointError(f"{path} was made with {name} {manifest[name]}, not {wanted}")
            if manifest["sha256"] != hashlib.file_digest(file, "sha256").hexdigest():
                raise CheckpointError(f"{path} is damaged: its SHA-256 differs from its manifest")
            # torch maps no file whose name is not UTF-8; a Mac, which may play, has no such folder.
            opened = f"/proc/self/fd/{file.fileno()}" if sys.platform == "linux" else path
            state = torch.load(opened, map_location="cpu", weights_only=True, mmap=True)
        _check_finite(state["net"], str(path))
    except CheckpointError:
        raise
    except Exception as error:  # bytes that `save` did not write make torch.load raise almost anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return state


def load_newest(
    folder: Path, restore: Callable[[dict[str, Any], Path], None], warn: Callable[[str], None], **origin: str
) -> Path:
    """Restore the newest checkpoint that can be; return its path, and `warn` of every newer one that cannot.

    `restore` raises if a state does not fit. Raises CheckpointError if there is none: never a silent fresh start.
    """
    skipped = list[CheckpointError]()
    for path in list_checkpoints(folder):
        try:
            restore(load(path, **origin), path)
        except CheckpointError as error:
            skipped.append(error)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            why = textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
            skipped.append(CheckpointError(f"{path} does not fit these settings: {why}"))
        else:
            for skip in skipped:
                warn(f"checkpoint skipped: {skip}")
            return path
    if skipped:
        older = f"; {len(skipped) - 1} older skipped too" if len(skipped) > 1 else ""
        raise CheckpointError(f"{skipped[0]}{older}")
    raise CheckpointError(f"{folder} holds no checkpoint")


OF_SCHEDULES = {"lr_factor", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""settings of groups that a chapter, or a scheduler of torch, adds to those of the optimizer"""


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the moments of a saved optimizer, but not its settings. Raises ValueError if it is of another kind."""
    groups = state["param_groups"], optimizer.param_groups
    saved, own = ([{*group} - OF_SCHEDULES for group in each] for each in groups)
    if saved != own:
        raise ValueError("it holds the state of another optimizer")
    moments = copy.deepcopy(state["state"])  # else they would keep the whole file mapped
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})


def _check_finite(net_state: dict[str, torch.Tensor], name: str) -> None:
    for key, tensor in net_state.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{name}: {key} holds NaN or infinity")


def sha256_of_weights(net_state: dict[str, torch.Tensor]) -> str | None:
    """SHA-256 over the bytes of all tensors in state_dict order; None if the device that holds them has failed."""
    digest = hashlib.sha256()
    try:
        for tensor in net_state.values():
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    except RuntimeError:
        return None
    return digest.hexdigest()
