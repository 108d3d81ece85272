"""What is recorded of each generation: counters, curves, the table of members, `lineage.csv`, the best net."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from a3c_mp.data.episodes import episodes_at
from a3c_mp.maths.schedules import passes_power_of_two
from a3c_mp.nets.obs_norm import OUTLIER
from a3c_mp.population.confirmation import Interrupted, ends_at_signals
from a3c_mp.population.member import play_greedily
from a3c_mp.population.memory import METRICS, SKIPPED
from a3c_mp.population.population import Population
from a3c_mp.population.records import sha256_of_member
from a3c_mp.population.settings import Args
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.evaluation import Evaluation
from a3c_mp.run.files import write_atomically
from a3c_mp.run.run import Run
from a3c_mp.seeds import CONFIRMATION, derive_seeds

WARNINGS = {
    "transitions_not_finite": "transitions of member {id} contain NaN or inf; skipped",
    "obs_values_clipped": "batches of member {id}: {num} observed values more than "
    f"{OUTLIER:g} standard deviations from the mean; clipped",
    "obs_moments_not_finite": "batches of member {id}: mean or variance of observations is not finite; left out of the "
    "running moments",
}
"""counter -> warning"""
COLUMNS = (
    *("generation", "place", "id", "parent", "kind", "change"),
    *("learning_rate", "batch_size", "learn_every", "hidden", "activation"),
    *("fitness", "mean_fitness", "updates", "steps", "sha256"),
)
"""of `lineage.csv`"""
BLOCK = 16
"""steps of the environments that are recorded together"""


class Report:
    """Records the generations of a run.

    Args:
        run: counts steps and writes curves and checkpoints.
        population: what is recorded; its generation is that of the first `record`.
        group: the ranks; this one sees how far its own members are.
    """

    def __init__(self, run: Run, population: Population, group: LearnerGroup):
        self.run, self.population = run, population
        self._interruption_logged = False
        self.args: Args = population.args
        self.places = group.own_share(population.args.population)
        self.lineage = Lineage(run.folder / "lineage.csv", population.generation)
        self._write_lineage([])
        run.metrics.headline = self._headline
        self._clock_runs = False
        self.show_progress()

    def show_progress(self) -> None:
        """Show how far the current generation is, if other ranks' members are as far as the own ones."""
        memory, args = self.population.memory, self.args
        own = slice(self.places.start, self.places.stop)
        steps, games = int(memory.steps[own].sum()) * args.population // len(self.places), int(memory.games[own].sum())
        if self.run.is_interrupted():
            if steps and not self._interruption_logged:
                self._interruption_logged = True
                what = f"generation {self.population.generation} is interrupted"
                self.run.log.info(f"{what}: its {steps:,} steps are not kept, a resumed run starts it again")
            steps = games = 0
        if steps and not self._clock_runs:
            self._clock_runs = True
            self.run.metrics.start_clock()  # a generation takes long: `--max-seconds` counts from its first steps
        text = f"{games} of {args.eval_episodes * len(self.places)} evaluation games" if games else ""
        self.run.metrics.show_pending(steps, text)

    def record(self) -> bool:
        """Record the generation that has ended, and take its fittest member as the elite.

        Returns:
            whether it is recorded; False if a signal or the end of the time has interrupted its confirmation: a resumed
                run repeats the generation.
        """
        run, population = self.run, self.population
        try:
            returns = self._confirm()
        except Interrupted:
            self.show_progress()  # logs what is lost
            return False
        population.end_generation()
        self._record_games()
        for place in range(self.args.population):
            self._count(place)
        for place in range(self.args.population):  # the next generation starts new games
            run.metrics.record_games(run.progress.window.lose(place))
        rows = [self._row(place) for place in range(self.args.population)]
        self._write_lineage(rows)
        elite = rows[population.fittest]
        fittest = f"the fittest is member {elite['id']}, at place {elite['place']}"
        run.log.info(f"generation {population.generation}: {fittest}\n{table(rows)}")
        self._record_confirmation(returns)
        self._evaluate()
        return True

    def _write_lineage(self, rows: Sequence[dict[str, Any]]) -> None:
        try:
            self.lineage.append(rows)
        except OSError as error:  # the next generation writes these lines too
            self.run.log.warning(f"{self.lineage.path} not written: {error}")

    def _record_games(self) -> None:
        """Record steps and training games in the order of time: a block of steps of every member, then the next."""
        names = ("done", "episode_return", "episode_length")
        for start in range(0, self.args.rounds, BLOCK):
            for place in range(self.args.population):
                result = self.population.memory.results[place]
                block = [result[name][start : start + BLOCK] for name in names]
                self.run.record_rollout(block[0].numel(), episodes_at(*block), place, policy_lag=0)

    def _count(self, place: int) -> None:
        """Count a member's updates and the steps of its evaluation games, and record its curves."""
        run, result = self.run, self.population.memory.results[place]
        genome, updates = self.population.members[place].birth.genome, int(result["updates"])
        run.progress.updates += updates
        run.progress.samples += updates * genome.batch_size
        run.counters["evaluation_steps"] += int(result["eval_lengths"].sum())
        self._count_long_games(int((result["eval_lengths"] >= self.args.eval_max_steps).sum()))
        metrics = dict(zip(METRICS, result["metrics"].tolist(), strict=True))
        run.record_metrics({name: value for name, value in metrics.items() if math.isfinite(value)})
        curves = {
            "fitness": self.population.fitness(place),
            "genome/learning_rate": genome.learning_rate,
            "genome/batch_size": genome.batch_size,
            "genome/learn_every": genome.learn_every,
            "genome/hidden_units": sum(genome.hidden),
            "updates": updates,
        }
        run.record_metrics(
            {f"{name}/place_{place}": float(value) for name, value in curves.items() if math.isfinite(value)}
        )
        for name, num in zip(SKIPPED, result["skipped"].tolist(), strict=True):
            before = run.counters[name]
            run.counters[name] += num  # there from the start, also at 0
            if passes_power_of_two(before, before + num):
                what = WARNINGS[name].format(num=num, id=self.population.members[place].birth.id)
                run.log.warning(f"{what} ({before + num} so far)")

    def _count_long_games(self, num: int) -> None:
        """Count evaluation games that were as long as they may be: their returns may be cut."""
        before = self.run.counters["evaluation_games_at_max_steps"]
        self.run.counters["evaluation_games_at_max_steps"] += num
        if passes_power_of_two(before, before + num):
            what = f"evaluation games that reached {self.args.eval_max_steps:,} steps, where they are cut"
            self.run.log.warning(f"{what} (--eval-max-steps): {before + num}")

    def _row(self, place: int) -> dict[str, Any]:
        """A member's line of `lineage.csv`."""
        member, result = self.population.members[place], self.population.memory.results[place]
        birth, genome = member.birth, member.birth.genome
        return {
            "generation": self.population.generation,
            "place": place,
            "id": birth.id,
            "parent": "" if birth.kind == "first" else birth.parent,
            "kind": birth.kind,
            "change": birth.change,
            "learning_rate": genome.learning_rate,
            "batch_size": genome.batch_size,
            "learn_every": genome.learn_every,
            "hidden": " ".join(map(str, genome.hidden)),
            "activation": genome.activation,
            "fitness": self.population.fitness(place),
            "mean_fitness": float(np.mean(member.fitnesses)),
            "updates": int(result["updates"]),
            "steps": self.run.steps,
            "sha256": sha256_of_member(result)[:16],
        }

    def _evaluate(self) -> None:
        """Record the games of the fittest member as the run's evaluation, and save its net if it is the best so far.

        The best is the one that new games have confirmed, also where another one was luckier in an earlier generation.
        """
        run, population = self.run, self.population
        result, sha256 = population.memory.results[population.fittest], sha256_of_weights(population.elite.state_dict())
        finite = result["eval_returns"].isfinite()
        returns, lengths = result["eval_returns"][finite].tolist(), result["eval_lengths"][finite].tolist()
        evaluation = Evaluation(population.generation + 1, run.steps, returns, lengths, sha256 or "")
        is_best = run.progress.evals.record(evaluation, confirmed=run.progress.is_confirmed)
        run.record_evaluation(evaluation, population.elite if is_best else None)

    def _confirm(self) -> list[float]:
        """Have the fittest member play new games once its fitness reaches the goal; return their finite returns.

        The fittest of many has been lucky too: only new games say what it is worth. An environment that fails in them
        costs this confirmation, not the run.

        Raises:
            Interrupted: a signal has arrived meanwhile, or the time is over.
        """
        args, population, run = self.args, self.population, self.run
        if args.stop_return is None or not population.fitness(population.fittest) >= args.stop_return:
            return []
        seed = derive_seeds(args.seed, population.generation, CONFIRMATION)[0]
        try:
            with ends_at_signals(run.is_interrupted, args.hang_seconds) as on_step:
                games = list(play_greedily(args, population.fittest_net(), args.confirm_episodes, seed, on_step))
        except Interrupted:
            raise
        except Exception as error:  # whatever an environment raises
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            run.log.warning(f"not confirmed: the games of the confirmation failed ({why}); training continues")
            return []
        run.counters["evaluation_steps"] += sum(game.length for game in games)
        returns = [game.episode_return for game in games if math.isfinite(game.episode_return)]
        if not returns:
            run.log.warning("not confirmed: no game of the confirmation has a finite return; training continues")
        return returns

    def _record_confirmation(self, returns: Sequence[float]) -> None:
        """Record what the fittest member did in new games, if there are any: whether the task is solved."""
        if not returns:
            return
        mean = float(np.mean(returns))
        self.run.progress.confirm(mean)
        games = f"mean return {mean:.1f} in {len(returns)} new games"
        if self.run.progress.is_confirmed:
            self.run.log.info(f"confirmed: {games}")
        else:
            fitness = self.population.fitness(self.population.fittest)
            self.run.log.info(f"not confirmed: {games}, after a fitness of {fitness:.1f}; training continues")

    def _headline(self) -> list[str]:
        best, confirmed = self.run.progress.evals.best_mean, self.run.progress.confirmed_mean
        words = [f"generation {self.population.generation}"]
        words += [f"best fitness {best:.1f}"] if math.isfinite(best) else []
        in_new_games = "confirmed" if self.run.progress.is_confirmed else "in new games"
        return words + ([f"{in_new_games} {confirmed:.1f}"] if math.isfinite(confirmed) else [])


