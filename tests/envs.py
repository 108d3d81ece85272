"""Environments that misbehave or count, loaded as `envs:Name-v0`, so that every process of a run imports this module.

| id | what it does |
|---|---|
| Mishap | actor 0 is killed, raises, hangs or stops after `STEPS` steps, as the variable `MISHAPS` says |
| Helper | the same, and each environment has helper processes |
| Unmakeable | the trainer can make it, an actor cannot |
| Unplayable | raises in the evaluator |
| Slow | every step takes an actor 0.25 s |
| Thread | leaves a thread behind where it is made, and ignores SIGTERM |
| Chatty | prints in every step; actor 0 crashes in native code |
| Surrogate | actor 0 raises with a text that no encoding can write |
| Unrepeatable UnrepeatableMasked | the same seed and actions give other observations, or masks, in another process |
| NanReward InfiniteReward NanObs InfiniteObs HugeObs | one bad number, in the 150th step |
| NanForEver NanObsForEver | bad numbers from the 150th step on |
| Count | the observation is (episode, step), the reward is the step; every third episode is truncated |
| Angle | Count whose infos have the angle 10 * episode + step, also at a reset, but not in an episode's first step |
| Restless | Count whose infos change types, shapes and names with every step, and with every environment |
| Careless | it draws from `random`, `np.random` and torch where they are made, reset and stepped |
| Wandering | it leaves the current folder for another, `where`, as soon as it is made |
| Crash | Count that raises in its 50th step |
| Wide Narrow | the action should lie in its bounds, [0, 1000] or +-0.01, where the observation lies in [-1, 1] |
| Simulator | listens at a port, and notes its numbers, where it is made and when it is reset |
| Beside | a picture and a number beside it, which say only together which action is the better one |
| Masked | half of the actions, others in each step, end the game at once; its masks say which |

`Env` keeps gymnasium's contract; the fixture `register` registers a class with some attributes changed as `Custom-v0`.
"""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Dict, Discrete, Text

from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.task.exchange import FILLED, NodeChannel

STEPS = 400
"""of all environments of an actor together, before something happens"""
CHATTER = 100
"""lines that a ChattyEnv prints in a step"""
MISHAPS = "MISHAPS"
"""environment variable: what happens to the actors 0 that follow each other, separated by commas"""


def in_actor_0():
    return multiprocessing.current_process().name in ("worker-0", "collector-0") or "--standalone" in sys.argv


def next_mishap():
    """The first that no actor before this one has met. Notes of them lie in the run's current folder."""
    for mishap in os.environ.get(MISHAPS, "").split(","):
        if not Path(mishap).exists():
            return mishap
    return None


def note(mishap):
    Path(mishap).touch()


def send_and_end(channel, slot, payload):
    """Instead of `NodeChannel.send`: the message may be sent, in part or not at all."""
    note("killed while sending")
    channel.node.send(FILLED, slot, payload, None)
    signal.raise_signal(signal.SIGKILL)


def send_half(channel, slot, payload):
    """Instead of `WorkerChannel.send`: the length of a message and half of it, then the end."""
    note("killed while sending")
    os.write(channel.result_pipe.fileno(), b"\0\0\0\x30" + 20 * b"x")
    signal.raise_signal(signal.SIGKILL)


class MishapEnv(CartPoleEnv):
    """Each actor 0 meets the next mishap; those after the last meet none."""

    steps = 0
    mishap = None

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if in_actor_0() and MishapEnv.steps == 0:
            MishapEnv.mishap = next_mishap()
            if MishapEnv.mishap == "killed at start":
                note(MishapEnv.mishap)
                signal.raise_signal(signal.SIGKILL)
            if MishapEnv.mishap == "killed while sending":
                WorkerChannel.send, NodeChannel.send = send_half, send_and_end

    def step(self, action):
        MishapEnv.steps += 1
        if in_actor_0() and MishapEnv.steps >= STEPS and MishapEnv.mishap in IN_A_STEP:
            note(MishapEnv.mishap)
            IN_A_STEP[MishapEnv.mishap]()
        return super().step(action)


