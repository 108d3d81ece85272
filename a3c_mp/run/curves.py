"""Learning curves of runs: read from run folders, grouped by settings, averaged over seeds, and as a table."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from a3c_mp.config import flag_name
from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import read_episodes
from a3c_mp.run.mean_return import MIN_EPISODES, short_return
from a3c_mp.run.run_dir import changed_settings, earlier_starts

GRID = 200
"""points at which the curves of a group are compared"""
NOT_SETTINGS = {
    "seed", "run_name", "runs_dir", "resume", "checkpoint_seconds", "checkpoint_steps", "track", "max_seconds",
    "max_restarts", "hang_seconds", "stop_eval_return", "eval_every", "eval_episodes",
    "eval_max_steps",
}  # fmt: skip
"""settings in which the runs of a group may differ, besides the goal: they do not change what is learned"""
RESUMED = "resumed"
"""key, beside the settings, of the flags that a resume changed"""
MANY = 5
"""groups of one chapter from which on labels leave out the usual value of a setting"""


class Curve(NamedTuple):
    """Settings and learning curve [E] of a run: the moving mean return, at each of the E steps at which games ended."""

    name: str
    algorithm: str
    env_id: str
    seed: int
    settings: dict[str, Any]  # without what runs of a group may differ in; with the commit, and what a resume changed
    goal: float | None  # `--stop-return`
    solved_at: tuple[int, float] | None  # steps and minutes, by the run's own rule; None: it was not solved
    steps: np.ndarray
    minutes: np.ndarray
    mean_return: np.ndarray
    counts: np.ndarray  # bool: whether the mean is over enough games to have reached a goal

    @property
    def group(self) -> tuple[str, str]:
        """What runs have in common that differ only in the seed."""
        return self.algorithm, json.dumps(self.settings, sort_keys=True)


class Group(NamedTuple):
    """Runs of one algorithm and environment that differ only in the seed."""

    label: str
    runs: list[Curve]


class Band(NamedTuple):
    """Mean, lowest and highest of several curves at points of an x axis, and how many of them reach each point."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    number: np.ndarray


def read_curve(folder: Path, window: int) -> Curve:
    """Read a run folder. Raises ConfigError if it is none, or no game has ended yet."""
    try:
        config = json.loads((folder / "config.json").read_text())
        settings = {name: value for name, value in config["args"].items() if name not in NOT_SETTINGS}
        algorithm, env_id = str(config["algorithm"]), str(settings.pop("env_id"))
        goal = settings.pop("stop_return", None)
        seed, settings["commit"] = int(config["args"].get("seed", 0)), config.get("commit")
        settings[RESUMED] = changed_on_resume(folder, config["args"])
        episodes = read_episodes(folder / "episodes.csv")
    except FileNotFoundError as error:
        why = f"not a run folder, {Path(error.filename).name} is missing"
        raise ConfigError("runs", folder, why, "name run folders, runs/<name>") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("runs", folder, f"not a run folder ({error})", "name run folders, runs/<name>") from error
    if not episodes:
        raise ConfigError("runs", folder, "no game has ended in this run", "name another run folder")
    steps, seconds, _, returns, _ = np.array(episodes).T
    sums = np.cumsum(np.insert(returns, 0, 0.0))
    ends = np.arange(1, len(returns) + 1)
    starts = np.maximum(ends - window, 0)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    last = np.append(steps[1:] != steps[:-1], True)  # of the games that ended at the same step
    solved_at = None
    # A run that still goes on, or was killed, has no summary; where it was not solved, there are no figures.
    with suppress(OSError, ValueError, TypeError, AttributeError):
        summary = json.loads((folder / "summary.json").read_text())
        solved_at = int(summary.get("solved_at_steps")), float(summary.get("solved_at_seconds")) / 60
    minutes = seconds / 60
    counts = ends >= min(window, MIN_EPISODES)  # as for the run itself
    points = steps[last], minutes[last], means[last], counts[last]
    return Curve(folder.name, algorithm, env_id, seed, settings, goal, solved_at, *points)


def changed_on_resume(folder: Path, newest: dict[str, Any]) -> list[str]:
    """Flags in which an earlier start of the run in a folder differs from the settings of the newest."""
    changed: set[str] = set()
    for start in earlier_starts(folder):
        changed |= changed_settings(newest, start.get("args") or {}).keys()
    shown_elsewhere = {f"--{flag_name(name)}" for name in (*NOT_SETTINGS, "total_steps", "stop_return")}
    return sorted(changed - shown_elsewhere)


def goal_of(run: Curve, goal: float | None) -> float | None:
    """The return that counts as solved: `goal`, or the `--stop-return` of the run."""
    return run.goal if goal is None else goal


