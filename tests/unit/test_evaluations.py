"""Evaluation during training: when it is due, which weights play, what a result changes; processes as threads.

The same with real processes, kills and signals is in tests/process/test_evaluator.py.
"""

import math
import signal
from dataclasses import replace

import pytest
import torch
from harness import A3C_DATA, A3C_GRAD, CHAPTERS, CONTINUOUS, EVALUATED, TASK, row_id, scalars
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import WorkerError
from a3c_mp.population.settings import Args as PopulationArgs
from a3c_mp.run.checkpoint import list_checkpoints, sha256_of_weights
from a3c_mp.run.evaluation import Evaluations, PlayedGames
from a3c_mp.run.mean_return import MIN_EPISODES
from a3c_mp.run.progress import Progress
from a3c_mp.run.run import Run

ARGS = CommonArgs(eval_every=100, eval_episodes=3, num_actors=1, num_envs=1)
WITH_GOAL = replace(ARGS, stop_eval_return=6.0)
DETERMINISTIC = replace(ARGS, deterministic=True, stop_eval_return=50.0)
LOST = WorkerError("evaluator (pid 1) is lost")


class Scene:
    """A run of one weight, which is the number of agent steps, and its evaluator: a test says what that answers."""

    def __init__(self, log, args=ARGS):
        self.progress, self.net = Progress(args), nn.Linear(1, 1, bias=False)
        self.played, self.results, self.answer, self.tape = [], [], None, []
        self.evals = self.progress.evals
        self.log = log
        self.evals.attach(self)
        self.evals.evaluator = self

    def record_evaluation(self, steps, played, best_net):
        best = None if best_net is None else best_net.weight.item()
        self.results.append((steps, played.figures["return_mean"], best))

    def round(self, steps, answer=None):
        self.progress.steps, self.answer = steps, answer
        nn.init.constant_(self.net.weight, steps)
        return self.evals.end_round(steps)

    def start(self, net):
        self.played.append(net.weight.item())

    def poll(self):
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, seconds):
        self.tape.append(seconds)
        return self.poll()

    def close(self):
        self.tape.append("closed")


def games(mean, sha="0"):
    return PlayedGames([mean - 1.0, mean, mean + 1.0], [5, 6, 7], sha)


@pytest.fixture
def scene(log):
    return Scene(log)


def test_an_evaluation_starts_at_every_multiple_once_the_last_one_has_ended_and_the_net_that_played_is_the_best(scene):
    for steps in (30, 99, 130, 190, 260):
        scene.round(steps)
    assert scene.played == [130]
    scene.round(290, games(7.0))  # that of 200 is overdue
    scene.round(310, games(8.0))
    scene.round(350, games(4.0))
    assert scene.played == [130, 290, 310]
    assert scene.results == [(130, 7.0, 130), (290, 8.0, 290), (310, 4.0, None)]
    assert scene.evals.best_mean == 8.0


def test_the_goal_is_reached_by_an_evaluation_and_the_mean_return_of_training_decides_no_best(log):
    scene = Scene(log, WITH_GOAL)
    scene.progress.record_rollout(0, [Episode(99.0, 5)] * MIN_EPISODES, 0, 0)
    assert not scene.progress.is_best
    scene.round(100)
    scene.round(150, games(5.9))
    assert scene.progress.stop_reason() is None
    scene.round(200)
    scene.round(250, games(6.0))
    assert scene.progress.stop_reason() == "solved"
    scene.round(300)
    assert scene.played == [100, 200], "a solved run starts no further one"


def test_a_failed_evaluator_costs_a_warning_and_with_a_goal_the_run(scene, log, tape):
    scene.progress.record_rollout(0, [Episode(9.0, 5)] * MIN_EPISODES, 0, 0)
    scene.round(100)
    assert scene.progress.is_best, "until the first result training decides, as the run may end before"
    scene.round(110, games(math.nan))
    assert scene.progress.is_best, "nor does a result without a mean count"
    scene.evals.record(100, games(1.0))
    assert not scene.progress.is_best
    scene.round(200)
    scene.round(210, LOST)
    assert scene.progress.is_best, "from here on training decides"
    scene.progress.best_mean = scene.progress.state_dict()["best_mean"]  # as a checkpoint does
    assert not scene.progress.is_best, "it is no higher than it was"
    for steps in (250, 300):
        scene.round(steps)
    assert tape.messages == ["no further evaluation in this run, training continues: evaluator (pid 1) is lost"]
    assert (scene.played, scene.tape) == ([100, 200], ["closed"])
    scene = Scene(log, WITH_GOAL)
    scene.round(100)
    with pytest.raises(WorkerError, match="is lost"):
        scene.round(150, LOST)


