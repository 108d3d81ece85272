"""Bad input to every script: exit code 2, one line that says what, why and what to do, and nothing started."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import typing
from contextlib import suppress

import gymnasium
import numpy as np
import pytest
import torch
from envs import Env
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from harness import ALL_CHAPTERS, APEX_DQN, CONTINUOUS, EVERY_ONE_OF_ALL, IMPALA, POPULATION_PPO, RAY_DQN

import play
import plot
import train_a3c_data
import train_apex
import train_task
from a3c_mp.api import policy
from a3c_mp.cli.parser import plain_type
from a3c_mp.config import bounds_of, check_ranges, flag_name
from a3c_mp.data.episodes import Episode
from a3c_mp.errors import ConfigError
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.run.preflight import TORCH_FOLDER, check_temporary_folder, probe_env
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with
from a3c_mp.wrappers import make_env

ALL = [*ALL_CHAPTERS, *CONTINUOUS, POPULATION_PPO]
BY_NAME = {str(chapter): chapter for chapter in ALL}


def each_chapter(chapters=ALL):
    """Of every chapter: its `main`, and the flags that choose its algorithm."""
    rows = [(chapter.module.main, flags_of(chapter)) for chapter in chapters]
    return pytest.mark.parametrize(("main", "flags"), rows, ids=[str(chapter) for chapter in chapters])


def flags_of(chapter):
    if chapter in CONTINUOUS:
        return ["--algo", chapter.algorithm.removeprefix("apex_"), "--env-id", "Pendulum-v1"]
    if chapter is POPULATION_PPO:
        return ["--algo", "ppo"]
    return ["--algo", "dqn"] if chapter in (APEX_DQN, RAY_DQN) else []


@EVERY_ONE_OF_ALL
def test_every_number_has_its_range(chapter):
    """All numeric flags of a chapter, from both sides, NaN and infinity."""
    make_args = chapter.args_class
    hints, types, tried = typing.get_type_hints(make_args, include_extras=True), typing.get_type_hints(make_args), 0
    args = make_args()
    check_ranges(args)
    for field in dataclasses.fields(args):
        hint = hints[field.name]
        if plain_type(types[field.name]) not in (int, float):  # a range of a gene: see `SPECIAL`
            continue
        assert bounds_of(hint) or field.name in ("stop_return", "stop_eval_return"), f"{field.name} has no range"
        bad = [math.nan, math.inf]
        for bounds in bounds_of(hint):
            bad += [bounds.low - 1] + [bounds.high + 1] * (bounds.high < math.inf)
        for value in bad:
            with pytest.raises(ConfigError, match=rf"^{flag_name(field.name)}=.*: must be .+$"):
                check_ranges(dataclasses.replace(args, **{field.name: value}))
            tried += 1
    assert tried > 50


@EVERY_ONE_OF_ALL
def test_help_shows_every_flag_and_no_other(chapter, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [chapter.script, *chapter.flags, "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        chapter.module.main()
    assert not end.value.code
    text = capsys.readouterr().out
    shown = {flag.removeprefix("no-") for flag in re.findall(r"(?<![\w-])--([a-z][a-z-]+)", text)}
    flags = {flag_name(field.name) for field in dataclasses.fields(chapter.args_class)}
    assert shown == flags | {"help", "version"}
    assert chapter.actors_flag in flags


# ---- flags and environments, in every chapter

FLAGS = """
--num-envs 0                 | num-envs=0: must be between 1 and 4096
--learning-rate nan          | learning-rate=nan: must be a finite number
--total-steps inf            | total-steps=inf: must be a whole number
--seed                       | seed: expected one argument
--deterministic=true         | deterministic: switches take no value: --NAME turns one on, --no-NAME off
--num-env 2                  | num-env=2: there is no such flag; perhaps you meant --num-envs
CartPole-v1                  | arguments=CartPole-v1: a value without a flag; perhaps --env-id CartPole-v1
--precision fp8              | precision=fp8: must be one of
--resume old/nothing         | resume=old/nothing: there is no run in this folder
--resume-or-start            | resume-or-start: it needs the name of the run; add --run-name NAME
--resume-or-start --run-name a/b | run-name=a/b: must be a plain folder name
--env-id Nonesuch-v3         | env-id=Nonesuch-v3: Environment `Nonesuch` doesn't exist; if a module registers it, name
--env-id Nonesuch-v3?size=5  | name that too (module:Nonesuch-v3), or see gymnasium.pprint_registry()
--env-id CartPole            | ; perhaps you meant CartPole-v1, or module:CartPole
--env-id Pong-v5             | ; perhaps you meant ALE/Pong-v5
--env-id envs:Nowhere-v0     | ; envs was imported and registers no Nowhere-v0: call gymnasium.register in it, or check
--env-id nowhere:Env-v0      | env-id=nowhere:Env-v0: No module named 'nowhere'
"""
if not torch.cuda.is_available():
    FLAGS += "--cuda             | error: cuda\n"


def table(text):
    """Rows of cells."""
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


@each_chapter()
@pytest.mark.parametrize(("bad", "message"), table(FLAGS))
def test_flags_and_environments(main, flags, bad, message, refused):
    assert message in refused(main, [*flags, *bad.split()])


@pytest.mark.parametrize("what", ["observation", "action"])
def test_spaces_without_numbers_are_refused(what, register, refused):
    line = refused(train_a3c_data.main, ["--env-id", register(changes={f"{what}_space": Box(-1, 1, (0,))})])
    assert line.startswith(f"error: env-id=Custom-v0: its {what}s have no numbers; give them one")


MIXED = Tuple([Box(0, 3, (1,), np.int32), Box(-1, 1, (1,))])


@pytest.mark.parametrize("space", [Dict(a=Discrete(2), b=Box(-1, 1)), MIXED, Box(0, 9, (2,), int), Text(3)])
def test_actions_that_there_is_no_policy_for(space, register, refused):
    line = refused(train_a3c_data.main, ["--env-id", register(changes={"action_space": space})])
    needed = (
        "this needs Discrete, Box of floating-point numbers, MultiDiscrete, MultiBinary; give --wrapper module:Class"
    )
    assert line.startswith(f"error: env-id=Custom-v0: its actions are {space}, {needed}, a gymnasium.ActionWrapper")


PONG = "--env-id PongNoFrameskip-v4 --hidden 64"
HUGE = "--num-envs 4096 --unroll-length 1e7"
LISTENING = "--listen tcp://127.0.0.1:0 --key-file k"
ATTACHED = "--attach-to tcp://127.0.0.1:9"
SPECIAL = """
a3c_data | --batch-size 1e6 | batch-size=1000000: a rollout has only 32 * 8
a3c_data | HUGE | GiB is free; lower --num-actors, --num-envs
impala | --reward-scale 0 | reward-scale=0.0: must be 1e-30 or more
impala | HUGE --replay-proportion 0 | GiB is free; lower --num-actors, --num-envs
apex_dqn | --net deep | net=deep: observations are of shape (4,), it needs images
apex_ddpg | --policy-delay 3 | policy-delay=3: --algo=ddpg does not use it; use --algo td3 (chapter 3)
apex_td3 | --epsilon 0.3 | epsilon=0.3: --algo=td3 does not use it; add --algo dqn
apex_ddpg | --num-quantiles 5 | num-quantiles=5: --algo=ddpg does not use it
apex_dqn | --replay-size 1e12 | GiB is free; lower --replay-size
ray_dqn | --replay-size 1e12 | GiB is free; lower --replay-size
population_dqn | --replay-size 1e12 | MiB of memory is free; lower --
apex_dqn | --batch-size 300_000 | batch-size=300000: the replay has room
impala | --batch-unrolls 1e4 | batch-unrolls=10000: 625 new
a3c_data | --deterministic --slots-per-actor 3 | slots-per-actor=3:
task | --stop-eval-return 450 --total-steps 9000 | could reach it (--eval-every 20,000, --total-steps 9,000); give a
a3c_data | --stop-eval-return 450 | stop-eval-return=450.0: there is no evaluation whose return could reach it; give --
impala | --explore-envs 0.5 --no-vtrace | explore-envs=0.5: V-trace corrects for it; leave out --no-vtrace
a3c_grad | --env-id Pendulum-v1 --explore-envs 0.5 | explore-envs=0.5: it repeats discrete actions, those of Pendulum-v
impala | --noise-steps 16 | noise-steps=16: it is for continuous actions, those of CartPole-v1 are discret
apex_dqn | --act-on cuda | act-on=cuda: the net is not on a GPU; give --cuda too, or use auto
impala | --mean-limit 1 | mean-limit=1.0: it is for continuous actions, those of CartPole-v1 are discret
population_dqn | --no-evolve --elitism | elitism=True: --no-evolve does not use it; leave out --no-evolve
population_dqn | --stop-return none --confirm-episodes 9 | confirm-episodes=9: it has no effect; add --stop-return
ray_dqn | --placement spread | placement=spread: it has no effect; add --address
population_dqn | --no-evolve --resample 1 | resample=1.0: --no-evolve does not use it; leave out --no-evolve
task | --standalone --hang-seconds 60 | hang-seconds=60.0: --standalone does not use it; leave out --standal
population_ppo | --num-envs 4 --unroll-length 4 --batch-size 17 | batch-size=17: a rollout has only 4 * 4 samples; lowe
population_ppo | --genes n_step | genes=n_step: --returns=gae does not use it; add --returns nstep
population_ppo | --learn-every 9 | learn-every=9: there is no such flag
apex_dqn | --noise 0.1 | noise=0.1: --algo=dqn does not use it; see --algo
a3c_grad | --deterministic --slots-per-actor 2 | slots-per-actor=2: with --sync or --deterministic each actor waits for
impala | --replay-proportion 0 --replay-size 9 | replay-size=9: --replay-proportion=0.0 does not use it; raise --replay
a3c_grad | --sync --max-lag 3 | max-lag=3: with --sync or --deterministic each
apex_dqn | --deterministic --blocks-per-actor 4 | blocks-per-actor=4: --deterministic does not use it; leave out --dete
a3c_data | --n-step 8 | n-step=8: --returns=gae does not use it; add --returns nstep
impala | --optimizer rmsprop --adam-eps 1e-3 | adam-eps=0.001: --optimizer=rmsprop does not use it; use --rmsprop-eps
a3c_data | --num-envs 3 --explore-envs 0.15 | explore-envs=0.15: that is none of 3 environments; raise it or --num-envs
a3c_grad | --sync --grads-per-step 5 | grads-per-step=5:
apex_dqn | --learning-rate 0 --learning-rate-end 1e-4 | learning-rate-end=0.0001: a learning rate of 0
apex_dqn | --replay-size 100 --learning-starts 9 | replay-size=100: each of
apex_ddpg | --env-id CartPole-v1 | env-id=CartPole-v1: its actions are Disc
apex_dqn | --env-id Pendulum-v1 | env-id=Pendulum-v1: its actions are Box(
population_dqn | --env-id Pendulum-v1 | env-id=Pendulum-v1: its actions are Box(
apex_dqn | --num-learners 3 | num-learners=3: 2 actors cannot be
ray_dqn | --num-shards 3 | num-shards=3: only 2 actors fill them; lower it
ray_dqn | --save-replay | save-replay=True: shards are not saved
ray_impala | --num-learners 3 | num-learners=3: 2 actors cannot be
ray_impala | --address auto | address=auto: this machine has no node of a cluster
ray_impala | --token-file k | token-file=k: it is for a running cluster
ray_impala | --actor-gpus 0.5 | actor-gpus=0.5: trainer and 2 actors need 1 GPUs in all, this machine has 0; lower it
ray_dqn | --trainer-gpus 1 | trainer-gpus=1.0: its net is on the CPU; add --cuda, or set it to 0
ray_dqn | --insecure-cluster | insecure-cluster=True: it is for a running clu
ray_impala | --address x:1 --token-file k --insecure-cluster | token-file=k: a cluster that --insecure-cluster joins has
ray_impala | --address 127.0.0.1:1 --token-file nowhere | token-file=nowhere: it cannot be read (No such file or direct
apex_dqn | --num-learners 2 --save-replay | save-replay=True: checkpoints hold the replay
apex_ddpg | --optimizer rmsprop | optimizer=rmsprop: ddpg supports only
impala | --replay-proportion 0.02 --batch-unrolls 16 | replay-proportion=0.02: rounded, it leaves no replayed unroll am
impala | --replay-proportion 0.5 --replay-size 3 | replay-size=3: a learner takes
task | --role collector | role=collector: the task would have no learner; add --attach-to
task | ATTACHED --key-file k | role=learner: the task to join has its learner;
task | ATTACHED --role evaluator | attach-to=tcp://127.0.0.1:9: TCP needs
task | ATTACHED --role collector --max-seconds 9 | max-seconds=9.0: a node that joins has the settings of the task there
task | ATTACHED LISTENING --role collector | attach-to=tcp://127.0.0.1:9: a node that joins does not listen; leave --li
task | --listen tcp://192.0.2.1:50515 --key-file k | listen=tcp://192.0.2.1:50515: cannot be bound (Cannot assign reque
task | LISTENING --standalone | listen=tcp://127.0.0.1:0: a standalone task is
population_dqn | --learner-threads 2 | learner-threads=2: there is no such flag; see --help
population_dqn | --eval-freq 9 | eval-freq=9: there is no such flag; see --help
impala | --use-rnn | use-rnn: there is no such flag; here it is --lstm (
task | --key-file k | key-file=k: nothing is on TCP; add --listen or --attach-to, or
task | --remote-actors 8 | remote-actors=8: no node can join; add --listen
task | --async-mode | async-mode=True: nodes run beside each other anyway; add --stand
task | --async-mode --standalone --deterministic | async-mode=True: threads have no fixed order; leave --deterministic
task | LISTENING --deterministic | listen=tcp://127.0.0.1:0: who joins, and when, has no fixed order; leave --determini
population_dqn | --population 3 --tournament-size 4 | tournament-size=4: there are 3 members; lower it, or raise --popul
population_dqn | --genes learning-rate=1e-1:1e-5 | genes=learning_rate=0.1 to 1e-05: both ends must be finite and 1e-12
population_dqn | --genes gamma=0.9:1 | genes=gamma=0.9:1: both ends must be below 1
population_dqn | --genes n-step=1.5:4 | genes=n-step=1.5:4: both ends must be whole numbers
population_dqn | --genes n-step=1 | genes=n-step=1: must be NAME, NAME=LOW:HIGH or NAME=LOW:HIGH:STEP
population_dqn | --genes epsilon=0.1:4 | epsilon=4.0: must be between 0 and 1
population_dqn | --genes n-step=1:4:1 | genes=n-step=1:4:1: its step is a factor, finite and 1.01 or more
population_dqn | --genes gama | genes=gama: there is no such gene; choose of learning_rate, batch_size, gamma, n_step,
population_dqn | --genes gamma gamma | genes=gamma: it is there twice
population_dqn | --batch-size 512 | genes=batch_size=8 to 256: the first member has 512; widen the range, or start insid
population_dqn | --hidden 8 | units-range=16 to 256: the first member has 8;
population_dqn | --grow-factor 1 2 | grow-factor=1 to 2: both ends must be finite and 1.01 or more
population_dqn | --no-deterministic | deterministic=False: a population is always
population_dqn | --replay-size 1000 --learning-starts 501 | learning-starts=501: the replay has room for 1000; use half
population_dqn | --convolutions 8 3 1 | convolutions=8 3 1: observations are vectors; leave it out
population_dqn | PONG --convolutions 16 8 | convolutions=16 8: each one has three numbers of 1 or more; for instance --c
population_dqn | PONG --convolutions 16 10 9 16 10 9 | convolutions=16 10 9 16 10 9: nothing is left of the image behind
population_dqn | PONG --convolutions 16 12 4 | kernels-range=1 to 10: the first member has 12; widen the range, or st
population_dqn | PONG --convolutions-range 1 2 | convolutions-range=1 to 2: the first member has 3; widen the range, or
population_dqn | PONG --replay-size 1e9 | replay-size=1000000000: for replay and nets 6,7
population_dqn | PONG --channels-range 8 100000 | replay-size=100000: for replay and nets
population_dqn | PONG --channels-range 8 16 | channels-range=8 to 16: the first member has 32; widen the range,
a3c_data | --env-id CartPole-v1?size=5 | ; choose another, or other --env-kwargs
a3c_data | --frame-size 9 | frame-size=9: must be between 36 and 1024
apex_dqn | --env-id Pendulum-v1 | or another --algo, or --wrapper gymnasium.wrappers:DiscretizeAction,bins=5
a3c_data | --frame-stack 4 | frame-stack=4: CartPole-v1#frame_stack=4 has no images of 36 x 36 or more; leave it out
population_dqn | --obs-keys a b | obs-keys=a: there is no such part in the observations of CartPole-v1
task | --wrapper envs:Nothing,x=1 | wrapper=envs:Nothing,x=1: AttributeError: envs has no Nothing; must be module:Class
a3c_data | PONG --obs-keys a | obs-keys=a: the observations of PongNoFrameskip-v4#obs_keys=a are images alone
a3c_data | --env-id Pong-v4 | use PongNoFrameskip-v4 or ALE/Pong-v5; choose another
"""


@pytest.mark.parametrize(("chapter", "bad", "message"), table(SPECIAL))
def test_what_does_not_go_together(chapter, bad, message, refused):
    chapter = BY_NAME[chapter]
    bad = bad.replace("LISTENING", LISTENING).replace("ATTACHED", ATTACHED).replace("HUGE", HUGE).replace("PONG", PONG)
    small = ["--env-id", chapter.env_id]  # nets for Pong take a second to make
    assert message in refused(chapter.module.main, [*flags_of(chapter), *small, *bad.split()])


# ---- environments of the user's own


class OldReset(Env):
    def reset(self, *, seed=None, options=None):
        return self.obs


class ResetWithoutSeed(Env):
    def reset(self):
        return self.obs, {}


class ResetWithSeedOnly(Env):
    def reset(self, *, seed, options=None):
        return self.obs, {"first": seed + 1}


class WrongAtTheHighestAction(Env):
    def step(self, action):
        return (self.obs, math.nan if action == 1 else 0.0, *self.rest[1:])


class Continuous(Env):
    action_space = Box(-1.0, 1.0, (1,), np.float32)


BYTES = Box(0, 255, (3,), np.uint8)
BRIGHT = {"observation_space": Box(0, 1, (84, 84), np.float32), "obs": np.full((84, 84), 200, np.uint8)}
BROKEN = {
    "step() returned 4 values, gymnasium's API has 5: (obs": (Env, {"rest": (0.0, False, {})}),
    "reset() returned a ndarray, gymnasium's API has 2: (observation, info)": (OldReset, {}),
    "step() returned an info of type NoneType, must be a": (Env, {"rest": (0.0, False, False, None)}),
    "of shape (4,), its space has (3,)": (Env, {"obs": np.zeros(4, np.float32)}),
    "of type float64, its space has uint8": (Env, {"observation_space": BYTES, "obs": np.zeros(3)}),
    "of type <U1, its space has float32": (Env, {"obs": ["a", "b", "c"]}),
    "returned an observation with NaN or infinity": (Env, {"obs": np.full(3, np.nan, np.float32)}),
    "reset() returned an observation: the image has values from 200 to 200, its space 0 to 1": (Env, BRIGHT),
    "step() returned the reward nan, must be a finite number": (WrongAtTheHighestAction, {}),
    "step() returned a reward of shape (2,), must be one number": (Env, {"rest": (np.zeros(2), False, False, {})}),
    "unexpected keyword argument 'seed' of reset(), gymnasium's API has reset(": (ResetWithoutSeed, {}),
    "argument: 'seed' of reset(), gymnasium's": (ResetWithSeedOnly, {}),
    "returned ['no', False] for terminated and truncated": (Env, {"rest": (0.0, "no", False, {})}),
    "its actions are Text(1, 3, charset=": (Env, {"action_space": Text(3)}),
}


@each_chapter(ALL_CHAPTERS)
@pytest.mark.parametrize("message", BROKEN)
def test_environments_that_break_the_api(main, flags, message, register, refused):
    cls, changes = BROKEN[message]
    line = refused(main, [*flags, "--env-id", register(entry_point=cls, changes=changes)])
    assert line.startswith("error: env-id=Custom-v0: ")
    assert message in line


PICTURES = {"observation_space": Box(0, 255, (40, 40, 3), np.uint8), "obs": np.zeros((40, 40, 3), np.uint8)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"action_space": Box(-np.inf, np.inf, (1,), np.float32)},
            "are not finite, or too far apart; use train_a3c_data",
        ),
        (PICTURES, "algo=ddpg: observations have images (3, 40, 40), it needs vectors; use train_a3c_data.py"),
    ],
)
def test_environments_that_ddpg_cannot_use(changes, message, register, refused):
    env_id = register(entry_point=Continuous, changes=changes)
    assert message in refused(train_apex.main, ["--algo", "ddpg", "--env-id", env_id])


def test_an_environment_that_keeps_the_contract_passes(register):
    sloppy = {"obs": [0.0, 0.5, 1.0], "rest": (np.float64(1.0), np.bool_(False), 0, {})}
    for changes in ({}, sloppy):
        assert probe_env(register(changes=changes), Discrete)[1] == Discrete(2)


def leave(self, *args, **kwargs):
    sys.exit("licence expired")


def fail(self, *args, **kwargs):
    raise ZeroDivisionError("first line\nsecond line")


@pytest.mark.parametrize(
    ("where", "what"), [*((name, leave) for name in ("__init__", "reset", "step")), ("__init__", fail)]
)
def test_an_environment_that_ends_the_process_or_cannot_be_made_is_one_line(where, what, register, refused):
    line = refused(train_a3c_data.main, ["--env-id", register(changes={where: what})])
    number = what.__code__.co_firstlineno + 1
    if what is fail:
        why = f"ZeroDivisionError: first line second line (test_bad_input.py:{number})\n"  # and no advice
    else:
        why = f"it raises SystemExit: licence expired (test_bad_input.py:{number}); fix the environment, or choose"
    assert f"env-id=Custom-v0: {why}" in line


NO_KEY, NO_PRICE = '{}["price"]', "price = 0\nassert price > 0"
DRIVER = """try:
    raise ImportError("libdriver.so: cannot open; run: repair-driver")
except ImportError as error:
    raise RuntimeError("not installed")"""
IN_PLACE = {
    NO_KEY: "KeyError: 'price' (market.py:LAST)",
    NO_PRICE: "AssertionError: assert price > 0 (market.py:LAST)",
    DRIVER: "RuntimeError: not installed (market.py:LAST), while handling ImportError: libdriver.so: cannot open; "
    "run: repair-driver (market.py:BEFORE)",
    f"{DRIVER} from error": "RuntimeError: not installed (market.py:LAST), caused by ImportError: libdriver.so: cannot",
    f"{DRIVER} from None": "RuntimeError: not installed (market.py:LAST)",
    "raise ExceptionGroup('no data', [KeyError('price'), OSError('offline')])": "ExceptionGroup: no data (2 sub-excepti"
    "ons) (market.py:LAST), with KeyError: 'price', with OSError: offline",
    "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})": "Mute: <exception str() failed> (market",
    "raise NotImplementedError": "NotImplementedError: raise NotImplementedError (market.py:LAST)",
    "price = (": "SyntaxError: '(' was never closed (market.py:LAST)",
    "import nowhere_to_be_found": "ModuleNotFoundError: No module named 'nowhere_to_be_found' (market.py:LAST)",
    "import market.prices": "ModuleNotFoundError: No module named 'market.prices'",
    "import json\njson.loads('{')": "JSONDecodeError: Expecting property name enclosed in double quotes: ",
    "gymnasium.make('Nonesuch-v7')": "NameNotFound: Environment `Nonesuch` doesn't exist (market.py:LAST)",
    "raise gymnasium.error.DependencyNotInstalled('Box2D is not installed, you can')": "DependencyNotInstalled: Box2D "
    "is not installed, you can (market.py:LAST); pip install box2d==2.3.10 (Python 3.14: docs/platforms.md)",
    "gymnasium.make('CartPole-v1', size=5)": "TypeError: CartPoleEnv.__init__() got an unexpected keyword argument 's",
}


@pytest.mark.parametrize("where", ["import", "constructor", "unregistered", "package"])
@pytest.mark.parametrize(("code", "message"), IN_PLACE.items(), ids=IN_PLACE.values())
def test_errors_of_an_environment_keep_type_place_and_causes(where, code, message, refused, tmp_path, monkeypatch):
    lines, path = ["import gymnasium", "gymnasium.register('Market-v0', lambda: Market())"], tmp_path / "market.py"
    if where in ("constructor", "unregistered"):
        code = "def Market():\n" + textwrap.indent(code, "    ")
    env_id = "market:Market" if where == "unregistered" else "market:Market-v0"
    if where == "package":
        path = tmp_path / "market" / "__init__.py"
        path.parent.mkdir()
    path.write_text("\n".join([*lines, code]) + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry.copy())
    try:
        line = refused(train_a3c_data.main, ["--env-id", env_id])
    finally:
        sys.modules.pop("market", None)
    last = path.read_text().count("\n")
    message = message.replace("LAST)", f"{last})").replace("BEFORE", str(last - 2))
    if where == "package":
        message = message.replace("market.py", "market/__init__.py")
    assert message in line
    assert not re.search("choose another|must be installed or lie|perhaps you meant|spelling", line)


@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
def test_a_signal_while_an_environment_is_tried_out_keeps_its_code(where, register, monkeypatch):
    def interrupted(self, *args, **kwargs):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("sys.argv", ["script.py", "--env-id", register(changes={where: interrupted})])
    with pytest.raises(SystemExit) as end:
        exit_with(train_a3c_data.main)
    assert end.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "changes",
    [{}, {"action_space": Continuous.action_space}, {"rest": (0.0, False, {})}, {"step": fail}, {"step": leave}],
    ids=["as it should be", "actions of the wrong kind", "a broken contract", "an error of its own", "an exit"],
)
def test_the_environment_that_is_tried_out_is_closed_in_every_case(changes, register):
    closed = []
    with suppress(ConfigError):  # actors report errors of its own
        probe_env(register(changes={**changes, "close": lambda self: closed.append(True)}), Discrete)
    assert closed == [True]


def test_an_environment_that_could_not_be_made_when_its_settings_were_chosen_is_refused_later(refused, register):
    """Without its spaces, chapter 1 would take settings that are not for vectors."""
    failures = [RuntimeError("no licence")]

    def __init__(self):
        if failures:
            raise failures.pop()

    line = refused(train_a3c_data.main, ["--env-id", register(changes={"__init__": __init__})])
    assert line.startswith("error: env-id=Custom-v0: it could be made now, but not at first"), line


def test_a_net_that_is_too_large_for_a_message_is_refused_before_others_join(refused, monkeypatch):
    monkeypatch.setattr("a3c_mp.algorithms.roles.MAX_TENSOR", 100_000)
    flags = "--env-id CartPole-v1 --num-envs 2 --unroll-length 4 --batch-size 4 --hidden 256 256 --key-file k"
    line = refused(train_task.main, [*flags.split(), "--listen", "tcp://127.0.0.1:0"])
    assert line.startswith("error: net=nature: its weights have 539,700 bytes"), line


def test_a_net_of_too_many_tensors_for_the_evaluator_is_refused(refused, monkeypatch):
    monkeypatch.setattr("a3c_mp.algorithms.roles.MAX_TENSORS", 8)
    line = refused(train_task.main, ["--env-id", "CartPole-v1", "--eval-every", "1000"])
    assert " tensors, a message to the evaluator may have 8" in line, line


# ---- folders

NAMES = {
    "a slash": ("a/b", "run-name=a/b: must be a plain folder name"),
    "dots": ("..", "run-name=..: must be a plain folder name"),
    "nothing": ("", "run-name: must be a plain folder name"),
    "a line break": ("a\nb", "run-name=a b: must be a plain folder name"),
    "too long": ("x" * 300, "must be a plain folder name"),
    "a foreign folder": ("thesis", "run-name=thesis: thesis is not a run folder: it holds chapter.tex; choose"),
    "a foreign config.json": ("bert", "run-name=bert: bert is not a run folder: it holds config.json; choose"),
    "a finished run": ("run", "run-name=run: run holds a run already; choose another name, or --resume run"),
    "a file": ("notes.txt", "notes.txt cannot be written (File exists)"),
}


@each_chapter(ALL_CHAPTERS)
@pytest.mark.parametrize(("name", "message"), NAMES.values(), ids=NAMES)
def test_run_names(main, flags, name, message, refused, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"hidden_size": 768}')
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


@each_chapter(ALL_CHAPTERS)
def test_no_temporary_folder_that_can_be_written(main, flags, refused, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TMPDIR", "/proc")
        patch.setattr("tempfile.tempdir", None)
        patch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc", "/sys"])
        line = refused(main, [*flags, "--env-id", "CartPole-v1"])
    assert line.startswith(
        "error: TMPDIR=/proc: No usable temporary directory found in ['/proc', '/sys']; let TMPDIR name a"
    )


def test_a_folder_of_torch_that_cannot_be_made_is_replaced_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (file := tmp_path / "file").touch()
    monkeypatch.setenv(TORCH_FOLDER, str(file))
    check_temporary_folder()
    default = tmp_path / f"torchinductor_{os.getuid()}"
    assert os.environ[TORCH_FOLDER] == str(default)
    default.rmdir()
    default.touch()
    with pytest.raises(ConfigError, match=f"^{TORCH_FOLDER}={default}: it cannot be made; let it name a folder that"):
        check_temporary_folder()


# ---- runs that are there


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a run of chapters 3 and 4 that has learned nothing in ten steps."""
    old, env = tmp_path_factory.mktemp("old"), make_env("CartPole-v1")
    for chapter in (APEX_DQN, IMPALA):
        args = chapter.args_class(env_id="CartPole-v1", runs_dir=old, run_name=str(chapter))
        net = make_actor_critic(env.observation_space, env.action_space)
        with Run(args, str(chapter), net, torch.optim.Adam(net.parameters())) as run:
            run.record_rollout(10, [Episode(10.0, 10)], 0, 0)
    return old


@pytest.fixture
def old(finished, tmp_path, capfd):
    """The same, to be spoilt by one test."""
    capfd.readouterr()
    return shutil.copytree(finished, tmp_path / "old")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("--algo ddpg --env-id Pendulum-v1", "algo=ddpg: the run in old/apex_dqn has dqn; leave it out"),
        ("--env-id Acrobot-v1", "was made with env_id CartPole-v1, not Acrobot-v1"),
        ("--num-quantiles 5", "num-quantiles=5: the run in old/apex_dqn has 1"),
        ("--no-normalize-obs", "normalize-obs=False: the run in old/apex_dqn has True"),
    ],
)
def test_a_resumed_run_stays_what_it_was(bad, message, old, refused):
    before = (old / "apex_dqn" / "config.json").read_text()
    assert message in refused(train_apex.main, ["--resume", "old/apex_dqn", *bad.split()])
    assert (old / "apex_dqn" / "config.json").read_text() == before


def test_a_run_without_a_checkpoint_is_not_started_again(old, refused):
    shutil.rmtree(old / "apex_dqn" / "checkpoints")
    line = refused(train_apex.main, ["--resume", "old/apex_dqn"])
    assert "holds no checkpoint; start a new run, restore the folder, or leave out" in line


SCRIPTS = """
play |                                    | run: must be given
play | old/impala/config.json             | there is no such folder or checkpoint (.pt); name a run folder
play | old/impala/checkpoints/step_5.pt   | step_5.json
play | RUN --export x.onnx --video x.mp4  | export=x.onnx: it plays no game; leave --video, --window, --random and --s
play | RUN --export x.onnx --sampled      | export=x.onnx: it plays no game
play | RUN --export x.onnx --random       | export=x.onnx: it plays no game
play | RUN --random --sampled             | random=True: no policy plays; leave --sampled and --member out
play | RUN --random --member 1            | random=True: no policy plays
play | RUN --window                       | window=True: this machine has no screen; use --video game.mp4
play | policy.safetensors                 | run=policy.safetensors: No such file
play | x.safetensors --member 1           | member=1: x.safetensors has one net; leave it out
play | RUN --episodes 0                   | episodes=0: must be 1 or more
play | RUN --video game.txt               | video=game.txt:
play | RUN --export p.pt                  | export=p.pt: it must be a file that ends in .onnx or .safetensors
plot |                                    | runs: no run folder is named
plot | old/none                           | runs=old/none: not a run folder, config.json is missing
plot | RUN --out none/x.png               | out=none/x.png: it must be a .png, .svg or .pdf in a folder that is there
plot | RUN --lineage                      | runs=old/impala: there is no lineage.csv in this folder
"""


@pytest.mark.parametrize(("script", "flags", "message"), table(SCRIPTS))
def test_play_and_plot(script, flags, message, old, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", [script, *flags.replace("RUN", "old/impala").split()])
    with pytest.raises(ConfigError) as error:
        {"play": play, "plot": plot}[script].main()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("main", "file", "content", "message"),
    [
        (play.main, "config.json", "{,", "config.json: Expecting property name"),
        (play.main, "config.json", "[]", "run=old/impala: "),
        (play.main, "config.json", {"algorithm": "sac"}, "was made with algorithm impala, not sac"),
        (play.main, "config.json", {"args": {"env_id": "Gone-v1"}}, "was made with env_id CartPole-v1"),
        (play.main, "config.json", {"args": {"env_id": "CartPole-v1", "hidden": "64 64"}}, "run=old/impala: "),
        (plot.main, "config.json", "[]", "runs=old/impala: not a run folder"),
        (plot.main, "config.json", {"args": {"env_id": "A-v0", "seed": 1, "stop_return": "abc"}}, "not a run folder"),
        (plot.main, "episodes.csv", "steps,seconds,actor,episode_return,length\n1,2,3,x,5\n", "not a run folder"),
    ],
)
def test_play_and_plot_name_a_spoilt_run(main, file, content, message, old, refused):
    path = old / "impala" / file
    text = content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content)
    path.write_text(text, encoding="latin1")
    assert message in refused(main, ["old/impala"])


def test_play_of_a_net_with_more_actions_than_the_environment_has(old, refused, monkeypatch):
    monkeypatch.setattr(policy, "probe_env", lambda env_id, actions: (Box(-1.0, 1.0, (4,), np.float32), Discrete(1)))
    assert "does not fit CartPole-v1 as it is now" in refused(play.main, ["old/impala"])
