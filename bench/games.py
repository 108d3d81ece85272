"""Eight Atari games with one preset: raw and human-normalised scores, beside those that others have published.

    python bench/games.py --chapter a3c_data --seeds 2 --runs-dir runs/games

Every game gets the flags of the chapter's preset for Pong, without its stop rule and what chapter 1 has for Pong alone:
its schedules, which are made for much shorter runs, and its passes. Flags that are not listed here are the trainer's.
The result file is written after every run, and a later start with the same settings goes on behind the runs that it
has: an interruption costs one run. `--games Pong Breakout` plays some of the eight, `--sticky` the games of `ALE/*-v5`,
where an action is repeated with a probability of 0.25.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import numpy as np

from a3c_mp.algorithms.actor_critic_settings import PONG_SETTINGS
from a3c_mp.cli import parse_own
from a3c_mp.config import Count, flag_name
from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import EpisodeRow, read_episodes
from a3c_mp.run.mean_return import MIN_EPISODES, WINDOW
from a3c_mp.run.run_dir import as_recorded, git_commit
from a3c_mp.run.script import exit_with
from bench import common

MARKS = (250_000, 500_000, 1_000_000)
"""agent steps at which scores are taken"""
SAMPLES = 2_000
"""resamples of the bootstrap"""
PROTOCOL = "mean training return of the last 100 whole games, raw, all lives; exploration on; 4 frames a step"
NO_STICKY = "*NoFrameskip-v4: no sticky actions, no-op starts, minimal actions"
STICKY = "ALE/*-v5: sticky actions of 0.25, minimal actions"
THEIRS = "published: dopamine's training returns after 1M agent steps, sticky actions of 0.25, means of five runs"


class Game(NamedTuple):
    """Scores of an Atari game that others have published."""

    random: float  # Wang et al. 2016, table 2
    human: float  # the same table
    dqn: float  # dopamine, after 1M agent steps
    rainbow: float
    iqn: float

    def normalised(self, score: float) -> float:
        """0 is the score of random play, 1 that of a human."""
        return (score - self.random) / (self.human - self.random)


GAMES = {
    "Pong": Game(-20.7, 14.6, -13.9, -16.5, -1.8),
    "Breakout": Game(1.7, 30.5, 19, 16, 32),
    "Qbert": Game(163.9, 13455.0, 747, 1189, 2444),
    "SpaceInvaders": Game(148.0, 1668.7, 415, 437, 612),
    "Seaquest": Game(68.4, 42054.7, 348, 378, 1195),
    "BeamRider": Game(363.9, 16926.5, 1116, 526, 5614),
    "Boxing": Game(0.1, 12.1, 16, 8, 44),
    "Freeway": Game(0.0, 29.6, 2, 28, 21),
}
PUBLISHED = {"dqn": "DQN", "rainbow": "Rainbow", "iqn": "IQN"}
"""fields of `Game` with scores of others -> their names"""
PONG, BOXING = (f"{game}NoFrameskip-v4" for game in ("Pong", "Boxing"))


@dataclass(frozen=True)
class Args:
    chapter: common.ChapterName = "a3c_data"
    """what to train"""
    games: tuple[str, ...] = tuple(GAMES)
    """which of the eight"""
    seeds: Count = 2
    """how many seeds of each game: 1, 2, ..."""
    steps: Count = 1_000_000
    """agent steps of each run; schedules run to this too, unless --total-steps is given"""
    sticky: bool = False
    """ALE/*-v5: an action is repeated with a probability of 0.25"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    results: Path = common.RESULTS
    """folder of the result file"""


def env_id_of(game: str, sticky: bool) -> str:
    return f"ALE/{game}-v5" if sticky else f"{game}NoFrameskip-v4"


def defaults_of(command: Sequence[str]) -> dict[str, Any]:
    """The settings of a chapter without any flag or preset, as a file has them."""
    return as_recorded(type(common.trainer_settings([*command, f"--env-id={PONG}"]))())


def preset_flags(command: Sequence[str]) -> list[str]:
    """Flags of a chapter's preset for Pong, without its stop rule and budget, and what chapter 1 has for Pong alone."""
    preset = {**common.presets(command).get(PONG, {})}
    for name in ("stop_return", "total_steps", "algo"):
        preset.pop(name, None)
    others = as_recorded(common.trainer_settings([*command, f"--env-id={BOXING}"]))
    preset |= {name: others[name] for name in preset.keys() & PONG_SETTINGS.keys()}
    flags = []
    for name, value in preset.items():
        flag = name.replace("_", "-")
        flags.append((f"--{flag}" if value else f"--no-{flag}") if isinstance(value, bool) else f"--{flag}={value}")
    return flags


def score_at(episodes: Sequence[EpisodeRow], steps: int) -> float | None:
    """Mean raw return of the last 100 games that had ended after so many agent steps; None if they are too few."""
    ended = [episode.episode_return for episode in episodes if episode.steps <= steps][-WINDOW:]
    return round(statistics.mean(ended), 3) if len(ended) >= MIN_EPISODES else None


def scores_of(folder: Path, steps: int) -> dict[str, float | None]:
    """Scores of a run at each mark up to its budget: "250000" -> mean return."""
    episodes = read_episodes(folder / "episodes.csv")
    return {str(mark): score_at(episodes, mark) for mark in MARKS if mark <= steps}


def by_game(runs: Sequence[dict[str, Any]], mark: int) -> dict[str, list[float]]:
    """Game -> scores of its seeds at a mark."""
    found: dict[str, list[float]] = {}
    for run in runs:
        score = run["scores"].get(str(mark))
        if score is not None:
            found.setdefault(run["game"], []).append(score)
    return found


def median_with_interval(scores: dict[str, list[float]]) -> tuple[float, float, float]:
    """Median over games of the mean normalised score, and its 95% interval.

    The interval is a stratified bootstrap (Agarwal et al. 2021): runs of each game are drawn again, games are not.
    """
    games = {game: np.array([GAMES[game].normalised(score) for score in seeds]) for game, seeds in scores.items()}
    rng = np.random.default_rng(0)
    means = [rng.choice(seeds, (SAMPLES, len(seeds))).mean(axis=1) for seeds in games.values()]
    low, high = np.percentile(np.median(means, axis=0), [2.5, 97.5])
    middle = float(np.median([seeds.mean() for seeds in games.values()]))
    return middle, float(low), float(high)


def medians_of(runs: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Mark -> median over games with the ends of its interval, where a game has a score."""
    scores = {str(mark): by_game(runs, mark) for mark in MARKS}
    return {mark: [round(value, 3) for value in median_with_interval(found)] for mark, found in scores.items() if found}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A line for each game: raw scores and, in brackets, normalised ones; then the medians over games."""
    played = [game for game in GAMES if any(run["game"] == game for run in runs)]
    lines = []
    for game in played:
        seeds = sum(run["game"] == game for run in runs)
        ours = [by_game(runs, mark).get(game) for mark in MARKS]
        cells = [cell(game, statistics.mean(scores)) if scores else "-" for scores in ours]
        lines.append([game, str(seeds), *cells, *(cell(game, getattr(GAMES[game], name)) for name in PUBLISHED)])
    medians = medians_of(runs)
    ours_median = [median_cell(medians.get(str(mark))) for mark in MARKS]
    theirs = [
        statistics.median(GAMES[game].normalised(getattr(GAMES[game], name)) for game in played) for name in PUBLISHED
    ]
    lines.append(["median, normalised", "", *ours_median, *(f"{value:.2f}" for value in theirs)])
    marks = [f"{mark / 1e6:g}M" for mark in MARKS]
    return common.markdown_table(["game", "seeds", *marks, *(f"{name} 1M" for name in PUBLISHED.values())], lines)


def median_cell(median: Sequence[float] | None) -> str:
    """A median with its interval, which one seed of each game does not have."""
    if median is None:
        return "-"
    middle, low, high = median
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if low < high else f"{middle:.2f}"


def cell(game: str, score: float) -> str:
    return f"{score:,.1f} ({GAMES[game].normalised(score):.2f})"


def result_path(args: Args, result: dict[str, Any]) -> Path:
    """The same for every start on one machine, so that a later one goes on."""
    kind = "games_sticky" if args.sticky else "games"
    machine = result["machine"]["name"].lower().replace(" ", "-")
    return args.results / f"{kind}_{args.chapter}_{machine}.json"


def settings_of(command: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    """What a trainer's runs of all games and seeds share, as a file has it. Raises ConfigError for bad flags."""
    settings = as_recorded(common.trainer_settings([*command, f"--env-id={PONG}", *flags]))
    return {name: value for name, value in settings.items() if name not in ("env_id", "seed", "runs_dir", "run_name")}


def begin_or_continue(
    args: Args, flags: Sequence[str], settings: dict[str, Any], defaults: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """The result file and its content, with the runs that it has. Raises ConfigError if they had other settings.

    Args:
        defaults: what settings that are newer than the file were when it was written.
    """
    protocol = [PROTOCOL, STICKY if args.sticky else NO_STICKY, THEIRS]
    new = common.begin("games", args, "8 games") | {
        "protocol": protocol,
        "flags": list(flags),
        "settings": settings,
        "steps": args.steps,
        "runs": [],
    }
    path = result_path(args, new)
    if not path.exists():
        return path, new
    old = json.loads(path.read_text())
    if "settings" not in old:
        why = f"{path.name} is of an older version and has no settings"
        raise ConfigError("results", args.results, why, "choose another folder, or move the file away")
    saved = {**defaults, **old["settings"], "steps": old["steps"]}
    if differing := [name for name, value in {**settings, "steps": args.steps}.items() if saved.get(name) != value]:
        name = differing[0]
        why = f"{path.name} has runs with other settings: {flag_name(name)} is {saved.get(name)} there"
        raise ConfigError("results", args.results, why, "choose another folder, or move the file away")
    if old["commit"] != new["commit"]:
        print(f"warning: {path.name} has runs of commit {old['commit']}; each run names its own")
    return path, old


def main() -> int:
    args, more = parse_own(Args, __doc__)
    if unknown := [game for game in args.games if game not in GAMES]:
        raise ConfigError(
            "games", unknown[0], "there are no published scores of it here", f"choose from {', '.join(GAMES)}"
        )
    if any(token.partition("=")[0] in ("--env-id", "--env_id") for token in more):
        raise ConfigError("env-id", "", "each game brings its own", f"choose with --games {' '.join(GAMES)}")
    command = common.CHAPTERS[args.chapter]
    budget = common.defaults_for(more, {"--total-steps": str(args.steps)})
    flags = [*preset_flags(command), *budget, "--stop-return=1e9", *more]
    path, result = begin_or_continue(args, flags, settings_of(command, flags), defaults_of(command))
    done = {(run["game"], run["seed"]) for run in result["runs"]}
    for seed in range(1, args.seeds + 1):
        for game in args.games:
            if (game, seed) in done:
                continue
            env_id = env_id_of(game, args.sticky)
            name = common.run_name({**common.dated(result), "env_id": env_id}, f"s{seed}")
            place = [f"--env-id={env_id}", f"--seed={seed}", f"--runs-dir={args.runs_dir}", f"--run-name={name}"]
            if code := common.run_script([*command, *flags, *place]):
                return code
            folder = args.runs_dir / name
            summary = json.loads((folder / "summary.json").read_text())
            figures = {
                name: summary[name] for name in ("steps", "wall_seconds", "sps", "exit_reason", "weights_sha256")
            }
            run = {
                "game": game,
                "seed": seed,
                "commit": git_commit(),
                **figures,
                "scores": scores_of(folder, args.steps),
            }
            result["runs"].append(run)
            result["medians"] = medians_of(result["runs"])
            common.save(path, result)
            print(table(result["runs"]), flush=True)
    print(table(result["runs"]))
    print("\n".join([*result["protocol"], str(path)]))
    return 0


if __name__ == "__main__":
    exit_with(main)
