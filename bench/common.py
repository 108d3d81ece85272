"""What the benchmarks share: flags, rows of settings, the trainers that they start, and what run folders hold."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from a3c_mp.chapter import Chapter
from a3c_mp.cli import parse_algo, parse_args
from a3c_mp.errors import ConfigError
from a3c_mp.processes.spawn import PARENT_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("runs_dir", "run_name", "resume", "out", "trees", "environments")
"""settings that name folders and files of one machine; no figure depends on them"""
WINDOW, MIN_GAMES = 100, 20
"""games in a mean return, and the fewest that there must be"""
POINTS = 200
"""points of a saved curve"""

ChapterName = Literal[
    "a3c_data",
    "a3c_grad",
    "impala",
    "apex_dqn",
    "apex_ddpg",
    "apex_td3",
    "task",
    "population",
    "population_ppo",
    "ray_impala",
    "ray_dqn",
]
CHAPTERS: dict[str, list[str]] = {
    "a3c_data": ["train_a3c_data.py"],
    "a3c_grad": ["train_a3c_grad.py"],
    "impala": ["train_impala.py"],
    "apex_dqn": ["train_apex.py", "--algo", "dqn"],
    "apex_ddpg": ["train_apex.py", "--algo", "ddpg", "--env-id", "Pendulum-v1"],
    "apex_td3": ["train_apex.py", "--algo", "td3", "--env-id", "Pendulum-v1"],
    "task": ["train_task.py"],
    "population": ["train_population.py"],
    "population_ppo": ["train_population.py", "--algo", "ppo"],
    "ray_impala": ["train_ray.py", "--algo", "impala"],
    "ray_dqn": ["train_ray.py", "--algo", "dqn"],
}
"""name of a chapter -> its script and the flags that choose it"""


@dataclass(frozen=True)
class Args:
    """Flags of every benchmark that trains; each adds its own. All others are the trainer's."""

    chapter: ChapterName = "a3c_data"
    """what to train"""
    runs_dir: Path = Path("runs")
    """where run folders are made"""
    out: Path | None = None
    """result file; an existing one is continued with the runs that it lacks; default: a new one in bench/results"""


@dataclass(frozen=True)
class RowArgs(Args):
    """Flags of benchmarks that compare settings."""

    rows: tuple[str, ...] = ("default",)
    """what to compare: flags without dashes, separated by spaces, after the name of a chapter if it is another one"""


# ---- rows, commands, settings


def commands_of(args: RowArgs, flags: Sequence[str]) -> dict[str, list[str]]:
    """The trainer's command line for each row. Raises ConfigError if a row occurs twice or is malformed."""
    if len(set(args.rows)) < len(args.rows):
        raise ConfigError("rows", args.rows, "a row occurs twice", "name each once")
    found = {}
    for row in args.rows:
        name, own = split_row(row, CHAPTERS)
        found[row] = [*CHAPTERS[name or args.chapter], *flags, *own]
    return found


