"""Learning curves of runs: episode return against agent steps and against minutes, one row of axes for each game.

    python plot.py runs/* --out curves.png

Runs that differ only in the seed, of which none occurs twice, are one curve: the mean over the seeds, with the range
from lowest to highest; dotted where some runs have ended unsolved. A table has the final means, and the steps and
minutes to the goal.

    python plot.py runs/<name> --lineage --out lineage.png

Family tree of a population, and the learning rates of its members.
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: it says so where packages are missing)

import csv
import importlib.util
import math
import statistics
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from a3c_mp.cli import parse_plain
from a3c_mp.config import Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.curves import Curve, Group, band_of, grouped, read_curve
from a3c_mp.run.mean_return import short_return
from a3c_mp.run.run_dir import name_of, write_together
from a3c_mp.run.script import exit_with

AXES = {"steps": "agent steps", "minutes": "minutes"}
"""field of `Curve` -> label of its x axis"""
MARKERS = {
    "first": "o", "elite": "*", "kept": "X", "none": ".",
    "architecture": "s", "parameters": "^", "activation": "v", "hyperparameters": "D",
}  # fmt: skip
"""kind of mutation, or of survival -> its marker in a family tree"""


@dataclass(frozen=True)
class Args:
    runs: tuple[Path, ...]
    """run folders, runs/<name>"""
    out: Path = Path("curves.png")
    """image file to write"""
    window: Count = 100
    """smoothing: episodes in the moving average"""
    goal: float | None = None
    """return that counts as solved, in the table and as a line; default: --stop-return of each run"""
    lineage: bool = False
    """draw the family tree and the learning rates of a population instead (of lineage.csv)"""


class Member(NamedTuple):
    """A member of a population in one generation: what is drawn of a line of lineage.csv."""

    generation: int
    place: int
    id: int
    parent: int | None  # id in the generation before
    kind: str
    learning_rate: float
    fitness: float
    steps: int  # of the whole population, at the end of the generation

    @classmethod
    def read(cls, row: dict[str, str]) -> Member:
        """Read the columns of a line. Raises KeyError, TypeError or ValueError if one is missing or wrong."""
        parent = int(row["parent"]) if row["parent"] else None
        numbers = int(row["generation"]), int(row["place"]), int(row["id"]), parent
        return cls(*numbers, row["kind"], float(row["learning_rate"]), float(row["fitness"]), int(row["steps"]))


class Lineage(NamedTuple):
    """Members of all generations, the parent of each that has one, and the last fittest member with its ancestors."""

    name: str
    members: list[Member]
    parents: dict[Member, Member]
    line: set[Member]


def read_lineage(folder: Path) -> Lineage:
    """Read the lineage.csv of a run folder. Raises ConfigError if there is none, or it is broken or empty."""
    try:
        with (folder / "lineage.csv").open(newline="") as file:
            members = [Member.read(row) for row in csv.DictReader(file)]
        at = {(member.generation, member.id): member for member in members}
        parents = {m: at[key] for m in members if (key := (m.generation - 1, m.parent)) in at}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        why = f"lineage.csv cannot be read ({type(error).__name__}: {error})"
        why = "there is no lineage.csv in this folder" if isinstance(error, FileNotFoundError) else why
        raise ConfigError("runs", folder, why, "name a run of train_population.py") from error
    if not members:
        raise ConfigError("runs", folder, "no generation has ended in this run", "name another run folder")
    last = [member for member in members if member.generation == members[-1].generation]
    ancestor: Member | None = max(last, key=lambda m: m.fitness if math.isfinite(m.fitness) else -math.inf)
    line = set()
    while ancestor is not None:
        line.add(ancestor)
        ancestor = parents.get(ancestor)
    return Lineage(name_of(folder), members, parents, line)


def read_all(folders: tuple[Path, ...], read: Callable[[Path], Any]) -> list[Any]:
    """Read run folders; of several, those that cannot be read are skipped. Raises ConfigError if none can be."""
    runs = []
    for folder in folders:
        try:
            runs.append(read(folder))
        except ConfigError as error:
            if len(folders) == 1:
                raise
            print(f"skipped: {error}", file=sys.stderr)
    if not runs:
        raise ConfigError("runs", " ".join(map(str, folders)), "none of them has anything to draw")
    return runs


def as_text(name: str) -> str:
    """A name as matplotlib draws it: between two dollar signs it would read mathematics."""
    return name.replace("$", r"\$")


def draw(axis: Any, groups: list[Group], x_name: str) -> None:
    """Draw each group: the mean over its runs, dotted where some runs have ended unsolved, and the range as a band."""
    for label, runs in groups:
        band = band_of(runs, x_name)
        whole = band.number == len(runs)
        marker = "o" if np.ptp(band.x) == 0 else None  # a line from a point to itself would be invisible
        label = as_text(textwrap.fill(label, 40))
        (line,) = axis.plot(band.x, np.where(whole, band.mean, np.nan), label=label, marker=marker)
        if not whole.all():
            axis.plot(band.x, band.mean, color=line.get_color(), linestyle=":")
        if len(runs) > 1:
            axis.fill_between(band.x, band.low, band.high, alpha=0.2, color=line.get_color())
    axis.set_xlabel(AXES[x_name])
    axis.grid(alpha=0.3)


def draw_goal(axis: Any, groups: list[Group], goal: float | None) -> None:
    """Draw the return that counts as solved, if no two runs have different ones; one far from all curves hides them."""
    goals = {run.goal if goal is None else goal for _, runs in groups for run in runs} - {None}
    one = goals.pop() if len(goals) == 1 else None
    low, high = axis.dataLim.intervaly
    margin = max(high - low, 0.1 * abs(high), 0.1 * abs(low))
    if one is not None and (goal is not None or low - margin <= one <= high + margin):
        axis.axhline(one, color="grey", linestyle="--", linewidth=0.8, label=f"goal {one:g}")


def goal_reached(run: Curve, goal: float | None) -> tuple[float, float]:
    """Steps and minutes after which a run reached its goal, inf if it did not; without `goal`, by its own rule."""
    if goal is None and run.solved_at is not None:
        return run.solved_at
    goal = run.goal if goal is None else goal
    there = run.counts & (run.mean_return >= (math.inf if goal is None else goal))
    return (run.steps[there.argmax()], run.minutes[there.argmax()]) if there.any() else (math.inf, math.inf)


def table(games: dict[str, list[Group]], goal: float | None) -> list[tuple[str, str, str, str, str]]:
    """A row for each group: environment, label, final mean and spread, median steps and minutes to the goal.

    A run that has not reached the goal counts as longer than all others.
    """
    rows = []
    for env_id, groups in games.items():
        for label, runs in groups:
            finals = [float(run.mean_return[-1]) for run in runs]
            final = short_return(statistics.fmean(finals))
            if len(runs) > 1:
                final += f" ± {short_return(statistics.stdev(finals))}"
            all_steps, all_minutes = zip(*(goal_reached(run, goal) for run in runs), strict=True)
            steps, number = statistics.median(all_steps), f"({sum(map(math.isfinite, all_steps))}/{len(runs)})"
            is_known = math.isfinite(steps)
            minutes = f"{statistics.median(all_minutes):.1f}" if is_known else "-"
            rows.append((env_id, label, final, f"{steps:,.0f} {number}" if is_known else f"- {number}", minutes))
    return rows


def draw_lineage(figure: Any, tree: Any, rates: Any, lineage: Lineage) -> None:
    """Draw the family tree (generation, place) and the learning rates of its members; the fittest line is thick."""
    import matplotlib as mpl

    fitness = np.array([member.fitness for member in lineage.members])
    fitness[~np.isfinite(fitness)] = np.nan
    ends = (np.nanmin(fitness), np.nanmax(fitness)) if np.isfinite(fitness).any() else (0.0, 1.0)
    colormap = mpl.colormaps["viridis"].with_extremes(bad="lightgrey")
    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(*ends), colormap)
    colors = dict(zip(lineage.members, scale.to_rgba(fitness), strict=True))
    for axis, name in ((tree, "place"), (rates, "learning_rate")):
        for child, parent in lineage.parents.items():
            xs, ys = [parent.generation, child.generation], [getattr(parent, name), getattr(child, name)]
            axis.plot(xs, ys, color=colors[child], linewidth=3.0 if child in lineage.line else 0.8, zorder=1)
        for kind in dict.fromkeys([*MARKERS, *(member.kind for member in lineage.members)]):
            if members := [member for member in lineage.members if member.kind == kind]:
                points = [m.generation for m in members], [getattr(m, name) for m in members]
                marker = MARKERS.get(kind, "x")
                axis.scatter(*points, c=[colors[m] for m in members], marker=marker, label=kind, zorder=2)
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    tree.set(title=f"{as_text(lineage.name)}, {lineage.members[-1].steps:,} agent steps", ylabel="place")
    tree.yaxis.get_major_locator().set_params(integer=True)
    tree.invert_yaxis()
    tree.legend(fontsize="small", loc="upper center", ncols=8, bbox_to_anchor=(0.5, -0.06))
    rates.set(xlabel="generation", ylabel="learning rate", yscale="log")
    figure.colorbar(scale, ax=[tree, rates], label="fitness")


def new_figure(width: float, height: float) -> Any:
    """A figure of this size (inches). Raises ConfigError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("out", "", "matplotlib is not installed", "pip install matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plot_lineages(args: Args) -> Any:
    """The figure of family trees."""
    lineages = read_all(args.runs, read_lineage)
    figure = new_figure(11, 8 * len(lineages))
    for part, lineage in zip(figure.subfigures(len(lineages), squeeze=False)[:, 0], lineages, strict=True):
        tree, rates = part.subplots(2)
        draw_lineage(part, tree, rates, lineage)
    return figure


def plot_curves(args: Args) -> Any:
    """The figure of learning curves; prints the table of final and first results before."""
    games = grouped(read_all(args.runs, lambda folder: read_curve(folder, args.window)))
    headings = "environment", "runs", f"mean of the last {args.window} games", "steps to the goal", "minutes"
    shown = Table(*headings, box=None)
    for row in table(games, args.goal):
        shown.add_row(*map(escape, row))  # a name may have brackets
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    figure = new_figure(14, 4 * len(games))
    rows = figure.subplots(len(games), len(AXES), squeeze=False, sharey="row")
    for axes, (env_id, groups) in zip(rows, games.items(), strict=True):
        for axis, x_name in zip(axes, AXES, strict=True):
            draw(axis, groups, x_name)
            draw_goal(axis, groups, args.goal)
            axis.set_title(as_text(env_id))
        axes[0].set_ylabel("mean episode return")
        axes[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def main() -> int:
    args = parse_plain(Args, __doc__ or "")
    if not args.runs:
        raise ConfigError("runs", "", "no run folder is named", "for instance: python plot.py runs/*")
    if args.out.suffix not in (".png", ".svg", ".pdf") or not args.out.parent.is_dir() or args.out.is_dir():
        raise ConfigError(
            "out", args.out, "it must be a .png, .svg or .pdf in a folder that is there", "for instance x.png"
        )
    figure = (plot_lineages if args.lineage else plot_curves)(args)
    try:
        write_together({args.out: lambda file: figure.savefig(file, dpi=150, format=args.out.suffix[1:])})
    except OSError as error:
        raise ConfigError("out", args.out, f"it cannot be written ({error.strerror})", "choose another") from error
    print(args.out)
    return 0


if __name__ == "__main__":
    exit_with(main)