def test_a_deterministic_run_with_a_goal_waits_for_each_result(log):
    scene = Scene(log, DETERMINISTIC)
    assert scene.round(90)
    assert scene.round(100, games(60.0))
    assert (scene.results, scene.tape) == ([(100, 60.0, 100)], [math.inf])
    assert scene.progress.stop_reason() == "solved"

    scene = Scene(log, DETERMINISTIC)
    assert not scene.round(100), "a signal ends the wait, and leaves the round open"
    assert (scene.played, scene.results) == ([100], [])


def test_a_resumed_run_counts_on_and_the_next_one_may_be_overdue():
    evals = Evaluations(ARGS)
    evals.record(130, PlayedGames([1.0, 3.0], [5, 7], "abc"))
    evals.next_steps = 200
    for steps in (170, 250):
        again = Evaluations(ARGS)
        again.load_state_dict(evals.state_dict(), steps)
        assert again.state_dict() == evals.state_dict()
        assert again.summary() == evals.summary()
    assert (again.next_steps, again.best_mean, again.summary()["eval_weights_sha256"]) == (200, 2.0, "abc")
    stricter = Evaluations(replace(ARGS, eval_episodes=50))
    stricter.load_state_dict(evals.state_dict(), 250)
    assert (stricter.best, stricter.last) == ({}, evals.last), "it was the best of other games"
    fittest = Evaluations(PopulationArgs(eval_episodes=ARGS.eval_episodes + 1))
    fittest.load_state_dict(evals.state_dict(), 250)
    assert fittest.best == {}
    off = Evaluations(CommonArgs())
    assert (off.summary(), off.end_round(10**9), off.is_solved) == ({}, True, False)


def test_the_best_has_the_highest_mean_that_is_a_number_or_was_confirmed_after_a_luckier_one():
    evals = Evaluations(ARGS)
    results = [(math.nan, False), (-math.inf, False), (2.0, False), (1.5, False), (1.5, True), (math.inf, False)]
    found = [evals.record(130, games(mean), confirmed=confirmed) for mean, confirmed in results]
    assert found == [False, False, True, False, True, False]
    assert evals.best_mean == 1.5


def test_the_end_of_a_run_waits_for_the_running_evaluation_and_no_longer_than_it_should(scene, tape):
    scene.evals.finish()
    scene.round(100)
    scene.progress.steps, scene.answer = 180, None
    scene.evals.finish()
    assert scene.results == []
    [seconds] = scene.tape
    assert seconds <= 60
    assert tape.messages[-1] == "evaluation 1 has not ended; the run ends without it"
    scene.answer = LOST
    scene.evals.finish()
    assert not scene.evals.has_failed, "it decides which of the checkpoints is the best"
    scene.answer = games(7.0)
    scene.evals.finish()
    assert scene.results == [(100, 7.0, 100)]
    assert len(scene.tape) == 1, "it had arrived"


@pytest.mark.parametrize("what", ["SIGTERM", "the time limit"])
@pytest.mark.parametrize(("mean", "reason"), [(4.0, "total_steps"), (6.0, "solved")])
def test_what_ends_the_wait_at_the_end_does_not_end_the_run_again(what, mean, reason, tmp_path, monkeypatch):
    settings = {"env_id": "CartPole-v1", "runs_dir": tmp_path, "run_name": "r", "total_steps": 1000}
    args = replace(WITH_GOAL, max_seconds=10.0, **settings)
    net = nn.Linear(1, 1)
    with Run(args, "test", net, torch.optim.SGD(net.parameters(), lr=0.1)) as run:

        def finish():
            if what == "SIGTERM":
                signal.raise_signal(signal.SIGTERM)
            else:
                run.progress.budget_since -= 20.0
            assert run.is_interrupted()
            run.progress.evals.record(100, games(mean))

        monkeypatch.setattr(run.progress.evals, "finish", finish)
        run.record_rollout(1000, [], 0, 0)
        run.end_round()
    assert (run.exit_code, run.exit_reason, run.summary()["solved"]) == (0, reason, reason == "solved")


# ---- whole runs of every chapter


