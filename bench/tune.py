"""Hyperparameter search with Optuna: each trial trains a chapter, a pruner stops those that lag behind.

    python bench/tune.py --study cart --trials 20 --chapter a3c_grad --env-id CartPole-v1 --total-steps 50_000
    python bench/tune.py --study cart --trials 0            # the best trials so far

Flags that are not listed here are the trainer's; what they set is not searched. The first trial of a study has the
chapter's own settings. What is maximized is the mean return of the last 100 games at the end; the pruner compares it at
the same steps. A study lies in an SQLite file, so the same command in several terminals works on one study.
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds only what lies beside it

from a3c_mp.cli import parse_own
from a3c_mp.config import Between, Count
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.run.script import exit_with
from bench import common
from bench.records import markdown_table

if TYPE_CHECKING:
    import optuna

LOGARITHMIC: dict[str, tuple[float, float]] = {
    "learning_rate": (1e-4, 1e-2),
    "entropy_coef": (1e-4, 1e-1),
    "max_grad_norm": (0.1, 10.0),
    "replay_ratio": (1.0, 32.0),
    "target_period": (1, 2000),
}
"""setting -> range that is searched on a logarithmic scale, where a chapter has it"""
CHOICES: dict[str, tuple[float, ...]] = {
    "gamma": (0.9, 0.95, 0.98, 0.99, 0.995),
    "unroll_length": (8, 16, 32, 64, 128),
    "batch_size": (32, 64, 128, 256),
    "update_epochs": (1, 2, 4, 8),
    "clip_ratio": (0.1, 0.2, 0.3),
    "n_step": (1, 3, 5, 10),
    "batch_unrolls": (4, 8, 16),
}
"""setting -> values that are searched, where a chapter has it"""
REPORTS = 20
"""reports of a trial to the pruner, evenly over its budget"""
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Args(common.Args):
    out: Path = Path("tune.sqlite3")
    """SQLite file with all studies"""
    study: str = "study"
    """name of the study; a study of this name is continued"""
    trials: Annotated[int, Between(0)] = 20
    """trials of this process"""
    startup_trials: Count = 5
    """trials before the pruner compares any"""
    seeds: Annotated[int, Between(1, 20)] = 1
    """runs of each trial, with seeds 1, 2, ...; the objective is their mean"""
    sampler_seed: Annotated[int, Between(0)] | None = None
    """seed of the search; default: a new one, so that parallel processes differ"""


def searched(settings: Any, flags: Sequence[str]) -> dict[str, Any]:
    """What is searched of a chapter's settings, with its own values: those that are 0 or given by a flag stay."""
    fixed = {flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in flags}
    if getattr(settings, "returns", "") == "gae":
        fixed.add("n_step")
    names = [name for name in (*LOGARITHMIC, *CHOICES) if name not in fixed]
    return {name: value for name in names if (value := getattr(settings, name, 0))}


def suggest(trial: optuna.Trial, own: dict[str, Any]) -> dict[str, Any]:
    """Values of the settings that are searched; the chapter's own are always possible."""
    chosen: dict[str, Any] = {}
    for name, value in own.items():
        if name in CHOICES:
            chosen[name] = trial.suggest_categorical(name, sorted({*CHOICES[name], value}))
        else:
            ends = sorted((*LOGARITHMIC[name], value))
            pick = trial.suggest_int if isinstance(value, int) else trial.suggest_float
            chosen[name] = pick(name, ends[0], ends[-1], log=True)
    return chosen


def run_trial(trial: optuna.Trial, args: Args, command: list[str]) -> float:
    """Train with the trial's settings; the mean return at the end. Raises TrialPruned."""
    settings = common.trainer_settings(command)
    chosen = suggest(trial, searched(settings, command[1:]))
    flags, results = [word for name, value in chosen.items() for word in common.flag_of(name, value)], []
    for seed in range(1, args.seeds + 1):
        folder = args.runs_dir / f"{args.study}-trial-{trial.number}-s{seed}"
        if folder.exists():
            why, fix = f"{folder} is there already", "choose another name, or another --runs-dir"
            raise ConfigError("study", args.study, why, fix)
        place = [f"--runs-dir={folder.parent}", f"--run-name={folder.name}", f"--seed={seed}"]
        reporting = trial if seed == 1 else None
        results.append(train(reporting, [*command, *flags, *place], folder, settings.total_steps))
    return statistics.fmean(results)


