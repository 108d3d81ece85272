"""What is recorded of each generation: counters, curves, the table of members, `lineage.csv`, the best net."""

import csv
import hashlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from a3c_mp.data.episodes import episodes_at
from a3c_mp.errors import CheckpointError
from a3c_mp.nets.obs_stats import FAR
from a3c_mp.population.evolution import Member, describe_genes
from a3c_mp.population.member import Confirmation
from a3c_mp.population.population import COUNTS, Population
from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.evaluation import PlayedGames
from a3c_mp.run.mean_return import short_return
from a3c_mp.run.progress import count
from a3c_mp.run.run import Run
from a3c_mp.run.run_dir import check_owned, write_atomically

CUT, FAILED = "evaluation_games_at_max_steps", "evaluation_games_not_finite"
LONG = "evaluation_games_beyond_training"
WARNINGS = {
    "transitions_not_finite": "transitions of member {id} contain NaN or inf; skipped",
    "obs_values_far": f"values observed by member {{id}} beyond {FAR:g} standard deviations; left out of the mean",
    CUT: "evaluation games that reached {most:,} steps, where they are cut (--eval-max-steps)",
    LONG: "evaluation games of member {id} are longer than a generation has steps for each environment; none ended in "
    "training, and what comes later in a game is not learned (raise --generation-steps, or lower --num-envs)",
    FAILED: "evaluation games of member {id} with a return of NaN or inf; each is the worst possible one (-inf)",
}
"""counter -> warning"""
TITLES = {
    "kind": "mutation",
    "batch_size": "batch",
    "mean_fitness": "mean",
}  # column -> its title in the table, where it differs
HIDDEN = ("generation", "updates", "steps", "sha256")  # columns of `lineage.csv` that the table of a generation lacks
BLOCK = 16  # steps of the environments that are recorded together


