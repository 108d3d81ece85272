"""A deterministic run ends with the very bits of an undisturbed one, whatever is killed and whenever it is resumed.

Real actors, real learners, real SIGKILLs. The trainer is this process, except where it is killed.
"""

import csv
import itertools
import multiprocessing
import random
import re

import pytest
import torch
from envs import MISHAPS
from harness import A3C_DATA, A3C_GRAD, EVALUATED, TASK, actors_of, row_id

from a3c_mp.run.checkpoint import list_checkpoints

SMALL = ["--num-actors", "2", "--num-envs", "2"]
CARTPOLE = ["--env-id", "CartPole-v1", "--stop-return", "501", *SMALL, "--reward-scale", "none"]
ROLLOUTS = [*CARTPOLE, "--unroll-length", "8"]
PONG = ["--env-id", "PongNoFrameskip-v4", *SMALL, "--unroll-length", "8", "--batch-size", "16"]
PENDULUM = ["--env-id", "Pendulum-v1", *SMALL, "--unroll-length", "8"]
LSTM = ["--lstm", "--batch-unrolls", "4", "--replay-proportion", "0.5", "--replay-size", "50"]
REPLAY = ["--save-replay", "--n-step", "5", "--replay-size", "300", "--learning-starts", "100"]  # it comes round
FALLING = ["--learning-rate-end", "1e-4"]
APEX = [*CARTPOLE, "--batch-size", "16", "--block-length", "8", "--target-period", "7", *FALLING, *REPLAY]
TWO_LEARNERS = ["--num-learners", "2", "--slots-per-actor", "2", "--replay-proportion", "0"]
UNTIL_EVALUATED = [*ROLLOUTS, "--batch-size", "16", *EVALUATED, "--stop-eval-return", "501"]
MEMBERS = ["--population", "2", "--num-envs", "2", "--units-range", "16", "64", "--mutate-none", "0"]
POPULATION = [*CARTPOLE[:4], *MEMBERS, "--generation-steps", "80", "--learning-starts", "50", "--eval-episodes", "2"]
BY_PPO = ["--algo", "ppo", *POPULATION[:-4], *POPULATION[-2:], "--unroll-length", "20", "--batch-size", "32"]
SMALL_NETS = ["--convolutions", "8", "8", "4", "12", "4", "2", "--hidden", "16", "--channels-range", "4", "16"]
ON_PONG = ["--env-id", "PongNoFrameskip-v4", *MEMBERS, "--units-range", "8", "64", *SMALL_NETS, *POPULATION[-6:]]
TWO_SLOTS = ["--slots-per-actor", "2"]
BURSTS = ["--explore-envs", "0.5", "--explore-steps", "5"]
KINDS = {"impala": ("train_impala.py", 900, [*ROLLOUTS, *LSTM])}
SLOW = {
    "data": ("train_a3c_data.py", 900, [*ROLLOUTS, "--batch-size", "16", *TWO_SLOTS, *BURSTS]),
    "task": ("train_task.py", 1500, [*ROLLOUTS, "--batch-size", "16", *TWO_SLOTS, "--eval-every", "0"]),
    "population": ("train_population.py", 1600, POPULATION),
    "grad": ("train_a3c_grad.py", 1500, [*ROLLOUTS, "--batch-size", "6"]),  # three gradients of each rollout
    "dqn": ("train_apex.py", 1000, APEX),
    "data, Pong": ("train_a3c_data.py", 2000, [*PONG, *TWO_SLOTS]),
    "grad, Pong": ("train_a3c_grad.py", 2000, PONG),
    "dqn, Pong": ("train_apex.py", 2000, [*PONG[:-4], "--batch-size", "16", *REPLAY[:-2], "--learning-starts", "80"]),
    "population, ppo": ("train_population.py", 1600, BY_PPO),
    "population, Pong": (
        "train_population.py",
        1600,
        [*ON_PONG, "--eval-max-steps", "20", "--genes", "n-step", "gamma"],
    ),
    "impala, two learners": ("train_impala.py", 2000, [*ROLLOUTS, "--batch-unrolls", "2", *TWO_LEARNERS]),
    "evaluated": ("train_a3c_data.py", 3000, UNTIL_EVALUATED),
    "task, standalone": ("train_task.py", 3000, [*UNTIL_EVALUATED, "--standalone"]),
    "data, Pendulum": ("train_a3c_data.py", 1500, [*PENDULUM, "--batch-size", "16", "--noise-steps", "3"]),
    "data, masks": ("train_a3c_data.py", 1500, ["--env-id", "envs:Masked-v0", *ROLLOUTS[2:], "--batch-size", "16"]),
    "td3": ("train_apex.py", 1200, ["--algo", "td3", "--env-id", "Pendulum-v1", *SMALL, *REPLAY]),
    "ddpg": ("train_apex.py", 1200, ["--env-id", "Pendulum-v1", *SMALL, "--noise-memory", "0.5", *REPLAY]),
}
KILLED_AFTER = {3, 4, 9}
"""rounds of the learner after which an actor is killed"""
BY_THE_CLOCK = ("wall_seconds", "worker_restarts", "best_mean")


