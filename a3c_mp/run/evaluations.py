"""Evaluation during training, on the side of the learner: when it is due, of which weights, and what its result means.

Nothing here knows how weights and results travel: that is an `Evaluator`, for instance the process in `evaluator.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.errors import WorkerError
from a3c_mp.run.eval_progress import Evaluation
from a3c_mp.run.progress import Progress

LAST_RESULT_SECONDS = 60.0
"""longest wait, at the end of a run, for an evaluation that is running"""


class PlayedGames(NamedTuple):
    """What an evaluator answers: the games, and the weights that played them (see `Evaluation`)."""

    returns: list[float]
    lengths: list[int]
    weights_sha256: str


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


class NoEvaluator:
    """Stands in until `Run.evaluate_with` names the evaluator; plays nothing."""

    def start(self, net: nn.Module) -> None:
        raise WorkerError("the run has no evaluator: call evaluate_with first")

    def poll(self) -> PlayedGames | None:
        return None

    def wait(self, seconds: float) -> PlayedGames | None:
        return None

    def close(self) -> None:
        pass


class Evaluations:
    """The evaluations of a run: hands out snapshots of its net, and records what comes back.

    A new evaluation starts when it is due and the last one has ended. Until then its snapshot is kept, so that the
    weights that played are those that are saved as the best checkpoint.

    In a deterministic run with `--stop-eval-return`, where a result can end the run, it counts at a reproducible step:
    when the next evaluation is due. There the learner waits for it, and a checkpoint holds the running snapshot.

    Args:
        progress: of the run.
        net, snapshot: of the run, and a copy of it on the CPU.
        evaluator: plays.
        on_result: called with each evaluation, and with the net that played it if it is the best so far, else None.
        log: where results and failures go.
    """

    def __init__(
        self, progress: Progress, net: nn.Module, snapshot: nn.Module, evaluator: Evaluator,
        on_result: Callable[[Evaluation, nn.Module | None], None], log: logging.Logger,
    ):  # fmt: skip
        self.progress, self.net, self.snapshot, self.evaluator = progress, net, snapshot, evaluator
        self.on_result, self.log = on_result, log
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
        if self.progress.evals.has_failed:
            return True
        evals, steps = self.progress.evals, self.progress.steps
        is_due = evals.is_due(steps)
        try:
            self._play()
            if self._played is None:
                waits = self.in_order and is_due and self.running is not None
                self._played = self.evaluator.wait(math.inf) if waits else self.evaluator.poll()
                if waits and self._played is None:
                    return False
            if self._played is not None and (is_due or not self.in_order):
                self._record(self._played)
            if is_due and self.running is None and not evals.is_solved:
                self.snapshot.load_state_dict(self.net.state_dict())
                self.running = evals.start(steps), steps
                self._play()
        except WorkerError as error:
            if evals.goal is not None:
                raise
            self._give_up(error)
        return True

    def finish(self) -> None:
        """Wait for the running evaluation at the end of a run, at most `LAST_RESULT_SECONDS`, and record it."""
        if self.running is None or self.progress.evals.has_failed:
            return
        try:
            self._play()
            self._played = self._played or self.evaluator.poll()
            if self._played is None:
                name, limit = f"evaluation {self.running[0]}", f"at most {LAST_RESULT_SECONDS:.0f} s"
                self.log.info(f"waiting for {name}, {limit} (Ctrl-C ends the wait)")
                self._played = self.evaluator.wait(LAST_RESULT_SECONDS)
            if self._played is not None:
                self._record(self._played)
            else:
                self.log.warning(f"evaluation {self.running[0]} has not ended; the run ends without it")
        except WorkerError as error:
            self.log.warning(f"without the evaluation that was running: {error}")

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

    def _play(self) -> None:
        """Give the snapshot of the running evaluation to the evaluator, unless it has it."""
        if self.running is not None and not self._is_handed_out:
            self.evaluator.start(self.snapshot)
            self._is_handed_out = True

    def _record(self, played: PlayedGames) -> None:
        assert self.running is not None
        number, steps = self.running
        evaluation = Evaluation(number, steps, played.returns, played.lengths, played.weights_sha256)
        self.running = self._played = None
        self._is_handed_out = False
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

    def _give_up(self, error: WorkerError) -> None:
        self.log.warning(f"no further evaluation in this run, training continues: {error}")
        self.progress.evals.has_failed, self.running = True, None
        self.evaluator.close()