class Report:
    """Records the generations of a run; its display takes members of other ranks to be as far as those at `places`."""

    def __init__(self, run: Run, population: Population, places: range):
        self.run, self.population, self.args, self.places = run, population, population.args, places
        self.genes = tuple(dict.fromkeys(("learning_rate", *self.args.evolving)))  # plot.py draws that one
        self.path = run.folder / "lineage.csv"
        self._write_lineage()
        run.metrics.headline = self._headline
        run.log.info(describe_genes(self.args))
        self._warn_of_target_nets()
        self.show_progress()

    def show_progress(self) -> None:
        steps, games = self._under_way()
        if steps:  # only the first time counts
            self.run.metrics.start_clock()  # a generation takes long: `--max-seconds` counts from its first steps
        total = self.args.eval_episodes * len(self.places)
        text = f"{games} of {total} evaluation games" if games else ""
        if int(self.population.memory.confirming) >= 0:
            text = f"the fittest member plays {self.args.confirm_episodes} games that confirm it"
        self.run.metrics.show_pending(steps, text)

    def _warn_of_target_nets(self) -> None:
        """Warn if no member's target net ever moves."""
        args, evolving = vars(self.args), set(self.args.evolving)
        if {"target_period", "target_rate", "learn_every"} <= args.keys():
            updates = self.args.total_steps // self.args.population // args["learn_every"]
            if args["target_rate"] == 0 and "target_rate" not in evolving:
                self.run.log.warning("the target net of a member never moves: raise --target-rate")
            elif updates < args["target_period"] and not evolving & {"target_period", "learn_every"}:
                what = f"the target net of a member never moves in its {updates:,} updates"
                self.run.log.warning(f"{what}: lower --target-period")

    def log_interruption(self) -> None:
        """Log which steps are lost, if a signal or the end of the time has interrupted a generation."""
        steps, _ = self._under_way()
        if steps and self.run.is_interrupted():
            what = f"generation {self.population.generation} is interrupted"
            self.run.log.info(f"{what}: its {steps:,} steps are not kept, a resumed run starts it again")
            self.run.metrics.show_pending(0, "")

    def _under_way(self) -> tuple[int, int]:
        """Agent steps of all members so far in this generation, and evaluation games at `places`."""
        steps, games = self.population.memory.progress[:, list(self.places)].sum(dim=1).tolist()
        return steps * self.args.population // len(self.places), games

    def record(self, confirmation: Confirmation | None) -> None:
        """Record the generation that has ended, and the confirming games of its fittest member, if there were any."""
        run, population = self.run, self.population
        self._record_games()
        rows = [self._record_member(place, member) for place, member in enumerate(population.evaluated)]
        for place in range(self.args.population):  # the next generation starts new games
            run.metrics.record_games(run.progress.window.lose(place))
        population.lineage += rows
        self._write_lineage()
        elite, result = rows[population.fittest], population.results[population.fittest]
        fittest = f"the fittest is member {elite['id']}, at place {elite['place']}"
        run.log.info(f"generation {population.generation}: {fittest}\n{table(rows)}")
        if confirmation is not None:
            self._record_confirmation(confirmation, elite["fitness"])
        sha256 = sha256_of_weights(population.elite.state_dict()) or ""
        games = PlayedGames(result["eval_returns"].tolist(), result["eval_lengths"].tolist(), sha256)
        # A net that new games have confirmed is the best, also where another was luckier in an earlier generation.
        is_best = run.progress.evals.record(run.steps, games, confirmed=run.progress.is_confirmed)
        run.record_evaluation(run.steps, games, population.elite if is_best else None)

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
        own = genome.settings(self.args)
        lengths, counts = result["eval_lengths"], dict(zip(COUNTS, result["counts"].tolist(), strict=True))
        updates = counts.pop("updates")
        run.progress.has_data |= counts["transitions_not_finite"] < self.args.rounds * self.args.num_envs
        samples = updates * own.batch_size if genome.family == "q" else 0  # PPO's minibatches may be smaller
        run.progress.record_update(samples, updates)
        run.counters["evaluation_steps"] += int(lengths.sum())
        counts[CUT] = int((lengths >= self.args.eval_max_steps).sum())
        counts[LONG] = 0 if result["done"].any() else int((lengths > self.args.rounds).sum())
        counts[FAILED] = int((result["eval_returns"] == -math.inf).sum())
        for name, num in counts.items():
            count(run, name, num, WARNINGS[name].format(id=member.id, most=self.args.eval_max_steps), repeated=True)
        curves = {"fitness": member.fitness, "updates": updates, "genome/hidden_units": sum(genome.hidden)}
        curves |= {f"genome/{name}": getattr(own, name) for name in self.genes}
        metrics = dict(zip(self.population.metrics, result["metrics"].tolist(), strict=True))
        metrics |= {f"{name}/place_{place}": float(value) for name, value in curves.items()}
        run.record_metrics({name: value for name, value in metrics.items() if math.isfinite(value)})
        sha256 = hashlib.sha256(b"".join(result[name].numpy().tobytes() for name in ("genome", "tensors", "returns")))
        line: dict[str, Any] = {"generation": self.population.generation, "place": place, "id": member.id}
        line |= {"parent": "" if member.kind == "first" else member.parent, "kind": member.kind}
        line |= {name: getattr(own, name) for name in self.genes}
        if genome.convolutions:  # as channels x kernel / stride
            line["convolutions"] = " ".join(f"{c.channels}x{c.kernel}/{c.stride}" for c in genome.convolutions)
        line |= {"hidden": " ".join(map(str, genome.hidden)), "activation": genome.activation}
        line |= {"fitness": member.fitness, "mean_fitness": float(np.mean(member.fitnesses)), "updates": updates}
        return line | {"steps": run.steps, "sha256": sha256.hexdigest()[:16]}

    def _record_confirmation(self, confirmation: Confirmation, fitness: float) -> None:
        run, (mean, failed, steps) = self.run, confirmation
        run.counters["evaluation_steps"] += steps
        run.progress.confirmed_mean = mean
        if not failed:
            run.metrics.write(run.steps, {"eval/confirmed_mean": mean})
        games = f"confirmed: mean return {short_return(mean)} in {self.args.confirm_episodes} new games"
        games += f", of which {failed} failed (NaN or inf)" if failed else ""
        after = f", after a fitness of {short_return(fitness)}; training continues"
        run.log.info(games if run.progress.is_confirmed else f"not {games}{after}")

    def _headline(self) -> list[str]:
        progress = self.run.progress
        means = {"best fitness": progress.evals.best_mean}
        means["confirmed" if progress.is_confirmed else "in new games"] = progress.confirmed_mean
        finite = [f"{name} {short_return(mean)}" for name, mean in means.items() if math.isfinite(mean)]
        num = self.population.generation
        return [f"{num} generation{'s' * (num != 1)}", *finite]

    def _write_lineage(self) -> None:
        text = io.StringIO()
        columns = dict.fromkeys(name for row in self.population.lineage for name in row) or ("generation", "place")
        writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.population.lineage)
        try:
            check_owned(self.path.parent, self.run.lock)
            write_atomically(self.path, text.getvalue().encode())
        except (OSError, CheckpointError) as error:  # the next generation writes these lines too
            self.run.log.warning(f"{self.path} not written: {error}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The columns of `lineage.csv` of one generation that fit a log."""

    def cell(name: str, value: Any) -> str:
        if name.endswith("fitness"):
            return short_return(value)
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    names = [name for name in rows[0] if name not in HIDDEN]
    lines = [[TITLES.get(name, name.replace("_", " ")) for name in names]]
    lines += [[cell(name, row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
