"""What is recorded of each generation: counters, curves, the table of members, `lineage.csv`, the best net."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from a3c_mp.data.episodes import episodes_at
from a3c_mp.maths.schedules import passes_power_of_two
from a3c_mp.nets.obs_norm import OUTLIER
from a3c_mp.population.evolution import HYPERPARAMETERS, Member
from a3c_mp.population.member import Confirmation
from a3c_mp.population.memory import METRICS, SKIPPED
from a3c_mp.population.population import Population
from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.evaluation import Evaluation, PlayedGames
from a3c_mp.run.run import Run
from a3c_mp.run.run_dir import write_atomically

CUT = "evaluation_games_at_max_steps"
WARNINGS = {
    "transitions_not_finite": "transitions of member {id} contain NaN or inf; skipped ({total} so far)",
    "obs_values_clipped": "batches of member {id}: {num} observed values more than "
    f"{OUTLIER:g} standard deviations from the mean; clipped ({{total}} so far)",
    "obs_moments_not_finite": "batches of member {id}: mean or variance of observations is not finite; left out of the "
    "running moments ({total} so far)",
    CUT: "evaluation games that reached {most:,} steps, where they are cut (--eval-max-steps): {total}",
}
"""counter -> warning"""
COLUMNS = (
    *("generation", "place", "id", "parent", "kind", "change"),
    *("learning_rate", "batch_size", "learn_every", "hidden", "activation"),
    *("fitness", "mean_fitness", "updates", "steps", "sha256"),
)
"""of `lineage.csv`"""
TITLES = {"kind": "mutation", "batch_size": "batch", "mean_fitness": "mean"}
"""column of `lineage.csv` -> its title in the table of a generation, where that is not its name"""
BLOCK = 16
"""steps of the environments that are recorded together"""


class Report:
    """Records the generations of a run; its display takes members of other ranks to be as far as those at `places`."""

    def __init__(self, run: Run, population: Population, places: range):
        self.run, self.population, self.args, self.places = run, population, population.args, places
        self.path, self.lineage = run.folder / "lineage.csv", list[dict[str, Any]]()
        if self.path.exists():  # a resumed run repeats the later generations
            self.lineage = [row for row in read_lineage(self.path) if int(row["generation"]) < population.generation]
        self._write_lineage()
        run.metrics.headline = self._headline
        self.show_progress()

    def show_progress(self) -> None:
        """Show how far the current generation is."""
        metrics, num_games = self.run.metrics, self.args.eval_episodes * len(self.places)
        steps, games = self._steps_under_way, int(self.population.memory.games[list(self.places)].sum())
        if steps:  # only the first time counts
            metrics.start_clock()  # a generation takes long: `--max-seconds` counts from its first steps
        metrics.show_pending(steps, f"{games} of {num_games} evaluation games" if games else "")

    def log_interruption(self) -> None:
        """Log which steps are lost, if a signal or the end of the time has interrupted a generation."""
        if (steps := self._steps_under_way) and self.run.is_interrupted():
            what = f"generation {self.population.generation} is interrupted"
            self.run.log.info(f"{what}: its {steps:,} steps are not kept, a resumed run starts it again")
            self.run.metrics.show_pending(0, "")

    @property
    def _steps_under_way(self) -> int:
        steps = int(self.population.memory.steps[list(self.places)].sum())
        return steps * self.args.population // len(self.places)

    def record(self, confirmation: Confirmation | None) -> None:
        """Record the generation that has ended, and the games that its fittest member played then, if there were any.

        The best net is the one that new games have confirmed, also where another was luckier in an earlier generation.
        """
        run, population = self.run, self.population
        self._record_games()
        rows = [self._record_member(place, member) for place, member in enumerate(population.evaluated)]
        for place in range(self.args.population):  # the next generation starts new games
            run.metrics.record_games(run.progress.window.lose(place))
        self.lineage += rows
        self._write_lineage()
        elite, result = rows[population.fittest], population.results[population.fittest]
        fittest = f"the fittest is member {elite['id']}, at place {elite['place']}"
        run.log.info(f"generation {population.generation}: {fittest}\n{table(rows)}")
        if confirmation is not None:
            self._record_confirmation(confirmation, elite["fitness"])
        finite = result["eval_returns"].isfinite()
        returns, lengths = result["eval_returns"][finite].tolist(), result["eval_lengths"][finite].tolist()
        sha256 = sha256_of_weights(population.elite.state_dict()) or ""
        evaluation = Evaluation(run.steps, PlayedGames(returns, lengths, sha256))
        is_best = run.progress.evals.record(evaluation, confirmed=run.progress.is_confirmed)
        run.record_evaluation(evaluation, population.elite if is_best else None)

    def _record_games(self) -> None:
        """Record steps and training games in the order of time: a block of steps of every member, then the next."""
        names = ("done", "episode_return", "episode_length")
        for start in range(0, self.args.rounds, BLOCK):
            for place, result in enumerate(self.population.results):
                block = [result[name][start : start + BLOCK] for name in names]
                self.run.record_rollout(block[0].numel(), episodes_at(*block), place, policy_lag=0)

    def _record_member(self, place: int, member: Member) -> dict[str, Any]:
        """Count a member's updates and evaluation games, and record its curves; returns its line of `lineage.csv`."""
        run, result, genome = self.run, self.population.results[place], member.genome
        updates, lengths = int(result["updates"]), result["eval_lengths"]
        run.progress.updates += updates
        run.progress.samples += updates * genome.batch_size
        run.counters["evaluation_steps"] += int(lengths.sum())
        counts = dict(zip(SKIPPED, result["skipped"].tolist(), strict=True))
        for name, num in {**counts, CUT: int((lengths >= self.args.eval_max_steps).sum())}.items():
            before = run.counters[name]
            run.counters[name] = total = before + num  # there from the start, also at 0
            if passes_power_of_two(before, total):
                text = WARNINGS[name]
                run.log.warning(text.format(id=member.id, num=num, total=total, most=self.args.eval_max_steps))
        curves = {"fitness": member.fitness, "updates": updates, "genome/hidden_units": sum(genome.hidden)}
        curves |= {f"genome/{name}": getattr(genome, name) for name in HYPERPARAMETERS}
        metrics = dict(zip(METRICS, result["metrics"].tolist(), strict=True))
        metrics |= {f"{name}/place_{place}": float(value) for name, value in curves.items()}
        run.record_metrics({name: value for name, value in metrics.items() if math.isfinite(value)})
        sha256 = hashlib.sha256(result["genome"].numpy().tobytes() + result["tensors"].numpy().tobytes())
        return {
            "generation": self.population.generation,
            "place": place,
            "id": member.id,
            "parent": "" if member.kind == "first" else member.parent,
            "kind": member.kind,
            "change": member.change,
            **vars(genome),
            "hidden": " ".join(map(str, genome.hidden)),
            "fitness": member.fitness,
            "mean_fitness": float(np.mean(member.fitnesses)),
            "updates": updates,
            "steps": run.steps,
            "sha256": sha256.hexdigest()[:16],
        }

    def _record_confirmation(self, confirmation: Confirmation, fitness: float) -> None:
        """Record what the fittest member did in new games: whether the task is solved."""
        run, (mean, num, steps) = self.run, confirmation
        run.counters["evaluation_steps"] += steps
        if not num:
            run.log.warning("not confirmed: no game of the confirmation has a finite return; training continues")
            return
        run.progress.confirm(mean)
        games = f"confirmed: mean return {mean:.1f} in {num} new games"
        after = f", after a fitness of {fitness:.1f}; training continues"
        run.log.info(games if run.progress.is_confirmed else f"not {games}{after}")

    def _headline(self) -> list[str]:
        best, confirmed = self.run.progress.evals.best_mean, self.run.progress.confirmed_mean
        in_new_games = "confirmed" if self.run.progress.is_confirmed else "in new games"
        words = [f"generation {self.population.generation}"]
        words += [f"best fitness {best:.1f}"] if math.isfinite(best) else []
        return words + ([f"{in_new_games} {confirmed:.1f}"] if math.isfinite(confirmed) else [])

    def _write_lineage(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.lineage)
        try:
            write_atomically(self.path, text.getvalue().encode())
        except OSError as error:  # the next generation writes these lines too
            self.run.log.warning(f"{self.path} not written: {error}")


def read_lineage(path: Path) -> list[dict[str, str]]:
    """The lines of a `lineage.csv`, by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A table of members, as text."""
    names = [name for name in COLUMNS if name not in ("generation", "change", "updates", "steps", "sha256")]
    formats = {"learning_rate": ".2g", "fitness": ".1f", "mean_fitness": ".1f"}
    lines = [[TITLES.get(name, name.replace("_", " ")) for name in names]]
    lines += [[format(row[name], formats.get(name, "")) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
