"""A run in this process: what its checkpoints hold beyond a net and an optimizer, and how it comes back."""

import inspect
import json
import os
import pickle
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gymnasium.spaces import Discrete
from harness import open_files
from torch import nn

from a3c_mp.algorithms.actor_critic_settings import PPOArgs
from a3c_mp.algorithms.apex_settings import Args as ApexArgs
from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.data.resume_states import ActorLayout
from a3c_mp.errors import ConfigError, NothingToDo, PeerLost, Stopped, WorkerError
from a3c_mp.maths.return_stats import ReturnStats
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.pool import Filled, WorkerEvent
from a3c_mp.processes.prints import prints
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.run import banner, checkpointer, display
from a3c_mp.run.banner import error_summary, note_on_cores, resume_command, settings_parts
from a3c_mp.run.checkpoint import list_checkpoints
from a3c_mp.run.display import open_log
from a3c_mp.run.learner import Acting, Learner, MessageStats, Setup
from a3c_mp.run.mean_return import MIN_EPISODES
from a3c_mp.run.progress import RunState
from a3c_mp.run.run import Run
from a3c_mp.run.script import RECEIVED

TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    raise ValueError("no")
"""

ON_CPU = Acting(torch.device("cpu"), torch.float32)


class Part(nn.Module):
    """Something else that a chapter keeps."""

    def __init__(self, value=0.0):
        super().__init__()
        self.register_buffer("value", torch.tensor(value))


class Misfit(Part):
    def load_state_dict(self, state):
        raise ValueError("it is of a replay of other sizes")


@pytest.fixture
def args(tmp_path):
    return CommonArgs(env_id="CartPole-v1", runs_dir=tmp_path, run_name="r")


def resumed(args):
    return replace(args, resume=args.runs_dir / "r")


def a_run(args, net=None, optimizer=torch.optim.Adam, **extra):
    net = net or nn.Linear(2, 2)
    groups = [{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": 0.2}]
    return Run(args, "test", net, optimizer(groups), extra)


def ten_steps(args, **extra):
    with a_run(args, **extra) as run:
        run.record_rollout(10, [], 0, 0)
    return run


def log_of(run):
    """What the newest start of a run has logged."""
    return (run.folder / "run.log").read_text().rpartition("resumed from")[2]


def test_a_signal_before_the_run_ends_it_also_where_its_exception_was_lost(args):
    RECEIVED.append(signal.SIGINT)
    with pytest.raises(Stopped, match="130"), a_run(args):
        pass
    assert not RECEIVED


def test_extra_parts_and_counters_come_back_and_what_a_checkpoint_lacks_starts_empty(args):
    with a_run(args, target=Part(3.0)) as run:
        run.record_rollout(64, [], actor=0, policy_lag=3)
        for _ in range(2):
            run.record_update({}, samples=32)
        run.counters["gradients_too_old"] += 2
        run.on_restart(WorkerEvent(0, "actor 0 (pid 1) was killed by SIGKILL"))
        run.checkpointer.optimizer.param_groups[1]["lr"] = 0.05
    found = {"target": Part(), "replay": Part(7.0)}
    with a_run(resumed(args), **found) as run:
        assert (run.steps, run.updates, run.progress.samples) == (64, 2, 64)
        assert (found["target"].value, found["replay"].value) == (3.0, 7.0)
        lrs = [group["lr"] for group in run.checkpointer.optimizer.param_groups]
        assert lrs == [0.1, 0.2], "flags given now count, for each group of parameters"
        run.counters.update(gradients_too_old=0, gradients_not_finite=0)
        run.record_rollout(64, [], actor=0, policy_lag=1)
        summary = run.summary()
    assert (summary["steps"], summary["worker_restarts"], summary["policy_lag_mean"]) == (128, 1, 2.0)
    assert (summary["gradients_too_old"], summary["gradients_not_finite"]) == (2, 0)
    assert "holds no replay: it starts empty" in (run.folder / "run.log").read_text()


def test_what_does_not_fit_is_bad_input_that_names_it_and_the_flags(tmp_path):
    args = PPOArgs(env_id="CartPole-v1", runs_dir=tmp_path, run_name="r")
    ten_steps(args, replay=Part())
    flags = "start a new run, restore the folder, or leave out flags that are new"
    now = replace(resumed(args), hidden=(3,), total_steps=5)
    for message, parts in (
        (rf"does not fit these settings: .*size mismatch for weight.*{flags}", {"net": nn.Linear(3, 2)}),
        ("does not fit these settings: it is of a replay of other sizes", {"replay": Misfit()}),
        ("it holds the state of another optimizer", {"optimizer": torch.optim.RMSprop}),
    ):
        with pytest.raises(ConfigError, match=message):
            a_run(now, **parts)
    with a_run(replace(now, total_steps=20)) as run:
        assert run.steps == 10, "the folder is free again"


@pytest.mark.parametrize(
    ("settings", "end", "more"),
    [
        ({"total_steps": 100}, "--total-steps reached after 100 steps; a higher --total-steps", {"total_steps": 200}),
        ({"stop_return": 5.0}, r"solved.* after 100 steps; a higher --stop-return", {"stop_return": 7.0}),
    ],
)
def test_a_run_that_has_ended_stays_as_it_is_unless_it_is_given_more_to_do(args, settings, end, more):
    args = replace(args, num_actors=1, num_envs=1, **settings)
    with a_run(args) as run:
        run.record_rollout(100, [Episode(6.0, 5)] * MIN_EPISODES, 0, 0)
        assert run.should_stop()

    def content():
        return {path.name: path.read_bytes() for path in run.folder.glob("*.*") if path.name != "run.log"}

    kept = content()
    with pytest.raises(NothingToDo, match=f"has ended: {end}"):
        a_run(resumed(args))
    assert content() == kept
    assert "resumed" not in (run.folder / "run.log").read_text()
    with a_run(replace(resumed(args), **more)) as again:
        assert not again.should_stop()
        assert not (run.folder / "summary.json").exists(), "it goes on"
    assert f"resumed from {again.checkpointer.newest} at 100 steps" in (run.folder / "run.log").read_text()


def test_a_run_whose_summary_was_not_written_writes_it_on_resume(args):
    args = replace(args, total_steps=100)
    with a_run(args) as run:
        run.record_rollout(100, [], 0, 0)
    older = '{"exit_reason": "total_steps", "steps": 50}'
    for content in (None, "[]", '{"exit_reason": "SIGTERM", "steps": 100}', older):
        (run.folder / "summary.json").unlink() if content is None else (run.folder / "summary.json").write_text(content)
        with a_run(resumed(args)) as again:
            assert again.should_stop()
        summary = json.loads((run.folder / "summary.json").read_text())
        assert (summary["exit_reason"], summary["steps"]) == ("total_steps", 100)


@pytest.mark.parametrize("change", [{"num_envs": 3}, {"deterministic": False}])
def test_a_checkpoint_of_other_actors_or_of_an_asynchronous_run_is_resumed_with_a_warning(args, change):
    args = replace(args, deterministic=True, num_actors=1, num_envs=2)
    with a_run(replace(args, **change)) as run:
        run.keep(actors=Part(3.0))
        run.record_rollout(10, [Episode(7.0, 5, env=1)], 0, 0)
        run.end_round()
    with a_run(resumed(args)) as run:
        run.keep(actors=(found := Part()))
        assert found.value == 0.0
        run.record_rollout(10, [Episode(5.0, 9, env=0)], 0, 0)
        assert list(run.progress.window.returns) == [5.0], "the game that had ended is lost with the one before it"
    assert "the run differs from one that was never interrupted" in log_of(run)


def test_the_log_says_at_the_start_what_is_trained_and_when_the_run_ends(tmp_path):
    args = PPOArgs(env_id="CartPole-v1", runs_dir=tmp_path, run_name="r", reward_clip=False, hidden=(8, 8))
    args = replace(args, stop_return=475.0, total_steps=50_000, eval_every=100, stop_eval_return=1.5)
    log = log_of(ten_steps(args))
    assert "Linear · 6 parameters · rewards as they are · lr 0.0005 -> 0\n" in log
    assert "the run ends at --total-steps 50,000 or --stop-return 475.0 or --stop-eval-return 1.5\n" in log
    assert f"actors: 2, with {args.num_envs} environments each" in log


@pytest.mark.parametrize(
    ("total_steps", "text"),
    [(50, "lr 0.0005 -> 0.0002"), (75, "lr 0.0005 -> 5e-05"), (100, "lr 0.0005 -> 5e-05 after 75 steps")],
)
def test_the_log_says_which_learning_rate_a_run_ends_with_and_where_rewards_are_clipped(total_steps, text):
    args = PPOArgs(total_steps=total_steps, learning_rate_end=5e-5, anneal_steps=75)
    assert settings_parts(args) == ["rewards clipped to -1, 0, 1 (--no-reward-clip: as they are)", text]
    assert settings_parts(args, 30)[-1] == f"{text}, 0.00032 now", "of a run that is resumed"
    assert settings_parts(replace(args, anneal_steps=0))[-1] == "lr 0.0005 -> 5e-05"
    assert settings_parts(ApexArgs())[-1] == "lr 0.00025"
    own = SimpleNamespace(learning_rate=1e-3, learning_rate_end=1e-4, entropy_coef_end=0.1, total_steps=100)
    assert settings_parts(own) == ["lr 0.001 -> 0.0001"], "a chapter of one's own may have a part of the settings"


@pytest.mark.parametrize(
    ("cores", "num_learners", "suggested"),
    [(2, 1, None), (4, 1, None), (5, 1, 4), (16, 1, 15), (16, 2, 14), (7, 3, None)],
)
def test_a_run_says_how_many_actors_would_use_the_cores(cores, num_learners, suggested, monkeypatch):
    monkeypatch.setattr(banner, "cores", lambda: cores)
    args = SimpleNamespace(local_actors=2, actors_flag="num-actors", local_learners=num_learners, cuda=True)
    text = f"; of {cores} cores most are idle, --num-actors {suggested} would use them" if suggested else ""
    assert note_on_cores(args) == text
    args.cuda = False
    assert note_on_cores(args) == text.replace(f"--num-actors {suggested} would", "a higher --num-actors may")


INCIDENTS = [
    (WorkerEvent(0, "actor 0 raised; restart 1 of 5\nTraceback:\nError"), "; rebuilt to where it was\nTraceback:", 1),
    (WorkerEvent(0, "actor 0 plays new games\nError", replaced=False), "; determinism is lost for the rest of", 0),
    (WorkerEvent(-1, "actor 1 waits for a place", replaced=False, left=True), "\n", 0),
]


@pytest.mark.parametrize(("event", "what", "restarts"), INCIDENTS)
def test_what_an_incident_means_for_a_deterministic_run_stands_before_the_traceback(args, event, what, restarts):
    with a_run(replace(args, deterministic=True)) as run:
        games = run.progress.window.state_dict()
        run.on_restart(event)
        assert run.progress.worker_restarts == restarts
        if event.actor < 0 or event.replaced:
            assert run.progress.window.state_dict() == games, "it plays on, or is no actor of this run"
    assert event.text.splitlines()[0] + what in log_of(run)


def test_the_log_keeps_what_children_print_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "PRINTED_LINES", 3)
    open_log(tmp_path)
    for number in range(5):
        prints.also(f"line {number}")
    lines = [line.split(" PRINTED ")[1] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert lines == ["line 0", "line 1", "further lines that child processes print are shown on the console only"]


def test_rates_begin_with_the_first_round_and_count_what_came_after_it(args, clock, monkeypatch):
    """A checkpoint right after the first round writes the curves too, but no rate over almost no time."""
    with a_run(args) as run:
        written = []
        monkeypatch.setattr(run.metrics, "write", lambda steps, points: written.append(points))
        run.metrics.gauges["replay/size"] = lambda: 123
        for actor in range(2):  # both have collected since before the first message came
            run.record_rollout(1000, [], actor, policy_lag=0)
        run.end_round()
        for seconds, steps in ((0.0625, 0), (5.0, 1000), (5.0, 1000)):
            clock[0] += seconds
            run.record_rollout(steps, [], 0, policy_lag=0)
            run.record_update({}, samples=4 * steps)
            run.metrics.flush()
        assert [point.get("charts/sps") for point in written] == [None, None, pytest.approx(1000 / 5.0625), 200]
        assert written[-1]["charts/samples_per_second"] == 800
        assert written[-1]["replay/size"] == 123
        assert run.metrics.clock.sps() == pytest.approx(2000 / 10.0625)
        lines = [run.metrics.progress_line(lag, sps=0.0) for lag in (1.0, float("nan"))]
        assert lines == ["return -  - sps  lag 1.0", "return -  - sps  lag -"]


def test_rates_have_the_wait_in_which_a_run_ends_but_not_what_comes_after_its_loop(args, clock):
    with a_run(args) as run:
        run.record_rollout(500, [], 0, policy_lag=0)
        run.end_round()  # the first starts the clock
        run.record_rollout(1000, [], 0, policy_lag=0)
        with run.timing("waiting"):  # for an actor that hangs, until a signal comes
            clock[0] += 300.0
        clock[0] += 50.0  # actors end
    assert run.summary()["sps"] == pytest.approx(1000 / 300, abs=0.05)


def test_checkpoints_are_written_by_the_clock_and_by_steps_where_asked(args, clock):
    with a_run(replace(args, checkpoint_seconds=60)) as run:
        saved = []
        for seconds in (1.0, 29.0, 32.0, 28.0):
            run.record_rollout(100, [], 0, 0)
            clock[0] += seconds
            run.end_round()
            saved.append(run.checkpointer.saved_steps)
    assert saved == [100, 100, 300, 300], "after the first round, and every 60 s from then on"
    with a_run(replace(args, checkpoint_steps=100, run_name="by steps")) as run:
        for _ in range(10):
            run.record_rollout(24, [], 0, 0)
            run.end_round()
    found = [int(path.stem[5:]) for path in list_checkpoints(run.folder / "checkpoints")]
    assert found == [240, 216, 120], "the last one is that of the end"


@pytest.mark.parametrize(
    ("script", "ranks", "command"),
    [
        ("train_a3c_data.py", None, "python train_a3c_data.py --resume 'runs/a run'"),
        ("a3c-mp train a3c_data", None, "a3c-mp train a3c_data --resume 'runs/a run'"),
        ("train_population.py", "2", "--resume 'runs/a run'"),  # accelerate and torchrun have flags of their own
    ],
)
def test_the_command_that_goes_on_is_as_the_run_was_started(script, ranks, command, monkeypatch):
    monkeypatch.setattr("sys.argv", [script, "--seed", "3"])
    monkeypatch.setattr("sys.orig_argv", ["python", script, "--seed", "3"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    assert resume_command(Path("runs/a run")) == command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("actor 0 is lost", "actor 0 is lost"),
        (f"actor 0 failed:\n{TRACEBACK}ValueError: no\n(raised by reset())", "actor 0 failed: ValueError: no (a.py:1)"),
        ("actor 0 failed:\nof old age", "actor 0 failed:"),
    ],
)
def test_the_reason_names_what_a_worker_raised(text, expected):
    assert error_summary(text) == expected


def test_a_run_is_solved_in_the_round_in_which_that_is_first_seen_and_stays_so(args):
    with a_run(replace(args, stop_return=5.0, num_actors=1, num_envs=1)) as run:
        run.record_rollout(100, [Episode(6.0, 5)] * MIN_EPISODES, 0, 0)
        assert run.should_stop()
        assert run.progress.solved_at is None, "a query changes nothing"
        run.end_round()
        run.record_rollout(50, [Episode(0.0, 5)] * MIN_EPISODES, 0, 0)
        assert run.should_stop()
    assert (run.exit_reason, run.exit_code, run.summary()["solved_at_steps"]) == ("solved", 0, 100)


@pytest.mark.parametrize(("total_steps", "learned"), [(10, True), (10, False), (100, True)])
def test_a_worker_that_is_lost_is_a_failure_unless_the_budget_was_spent_before_it(args, clock, total_steps, learned):
    with a_run(replace(args, total_steps=total_steps, max_seconds=60.0)) as run:
        run.record_rollout(10, [], 0, 0)
        if learned:
            run.end_round()
        clock[0] += 100  # meanwhile the time limit passes, too
        raise WorkerError("learner 1 (pid 1) is lost")
    is_over = learned and total_steps == 10
    expected = (0, "total_steps") if is_over else (1, "error: learner 1 (pid 1) is lost")
    assert (run.exit_code, run.exit_reason) == expected


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("no such key"), "error: KeyError: 'no such key' (test_run.py:{line})"),
        (SystemExit(3), "error: SystemExit: 3 (test_run.py:{line})"),
        (WorkerError("actor 0 (pid 1) is lost"), "error: actor 0 (pid 1) is lost"),
    ],
)
def test_whatever_ends_a_run_is_in_run_log(args, error, line):
    with suppress(KeyError, SystemExit), a_run(args) as run:
        run.record_rollout(10, [], 0, 0)
        line = line.format(line=inspect.currentframe().f_lineno + 1)
        raise error
    assert f" ERROR {line}\n" in log_of(run)
    assert f"the last checkpoint is {run.checkpointer.newest}" in log_of(run)
    assert (run.exit_code, run.summary()["exit_reason"]) == (1, line)
    prints.also("late")
    assert not [path for path in open_files() if path.startswith(str(run.folder))], "a program may train many times"


def test_the_net_of_the_highest_mean_return_is_kept_also_if_it_falls_before_the_next_checkpoint(args, monkeypatch):
    monkeypatch.setattr(checkpointer, "BEST_SECONDS", 0.0)
    with a_run(replace(args, num_actors=1, num_envs=1)) as run:
        for episode_return in (5.0, 9.0, 1.0):
            run.record_rollout(100, [Episode(episode_return, 5)] * 100, 0, 0)
            run.end_round()
        best = list_checkpoints(run.folder / "checkpoints", "best")[0]
        assert best.stem == "best_000000000200"
        assert set(torch.load(best, weights_only=True)["returns"]) == {9.0}
        assert run.progress.best_mean == 9.0
    assert list_checkpoints(run.folder / "checkpoints", "best")[0] == best, "the last one is worse"


def test_a_run_is_finished_once(args):
    with a_run(args) as run:
        run.record_rollout(10, [], 0, 0)
        run.exit_reason = "SIGINT"
        run.finish(None)
        written = (run.folder / "summary.json").stat().st_mtime_ns
        os.kill(os.getpid(), signal.SIGTERM)
        run.finish(KeyError("late"))
    assert (run.exit_code, run.exit_reason) == (130, "SIGINT")
    assert (run.folder / "summary.json").stat().st_mtime_ns == written
    assert run.checkpointer.newest is not None


def test_a_late_further_signal_ends_a_run_that_does_not_react(args, clock, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with a_run(args):
        for seconds, signum in ((0, signal.SIGTERM), (29, signal.SIGINT), (2, signal.SIGINT)):
            assert ended == []
            clock[0] += seconds
            os.kill(os.getpid(), signum)
        assert ended == [130]


def test_time_that_passes_while_a_run_ends_is_not_why_it_has_ended(args, clock):
    with a_run(replace(args, total_steps=10, max_seconds=60.0)) as run:
        run.record_rollout(10, [], 0, 0)
        run.end_round()
        clock[0] += 100
    assert (run.exit_code, run.exit_reason) == (0, "total_steps")


def test_the_time_limit_counts_from_the_first_rollout(args, clock):
    with a_run(replace(args, max_seconds=60.0)) as run:
        clock[0] += 100
        assert not run.should_stop()
        run.record_rollout(10, [], 0, 0)
        for seconds, over in ((59, False), (2, True)):
            clock[0] += seconds
            assert run.should_stop() == over


@pytest.mark.parametrize(
    ("has_data", "counter", "expected"),
    [
        (False, "blocks_not_finite", (1, "error: no update, because of NaN or inf; see the warnings above")),
        (True, "blocks_not_finite", (0, "max_seconds")),
        (True, "gradients_not_finite", (1, "error: no update, because of NaN or inf; see the warnings above")),
    ],
)
def test_a_run_of_nan_alone_has_failed_also_where_its_time_is_over(args, clock, has_data, counter, expected):
    with a_run(replace(args, max_seconds=60.0)) as run:
        run.count_time_from(clock[0] - 70)
        run.progress.has_data = has_data  # of chapter 3, say, that does not learn yet
        run.counters[counter] += 1
        assert run.should_stop()
    assert (run.exit_code, run.exit_reason) == expected


@pytest.mark.parametrize(
    ("starts", "expected"),
    [(1000, (0, "total_steps")), (32, (1, "error: no update, because of NaN or inf; see the warnings above"))],
)
def test_a_run_that_ends_before_learning_starts_has_not_failed_by_one_nan(args, starts, expected):
    args = ApexArgs(env_id=args.env_id, runs_dir=args.runs_dir, run_name="r", total_steps=1000, learning_starts=starts)
    with a_run(args) as run:
        run.record_rollout(1024, [], 0, 0)
        run.progress.has_data = True
        run.counters["blocks_not_finite"] += 1
    assert (run.exit_code, run.exit_reason) == expected


@pytest.mark.parametrize(("passed", "expected"), [(70, (0, "max_seconds")), (50, (1, "error: learner 1 is lost"))])
def test_in_a_restart_the_time_limit_counts_from_the_first_start(args, clock, passed, expected):
    with a_run(replace(args, max_seconds=60.0)) as run:
        run.count_time_from(clock[0] - passed)
        assert run.should_stop() == (passed > 60)
        if passed < 60:
            run.record_rollout(10, [], 0, 0)
            run.end_round()
            clock[0] += 5
            assert run.progress.seconds_left == 5
            run.record_rollout(10, [], 0, 0)
            assert run.metrics.clock.sps() == 2, "which counts from the first round of this one"
        raise PeerLost("learner 1 is lost")
    assert (run.exit_code, run.exit_reason) == expected


class Lost(LearnerGroup):
    """A group in which the other learner is lost when this one wants to know its messages."""

    def all_gather_object(self, message):
        raise PeerLost("gone")

    def broadcast_state(self, *parts):
        self.parts = getattr(self, "parts", ()) + parts


def test_a_peer_that_is_lost_in_the_middle_of_a_round_leaves_the_states_at_its_start(monkeypatch):
    """The checkpoint that is written then has the actors' states and the weights of one and the same round."""
    args, net = PPOArgs(num_actors=2), nn.Linear(1, 1)
    net.register_buffer("reward_scale", torch.ones(()))
    pool = SimpleNamespace(take=lambda should_stop, size: [Filled(0, 0, 0)])
    carrier = SimpleNamespace(share=lambda net, dtype, untrained: Weights(net), start=lambda *_, **options: pool)
    layout, slots = ActorLayout(Discrete(2), 8, {}), Slots({"x": ((1,), torch.float32)}, 1)
    optimizer, saved = torch.optim.SGD(net.parameters()), {"mine": object()}
    setup, tape = Setup(net, optimizer, slots, layout, ON_CPU, saved=saved), []
    for group, expected in ((LearnerGroup(), ["report"]), (Lost(0, 2), [])):
        learner = Learner(args, RunState(args, 0, steps=0, updates=0), setup, None, group, carrier)
        monkeypatch.setattr(learner.states, "read", lambda filled: ["report"] * len(filled))
        monkeypatch.setattr(learner.states, "advance", tape.extend)
        filled = learner.take()
        assert tape == expected, "a learner alone advances at once"
        tape.clear()
    assert group.parts[:3] == (net, optimizer, saved["mine"]), (
        "the others continue from what the first one has restored"
    )
    with pytest.raises(PeerLost):
        learner.record(filled, [MessageStats(8, [], 0, True)])
    assert tape == []


