"""Other libraries beside the chapters on the same cores: steady steps a second, and minutes until a task is solved.

    python bench/peers.py --install                          a virtual environment for each, as bench/peers/*.txt say
    python bench/peers.py --seconds 120                      rates; the rows take turns
    python bench/peers.py --stop-return 18 --seconds 2700 --rows a3c_data rl_games      minutes and steps to 18
    python bench/peers.py --env-id Pendulum-v1 --stop-return -200 --seconds 600 --rows a3c_data impala sb3_ppo
    python bench/peers.py --env-id LunarLander-v3 --stop-return 200 --seconds 900 --rows population agilerl

Each library runs with the settings that its own project recommends (bench/peers/run_*.py), with as many threads or
workers as there are cores. Updates per step, nets and batch sizes differ, so rates alone decide nothing.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_plain
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with
from bench import common
from bench.records import Result, begin, in_turns, markdown_table, measure

FOLDER = common.ROOT / "bench" / "peers"
START_SECONDS = 120.0
"""how much longer than its time a library may take to import, start and end (s)"""
Point = tuple[float, int, float | None]
"""seconds, agent steps, mean return of the last 100 games"""


class Peer(NamedTuple):
    """A library: what is installed for it, and how its script is called."""

    environment: str  # bench/peers/<environment>.txt, and the folder of its virtual environment
    flags: tuple[str, ...] = ()


PEERS = {
    "sb3_a2c": Peer("sb3", ("--algo", "a2c")),
    "sb3_ppo": Peer("sb3", ("--algo", "ppo")),
    "sb3_td3": Peer("sb3", ("--algo", "td3")),
    "cleanrl_ppo": Peer("sb3", ("--algo", "ppo", "--cleanrl")),
    "sample_factory": Peer("sample_factory"),
    "rl_games": Peer("rl_games"),
    "rllib": Peer("rllib"),
    "agilerl": Peer("agilerl"),
}
CONTINUOUS = {
    **dict.fromkeys(("Pendulum-v1", "MountainCarContinuous-v0"), ("sb3_a2c", "sb3_ppo")),
    **dict.fromkeys(("HalfCheetah-v5", "Hopper-v5"), ("sb3_ppo", "sb3_td3")),
}
"""environments besides Atari -> rows with settings in run_sb3.py"""
EVOLUTION = "LunarLander-v3"
"""that of run_agilerl.py, where the mean return is that of 100 new games, of chapter 6, too"""
WITHOUT_LIVES = ("PongNoFrameskip-v4", "BoxingNoFrameskip-v4", "FreewayNoFrameskip-v4")
"""games in which rl_games and RLlib, whose environments end with a life, report returns of whole games"""


@dataclass(frozen=True)
class Args:
    chapter: ClassVar[str] = "peers"
    rows: tuple[str, ...] = ("a3c_data", "sb3_a2c", "sb3_ppo", "sample_factory", "rl_games", "rllib")
    """libraries and chapters; a chapter may have flags after its name, without dashes"""
    env_id: str = "PongNoFrameskip-v4"
    """Atari id with frame skip 1; SB3: also some with continuous actions; AgileRL: LunarLander-v3 alone"""
    seconds: Annotated[float, Between(1)] = 120.0
    """how long each runs at most, chapters from the first rollout, others from after their imports; its rate is that of
    the second half (s)"""
    stop_return: float | None = None
    """end a run where the mean raw return of the last 100 games is this; of a population, of the fittest's new games"""
    seeds: Count = 3
    """how many runs of each row, with seeds 1, 2, ..."""
    environments: Path = Path("peers")
    """folder of the libraries' virtual environments"""
    install: bool = False
    """make the virtual environments that are missing, and end"""
    runs_dir: Path = Path("runs")
    """where run folders of chapters are made"""
    out: Path | None = None
    """result file; an existing one is continued with the runs that it lacks; default: a new one in bench/results"""


def python_of(peer: Peer, environments: Path) -> Path:
    return (environments / peer.environment / "bin" / "python").absolute()


def install(peers: Sequence[Peer], environments: Path) -> int:
    """Make the environments that are missing; the exit code of the first that fails."""
    for name in dict.fromkeys(peer.environment for peer in peers):
        folder, pins = environments / name, FOLDER / f"{name}.txt"
        commands = [[str(folder / "bin" / "pip"), "install", "--quiet", "--requirement", str(pins)]]
        if not Path(commands[0][0]).exists():
            commands.insert(0, [sys.executable, "-m", "venv", str(folder)])
        for command in commands:
            if code := subprocess.run(command).returncode:
                print(f"error: {name} cannot be installed; the others were not tried", file=sys.stderr)
                return code
        print(f"{name}: {folder}", flush=True)
    return 0