def bits(value):
    """A state in a form that is equal only where every bit is; without what follows from the clock and from kills."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items() if key not in BY_THE_CLOCK}
    if isinstance(value, list | tuple):
        return [bits(part) for part in value]
    return value


def differing(one, other, name=""):
    """Names of the parts that are not the same."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differing(one[key], other[key], f"{name}/{key}")]
    return [] if one == other else [name]


def state_of(folder):
    return bits(torch.load(list_checkpoints(folder / "checkpoints")[0], weights_only=True))


def games_of(folder):
    with (folder / "episodes.csv").open() as file:
        return [{**row, "seconds": None} for row in csv.DictReader(file)]


def lineage_of(folder):
    """The family tree of a population, with a SHA-256 of each member; nothing in other chapters."""
    return [path.read_text() for path in folder.glob("lineage.csv")]


def own_actors():
    """The actors of this process, which is learner 0, and of the learners that it has started."""
    children = multiprocessing.active_children()
    actors = [child for child in children if child.name.startswith(("worker-", "collector-"))]
    return actors + [actor for child in children if child.name.startswith("learner-") for actor in actors_of(child.pid)]


def kill_actors(each_round):
    """Kill an actor after some of the learner's rounds; returns the process ids as they come."""
    count, killed = itertools.count(1), []

    def kill(run):
        if (number := next(count)) in KILLED_AFTER:
            actors = own_actors()
            actors[number % len(actors)].kill()
            killed.append(actors[number % len(actors)].pid)

    each_round(kill)
    return killed


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "steps", "flags"),
    [*KINDS.values(), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in SLOW.values())],
    ids=[*KINDS, *SLOW],
)
def test_bits_survive_kills_of_actors_and_of_the_trainer(
    scripts, run_inline, each_round, request, script, steps, flags
):
    trainer_kills = 3 if request.node.get_closest_marker("slow") else 1
    flags = [*flags, "--deterministic", "--total-steps", str(steps)]
    whole = run_inline(script, *flags, name="whole", workers=None)
    kill_trainers(scripts, script, flags, trainer_kills)
    resumed = run_inline(script, "--resume", "runs/trainer-killed", name="trainer-killed", workers=None)
    assert resumed.out.count("resumed from") == 1
    runs = {"trainer killed": resumed}
    if "--standalone" not in flags:  # where there are no others
        killed = kill_actors(each_round)
        runs["actors killed"] = run_inline(script, *flags, name="actors-killed", workers=None)
        assert len(killed) == len(KILLED_AFTER)
        restarts = runs["actors killed"].summary["worker_restarts"]
        assert restarts >= len(killed) - 1, "one may have been killed before it had started again"

    expected, games = state_of(whole.folder), games_of(whole.folder)
    assert expected["updates"] > 10
    assert len(games) > 5 or "Pong" in " ".join(flags) or "Pendulum" in " ".join(flags)
    for how, run in runs.items():
        assert run.code == 0, how
        assert differing(state_of(run.folder), expected) == [], how
        assert games_of(run.folder) == games, how
        assert lineage_of(run.folder) == lineage_of(whole.folder), how
        assert run.summary["weights_sha256"] == whole.summary["weights_sha256"], how