@pytest.mark.parametrize("chapter", [*CHAPTERS, *CONTINUOUS], ids=row_id)
def test_a_run_is_evaluated_beside_its_training_and_play_repeats_its_best_games(run_inline, chapter):
    done = run_inline.train(chapter, *EVALUATED, "--total-steps", "1500")
    assert done.code == 0, done.err
    evals, curves = done.evals, scalars(done.folder)
    assert 1 <= evals["count"] <= 3
    for name in ("return_mean", "return_std", "length_mean"):
        points = {event.step: event.value for event in curves[f"eval/{name}"]}
        assert len(points) == evals["count"]
        assert points[evals["steps"]] == pytest.approx(evals[name])
        assert points[evals["best_steps"]] == pytest.approx(evals[f"best_{name}"])
    assert max(event.value for event in curves["eval/return_mean"]) == pytest.approx(evals["best_return_mean"])

    best = done.load(done.best)
    assert best["steps"] == evals["best_steps"]
    assert sha256_of_weights(best["net"]) == evals["best_weights_sha256"]
    played = run_inline("play.py", "runs/r", "--episodes", "10", "--seed", str(evals["seed"]))
    line = next(line for line in played.out.splitlines() if line.startswith("mean "))
    assert line.startswith(f"mean {evals['best_return_mean']:.2f}, standard deviation {evals['best_return_std']:.2f}, ")


@pytest.mark.parametrize("chapter", [A3C_DATA, TASK], ids=row_id)
def test_games_that_do_not_end_are_cut_in_evaluations_and_in_play(run_inline, chapter, register):
    opened, at_once = set(), []

    def __init__(self):
        opened.add(self)
        at_once.append(len(opened))

    changes = {"rest": (1.0, False, False, {}), "__init__": __init__, "close": lambda self: opened.discard(self)}
    register(changes=changes)
    cut = ["--eval-every", "100", "--eval-episodes", "3", "--eval-max-steps", "7", "--eval-envs", "1"]
    done = run_inline.train(chapter, "--env-id", "Custom-v0", *cut, "--total-steps", "300")
    assert done.code == 0, done.err
    assert done.evals["return_mean"] == done.evals["length_mean"] == 7.0
    assert "3 games, of which 3 reached 7 steps, where they are cut (--eval-max-steps)" in done.log
    line = next(line for line in done.log.splitlines() if "as play.py --episodes 3 " in line)
    assert line.endswith(" --max-steps 7 --num-envs 1 plays them")
    opened.clear()
    at_once.clear()
    played = run_inline("play.py", "runs/r", "--episodes", "3", "--max-steps", "7", "--num-envs", "1")
    assert set(at_once) == {1}
    assert "raw scores: 7 7 7" in played.out
    assert "3 of them reached 7 steps, where they are cut (--max-steps)" in played.out


def test_a_run_that_is_solved_by_evaluation_ends_with_the_weights_that_passed_and_can_go_on(run_inline, each_round):
    done = run_inline.train(A3C_DATA, *EVALUATED, "--stop-eval-return", "5", "--total-steps", "1000000")
    assert (done.code, done.summary["exit_reason"], done.summary["solved"]) == (0, "solved", True)
    assert done.evals["count"] == 1
    assert sha256_of_weights(done.load(done.best)["net"]) == done.evals["weights_sha256"]
    again = run_inline("train_a3c_data.py", "--resume", "runs/r")
    assert again.summary["steps"] == done.summary["steps"], "a solved run has nothing left to do"
    behind = []

    def compare(run):
        saved = torch.load(list_checkpoints(run.checkpointer.folder)[0], weights_only=True)["evals"]["best"]
        behind.append(saved != run.progress.evals.best)

    each_round(compare)
    flags = ["--stop-eval-return", "501", "--total-steps", str(done.summary["steps"] + 3000)]
    further = run_inline("train_a3c_data.py", "--resume", "runs/r", *flags)
    assert further.summary["exit_reason"] == "total_steps"
    assert further.evals["count"] > 1
    assert further.evals["best_return_mean"] >= done.evals["return_mean"]
    assert not any(behind), "the best evaluation is in the checkpoint of its round"


@pytest.mark.parametrize("chapter", [A3C_DATA, A3C_GRAD, TASK], ids=row_id)
def test_a_deterministic_run_is_solved_by_evaluation_at_the_same_step_each_time(run_inline, chapter):
    flags = [*EVALUATED, "--deterministic", "--stop-eval-return", "5", "--total-steps", "20000"]
    runs = [run_inline.train(chapter, *flags, name=name) for name in ("a", "b")]
    assert [run.code for run in runs] == [0, 0]
    first, second = (
        (run.summary["solved_at_steps"], run.summary["weights_sha256"], run.evals["weights_sha256"]) for run in runs
    )
    assert first == second
    assert 500 <= first[0] < 1000, "when the first evaluation was due: its result is waited for"
    assert runs[0].evals["count"] == 1
