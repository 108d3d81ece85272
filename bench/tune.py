"""Hyperparameter search with Optuna: each trial trains a chapter, a pruner stops those that lag behind.

    python bench/tune.py --study cart --trials 20 -- train_a3c_data.py --env-id CartPole-v1 --total-steps 50_000

The first trial of a study has the chapter's own settings. What is maximized is the mean return of the last 100 games at
the end; the pruner compares it at the same steps. A study lies in an SQLite file, so several processes can share it:
start the same command in several terminals.

    python bench/tune.py --study cart --trials 0            # the best trials so far
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from rich.console import Console
from rich.table import Table

from a3c_mp.cli import parse_plain
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError
from a3c_mp.run.episode_log import read_episodes
from a3c_mp.run.script import exit_with
from bench import common

if TYPE_CHECKING:
    import optuna

SPACE: dict[str, tuple[Any, ...]] = {
    "learning_rate": ("log", 1e-4, 1e-2),
    "entropy_coef": ("log", 1e-4, 1e-1),
    "gamma": ("choice", 0.9, 0.95, 0.98, 0.99, 0.995),
    "unroll_length": ("choice", 8, 16, 32, 64, 128),
    "batch_size": ("choice", 32, 64, 128, 256),
    "update_epochs": ("choice", 1, 2, 4, 8),
    "clip_ratio": ("choice", 0.1, 0.2, 0.3),
    "max_grad_norm": ("log", 0.1, 10.0),
    "n_step": ("choice", 1, 3, 5, 10),
    "replay_ratio": ("log", 1.0, 32.0),
    "target_period": ("log int", 1, 2000),
    "batch_unrolls": ("choice", 4, 8, 16),
}
"""setting -> what is searched, where a chapter has it; those that the command line sets stay as they are"""
REPORTS = 20
"""reports of a trial to the pruner, evenly over its budget"""
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Args:
    study: str = "study"
    """name of the study; a study of this name is continued"""
    storage: Path = Path("tune.sqlite3")
    """SQLite file with all studies"""
    trials: Annotated[int, Between(0)] = 20
    """trials of this process"""
    startup_trials: Count = 5
    """trials before the pruner compares any"""
    seeds: Annotated[int, Between(1, 20)] = 1
    """runs of each trial, with seeds 1, 2, ...; the objective is their mean"""
    sampler_seed: Annotated[int, Between(0)] | None = None
    """seed of the search; default: a new one, so that parallel processes differ"""


def searched(settings: Any, flags: list[str]) -> dict[str, tuple[Any, ...]]:
    """The part of `SPACE` that a chapter with these settings and flags has, with its own values in it.

    What is 0 in the chapter, as the entropy bonus of continuous actions, stays switched off.
    """
    fixed = {flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in flags}
    if getattr(settings, "returns", "") == "gae":
        fixed.add("n_step")
    space: dict[str, tuple[Any, ...]] = {}
    for name, (kind, *ends) in SPACE.items():
        own = getattr(settings, name, 0)
        if own and name not in fixed:
            values = sorted({*ends, own})
            space[name] = (kind, *values) if kind == "choice" else (kind, values[0], values[-1])
    return space


def suggest(trial: optuna.Trial, space: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Values of the settings that are searched."""
    chosen: dict[str, Any] = {}
    for name, (kind, *ends) in space.items():
        if kind == "choice":
            chosen[name] = trial.suggest_categorical(name, ends)
        elif kind == "log int":
            chosen[name] = trial.suggest_int(name, *ends, log=True)
        else:
            chosen[name] = trial.suggest_float(name, *ends, log=True)
    return chosen


def mean_return(folder: Path, steps: float) -> float | None:
    """Mean return of the last 100 games that ended up to so many agent steps; None before the first."""
    try:
        returns = [row.episode_return for row in read_episodes(folder / "episodes.csv") if row.steps <= steps][-100:]
    except (OSError, ValueError):
        return None
    return sum(returns) / len(returns) if returns else None


