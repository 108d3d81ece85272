"""All rows of the results' tables again, by one commit on one kind of machine: one command that goes on any day.

    python bench/campaign.py --list                   the rows, how many of their runs there are, and the hours left
    python bench/campaign.py --rows pong games        rows by their names, or how they begin; without it all of them
    python bench/campaign.py --hours 8                starts no run after eight hours; the same command goes on later

A row is a command of another benchmark. Its file in bench/results, saved after every run, is found by its settings, so
an interruption costs one run. Runs of other code (`--commits` names commits that count) or with other versions of
packages do not count. Rows of a group are compared, so a processor of another kind is refused. Before each run it
waits until other processes leave the processors alone.
"""

from __future__ import annotations

import io
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

import psutil

from a3c_mp.cli import parse_plain
from a3c_mp.config import Between, Positive
from a3c_mp.errors import ConfigError, Stopped
from a3c_mp.run.script import exit_with
from bench import common, games, peers, records, solve
from bench.records import RESULTS, Result

LOOK_SECONDS = 5.0
"""how long it is measured what other processes do"""
ANYWHERE = {"machine": "", "versions": ""}
"""in place of where and with what runs were made: those that do not count are named, too"""
PONG, BREAKOUT = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"
CARTPOLE, LANDER, PENDULUM = "CartPole-v1", "LunarLander-v3", "Pendulum-v1"
MUJOCO = ("HalfCheetah-v5", "Hopper-v5")
MINUTES = {"a3c_grad": 8, "apex_dqn": 17, "impala": 5, "task": 12, "population_ppo": 17, "ray_impala": 6}
"""chapter -> minutes to 18 on Pong"""
OTHERS = ("sb3_a2c", "sb3_ppo", "cleanrl_ppo", "sample_factory", "rl_games", "rllib")


class Row(NamedTuple):
    """A command of a benchmark, whose file makes a row, or a table."""

    group: str  # of rows that are compared
    name: str
    minutes: float  # that a run takes, where none has been measured
    bench: ModuleType
    flags: str


def solved(chapter: str, game: str, seeds: int, minutes: float, flags: str = "") -> Row:
    """A row of the README's table, or of that of docs/results.md."""
    name = f"{game.partition('-')[0].removesuffix('NoFrameskip').lower()}-{chapter}"
    return Row("chapters", name, minutes, solve, f"--chapter={chapter} --env-id={game} --seeds={seeds} {flags}")


ROWS = [
    solved("a3c_data", PONG, 10, 7),
    *(solved(chapter, PONG, 3, minutes) for chapter, minutes in MINUTES.items()),
    *(solved(chapter, CARTPOLE, 5, 0.6) for chapter in common.CHAPTERS if chapter not in ("apex_ddpg", "apex_td3")),
    *(solved(chapter, PENDULUM, 10, 0.8) for chapter in ("a3c_data", "impala", "population_ppo")),
    solved("a3c_data", LANDER, 3, 3, "--total-steps=1_000_000 --reward-scale=0.1"),
    solved("population_ppo", LANDER, 5, 2),
    solved("a3c_data", BREAKOUT, 2, 60),
    *(solved("a3c_data", game, 2, 6, "--play=30") for game in MUJOCO),
    *(solved("apex_td3", game, 2, 50, "--play=30") for game in MUJOCO),
    Row("games", "games-sticky", 10, games, "--sticky --like=Pong --seeds=3"),
    Row("games", "games-sticky-apex_dqn", 17, games,
        "--chapter=apex_dqn --sticky --like=Pong --num-quantiles=32 --seeds=3"),
    Row("games", "games-sticky-apex_dqn-resnet", 25, games,
        "--chapter=apex_dqn --sticky --like=Pong --num-quantiles=32 --net=resnet --seeds=3"),
    Row("games", "games-plain", 10, games, "--seeds=2"),
    Row("peers", "peers-rates", 1.7, peers, f"--seconds=75 --seeds=3 --rows a3c_data {' '.join(OTHERS)}"),
    *(Row("peers", f"peers-{name}", 45, peers, f"--seconds=2700 --seeds=2 --stop-return=18 --rows {name}")
      for name in ("a3c_data", *OTHERS)),
]  # fmt: skip


