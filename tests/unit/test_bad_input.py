"""Bad input to every script: exit code 2, one line that says what, why and what to do, and nothing started."""

import dataclasses
import json
import math
import re
import shutil
import signal
import socket
import sys
import typing
from contextlib import suppress

import numpy as np
import pytest
import torch
from envs import Env
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from harness import (
    A3C_DATA,
    A3C_GRAD,
    ALL_CHAPTERS,
    APEX_DDPG,
    APEX_DQN,
    CONTINUOUS,
    EVERY_ONE_OF_ALL,
    IMPALA,
    POPULATION,
    RAY_DQN,
    RAY_IMPALA,
    TASK,
    row_id,
)

import play
import plot
import train_a3c_data
import train_apex
import train_impala
import train_task
from a3c_mp.algorithms import ddpg, dqn
from a3c_mp.algorithms.actor_critic import make_optimizer
from a3c_mp.cli import parse_args
from a3c_mp.config import bounds_of, check_ranges, flag_name
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.population.population import Population
from a3c_mp.population.records import Spaces
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with
from a3c_mp.task.keys import make_key
from wrappers import make_env

ALL = [*ALL_CHAPTERS, *CONTINUOUS]


def each_chapter(chapters=ALL):
    """Of every chapter: its `main`, and the flags that choose its algorithm."""
    rows = [(chapter.module.main, flags_of(chapter)) for chapter in chapters]
    return pytest.mark.parametrize(("main", "flags"), rows, ids=[str(chapter) for chapter in chapters])


def flags_of(chapter):
    if chapter is APEX_DDPG:
        return ["--algo", "ddpg", "--env-id", "Pendulum-v1"]
    return ["--algo", "dqn"] if chapter in (APEX_DQN, RAY_DQN) else []


# ---- numbers


@EVERY_ONE_OF_ALL
def test_every_number_has_its_range(chapter):
    """All numeric flags of a chapter, from both sides, NaN and infinity."""
    make_args = chapter.args_class
    hints, tried = typing.get_type_hints(make_args, include_extras=True), 0
    args = make_args()
    check_ranges(args)
    for field in dataclasses.fields(args):
        hint = hints[field.name]
        if typing.get_origin(hint) is tuple:  # a range of a gene: see `SPECIAL`
            continue
        kinds = {int, float} & {hint, *typing.get_args(hint), *map(typing.get_origin, typing.get_args(hint))}
        kinds |= {int, float} & {inner for part in typing.get_args(hint) for inner in typing.get_args(part)}
        if not kinds:
            continue
        assert bounds_of(hint) or field.name in ("stop_return", "stop_eval_return"), f"{field.name} has no range"
        bad = [math.nan, math.inf]
        for bounds in bounds_of(hint):
            bad += [bounds.low - 1] + [bounds.high + 1] * (bounds.high < math.inf)
        for value in bad:
            with pytest.raises(ConfigError, match=rf"^{flag_name(field.name)}=.*: must be .+; .+$"):
                check_ranges(dataclasses.replace(args, **{field.name: value}))
            tried += 1
    assert tried > 50


def is_whole(hint):
    return int in {hint, *typing.get_args(hint)} and typing.get_origin(hint) is not tuple


@EVERY_ONE_OF_ALL
def test_whole_numbers_may_be_written_as_1e6(chapter, monkeypatch):
    monkeypatch.setattr("a3c_mp.cli.check_unused", lambda *_: None)  # some of them have none without other flags
    make_args = chapter.args_class
    hints = typing.get_type_hints(make_args, include_extras=True)
    whole = [f.name for f in dataclasses.fields(make_args) if is_whole(hints[f.name])]
    flags = [f"--{flag_name(name)}=2e0" for name in whole if name not in ("total_steps", "seed")]
    args = parse_args(make_args, {}, "", [*flags, "--total-steps", "1e6", "--seed", "1_000"])
    assert len(flags) >= 7
    assert (args.total_steps, args.seed) == (1_000_000, 1000)
    values = [getattr(args, name) for name in whole if name not in ("total_steps", "seed")]
    assert values == [2] * len(flags)
    assert all(type(value) is int for value in values)


