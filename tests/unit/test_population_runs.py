"""Runs of a population from beginning to end, members as threads or forked processes.

The same with spawned processes and several ranks is in process/test_generations.py.
"""

import csv
import math
import os
import signal
import time
from pathlib import Path

import pytest
from envs import EPISODE_LENGTH
from harness import POPULATION, scalars, with_changes
from inline import InlineWorkers

import train_population
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError
from a3c_mp.population import generations, member
from a3c_mp.population.population import COUNTS
from a3c_mp.run.display import Display

GOAL = sum(range(EPISODE_LENGTH))
COUNT = ["--env-id", "envs:Count-v0", "--stop-return", str(GOAL), "--eval-episodes", "5"]
"""every game of it reaches the goal"""


def lineage(done):
    with (done.folder / "lineage.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_fitness_is_confirmed_in_new_games_and_steps_of_all_games_are_counted(run_inline):
    done = run_inline.train(POPULATION, *COUNT)
    assert (done.code, done.summary["exit_reason"], done.summary["solved"]) == (0, "solved", True)
    assert (done.summary["steps"], done.summary["evaluation_steps"]) == (400, (2 * 5 + 100) * EPISODE_LENGTH)
    assert f" confirmed: mean return {GOAL:.1f} in 100 new games" in done.log


def test_a_confirmation_with_a_bad_game_or_one_that_failed_does_not_count(run_inline, monkeypatch):
    play, bad = member.play_episodes, [[Episode(math.nan, 1)] * 100, [Episode(0.0, 1)], [Episode(math.inf, 1)], []]

    def changed(policy, env, num, *others):
        games = list(play(policy, env, num, *others))
        return [*(found := bad.pop(0)), *games[len(found) :]] if num == 100 else games

    monkeypatch.setattr(member, "play_episodes", changed)
    done = run_inline.train(POPULATION, *COUNT)
    assert (done.code, done.summary["solved"], done.summary["steps"]) == (0, True, 4 * 400)
    failed = "mean return -inf in 100 new games, of which {} failed (NaN or inf)"
    for outcome in (failed.format(100), f"mean return {0.99 * GOAL:.1f} in 100 new games", failed.format(1)):
        assert f"not confirmed: {outcome}, after a fitness of {GOAL:.1f}" in done.log
    assert f" confirmed: mean return {GOAL:.1f} in 100 new games" in done.log
    assert f"4 generations, best fitness {GOAL:.1f}, confirmed {GOAL:.1f}, 1,600 steps" in done.log
    points = [(point.step, point.value) for point in scalars(done.folder)["eval/confirmed_mean"]]
    assert points == [(800, pytest.approx(0.99 * GOAL)), (1600, GOAL)]


@pytest.mark.parametrize("breaking", [{0}, {0, 1}])
def test_games_that_fail_are_the_worst_ones_and_no_member_wins_by_them(run_inline, monkeypatch, breaking):
    """The members at these places break their simulator in most games, and earn the most in the others."""
    play, make, bad = member.play_episodes, member.make_play_envs, [1e3, math.nan, math.inf, -math.inf]

    def made(*args, heartbeats, **flags):
        env = make(*args, heartbeats=heartbeats, **flags)
        env.member = heartbeats.actor
        return env

    def broken(policy, env, num, max_steps):
        games = list(play(policy, env, num, max_steps))
        return [Episode(each, 5) for each in bad] if env.member in breaking else games

    monkeypatch.setattr(member, "make_play_envs", made)
    monkeypatch.setattr(member, "play_episodes", broken)
    flags = ["--env-id", "envs:Count-v0", "--stop-return", "100", "--total-steps", "800"]
    done = run_inline.train(POPULATION, *flags)
    assert (done.code, done.summary["solved"]) == (0, False), done.log
    expected = 2 * [-math.inf, -math.inf if 1 in breaking else GOAL]
    assert [float(row["fitness"]) for row in lineage(done)] == expected
    assert done.summary["evaluation_games_not_finite"] == 3 * expected.count(-math.inf)
    assert done.summary.get("eval_best_return_mean") == (None if 1 in breaking else GOAL)
    assert (
        "evaluation games of member 0 with a return of NaN or inf; each is the worst possible one (-inf) (" in done.log
    )


def run_member_that_is_lost(*args):
    """A member's process that kills itself, or sends a signal to the trainer, as its first confirmation begins."""
    play = member.play_greedily

    def lost(args, state, num, *others):
        if num == args.confirm_episodes and not Path("lost").exists():
            Path("lost").touch()
            pid = int(os.environ["TRAINER"])
            os.kill(pid or os.getpid(), signal.SIGTERM if pid else signal.SIGKILL)
            time.sleep(60)
        return play(args, state, num, *others)

    member.play_greedily = lost
    member.run_member(*args)


@pytest.mark.parametrize("lost", ["the member", "the run"])
def test_the_games_of_a_confirmation_are_supervised(run_inline, monkeypatch, lost):
    monkeypatch.setenv("TRAINER", "0" if lost == "the member" else str(os.getpid()))
    monkeypatch.setattr(generations, "run_member", run_member_that_is_lost)
    done = run_inline.train(POPULATION, *COUNT, workers=None)
    if lost == "the member":
        assert (done.code, done.summary["solved"], done.summary["steps"]) == (0, True, 400)
        assert "was killed by SIGKILL; restart 1 of 5; rebuilt to where it was" in done.log
        assert f" confirmed: mean return {GOAL:.1f} in 100 new games" in done.log
    else:
        assert (done.code, done.summary["exit_reason"], done.summary["steps"]) == (143, "SIGTERM", 0)
        assert "generation 0 is interrupted: its 400 steps are not kept" in done.log


def test_a_member_whose_weights_are_not_finite_ranks_last_and_has_no_children(run_inline, monkeypatch):
    learn = train_population.learn

    def diverge(args, generation, batch):
        learn(args, generation, batch)
        if generation.place == 0:
            next(iter(generation.state.net.parameters())).data.fill_(math.nan)

    monkeypatch.setattr(train_population, "learn", diverge)
    done = run_inline.train(POPULATION, "--total-steps", "1200", "--learn-every", "16", "--init", "same")
    assert done.code == 0, done.log
    rows = lineage(done)
    assert [row["fitness"] == "nan" for row in rows] == 3 * [True, False]
    assert [row["parent"] for row in rows] == ["", "", *2 * [rows[1]["id"]], *2 * [rows[3]["id"]]]
    assert math.isfinite(done.summary["eval_best_return_mean"])
    assert done.state["steps"] == 1200, "its weights are finite"


def test_where_all_members_have_diverged_the_run_fails(run_inline):
    flags = ["--init", "same", "--learning-rate", "1e36", "--genes", "learning-rate=1:1e36"]
    done = run_inline.train(POPULATION, *flags)
    assert done.code == 1
    why = "no member has a finite fitness: all have diverged; lower --learning-rate, and leave it out of --genes"
    assert done.summary["exit_reason"] == f"error: {why}"
    assert f"error: {why}\n" in done.out
    assert "Traceback" not in done.out + done.err
    assert done.state["steps"] == 0, "the last good generation can be read"


def test_the_display_counts_steps_inside_a_generation_and_an_interruption_says_what_is_lost(run_inline, monkeypatch):
    shown, take = [], InlineWorkers.take

    def interrupted(workers, should_stop, size=1):
        filled = take(workers, should_stop, size)  # all members are done, but not yet taken
        assert not should_stop()
        signal.raise_signal(signal.SIGTERM)
        return [] if should_stop() else filled

    monkeypatch.setattr(InlineWorkers, "take", interrupted)
    monkeypatch.setattr(Display, "show", lambda self, steps, line, seconds: shown.append((steps, line)))
    done = run_inline.train(POPULATION)
    assert done.code == 143
    first, *_, done_steps, kept = [steps for steps, _ in shown]
    assert (first, done_steps, kept) == (0, 400, 0)
    assert shown[-2][1].endswith("8 of 8 evaluation games")
    assert "generation 0 is interrupted: its 400 steps are not kept, a resumed run starts it again" in done.log


def test_evaluation_games_that_do_not_end_are_cut_counted_and_named(run_inline):
    flags = ["--env-id", "envs:Count-v0", "--eval-max-steps", "3", "--eval-episodes", "5", "--total-steps", "400"]
    done = run_inline.train(POPULATION, *flags)
    assert done.code == 0, done.log
    assert done.summary["evaluation_steps"] == 2 * 5 * 3
    assert {float(row["fitness"]) for row in lineage(done)} == {sum(range(3))}
    assert "evaluation games that reached 3 steps, where they are cut (--eval-max-steps) (10" in done.log


@pytest.mark.parametrize(("steps", "is_named"), [(16, True), (400, False)])
def test_games_that_are_longer_than_a_generation_are_named(run_inline, steps, is_named):
    flags = ["--env-id", "envs:Count-v0", "--num-envs", "4", "--generation-steps", str(steps), "--total-steps"]
    done = run_inline.train(POPULATION, *flags, str(2 * steps))
    assert done.code == 0, done.log
    assert ("evaluation games of member 0 are longer than a generation has steps" in done.log) == is_named


def test_without_evolution_all_members_live_on_as_they_are(run_inline):
    done = run_inline.train(POPULATION, "--no-evolve", "--total-steps", "1200")
    assert done.code == 0, done.log
    genes = ("id", "learning_rate", "batch_size", "learn_every", "hidden", "activation")
    members = [tuple(row[name] for name in genes) for row in lineage(done)]
    assert members == 3 * members[:2]
    head, *rows = done.log.partition("generation 2: the fittest is member")[2].splitlines()[1:4]
    assert head.split()[:6] == ["place", "id", "parent", "mutation", "learning", "rate"]
    assert {len(row) for row in rows} == {len(head)}


def test_play_takes_any_member_of_the_newest_generation(run_inline):
    done = run_inline.train(POPULATION, "--total-steps", "400")
    for place in ("0", "1"):
        played = run_inline("play.py", "runs/r", "--member", place, "--episodes", "2")
        assert played.code == 0, played.err
    with pytest.raises(ConfigError, match="member=2: the checkpoint has 2 members; name one from 0 to 1"):
        run_inline("play.py", "runs/r", "--member", "2")
    with pytest.raises(ConfigError, match="member=0: a best checkpoint has the fittest member alone; name the run"):
        run_inline("play.py", str(done.best), "--member", "0")


# ---- genes and images


def test_the_log_and_the_lineage_say_which_genes_mutate_and_a_resumed_run_can_have_others(run_inline):
    quick = [
        "--mutate-none",
        "0",
        "--mutate-architecture",
        "0",
        "--mutate-parameters",
        "0",
        "--checkpoint-steps",
        "400",
    ]
    done = run_inline.train(POPULATION, *quick, "--genes", "n-step", "gamma=0.9:0.99", "--total-steps", "1200")
    assert "genes that mutate: n_step 1 to 10 · gamma 0.9 to 0.99\n" in done.log
    rows = lineage(done)
    assert [*rows[0]][4:9] == ["kind", "learning_rate", "n_step", "gamma", "hidden"]
    assert {row["learning_rate"] for row in rows} == {"0.001"}, "no gene"
    assert len({(row["n_step"], row["gamma"]) for row in rows}) >= 3
    before = [row["gamma"] for row in rows]
    others = "--genes", "gamma", "epsilon=0.1:1:2", "--epsilon", "0.5"
    again = run_inline(POPULATION.script, "--resume", "runs/r", *others, "--total-steps", "2000")
    assert again.code == 0, again.log
    assert "genes that mutate: gamma 0.9 to 0.999 · epsilon 0.1 to 1 in steps of x 2\n" in again.log
    rows = lineage(again)
    assert [row["gamma"] for row in rows[:6]] == before
    assert all(row["n_step"] for row in rows[:6]), "what was a gene before is kept"
    assert {row["epsilon"] for row in rows} > {"", "0.5"}, "a new gene starts at its setting"
    assert run_inline.train(POPULATION, "--no-evolve", "--genes", "gamma", "--total-steps", "400", name="o").code == 0
    assert "genes that mutate: none" in run_inline.folder("o").joinpath("run.log").read_text()


def test_the_example_of_a_gene_has_a_flag_mutates_acts_and_has_a_column(run_inline, monkeypatch, tmp_path):
    """That of docs/population.md, whose changes are made to the chapter."""
    (tmp_path / "train_huber.py").write_text(with_changes(POPULATION.script, "population.md"))
    monkeypatch.syspath_prepend(tmp_path)
    flags = [*POPULATION.flags, "--mutate-hyperparameters", "9", "--total-steps", "1200", "--huber-width", "2"]
    done = run_inline("train_huber.py", *flags)
    assert done.code == 0, done.log
    assert "learn_every 1 to 120 · huber_width 0.1 to 10 · hidden" in done.log
    rows = lineage(done)
    assert rows[0]["huber_width"] == "2.0"
    assert len({row["huber_width"] for row in rows}) > 2
    other = run_inline("train_huber.py", *flags[:-1], "3", name="other")
    assert lineage(other)[0]["sha256"] != rows[0]["sha256"]


def test_a_population_learns_from_images(run_inline):
    """With kills and resumes in process/test_exact.py."""
    flags = ["--population", "2", "--num-envs", "2", "--generation-steps", "80", "--learning-starts", "40"]
    flags += ["--eval-episodes", "1", "--eval-max-steps", "20", "--replay-size", "1000", "--total-steps", "320"]
    flags += ["--convolutions", *"884", "12", *"42", "--hidden", "16", "--batch-size", "16", "--mutate-none", "0"]
    flags += ["--channels-range", "4", "16", "--mutate-architecture", "99", "--new-layer", "1"]
    done = run_inline(POPULATION.script, "--env-id", "PongNoFrameskip-v4", *flags)
    assert done.code == 0, done.log
    assert done.summary["updates"] > 0
    assert "obs (4, 84, 84)" in done.log
    assert "convolutions 1 to 5 of 4 to 16 channels, kernels 1 to 10" in done.log
    first, _, _, child = lineage(done)
    assert (first["convolutions"], first["hidden"]) == ("8x8/4 12x4/2", "16")
    assert (child["convolutions"], child["hidden"]) != (first["convolutions"], first["hidden"])
    frames = done.state["extra"]["population"]["replay"]["frame"]
    assert frames.shape[2:] == (84, 84), "each is stored once"
    played = run_inline("play.py", "runs/r", "--member", "1", "--episodes", "1", "--max-steps", "20")
    assert played.code == 0, played.err


# ---- numbers that are not finite


@pytest.mark.parametrize(
    ("env", "counter", "between", "text"),
    [  # a step of each environment is part of one transition or two
        ("NanReward", "transitions_not_finite", (8, 8), "transitions of member 0 contain NaN or inf; skipped ("),
        ("InfiniteObs", "transitions_not_finite", (8, 16), "transitions of member 0 contain NaN or inf; skipped ("),
        ("HugeObs", "obs_values_far", (1, math.inf), "beyond 1e+06 standard deviations; left out of the mean ("),
    ],
)
def test_what_cannot_be_learned_from_is_skipped_counted_and_named(run_inline, monkeypatch, env, counter, between, text):
    monkeypatch.setattr("a3c_mp.population.dqn.NORM_PERIOD", 1)  # no batch is overlooked
    flags = ["--generation-steps", "800", "--total-steps", "1600", "--init", "same", "--learn-every", "40"]
    done = run_inline.train(POPULATION, "--env-id", f"envs:{env}-v0", *flags)
    assert done.code == 0, done.log
    assert between[0] <= done.summary[counter] <= between[1]
    assert text in done.log
    assert sum(done.summary[name] > 0 for name in COUNTS) == 2, "this and updates"
    assert math.isfinite(done.summary["mean_return_100"])
    assert all(math.isfinite(float(row["fitness"])) for row in lineage(done))


# ---- what is kept


def test_a_run_goes_on_from_an_earlier_generation_as_if_nothing_had_happened(run_inline):
    flags = ["--checkpoint-steps", "400", "--mutate-none", "0"]
    whole = run_inline.train(POPULATION, *flags, "--total-steps", "1600", name="whole")
    first = run_inline.train(POPULATION, *flags, "--total-steps", "1200")
    assert [row["generation"] for row in lineage(first)] == ["0", "0", "1", "1", "2", "2"]
    for path in (first.checkpoints[0], first.checkpoints[0].with_suffix(".json")):
        path.unlink()
    (first.folder / "lineage.csv").unlink()
    done = run_inline(POPULATION.script, "--resume", "runs/r", "--total-steps", "1600")
    assert "at 800 steps" in done.log
    for name in ("lineage.csv", "episodes.csv"):
        lines, expected = ((run.folder / name).read_text().splitlines() for run in (done, whole))
        drop = slice(2, None) if name == "episodes.csv" else slice(None)  # but for the seconds
        assert [line.split(",")[drop] for line in lines] == [line.split(",")[drop] for line in expected]
    assert done.summary["weights_sha256"] == whole.summary["weights_sha256"]
    hidden = map(str, done.config["args"]["hidden"])
    assert run_inline(POPULATION.script, "--resume", "runs/r", "--hidden", *hidden).code == 0, "nothing has changed"
    for flag in ("--replay-size=8000", "--reward-clip"):
        with pytest.raises(ConfigError, match=r"the run in runs/r has (100000|False); leave it out"):
            run_inline(POPULATION.script, "--resume", "runs/r", flag)