@dataclass(frozen=True)
class Args:
    rows: tuple[str, ...] = ()
    """rows, by their names or how these begin: "pong", "games", "peers-rllib"; default: all"""
    list: bool = False
    """list the rows and end"""
    hours: Positive | None = None
    """start no run after so many hours"""
    busy_percent: Annotated[float, Between(0, 100)] = 10.0
    """a run waits while other processes use more of the processors than this; recorded with each run"""
    commits: tuple[str, ...] = ()
    """commits whose runs count though the code has changed since"""
    prune: bool = False
    """delete the older files, which git has, of rows that are whole, also of what they measured with other settings"""


class State(NamedTuple):
    """What a row has."""

    path: Path  # its file, which may be yet to be made
    runs: list[Result]
    missing: Sequence[tuple[str, int]]
    replaced: Sequence[str] = ()  # older files of what it measures
    note: str = ""


class BeforeRun(Exception):
    """Ends a benchmark where it is about to start a run."""


def start(row: Row, out: Path | None, before_run: Callable[[Result, Sequence[tuple[str, int]]], Result]) -> None:
    """Run a row's benchmark in this process; it continues the file `out`, or makes one with the time of its start."""
    records.before_run = before_run  # type: ignore[assignment]
    sys.argv = [f"{row.bench.__name__}.py", *shlex.split(row.flags), *([f"--out={out}"] if out else [])]
    row.bench.main()


def planned(row: Row) -> tuple[Result, Sequence[tuple[str, int]]]:
    """What a new file of a row would say, and all its runs. Raises ConfigError if a library is not installed."""

    def stop(result: Result, missing: Sequence[tuple[str, int]]) -> Result:
        raise BeforeRun(json.loads(json.dumps(result, default=str)), missing)

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        try:
            start(row, Path(folder) / "none.json", stop)
        except BeforeRun as found:
            return found.args[0], found.args[1]
    raise AssertionError("a row has runs")


def state_of(row: Row, files: Sequence[Result], commits: Sequence[str]) -> State:
    """What the newest file of a row with today's settings and code has, and what it lacks.

    Raises:
        ConfigError: its runs are of another kind of machine.
    """

    def counts(result: Result) -> bool:
        made_by = {run["commit"] for run in result["runs"]}
        return all(commit.startswith(tuple(commits)) or not records.code_differs(commit) for commit in made_by)

    def key(result: Result) -> list[object]:
        env_id = "" if result["kind"] == "games" else result["env_id"]
        flags = ("sticky", "like", "stop_return")
        net = games.net_of(result) if result["kind"] == "games" else ""  # rows of two nets are compared
        return [result["kind"], result["chapter"], env_id, net, *map(result["bench"].get, flags)]

    try:
        head, plan = planned(row)
    except ConfigError as error:
        return State(Path(), [], (), note=str(error))
    here = head["machine"]["name"]
    identity = records.identity(head)
    same = [each for each in files if records.identity(each) | ANYWHERE == identity | ANYWHERE]
    mine = [each for each in same if counts(each) and records.identity(each)["versions"] == identity["versions"]]
    if others := {each["machine"]["name"] for each in mine} - {here}:
        why = f"it has runs of {' '.join(others)}, and rows of {row.group} are compared"
        raise ConfigError("rows", row.name, why, f"this is {here}; choose rows of another group")
    newest = max(mine, key=lambda each: each["date"], default=head)
    done = {(run["row"], run["seed"]) for run in newest["runs"]}
    older = [each for each in files if key(each) == key(newest) and each["date"] < newest["date"]]
    replaced = [each["file"] for each in older if {run["row"] for run in each["runs"]} <= {name for name, _ in plan}]
    path = RESULTS / newest["file"] if mine else records.default_path(head)
    note = " ".join(sorted({run["commit"][:9] for each in same if each not in mine for run in each["runs"]}))
    missing = [each for each in plan if each not in done]
    return State(path, newest["runs"], missing, replaced, f"runs of other code or versions: {note}" * bool(note))


def is_committed(path: Path) -> bool:
    """Whether a file is as it is in the newest commit."""
    tracked = ["git", "-C", str(path.parent), "ls-files", "--error-unmatch", path.name]
    same = ["git", "-C", str(path.parent), "diff", "--quiet", "HEAD", "--", path.name]
    return all(subprocess.run(command, capture_output=True).returncode == 0 for command in (tracked, same))