def versions_of(peer: Peer, environments: Path) -> dict[str, str]:
    """The versions that are installed of what its requirements name."""
    pins = str(FOLDER / f"{peer.environment}.txt")
    freeze = [str(python_of(peer, environments)), "-m", "pip", "freeze", "--requirement", pins]
    listed = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    named, _, _ = listed.partition("## The following requirements were added")
    return dict(line.split("==") for line in named.splitlines() if "==" in line)


def points_of_peer(peer: Peer, args: Args, seed: int) -> list[Point]:
    """Run a library's script and read its points, also if it has to be killed. Ends this script if there are none."""
    script = FOLDER / f"run_{peer.environment}.py"
    flags = {"env-id": args.env_id, "seconds": args.seconds, "stop-return": args.stop_return, "seed": seed}
    command = [str(python_of(peer, args.environments)), str(script), *peer.flags]
    command += [f"--{name}={value}" for name, value in flags.items() if value is not None]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # set to 1 by a3c_mp
    code = 0
    with tempfile.TemporaryDirectory() as folder:  # some write logs where they are started
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=args.seconds + START_SECONDS)
            code = process.returncode
        except subprocess.TimeoutExpired as late:
            printed = (late.stdout or b"").decode()  # its points are as good
            print(f"warning: {script.name} did not end by itself {START_SECONDS:g} s after its time", file=sys.stderr)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that it left
    points = read_points(printed)
    if code != 0 or not points:
        raise SystemExit(f"error: {script.name} ended with code {code}; start it alone to see why")
    return points


def read_points(text: str) -> list[Point]:
    """The points that a script in bench/peers has printed; other lines are left out."""
    points = []
    for line in text.splitlines():
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, list) and len(found) == 3:
                points.append((float(found[0]), int(found[1]), found[2]))
    return points


def points_of_chapter(command: Sequence[str], args: Args, seed: int) -> list[Point]:
    """Run a chapter and read its points."""
    folder = common.train([*command, f"--seed={seed}"], args, f"peers-{args.env_id}-s{seed}")
    is_population = (folder / "lineage.csv").exists()  # its members explore
    means = common.scalars(folder, "eval/confirmed_mean" if is_population else "charts/mean_return_100")
    mean_at = {point.step: point.value for point in means}
    games, points = common.read_games(folder), common.scalars(folder, "time/elapsed_seconds")
    if not is_population:  # the mean of fewer games counts in no library
        first = games[common.MIN_GAMES - 1].steps if len(games) >= common.MIN_GAMES else math.inf
        mean_at = {step: mean for step, mean in mean_at.items() if step >= first}
    summary = common.read_summary(folder)
    found = [(point.value, point.step, mean_at.get(point.step)) for point in points if point.step < summary["steps"]]
    mean = summary["mean_return_100"] if len(games) >= common.MIN_GAMES else None
    mean = mean_at.get(summary["steps"]) if is_population else mean
    seconds = points[-1].value if is_population and points else summary["wall_seconds"]
    return [*found, (seconds, summary["steps"], mean)]


def figures(points: Sequence[Point], goal: float | None) -> Result:
    """Steady rate, time and steps to the goal, and the curve."""
    reached = (point for point in points if None not in (goal, point[2]) and point[2] >= goal)  # type: ignore[operator]
    seconds, steps, _ = next(reached, (None, None, None))
    found = {"sps": steady_sps(points), "solved": seconds is not None, "seconds": seconds, "steps": steps}
    return found | {"last": points[-1], "curve": common.thinned(points, common.POINTS)}


def steady_sps(points: Sequence[Point]) -> float | None:
    """Steps a second in the second half of a run's time; the first half is for starting up."""
    middle = (points[0][0] + points[-1][0]) / 2
    late = [point for point in points if point[0] >= middle]
    (start, steps, _), (end, more_steps, _) = late[0], late[-1]
    return (more_steps - steps) / (end - start) if end > start else None


