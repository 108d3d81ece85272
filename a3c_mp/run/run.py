"""A training run: its folder, signals, checkpoints, exit code and summary.

A chapter opens a `Run` in a `with` block, records rollouts and updates in it, and asks it when to stop.
However the block is left, a checkpoint and `summary.json` are written.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from a3c_mp._bootstrap import IGNORED_AT_START
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import A3CError, ConfigError, NothingToDo, WorkerError
from a3c_mp.maths.schedules import passes_power_of_two
from a3c_mp.processes.console import console
from a3c_mp.processes.learner_group import Stateful
from a3c_mp.processes.pool import WorkerEvent
from a3c_mp.processes.prints import prints
from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.run.averages import Timings
from a3c_mp.run.banner import first_lines
from a3c_mp.run.checkpointer import Checkpointer, TrainingState
from a3c_mp.run.display import hms, open_log
from a3c_mp.run.eval_progress import Evaluation
from a3c_mp.run.evaluate import MakePolicy, make_policy
from a3c_mp.run.evaluations import Evaluator
from a3c_mp.run.evaluator import evaluations_of
from a3c_mp.run.files import write_json
from a3c_mp.run.mean_return import short_return
from a3c_mp.run.metrics import MetricsWriter
from a3c_mp.run.preflight import check_evaluation, check_exploration, check_limits
from a3c_mp.run.progress import HasProgress, Progress
from a3c_mp.run.run_dir import claim_folder, describe_run, refuse_unwritable
from a3c_mp.run.summary import end_of, summarize
from a3c_mp.run.tracking import check_tracker

ENDINGS = {"total_steps": "--total-steps reached", "max_seconds": "--max-seconds reached"}
"""reason why a run has ended -> its name in the last line; others stay as they are"""
HOW_TO_GO_ON = {
    "total_steps": "a higher --total-steps",
    "solved": "a higher --stop-return (or --stop-eval-return, whichever was reached)",
}
"""reason after which nothing is left to do -> what lets the run go on"""


class Run(HasProgress):
    """The `RunState` of learner 0: a run in `runs_dir/run_name`, or the one that `--resume` names.

    Args:
        args: the chapter's settings.
        algorithm: name of the chapter, stored in checkpoints.
        net, optimizer: saved in checkpoints; on resume, restored from the newest one.
        extra: what else to save, by name; what the newest checkpoint lacks of it starts empty, with a warning.
        make_policy: makes the policy that is evaluated with `--eval-every`; by default that of an actor-critic net.
            None: `evaluate_with` will name an evaluator, and the run starts none.

    Raises:
        ConfigError: the folder cannot be made, written or resumed, or is in use; or the machine is too small.
        NothingToDo: the run to resume has ended.
    """

    def __init__(
        self, args: CommonArgs, algorithm: str, net: nn.Module, optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Stateful] | None = None, make_policy: MakePolicy | None = make_policy,
    ):  # fmt: skip
        check_evaluation(args)
        check_tracker(args)
        check_exploration(args)
        check_limits(args, net, shares_snapshots=make_policy is not None)
        self.args, self.algorithm = args, algorithm
        self.exit_code = 0
        self.exit_reason: str | None = None  # set where the run ends: by a signal, or by `finish`
        self._finished = self._unsaved = False
        self.folder, lock = claim_folder(args, algorithm)
        with ExitStack() as cleanup, refuse_unwritable(args, self.folder):
            cleanup.callback(lock.close)  # here if there is an error
            self.log = open_log(self.folder)
            self.progress = Progress(args)
            self.evaluations = evaluations_of(self, net, make_policy) if args.eval_every else None
            if self.evaluations is not None and self.evaluations.in_order:
                extra = {**(extra or {}), "evaluation": self.evaluations}
            self.state = TrainingState(net, optimizer, self.progress, extra or {}, self.log)
            self.checkpointer = Checkpointer(self.folder / "checkpoints", self.state, algorithm)
            self._refuse_ended()
            if args.resume is not None:
                self.log.info(f"resumed from {self.checkpointer.newest} at {self.steps:,} steps")
            self.metrics = MetricsWriter(self.folder, self.progress, self.log)
            if optimizer is not None:
                self.metrics.gauges["charts/learning_rate"] = lambda: optimizer.param_groups[0]["lr"]
            write_json(self.folder / "config.json", describe_run(args, algorithm, self.folder, self.steps))
            self._cleanup = cleanup.pop_all()
        # At the end of the last round: in the middle of one, no state is exact.
        self._round_steps, self._reason_to_stop = self.steps, self.progress.stop_reason()

    def _refuse_ended(self) -> None:
        """Raise NothingToDo if the run that is resumed has ended, also by the settings of this start."""
        reason = self.progress.stop_reason()
        if self.args.resume is not None and reason in HOW_TO_GO_ON and end_of(self.folder) == (reason, self.steps):
            what = f"{self.folder} has ended: {ENDINGS.get(reason, reason)} after {self.steps:,} steps"
            raise NothingToDo(f"{what}; {HOW_TO_GO_ON[reason]} lets it go on")

    def __enter__(self) -> Run:
        (self.folder / "summary.json").unlink(missing_ok=True)  # of an earlier start
        self.metrics.open()
        for signum in SIGNALS:
            if signum not in IGNORED_AT_START:  # nohup ignores SIGHUP
                old = signal.signal(signum, self._on_signal)
                self._cleanup.callback(signal.signal, signum, signal.SIG_DFL if old is None else old)
        self.log.info(f"{self.algorithm} on {self.args.env_id}, seed {self.args.seed}, in {self.folder}")
        if signal.SIGINT in IGNORED_AT_START:
            self.log.info("SIGINT is ignored, as whatever started this asked for it; SIGTERM ends the run")
        for line in first_lines(self.args, self.state.net, self.folder, self.steps):
            self.log.info(line)
        if self.evaluations is not None:
            self.log.info(self.evaluations.announcement)
        return self

    # ---- what the training loop calls

    @property
    def rng(self) -> torch.Generator:
        return self.state.rng

    @property
    def timing(self) -> Timings:
        return self.metrics.timing

    def should_stop(self) -> bool:
        """Whether a signal has arrived, or a stop rule is met."""
        return self.exit_reason is not None or self.progress.stop_reason() is not None

    def keep(self, **parts: Stateful) -> None:
        """Add what an exact resume needs to the checkpoints of a deterministic run; on resume, restore it."""
        if self.args.deterministic:
            self.state.keep(**parts)

    def record_rollout(self, steps: int, episodes: Sequence[Episode], actor: int, policy_lag: int) -> None:
        """Record agent steps that are learned from, the episodes that ended in them, and the policy lag in versions."""
        order = self.progress.window.games
        passed_over = order.passed_over
        self.metrics.record_rollout(policy_lag, self.progress.record_rollout(steps, episodes, actor, policy_lag))
        if passes_power_of_two(passed_over, number := order.passed_over):
            what = f"games still running after {order.long_limit:,} later ones ended: {number}"
            self.log.warning(f"{what}; the mean return does not wait for them")

    def record_metrics(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Record metrics, to be averaged until they are written."""
        self.metrics.record(metrics)

    def record_update(self, metrics: Mapping[str, Tensor | float], samples: int = 0) -> None:
        """Record an update of the weights, its metrics, and the samples it used, for charts/samples_per_second."""
        self.progress.record_update(samples)
        self.metrics.record_update(metrics)

    def on_restart(self, message: WorkerEvent) -> None:
        """Count and log the restart of an actor that died or hung, lost games, joins and leaves."""
        what, *details = message.text.splitlines()
        if self.args.deterministic and message.actor >= 0:  # -1: no actor's games are concerned
            rebuilt = "rebuilt to where it was" if message.replaced else "determinism is lost for the rest of this run"
            what += f"; {rebuilt}"
        level = logging.INFO if message.joined or message.left else logging.WARNING
        self.log.log(level, "\n".join([what, *details]))
        self.metrics.flush()  # raises if the loss is not finite: such weights kill actors
        self.metrics.record_games(self.progress.on_restart(message))
        self.progress.record_solved()

    def end_round(self) -> None:
        """Write metrics and checkpoints, and start evaluations, when they are due; called before slots are released."""
        if self.evaluations is not None and not self.evaluations.end_round():
            return
        self.progress.record_solved()
        self._round_steps, self._reason_to_stop = self.steps, self.progress.stop_reason()
        self.metrics.end_round()
        if self.checkpointer.is_due:
            self.metrics.flush()  # the files have what the checkpoint counts
            self.save()

    def save(self) -> None:
        """Write a checkpoint; a failure costs a warning, and the previous one stays."""
        self.metrics.sync_episodes()  # the file has every game that the checkpoint counts
        self.checkpointer.save()

    def evaluate_with(self, evaluator: Evaluator) -> None:
        """Have evaluations played by this evaluator, in a run without `make_policy`."""
        if self.evaluations is not None:
            self.evaluations.evaluator = evaluator

    # ---- what its evaluations call

    def is_interrupted(self) -> bool:
        """Whether a signal has arrived or the time is over, so that nothing is to be waited for."""
        return self.exit_reason is not None or self.progress.is_out_of_time

    def record_evaluation(self, evaluation: Evaluation, best_net: nn.Module | None) -> None:
        """Write the result of an evaluation, and the net that was evaluated if it is the best so far."""
        self.metrics.write_evaluation(evaluation)
        self.checkpointer.saved_steps = None  # the newest checkpoint lacks this result
        if best_net is not None:
            self.checkpointer.save_best(best_net, evaluation)

    # ---- the end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.finish(error)
        if self.evaluations is not None:
            self.evaluations.evaluator.close()
        self.report_end(error)
        self._cleanup.close()
        return isinstance(error, A3CError) and not isinstance(error, ConfigError)  # others keep their traceback

    def report_end(self, error: BaseException | None) -> None:
        """Close the files of metrics, and print and log how the run has ended; after `finish`."""
        self.metrics.close_files()
        prints.settle()
        self.metrics.display.close()
        self._log_end(error)
        console.drain()

    def finish(self, error: BaseException | None) -> None:
        """Set exit code and reason, and write the last metrics, checkpoint and summary; only the first call counts.

        Args:
            error: what ended the run, if anything did.
        """
        if self._finished:
            return
        self.metrics.clock.stop()
        reason = self.progress.stop_reason()
        reached_its_end = error is None and reason in HOW_TO_GO_ON
        evaluations = self.evaluations if reached_its_end and not self.is_interrupted() else None
        if evaluations is not None:
            evaluations.finish()
        self._finished = True
        self.progress.record_solved()
        if evaluations is not None:  # a signal, or the end of the time, has ended only the wait for them
            self.exit_reason = reason if self.progress.solved_at is None else "solved"
        self.exit_code = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}.get(self.exit_reason or "", 0)
        if error is not None:  # what was due before it happened; time may have run out because of it
            self.exit_reason = self.exit_reason or self._reason_to_stop
        if error is not None and self._is_failure(error):
            self.exit_code, self.exit_reason = 1, f"error: {error_summary(describe_error(error))}"
        self.exit_reason = self.exit_reason or self.progress.stop_reason()
        if reached_its_end and not self.updates and self._skipped():
            self.exit_code, self.exit_reason = 1, "error: no update, because of NaN or inf; see the warnings above"
            self.log.error(self.exit_reason)
        self._attempt("metrics", self.metrics.flush)
        if self.args.deterministic and self.steps != self._round_steps:
            self.log.warning("steps since the last round are not saved: --deterministic saves after whole rounds")
        elif not self.checkpointer.is_saved:
            self._attempt("checkpoint", self.save)
            self._unsaved = not self.checkpointer.is_saved
        if self._unsaved:
            self.exit_code = 1
        self._attempt("summary", lambda: write_json(self.folder / "summary.json", self.summary()))

    def _skipped(self) -> int:
        """How many rollouts, blocks and gradients were skipped because of NaN or inf."""
        counts = {name: count for name, count in self.counters.items() if name.endswith("_not_finite")}
        counts.pop("obs_moments_not_finite", None)  # what is learned from was there
        return sum(counts.values())

    def _is_failure(self, error: BaseException) -> bool:
        """Whether an error ended the run; after a signal, workers are lost because they received it too."""
        is_over = self.exit_reason is not None and not self.exit_reason.startswith("error: ")
        return not (is_over and isinstance(error, WorkerError))

    def _attempt(self, what: str, write: Callable[[], None]) -> None:
        """Write something at the end of a run; a failure (a full disk, a lost GPU) must not prevent the rest."""
        try:
            write()
        except Exception as error:
            self.log.warning(f"{what} not written: {error}")

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if not self._finished:
            self.exit_reason = signal.Signals(signum).name  # `should_stop` is called several times a second

    def _log_end(self, error: BaseException | None) -> None:
        printed = isinstance(error, ConfigError)  # by `exit_with`
        if error is not None and self._is_failure(error) and not printed:
            self.log.error(f"error: {describe_error(error)}")
        if self._unsaved:
            self.log.error(f"error: the state at {self.steps:,} steps was not saved; see the warning above")
        newest = self.checkpointer.newest
        if self.exit_code == 1 and newest is not None and newest.exists() and self.steps:
            self.log.error(f"the last checkpoint is {newest}; continue with {resume_command(self.folder)}")
        mean = f"mean return {short_return(self.progress.window.mean)}, " if self.progress.window.returns else ""
        if self.metrics.headline is not None:
            mean = ", ".join([*self.metrics.headline(), ""])
        reason = self.exit_reason or "ended"
        reason = "failed" if reason.startswith("error: ") else reason  # its text is a line of its own
        if reason == "solved" and self.progress.evals.is_solved:
            reason = f"solved by evaluation ({self.progress.evals.best_text})"
        self.log.info(
            f"{ENDINGS.get(reason, reason)} after {hms(self.progress.wall_seconds)}: {mean}{self.steps:,} steps, "
            f"{self.metrics.sps:,.0f} sps; in {self.folder}"
        )
        if self.exit_code > 128 or (self.exit_code == 0 and self.exit_reason == "max_seconds"):
            limit = "" if self.exit_code else f" for another {self.args.max_seconds:g} s (or --max-seconds none)"
            hint = f"continue{limit} with {resume_command(self.folder)}"
            self.log.info(hint if newest is not None else "nothing to resume: no checkpoint was due yet")

    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return summarize(self)


def resume_command(folder: Path) -> str:
    """The command that goes on with the run in a folder; for one of several ranks, what to add to their launcher's."""
    script, flag = sys.argv[0], f"--resume {shlex.quote(str(folder))}"
    if "WORLD_SIZE" in os.environ:
        return flag
    return f"python {shlex.quote(script)} {flag}" if script.endswith(".py") else f"{script} {flag}"


def describe_error(error: BaseException) -> str:
    """The text of an error for run.log."""
    return str(error) if isinstance(error, A3CError) and str(error) else f"{type(error).__name__}: {error}"


def error_summary(text: str) -> str:
    """First line of an error's text, for `exit_reason`; if a worker's traceback follows, with what was raised."""
    first, *rest = text.splitlines()
    frames = [number for number, line in enumerate(rest) if line.startswith('  File "')]
    raised = [line for line in rest[frames[-1] + 1 :] if not line.startswith(" ")][:1] if frames else []
    return " ".join([first if first.endswith(":") or not raised else f"{first}:", *raised])
