"""Steady rates of several chapters or settings side by side: they take turns, and the ratios to the first are reported.

A row is a chapter and flags without their dashes; flags that are not listed here go to every row:

    python bench/pairs.py --rows a3c_data "task eval-every=0" task --env-id CartPole-v1
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.script import exit_with
from bench import common
from bench.solve import flags_of
from bench.throughput import trainer_sps


@dataclass(frozen=True)
class Args:
    chapter: ClassVar[str] = "pairs"
    rows: tuple[str, ...] = ("a3c_data", "task eval-every=0")
    """what to compare: a chapter, then its own settings"""
    seconds: Annotated[float, Between(1)] = 40.0
    """how long each runs, starting up included; the second half of its curve counts (s)"""
    repeat: Count = 3
    """repetitions, in which the rows take turns"""
    results: Path = common.RESULTS
    """folder of the result file"""


def command_of(row: str, flags: list[str]) -> list[str]:
    """The command line of a row. Raises ConfigError for a chapter that does not exist."""
    chapter, _, own = row.partition(" ")
    if chapter not in common.CHAPTERS:
        raise ConfigError("rows", row, "begins with no chapter", f"one of {', '.join(common.CHAPTERS)}")
    return [*common.CHAPTERS[chapter], *flags, *(flags_of(own) if own else [])]


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    commands = {row: command_of(row, flags) for row in args.rows}
    if len(commands) < len(args.rows):
        raise ConfigError("rows", " ".join(args.rows), "a row is named twice", "name each once")
    env_id, *others = dict.fromkeys(common.trainer_settings(command).env_id for command in commands.values())
    if others:
        raise ConfigError("rows", " ".join(args.rows), f"they play {env_id} and {others[0]}", "add --env-id")
    result = common.begin("pairs", args, env_id)
    rates: dict[str, list[float]] = {row: [] for row in args.rows}
    for number in range(args.repeat):
        for row, command in list(commands.items())[:: -1 if number % 2 else 1]:  # the rate of a machine may drift
            rates[row].append(trainer_sps(command, args.seconds))
        print(
            f"{number + 1}/{args.repeat}  " + "  ".join(f"{row}: {sps[-1]:,.0f}" for row, sps in rates.items()),
            flush=True,
        )
    first = args.rows[0]
    ratios = {row: [sps / base for sps, base in zip(rates[row], rates[first], strict=True)] for row in args.rows}
    result |= {"rates": rates, "ratios": ratios}
    result["medians"] = {row: [statistics.median(rates[row]), statistics.median(ratios[row])] for row in args.rows}
    path = common.result_path(args.results, result, with_env=True)
    common.save(path, result)
    for row, (sps, ratio) in result["medians"].items():
        print(f"{row}: median {sps:,.0f} steps a second, {ratio:.3f} times {first} (median of the ratios)")
    print(path)
    return 0


if __name__ == "__main__":
    exit_with(main)