def split_row(row: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """`task lr=1 no-clip` -> ("task", ["--lr=1", "--no-clip"]); the name is "" if the row does not begin with one.

    Raises:
        ConfigError: a word is neither name=value nor a switch.
    """
    name, *words = row.split() or ["default"]
    if name not in names:
        name, words = "", [name, *words]
    for word in words:
        if not re.fullmatch(r"[a-z][\w-]*(=\S+)?", word):
            fix = 'write "entropy-coef=0.02 no-normalize-obs"'
            raise ConfigError("rows", word, "a row is made of flags without their dashes", fix)
    return name, [f"--{word}" for word in words if word != "default"]


def refuse_seed(commands: Iterable[Sequence[str]]) -> None:
    """Raise ConfigError if a command line names a seed or a run, which the benchmark gives each of its runs itself."""
    found = {word.partition("=")[0].replace("_", "-") for command in commands for word in command}
    for flag in sorted(found & {"--seed", "--run-name"}):
        raise ConfigError(flag[2:], "", "each run gets one of its own here", "leave it out")


def trainer_settings(command: Sequence[str]) -> Any:
    """The settings that a chapter's script would run with. Raises ConfigError for bad flags."""
    chapter = importlib.import_module(Path(command[0]).stem)
    if command[0] in ("train_ray.py", "train_population.py"):
        return parse_algo(chapter.ALGORITHMS, "", command[1:])[0]
    presets = chapter.main.presets if isinstance(chapter.main, Chapter) else chapter.PRESETS
    return parse_args(chapter.Args, presets, "", command[1:])


def as_recorded(settings: Any) -> dict[str, Any]:
    """Settings as files hold them: with lists and strings, without folders."""
    found = json.loads(json.dumps(asdict(settings), default=str))
    return {name: value for name, value in found.items() if name not in PLACES}


def settings_of(commands: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Row -> settings of its command. Raises ConfigError if two rows have different environments."""
    found = {row: as_recorded(trainer_settings(command)) for row, command in commands.items()}
    env_ids = sorted({settings["env_id"] for settings in found.values()})
    if len(env_ids) > 1:
        raise ConfigError("rows", " ".join(env_ids), "rows have different environments", "add --env-id")
    return found


def flag_of(name: str, value: Any) -> list[str]:
    """A setting as words of a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *map(str, value)] if isinstance(value, list) else [f"--{flag}={value}"]


# ---- processes


@contextmanager
def running_script(command: Sequence[str], **popen: Any) -> Iterator[subprocess.Popen]:
    """A Python script of this repository while it runs; what is left of it at the end of the block is terminated."""
    script, *flags = command
    env = {**os.environ, PARENT_VARIABLE: f"{os.getpid()} {int(signal.SIGTERM)}"}  # it ends also where this is killed
    process = subprocess.Popen([sys.executable, str(ROOT / script), *flags], env=env, **popen)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # a trainer writes its checkpoint and summary, then ends
            process.wait()


def check_rows(rows: Sequence[str], known: Collection[str]) -> None:
    """Raise ConfigError for a row that there is not."""
    if unknown := [row for row in rows if row not in known]:
        raise ConfigError("rows", unknown[0], f"must be one of {', '.join(map(repr, known))}")


def train(command: Sequence[str], args: Any, name: str, steps: float = math.inf) -> Path:
    """Run a trainer until it ends or has taken `steps` (agent steps); returns its run folder.

    Raises:
        SystemExit: it failed; it has printed why.
    """
    folder = run_folder(args, name)
    place = [f"--runs-dir={folder.parent}", f"--run-name={folder.name}"]
    with running_script([*command, *place]) as process:
        while process.poll() is None and (steps == math.inf or steps_taken(folder) < steps):
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        code = process.poll()
    if code:
        raise SystemExit(code)
    return folder


def run_folder(args: Any, name: str) -> Path:
    """A run folder for a benchmark's run that starts now."""
    return args.runs_dir / "-".join([*re.findall(r"[\w.=-]+", name), time.strftime("%Y%m%d-%H%M%S")])


class Game(NamedTuple):
    """A line of `episodes.csv`."""

    steps: int  # agent steps of the run when the game was counted
    seconds: float  # of the run
    episode_return: float  # raw, whole game


def read_games(folder: Path) -> list[Game]:
    """The games of a run, without a last line that is still being written."""
    path = folder / "episodes.csv"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        Game(int(row["steps"]), float(row["seconds"]), float(row["episode_return"])) for row in csv.DictReader(lines)
    ]


def steps_taken(folder: Path) -> int:
    """Agent steps when the last game of a run ended, 0 before the first."""
    games = read_games(folder)
    return games[-1].steps if games else 0


def read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def mean_return(games: Sequence[Game], steps: float = math.inf, least: int = 1) -> float | None:
    """Mean return of the last 100 games that ended up to so many agent steps; None if they are fewer than `least`."""
    returns = [game.episode_return for game in games if game.steps <= steps][-WINDOW:]
    return round(statistics.fmean(returns), 3) if len(returns) >= least else None


def curve_of(games: Sequence[Game], points: int = POINTS) -> list[tuple[int, float, float]]:
    """(steps, seconds, mean return of the last 100 games) at `points` games spread evenly, the last one included."""
    ends = thinned(range(MIN_GAMES, len(games) + 1), points)
    means = (statistics.fmean(game.episode_return for game in games[max(end - WINDOW, 0) : end]) for end in ends)
    return [
        (games[end - 1].steps, games[end - 1].seconds, round(mean, 3)) for end, mean in zip(ends, means, strict=True)
    ]


def thinned(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items, spread evenly, the first and the last included."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def scalars(folder: Path, name: str) -> list[Any]:
    """A curve in a run's TensorBoard events: points with wall_time, step (agent steps) and value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return events.Scalars(name) if name in events.Tags()["scalars"] else []