@EVERY_ONE_OF_ALL
def test_help_shows_every_flag_and_no_other(chapter, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [chapter.script, *chapter.flags, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        chapter.module.main()
    assert not end.value.code
    text = capsys.readouterr().out
    titles = [text.index(f"{title} options") for title in ("run", "environment", "collection", "learning")]
    assert titles == sorted(titles)
    shown = {flag.removeprefix("no-") for flag in re.findall(r"(?<![\w-])--([a-z][a-z-]+)", text)}
    flags = {flag_name(field.name) for field in dataclasses.fields(chapter.args_class)}
    assert shown == flags | {"help"}
    assert chapter.actors_flag in flags


# ---- flags and environments, in every chapter

LONG = "x" * 300
FLAGS = {
    "range": (["--num-envs", "0"], "num-envs=0: must be between 1 and 4096"),
    "NaN": (["--learning-rate", "nan"], "learning-rate=nan: must be a finite number"),
    "infinity": (["--total-steps", "inf"], "total-steps=inf: must be a whole number"),
    "no whole number": (["--total-steps", "1.5"], "total-steps=1.5: must be a whole number"),
    "no number": (["--gamma", "high"], "gamma=high: "),
    "value missing": (["--seed"], "seed: a value is missing"),
    "unknown flag": (["--turbo"], "turbo: there is no such flag; see --help"),
    "mistyped flag": (["--num-env", "2"], "num-env=2: there is no such flag; perhaps you meant --num-envs"),
    "value without flag": (
        ["CartPole-v1"],
        "arguments=CartPole-v1: a value without a flag; perhaps --env-id CartPole-v1",
    ),
    "choice": (["--precision", "fp8"], "precision=fp8: must be one of"),
    "resume of nothing": (["--resume", "old/nothing"], "resume=old/nothing: there is no run in this folder"),
    "unknown env": (["--env-id", "Nonesuch-v3"], "env-id=Nonesuch-v3: Environment `Nonesuch` doesn't exist"),
    "mistyped env": (["--env-id", "PongNoFrameskp-v4"], "; perhaps you meant PongNoFrameskip-v4"),
    "env without version": (["--env-id", "CartPole"], "; perhaps you meant CartPole-v1"),
    "env of an older gym": (["--env-id", "Pong-v5"], "; perhaps you meant ALE/Pong-v5"),
    "env of a module that does not register it": (
        ["--env-id", "envs:Nowhere-v0"],
        "; envs was imported and registers no Nowhere-v0: call gymnasium.register in it, or check the spelling",
    ),
    "env of a file": (["--env-id", "envs.py:Count-v0"], "; leave out .py: a module name stands before the colon"),
    "env in lower case": (["--env-id", "ale/pong-v5"], "; perhaps you meant ALE/Pong-v5"),
    "unknown module": (["--env-id", "nowhere:Env-v0"], "env-id=nowhere:Env-v0: No module named 'nowhere'"),
}

if not torch.cuda.is_available():
    FLAGS["no GPU"] = (["--cuda"], "cuda=True: ")  # chapter 6 has no --cuda, the others see no device


@each_chapter()
@pytest.mark.parametrize(("bad", "message"), FLAGS.values(), ids=FLAGS)
def test_flags_and_environments(main, flags, bad, message, refused):
    assert message in refused(main, [*flags, *bad])


@each_chapter([APEX_DQN, RAY_DQN, POPULATION])
def test_continuous_actions_are_not_for_dqn(main, flags, refused):
    line = refused(main, [*flags, "--env-id", "Pendulum-v1"])
    assert line.startswith("error: env-id=Pendulum-v1: its actions are Box(")


@pytest.mark.parametrize(
    "space", [Dict(a=Discrete(2)), MultiDiscrete([2, 3], start=[0, 1]), Box(0, 9, (2,), int)], ids=str
)
def test_actions_that_there_is_no_policy_for(space, register, refused):
    line = refused(train_a3c_data.main, ["--env-id", register(changes={"action_space": space})])
    needed = "this needs Discrete from 0, Box of floating-point numbers, MultiDiscrete from 0, MultiBinary"
    assert line.startswith(f"error: env-id=Custom-v0: its actions are {space}, {needed}; choose another")


LISTENING = ["--listen", "tcp://127.0.0.1:0", "--key-file", "k"]
ATTACHED = ["--attach-to", "tcp://127.0.0.1:9"]
SPECIAL = {
    "batch larger than a rollout": (A3C_DATA, ["--batch-size", "1e6"], "batch-size=1000000: a rollout has only 32 * 8"),
    "the same in chapter 2": (A3C_GRAD, ["--batch-size", "1e6"], "batch-size=1000000: a rollout has only 32 * 8"),
    "batch larger than the replay": (APEX_DQN, ["--batch-size", "300_000"], "batch-size=300000: the replay has room"),
    "batch larger than what is collected": (IMPALA, ["--batch-unrolls", "1e4"], "batch-unrolls=10000: 625 new"),
    "too many rollouts in flight": (A3C_DATA, ["--deterministic", "--slots-per-actor", "3"], "slots-per-actor=3: "),
    "more rollouts than tokens fit into a pipe": (
        A3C_DATA,
        ["--slots-per-actor", "5000"],
        "slots-per-actor=5000: must be between 1 and 64",
    ),
    "more blocks than tokens fit into a pipe": (
        APEX_DQN,
        ["--blocks-per-actor", "65"],
        "blocks-per-actor=65: must be between 1 and 64",
    ),
    "a goal of evaluations that there are none of": (
        A3C_DATA,
        ["--stop-eval-return", "450"],
        "stop-eval-return=450.0: there is no evaluation whose return could reach it; give --eval-every too",
    ),
    "bursts that nothing corrects for": (
        IMPALA,
        ["--explore-envs", "0.5", "--no-vtrace"],
        "explore-envs=0.5: V-trace corrects for it; leave out --no-vtrace",
    ),
    "bursts of continuous actions": (
        A3C_GRAD,
        ["--env-id", "Pendulum-v1", "--explore-envs", "0.5"],
        "explore-envs=0.5: it repeats discrete actions, those of Pendulum-v1 are continuous; set it to 0",
    ),
    "noise of discrete actions": (
        IMPALA,
        ["--noise-steps", "16"],
        "noise-steps=16: it is for the noise of continuous actions, those of CartPole-v1 are discrete; leave it out",
    ),
    "noise of the other algorithm": (APEX_DQN, ["--noise", "0.1"], "noise=0.1: --algo dqn does not use it; use ddpg"),
    "epsilon of the other algorithm": (APEX_DDPG, ["--epsilon", "0.1"], "epsilon=0.1: --algo ddpg does not use it"),
    "epsilon of the other optimizer": (IMPALA, ["--rmsprop-eps", "0.1"], "rmsprop-eps=0.1: --optimizer adam does not"),
    "one environment that explores": (
        A3C_DATA,
        ["--explore-envs", "0.5", "--num-envs", "1", "--batch-size", "8"],
        "--num-envs 1 does not use it",
    ),
    "games of no evaluation": (A3C_DATA, ["--eval-episodes", "3"], "eval-episodes=3: --eval-every 0 does not use it"),
    "slots without a use": (
        A3C_GRAD,
        ["--deterministic", "--slots-per-actor", "2"],
        "slots-per-actor=2: with --sync or --deterministic each actor waits for the new weights; leave it out",
    ),
    "replay of nothing": (
        IMPALA,
        ["--replay-proportion", "0", "--replay-size", "9"],
        "replay-size=9: --replay-proportion 0.0 does not use it; raise --replay-proportion, or leave out --replay-size",
    ),
    "lag of none": (A3C_GRAD, ["--sync", "--max-lag", "3"], "max-lag=3: with --sync or --deterministic each"),
    "bursts longer than their stretch": (A3C_DATA, ["--explore-steps", "1001"], "explore-steps=1001: must be between"),
    "Adam's epsilon with RMSProp": (
        A3C_DATA,
        ["--optimizer", "rmsprop", "--adam-eps", "0.5"],
        "adam-eps=0.5: --optimizer rmsprop does not use it; use --rmsprop-eps, or leave out --adam-eps",
    ),
    "epochs that there are not": (
        A3C_DATA,
        ["--update-epochs", "1", "--repeat-fraction", "0.5"],
        "repeat-fraction=0.5: --update-epochs 1 does not use it; raise --update-epochs, or leave out --repeat-fraction",
    ),
    "importance of uniform samples": (
        APEX_DQN,
        ["--priority-exponent", "0", "--importance-exponent", "0.5"],
        "importance-exponent=0.5: --priority-exponent 0.0 does not use it; raise --priority-exponent, or leave",
    ),
    "blocks ahead in a fixed order": (
        APEX_DQN,
        ["--deterministic", "--blocks-per-actor", "4"],
        "blocks-per-actor=4: --deterministic does not use it; leave out --deterministic, or leave out --blocks",
    ),
    "tournaments without evolution": (
        POPULATION,
        ["--no-evolve", "--tournament-size", "3"],
        "tournament-size=3: --no-evolve does not use it; leave out --no-evolve, or leave out --tournament-size",
    ),
    "a switch without evolution": (
        POPULATION,
        ["--keep-default", "--no-evolve"],
        "keep-default=True: --no-evolve does not use it; leave out --no-evolve, or leave out --keep-default",
    ),
    "n of other returns": (A3C_DATA, ["--n-step", "8"], "n-step=8: --returns gae does not use it; add --returns nstep"),
    "lambda of other returns": (A3C_GRAD, ["--returns", "nstep", "--gae-lambda", "0.9"], "gae-lambda=0.9: --returns "),
    "gradients of a synchronous step": (A3C_GRAD, ["--sync", "--grads-per-step", "5"], "grads-per-step=5: "),
    "a replay too small": (APEX_DQN, ["--replay-size", "100", "--learning-starts", "9"], "replay-size=100: each of "),
    "a start too late": (APEX_DQN, ["--learning-starts", "1e6"], "learning-starts=1000000: the replay has room for"),
    "a replay too large": (APEX_DQN, ["--replay-size", "1e10"], "GiB is free; lower --replay-size"),
    "discrete actions for ddpg": (APEX_DDPG, ["--env-id", "CartPole-v1"], "env-id=CartPole-v1: its actions are Disc"),
    "learners that do not divide the actors": (APEX_DQN, ["--num-learners", "3"], "num-learners=3: 2 actors cannot be"),
    "shards without actors": (RAY_DQN, ["--num-shards", "3"], "num-shards=3: only 2 actors fill them; lower it"),
    "a replay of shards that is saved": (RAY_DQN, ["--save-replay"], "save-replay=True: shards are not saved"),
    "a replay of shards too large": (RAY_DQN, ["--replay-size", "1e10"], "GiB is free; lower --replay-size"),
    "several trainers on Ray": (RAY_IMPALA, ["--num-learners", "2"], "num-learners=2: on Ray there is one"),
    "a measurement on Ray": (RAY_IMPALA, ["--force-lag", "2"], "force-lag=2: it is for measurements"),
    "no cluster to join": (RAY_IMPALA, ["--address", "auto"], "address=auto: this machine has no node of a cluster"),
    "a token without a cluster": (RAY_IMPALA, ["--token-file", "k"], "token-file=k: it is for a running cluster"),
    "no token without a cluster": (RAY_DQN, ["--insecure-cluster"], "insecure-cluster=True: it is for a running clu"),
    "a flag of DQN": (RAY_IMPALA, ["--num-shards", "2"], "num-shards=2: only --algo dqn has this flag; add --algo dqn"),
    "a switch of IMPALA": (RAY_DQN, ["--no-vtrace"], "no-vtrace: only --algo impala has this flag; add --algo impala"),
    "no token to join with": (
        RAY_IMPALA,
        ["--address", "127.0.0.1:1", "--token-file", "nowhere"],
        "token-file=nowhere: it cannot be read (No such file or directory); copy it",
    ),
    "half a replay": (
        APEX_DQN,
        ["--num-learners", "2", "--save-replay"],
        "save-replay=True: checkpoints hold the replay",
    ),
    "another optimizer for ddpg": (APEX_DDPG, ["--optimizer", "rmsprop"], "optimizer=rmsprop: ddpg supports only"),
    "an unknown algorithm": (APEX_DQN, ["--algo", "sac"], "algo=sac: must be one of"),
    "actors that cannot be shared out": (IMPALA, ["--num-learners", "3"], "num-learners=3: 2 actors cannot"),
    "unrolls that do not fit": (
        IMPALA,
        ["--replay-proportion", "0.5", "--replay-size", "1e9"],
        "GiB is free; lower --replay-size",
    ),
    "a share of less than one unroll": (
        IMPALA,
        ["--replay-proportion", "0.02", "--batch-unrolls", "16"],
        "replay-proportion=0.02: rounded, it leaves no replayed unroll among 16; raise --batch-unrolls, or set it to 0",
    ),
    "gradients clipped to nothing": (A3C_DATA, ["--max-grad-norm", "0"], "max-grad-norm=0.0: must be 1e-09 or more"),
    "replayed unrolls": (
        IMPALA,
        ["--replay-proportion", "0.5", "--replay-size", "3"],
        "replay-size=3: a learner takes ",
    ),
    "no learner": (TASK, ["--role", "collector"], "role=collector: the task would have no learner; add --attach-to"),
    "a second learner": (TASK, [*ATTACHED, "--key-file", "k"], "role=learner: the task to join has its learner; "),
    "a node that joins without a key": (
        TASK,
        [*ATTACHED, "--role", "evaluator"],
        f"attach-to={ATTACHED[1]}: TCP needs",
    ),
    "a node that joins with a key that is not there": (
        TASK,
        [*ATTACHED, "--role", "collector", "--key-file", "k"],
        "key-file=k: there is no such file",
    ),
    "a node that joins with settings of its own": (
        TASK,
        [*ATTACHED, "--role", "collector", "--max-seconds", "9"],
        "max-seconds=9: a node that joins has the settings of the task there; leave it out",
    ),
    "a node that joins with a switch of its own": (
        TASK,
        [*ATTACHED, "--role", "collector", "--no-normalize-obs"],
        "normalize-obs=False: a node that joins has the settings of the task there; leave it out",
    ),
    "a node that joins and listens": (
        TASK,
        [*ATTACHED, *LISTENING, "--role", "collector"],
        "attach-to=tcp://127.0.0.1:9: a node that joins does not listen; leave --listen out",
    ),
    "a task that listens without a key": (TASK, LISTENING[:2], "listen=tcp://127.0.0.1:0: TCP needs a key; add --key"),
    "a task that listens at no address": (
        TASK,
        ["--listen", "50515", "--key-file", "k"],
        "listen=50515: is not tcp://",
    ),
    "a task that listens elsewhere": (
        TASK,
        ["--listen", "tcp://192.0.2.1:50515", "--key-file", "k"],
        "listen=tcp://192.0.2.1:50515: cannot be bound (Cannot assign requested address); choose another port, or an",
    ),
    "a task alone that listens": (TASK, [*LISTENING, "--standalone"], "listen=tcp://127.0.0.1:0: a standalone task is"),
    "a task alone that joins another": (
        TASK,
        [*ATTACHED, "--role", "collector", "--standalone"],
        "a standalone task is",
    ),
    "a task alone on TCP": (TASK, ["--transport", "tcp", "--standalone"], "transport=tcp: a standalone task is one"),
    "a task on TCP without a key": (
        TASK,
        ["--transport", "tcp"],
        "transport=tcp: TCP needs a key; add --key-file FILE",
    ),
    "threads of members": (
        POPULATION,
        ["--learner-threads", "2"],
        "learner-threads=2: each member is a process with one",
    ),
    "a key without TCP": (TASK, ["--key-file", "k"], "key-file=k: nothing is on TCP; add --listen or --attach-to, or"),
    "places without a listener": (TASK, ["--remote-actors", "8"], "remote-actors=8: no node can join; add --listen"),
    "threads of nodes": (TASK, ["--async-mode"], "async-mode=True: nodes run beside each other anyway; add --stand"),
    "threads in a fixed order": (
        TASK,
        ["--async-mode", "--standalone", "--deterministic"],
        "async-mode=True: threads have no fixed order; leave --deterministic out",
    ),
    "nodes that join in a fixed order": (
        TASK,
        [*LISTENING, "--deterministic"],
        "listen=tcp://127.0.0.1:0: who joins, and when, has no fixed order; leave --deterministic out",
    ),
    "rollouts too large for a message": (
        TASK,
        [*LISTENING, "--num-envs", "4096", "--unroll-length", "2048"],
        "num-envs=4096: field obs of a rollout would have 134,283,264 bytes, a message between nodes can have "
        "134,217,728; lower it or --unroll-length",
    ),
    "a population of one": (POPULATION, ["--population", "1"], "population=1: must be between 2 and 256"),
    "a tournament larger than the population": (
        POPULATION,
        ["--population", "3", "--tournament-size", "4"],
        "tournament-size=4: there are 3 members; lower it, or raise --population",
    ),
    "a negative probability": (POPULATION, ["--mutate-none", "-0.1"], "mutate-none=-0.1: must be 0 or more"),
    "a NaN probability": (POPULATION, ["--mutate-parameters", "nan"], "mutate-parameters=nan: must be a finite number"),
    "a range upside down": (
        POPULATION,
        ["--learning-rate-range", "1e-1", "1e-5"],
        "learning-rate-range=0.1 to 1e-05: it is upside down; give the lower end first",
    ),
    "a range that ends nowhere": (POPULATION, ["--learning-rate-range", "1e-5", "inf"], "both ends must be finite"),
    "a range of half units": (POPULATION, ["--units-range", "16", "64.5"], "units-range=16: Could not parse arguments"),
    "half a range": (POPULATION, ["--batch-size-range", "8"], "batch-size-range: a value is missing"),
    "a start outside its range": (
        POPULATION,
        ["--batch-size", "512"],
        "batch-size-range=8 to 256: the first member has 512; widen the range, or start inside it",
    ),
    "units outside their range": (POPULATION, ["--hidden", "8"], "units-range=16 to 256: the first member has 8; "),
    "factors that stand still": (POPULATION, ["--grow-factor", "1", "2"], "grow-factor=1 to 2: must be 1.01 or more"),
    "a layer without units": (POPULATION, ["--hidden", "64", "0"], "hidden=(64, 0): must be more than 0"),
    "no learning": (POPULATION, ["--learning-rate", "0"], "learning-rate=0.0: must be more than 0"),
    "a population by chance": (POPULATION, ["--no-deterministic"], "deterministic=False: a population is always"),
    "a population of actors": (POPULATION, ["--num-actors", "2"], "num-actors=2: there is no such flag"),
    "a population that starts too late": (
        POPULATION,
        ["--replay-size", "1000", "--learning-starts", "501"],
        "learning-starts=501: the replay has room for 1000; use half of it at most",
    ),
    "a population that sees images": (
        POPULATION,
        ["--env-id", "PongNoFrameskip-v4"],
        "env-id=PongNoFrameskip-v4: observations are images (4, 84, 84), members need vectors; choose another",
    ),
    "random frame skip": (A3C_DATA, ["--env-id", "Pong-v4"], "use PongNoFrameskip-v4 or ALE/Pong-v5; choose another"),
}


@pytest.mark.parametrize(("chapter", "bad", "message"), SPECIAL.values(), ids=SPECIAL)
def test_what_does_not_go_together(chapter, bad, message, refused):
    small = ["--env-id", chapter.env_id]  # nets for Pong take a second to make
    assert message in refused(chapter.module.main, [*flags_of(chapter), *small, *bad])


def test_ranks_that_cannot_share_the_members(refused, monkeypatch):
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    line = refused(POPULATION.module.main, ["--population", "2"])
    assert "population=2: each of 3 ranks needs at least one; raise it, or start fewer processes" in line
    monkeypatch.setitem(sys.modules, "accelerate", None)
    line = refused(POPULATION.module.main, ["--population", "3"])
    assert "WORLD_SIZE=3: several ranks need accelerate; pip install accelerate" in line


@pytest.mark.parametrize(
    "how", [["--listen", "tcp://127.0.0.1:0"], ["--transport", "tcp"], [*ATTACHED, "--role", "collector"]]
)
def test_a_key_that_others_can_read_is_of_no_use(how, refused, tmp_path):
    make_key(tmp_path / "k")
    (tmp_path / "k").chmod(0o640)
    assert "key-file=k: other users can access it (mode 0640); chmod 600 it" in refused(
        train_task.main, [*how, "--key-file", "k"]
    )


def test_a_port_in_use_is_refused(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        line = refused(train_task.main, ["--listen", address, "--key-file", "k"])
    assert f"listen={address}: cannot be bound (Address already in use); choose another port, or an address" in line


@pytest.mark.parametrize(
    ("flags", "what"),
    [(LISTENING, "the weights"), (["--transport", "tcp", "--key-file", "k"], "the weight policy.2.weight")],
)
def test_weights_too_large_for_a_message_are_refused_where_they_are_sent(refused, monkeypatch, flags, what):
    monkeypatch.setattr("a3c_mp.algorithms.roles.MAX_TENSOR", 16_000)
    line = refused(train_task.main, ["--env-id", TASK.env_id, *flags])
    assert line.startswith(f"error: env-id={TASK.env_id}: {what} would have ")
    assert line.endswith("can have 16,000; choose another, or use --standalone\n")


# ---- environments of the user's own


class OldReset(Env):
    def reset(self, *, seed=None, options=None):
        return self.obs


class WrongAtTheHighestAction(Env):
    def step(self, action):
        return (self.obs, math.nan if action == 1 else 0.0, *self.rest[1:])


class Continuous(Env):
    action_space = Box(-1.0, 1.0, (1,), np.float32)


BROKEN = {
    "a step of four values": (
        Env,
        {"rest": (0.0, False, {})},
        "step(0) returned 4 values, gymnasium's API has 5: (obs",
    ),
    "a reset without info": (OldReset, {}, "reset() returned a ndarray, gymnasium's API has 2: (observation, info)"),
    "info is no dict": (
        Env,
        {"rest": (0.0, False, False, None)},
        "step(0) returned an info of type NoneType, must be a",
    ),
    "observations of another shape": (Env, {"obs": np.zeros(4, np.float32)}, "of shape (4,), its space has (3,)"),
    "observations of another type": (
        Env,
        {"observation_space": Box(0, 255, (3,), np.uint8), "obs": np.zeros(3)},
        "of type float64, its space has uint8",
    ),
    "observations that are words": (Env, {"obs": ["a", "b", "c"]}, "of type <U1, its space has float32"),
    "NaN in observations": (
        Env,
        {"obs": np.full(3, np.nan, np.float32)},
        "returned an observation with NaN or infinity",
    ),
    "a NaN reward": (WrongAtTheHighestAction, {}, "step(1) returned the reward nan, must be a finite number"),
    "a reward for each of several": (
        Env,
        {"rest": (np.zeros(2), False, False, {})},
        "returned the reward [0. 0.], must",
    ),
    "ends that are no flags": (
        Env,
        {"rest": (0.0, "no", False, {})},
        "returned ['no', False] for terminated and truncated",
    ),
    "actions from 1 on": (
        Env,
        {"action_space": Discrete(2, start=1)},
        "its actions are Discrete(2, start=1), this needs Discrete from 0",
    ),
}


@each_chapter(ALL_CHAPTERS)
@pytest.mark.parametrize(("cls", "changes", "message"), BROKEN.values(), ids=BROKEN)
def test_environments_that_break_the_api(main, flags, cls, changes, message, register, refused):
    line = refused(main, [*flags, "--env-id", register(entry_point=cls, changes=changes)])
    assert line.startswith("error: env-id=Custom-v0: ")
    assert message in line


DDPG_ENVS = {
    "actions without bounds": ({"action_space": Box(-np.inf, np.inf, (1,), np.float32)}, "are not finite"),
    "images": (
        {"observation_space": Box(0, 255, (40, 40, 3), np.uint8), "obs": np.zeros((40, 40, 3), np.uint8)},
        "algo=ddpg: observations are images (3, 40, 40), it needs vectors",
    ),
    "a step of four values": ({"rest": (0.0, False, {})}, "returned 4 values"),
}


@pytest.mark.parametrize(("changes", "message"), DDPG_ENVS.values(), ids=DDPG_ENVS)
def test_environments_that_ddpg_cannot_use(changes, message, register, refused):
    line = refused(train_apex.main, ["--algo", "ddpg", "--env-id", register(entry_point=Continuous, changes=changes)])
    assert message in line


def test_an_environment_that_keeps_the_contract_passes(register):
    from a3c_mp.run.preflight import probe_env

    sloppy = {"obs": [0.0, 0.5, 1.0], "rest": (np.float64(1.0), np.bool_(False), 0, {})}
    for changes in ({}, sloppy):
        assert probe_env(register(changes=changes), Discrete)[1] == Discrete(2)


def leave(self, *args, **kwargs):
    sys.exit("licence expired")


@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
def test_an_environment_that_ends_the_process_is_named(where, register, refused):
    line = refused(train_a3c_data.main, ["--env-id", register(changes={where: leave})])
    assert "env-id=Custom-v0: it raises SystemExit(licence expired); " in line


def test_a_module_of_environments_that_ends_the_process_is_named(tmp_path, monkeypatch, refused):
    (tmp_path / "leaving_env.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = refused(train_a3c_data.main, ["--env-id", "leaving_env:Env-v0"])
    assert "env-id=leaving_env:Env-v0: it raises SystemExit(); " in line


@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
def test_a_signal_while_an_environment_is_tried_out_keeps_its_code(where, register, monkeypatch):
    def interrupted(self, *args, **kwargs):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("sys.argv", ["script.py", "--env-id", register(changes={where: interrupted})])
    with pytest.raises(SystemExit) as end:
        exit_with(train_a3c_data.main)
    assert end.value.code == 128 + signal.SIGTERM


CLOSED = {
    "as it should be": {},
    "actions of the wrong kind": {"action_space": Box(-1.0, 1.0, (1,), np.float32)},
    "a broken contract": {"rest": (0.0, False, {})},
    "an error of its own": {"step": lambda self, action: 1 / 0},
    "an exit": {"step": leave},
}


@pytest.mark.parametrize("changes", CLOSED.values(), ids=CLOSED)
def test_the_environment_that_is_tried_out_is_closed_in_every_case(changes, register):
    from a3c_mp.run.preflight import probe_env

    closed = []
    with suppress(ConfigError):
        probe_env(register(changes={**changes, "close": lambda self: closed.append(True)}), Discrete)
    assert closed == [True]


def test_what_an_environment_raises_itself_is_left_for_the_actor_to_tell(register):
    from a3c_mp.run.preflight import probe_env

    def step(self, action):
        raise ArithmeticError("the emulator caught fire")

    assert probe_env(register(changes={"step": step}), Discrete)


def test_bytes_of_ram_do_not_go_through_convolutions(register, refused):
    ram = {"observation_space": Box(0, 255, (128,), np.uint8), "obs": np.zeros(128, np.uint8)}
    line = refused(train_impala.main, ["--net", "deep", "--env-id", register(changes=ram)])
    assert "net=deep: observations are of shape (128,), it needs images" in line


# ---- folders

NAMES = {
    "a slash": ("a/b", "run-name=a/b: must be a plain folder name"),
    "dots": ("..", "run-name=..: must be a plain folder name"),
    "nothing": ("", "run-name: must be a plain folder name"),
    "a line break": ("a\nb", "run-name=a b: must be a plain folder name"),
    "too long": (LONG, "must be a plain folder name"),
    "a foreign folder": ("thesis", "run-name=thesis: thesis is not a run folder: it holds chapter.tex; choose"),
    "a finished run": ("run", "run-name=run: run holds a run already; choose another name, or --resume run"),
    "a file": ("notes.txt", "notes.txt cannot be written (File exists)"),
}


@each_chapter(ALL_CHAPTERS)
@pytest.mark.parametrize(("name", "message"), NAMES.values(), ids=NAMES)
def test_run_names(main, flags, name, message, refused, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    where = ["--env-id", "CartPole-v1", "--runs-dir", ".", "--run-name"]
    assert message in refused(main, [*flags, *where, name])
    assert sorted(path for path in tmp_path.rglob("*") if path.name != ".lock") == before


@each_chapter(ALL_CHAPTERS)
def test_folders_that_cannot_be_written(main, flags, refused, tmp_path):
    (tmp_path / "file").touch()
    for folder in ("file", "file/below", "/proc/runs"):
        line = refused(main, [*flags, "--env-id", "CartPole-v1", "--runs-dir", folder])
        assert re.match(f"error: runs-dir={folder}: {folder}(/.*)? cannot be written", line)
        assert line.endswith("choose another --runs-dir\n")


# ---- runs that are there


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a run of every chapter that has learned nothing in ten steps, made by the library itself."""
    old = tmp_path_factory.mktemp("old")
    for chapter in ALL:
        name, env_id = chapter.algorithm, chapter.env_id
        args = chapter.args_class(env_id=env_id, runs_dir=old, run_name=name)
        algo = {"apex_dqn": dqn, "apex_ddpg": ddpg, "ray_dqn": dqn}.get(name)
        if algo:
            args = dataclasses.replace(args, algo=name.partition("_")[2], replay_size=4000, learning_starts=100)
        env = make_env(env_id)
        spaces = env.observation_space, env.action_space
        if algo:
            net = algo.make_net(*spaces)
            optimizer, extra = algo.make_optimizer(args, net), {"target_net": net}
        elif chapter is POPULATION:
            population = Population(args, Spaces(*spaces))
            net, optimizer, extra = population.elite, None, {"population": population}
        else:
            net = make_actor_critic(*spaces)
            optimizer, extra = make_optimizer(args, net), None
        with Run(args, name, net, optimizer, extra) as run:
            run.record_rollout(10, [Episode(10.0, 10)], 0, 0)
    return old


@pytest.fixture
def old(finished, tmp_path, capfd):
    """The same, to be spoilt by one test."""
    capfd.readouterr()
    return shutil.copytree(finished, tmp_path / "old")


RESUMED_BY = [
    (chapter, next(other for other in ALL[n:] + ALL[:n] if other.script != chapter.script))
    for n, chapter in enumerate(ALL_CHAPTERS, 1)
]
"""each chapter, and another one"""


@pytest.mark.parametrize(("chapter", "other"), RESUMED_BY, ids=row_id)
def test_the_run_of_another_chapter_is_not_resumed(chapter, other, old, refused):
    line = refused(chapter.module.main, ["--resume", f"old/{other}"])
    assert line.startswith(f"error: resume=old/{other}: ")
    assert "belongs to another chapter, " in line


RESUMES = {
    "other algorithm": (
        ["--algo", "ddpg", "--env-id", "Pendulum-v1"],
        "was made with algorithm apex_dqn, not apex_ddpg",
    ),
    "other environment": (["--env-id", "Acrobot-v1"], "was made with env_id CartPole-v1, not Acrobot-v1"),
    "broken setting": (["--num-envs", "0"], "num-envs=0: must be"),
}


@pytest.mark.parametrize(("bad", "message"), RESUMES.values(), ids=RESUMES)
def test_a_resumed_run_stays_what_it_was(bad, message, old, refused):
    before = (old / "apex_dqn" / "config.json").read_text()
    assert message in refused(train_apex.main, ["--resume", "old/apex_dqn", *bad])
    assert (old / "apex_dqn" / "config.json").read_text() == before


@EVERY_ONE_OF_ALL
def test_a_run_without_a_checkpoint_is_not_started_again(chapter, old, refused):
    shutil.rmtree(old / str(chapter) / "checkpoints")
    line = refused(chapter.module.main, ["--resume", f"old/{chapter}"])
    assert "holds no checkpoint; start a new run, or restore the folder" in line


PLAY = {
    "no run": ([], "run: must be given"),
    "no folder": (["old/none"], "run=old/none: there is no such folder"),
    "a file of a run": (["old/impala/config.json"], "there is no such folder or checkpoint (.pt)"),
    "a video of no game": (["old/impala", "--export", "x.onnx", "--video", "x.mp4"], "video=x.mp4: --export plays no"),
    "no checkpoint file": (["old/impala/checkpoints/step_5.pt"], "step_5.json"),
    "mistyped flag": (
        ["old/impala", "--episode", "3"],
        "episode=3: there is no such flag; perhaps you meant --episodes",
    ),
    "no episodes": (["old/impala", "--episodes", "0"], "episodes=0: must be 1 or more"),
    "no whole number": (["old/impala", "--seed", "1.5"], "seed=1.5: must be a whole number"),
    "no folder for the video": (["old/impala", "--video", "none/game.mp4"], "video=none/game.mp4: "),
    "no video": (["old/impala", "--video", "game.txt"], "video=game.txt: "),
    "no export": (["old/impala", "--export", "p.pt"], "export=p.pt: it must be a file that ends in .onnx or .safetens"),
}


@pytest.mark.parametrize(("flags", "message"), PLAY.values(), ids=PLAY)
def test_play(flags, message, old, refused):
    assert message in refused(play.main, flags)


SPOILT = {
    "no settings": ("config.json", None, "config.json"),
    "no JSON": ("config.json", "{,", "config.json: Expecting property name"),
    "settings that are no settings": ("config.json", "[]", "run=old/impala: "),
    "no arguments": ("config.json", '{"args": 3, "algorithm": "impala"}', "run=old/impala: "),
    "an algorithm that is not known": ("config.json", {"algorithm": "sac"}, "was made with algorithm impala, not sac"),
    "an environment that is gone": ("config.json", {"args": {"env_id": "Gone-v1"}}, "was made with env_id CartPole-v1"),
}


@pytest.mark.parametrize(("file", "content", "message"), SPOILT.values(), ids=SPOILT)
def test_play_names_a_spoilt_run(file, content, message, old, refused):
    path = old / "impala" / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    assert message in refused(play.main, ["old/impala"])


def test_play_of_a_net_with_more_actions_than_the_environment_has(old, refused, monkeypatch):
    monkeypatch.setattr(play, "probe_env", lambda env_id, actions: (Box(-1.0, 1.0, (4,), np.float32), Discrete(1)))
    assert "does not fit CartPole-v1 as it is now" in refused(play.main, ["old/impala"])


PLOT = {
    "no run": ([], "runs: no run folder is named"),
    "no folder": (["old/none"], "runs=old/none: not a run folder, config.json is missing"),
    "mistyped flag": (["old/impala", "--windows", "3"], "windows=3: there is no such flag; perhaps you meant --window"),
    "no window": (["old/impala", "--window", "0"], "window=0: must be 1 or more"),
    "no folder for the picture": (["old/impala", "--out", "none/x.png"], "out=none/x.png: it must be a .png"),
    "no picture": (["old/impala", "--out", "curves.xyz"], "out=curves.xyz: "),
    "a folder in its place": (["old/impala", "--out", "old"], "out=old: "),
    "no population": (["old/impala", "--lineage"], "runs=old/impala: there is no lineage.csv in this folder"),
}


@pytest.mark.parametrize(("flags", "message"), PLOT.values(), ids=PLOT)
def test_plot(flags, message, old, refused):
    assert message in refused(plot.main, flags)


def test_plot_of_several_folders_none_of_which_is_a_run(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plot.py", "none", "nil"])
    with pytest.raises(ConfigError, match="runs=none nil: none of them has anything to draw"):
        plot.main()
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["skipped"] * 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "[]"),
        ("config.json", "{"),
        ("config.json", '{"algorithm": "x", "args": {}}'),
        ("episodes.csv", "steps,seconds\n1,2\n"),
        ("episodes.csv", "steps,seconds,actor,episode_return,length\n1,2,3,x,5\n"),
        ("episodes.csv", "\x00\xff\n"),
    ],
)
def test_plot_names_a_spoilt_run(file, content, old, refused):
    (old / "impala" / file).write_bytes(content.encode("latin1"))
    assert "runs=old/impala: not a run folder" in refused(plot.main, ["old/impala"])