def run_trial(trial: optuna.Trial, args: Args, command: list[str]) -> float:
    """Train with the trial's settings; the mean return at the end. Raises TrialPruned."""
    settings = common.trainer_settings(command)
    chosen = suggest(trial, searched(settings, command[1:]))
    folder = Path(f"{args.study}-runs")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    results = []
    for seed in range(1, args.seeds + 1):
        name = f"trial-{trial.number}-s{seed}"
        own = ["--runs-dir", str(folder), "--run-name", name, "--seed", str(seed)]
        results.append(train(trial if seed == 1 else None, [*command, *flags, *own], folder / name, settings))
    return sum(results) / len(results)


def train(trial: optuna.Trial | None, command: list[str], folder: Path, settings: Any) -> float:
    """Run a trainer, and report its mean return to the pruner at fixed steps; its mean return at the end."""
    import optuna

    reported = 0
    with common.running_script(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            due = (reported + 1) * settings.total_steps // REPORTS
            if trial is None or not has_reached(folder, due) or (value := mean_return(folder, due)) is None:
                continue
            reported += 1
            trial.report(value, due)
            if trial.should_prune():
                raise optuna.TrialPruned
    if process.returncode != 0:
        raise optuna.TrialPruned(f"exit code {process.returncode}")  # settings that contradict each other, or diverge
    value = mean_return(folder, float("inf"))
    if value is None:
        raise optuna.TrialPruned("no game has ended")
    return value


def has_reached(folder: Path, steps: int) -> bool:
    """Whether a run has counted a game at so many agent steps or later."""
    try:
        rows = read_episodes(folder / "episodes.csv")
    except (OSError, ValueError):
        return False
    return bool(rows) and rows[-1].steps >= steps


def show(study: optuna.Study) -> None:
    """Print the best trials."""
    import optuna

    done = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    pruned = sum(t.state == optuna.trial.TrialState.PRUNED for t in study.trials)
    table = Table("trial", "mean return", "settings", box=None)
    for trial in sorted(done, key=lambda t: t.value or 0.0, reverse=True)[:5]:
        shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in trial.params.items()}
        table.add_row(str(trial.number), f"{trial.value:.1f}", json.dumps(shown).replace('"', ""))
    console = Console(width=None if sys.stdout.isatty() else 240)
    console.print(f"{study.study_name}: {len(done)} trials to the end, {pruned} pruned", table)


def announce(study: Any, trial: Any) -> None:
    """Print how a trial has ended, and the best so far."""
    value = "" if trial.value is None else f" {trial.value:.1f}"
    best = max((t.value for t in study.trials if t.state.name == "COMPLETE"), default=None)
    print(f"trial {trial.number}: {trial.state.name.lower()}{value}; best {best}", flush=True)


def main() -> int:
    position = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    command = sys.argv[position + 1 :]
    args = parse_plain(Args, __doc__ or "", sys.argv[1:position])
    if args.trials and not command:
        raise ConfigError("trials", args.trials, "no trainer is named", "end with -- train_a3c_data.py and its flags")
    try:
        import optuna
    except ImportError:
        raise ConfigError("study", args.study, "optuna is not installed", "pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=args.study, storage=f"sqlite:///{args.storage}", direction="maximize", load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=args.sampler_seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=args.startup_trials),
    )  # fmt: skip
    if command:
        settings = common.trainer_settings(command)  # bad flags end the search here
        before = study.user_attrs.get("command", shlex.join(command))
        if before != shlex.join(command):
            raise ConfigError(
                "study", args.study, f"its trials are of another command: {before}", "choose another name"
            )
        if not study.trials:
            own = {name: getattr(settings, name) for name in searched(settings, command[1:])}
            study.enqueue_trial(own)  # the first trial
        study.set_user_attr("command", shlex.join(command))
        study.optimize(lambda trial: run_trial(trial, args, command), n_trials=args.trials, callbacks=[announce])
    show(study)
    return 0


if __name__ == "__main__":
    exit_with(main)
