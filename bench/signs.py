"""Which runs are said not to learn: some that learn, some that cannot, and these with what their warning advises.

    python bench/signs.py --rows "1 CartPole" "rewards x 1e6" --out runs/signs.json

Without `--rows`, all of `ROWS`; the file is written after every run, and the same command with `--out` goes on.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_own
from a3c_mp.run.script import exit_with
from a3c_mp.run.signs import SIGNS
from bench import common
from bench.records import Result, begin, markdown_table, measure


class Row(NamedTuple):
    """A run, and which signs its log names."""

    chapter: str
    flags: str
    expected: tuple[str, ...] = ()  # one of them at least; none for a run that learns
    cure: str = ""  # what its warning advises
    learned: float | None = None  # mean return that says that a cured run learns
    is_cured: bool = False


CARTPOLE, PENDULUM = "env-id=CartPole-v1", "env-id=Pendulum-v1"
FAULTY, RATE = "env-id=bench.hopeless:", "learning-rate=1e-3"
SCALED = f"{FAULTY}Scaled-v0?factor=1e6"
STEPS = 200_000
"""of a run whose flags do not say so (agent steps)"""
ROWS = {
    "1 CartPole": Row("a3c_data", CARTPOLE),
    "2 CartPole": Row("a3c_grad", CARTPOLE),
    "3 CartPole": Row("apex_dqn", f"{CARTPOLE} total-steps=60000"),
    "4 CartPole": Row("impala", CARTPOLE),
    "5 CartPole": Row("task", CARTPOLE),
    "7 CartPole": Row("ray_dqn", f"{CARTPOLE} total-steps=60000"),
    "1 Pendulum": Row("a3c_data", f"{PENDULUM} total-steps=300000"),
    "3 Pendulum": Row("apex_ddpg", f"{PENDULUM} total-steps=25000"),
    "1 LunarLander": Row("a3c_data", "env-id=LunarLander-v3 total-steps=300000"),
    "1 MountainCarContinuous": Row("a3c_data", "env-id=MountainCarContinuous-v0"),
    "1 MountainCar": Row("a3c_data", "env-id=MountainCar-v0"),
    "1 Acrobot": Row("a3c_data", "env-id=Acrobot-v1"),
    "1 Pong, short": Row("a3c_data", "env-id=PongNoFrameskip-v4"),
    "rewards x 1e6": Row("a3c_data", f"{SCALED} reward-scale=1", ("gradients",), "reward-scale=none", 150e6),
    "learning rate 1": Row("a3c_data", f"{CARTPOLE} learning-rate=1", ("deterministic", "gradients"), RATE, 150),
    "learning rate 1e-9": Row("a3c_data", f"{CARTPOLE} learning-rate=1e-9", ("random",), RATE, 150),
    "learning rate 0.1, DDPG": Row(
        "apex_ddpg",
        f"{PENDULUM} total-steps=25000 policy-learning-rate=0.1",
        ("bounds",),
        "policy-learning-rate=1e-3",
        -600,
    ),
    "entropy bonus x 10,000": Row("a3c_data", f"{CARTPOLE} entropy-coef=100", ("random",), "entropy-coef=0.01", 150),
    "entropy bonus, continuous": Row("a3c_data", f"{PENDULUM} entropy-coef=1", ("bounds",), "entropy-coef=0", -600),
    "gamma 0": Row("a3c_data", f"{CARTPOLE} gamma=0", ("values",), "gamma=0.99", 150),
    "rewards out of reach": Row(
        "a3c_data", f"{FAULTY}Corridor-v0", ("same_return",), "explore-envs=0.25 explore-steps=50", 0.5
    ),
    "the same observation": Row("a3c_data", f"{FAULTY}Blind-v0", ("values",)),
    "no end": Row("a3c_data", f"{FAULTY}Endless-v0", ("no_game",)),
    "rewards by chance": Row("a3c_data", f"{FAULTY}Luck-v0", ("still",)),
}
"""name -> run"""


@dataclass(frozen=True)
class Args(common.Args):
    rows: tuple[str, ...] = tuple(ROWS)
    """names of `ROWS`"""
    max_seconds: float = 300.0
    """longest run (s)"""


def signs_of(folder: Path) -> list[str]:
    """Names of the signs that a run's log warns of."""
    path = folder / "run.log"
    advices = re.findall(r"WARNING (.*) \(docs/learning.md\)", path.read_text()) if path.exists() else []
    return [name for name, sign in SIGNS.items() if any(line.endswith(f": {sign.advice}") for line in advices)]


def outcome(row: Row, folder: Path) -> Result:
    """Figures of a finished run, and the signs that its log names."""
    summary, found = common.read_summary(folder), signs_of(folder)
    games = [game.episode_return for game in common.read_games(folder)]
    first = games[: min(100, len(games) // 2)]
    named = bool(set(found) & set(row.expected)) if row.expected else not found
    as_expected = summary["exit_reason"] == "solved" if row.is_cured else named
    return {
        "signs": found,
        "as_expected": as_expected,
        "first_mean": sum(first) / len(first) if first else None,
        **{name: summary[name] for name in ("mean_return_100", "steps", "episodes", "exit_reason")},
    }


def table(result: Result) -> str:
    """A line for each run."""
    lines = []
    for run in result["runs"]:
        before, after = (("-" if x is None else f"{x:,.1f}") for x in (run["first_mean"], run["mean_return_100"]))
        as_expected = "yes" if run["as_expected"] else "no"
        lines.append([run["row"], before, after, f"{run['steps']:,}", ", ".join(run["signs"]) or "none", as_expected])
    return markdown_table(["run", "first games", "last games", "steps", "signs", "as expected"], lines)


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    common.check_rows(args.rows, ROWS)
    runs = {}
    for name in args.rows:
        row = ROWS[name]
        runs[name] = row
        if row.cure:
            kept = [word for word in row.flags.split() if word.partition("=")[0] != row.cure.partition("=")[0]]
            runs[f"{name}, cured"] = Row(
                row.chapter, " ".join([*kept, row.cure, f"stop-return={row.learned}"]), is_cured=True
            )
    commands = {
        name: [*common.CHAPTERS[row.chapter], f"--total-steps={STEPS}", *(f"--{w}" for w in row.flags.split()), *flags]
        for name, row in runs.items()
    }
    common.refuse_seed([flags])
    settings = {name: common.as_recorded(common.trainer_settings(command)) for name, command in commands.items()}
    path, result = begin("signs", args, "", settings)

    def run(name: str, seed: int) -> Result:
        folder = common.run_folder(args, f"signs-{name}")
        place = [f"--runs-dir={folder.parent}", f"--run-name={folder.name}", f"--max-seconds={args.max_seconds}"]
        with common.running_script([*commands[name], f"--seed={seed}", *place]) as process:
            # Where a sign is expected, the first one says enough.
            while process.poll() is None and not (runs[name].expected and signs_of(folder)):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
            if code := process.poll():
                raise SystemExit(code)
        return outcome(runs[name], folder)

    measure(path, result, [(name, 1) for name in commands], run, table)
    return 0


if __name__ == "__main__":
    exit_with(main)
