"""Learning curves of runs: episode return against agent steps and against minutes, one row of axes for each game.

    python plot.py runs/* --out curves.png

Runs that differ only in the seed are one curve: the mean over the seeds, with the range from lowest to highest; dotted
where some runs have ended unsolved. A table has the final means, and the steps and minutes to the goal.

    python plot.py runs/<name> --lineage --out lineage.png

Family tree of a population, and the learning rates of its members.
"""

from __future__ import annotations

import csv
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from a3c_mp.cli import parse_plain
from a3c_mp.config import Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.curves import Group, band_of, cells, goal_of, grouped, one_for_each_seed, read_curve, table
from a3c_mp.run.script import exit_with

AXES = {"steps": "agent steps", "minutes": "minutes"}
"""field of `Curve` -> label of its x axis"""
MARKERS = {
    "first": "o",
    "elite": "*",
    "kept": "X",
    "none": ".",
    "architecture": "s",
    "parameters": "^",
    "activation": "v",
    "hyperparameters": "D",
}
"""kind of mutation, or of survival -> its marker in a family tree"""
LABEL_WIDTH, LINE_INCHES = 70, 0.16
"""characters of a line in a legend, and the height that it adds to the figure"""
MOST_INSIDE = 4
"""curves whose legend has room inside the axes"""
NO_FITNESS = "lightgrey"
"""colour of a member whose fitness is not finite"""

T = TypeVar("T")


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
    """A member of a population in one generation: a line of lineage.csv."""

    generation: int
    place: int
    id: int
    parent: int | None  # id in the generation before
    kind: str
    learning_rate: float
    fitness: float
    steps: int  # of the whole population, at the end of the generation


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
            members = [read_member(row) for row in csv.DictReader(file)]
        at = {(member.generation, member.id): member for member in members}
        parents = {m: at[m.generation - 1, m.parent] for m in members if m.parent is not None}
    except FileNotFoundError:
        why = "there is no lineage.csv in this folder"
        raise ConfigError("runs", folder, why, "name a run of train_population.py") from None
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        why = f"lineage.csv cannot be read ({type(error).__name__}: {error})"
        raise ConfigError("runs", folder, why, "name a run of train_population.py") from error
    if not members:
        raise ConfigError("runs", folder, "no generation has ended in this run", "name another run folder")
    last = [member for member in members if member.generation == members[-1].generation]
    ancestor: Member | None = max(last, key=lambda m: m.fitness if math.isfinite(m.fitness) else -math.inf)
    line = set()
    while ancestor is not None:
        line.add(ancestor)
        ancestor = parents.get(ancestor)
    return Lineage(folder.name, members, parents, line)


def read_member(row: dict[str, str]) -> Member:
    """A member from the columns of its line. Raises KeyError, TypeError or ValueError if one is missing or wrong."""
    learning_rate = float(row["learning_rate"])
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate {learning_rate}")
    parent = int(row["parent"]) if row["parent"] else None
    numbers = int(row["generation"]), int(row["place"]), int(row["id"]), parent
    return Member(*numbers, row["kind"], learning_rate, float(row["fitness"]), int(row["steps"]))


def read_all(folders: tuple[Path, ...], read: Callable[[Path], T]) -> list[T]:
    """Read run folders; of several, those that cannot be read are skipped with a message.

    Raises:
        ConfigError: none can be read.
    """
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


def draw(axis: Any, groups: list[Group], x_name: str) -> None:
    """Draw each group: the mean over its runs, dotted where some runs have ended unsolved, and the range as a band."""
    import matplotlib as mpl

    if len(groups) > len(mpl.rcParams["axes.prop_cycle"]):
        axis.set_prop_cycle(color=mpl.colormaps["tab20"](range(20)))
    for label, runs in groups:
        label = textwrap.fill(label, LABEL_WIDTH)
        band = band_of(runs, x_name)
        whole = band.number == len(runs)
        marker = "o" if np.ptp(band.x) == 0 else None  # a line from a point to itself would be invisible
        (line,) = axis.plot(band.x, np.where(whole, band.mean, np.nan), label=label, marker=marker)
        if not whole.all():
            axis.plot(band.x, band.mean, color=line.get_color(), linestyle=":")
        if len(runs) > 1:
            axis.fill_between(band.x, band.low, band.high, alpha=0.2, color=line.get_color())
    axis.set_xlabel(AXES[x_name])
    axis.grid(alpha=0.3)


def draw_goal(axis: Any, groups: list[Group], goal: float | None) -> None:
    """Draw the return that counts as solved, if all runs have the same; one that is far from all curves hides them."""
    goals = {goal_of(run, goal) for _, runs in groups for run in runs}
    low, high = axis.dataLim.intervaly
    margin = max(high - low, 0.1 * abs(high), 0.1 * abs(low))
    if (
        len(goals) == 1
        and (one := goals.pop()) is not None
        and (goal is not None or low - margin <= one <= high + margin)
    ):
        axis.axhline(one, color="grey", linestyle="--", linewidth=0.8, label=f"goal {one:g}")