def states_of(rows: Sequence[Row], commits: Sequence[str]) -> dict[Row, State]:
    files = [json.loads(path.read_text()) | {"file": path.name} for path in sorted(RESULTS.glob("*.json"))]
    return {row: state_of(row, files, commits) for row in rows}


def table(states: dict[Row, State]) -> str:
    """A line for each row: its runs, the hours that are left, its file."""
    lines, left = [], 0.0
    for row, state in states.items():
        took = [run["wall_seconds"] / 60 for run in state.runs if "wall_seconds" in run] or [row.minutes]
        hours = len(state.missing) * statistics.fmean(took) / 60
        count = f"{len(state.runs)} of {len(state.runs) + len(state.missing)}"
        lines.append([row.name, count, f"{hours:.1f}", state.path.name if state.runs else "", state.note])
        left += hours
    lines.append(["all", "", f"{left:.1f}", "", ""])
    return records.markdown_table(["row", "runs", "hours left", "file", "note"], lines)


def check_clean() -> None:
    """Raise ConfigError if the code differs from its commit."""
    if (records.commit_of() or "+").endswith("+"):
        raise ConfigError("commits", "", "the code differs from its commit, which its runs would name", "commit it")


def ready(until: float, most: float) -> Result:
    """Wait until other processes use little of the processors; how much (%). Raises BeforeRun if it is too late."""
    said = False
    while time.monotonic() < until:
        busy = psutil.cpu_percent(interval=LOOK_SECONDS)
        if busy <= most:
            check_clean()
            return {"others_percent": busy}
        if not said:
            print(f"waiting: other processes use {busy:.0f}% of the processors", flush=True)
        said = True
    raise BeforeRun


def run_rows(states: dict[Row, State], args: Args) -> list[str]:
    """Run what rows lack, one after the other, until it is time to end; what failed."""
    until, failed = math.inf if args.hours is None else time.monotonic() + 3600 * args.hours, []
    for row, state in states.items():
        if not state.runs and not state.missing:
            failed.append(f"{row.name} cannot be run: {state.note}")
        try:
            if state.missing:
                print(f"\n{row.name}: {state.path.name if state.runs else 'a new file'}", flush=True)
                out = state.path if state.runs else None  # two rows may have been planned in the same second
                start(row, out, lambda result, missing: ready(until, args.busy_percent))
        except BeforeRun:
            break
        except (ConfigError, SystemExit) as error:  # a trainer that fails has said why
            if isinstance(error, Stopped):
                raise
            failed.append(f"{row.name} failed: {error}")
    return failed


def main() -> int:
    args = parse_plain(Args, __doc__)
    names = {row.name for row in ROWS}.intersection(args.rows)
    begins = tuple(name for name in args.rows if name not in names)
    chosen = [row for row in ROWS if not args.rows or row.name in names or row.name.startswith(begins)]
    if not chosen:
        raise ConfigError("rows", " ".join(args.rows), "no such row", f"one of: {' '.join(row.name for row in ROWS)}")
    groups, failed = {row.group for row in chosen}, []
    states = states_of([row for row in ROWS if row.group in groups], args.commits)
    for row in () if args.list else chosen:
        others = [other for other in states if other.group == row.group and states[other].path == Path()]
        if others and states[row].missing:
            why = f"it is compared with {others[0].name}, whose machine is not known here ({states[others[0]].note})"
            raise ConfigError("rows", row.name, why, "install that first")
    states = {row: states[row] for row in chosen}
    print(table(states), flush=True)
    if not args.list:
        check_clean()
        failed = run_rows(states, args)
        states = states_of(chosen, args.commits)
        print("\n".join([table(states), *failed]))
    if args.prune and not args.list:
        whole = [state for state in states.values() if state.runs and not state.missing]
        for name in sorted({name for state in whole for name in state.replaced}):
            if not is_committed(RESULTS / name):
                continue
            (RESULTS / name).unlink()
            pages = [page.name for page in (common.ROOT / "docs").rglob("*.md") if name in page.read_text()]
            print(f"deleted {name}", *(f"named in {page}" for page in pages))
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