def catch_fire():
    raise ArithmeticError("the pole caught fire")


IN_A_STEP = {
    "killed in a step": partial(signal.raise_signal, signal.SIGKILL),
    "killed at last": partial(signal.raise_signal, signal.SIGKILL),
    "raised": catch_fire,
    "hung": partial(time.sleep, 3600),
    "left": partial(sys.exit, 0),
    "stopped": partial(signal.raise_signal, signal.SIGSTOP),
}
"""mishap -> what happens in the step of the environment"""


class UnmakeableEnv(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if multiprocessing.current_process().name != "MainProcess":
            if not Path("failed").exists():
                note("failed")
            raise ArithmeticError("no coin in the slot")


class UnplayableEnv(CartPoleEnv):
    def step(self, action):
        if multiprocessing.current_process().name == "evaluator":
            raise ArithmeticError("no coin for another player")
        return super().step(action)


class SlowEnv(CartPoleEnv):
    def step(self, action):
        if in_actor_0():
            time.sleep(0.25)
        return super().step(action)


class HelperEnv(MishapEnv):
    """In an actor it has three helper processes: one that `close()` ends, and two that it leaves: a program, a fork.

    Each has a file `helpers/ACTOR-PID`; `close()` leaves `closed/ACTOR`, and the first step `stepped/ACTOR`. The same
    in the evaluator.
    """

    def __init__(self, **kwargs):
        self.ended_by_close = None
        super().__init__(**kwargs)
        if not multiprocessing.current_process().name.startswith(("worker-", "collector-", "evaluator")):
            return
        self.ended_by_close, program = (subprocess.Popen(["sleep", "120"]) for _ in range(2))
        if (fork := os.fork()) == 0:
            time.sleep(120)
            os._exit(0)
        for folder in ("helpers", "closed", "stepped"):
            Path(folder).mkdir(exist_ok=True)
        for pid in (self.ended_by_close.pid, program.pid, fork):
            note(f"helpers/{os.getpid()}-{pid}")

    def step(self, action):
        if self.ended_by_close is not None and MishapEnv.steps == 0:
            note(f"stepped/{os.getpid()}")
        return super().step(action)

    def close(self):
        if self.ended_by_close is not None:
            self.ended_by_close.terminate()
            self.ended_by_close.wait()
            note(f"closed/{os.getpid()}")


class NotFiniteEnv(CartPoleEnv):
    def __init__(self, reward=0.0, obs=0.0, always=False, at=150, **kwargs):
        super().__init__(**kwargs)
        self.bad_reward, self.bad_obs, self.always, self.at, self.total = reward, obs, always, at, 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.total += 1
        if self.total == self.at or (self.always and self.total > self.at):
            obs, reward = obs + np.float32(self.bad_obs), reward + self.bad_reward
        return obs, reward, *rest


class UnrepeatableEnv(CartPoleEnv):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.float32(os.getpid() * 1e-6), *rest


class ThreadEnv(CartPoleEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(3600,)).start()


class ChattyEnv(CartPoleEnv):
    steps = 0

    def step(self, action):
        ChattyEnv.steps += 1
        print("\n".join(f"step {ChattyEnv.steps}, line {number}" for number in range(CHATTER)))
        if in_actor_0() and ChattyEnv.steps == STEPS:
            os.write(2, b"the emulator crashed\n")
            os.abort()
        return super().step(action)


class SurrogateEnv(CartPoleEnv):
    def step(self, action):
        if in_actor_0():
            raise ArithmeticError("a broken name: \udcff")
        return super().step(action)


EPISODE_LENGTH = 7
"""of a CountEnv"""


class CountEnv(gymnasium.Env):
    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3)

    def __init__(self):
        self.episode = -1
        self.t = 0

    def _obs(self):
        return np.array([self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert options is None, "resets of some of the environments have none either"
        self.episode += 1
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        reward = float(self.t)
        self.t += 1
        done = self.t == EPISODE_LENGTH
        truncated = done and self.episode % 3 == 2
        return self._obs(), reward, done and not truncated, truncated, {}


class AngleEnv(CountEnv):
    @property
    def info(self):
        return {} if self.t == 1 else {"angle": np.float32(10 * self.episode + self.t)}

    def reset(self, **kwargs):
        obs, _ = super().reset(**kwargs)
        return obs, self.info

    def step(self, action):
        *result, _ = super().step(action)
        return *result, self.info


class RestlessEnv(CountEnv):
    CHANGING = (None, 3, 2.5, "text", np.zeros(2), np.zeros((3, 1)), {"inner": None}, {"inner": {"inner": 1}}, True)
    made = 0

    def __init__(self):
        super().__init__()
        self.resets = RestlessEnv.made = RestlessEnv.made + 1

    def _info(self):
        now, *later = (self.CHANGING[(self.resets + self.t + i) % len(self.CHANGING)] for i in range(8))
        names = "final_obs", "final_info", "life_lost", "_last", "final_mask", "_final_info", 7, "more"
        info = {"last": now, "step": None if self.t == 0 else self.t + 0.5 * (self.t % 2), 1: now}
        return info | dict(list(zip(names, later, strict=False))[: self.t])

    def reset(self, **kwargs):
        self.resets += 1
        super().reset(**kwargs)
        self.t = self.resets % 3  # games of several lengths
        return self._obs(), self._info()

    def step(self, action):
        *result, _ = super().step(action)
        return *result, self._info()


class CarelessEnv(CartPoleEnv):
    DRAWS = (random.random, np.random.random, lambda: torch.rand(()).item(), random.SystemRandom().random)

    def __init__(self, which=0, **kwargs):
        super().__init__(**kwargs)
        self.draw = self.DRAWS[which]
        self.gravity = 9 + self.draw()

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return np.float32(obs + 0.01 * self.draw()), info

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return np.float32(obs + 0.01 * self.draw()), reward + self.draw(), *rest


class WanderingEnv(CartPoleEnv):
    def __init__(self, where="/", **kwargs):
        super().__init__(**kwargs)
        os.chdir(where)


class CrashEnv(CountEnv):
    """Raises in its 50th step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 50:
            raise ArithmeticError("the emulator caught fire")
        return super().step(action)


class SimulatorEnv(CountEnv):
    """Has a port of its own while it is open. A file has what it was given, its numbers and its process in the name."""

    def __init__(self, port, name="", render_mode=None):
        super().__init__()
        self.numbers, self.render_mode = self._numbers(), render_mode
        self.server = socket.create_server(("127.0.0.1", port))  # refused if another one has it
        Path(f"{port}_{name}_{'_'.join(self.numbers)}_{multiprocessing.current_process().name}").touch()

    def _numbers(self):
        return os.environ["A3C_ACTOR"], os.environ["A3C_ENV"]

    def reset(self, **kwargs):
        assert self._numbers() == self.numbers, "another one's numbers"
        return super().reset(**kwargs)

    def render(self):
        return np.zeros((320, 320, 3), np.uint8)

    def close(self):
        self.server.close()


class MaskedEnv(gymnasium.Env):
    """The observation says which of 8 actions earns 1 now; 4 of them, others in each step, end the game with nothing.

    A game has 32 steps and is truncated. With masks chance earns 8 of 32, without them 1/4.
    """

    observation_space = Box(0.0, 1.0, (16,), np.float32)
    action_space = Discrete(8)
    length = 32

    def __init__(self, masked=True):
        self.masked = masked

    def _next(self):
        self.allowed = np.zeros(8, np.int8)
        self.allowed[self.np_random.permutation(8)[:4]] = 1
        self.best = self.np_random.choice(np.flatnonzero(self.allowed))
        obs = np.concatenate([np.arange(8) == self.best, self.allowed]).astype(np.float32)
        return obs, {"action_mask": self.allowed.copy()} if self.masked else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._next()

    def step(self, action):
        self.t += 1
        reward, ended = float(action == self.best), not self.allowed[action]
        obs, info = self._next()
        return obs, reward, bool(ended), self.t == self.length, info


class UnrepeatableMaskedEnv(MaskedEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=os.getpid())


class BesideEnv(gymnasium.Env):
    """A game of 16 steps earns up to 16; chance, and a policy that sees only the picture or the sign, 8."""

    observation_space = Dict(picture=Box(0, 255, (36, 36, 3), np.uint8), sign=Box(-1.0, 1.0, (1,)), hint=Text(9))
    action_space = Discrete(2, start=1)

    def _obs(self):
        self.is_left, self.is_positive = (bool(self.np_random.integers(2)) for _ in range(2))
        picture = np.zeros((36, 36, 3), np.uint8)
        picture[:, slice(18) if self.is_left else slice(18, None)] = 200
        return {"picture": picture, "sign": np.float32([1.0 if self.is_positive else -1.0]), "hint": "both"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        assert action in (1, 2), action
        reward = float((action == 2) == (self.is_left == self.is_positive))
        self.t += 1
        return self._obs(), reward, False, self.t == 16, {}


class AimEnv(gymnasium.Env):
    """A game of 16 steps earns up to 16; actions in the middle earn 8, random ones 5, those at one bound 0."""

    observation_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, low, high):
        self.action_space = Box(low, high, (1,), np.float32)

    def _obs(self):
        self.target = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        return self.target

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        low, high = self.action_space.low, self.action_space.high
        reward = 1.0 - float(abs(2.0 * (action - low) / (high - low) - 1.0 - self.target)[0])
        self.t += 1
        return self._obs(), reward, False, self.t == 16, {}


class Env(gymnasium.Env):
    """Keeps the contract; subclasses, or classes with other attributes, break it in one way."""

    observation_space: gymnasium.Space = Box(-1.0, 1.0, (3,), np.float32)
    action_space: gymnasium.Space = Discrete(2)
    obs: object = np.zeros(3, np.float32)
    rest: tuple = (0.0, False, False, {})

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, action):
        return (self.obs, *self.rest)


NOT_FINITE = {
    "NanReward": {"reward": np.nan},
    "InfiniteReward": {"reward": np.inf},
    "NanObs": {"obs": np.nan},
    "InfiniteObs": {"obs": -np.inf},
    "HugeObs": {"obs": np.finfo(np.float32).max},
    "NanForEver": {"reward": np.nan, "always": True},
    "NanObsForEver": {"obs": np.nan, "always": True},
}
for name, numbers in NOT_FINITE.items():
    gymnasium.register(f"{name}-v0", entry_point=NotFiniteEnv, max_episode_steps=500, kwargs=numbers)
for env in (
    MishapEnv,
    HelperEnv,
    UnmakeableEnv,
    UnplayableEnv,
    SlowEnv,
    ThreadEnv,
    ChattyEnv,
    SurrogateEnv,
    UnrepeatableEnv,
    CarelessEnv,
    WanderingEnv,
):
    gymnasium.register(f"{env.__name__.removesuffix('Env')}-v0", entry_point=env, max_episode_steps=500)
gymnasium.register("Wide-v0", entry_point=AimEnv, kwargs={"low": 0.0, "high": 1000.0})
gymnasium.register("Narrow-v0", entry_point=AimEnv, kwargs={"low": -0.01, "high": 0.01})
for env in (CountEnv, AngleEnv, RestlessEnv, CrashEnv, SimulatorEnv, MaskedEnv, UnrepeatableMaskedEnv, BesideEnv):
    gymnasium.register(f"{env.__name__.removesuffix('Env')}-v0", entry_point=env)
