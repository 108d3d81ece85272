"""Learning curves of runs: read from run folders, grouped by settings, averaged over seeds."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import read_episodes
from a3c_mp.run.mean_return import MIN_EPISODES
from a3c_mp.run.run_dir import name_of

GRID = 200  # points at which the curves of a group are compared
NOT_SETTINGS = {
    "seed", "run_name", "runs_dir", "resume", "checkpoint_seconds", "checkpoint_steps", "track", "max_seconds",
    "max_restarts", "hang_seconds", "stop_eval_return", "eval_every", "eval_episodes", "eval_max_steps", "eval_envs",
    "print_per_step", "listen", "key_file", "address", "token_file", "insecure_cluster",
}  # fmt: skip
"""settings in which the runs of a group may differ, besides the goal: they do not change what is learned"""


class Curve(NamedTuple):
    """Settings and learning curve [E] of a run: the moving mean return, at each of the E steps at which games ended."""

    name: str  # of the folder
    seed: int
    is_named: bool  # by its user
    algorithm: str
    env_id: str
    settings: dict[str, Any]  # without what runs of a group may differ in; with the commit
    goal: float | None  # `--stop-return`
    solved_at: tuple[float, float] | None  # steps and minutes, by the run's rule; inf: it ended unsolved
    steps: np.ndarray
    minutes: np.ndarray
    mean_return: np.ndarray
    counts: np.ndarray  # bool: whether the mean is over enough games to have reached a goal


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, and its commit; those that a later start has changed as `0.001 -> 0.0001`."""
    starts = [{**start["args"], "commit": start.get("commit")} for start in config.get("starts") or [config]]
    is_population = str(config["algorithm"]).startswith("population")  # evaluation decides who has children
    left_out = NOT_SETTINGS - {"eval_episodes", "eval_max_steps", "eval_envs"} if is_population else NOT_SETTINGS
    found = {}
    for name, value in starts[-1].items():
        earlier = [start[name] for start in starts if start.get(name, value) != value]
        changes = [*dict.fromkeys(map(str, earlier)), str(value)]
        found[name] = " -> ".join(changes) if earlier and name != "total_steps" else value
    return {name: value for name, value in found.items() if name not in left_out and name != "stop_return"}


Group = tuple[str, list[Curve]]  # label, and runs of one algorithm and environment that differ only in the seed


def read_curve(folder: Path, window: int) -> Curve:
    """Read a run folder. Raises ConfigError if it is none, or no game has ended yet."""
    try:
        config = json.loads((folder / "config.json").read_text())
        settings = settings_of(config)
        algorithm, env_id, name = str(config["algorithm"]), str(settings.pop("env_id")), name_of(folder)
        seed, is_named = int(config["args"]["seed"]), not re.search(r"-s\d+-\d{8}-\d{6}", name)
        goal = config["args"].get("stop_return")
        goal = None if goal is None else float(goal)
        episodes = read_episodes(folder / "episodes.csv")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing = f" (config.json has no {error})" if isinstance(error, KeyError) else f" ({error})"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            missing = f", {Path(error.filename).name} is missing"
        raise ConfigError("runs", folder, f"not a run folder{missing}", "name run folders, runs/<name>") from error
    if not episodes:
        raise ConfigError("runs", folder, "no game has ended in this run", "name another run folder")
    steps, seconds, _, returns, _ = np.array(episodes).T
    ends = np.arange(1, len(returns) + 1)
    size = min(window, len(returns))
    windows = sliding_window_view(np.concatenate([np.zeros(size - 1), returns]), size)
    means = windows.sum(axis=1) / np.minimum(ends, size)  # differences of one sum would keep an absurd return
    last = np.append(steps[1:] != steps[:-1], True)  # of the games that ended at the same step
    solved_at = None
    # A run that still goes on, or was killed, has no summary.
    with suppress(OSError, ValueError, TypeError, AttributeError):
        summary = json.loads((folder / "summary.json").read_text())
        if summary.get("solved") is False:
            solved_at = math.inf, math.inf
        else:
            solved_at = float(summary.get("solved_at_steps")), float(summary.get("solved_at_seconds")) / 60
    counts = ends >= min(window, MIN_EPISODES)  # as for the run itself
    points = steps[last], seconds[last] / 60, means[last], counts[last]
    return Curve(name, seed, is_named, algorithm, env_id, settings, goal, solved_at, *points)


def grouped(runs: Sequence[Curve]) -> dict[str, list[Group]]:
    """Environment -> its groups; a label names the algorithm and the settings in which its groups differ.

    Runs of one seed are not averaged: the second run of each seed is in a second group.
    """
    games: dict[str, dict[Any, list[Curve]]] = defaultdict(lambda: defaultdict(list))
    times = Counter[Any]()  # (settings, seed) -> runs so far
    for run in runs:
        same = run.env_id, json.dumps([run.algorithm, run.settings], sort_keys=True)
        games[run.env_id][same, times[same, run.seed]].append(run)
        times[same, run.seed] += 1
    return {
        env_id: [(label_of(group, list(groups.values())), group) for group in groups.values()]
        for env_id, groups in games.items()
    }


def label_of(runs: list[Curve], groups: list[list[Curve]]) -> str:
    """The algorithm of a group, and its settings that differ in some group of that algorithm.

    The names of runs are added where their user gave them, and where only these tell groups apart.
    """
    alike = [other[0].settings for other in groups if other[0].algorithm == runs[0].algorithm]
    parts = [runs[0].algorithm]
    for name, value in runs[0].settings.items():
        if len({str(other.get(name, value)) for other in alike}) > 1:
            value = f"{value:g}" if isinstance(value, float) else str(value)
            value = re.sub("([0-9a-f]{8})[0-9a-f]+", r"\1", value) if name == "commit" else value  # 8 digits of each
            parts.append(f"{name.replace('_', '-')} {value}")
    if (runs[0].is_named and len(runs) == 1) or alike.count(runs[0].settings) > 1:
        parts.append(runs[0].name + ", ..." * (len(runs) > 1))
    return ", ".join(parts) + (f" ({len(runs)} runs)" if len(runs) > 1 else "")


class Band(NamedTuple):
    """Mean, lowest and highest of several curves at points of an x axis, and how many of them reach each point."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    number: np.ndarray


def band_of(runs: Sequence[Curve], x_name: str) -> Band:
    """The mean of runs along `steps` or `minutes`, and their range.

    A run that was solved keeps its last value; any other counts as far as it goes, and does not cut the mean of all.
    """
    xs = [getattr(run, x_name) for run in runs]
    if len(runs) == 1:
        mean = runs[0].mean_return
        return Band(xs[0], mean, mean, mean, np.ones(len(mean)))
    grid = np.linspace(max(x[0] for x in xs), max(x[-1] for x in xs), GRID)
    ends = [run.mean_return[-1] if run.solved_at and math.isfinite(run.solved_at[0]) else np.nan for run in runs]
    pairs = zip(xs, runs, ends, strict=True)
    ys = np.stack([np.interp(grid, x, run.mean_return, left=np.nan, right=end) for x, run, end in pairs])
    number = np.isfinite(ys).sum(axis=0)
    ys, grid, number = ys[:, number > 0], grid[number > 0], number[number > 0]
    return Band(grid, np.nanmean(ys, axis=0), np.nanmin(ys, axis=0), np.nanmax(ys, axis=0), number)
