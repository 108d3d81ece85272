"""Other libraries beside chapters 1 and 4 on the same cores: steady steps a second, and minutes until a task is solved.

    python bench/peers.py --install                          a virtual environment for each, as bench/peers/*.txt say
    python bench/peers.py --repeat 3 --seconds 120           rates; the peers take turns
    python bench/peers.py --solve --peers ours rl_games      minutes and steps to 18, two seeds each
    python bench/peers.py --solve --env-id Pendulum-v1 --stop-return -200 --seeds 3 --peers ours ours_impala sb3_ppo

Each peer runs with the settings that its own project recommends (bench/peers/run_*.py), with as many
threads or workers as there are cores. Updates per step, nets and batch sizes differ, so rates alone decide nothing.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_plain
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import read_episodes
from a3c_mp.run.script import exit_with
from bench import common
from bench.solve import curve, train
from bench.throughput import steady_sps, trainer_sps

FOLDER = common.ROOT / "bench" / "peers"
START_SECONDS = 120.0
"""how much longer than its time a peer may take to import, start and end (s)"""
Point = tuple[float, int, float | None]


class Peer(NamedTuple):
    """A library: what is installed for it, and how its script is called."""

    environment: str  # bench/peers/<environment>.txt, and the folder of its virtual environment
    script: str
    flags: tuple[str, ...] = ()


PEERS = {
    "sb3_a2c": Peer("sb3", "run_sb3.py", ("--algo", "a2c")),
    "sb3_ppo": Peer("sb3", "run_sb3.py", ("--algo", "ppo")),
    "sample_factory": Peer("sample_factory", "run_sample_factory.py"),
    "rl_games": Peer("rl_games", "run_rl_games.py"),
    "rllib": Peer("rllib", "run_rllib.py"),
}
CONTINUOUS = ("Pendulum-v1", "MountainCarContinuous-v0")
"""environments besides Atari, with settings in run_sb3.py"""
WITHOUT_LIVES = ("PongNoFrameskip-v4", "BoxingNoFrameskip-v4", "FreewayNoFrameskip-v4")
"""games in which rl_games and RLlib, whose environments end with a life, report returns of whole games"""
OURS: dict[str, common.ChapterName] = {"ours": "a3c_data", "ours_impala": "impala"}
"""chapters 1 and 4, with their presets"""


@dataclass(frozen=True)
class Args:
    chapter: ClassVar[str] = "peers"
    peers: tuple[str, ...] = ("ours", *PEERS)
    """which libraries; "ours" is chapter 1, "ours_impala" chapter 4"""
    environments: Path = Path("peers")
    """folder of the peers' virtual environments"""
    install: bool = False
    """make the virtual environments that are missing, and end"""
    env_id: str = "PongNoFrameskip-v4"
    """Atari id with frame skip 1; chapters and SB3 also take Pendulum-v1 and MountainCarContinuous-v0"""
    seconds: Annotated[float, Between(1)] = 120.0
    """how long each runs, starting up included; the second half of its curve counts (s)"""
    repeat: Count = 3
    """repetitions, in which the peers take turns"""
    solve: bool = False
    """train until the stop return instead"""
    stop_return: float = 18.0
    """with --solve: mean raw return of the last 100 games"""
    seeds: Count = 2
    """with --solve: how many seeds"""
    first_seed: Count = 1
    """with --solve: the first of them"""
    max_minutes: Annotated[float, Between(0.1)] = 45.0
    """with --solve: the longest that a run may take"""
    results: Path = common.RESULTS
    """folder of the result file"""


def python_of(peer: Peer, environments: Path) -> Path:
    return (environments / peer.environment / "bin" / "python").absolute()


def install(names: Sequence[str], environments: Path) -> int:
    """Make the environments that are missing; the exit code of the first that fails."""
    for name in dict.fromkeys(PEERS[name].environment for name in names if name not in OURS):
        folder, pins = environments / name, FOLDER / f"{name}.txt"
        commands = [[folder / "bin" / "pip", "install", "--quiet", "--requirement", pins]]
        if not folder.exists():
            commands.insert(0, [sys.executable, "-m", "venv", folder])
        for command in commands:
            if code := subprocess.run([str(word) for word in command]).returncode:
                print(f"error: {name} cannot be installed; the others were not tried", file=sys.stderr)
                return code
        print(f"{name}: {folder}", flush=True)
    return 0


