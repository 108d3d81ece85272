"""The result of an evaluation, and the progress of a run's evaluations: how many, the best, when the next is due."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from a3c_mp.config import CommonArgs
from a3c_mp.seeds import EVALUATOR, derive_seeds


class Evaluation(NamedTuple):
    """Result of an evaluation: whole games, all played with one snapshot of the weights."""

    number: int  # of the run's evaluations, from 1
    steps: int  # agent steps of the run when the snapshot was taken
    returns: list[float]  # raw, of each game in the order in which they ended
    lengths: list[int]  # agent steps of the same games
    weights_sha256: str  # of the weights that played, as `checkpoint.sha256_of_weights` computes it

    @property
    def return_mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def figures(self) -> dict[str, float]:
        """Mean and standard deviation of the returns, mean length; as `play.py` computes them."""
        with np.errstate(invalid="ignore"):  # infinite returns have no deviation
            return_std = float(np.std(self.returns))
        return {"return_mean": self.return_mean, "return_std": return_std, "length_mean": float(np.mean(self.lengths))}

    @property
    def description(self) -> dict[str, Any]:
        """All of it in plain values, but for the single games."""
        return {"steps": self.steps, **self.figures, "weights_sha256": self.weights_sha256}


class EvalProgress:
    """Progress of a run's evaluations; a part of `Progress`, saved in checkpoints.

    Args:
        args: the chapter's settings.
    """

    def __init__(self, args: CommonArgs):
        self.every, self.goal, self.evaluates = args.eval_every, args.stop_eval_return, args.evaluates
        self.seed = evaluation_seed(args)
        self.next_steps = self.every  # agent steps at which the next one is due
        self.started = self.finished = self.restarts = 0  # the last: of the evaluator
        self.has_failed = False  # no further evaluation in this start
        self.last: Evaluation | None = None
        self.best_mean = -math.inf
        self.best: dict[str, Any] = {}  # what the summary says of it

    def is_due(self, steps: int) -> bool:
        """Whether an evaluation should start at so many agent steps, if none is running."""
        return self.every > 0 and steps >= self.next_steps

    def start(self, steps: int) -> int:
        """Count an evaluation that starts, and set when the next is due; returns its number."""
        self.next_steps = self._multiple_after(steps)
        self.started += 1
        return self.started

    def record(self, evaluation: Evaluation, confirmed: bool = False) -> bool:
        """Count a result. Returns whether its mean return is the best so far, or as good; NaN never is.

        Args:
            evaluation: the result.
            confirmed: its weights have reached the goal in new games: it is the best, whatever its mean return.
        """
        self.finished, self.last = self.finished + 1, evaluation
        mean = evaluation.return_mean
        # Of equals the newest: it has learned for longer.
        is_best = confirmed or (math.isfinite(mean) and mean >= self.best_mean)
        if is_best:
            self.best, self.best_mean = evaluation.description, mean
        return is_best

    def restore_best(self, best: Mapping[str, Any] | None) -> None:
        """Take the description of an evaluation, if there is one, as that of the best, unless a better one is known."""
        if best and best["return_mean"] >= self.best_mean:
            self.best, self.best_mean = dict(best), best["return_mean"]

    @property
    def is_solved(self) -> bool:
        """Whether an evaluation has reached `--stop-eval-return`; the best checkpoint then has its weights."""
        return self.every > 0 and self.goal is not None and self.best_mean >= self.goal

    @property
    def best_text(self) -> str:
        """The best evaluation: `return 191.6, weights of 2,048 steps`."""
        return f"return {self.best_mean:.1f}, weights of {self.best['steps']:,} steps"

    def summary(self) -> dict[str, Any]:
        """Entries of `summary.json`; none where nothing is evaluated."""
        if not self.evaluates:
            return {}
        last = {} if self.last is None else self.last.description
        return {
            "eval_count": self.finished,
            **({"eval_seed": self.seed, "evaluator_restarts": self.restarts} if self.every else {}),
            **{f"eval_{name}": value for name, value in last.items()},
            **{f"eval_best_{name}": value for name, value in self.best.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        names = ("next_steps", "started", "finished", "restarts", "best")
        last = None if self.last is None else self.last._asdict()
        return {**{name: getattr(self, name) for name in names}, "last": last}

    def load_state_dict(self, state: Mapping[str, Any], steps: int) -> None:
        """Continue at so many agent steps; a checkpoint of an older version has an empty state."""
        self.started, self.finished = state.get("started", 0), state.get("finished", 0)
        self.restarts = state.get("restarts", 0)
        self.last = Evaluation(**state["last"]) if state.get("last") else None
        if self.every:
            soonest = self._multiple_after(steps)
            self.next_steps = min(state.get("next_steps") or soonest, soonest)  # it may be overdue
        self.restore_best(state.get("best"))

    def _multiple_after(self, steps: int) -> int:
        return (steps // self.every + 1) * self.every


def evaluation_seed(args: CommonArgs) -> int:
    """The seed of every evaluation of a run, the same each time and not used in training; for `play.py --seed`."""
    return derive_seeds(args.seed, 0, 0, EVALUATOR)[0]