def one_for_each_seed(runs: Iterable[Curve]) -> tuple[list[Curve], list[str]]:
    """(runs, messages): of several with the same settings and seed, the one with the most steps."""
    best: dict[Any, Curve] = {}
    skipped = []
    for run in runs:
        key = (run.env_id, run.seed, *run.group)
        other = best.get(key)
        if other is not None:
            run, other = (run, other) if run.steps[-1] > other.steps[-1] else (other, run)
            skipped.append(
                f"{other.name}: seed {run.seed} of the same settings is in {run.name}; other seeds are averaged"
            )
        best[key] = run
    return list(best.values()), skipped


def grouped(runs: Sequence[Curve]) -> dict[str, list[Group]]:
    """Environment -> its groups; a label names the algorithm and the settings in which its groups differ."""
    games: dict[str, dict[tuple[str, str], list[Curve]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        games[run.env_id][run.group].append(run)
    return {env_id: [Group(*item) for item in labelled(list(groups.values()))] for env_id, groups in games.items()}


def labelled(groups: list[list[Curve]]) -> Iterable[tuple[str, list[Curve]]]:
    """(label, runs) of each group of one environment: what differs, among many groups only what is not usual."""
    for runs in groups:
        settings, algorithm = runs[0].settings, runs[0].algorithm
        alike = [other[0].settings for other in groups if other[0].algorithm == algorithm]
        parts = []
        for name, value in settings.items():
            values = [str(other.get(name, value)) for other in alike]
            is_usual = len(alike) >= MANY and str(value) == statistics.mode(values)
            if name == RESUMED:
                parts += [f"resumed with other {' '.join(value)}"] if value else []
            elif len(set(values)) > 1 and not is_usual:
                parts.append(describe(name, value))
        label = ", ".join([algorithm, *parts])
        yield label if len(runs) == 1 else f"{label} ({len(runs)} seeds)", runs


def describe(name: str, value: Any) -> str:
    """A setting in a label."""
    if name == "commit":
        return f"commit {re.sub('(?<=^.{8})[^+]*', '', str(value))}"
    return f"{name.replace('_', '-')} {value:g}" if type(value) is float else f"{name.replace('_', '-')} {value}"


def band_of(runs: Sequence[Curve], x_name: str) -> Band:
    """The mean of runs along `steps` or `minutes`, and their range.

    A run that was solved keeps its last value; any other run counts as far as it goes, so one that was aborted does not
    cut the mean of all.
    """
    xs = [getattr(run, x_name) for run in runs]
    if len(runs) == 1:
        mean = runs[0].mean_return
        return Band(xs[0], mean, mean, mean, np.ones(len(mean)))
    grid = np.linspace(max(x[0] for x in xs), max(x[-1] for x in xs), GRID)
    ys = np.stack([
        np.interp(grid, x, run.mean_return, left=np.nan, right=run.mean_return[-1] if run.solved_at else np.nan)
        for x, run in zip(xs, runs, strict=True)
    ])  # fmt: skip
    number = np.isfinite(ys).sum(axis=0)
    keep = number > 0
    ys = ys[:, keep]
    return Band(grid[keep], np.nanmean(ys, axis=0), np.nanmin(ys, axis=0), np.nanmax(ys, axis=0), number[keep])


class Row(NamedTuple):
    """A group in the table: figures over its runs."""

    env_id: str
    label: str
    final: np.ndarray  # [runs] last moving mean
    steps: np.ndarray  # [reached] to the goal
    minutes: np.ndarray  # [reached]


def table(games: dict[str, list[Group]], goal: float | None) -> list[Row]:
    """Rows for all groups; without a goal, a run that was solved reached its own then, whatever its rule is."""
    rows = []
    for env_id, groups in games.items():
        for label, runs in groups:
            reached = []
            for run in runs:
                wanted = goal_of(run, goal)
                if goal is None and run.solved_at is not None:
                    reached.append(run.solved_at)
                elif wanted is not None and (there := run.counts & (run.mean_return >= wanted)).any():
                    first = int(there.argmax())
                    reached.append((run.steps[first], run.minutes[first]))
            steps, minutes = np.array(reached).reshape(-1, 2).T
            rows.append(Row(env_id, label, np.array([run.mean_return[-1] for run in runs]), steps, minutes))
    return rows


def cells(row: Row) -> tuple[str, str, str, str, str]:
    """Texts of a row: environment, label, final mean and spread, steps and minutes to the goal.

    These are medians over all runs, in which a run that has not reached it counts as longer than all others.
    """
    final = short_return(row.final.mean())
    if len(row.final) > 1:
        final += f" ± {short_return(row.final.std(ddof=1))}"
    number = f"{len(row.steps)}/{len(row.final)}"
    never = [math.inf] * (len(row.final) - len(row.steps))
    steps, minutes = (statistics.median([*some, *never]) for some in (row.steps, row.minutes))
    if math.isinf(steps):
        return row.env_id, row.label, final, f"- ({number})", "-"
    return row.env_id, row.label, final, f"{steps:,.0f} ({number})", f"{minutes:.1f}"
