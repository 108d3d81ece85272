"""Eight Atari games with the same settings: raw and human-normalised scores, beside those that others have published.

    python bench/games.py --chapter a3c_data --seeds 2 --out runs/games.json

Every game gets the settings that a chapter has for one without a preset of its own (`--like`), without its stop rule.
Flags that are not listed here are the trainer's. The file is written after every run; the same command with `--out`
goes on where it was interrupted. `--games Pong Breakout` plays some of the eight, `--sticky` the games of `ALE/*-v5`,
where an action is repeated with a probability of 0.25.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import numpy as np

from a3c_mp.cli import parse_own
from a3c_mp.config import Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with
from bench import common
from bench.records import Result, begin, in_turns, markdown_table, measure

MARKS = (250_000, 500_000, 1_000_000)
"""agent steps at which scores are taken"""
SAMPLES = 10_000
"""resamples of the bootstrap"""
PROTOCOL = "mean training return of the last 100 whole games, raw, all lives; exploration on; 4 frames a step"
NO_STICKY = "*NoFrameskip-v4: no sticky actions, no-op starts, minimal actions"
STICKY = "ALE/*-v5: sticky actions of 0.25, minimal actions"
THEIRS = "published: dopamine's training returns after 1M agent steps, sticky actions of 0.25, means of five runs"
AGGREGATES = (
    "Published median / IQM of the eight games after 1M agent steps with sticky actions. Training returns, five seeds, "
    "dopamine's files of October 2024: DQN .17 (median), QR-DQN .57 / .56, Rainbow with IMPALA's net .60 / .62, IQN "
    ".35 to .43 / .47, IQN with IMPALA's net .70 / .67. Evaluated: MR.Q .54 / .58; BBF, at a hundred times the "
    "arithmetic, 1.08 / 1.14"
)
"""what the table's last columns lack: a line below it"""


class Game(NamedTuple):
    """Scores of an Atari game that others have published."""

    random: float  # Wang et al. 2016, table 2
    human: float  # the same table
    dqn: float  # dopamine, after 1M agent steps
    rainbow: float
    iqn: float
    iqn_impala: float  # IQN with IMPALA's net, the best of dopamine's files of October 2024

    def normalised(self, score: float) -> float:
        """0 is the score of random play, 1 that of a human."""
        return (score - self.random) / (self.human - self.random)


GAMES = {
    "Pong": Game(-20.7, 14.6, -13.9, -16.5, -1.8, 14.8),
    "Breakout": Game(1.7, 30.5, 19, 16, 32, 111),
    "Qbert": Game(163.9, 13455.0, 747, 1189, 2444, 2630),
    "SpaceInvaders": Game(148.0, 1668.7, 415, 437, 612, 751),
    "Seaquest": Game(68.4, 42054.7, 348, 378, 1195, 2938),
    "BeamRider": Game(363.9, 16926.5, 1116, 526, 5614, 4366),
    "Boxing": Game(0.1, 12.1, 16, 8, 44, 79),
    "Freeway": Game(0.0, 29.6, 2, 28, 21, 31),
}
PUBLISHED = {"dqn": "DQN", "rainbow": "Rainbow", "iqn": "IQN", "iqn_impala": "IQN (IMPALA's net)"}
"""fields of `Game` with scores of others -> their names"""


@dataclass(frozen=True)
class Args(common.Args):
    seeds: Count = 2
    """how many seeds of each game: 1, 2, ..."""
    games: tuple[str, ...] = tuple(GAMES)
    """which of the eight"""
    like: str = "Boxing"
    """game whose settings all have"""
    steps: Count = 1_000_000
    """agent steps of each run; schedules run to this too, unless --total-steps is given"""
    sticky: bool = False
    """ALE/*-v5: an action is repeated with a probability of 0.25"""


def env_id_of(game: str, sticky: bool = False) -> str:
    return f"ALE/{game}-v5" if sticky else f"{game}NoFrameskip-v4"


def commands_of(args: Args, flags: Sequence[str]) -> dict[str, list[str]]:
    """Game -> the trainer's command line, by which all games have the settings of `--like`."""
    if unknown := [game for game in (*args.games, args.like) if game not in GAMES]:
        raise ConfigError(
            "games", unknown[0], "there are no published scores of it here", f"choose from {' '.join(GAMES)}"
        )
    if any(flag.partition("=")[0].replace("_", "-") == "--env-id" for flag in flags):
        raise ConfigError("env-id", "", "each game brings its own", f"choose with --games {' '.join(GAMES)}")
    base = [*common.CHAPTERS[args.chapter], f"--total-steps={args.steps}", "--stop-return=1e9"]
    like = common.as_recorded(common.trainer_settings([*base, f"--env-id={env_id_of(args.like)}"]))
    found = {}
    for game in args.games:
        command = [*base, f"--env-id={env_id_of(game, args.sticky)}"]
        own = common.as_recorded(common.trainer_settings(command))
        other = [word for name in sorted(own) if own[name] != like[name] and name != "env_id"
                 for word in common.flag_of(name, like[name])]  # fmt: skip
        found[game] = [*command, *other, *flags]
    return found


