"""Pictures of results, which bench/report.py makes from the files.

Each is one narrow column, five inches wide with labels of eleven points, which can be read on a phone, 360 pixels wide.
It has a light background of its own: labels of a transparent picture vanish on a white page or on a black one, and few
colours can be told apart on both.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import games, peers
from bench.records import Result, pyplot

WIDTH, DPI = 5.0, 200
PAPER, INK, GRID = "#f4f4f1", "#24292f", "#d9d9d3"
STYLE = {
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": GRID, "axes.grid": True,
    "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 11,
    "axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True,
}  # fmt: skip
CHAPTERS = {
    "a3c_data": ("1 A3C by data", "#0b62c4"), "a3c_grad": ("2 A3C by gradients", "#d1530b"),
    "apex_dqn": ("3 Ape-X DQN", "#198038"), "impala": ("4 IMPALA", "#7a5c00"), "task": ("5 tasks", "#8a3ffc"),
    "population": ("6 population, DQN", "#6b4a3a"), "population_ppo": ("6 population, PPO", "#d12771"),
    "ray_impala": ("7 Ray, IMPALA", "#00838f"),
}  # fmt: skip
"""chapter -> its label and colour"""
OURS, *OTHERS = "#0b62c4", "#8250df", "#198038", "#a2191f", "#005d5d", "#6f4e00"
"""colours of our scores, in the order of results"""
LINES = {"iqn_impala": ("#d1530b", "-"), "iqn": ("#7a5c00", "--"), "dqn": ("#5a6270", ":")}
"""published scores that are drawn -> their colour and line"""


def panels(rows: int, columns: int, height: float) -> tuple[Any, list[Any]]:
    """A figure of so many inches, and its panels."""
    plt = pyplot()
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False)
    return figure, list(axes.flat)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    pyplot().close(figure)
    print(path)


def curve_of(run: Result, chapter: str) -> list[Sequence[float]]:
    """(steps, seconds, mean return) of a run; of a population its best member's fitness, never less than before.

    Files before `best_curve` have the games of all members, whose mean falls with every generation of new ones, and
    some of them the best member's fitness at the end.
    """
    if not chapter.startswith("population"):
        return run["curve"]
    points = run.get("best_curve") or run["curve"]
    if "best_fitness" in run and "best_curve" not in run:
        points = [*points, (run["steps"], run["wall_seconds"], run["best_fitness"])]
    best = [max(mean for *_, mean in points[: number + 1]) for number in range(len(points))]
    return [(steps, seconds, mean) for (steps, seconds, _), mean in zip(points, best, strict=True)]


def draw_seeds(axis: Any, runs: Sequence[Result], chapter: str, unit: float, label: str) -> None:
    """A thin line for each seed, over seconds / unit; the one of median time, the upper one of two, is thick."""
    drawn = sorted((run for run in runs if run.get("curve")), key=lambda run: run["wall_seconds"])
    for number, run in enumerate(drawn):
        _, seconds, means = zip(*curve_of(run, chapter), strict=True)
        middle = number == len(drawn) // 2
        style: dict[str, Any] = (
            {"linewidth": 2.4, "label": label, "zorder": 3} if middle else {"linewidth": 1, "alpha": 0.35}
        )
        where = "steps-post" if chapter.startswith("population") else "default"
        axis.plot([at / unit for at in seconds], means, color=CHAPTERS[chapter][1], drawstyle=where, **style)


def draw_chapters(path: Path, games_shown: Sequence[str], rows: Sequence[Any]) -> None:
    """The README's rows: a panel for each game, a colour for each chapter."""
    figure, axes = panels(len(games_shown), 1, 1.2 + 3.4 * len(games_shown))
    for axis, game in zip(axes, games_shown, strict=True):
        short = game.startswith("CartPole")
        for row in (row for row in rows if row.env_id == game):
            draw_seeds(axis, row.runs, row.chapter, 1 if short else 60, CHAPTERS[row.chapter][0])
        axis.set(title=f"{game}: mean return", xlabel="seconds, logarithmic" if short else "minutes")
        if short:
            ticks = [1, 2, 4, 8, 16, 32, 64, 128]
            axis.set(xscale="log")
            axis.minorticks_off()
            axis.set_xticks(ticks, map(str, ticks))
            axis.set_xlim(max(1, axis.dataLim.x0), axis.dataLim.x1 * 1.1)
    found = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    labels = [label for label, _ in CHAPTERS.values() if label in found]
    figure.legend([found[label] for label in labels], labels, loc="outside lower center", ncols=2)
    save(figure, path)


def draw_pong(path: Path, row: Any) -> None:
    """All seeds of a chapter on Pong."""
    figure, (axis,) = panels(1, 1, 3.6)
    draw_seeds(axis, row.runs, row.chapter, 60, "seed of median time")
    axis.axhline(18, color=INK, linestyle="--", linewidth=1)
    title = f"Pong, {CHAPTERS[row.chapter][0]}: {len(row.runs)} seeds"
    axis.set(title=title, xlabel=f"minutes on {row.machine}", ylabel="mean return")
    axis.set_yticks([-20, -10, 0, 10, 18])
    axis.legend(loc="lower right")
    save(figure, path)


def draw_games(path: Path, results: Sequence[Result]) -> None:
    """Raw scores of eight games over steps, a line for each result and seed, beside published ones after a million.

    A run without a curve in its file has its scores at the marks.
    """
    figure, axes = panels(4, 2, 9.0)
    runs = [
        (run, f"ours, {games.title_of(result)}{'' if result['bench']['sticky'] else ', not sticky'}", colour)
        for result, colour in zip(results, itertools.cycle((OURS, *OTHERS)), strict=False)
        for run in result["runs"]
    ]
    for axis, (name, game) in zip(axes, games.GAMES.items(), strict=True):
        for run, ours, colour in (each for each in runs if each[0]["row"] == name):
            points = [(int(mark), score) for mark, score in run["scores"].items() if score is not None]
            points = [(steps, mean) for steps, _, mean in run.get("curve", ())] or points
            axis.plot([at / 1e6 for at, _ in points], [mean for _, mean in points], color=colour, lw=2, label=ours)
        for field, (colour, line) in LINES.items():
            style = {"color": colour, "linestyle": line, "linewidth": 1.6}
            axis.axhline(getattr(game, field), label=games.PUBLISHED[field], **style)
        axis.set(title=name, xlim=(0, 1.02))
        axis.set_xticks([0, 0.5, 1], ["0", "0.5", "1M"])
        axis.locator_params(axis="y", nbins=4)
    found = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=2)
    save(figure, path)


def draw_rates(path: Path, result: Result) -> None:
    """Median steps a second of chapter 1 and of other libraries, in brackets relative to ours."""
    rates = {row: statistics.median(found) for row, found in peers.rates_of(result["runs"]).items()}
    middle = dict(sorted(rates.items(), key=lambda each: each[1]))
    ours = middle.get("a3c_data", 0.0)
    figure, (axis,) = panels(1, 1, 0.9 + 0.42 * len(middle))
    names = ["ours" if row == "a3c_data" else row for row in middle]
    axis.barh(names, list(middle.values()), color=[OURS if row == "a3c_data" else "#8c959f" for row in middle])
    for number, rate in enumerate(middle.values()):
        text = f"{rate:,.0f} ({rate / ours:.2f})" if ours else f"{rate:,.0f}"
        axis.text(rate + 0.02 * ours, number, text, va="center")
    axis.set(title="Pong: steps a second", xlabel=result["machine"]["name"], xlim=(0, 1.4 * max(middle.values())))
    axis.grid(axis="y", visible=False)
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    save(figure, path)