def train(trial: optuna.Trial | None, command: list[str], folder: Path, total_steps: int) -> float:
    """Run a trainer, and report its mean return to the pruner at fixed steps; its mean return at the end."""
    import optuna

    reported, is_over = 0, False
    with common.running_script(command, stdout=subprocess.DEVNULL) as process:
        while not is_over:
            time.sleep(POLL_SECONDS)
            is_over = process.poll() is not None
            games = common.read_games(folder)
            while trial is not None and games and games[-1].steps >= (due := (reported + 1) * total_steps // REPORTS):
                reported += 1
                if (value := common.mean_return(games, due)) is not None:
                    trial.report(value, due)
                    if trial.should_prune():
                        raise optuna.TrialPruned
    if process.returncode != 0:
        raise optuna.TrialPruned(f"exit code {process.returncode}")  # settings that contradict each other, or diverge
    value = common.mean_return(common.read_games(folder))
    if value is None:
        raise optuna.TrialPruned("no game has ended")
    return value


def show(study: optuna.Study) -> None:
    """Print the best trials."""
    done = sorted((t for t in study.trials if t.state.name == "COMPLETE"), key=lambda t: t.value or 0.0, reverse=True)
    pruned = sum(trial.state.name == "PRUNED" for trial in study.trials)
    print(f"{study.study_name}: {len(done)} trials to the end, {pruned} pruned")
    lines = []
    for trial in done[:5]:
        values = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in trial.params.values())
        lines.append([str(trial.number), f"{trial.value:.1f}", *values])
    if lines:
        print(markdown_table(["trial", "mean return", *done[0].params], lines))


def main() -> int:
    args, flags = parse_own(Args, __doc__)
    try:
        import optuna
    except ImportError:
        raise ConfigError("study", args.study, "optuna is not installed", "pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.INFO if args.trials else optuna.logging.WARNING)
    if not args.trials and not args.out.exists():
        raise ConfigError("out", args.out, "there is no such file", "name one with studies, or give --trials")
    place = {"study_name": args.study, "storage": f"sqlite:///{args.out}"}
    make = partial(optuna.create_study, direction="maximize", load_if_exists=True)
    try:
        study = (make if args.trials else optuna.load_study)(
            **place, sampler=optuna.samplers.TPESampler(seed=args.sampler_seed),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=args.startup_trials),
        )  # fmt: skip
    except Exception as error:  # sqlalchemy's, of many kinds; a KeyError where there is no such study
        why = f"study {args.study} cannot be opened there ({one_line(error)[:200]})"
        raise ConfigError("out", args.out, why, "name another file, in a folder that is there, or a study") from error
    if args.trials:
        common.refuse_seed([flags])
        command = [*common.CHAPTERS[args.chapter], "--stop-return=None", *flags]  # else all that solve it were alike
        own = searched(common.trainer_settings(command), command[1:])  # bad flags end the search here
        before = study.user_attrs.get("command", shlex.join(command))
        if before != shlex.join(command):
            why = f"its trials are of another command: {before}"
            raise ConfigError("study", args.study, why, "choose another name")
        alike = [trial for trial in study.trials if trial.system_attrs.get("fixed_params") == own]
        if all(trial.state.name == "FAIL" for trial in alike):
            study.enqueue_trial(own)  # the first trial, or the next if that did not end
        study.set_user_attr("command", shlex.join(command))

        def objective(trial: optuna.Trial) -> float:
            try:
                return run_trial(trial, args, command)
            except SystemExit:  # a signal; of other errors optuna keeps a record itself
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                raise

        study.optimize(objective, n_trials=args.trials)
    show(study)
    return 0


if __name__ == "__main__":
    exit_with(main)