def rates_of(runs: Sequence[Result]) -> dict[str, list[float]]:
    """Row -> steps a second of its runs, lowest first, as far as they are known; rows without any are left out."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        if run["sps"] is not None:
            rates.setdefault(run["row"], []).append(run["sps"])
    return {row: sorted(found) for row, found in rates.items()}


def table(result: Result) -> str:
    """A line for each row: its rate, relative to the first row's, then what each run came to."""
    rates = rates_of(result["runs"])
    middles = {row: statistics.median(found) for row, found in rates.items()}
    first, lines = middles.get(result["runs"][0]["row"]), []
    for run in result["runs"]:
        middle = middles.get(run["row"])
        relative = f"{middle / first:.2f}" if middle is not None and first else "-"
        goal = [f"{run['seconds'] / 60:.1f}", f"{run['steps']:,}"] if run["solved"] else ["not reached", "-"]
        seconds, steps, mean = run["last"]
        end = f"{'-' if mean is None else f'{mean:.1f}'} after {seconds / 60:.1f} min, {steps:,} steps"
        rate = "-" if run["sps"] is None else f"{run['sps']:,.0f}"
        shown = "-" if middle is None else f"{middle:,.0f}"
        lines.append([run["row"], str(run["seed"]), rate, shown, relative, *goal, end])
    titles = ["seed", "steps/s", "median", "relative", "minutes", "steps", "end of the run"]
    return markdown_table(["row", *titles], sorted(lines))


def check(args: Args, peers: dict[str, Peer]) -> None:
    """Raise ConfigError where a library cannot run, or would report something else."""
    if "NoFrameskip" not in args.env_id and args.env_id not in (*CONTINUOUS, EVOLUTION) and peers:
        fix = f"choose an id with NoFrameskip, {', '.join(CONTINUOUS)} or {EVOLUTION}"
        raise ConfigError("env-id", args.env_id, "the other libraries have no settings for it", fix)
    for name, peer in peers.items():
        if (peer.environment == "agilerl") != (args.env_id == EVOLUTION):
            raise ConfigError("rows", name, f"it has no settings for {args.env_id}", f"{EVOLUTION} is AgileRL's alone")
        if args.env_id not in (*CONTINUOUS, EVOLUTION) and name == "sb3_td3":
            own = [env_id for env_id, rows in CONTINUOUS.items() if name in rows]
            raise ConfigError("rows", name, "its actions are continuous", f"choose --env-id {' or '.join(own)}")
        if name not in (rows := CONTINUOUS.get(args.env_id, (name,))):
            why = f"it has no settings for {args.env_id}"
            raise ConfigError("rows", name, why, f"of the other libraries choose {' or '.join(rows)}")
        by_life = peer.environment in ("rl_games", "rllib") and args.env_id not in WITHOUT_LIVES
        if by_life and args.stop_return is not None:
            why = "in games with lives, what it reports as a return is that of one life"
            raise ConfigError("rows", name, why, f"leave it out, or choose {', '.join(WITHOUT_LIVES)}")
        if not python_of(peer, args.environments).exists():
            raise ConfigError("rows", name, f"it is not installed in {args.environments}", "run with --install first")


def main() -> int:
    args = parse_plain(Args, __doc__)
    peers = {row: PEERS[row] for row in args.rows if row in PEERS}
    if args.install:
        return install(list(peers.values()), args.environments)
    check(args, peers)
    flags = [f"--env-id={args.env_id}", f"--max-seconds={args.seconds}", f"--stop-return={args.stop_return}"]
    commands = {}
    for row in args.rows:
        name, own = common.split_row(row, common.CHAPTERS)
        if row not in PEERS:
            if not name:
                raise ConfigError("rows", row, "no such library here", f"choose from {', '.join(PEERS)}, or a chapter")
            commands[row] = [*common.CHAPTERS[name], *flags, *own]
    common.refuse_seed(commands.values())
    settings = common.settings_of(commands) | {row: {"flags": peer.flags} for row, peer in peers.items()}
    versions = {name: versions_of(peer, args.environments) for name, peer in peers.items()}
    path, result = begin("peers", args, args.env_id, settings, peer_versions=versions)

    def run(row: str, seed: int) -> Result:
        if row in peers:
            return figures(points_of_peer(peers[row], args, seed), args.stop_return)
        return figures(points_of_chapter(commands[row], args, seed), args.stop_return)

    measure(path, result, in_turns(args.rows, args.seeds), run, table)
    return 0


if __name__ == "__main__":
    exit_with(main)
