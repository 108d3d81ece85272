"""A training run: its folder, signals, checkpoints, exit code and summary."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os.path import exists
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from a3c_mp._bootstrap import IGNORED_AT_START
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import A3CError, ConfigError, NothingToDo, WorkerError, shown
from a3c_mp.maths.schedules import passes_power_of_two
from a3c_mp.processes.console import console
from a3c_mp.processes.learner_group import Stateful
from a3c_mp.processes.pool import WorkerEvent
from a3c_mp.processes.prints import prints
from a3c_mp.processes.spawn import SIGNALS
from a3c_mp.run import run_dir
from a3c_mp.run.banner import ENDINGS, describe_error, end_lines, error_summary, first_lines
from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.checkpointer import Checkpointer
from a3c_mp.run.display import close_log, open_log
from a3c_mp.run.evaluation import PlayedGames
from a3c_mp.run.metrics import MetricsWriter
from a3c_mp.run.preflight import check_limits, check_settings
from a3c_mp.run.progress import Progress, RunState
from a3c_mp.run.script import raise_received

STUCK_SECONDS = 30.0  # after a signal, until a further one ends a run that is still not at its end
HOW_TO_GO_ON = {"total_steps": "--total-steps", "solved": "--stop-return or --stop-eval-return"}
"""reason after which nothing is left to do -> which setting, if raised, lets the run go on"""


class Run(RunState):
    """The `RunState` of learner 0, a `with` block: however it is left, a checkpoint and `summary.json` are written.

    Checkpoints hold net, optimizer and `extra`, by name; on resume, all are restored from the newest one, and what it
    lacks of `extra` starts empty, with a warning. `make_policy` makes the policy that is evaluated with
    `--eval-every`; a chapter that `evaluates_elsewhere` sets `progress.evals.evaluator` instead. Raises ConfigError if
    the folder cannot be made, written or resumed, or is in use, or the machine is too small; NothingToDo if the run to
    resume has ended.
    """

    def __init__(
        self, args: CommonArgs, algorithm: str, net: nn.Module, optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Stateful] | None = None, make_policy: Callable[..., Any] | None = None,
    ):  # fmt: skip
        check_settings(args)
        check_limits(args, net)
        self.args, self.algorithm, self.net = args, algorithm, net
        self.exit_reason: str | None = None  # set where the run ends: by a signal, or by `finish`
        self.error: BaseException | None = None  # that ended it
        self._signalled, self._is_saving = 0.0, False  # when the first signal came; a checkpoint is being written
        self.exit_code, self.failed, self.unsaved, self._finished = 0, False, False, False
        self._makes = not exists(args.runs_dir), not run_dir.has_files(args)
        self.progress = Progress(args)
        if args.eval_every:  # before there is a folder: a net of the user's own may be refused
            self.progress.evals.attach(self)
            if not args.evaluates_elsewhere:
                from a3c_mp.run import evaluate  # here, as most runs are not evaluated

                self.progress.evals.evaluator = evaluate.EvaluatorProcess(self, make_policy or evaluate.make_policy)
        with run_dir.claim_folder(args, algorithm) as (self.folder, self.lock, note, cleanup):
            self.log = open_log(self.folder)
            cleanup.callback(close_log, self.log)  # here if there is an error
            if note:
                self.log.warning(note)
            self.checkpointer = Checkpointer(self, optimizer, extra or {})
            if args.resume is not None:
                refuse_ended(self.folder, self.progress)
                self.log.info(f"resumed from {self.checkpointer.newest} at {self.steps:,} steps")
            self.metrics = MetricsWriter(self.folder, self.progress, self.log)
            self.rng, self.timing = self.checkpointer.rng, self.metrics.timing
            if optimizer is not None:
                self.metrics.gauges["charts/learning_rate"] = lambda: optimizer.param_groups[0]["lr"]
            described = run_dir.describe_run(args, algorithm, self.folder, self.steps)
            run_dir.write_json(self.folder / "config.json", described)
            if changed := run_dir.changed_settings(described["starts"]):
                self.log.info(f"changed: {', '.join(changed)}")
            self._cleanup = cleanup.pop_all()
        # At the end of the last round: in the middle of one, no state is exact.
        self._round_steps, self._reason_to_stop = self.steps, self.progress.stop_reason()

    def __enter__(self) -> Self:
        raise_received()
        self.metrics.open()  # a tracker may take long: until it has logged in, a signal ends the process at once
        (self.folder / "summary.json").unlink(missing_ok=True)  # of an earlier start
        for signum in {*SIGNALS} - IGNORED_AT_START if threading.current_thread() is threading.main_thread() else ():
            old = signal.signal(signum, self._on_signal)  # nohup ignores SIGHUP
            self._cleanup.callback(signal.signal, signum, signal.SIG_DFL if old is None else old)
        self.log.info(f"{self.algorithm} on {self.args.env_id}, seed {self.args.seed}, in {self.folder}")
        if signal.SIGINT in IGNORED_AT_START:
            self.log.info("SIGINT is ignored, as whatever started this asked for it; SIGTERM ends the run")
        for line in first_lines(self.args, self.net, self.steps):
            self.log.info(line)
        return self

    def count_time_from(self, since: float | None) -> None:
        """Let `--max-seconds` count from then on (`time.monotonic`), in a restart; None: from the first rollout on."""
        self.progress.budget_since = since
        self._reason_to_stop = self.progress.stop_reason()

    def should_stop(self) -> bool:
        return self.exit_reason is not None or self.progress.stop_reason() is not None

    def keep(self, **parts: Stateful) -> None:
        if self.args.deterministic:
            self.checkpointer.keep(**parts)

    def record_rollout(self, steps: int, episodes: Sequence[Episode] | None, actor: int, policy_lag: int) -> None:
        window = self.progress.window
        before = len(window.endless)
        self.metrics.record_rollout(policy_lag, self.progress.record_rollout(steps, episodes, actor, policy_lag))
        if passes_power_of_two(before, number := len(window.endless)):
            which = f"environment {window.endless[-1][1]} of {self.args.actor_name} {window.endless[-1][0]}"
            what = f"a game in {which} still runs after {window.long_limit:,} later ones began"
            self.log.warning(f"{what}; the mean return does not wait for it ({number} such games so far)")

    def record_metrics(self, metrics: Mapping[str, Tensor | float]) -> None:
        self.metrics.record(metrics)

    def record_update(self, metrics: Mapping[str, Tensor | float], samples: int = 0) -> None:
        self.progress.record_update(samples)
        self.metrics.record_update(metrics)

    def on_restart(self, event: WorkerEvent) -> None:
        """Count and log the restart of an actor that died or hung, lost games, joins and leaves."""
        what, *details = event.text.splitlines()
        if self.args.deterministic and event.actor >= 0:  # -1: no actor's games are concerned
            rebuilt = "rebuilt to where it was" if event.replaced else "determinism is lost for the rest of this run"
            what += f"; {rebuilt}"
        self.log.log(logging.INFO if event.joined or event.left else logging.WARNING, "\n".join([what, *details]))
        self.metrics.flush()  # raises if the loss is not finite: such weights kill actors
        self.metrics.record_games(self.progress.on_restart(event))
        self.progress.record_solved()

    def end_round(self) -> None:
        """Write metrics and checkpoints, and start evaluations, when they are due; called before slots are released."""
        if not self.progress.evals.end_round(self.steps):
            return
        self.progress.record_solved()
        self._round_steps, self._reason_to_stop = self.steps, self.progress.stop_reason()
        self.metrics.end_round()
        if self.checkpointer.is_due:
            self.metrics.flush()  # the files have what the checkpoint counts
            self.save()
        self.checkpointer.save_highest()

    def save(self) -> None:
        self._is_saving = True
        self.metrics.episode_log.flush(sync=True)  # the file has every game that the checkpoint counts
        self.checkpointer.save()
        self._is_saving = False

    def is_interrupted(self) -> bool:
        """Whether a signal has arrived or the time is over, so that nothing is to be waited for."""
        return self.exit_reason is not None or self.progress.seconds_left <= 0

    def record_evaluation(self, steps: int, games: PlayedGames, best_net: nn.Module | None) -> None:
        """Write the result of an evaluation, and the net that was evaluated if it is the best so far."""
        self.metrics.write(steps, {f"eval/{name}": value for name, value in games.figures.items()})
        self.checkpointer.saved_steps = None  # the newest checkpoint lacks this result
        if best_net is not None:
            self.checkpointer.save_best(best_net, steps)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.finish(error)
        if (evaluator := self.progress.evals.evaluator) is not None:
            evaluator.close()
        self.metrics.close_files()
        prints.settle()
        self.metrics.display.close()
        for level, line in end_lines(self, error) if self._is_kept else ():
            self.log.log(level, line)
        console.drain()
        if not self._is_kept:  # nothing was learned: a new folder would be in the way of another start
            run_dir.discard_folder(self.folder, self.lock, *self._makes)
        self._cleanup.close()
        return isinstance(error, A3CError) and not isinstance(error, ConfigError)  # others keep their traceback

    def finish(self, error: BaseException | None) -> None:
        """Set exit code and reason, and write the last metrics, checkpoint and summary; only the first call counts."""
        if self._finished:
            return
        self.metrics.clock.stopped = self.timing.ended  # what comes after the training loop is in no rate
        reason = self.progress.stop_reason()
        reached_its_end = error is None and reason in HOW_TO_GO_ON
        if reached_its_end and self.args.eval_every and not self.is_interrupted():
            self.progress.evals.finish()
            # A signal, or the end of the time, has ended only the wait.
            self.exit_reason = "solved" if self.progress.stop_reason() == "solved" else reason
        self._finished, self.error = True, error
        self._is_kept = not isinstance(error, ConfigError) or self.steps > 0 or self.args.resume is not None
        self.progress.record_solved()
        if error is not None:  # what was due before it happened; time may have run out because of it
            self.exit_reason = self.exit_reason or self._reason_to_stop
            # After a signal, workers are lost because they received it too.
            self.failed = self.exit_reason is None or not isinstance(error, WorkerError)
        self.exit_code = {signum.name: 128 + signum for signum in SIGNALS}.get(self.exit_reason or "", 0)
        if error is not None and self.failed:
            self.exit_code, self.exit_reason = 1, f"error: {error_summary(describe_error(error))}"
        elif not self.exit_code and self.progress.learned_nothing(reached_its_end):
            self.exit_code, self.exit_reason = 1, "error: no update, because of NaN or inf; see the warnings above"
            self.log.error(self.exit_reason)
        self.exit_reason = self.exit_reason or self.progress.stop_reason()
        self._attempt("metrics", self.metrics.flush)
        if self.args.deterministic and self.steps != self._round_steps:
            since = f" since {self.checkpointer.newest.stem}" if self.checkpointer.newest else ""
            self.log.warning(f"steps{since} are not saved: --deterministic saves after whole rounds")
        elif self._is_kept and self.checkpointer.saved_steps != self.steps:
            self._attempt("checkpoint", self.save)
            self.unsaved = self.checkpointer.saved_steps != self.steps
            self.exit_code = 1 if self.unsaved else self.exit_code
        self._attempt("summary", lambda: run_dir.write_summary(self.folder, self.lock, self.summary()))

    def _attempt(self, what: str, write: Callable[[], None]) -> None:
        """Write something at the end of a run; a failure (a full disk, a lost GPU) must not prevent the rest."""
        try:
            write()
        except Exception as error:
            self.log.warning(f"{what} not written: {error}")

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._finished:
            return
        self.exit_reason = signal.Signals(signum).name  # `should_stop` is called several times a second
        self._signalled = self._signalled or time.monotonic()
        if time.monotonic() > self._signalled + STUCK_SECONDS and not self._is_saving:
            os._exit(128 + signum)  # a step of an environment, or a loss of one's own, may never end

    def summary(self) -> dict[str, Any]:
        end = {"sps": round(self.metrics.clock.sps(), 1), "exit_reason": self.exit_reason}
        return self.progress.summary() | end | {"weights_sha256": sha256_of_weights(self.net.state_dict())}


def refuse_ended(folder: Path, progress: Progress) -> None:
    """Raise NothingToDo if the run that is resumed has ended, also by the settings of this start."""
    reason = progress.stop_reason()
    with suppress(OSError, ValueError, LookupError, TypeError):  # there is no summary that can be read
        summary = json.loads((folder / "summary.json").read_text())
        if reason in HOW_TO_GO_ON and (summary["exit_reason"], summary["steps"]) == (reason, progress.steps):
            what = f"{folder} has ended: {ENDINGS.get(reason, reason)} after {progress.steps:,} steps"
            other = "" if "stop_eval_return" in vars(progress.args) else " or --stop-eval-return"
            raise NothingToDo(shown(f"{what}; a higher {HOW_TO_GO_ON[reason].removesuffix(other)} lets it go on"))
