"""Learning curves of one or many runs: return against agent steps and against minutes.

    python plot.py runs/* --out curves.png

Runs of one chapter, environment and settings that differ in the seed only are drawn as one curve: mean and range.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from a3c_mp.cli import parse_plain
from a3c_mp.config import Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import read_episodes
from a3c_mp.run.script import exit_with

GRID = 200
"""points at which runs of a group are compared"""
NOT_SETTINGS = {"seed", "run_name", "runs_dir", "resume", "checkpoint_seconds", "checkpoint_steps"}
"""in which runs of one group may differ"""


@dataclass(frozen=True)
class Args:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """run folders"""
    out: Path = Path("curves.png")
    """picture to write"""
    window: Count = 100
    """games in the moving mean"""


@dataclass(frozen=True)
class Curve:
    """Moving mean return [E] of a run, with the agent steps and the wall-clock minutes at which each game ended."""

    steps: np.ndarray
    minutes: np.ndarray
    mean_return: np.ndarray


def read_run(folder: Path, window: int) -> tuple[str, dict, Curve]:
    """(label, settings, curve) of a run folder. Raises ConfigError where there is none, or no game has ended yet."""
    try:
        config = json.loads((folder / "config.json").read_text())
        settings = {name: value for name, value in config["args"].items() if name not in NOT_SETTINGS}
        label = f"{config['algorithm']} {settings['env_id']}"
        episodes = read_episodes(folder / "episodes.csv")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("runs", folder, f"this is no run folder ({error})", "name folders below runs/") from error
    if not episodes:
        raise ConfigError("runs", folder, "no game has ended yet", "wait, or name another folder below runs/")
    steps, seconds, _, returns, _ = np.array(episodes).T
    sums = np.cumsum(np.insert(returns, 0, 0.0))
    ends = np.arange(1, len(returns) + 1)
    starts = np.maximum(ends - window, 0)
    return label, settings, Curve(steps, seconds / 60, (sums[ends] - sums[starts]) / (ends - starts))


def draw(axis, groups: dict[str, list[Curve]], x_name: str) -> None:
    """One line a group: the mean over its runs, with the range between the lowest and the highest as a band."""
    for label, curves in groups.items():
        xs = [getattr(curve, x_name) for curve in curves]
        grid = np.linspace(max(x[0] for x in xs), min(x[-1] for x in xs), GRID) if len(curves) > 1 else xs[0]
        ys = np.stack([np.interp(grid, x, curve.mean_return) for x, curve in zip(xs, curves, strict=True)])
        name = label if len(curves) == 1 else f"{label} ({len(curves)} runs)"
        (line,) = axis.plot(grid, ys.mean(axis=0), label=name)
        if len(curves) > 1:
            axis.fill_between(grid, ys.min(axis=0), ys.max(axis=0), alpha=0.2, color=line.get_color())
    axis.set_ylabel("raw return, moving mean")
    axis.grid(alpha=0.3)


def main() -> int:
    args = parse_plain(Args, __doc__)
    if not args.runs:
        raise ConfigError("runs", "", "no run folder is named", "for instance: python plot.py runs/*")
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("out", args.out, "matplotlib is not installed", "pip install matplotlib") from None
    if not args.out.parent.is_dir():
        raise ConfigError("out", args.out, "its folder does not exist", "make the folder first")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    formats = plt.figure().canvas.get_supported_filetypes()
    if args.out.suffix[1:] not in formats or args.out.is_dir():
        why = f"it must be a file that ends in one of {', '.join(formats)}"
        raise ConfigError("out", args.out, why, "for instance curves.png")

    groups: dict[tuple[str, str], list[tuple[Path, Curve]]] = defaultdict(list)
    for folder in args.runs:
        try:
            label, settings, curve = read_run(folder, args.window)
        except ConfigError as error:
            if len(args.runs) == 1:
                raise
            print(f"skipped: {error}", file=sys.stderr)  # one run that has just begun must not cost the picture
            continue
        groups[label, json.dumps(settings, sort_keys=True)].append((folder, curve))
    if not groups:
        raise ConfigError("runs", " ".join(map(str, args.runs)), "there is nothing to draw in any of them")
    labels = [label for label, _ in groups]
    named = {
        # groups that differ in settings only are told apart by the name of their first run
        label if labels.count(label) == 1 else f"{label} [{members[0][0].name}]": [curve for _, curve in members]
        for (label, _), members in groups.items()
    }

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    draw(left, named, "steps")
    draw(right, named, "minutes")
    left.set_xlabel("agent steps")
    right.set_xlabel("minutes")
    left.legend(fontsize="small")
    try:
        figure.savefig(args.out, dpi=150)
    except OSError as error:
        raise ConfigError("out", args.out, f"it cannot be written ({error.strerror})", "choose another") from error
    print(f"{args.out}: {sum(map(len, groups.values()))} runs, {len(named)} curves")
    return 0


if __name__ == "__main__":
    exit_with(main)
