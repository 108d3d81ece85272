"""Evaluation during training, on the side of the learner: when it is due, of which weights, and what its result means.

Nothing here knows how weights and results travel: that is an `Evaluator`, for instance the process in `evaluate.py`.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.errors import WorkerError
from a3c_mp.run.mean_return import short_return
from a3c_mp.seeds import EVALUATOR, derive_seeds

LAST_RESULT_SECONDS = 60.0  # longest wait, at the end of a run, for an evaluation that is running


def evaluation_seed(args: CommonArgs) -> int:
    """The seed of every evaluation of a run, not used in training; for `play.py --seed`."""
    return derive_seeds(args.seed, 0, 0, EVALUATOR)[0]


class PlayedGames(NamedTuple):
    """What an evaluator answers: whole games, all played with one snapshot of the weights."""

    returns: list[float]  # raw, of each game in the order in which they ended
    lengths: list[int]  # agent steps of the same games
    weights_sha256: str  # of the weights that played, as `checkpoint.sha256_of_weights` computes it

    @property
    def figures(self) -> dict[str, float]:
        """Mean and standard deviation of the returns, mean length; as `play.py` computes them."""
        returns, lengths, _ = self
        with np.errstate(invalid="ignore"):  # infinite returns have no deviation
            mean, std, length = np.mean(returns), np.std(returns), np.mean(lengths)
        return {"return_mean": float(mean), "return_std": float(std), "length_mean": float(length)}


class Evaluator(Protocol):
    """Plays games with one snapshot of weights at a time; all methods raise WorkerError once it has failed for good."""

    def start(self, net: nn.Module) -> None: ...  # a net on the CPU, which does not change until the games are returned
    def poll(self) -> PlayedGames | None: ...  # None until they are played
    def wait(self, seconds: float) -> PlayedGames | None: ...  # None after that time, or at the end of a run
    def close(self) -> None: ...


class Evaluations:
    """The evaluations of a run: hands out snapshots of its net, and records what comes back; a part of `Progress`.

    A new one starts when it is due and the last one has ended. In a deterministic run with `--stop-eval-return`, where
    a result can end the run, it counts at a reproducible step: the learner waits for it.
    """

    SAVED = ("next_steps", "finished", "restarts", "last", "best")  # in checkpoints

    def __init__(self, args: CommonArgs):
        self.args, self.every, self.goal = args, args.eval_every, args.stop_eval_return
        self.decides = self.every > 0 or args.has_fitness  # which checkpoint is the best
        self.in_order = args.deterministic and self.goal is not None  # a result counts at a fixed step
        self.evaluator: Evaluator | None = None
        self.next_steps = self.every  # agent steps at which the next one is due
        self.finished = self.restarts = 0  # the latter: of the evaluator
        self.has_failed = False  # no further evaluation in this start
        self.last, self.best = dict[str, Any](), dict[str, Any]()  # results in plain values, without the single games
        self.running: int | None = None  # agent steps of the snapshot that plays

    def attach(self, run: Any) -> None:
        """Evaluate the net of a `Run`, which records the results; `snapshot` is a copy of that net on the CPU."""
        self.run, self.snapshot = run, copy.deepcopy(run.net).cpu().requires_grad_(False)

    @property
    def decides_now(self) -> bool:
        """Whether evaluations decide by now: without a goal, training does until one has a finite mean return."""
        return self.decides and (self.every == 0 or self.goal is not None or bool(self.best))

    def record_restart(self, text: str) -> None:
        """Record that the evaluator has been replaced, and why."""
        self.restarts += 1
        self.run.log.warning(text)

    def end_round(self, steps: int) -> bool:
        """Record a result that has arrived, and start the next evaluation when it is due; called after each round.

        Returns False if a signal or the end of the time ended the wait for a result: then the round is not complete.
        Raises WorkerError if the evaluator has failed for good, and with `--stop-eval-return` the run cannot go on.
        """
        if self.has_failed or self.evaluator is None:
            return True
        try:
            if self.running is not None:
                self._end(self.evaluator.poll())
            if steps >= self.next_steps and self.running is None and not self.is_solved:
                self.snapshot.load_state_dict(self.run.net.state_dict())
                self.next_steps, self.running = self._multiple_after(steps), steps
                self.evaluator.start(self.snapshot)
                if self.in_order:
                    return self._end(self.evaluator.wait(math.inf))
        except WorkerError as error:
            if self.goal is not None:
                raise
            self.run.log.warning(f"no further evaluation in this run, training continues: {error}")
            self.has_failed, self.running = True, None
            self.evaluator.close()
        return True

    def finish(self) -> None:
        """Wait for the running evaluation at the end of a run, at most `LAST_RESULT_SECONDS`, and record it."""
        if self.running is None or self.evaluator is None:
            return
        name = f"evaluation {self.finished + 1}"
        try:
            if self._end(self.evaluator.poll()):
                return
            self.run.log.info(f"waiting for {name}, at most {LAST_RESULT_SECONDS:.0f} s (Ctrl-C ends the wait)")
            if not self._end(self.evaluator.wait(LAST_RESULT_SECONDS)):
                self.run.log.warning(f"{name} has not ended; the run ends without it")
        except WorkerError as error:
            self.run.log.warning(f"without the evaluation that was running: {error}")

    def _end(self, games: PlayedGames | None) -> bool:
        """Record the games of the evaluation that was running; returns whether there are any."""
        if games is None:
            return False
        steps, self.running = self.running, None
        assert steps is not None
        is_best = self.record(steps, games)
        mean, std, length = games.figures.values()
        of = f"weights of {steps:,} steps, {len(games.returns)} games"
        longest = self.args.eval_max_steps
        if num := sum(length >= longest for length in games.lengths):
            of += f", of which {num} reached {longest:,} steps, where they are cut (--eval-max-steps)"
        figures = f"return {short_return(mean)}, std {short_return(std)}, length {length:.0f}; {of}"
        self.run.log.info(f"evaluation {self.finished}: {figures}{'; the best so far' if is_best else ''}")
        self.run.record_evaluation(steps, games, self.snapshot if is_best else None)
        return True

    def record(self, steps: int, games: PlayedGames, confirmed: bool = False) -> bool:
        """Count a result. Returns whether it is the best so far: if `confirmed` in new games, or by its mean return."""
        self.finished += 1
        self.last = {"steps": steps, **games.figures, "weights_sha256": games.weights_sha256}
        mean = self.last["return_mean"]  # of equals the newest is the best: it has learned for longer
        is_best = confirmed or (math.isfinite(mean) and mean >= self.best_mean)
        if is_best:
            self.best = self.last
        return is_best

    @property
    def best_mean(self) -> float:
        return float(self.best.get("return_mean", -math.inf))

    @property
    def is_solved(self) -> bool:
        """Whether an evaluation has reached `--stop-eval-return`; the best checkpoint then has its weights."""
        return self.every > 0 and self.goal is not None and self.best_mean >= self.goal

    def summary(self) -> dict[str, Any]:
        """Entries of `summary.json`; none where nothing is evaluated."""
        if not self.decides:
            return {}
        own = {"eval_seed": evaluation_seed(self.args), "evaluator_restarts": self.restarts} if self.every else {}
        results = {f"eval_{name}": value for name, value in self.last.items()}
        results |= {f"eval_best_{name}": value for name, value in self.best.items()}
        return {"eval_count": self.finished, **own, **results}

    def state_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.SAVED}, "games": self._games}

    @property
    def _games(self) -> list[int]:
        """What a result must have in common with another one to be compared with it."""
        games = [self.args.eval_episodes, self.args.eval_max_steps, evaluation_seed(self.args)]
        return games if self.args.eval_envs == CommonArgs.eval_envs else [*games, self.args.eval_envs]

    def load_state_dict(self, state: Mapping[str, Any], steps: int) -> None:
        """Continue at this number of agent steps; the best result is forgotten if evaluations have other games now."""
        for name in self.SAVED:
            setattr(self, name, state[name])
        if self.decides:
            self.best = self.best if state.get("games", self._games) == self._games else {}
        if self.every:
            soonest = self._multiple_after(steps)
            self.next_steps = min(self.next_steps or soonest, soonest)  # it may be overdue

    def _multiple_after(self, steps: int) -> int:
        return (steps // self.every + 1) * self.every
