"""Tables and learning curves made from `bench/results/*.json`: no figure is typed by hand.

Of several results for one chapter, game, machine and flags the newest counts. The README gets a row for each chapter,
of its newest result on any machine without flags, or with flags that are the preset today, none that was interrupted;
those of another machine than most of a column name theirs.
`docs/results.md` gets every machine, `docs/curves.png` the learning curves, `docs/games.png` the scores of eight games.
A table replaces what is between `<!-- results -->` and `<!-- /results -->`, or between those of `games`; a file without
these markers stays as it is, and the table is printed.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it


from a3c_mp.cli import parse_own, parse_plain
from a3c_mp.errors import ConfigError
from a3c_mp.run.curves import describe
from a3c_mp.run.run_dir import PLACE, as_recorded
from a3c_mp.run.script import exit_with
from bench import common, games, solve, throughput

HEADER = ["chapter", "game", "machine", "flags", "wall time", "steps", "sps", "of the bound", "times SB3's A2C"]
CHAPTER_HEADER = ["chapter", "what travels", "use it when", "Pong to 18", "CartPole-v1 to 475"]
CHAPTERS = {
    "a3c_data": (
        "[1 A3C by data](docs/a3c_data.md)",
        "rollouts; the learner computes the gradients",
        "you are not sure: the one to start with",
    ),
    "a3c_grad": (
        "[2 A3C by gradients](docs/a3c_grad.md)",
        "gradients, one flat vector each",
        "there are many CPU cores, or you want synchronous A2C",
    ),
    "apex_dqn": (
        "[3 Ape-X DQN, DDPG](docs/apex.md)",
        "transitions with priorities, into a sharded replay",
        "you want to learn from old steps again, from those with large TD errors more often",
    ),
    "impala": (
        "[4 IMPALA](docs/impala.md)",
        "unrolls that may be old; V-trace corrects for it",
        "actors fall behind, the net has an LSTM, or one learner is too slow",
    ),
    "task": (
        "[5 Tasks](docs/task.md)",
        "messages between nodes: slot numbers on one machine, rollouts from others",
        "machines join and leave, or you build a pipeline of your own",
    ),
    "population": (
        "[6 Populations](docs/population.md)",
        "whole agents and their genomes, between generations",
        "you do not know the hyperparameters: they evolve while agents learn",
    ),
    "ray_impala": (
        "[7 Ray](docs/ray.md)",
        "unrolls, or transitions to replay shards, between the nodes of a Ray cluster",
        "one machine is too small for chapter 3 or 4",
    ),
}
"""chapter -> its page, what its actors send, when to use it"""
GOALS = {"PongNoFrameskip-v4": True, "CartPole-v1": False}
"""games of the README's table -> whether their wall time is given in minutes"""
MACHIN_HEADER = ["chapter", "game", "machine", "flags", "episodes to Machin's rule", "each seed"]

Key = tuple[str, str, str, str]  # chapter, game, machine, flags
Result = dict[str, Any]


@dataclass(frozen=True)
class Args:
    results: Path = common.RESULTS
    """folder of result files"""
    readme: Path = common.ROOT / "README.md"
    """file that gets the table of chapters"""
    page: Path = common.ROOT / "docs" / "results.md"
    """file that gets the tables of every chapter, game and machine"""
    curves: Path = common.ROOT / "docs" / "curves.png"
    """picture of the learning curves to write"""
    scores: Path = common.ROOT / "docs" / "games.png"
    """picture of the scores of eight games to write"""


def has_goal(result: Result) -> bool:
    """Whether a result is of runs that were to reach a return, by any rule, or that were played afterwards."""
    settings = result.get("settings", {}).get("default", {})
    without = settings.get("stop_return", math.inf) is None and result.get("rule") != "machin"
    return result.get("kind") == "solve" and (not without or "played_mean" in result["runs"][0])


def trainer_flags(result: Result) -> str:
    """The flags with which a chapter ran, but for its game and where it ends: `--net=nature`."""
    flags = result.get("flags")
    if flags is None:
        args_class = {"solve": solve.Args, "throughput": throughput.Args}[result["kind"]]
        _, flags = parse_own(args_class, "", result.get("command", ("",))[1:])
    known = {"--env-id", "--stop-return", "--max-seconds"}
    shown = [
        flag
        for before, flag in zip(["", *flags], flags, strict=False)
        if before not in known and flag.partition("=")[0] not in known
    ]
    return " ".join(shown)


