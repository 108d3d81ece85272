"""Tables and pictures made from `bench/results/*.json`: no figure is typed by hand.

Of several results for one chapter, game, machine and settings the newest counts. The README gets a row for each
chapter, with today's preset, on the machine that has most of these rows. `docs/results.md` gets the rows of every
machine and the scores of eight games, `docs/ray.md` how far chapter 7 scales; pictures in `docs` show the same. A
table replaces what is between `<!-- results -->` and `<!-- /results -->`, or between those of `games`, `peers` and
`scale`; in a file without these markers it replaces nothing, and is printed.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_plain
from a3c_mp.run.script import exit_with
from bench import common, games, peers, pictures, scale, solve, throughput
from bench.records import RESULTS, Result

CHAPTERS = {
    "a3c_data": ("[1 A3C by data](docs/a3c_data.md)", "unsure: start here (asynchronous PPO)"),
    "a3c_grad": ("[2 A3C by gradients](docs/a3c_grad.md)", "cores are many, or for A2C"),
    "apex_dqn": ("[3 Ape-X DQN, DDPG, TD3](docs/apex.md)", "steps are worth using again"),
    "impala": ("[4 IMPALA](docs/impala.md)", "the net has an LSTM, or learning is slow"),
    "task": ("[5 Tasks](docs/task.md)", "machines join and leave"),
    "population": ("[6 Populations](docs/population.md), DQN", "you do not know the hyperparameters"),
    "population_ppo": ("6, PPO", "the same, also for continuous actions"),
    "ray_impala": ("[7 Ray](docs/ray.md)", "one machine is too small for 3 or 4"),
}
"""chapter -> its page, when to use it"""
GOALS = {"PongNoFrameskip-v4": "Pong to 18", "CartPole-v1": "CartPole-v1 to 475"}
"""games of the README's table -> title of the column"""
SHOWN_SETTINGS = 3
"""settings other than the preset's that a table names; more of them are an older preset"""


@dataclass(frozen=True)
class Args:
    readme: Path = common.ROOT / "README.md"
    """file that gets the table of chapters"""
    page: Path = common.ROOT / "docs" / "results.md"
    """file that gets the tables of every chapter, game and machine"""
    pictures: Path = common.ROOT / "docs"
    """folder of the pictures to write: curves.png, pong.png, games.png, peers.png"""
    ray_page: Path = common.ROOT / "docs" / "ray.md"
    """file that gets the tables of how far chapter 7 scales"""


class Row(NamedTuple):
    """The runs of one chapter, game and machine with the same settings."""

    chapter: str
    env_id: str
    machine: str
    settings: str  # "preset", or what differs from it
    date: str
    file: str
    runs: list[Result]


def rows_of(results: Iterable[Result]) -> list[Row]:
    """Rows of results of bench/solve.py, the newest of each kind; an unfinished one only where there is no other."""
    found: dict[tuple[str, str, str, str], Row] = {}
    whole = set[tuple[str, str, str, str]]()
    for result in sorted(results, key=lambda result: result["date"]):
        for name, settings in result["settings"].items() if result["kind"] == "solve" else ():
            chapter = common.split_row(name, common.CHAPTERS)[0] or result["chapter"]
            runs = [run for run in result["runs"] if run["row"] == name]
            if not runs or settings["stop_return"] is None:
                continue
            other = difference(chapter, settings)
            if any(run.get("exit_reason") == "max_seconds" for run in runs):
                other["max_seconds"] = settings.get("max_seconds")
            differing = " ".join(f"{name}={value}" for name, value in other.items())
            key = chapter, settings["env_id"], result["machine"]["name"], differing
            whole |= {key} if len(runs) >= result["bench"]["seeds"] else set()
            if len(runs) >= result["bench"]["seeds"] or key not in whole:
                found[key] = Row(*key, result["date"], result["file"], runs)
    return [found[key] for key in sorted(found)]


def difference(chapter: str, settings: Result) -> Result:
    """Settings of runs in which they differ from the preset of today; those newer than the runs had their defaults."""
    preset = common.trainer_settings([*common.CHAPTERS[chapter], f"--env-id={settings['env_id']}"])
    today, then = common.as_recorded(preset), common.as_recorded(type(preset)()) | settings
    return {name: then[name] for name in today if then[name] != today[name] and name not in ("seed", "max_seconds")}


