"""Evaluation during training, on the side of the learner: when it is due, of which weights, and what its result means.

Nothing here knows how weights and results travel: that is an `Evaluator`, for instance the process in `evaluator.py`.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.errors import WorkerError
from a3c_mp.seeds import EVALUATOR, derive_seeds

if TYPE_CHECKING:
    from a3c_mp.run.progress import Progress

LAST_RESULT_SECONDS = 60.0
"""longest wait, at the end of a run, for an evaluation that is running"""


def evaluation_seed(args: CommonArgs) -> int:
    """The seed of every evaluation of a run, the same each time and not used in training; for `play.py --seed`."""
    return derive_seeds(args.seed, 0, 0, EVALUATOR)[0]


class PlayedGames(NamedTuple):
    """What an evaluator answers."""

    returns: list[float]  # raw, of each game in the order in which they ended
    lengths: list[int]  # agent steps of the same games
    weights_sha256: str  # of the weights that played, as `checkpoint.sha256_of_weights` computes it


class Evaluation(NamedTuple):
    """Result of an evaluation: whole games, all played with one snapshot of the weights; fields as in `PlayedGames`."""

    number: int  # of the run's evaluations, from 1
    steps: int  # agent steps of the run when the snapshot was taken
    returns: list[float]
    lengths: list[int]
    weights_sha256: str

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
    """Progress of a run's evaluations: how many, the best, when the next is due; a part of `Progress`."""

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
        """Whether an evaluation should start at this number of agent steps, if none is running."""
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
        """Continue at this number of agent steps."""
        self.started, self.finished, self.restarts = state["started"], state["finished"], state["restarts"]
        self.last = state["last"] and Evaluation(**state["last"])
        if self.every:
            soonest = self._multiple_after(steps)
            self.next_steps = min(state["next_steps"] or soonest, soonest)  # it may be overdue
        self.restore_best(state["best"])

    def _multiple_after(self, steps: int) -> int:
        return (steps // self.every + 1) * self.every


class Evaluator(Protocol):
    """Something that plays games with the weights that it is given, one snapshot at a time.

    All methods raise WorkerError once it has failed for good.
    """

    def start(self, net: nn.Module) -> None:
        """Start to play with a net on the CPU, which stays as it is until the games are returned."""

    def poll(self) -> PlayedGames | None:
        """Return the games once they are played, else None; does not wait."""

    def wait(self, seconds: float) -> PlayedGames | None:
        """Wait for the games, for at most `seconds`; None after that, or if a signal has asked the run to stop."""

    def close(self) -> None: ...


class Evaluations:
    """The evaluations of a run: hands out snapshots of its net, and records what comes back.

    A new evaluation starts when it is due and the last one has ended. Until then its snapshot is kept, so that the
    weights that played are those that are saved as the best checkpoint.

    In a deterministic run with `--stop-eval-return`, where a result can end the run, it counts at a reproducible step:
    when the next evaluation is due. There the learner waits for it, and a checkpoint holds the running snapshot.

    Args:
        progress, net, log: of the run.
        on_result: called with each evaluation, and with the net that played it if it is the best so far, else None.
    """

    def __init__(
        self, progress: Progress, net: nn.Module, log: logging.Logger,
        on_result: Callable[[Evaluation, nn.Module | None], None],
    ):  # fmt: skip
        self.progress, self.net, self.log, self.on_result = progress, net, log, on_result
        self.snapshot = copy.deepcopy(net).cpu().requires_grad_(False)
        self.evaluator: Evaluator | None = None  # set before the first round
        self.in_order = progress.args.evaluates_in_order
        self.running: tuple[int, int] | None = None  # number and steps of its snapshot
        self._is_handed_out = False  # the running one; not yet after a resume
        self._played: PlayedGames | None = None  # the answer, until it counts

    def end_round(self) -> bool:
        """Record a result that has arrived, and start the next evaluation when it is due; called after each round.

        Returns:
            whether all that belongs to this round is done: not if a signal has ended the wait for a result.

        Raises:
            WorkerError: the evaluator has failed for good, and with `--stop-eval-return` the run cannot go on.
        """
        evals, steps, evaluator = self.progress.evals, self.progress.steps, self.evaluator
        if evals.has_failed:
            return True
        assert evaluator is not None
        is_due = evals.is_due(steps)
        try:
            self._play(evaluator)
            if self._played is None:
                waits = self.in_order and is_due and self.running is not None
                self._played = evaluator.wait(math.inf) if waits else evaluator.poll()
                if waits and self._played is None:
                    return False
            if self._played is not None and (is_due or not self.in_order):
                self._record(self._played)
            if is_due and self.running is None and not evals.is_solved:
                self.snapshot.load_state_dict(self.net.state_dict())
                self.running = evals.start(steps), steps
                self._play(evaluator)
        except WorkerError as error:
            if evals.goal is not None:
                raise
            self.log.warning(f"no further evaluation in this run, training continues: {error}")
            evals.has_failed, self.running = True, None
            self.close()
        return True

    def finish(self) -> None:
        """Wait for the running evaluation at the end of a run, at most `LAST_RESULT_SECONDS`, and record it."""
        evaluator = self.evaluator
        if self.running is None or evaluator is None or self.progress.evals.has_failed:
            return
        name = f"evaluation {self.running[0]}"
        try:
            self._play(evaluator)
            self._played = self._played or evaluator.poll()
            if self._played is None:
                self.log.info(f"waiting for {name}, at most {LAST_RESULT_SECONDS:.0f} s (Ctrl-C ends the wait)")
                self._played = evaluator.wait(LAST_RESULT_SECONDS)
            if self._played is not None:
                self._record(self._played)
            else:
                self.log.warning(f"{name} has not ended; the run ends without it")
        except WorkerError as error:
            self.log.warning(f"without the evaluation that was running: {error}")

    def close(self) -> None:
        """End the evaluator."""
        if self.evaluator is not None:
            self.evaluator.close()

    @property
    def announcement(self) -> str:
        """A line that says what is evaluated, and how `play.py` does the same."""
        args, seed = self.progress.args, self.progress.evals.seed
        flags = f"--episodes {args.eval_episodes} --seed {seed}"
        flags += f" --max-steps {args.eval_max_steps}" * (args.eval_max_steps != CommonArgs.eval_max_steps)
        how = f"{args.eval_episodes} greedy games, as play.py {flags} plays them"
        return f"evaluation every {args.eval_every:,} steps: {how}"

    def state_dict(self) -> dict[str, Any]:
        """The running evaluation and its snapshot, for the exact resume of a run that is `in_order`."""
        net = self.snapshot.state_dict() if self.running is not None else {}
        return {"running": self.running and list(self.running), "net": net}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the evaluation that was running played again, from the next `end_round` on."""
        self.running = None
        if state["running"] is not None:
            self.snapshot.load_state_dict(state["net"])
            number, steps = state["running"]
            self.running = number, steps

    def _play(self, evaluator: Evaluator) -> None:
        """Give the snapshot of the running evaluation to the evaluator, unless it has it."""
        if self.running is not None and not self._is_handed_out:
            evaluator.start(self.snapshot)
            self._is_handed_out = True

    def _record(self, played: PlayedGames) -> None:
        assert self.running is not None
        evaluation = Evaluation(*self.running, played.returns, played.lengths, played.weights_sha256)
        self.running, self._played, self._is_handed_out = None, None, False
        is_best = self.progress.evals.record(evaluation)
        figures = "return {return_mean:.1f}, std {return_std:.1f}, length {length_mean:.0f}".format(
            **evaluation.figures
        )
        of = f"weights of {evaluation.steps:,} steps, {len(evaluation.returns)} games"
        longest = self.progress.args.eval_max_steps
        if num := sum(length >= longest for length in evaluation.lengths):
            of += f", of which {num} reached {longest:,} steps, where they are cut (--eval-max-steps)"
        self.log.info(f"evaluation {evaluation.number}: {figures}; {of}{'; the best so far' if is_best else ''}")
        self.on_result(evaluation, self.snapshot if is_best else None)