def kill_trainers(scripts, script, flags, times):
    """Begin a run whose trainer is killed so many times, each some random time after a checkpoint."""
    rng, name = random.Random(script), "trainer-killed"
    every = ["--checkpoint-steps", "64", "--checkpoint-seconds", "3600"]

    def newest():
        found = list_checkpoints(scripts.runs_dir / f"runs/{name}/checkpoints")
        return int(found[0].stem[5:]) if found else 0

    for life in range(times):
        resumed = ["--resume", f"runs/{name}"] if life else ["--run-name", name, *flags, *every]
        trainer, wanted = scripts.start(script, *resumed), newest() + 64 * rng.randint(1, 4)
        scripts.wait_until(lambda wanted=wanted: newest() >= wanted, trainer, pause=0.001)
        trainer.kill()
        trainer.communicate()


@pytest.mark.parametrize(
    ("chapter", "env_id", "what"),
    [
        (A3C_DATA, "envs:Unrepeatable-v0", "gave other observations"),
        (A3C_DATA, "envs:UnrepeatableMasked-v0", "raised ValueError: action "),
        pytest.param(TASK, "envs:Unrepeatable-v0", "gave other observations", marks=pytest.mark.slow),
    ],
    ids=row_id,
)
def test_an_environment_that_does_not_repeat_itself_is_named_and_plays_new_games(run_inline, chapter, env_id, what):
    flags = ["--env-id", env_id, *SMALL, "--batch-size", "16", "--deterministic"]
    first = run_inline.train(chapter, *flags, "--checkpoint-steps", "200", "--total-steps", "400", workers=None)
    assert first.code == 0, first.err
    done = run_inline(chapter.script, "--resume", "runs/r", "--total-steps", "2000", workers=None)
    assert done.code == 0, done.out + done.err
    for actor in range(2):
        assert re.search(rf"{chapter.actor} {actor}( \(pid \d+\))? cannot be rebuilt", done.out)
    assert re.search(rf"is not deterministic: the same seed and actions {what}.*; it starts new games", done.out)
    assert "determinism is lost for the rest of this run" in done.out
    assert done.summary["worker_restarts"] == 0
    assert done.summary["episodes"] > 10


def test_games_of_another_seed_are_not_rebuilt(run_inline):
    flags = ["--env-id", "CartPole-v1", *SMALL, "--batch-size", "16", "--deterministic"]
    assert run_inline.train(A3C_DATA, *flags, "--total-steps", "400").code == 0
    done = run_inline(A3C_DATA.script, "--resume", "runs/r", "--seed", "2", "--total-steps", "800")
    assert done.code == 0, done.err
    assert "no actors that fit these settings (its games are those of seed 1, not of 2)" in done.out
    assert "cannot be rebuilt" not in done.out


@pytest.mark.parametrize(
    ("chapter", "mishaps"),
    [
        (A3C_DATA, ["killed in a step", "raised", "hung"]),
        # The gradient is in its slot, which has not been sent.
        pytest.param(A3C_GRAD, ["killed while sending"], marks=pytest.mark.slow),
        pytest.param(TASK, ["killed in a step", "raised", "hung"], marks=pytest.mark.slow),
    ],
    ids=row_id,
)
def test_bits_survive_an_actor_that_is_killed_raises_and_hangs(run_inline, monkeypatch, chapter, mishaps):
    flags = ["--env-id", "envs:Mishap-v0", *SMALL, "--batch-size", "16", "--deterministic", "--total-steps", "3000"]
    expected = run_inline.train(chapter, *flags, name="whole", workers=None)
    assert expected.code == 0, expected.err
    monkeypatch.setenv(MISHAPS, ",".join(mishaps))
    done = run_inline.train(chapter, *flags, "--hang-seconds", "3", name="disturbed", workers=None)
    assert done.code == 0, done.out + done.err
    assert (expected.summary["worker_restarts"], done.summary["worker_restarts"]) == (0, len(mishaps))
    assert done.out.count("rebuilt to where it was") == len(mishaps)
    assert differing(state_of(done.folder), state_of(expected.folder)) == []