def cost(row: Row) -> str:
    """Wall time and steps until solved, medians over the seeds."""
    medians, solved = solve.medians(row.runs), sum(run["solved"] for run in row.runs)
    seeds = f"{len(row.runs)} seed{'s' * (len(row.runs) > 1)}"
    wall, steps = medians["wall_seconds"], medians["steps"]
    if wall is None or steps is None:
        return f"{solved} of {seeds} solved"
    seeds = seeds if solved == len(row.runs) else f"{solved} of {seeds}"
    if row.env_id.startswith("CartPole"):
        return f"{wall:.0f} s, {steps / 1e3:.0f}k steps ({seeds})"
    return f"{wall / 60:.1f} min, {steps / 1e6:.2f}M steps ({seeds})"


def presets_of(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of today's presets on the machine that has most of them, and those of other machines."""
    found = [row for row in rows if not row.settings and row.env_id in GOALS and row.chapter in CHAPTERS]
    machine = statistics.mode(row.machine for row in found) if found else ""
    return [row for row in found if row.machine == machine], [row for row in found if row.machine != machine]


def chapter_table(rows: Iterable[Row]) -> str:
    """The README's table: a line for each chapter, when to use it, and a column for each goal."""
    shown, others = presets_of(rows)
    if not shown:
        return ""
    elsewhere = {(row.chapter, row.env_id): f"{cost(row)} *" for row in sorted(others, key=lambda row: row.date)}
    cells = elsewhere | {(row.chapter, row.env_id): cost(row) for row in shown}
    lines = [["chapter", "use it when", *GOALS.values()], ["---"] * (2 + len(GOALS))]
    for chapter, text in CHAPTERS.items():
        lines.append([*text, *(cells.get((chapter, game), "-") for game in GOALS)])
    dates = sorted(row.date[:10] for row in shown)
    about = f"Medians on {shown[0].machine}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    about += " *: on another machine. All files: [results](docs/results.md).\n"
    about += "Chapter 6's steps are those of training: evaluations take 0.08M (CartPole-v1) to 0.2M more."
    return "\n".join([*map(markdown_line, lines), "", about])


def markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main_table(rows: Iterable[Row]) -> str:
    """The table of docs/results.md: a line for each row, and its file."""
    titles = ["chapter", "game", "machine", "settings", "to the goal", "steps a second", "file"]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        settings = f"`{row.settings}`" if row.settings else "preset"
        settings = "older preset" if len(row.settings.split()) > SHOWN_SETTINGS else settings
        sps = f"{solve.medians(row.runs)['sps']:,.0f}"
        link = f"[{row.date[:10]}](../bench/results/{row.file})"
        lines.append([row.chapter, row.env_id, row.machine, settings, cost(row), sps, link])
    return "\n".join(map(markdown_line, lines))


def throughput_tables(results: Iterable[Result]) -> list[str]:
    """A table for each result of bench/throughput.py."""
    return [
        f"{result['env_id']}, {result['machine']['name']} ([file](../bench/results/{result['file']})):\n\n"
        f"{throughput.table(result)}"
        for result in results
        if result["kind"] == "throughput"
    ]


def put(path: Path, table: str, name: str = "results") -> None:
    """Writes a table between the markers of a name in a file, or prints it if the file has none."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text = path.read_text() if path.exists() else ""
    replaced, count = pattern.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    if count:
        path.write_text(replaced)
    print(path if count else table)


# ---- other libraries


def peers_of(results: Iterable[Result]) -> tuple[Result | None, list[Result]]:
    """Results of bench/peers.py on Pong: of rates the newest with most rows, and all with minutes to a goal."""
    found = [each for each in results if each["kind"] == "peers" and each["env_id"] == next(iter(GOALS))]
    rates = [each for each in found if each["bench"]["stop_return"] is None]
    minutes = [each for each in found if each["bench"]["stop_return"] == 18]
    return max(rates, key=lambda each: (len(each["settings"]), each["date"]), default=None), minutes


def peers_tables(rates: Result, minutes: Iterable[Result]) -> str:
    """Steps a second of chapter 1 and other libraries, and what their runs to a goal came to."""
    found = peers.rates_of(rates["runs"])
    ours = statistics.median(next(iter(found.values())))
    lines = [["row", "steps a second", "relative", "repetitions"], ["---", "---:", "---:", "---"]]
    for row, sps in found.items():
        middle = statistics.median(sps)
        lines.append([f"`{row}`", f"{middle:,.0f}", f"{middle / ours:.2f}", ", ".join(f"{each:,.0f}" for each in sps)])
    about = f"Medians on {rates['machine']['name']}, {rates['date'][:10]}: [file](../bench/results/{rates['file']})."
    ends = []
    for each in minutes:
        for run in each["runs"]:
            seconds, steps, mean = run["last"]
            took = f"{run['seconds'] / 60:.1f}" if run["solved"] else f"not in {seconds / 60:.0f}"
            row = f"`{run['row']}` ([seed {run['seed']}](../bench/results/{each['file']}))"
            ends.append([row, each["machine"]["name"], took, "-" if mean is None else f"{mean:.1f}", f"{steps:,}"])
    titles = ["row", "machine", "minutes to 18", "mean return at the end", "steps"]
    ends = [titles, ["---", "---", "---:", "---:", "---:"], *sorted(ends)]
    return "\n".join([*map(markdown_line, lines), "", about, "", *map(markdown_line, ends)])


# ---- eight games


def best_scores(results: Iterable[Result]) -> list[Result]:
    """For each chapter and net one result of `bench/games.py`; those with sticky actions last.

    Of each game it has the runs of the file with most whole ones, of several the newest. So a game that is run again
    with other settings, in a file of its own, takes the place of its old runs. Each run has its "file" and "machine".
    """

    def rank(runs: Sequence[Result]) -> tuple[int, int]:
        return sum(run["scores"].get(str(games.MARKS[-1])) is not None for run in runs), len(runs)

    newest: dict[tuple[bool, str, str], Result] = {}
    runs: dict[tuple[bool, str, str], dict[str, list[Result]]] = {}
    for result in sorted(results, key=lambda result: result["date"]):
        key = result["bench"]["sticky"], result["chapter"], games.net_of(result)
        newest[key], games_of = result, runs.setdefault(key, {})
        for game in games.GAMES:
            origin = {"file": result["file"], "machine": result["machine"]["name"]}
            found = [run | origin for run in result["runs"] if run["row"] == game]
            if found and rank(found) >= rank(games_of.get(game, [])):
                games_of[game] = found
    return [newest[key] | {"runs": [run for found in runs[key].values() for run in found]} for key in sorted(newest)]


def games_table(result: Result) -> str:
    """The table of a result of `best_scores`, its machines, files and protocol."""
    commits = ", ".join(dict.fromkeys(run["commit"][:8] for run in result["runs"]))
    machines = ", ".join(dict.fromkeys(run["machine"] for run in result["runs"]))
    played: dict[str, dict[str, None]] = {}  # file -> its games
    for run in result["runs"]:
        played.setdefault(run["file"], {})[run["row"]] = None
    files = [f"[file](../bench/results/{name}) of {', '.join(names)}" for name, names in played.items()]
    about = [f"{machines}, commit {commits}", *result["protocol"], *files]
    title = f"**{games.title_of(result)}{', sticky actions' * result['bench']['sticky']}**"
    return f"{title}\n\n{games.table(result)}\n\n{'; '.join(about)}."


def main() -> int:
    args = parse_plain(Args, __doc__)
    results = [json.loads(path.read_text()) | {"file": path.name} for path in sorted(RESULTS.glob("*.json"))]
    rows = rows_of(results)
    put(args.readme, chapter_table(rows))
    put(args.page, "\n\n".join([main_table(rows), *throughput_tables(results)]))
    scored = best_scores(result for result in results if result["kind"] == "games")
    put(args.page, "\n\n".join([*map(games_table, scored), f"{games.AGGREGATES}."]), "games")
    shown, others = presets_of(rows)
    pictures.draw_chapters(args.pictures / "curves.png", list(GOALS), shown)
    pong = [row for row in [*others, *shown] if (row.chapter, row.env_id) == ("a3c_data", next(iter(GOALS)))]
    if pong:
        pictures.draw_pong(args.pictures / "pong.png", max(pong, key=lambda row: len(row.runs)))
    whole = [result for result in scored if {run["row"] for run in result["runs"]} == games.GAMES.keys()]
    if whole:  # with sticky actions, if there are all games
        alike = [result for result in whole if result["bench"]["sticky"] == whole[-1]["bench"]["sticky"]]
        pictures.draw_games(args.pictures / "games.png", alike)
    rates, minutes = peers_of(results)
    if rates is not None:
        put(args.page, peers_tables(rates, minutes), "peers")
        pictures.draw_rates(args.pictures / "peers.png", rates)
    if scaled := [result for result in results if result["kind"] == "scale"]:
        put(args.ray_page, scale.tables(max(scaled, key=lambda result: result["date"])), "scale")
    return 0


if __name__ == "__main__":
    exit_with(main)