class Lineage:
    """The writer of `lineage.csv`: a line for each member of each generation.

    Args:
        path: of the file.
        generation: the first one to be written; a resumed run repeats it, so later lines are removed.
    """

    def __init__(self, path: Path, generation: int):
        self.path = path
        self.rows = [row for row in read_lineage(path) if int(row["generation"]) < generation] if path.exists() else []

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add a generation, or none, and write the file. Raises OSError; the old file stays then."""
        self.rows += [{name: str(value) for name, value in row.items()} for row in rows]
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(self.path, text.getvalue().encode())


def read_lineage(path: Path) -> list[dict[str, str]]:
    """The lines of a `lineage.csv`, by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A table of members, as text."""
    names = (
        "place",
        "id",
        "parent",
        "kind",
        "learning_rate",
        "batch_size",
        "learn_every",
        "hidden",
        "activation",
        "fitness",
    )
    cells = [
        [
            "place",
            "id",
            "parent",
            "mutation",
            "learning rate",
            "batch",
            "learn every",
            "hidden",
            "activation",
            "fitness",
            "mean",
        ]
    ]
    for row in rows:
        values = [row[name] for name in names]
        values[4] = f"{values[4]:.2g}"
        cells.append([*map(str, values[:-1]), f"{row['fitness']:.1f}", f"{row['mean_fitness']:.1f}"])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