def is_preset(result: Result) -> bool:
    """Whether a result's settings are those of its game's preset today, though they were given as flags."""
    if "default" not in result.get("settings", {}):
        return False
    settings = common.trainer_settings([*common.CHAPTERS[result["chapter"]], f"--env-id={result['env_id']}"])
    today, then = as_recorded(settings), common.settings_then(result, type(settings))
    return all(then[name] == value for name, value in today.items() if name not in {"seed", *PLACE})


def newest(results: Iterable[Result], kind: str, rule: str | None = None) -> dict[Key, Result]:
    """The newest result of a kind for each key, deterministic runs left out."""
    chosen: dict[Key, Result] = {}
    for result in sorted(results, key=lambda result: result["date"]):
        if result["kind"] == kind and result.get("rule") == rule and "--deterministic" not in result.get("command", ()):
            chosen[result["chapter"], result["env_id"], result["machine"]["name"], trainer_flags(result)] = result
    return chosen


def solved_cells(result: Result | None) -> list[str]:
    """Wall time and steps until solved (medians, where most seeds were), and sps."""
    if result is None:
        return ["", "", ""]
    runs, medians = result["runs"], result["medians"]
    if "played_mean" in runs[0]:  # without exploring: what training showed on the way says less
        minutes, steps, score = (
            statistics.median(run[name] for run in runs) for name in ("wall_seconds", "steps", "played_mean")
        )
        return [
            f"{minutes / 60:.1f} min to {score:.0f} ({len(runs)} seeds)",
            f"{steps / 1e6:.2f}M",
            f"{medians['sps']:,.0f}",
        ]
    if medians["wall_seconds"] is None:
        return [f"{sum(run['solved'] for run in runs)} of {len(runs)} seeds solved", "", f"{medians['sps']:,.0f}"]
    solved = sum(run["solved"] for run in runs)
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"
    seeds = seeds if solved == len(runs) else f"{solved} of {seeds}"
    return [
        f"{medians['wall_seconds'] / 60:.1f} min ({seeds})",
        f"{medians['steps'] / 1e6:.2f}M",
        f"{medians['sps']:,.0f}",
    ]  # fmt: skip


def seed_list(runs: list[Result]) -> str:
    """Which seeds were run: `seed 1`, `seeds 1 to 3`, `seeds 1, 4`."""
    seeds = sorted(run["seed"] for run in runs)
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def goal_cell(result: Result | None, in_minutes: bool, machine: str) -> str:
    """Wall time and steps until solved (medians), the seeds, and the machine if it is not the one that is given."""
    if result is None:
        return "not run"
    text = goal_text(result, in_minutes)
    text += f", {result['machine']['name']}" if result["machine"]["name"] != machine else ""
    return f"[{text}](bench/results/{result['file']})" if "file" in result else text


def goal_text(result: Result, in_minutes: bool) -> str:
    """The first part of the same; how many seeds were solved if not most were."""
    runs, medians = result["runs"], result["medians"]
    solved = sum(run["solved"] for run in runs)
    if medians["wall_seconds"] is None:
        return f"{solved} of {len(runs)} solved ({seed_list(runs)})"
    wall, steps = medians["wall_seconds"], medians["steps"]
    cost = f"{wall / 60:.1f} min, {steps / 1e6:.2f}M steps" if in_minutes else f"{wall:.0f} s, {steps / 1e3:.0f}k steps"
    return f"{cost} ({'' if solved == len(runs) else f'{solved} of '}{seed_list(runs)})"


def column(results: Iterable[Result], game: str) -> dict[str, Result]:
    """The newest result of each chapter on a game with its preset, of any machine; none that was interrupted."""
    whole = [r for r in results if len(r.get("runs", [])) >= r.get("bench", {}).get("seeds", 1)]
    by_key = newest(whole, "solve", "stop-return").items()
    found = [result for (*_, flags), result in by_key if not flags or is_preset(result)]
    found.sort(key=lambda result: result["date"])
    return {r["chapter"]: r for r in found if r["env_id"] == game and r["chapter"] in CHAPTERS}


def chosen(results: Iterable[Result]) -> dict[tuple[str, str], Result]:
    """The results of the README's table, (chapter, game) -> result."""
    columns = {game: column(results, game) for game in GOALS}
    return {(chapter, game): result for game, found in columns.items() for chapter, result in found.items()}


def where_and_when(results: list[Result]) -> str:
    """The machine of most results of a column, and their dates: `Intel Xeon 2 cores, 2026-11-21 to 2026-11-22`."""
    machine = main_machine(results)
    dates = sorted(result["date"][:10] for result in results if result["machine"]["name"] == machine)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{machine}, {when}"