def versions_of(peer: Peer, environments: Path) -> dict[str, str]:
    """The versions that are installed of what its requirements name."""
    listed = subprocess.run(
        [python_of(peer, environments), "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    pinned = (FOLDER / f"{peer.environment}.txt").read_text()
    names = {package_name(line) for line in pinned.splitlines()}
    return dict(line.split("==") for line in listed.splitlines() if package_name(line) in names)


def package_name(line: str) -> str:
    """The name in a line `name==version`, in the one spelling that packaging tools compare (PEP 503)."""
    return re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()


def points_of(peer: Peer, args: Args, flags: Sequence[str], seconds: float) -> list[Point]:
    """Run a peer's script and read its points, also if it has to be killed. Ends this script if there are none."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # set to 1 by a3c_mp
    command = [str(python_of(peer, args.environments)), str(FOLDER / peer.script), *peer.flags, *flags]
    with tempfile.TemporaryDirectory() as folder:  # some write logs where they are started
        command += ["--env-id", args.env_id, "--seconds", str(seconds)]
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=seconds + START_SECONDS)
        except subprocess.TimeoutExpired as late:
            printed = (late.stdout or b"").decode()
            print(f"warning: {peer.script} did not end by itself {START_SECONDS:g} s after its time", file=sys.stderr)
            code = 0  # its points are as good
        else:
            code = process.returncode
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that it left
    points = common.read_points(printed)
    if code != 0 or not points:
        print(f"error: {peer.script} ended with code {code}; start it alone to see why", file=sys.stderr)
        sys.exit(1)
    return points


def rate_of(name: str, args: Args, seed: int) -> float:
    """Steady agent steps a second."""
    if name in OURS:
        return trainer_sps([*common.CHAPTERS[OURS[name]], "--env-id", args.env_id, f"--seed={seed}"], args.seconds)
    return steady_sps([point[:2] for point in points_of(PEERS[name], args, ["--seed", str(seed)], args.seconds)])


def solved_by(name: str, args: Args, seed: int) -> dict[str, Any]:
    """Minutes and steps until the stop return, and the curve up to there."""
    seconds, points = 60 * args.max_minutes, list[Point]()
    if name in OURS:
        with tempfile.TemporaryDirectory() as folder:
            goal = [f"--stop-return={args.stop_return}", f"--max-seconds={seconds}", f"--seed={seed}"]
            place = [f"--runs-dir={folder}", "--run-name=run"]
            command = [*common.CHAPTERS[OURS[name]], f"--env-id={args.env_id}", *goal, *place]
            if (code := train(command, Path(folder) / "run")) != 0:
                raise SystemExit(f"{name}: exit code {code}")
            points = [
                (s, steps, mean) for steps, s, mean in curve(read_episodes(Path(folder) / "run" / "episodes.csv"))
            ]
    else:
        flags = ["--seed", str(seed), "--stop-return", str(args.stop_return)]
        points = points_of(PEERS[name], args, flags, seconds)
    reached = [point for point in points if point[2] is not None and point[2] >= args.stop_return][:1]
    when = (
        {"minutes": round(reached[0][0] / 60, 2), "steps": reached[0][1]}
        if reached
        else {"minutes": None, "steps": None}
    )
    return {"seed": seed, "solved": bool(reached), **when, "last": points[-1], "curve": points}


def table_of_rates(rates: dict[str, list[float]]) -> str:
    first = statistics.median(next(iter(rates.values())))
    lines = []
    for name, each in rates.items():
        middle = statistics.median(each)
        lines.append([name, f"{middle:,.0f}", f"{middle / first:.2f}", ", ".join(f"{rate:,.0f}" for rate in each)])
    return common.markdown_table(["library", "steps a second", "relative", "repetitions"], lines)


def table_of_runs(runs: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for name, each in runs.items():
        for run in each:
            found = [f"{run['minutes']:.1f}", f"{run['steps']:,}"] if run["solved"] else ["not reached", "-"]
            seconds, steps, mean = run["last"]
            end = f"{'-' if mean is None else f'{mean:.1f}'} after {seconds / 60:.1f} min, {steps:,} steps"
            lines.append([name, str(run["seed"]), *found, end])
    return common.markdown_table(["library", "seed", "minutes", "steps", "end of the run"], lines)


def main() -> int:
    args = parse_plain(Args, __doc__ or "")
    known = (*OURS, *PEERS)
    if unknown := [name for name in args.peers if name not in known]:
        raise ConfigError("peers", unknown[0], "no such library here", f"choose from {', '.join(known)}")
    if args.install:
        return install(args.peers, args.environments)
    versatile = (*OURS, "sb3_a2c", "sb3_ppo")
    peers = {name: PEERS[name] for name in args.peers if name not in OURS}
    if "NoFrameskip" not in args.env_id and args.env_id not in CONTINUOUS and peers:
        fix = f"choose an id with NoFrameskip, {' or '.join(CONTINUOUS)}"
        raise ConfigError("env-id", args.env_id, "the other libraries have no settings for it", fix)
    if args.env_id in CONTINUOUS and (others := set(args.peers) - set(versatile)):
        raise ConfigError("peers", min(others), "it is run on Atari only", f"choose from {', '.join(versatile)}")
    if args.solve and (by_life := {"rl_games", "rllib"} & set(args.peers)) and args.env_id not in WITHOUT_LIVES:
        why = "in games with lives, what it reports as a return is that of one life"
        raise ConfigError("peers", min(by_life), why, f"leave it out, or choose {', '.join(WITHOUT_LIVES)}")
    for name, peer in peers.items():
        if not python_of(peer, args.environments).exists():
            raise ConfigError("peers", name, f"it is not installed in {args.environments}", "run with --install first")
    result = common.begin("peers", args, args.env_id)
    result["peer_versions"] = {name: versions_of(peer, args.environments) for name, peer in peers.items()}
    found: dict[str, list[Any]] = {name: [] for name in args.peers}
    result["runs" if args.solve else "rates"] = found
    path = common.result_path(args.results, result, with_env=True)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for number in seeds if args.solve else range(1, args.repeat + 1):
        for name in args.peers:
            found[name].append((solved_by if args.solve else rate_of)(name, args, number))
            common.save(path, result)
            done = {name: each for name, each in found.items() if each}
            print(f"{name} {number}\n{(table_of_runs if args.solve else table_of_rates)(done)}", flush=True)
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