def scores_of(games: Sequence[common.Game], steps: int) -> dict[str, float | None]:
    """Scores of a run at each mark up to its budget, "250000" -> mean return; None if too few games had ended."""
    return {str(mark): common.mean_return(games, mark, common.MIN_GAMES) for mark in MARKS if mark <= steps}


def net_of(result: Result) -> str:
    """The net of all runs of a result; "" if its file does not say."""
    return next(iter(result["settings"].values())).get("net", "")


def title_of(result: Result) -> str:
    """Its chapter, and its net if that is not `a3c`: "apex_dqn, --net resnet"."""
    net = net_of(result)
    return result["chapter"] if net in ("", "a3c") else f"{result['chapter']}, --net {net}"


def by_game(runs: Iterable[Result], mark: int) -> dict[str, list[float]]:
    """Game -> scores of its seeds at a mark."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if (score := run["scores"].get(str(mark))) is not None:
            found.setdefault(run["row"], []).append(score)
    return found


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Mean without the lowest and the highest quarter along the last axis (rounded down), as rliable computes it."""
    cut = scores.shape[-1] // 4
    return np.sort(scores)[..., cut : scores.shape[-1] - cut].mean(axis=-1)


def with_interval(scores: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """An aggregate of human-normalised scores and its 95% interval, as rliable computes them (Agarwal et al. 2021).

    "median" is that over games of the mean over runs; "IQM" the interquartile mean of all runs of all games. The
    interval is a stratified bootstrap's: runs of each game are drawn again, games are not.
    """

    def aggregate(drawn: list[np.ndarray]) -> np.ndarray:  # of each game (..., runs)
        if name == "IQM":
            return interquartile_mean(np.concatenate(drawn, axis=-1))
        return np.median([runs.mean(axis=-1) for runs in drawn], axis=0)

    least = min(map(len, scores.values()))  # an IQM weights all games alike
    most = least if name == "IQM" else None
    games = [np.array([GAMES[game].normalised(score) for score in seeds[:most]]) for game, seeds in scores.items()]
    rng = np.random.default_rng(0)
    drawn = aggregate([rng.choice(seeds, (SAMPLES, len(seeds))) for seeds in games])
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(aggregate(games)), float(low), float(high)


def table(result: Result) -> str:
    """A line for each game: raw scores and, in brackets, normalised ones; then median and IQM (of others: of means)."""
    runs = result["runs"]
    played = [game for game in GAMES if any(run["row"] == game for run in runs)]
    lines = []
    for game in played:
        seeds = sum(run["row"] == game for run in runs)
        ours = [by_game(runs, mark).get(game) for mark in MARKS]
        cells = [cell(game, statistics.fmean(scores)) if scores else "-" for scores in ours]
        lines.append([game, str(seeds), *cells, *(cell(game, getattr(GAMES[game], name)) for name in PUBLISHED)])
    for name in ("median", "IQM"):
        whole = [found if found.keys() == set(played) else {} for found in (by_game(runs, mark) for mark in MARKS)]
        ours_all = [aggregate_cell(found, name) for found in whole]
        theirs = [aggregate_cell({game: [getattr(GAMES[game], field)] for game in played}, name) for field in PUBLISHED]
        lines.append([f"{name}, normalised", "", *ours_all, *theirs])
    titles = [*(f"{mark / 1e6:g}M" for mark in MARKS), *(f"{name} 1M" for name in PUBLISHED.values())]
    return markdown_table(["game", "seeds", *titles], lines)


def aggregate_cell(scores: dict[str, list[float]], name: str) -> str:
    """An aggregate with its interval, which one seed of each game does not have."""
    if not scores:
        return "-"
    middle, low, high = with_interval(scores, name)
    is_whole = min(map(len, scores.values())) > 1 and round(low, 3) < round(high, 3)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if is_whole else f"{middle:.2f}"


def cell(game: str, score: float) -> str:
    return f"{score:,.1f} ({GAMES[game].normalised(score):.2f})"


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    commands = commands_of(args, flags)
    common.refuse_seed([flags])
    settings = common.as_recorded(common.trainer_settings(commands[args.games[0]])) | {"env_id": "eight games"}
    protocol = [PROTOCOL, STICKY if args.sticky else NO_STICKY, THEIRS]
    path, result = begin("games", args, "sticky" if args.sticky else "", {"default": settings}, protocol=protocol)

    def run(game: str, seed: int) -> Result:
        name = f"games-{args.chapter}-{env_id_of(game, args.sticky)}-s{seed}"
        steps = args.steps if args.steps < settings["total_steps"] else math.inf
        folder = common.train([*commands[game], f"--seed={seed}"], args, name, steps)
        summary = common.read_summary(folder)
        names = ("steps", "wall_seconds", "sps", "exit_reason", "weights_sha256")
        played = common.read_games(folder)
        found = {"scores": scores_of(played, min(args.steps, summary["steps"])), "curve": common.curve_of(played)}
        return {name: summary[name] for name in names} | found

    measure(path, result, in_turns(args.games, args.seeds), run, table)
    print("\n".join([*protocol, AGGREGATES]))
    return 0


if __name__ == "__main__":
    exit_with(main)