def draw_lineage(figure: Any, tree: Any, rates: Any, lineage: Lineage) -> None:
    """Draw the family tree (generation, place) and the learning rates of its members; the fittest line is thick."""
    import matplotlib as mpl

    fitness = np.array([member.fitness for member in lineage.members])
    finite = fitness[np.isfinite(fitness)]
    ends = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    colormap = mpl.colormaps["viridis"].with_extremes(bad=NO_FITNESS)
    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(*ends), colormap)
    colors = dict(zip(lineage.members, scale.to_rgba(np.where(np.isfinite(fitness), fitness, np.nan)), strict=True))
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
    tree.set(title=f"{lineage.name}, {lineage.members[-1].steps:,} agent steps", ylabel="place")
    tree.yaxis.get_major_locator().set_params(integer=True)
    tree.invert_yaxis()
    for handle in tree.legend(
        fontsize="small", loc="upper center", ncols=8, bbox_to_anchor=(0.5, -0.06)
    ).legend_handles:
        handle.set_facecolor("grey")
    rates.set(xlabel="generation", ylabel="learning rate", yscale="log")
    figure.colorbar(scale, ax=[tree, rates], label="fitness")


def pyplot(out: Path) -> Any:
    """matplotlib's pyplot. Raises ConfigError if it is not installed or cannot write `out`."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("out", out, "matplotlib is not installed", "pip install matplotlib") from None
    if not out.parent.is_dir():
        raise ConfigError("out", out, "its folder does not exist", "make the folder first")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    formats = plt.figure().canvas.get_supported_filetypes()
    if out.suffix[1:] not in formats or out.is_dir():
        why = f"it must be a file that ends in one of {', '.join(formats)}"
        raise ConfigError("out", out, why, "for instance curves.png")
    return plt


def plot_lineages(plt: Any, args: Args) -> tuple[Any, dict[str, int]]:
    """The figure of family trees, and counts of what is in it."""
    lineages = read_all(args.runs, read_lineage)
    size = {"figsize": (11, 8 * len(lineages)), "squeeze": False, "layout": "constrained"}
    figure, rows = plt.subplots(2 * len(lineages), 1, **size)
    for i, lineage in enumerate(lineages):
        draw_lineage(figure, rows[2 * i][0], rows[2 * i + 1][0], lineage)
    counts = {"run": len(lineages), "member": sum(len({m.id for m in lineage.members}) for lineage in lineages)}
    return figure, counts


def plot_curves(plt: Any, args: Args) -> tuple[Any, dict[str, int]]:
    """The figure of learning curves, and counts of what is in it; prints the table of final and first results."""
    runs, skipped = one_for_each_seed(read_all(args.runs, lambda folder: read_curve(folder, args.window)))
    for message in skipped:
        print(f"skipped: {message}", file=sys.stderr)
    games = grouped(runs)
    lines = [len(textwrap.wrap(label, LABEL_WIDTH)) for groups in games.values() for label, _ in groups]
    height = 4 * len(games) + LINE_INCHES * sum(lines)
    size = {"figsize": (11, height), "squeeze": False, "sharey": "row", "layout": "constrained"}
    figure, rows = plt.subplots(len(games), len(AXES), **size)
    for axes, (env_id, groups) in zip(rows, games.items(), strict=True):
        for axis, x_name in zip(axes, AXES, strict=True):
            draw(axis, groups, x_name)
            draw_goal(axis, groups, args.goal)
            axis.set_title(env_id)
        axes[0].set_ylabel("mean episode return")
        if len(groups) > MOST_INSIDE:
            axes[0].legend(fontsize="small", loc="upper left", bbox_to_anchor=(0.0, -0.15))
        else:
            axes[0].legend(fontsize="small")
    print_table(games, args)
    return figure, {"run": len(runs), "curve": sum(map(len, games.values())), "game": len(games)}


def print_table(games: dict[str, list[Group]], args: Args) -> None:
    """Print final mean and spread of each group, and when its runs reached the goal."""
    shown = Table(
        "environment", "runs", f"mean of the last {args.window} games", "steps to the goal", "minutes", box=None
    )
    for row in table(games, args.goal):
        shown.add_row(*cells(row))
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


def main() -> int:
    args = parse_plain(Args, __doc__)
    if not args.runs:
        raise ConfigError("runs", "", "no run folder is named", "for instance: python plot.py runs/*")
    figure, counts = (plot_lineages if args.lineage else plot_curves)(pyplot(args.out), args)
    try:
        figure.savefig(args.out, dpi=150)
    except OSError as error:
        raise ConfigError("out", args.out, f"it cannot be written ({error.strerror})", "choose another") from error
    print(f"{args.out}: " + ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items()))
    return 0


if __name__ == "__main__":
    exit_with(main)