def main_machine(results: Iterable[Result]) -> str:
    """The machine of most results, "" if there are none."""
    names = [result["machine"]["name"] for result in results]
    return statistics.mode(names) if names else ""


def chapter_table(results: list[Result]) -> str:
    """A row for each chapter: what travels, when to use it, and a column for each goal, time and steps to it."""
    found = chosen(results)
    if not found:
        return ""
    columns = {game: [result for (_, its_game), result in found.items() if its_game == game] for game in GOALS}
    rows = []
    for chapter, text in CHAPTERS.items():
        cells = [
            goal_cell(found.get((chapter, game)), in_minutes, main_machine(columns[game]))
            for game, in_minutes in GOALS.items()
        ]
        rows.append([*text, *cells])
    machines = "; ".join(f"{game}: {where_and_when(results)}" for game, results in columns.items() if results)
    caption = f"Medians over the seeds. Where a cell names no other machine: {machines}."
    if all("file" in result for result in found.values()):
        caption += " Each links to its file; `python bench/reproduce.py a3c_data CartPole-v1` runs a row again."
    lines = [CHAPTER_HEADER, ["---"] * len(CHAPTER_HEADER), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{caption}"


def main_table(results: list[Result]) -> str:
    """A row for each key with a result of solving, or of throughput."""
    solved, measured = newest(results, "solve", "stop-return"), newest(results, "throughput")
    rows = []
    for key in sorted(solved.keys() | measured.keys()):
        cells = [*key, *solved_cells(solved.get(key)), "", ""]
        if key in measured:
            medians = measured[key]["medians"]
            cells[6] = f"{medians['trainer']:,.0f}"  # undisturbed by the end of the run, unlike that of a solved run
            cells[7] = f"{medians['ratio']:.0%}"
            cells[8] = f"{medians['times_sb3']:.1f}" if "times_sb3" in medians else ""
        rows.append(cells)
    return common.markdown_table(HEADER, rows)


def machin_table(results: list[Result]) -> str:
    """A row for each key judged by Machin's rule; empty if there is none."""
    rows = []
    for key, result in sorted(newest(results, "solve", "machin").items()):
        median = result["medians"]["machin_episodes"]
        each = [str(run["machin_episodes"] or "not met") for run in result["runs"]]
        rows.append([*key, "not met" if median is None else f"{median:,.0f}", ", ".join(each)])
    return common.markdown_table(MACHIN_HEADER, rows) if rows else ""


def replace_between(text: str, table: str, name: str = "results") -> str | None:
    """`text` with the table between the markers of a name; None if it lacks them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    replaced, count = pattern.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    return replaced if count else None


def put(path: Path, table: str, name: str = "results") -> None:
    """Writes the table between the markers of a file, or prints it if the file has none."""
    replaced = replace_between(path.read_text() if path.exists() else "", table, name)
    if replaced is None:
        print(table)
    else:
        path.write_text(replaced)
        print(path)


def draw(path: Path, shown: dict[tuple[str, str], Result]) -> None:
    """Draw the results of the README's table: a panel for each game, a colour for each chapter.

    Each seed is a thin line of mean return over time; the seed of median time, the upper one of two, is a thick one.
    """
    plt = common.pyplot()
    figure, axes = plt.subplots(1, len(GOALS), figsize=(13, 4.5), squeeze=False, layout="constrained")
    lines = {}
    for axis, (game, in_minutes) in zip(axes[0], GOALS.items(), strict=True):
        for number, chapter in enumerate(CHAPTERS):
            if (chapter, game) not in shown:
                continue
            runs = sorted(shown[chapter, game]["runs"], key=lambda run: run["wall_seconds"])
            for run in runs:
                thick = run is runs[len(runs) // 2]
                if not run["curve"]:
                    continue
                _, seconds, means = zip(*run["curve"], strict=True)
                times = [second / 60 if in_minutes else second for second in seconds]
                style = {"linewidth": 2.0} if thick else {"linewidth": 0.8, "alpha": 0.4}
                lines[chapter] = axis.plot(times, means, color=f"C{number}", **style)[0]
        axis.set(title=game, ylabel="mean return of the last 100 games")
        axis.set(xlabel="minutes") if in_minutes else axis.set(xlabel="seconds, logarithmic", xscale="log")
    thick_lines = [plt.Line2D([], [], color=line.get_color(), linewidth=2.0) for line in lines.values()]
    figure.legend(thick_lines, lines, loc="outside lower center", ncols=len(lines))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def best_scores(results: Iterable[Result]) -> list[Result]:
    """For each chapter one result of `bench/games.py`; those with sticky actions last.

    Of each game it has the runs of the file with most of them, of several the newest. So a game that is run again with
    other settings, in a file of its own, takes the place of its old runs. Each run has its "file", "machine" and
    "flags".
    """
    runs: dict[tuple[bool, str], dict[str, list[dict[str, Any]]]] = {}
    newest: dict[tuple[bool, str], Result] = {}
    for result in sorted(results, key=lambda result: result["date"]):
        key = result["bench"]["sticky"], result["chapter"]
        newest[key], games_of = result, runs.setdefault(key, {})
        for game in games.GAMES:
            origin = {"file": result["file"], "machine": result["machine"]["name"], "flags": result["flags"]}
            found = [run | origin for run in result["runs"] if run["game"] == game]
            if found and len(found) >= len(games_of.get(game, [])):
                games_of[game] = found
    return [newest[key] | {"runs": [run for found in runs[key].values() for run in found]} for key in sorted(newest)]


def games_table(result: Result) -> str:
    """The table of a result of `best_scores`, its machines, files and protocol."""
    names = [describe("commit", run["commit"]).removeprefix("commit ") for run in result["runs"]]
    commits = ", ".join(dict.fromkeys(names))
    flags = " or ".join(dict.fromkeys(" ".join(run["flags"]) for run in result["runs"]))
    machines = ", ".join(dict.fromkeys(run["machine"] for run in result["runs"]))
    played: dict[str, dict[str, None]] = {}  # file -> its games
    for run in result["runs"]:
        played.setdefault(run["file"], {})[run["game"]] = None
    files = [f"[file](../bench/results/{name}) of {', '.join(names)}" for name, names in played.items()]
    about = [
        f"`{result['chapter']}` with {flags}, {machines}, commit {commits}",
        *result["protocol"],
        *(files if len(files) > 1 else [f"[file](../bench/results/{next(iter(played))})"]),
    ]
    title = f"**{result['chapter']}{', sticky actions' * result['bench']['sticky']}**"
    return f"{title}\n\n{games.table(result['runs'])}\n\n{'; '.join(about)}."


def draw_scores(path: Path, result: Result) -> list[list[float]]:
    """Draw a group of bars for each game: human-normalised scores after 1M steps, ours beside published ones.

    Returns:
        the heights of the bars, ours first.
    """
    plt = common.pyplot()
    ours = {game: statistics.mean(scores) for game, scores in games.by_game(result["runs"], games.MARKS[-1]).items()}
    names = [game for game in games.GAMES if game in ours]
    published = [[getattr(games.GAMES[game], name) for game in names] for name in games.PUBLISHED]
    rows = {result["chapter"]: [ours[game] for game in names]}
    rows |= dict(zip(games.PUBLISHED.values(), published, strict=True))
    figure, axis = plt.subplots(figsize=(11, 4), layout="constrained")
    width, heights = 0.8 / len(rows), []
    for number, (label, raw) in enumerate(rows.items()):
        heights.append([games.GAMES[game].normalised(score) for game, score in zip(names, raw, strict=True)])
        places = [place + (number - (len(rows) - 1) / 2) * width for place in range(len(names))]
        axis.bar(places, heights[-1], width, label=label, color=f"{0.4 + 0.15 * number}" if number else "C0")
    axis.axhline(1.0, color="grey", linestyle="--", linewidth=0.8)
    axis.set(ylabel="score: random play 0, a human 1", title="after 1M agent steps")
    axis.set_xticks(range(len(names)), names)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return heights


def main() -> int:
    args = parse_plain(Args, __doc__ or "")
    results = [json.loads(path.read_text()) | {"file": path.name} for path in sorted(args.results.glob("*.json"))]
    if scored := best_scores([result for result in results if result.get("kind") == "games"]):
        put(args.page, "\n\n".join(map(games_table, scored)), "games")
        draw_scores(args.scores, scored[0])
        print(args.scores)
    results = [result for result in results if result.get("kind") == "throughput" or has_goal(result)]
    if not results:
        raise ConfigError("results", args.results, "no results there", "run bench/throughput.py or bench/solve.py")
    put(args.readme, chapter_table(results))
    put(args.page, "\n\n".join(filter(None, [main_table(results), machin_table(results)])))
    if shown := chosen(results):
        draw(args.curves, shown)
        print(args.curves)
    return 0


if __name__ == "__main__":
    exit_with(main)