@pytest.mark.parametrize("reward_clip", [False, True])
def test_the_scale_of_rewards_follows_what_actors_send_and_leaves_out_what_is_not_finite(reward_clip):
    args, net = (
        PPOArgs(num_actors=2, num_envs=2, gamma=0.5, reward_scale=None, reward_clip=reward_clip, deterministic=True),
        nn.Linear(1, 1),
    )
    net.register_buffer("reward_scale", torch.ones(()))
    carrier = SimpleNamespace(share=lambda net, dtype, untrained: Weights(net), start=lambda *_, **options: None)
    setup = Setup(
        net, torch.optim.SGD(net.parameters()), Slots({"reward": ((2, 2), torch.float32)}, 50),
        ActorLayout(Discrete(2), 2, {}), ON_CPU, return_stats=ReturnStats(0.5, 2, 2, reward_clip), kept={},
    )  # fmt: skip
    setup.return_stats.open.fill_(7.0)  # of games that an exact resume could not restore
    learner = Learner(args, RunState(args, 0, steps=0, updates=0), setup, None, LearnerGroup(), carrier)
    messages = []
    learner.group.all_gather_object = lambda message: messages.append(pickle.dumps(message)) or [message]
    reward, done = setup.slots[3]["reward"], torch.tensor([[False, True], [True, True]])
    for rewards in ([[2.0, 8.0], [4.0, -8.0]], [[float("nan"), 1.0], [1.0, 1.0]]):
        reward.copy_(torch.tensor(rewards))
        learner.record([Filled(1, 3, 0)], [MessageStats(4, [], 0, True, (reward, done))])
    returns = torch.tensor([1.5, 1.0, 1.0, -1.0] if reward_clip else [4.0, 4.0, 8.0, -8.0])
    assert net.reward_scale.item() == pytest.approx(1 / returns.std(correction=0).item())
    assert not setup.return_stats.open.any()
    assert len(messages[0]) < 2000, "a message does not take the other slots along"
