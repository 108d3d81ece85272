"""The content of `summary.json`, written when a run ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wrappers
from a3c_mp.run.checkpoint import sha256_of_weights

if TYPE_CHECKING:
    from a3c_mp.run.run import Run


def summarize(run: Run) -> dict[str, Any]:
    """Counters, mean return, evaluations and reason for the end of a run, and the hash of its weights."""
    progress = run.progress
    solved_seconds, solved_steps = progress.solved_at or (None, None)
    total_lag, rollouts = progress.policy_lag
    return {
        "steps": run.steps,
        "frames": run.steps * (wrappers.FRAME_SKIP if wrappers.is_atari(run.args.env_id) else 1),
        "updates": run.updates,
        "episodes": progress.window.episodes,
        "wall_seconds": round(progress.wall_seconds, 2),
        "sps": round(run.metrics.sps, 1),
        "mean_return_100": progress.window.mean if progress.window.returns else None,
        "solved": progress.solved_at is not None,
        "solved_at_seconds": solved_seconds,
        "solved_at_steps": solved_steps,
        "policy_lag_mean": total_lag / rollouts if rollouts else None,
        "worker_restarts": progress.worker_restarts,
        **run.counters,
        **progress.evals.summary(),
        "exit_reason": run.exit_reason,
        "weights_sha256": sha256_of_weights(run.state.net.state_dict()),
    }


def end_of(folder: Path) -> tuple[str | None, int] | None:
    """(why, after how many agent steps) the run in a folder has ended; None without a readable `summary.json`."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        return summary["exit_reason"], summary["steps"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
