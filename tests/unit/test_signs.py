"""Signs that a run does not learn: each is warned of once, none in a run that learns."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from harness import A3C_DATA

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.run.banner import mean_return
from a3c_mp.run.mean_return import ReturnWindow
from a3c_mp.run.progress import Progress
from a3c_mp.run.signs import IN_A_ROW, SIGNS, Signs, has_risen

VECTORS, IMAGES = Box(-1, 1, (4,), np.float32), Box(0, 255, (4, 84, 84), np.uint8)
TORQUES, BUTTONS = Box(-1, 1, (2,), np.float32), Discrete(2)
STEPS = 1_000_000
FAILS, LEARNS, ALWAYS_LOSES = (0.0, 5.0), (100.0, 5.0), (0.0, 0.0)
"""by how much the returns rise in a run, and their deviation"""


def warnings(log, tape, means, returns=FAILS, obs_space=VECTORS, actions=BUTTONS, steps=STEPS, games=10, last=100):
    """The signs that a run of so many steps shows, with these means of its curves and returns of games.

    No game ends after `last` percent of the steps.
    """
    args = SimpleNamespace(**vars(CommonArgs(total_steps=steps)), max_grad_norm=1.0, explore_envs=0.0)
    args.max_actors, args.explorers, args.has_fitness = args.num_actors, 0, False
    progress, rng, (rise, deviation) = Progress(args), np.random.default_rng(1), returns
    signs = Signs(progress, (obs_space, actions), log)
    for number in range(100):
        progress.steps += steps // 100
        scores = rise * number / 100 + deviation * rng.normal(size=games if number < last else 0)
        ended = [Episode(float(score), 9, game % args.num_envs) for game, score in enumerate(scores)]
        progress.window.end(0, ended)
        progress.window.end(1, ended)
        progress.window.lose(1)  # a game that is lost has not ended
        signs.add(means)
    return [name for message in tape.messages for name, sign in SIGNS.items() if sign.advice in message]


FAULTS = {
    "gradients": {"means": {"losses/grad_norm": 7e5, "policy/entropy": 0.3}, "returns": LEARNS},
    "no_game": {"means": {}, "games": 0},
    "no_game, later": {"means": {}, "returns": LEARNS, "last": 60},
    "same_return": {"means": {}, "returns": ALWAYS_LOSES},
    "deterministic": {"means": {"policy/entropy": 0.004}},
    "random": {"means": {"policy/entropy": math.log(2) * 0.9999}},
    "deterministic, torques": {"means": {"policy/entropy": 2 * (1.4189 - 4.7)}, "actions": TORQUES},
    "random, torques": {"means": {"policy/entropy": 2 * 1.4189}, "actions": TORQUES},
    "bounds": {"means": {"policy/at_bounds": 0.95, "policy/entropy": 5.0}, "actions": TORQUES},
    "values": {"means": {"values/explained_variance": 1e-8}},
    "still": {"means": {"policy/entropy": 0.5, "losses/grad_norm": 3.0, "values/explained_variance": 0.4}},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_does_not_learn_is_told_why_once(name, log, tape):
    found = warnings(log, tape, **FAULTS[name])
    name = name.partition(",")[0]
    assert found == [name], tape.messages
    assert all(message.endswith("(docs/learning.md)") for message in tape.messages)


ENDED_WELL = {"policy/entropy": 0.0, "policy/at_bounds": 1.0, "values/explained_variance": 0.0}


@pytest.mark.parametrize(
    "run",
    [
        {"means": ENDED_WELL, "returns": LEARNS},
        {"means": ENDED_WELL, "returns": LEARNS, "actions": TORQUES},
        {"means": {"losses/grad_norm": 150.0}, "returns": LEARNS},
        {"means": {}, "steps": 40_000},  # too early to say
        {"means": {"policy/entropy": 1.7}, "actions": Discrete(6), "obs_space": IMAGES, "steps": 500_000},
        {"means": {}, "games": 1, "steps": 10_000},
    ],
)
def test_a_run_that_learns_or_is_short_has_no_sign(run, log, tape):
    assert warnings(log, tape, **run) == []


def test_a_sign_that_does_not_last_is_none(log, tape):
    assert IN_A_ROW > 1
    norms = iter([7e5 if number % 4 == 0 else 1.0 for number in range(1000)])

    class Means(dict):
        def items(self):
            return [("losses/grad_norm", next(norms))]

    assert warnings(log, tape, Means(), returns=LEARNS) == []


def test_returns_have_risen_if_chance_does_not_explain_the_difference():
    rng = np.random.default_rng(0)
    noise = [list(rng.normal(size=100)) for _ in range(200)]
    false = sum(has_risen(before, after) for before, after in zip(noise[::2], noise[1::2], strict=True))
    assert false < 15, "of 100 pairs of equal policies"
    assert has_risen([1.0] * 100, [1.1] * 100)
    assert not has_risen([1.0] * 100, [1.0] * 100)
    assert has_risen([0.0] * 20 + [9.0] * 80, [9.0] * 100), "learned while the first hundred were played"


def test_the_last_line_compares_with_the_first_games(log):
    window = ReturnWindow(1, 1)
    window.end(0, [Episode(1.0, 5)] * 30)
    assert mean_return(window) == "mean return 1.00"
    window.end(0, [Episode(3.0, 5)] * 30)
    assert mean_return(window) == "mean return 2.00 (first 30 games: 1.00)"
    window.end(0, [Episode(30.0, 5)] * 300)
    assert mean_return(window) == "mean return 30.0 (first 100 games: 13.2)"


def test_the_first_games_survive_a_resume_and_random_play_is_the_yardstick(run_inline):
    done = run_inline(A3C_DATA.script, *A3C_DATA.flags, "--update-epochs", "1", "--total-steps", "1500")
    first = done.state["first_returns"]
    assert len(first) == done.summary["episodes"] < 100
    resumed = run_inline(A3C_DATA.script, "--resume", "runs/r", "--total-steps", "3500")
    found = resumed.state["first_returns"]
    assert (found[: len(first)], len(found)) == (first, 100)
    assert f" games: {np.mean(found[: resumed.summary['episodes'] // 2]):.1f})" in resumed.log.splitlines()[-1]
    played = run_inline("play.py", "runs/r", "--random", "--episodes", "50")
    assert played.out.startswith("CartPole-v1: random actions, seed 10000\n")
    mean = float(played.out.split("\nmean ")[1].split(",")[0])
    assert 15 < mean < 35, played.out
