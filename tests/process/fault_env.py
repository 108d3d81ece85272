"""CartPole with mishaps in actor 0. Loaded as `fault_env:Name-v0`, so every process of a run imports this module."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

from a3c_mp.workers import Link

STEPS = 400
"""of all environments of an actor together, before something happens"""
MISHAPS = "MISHAPS"
"""environment variable: what happens to the actors 0 that follow each other, separated by commas"""


def in_actor_0():
    return multiprocessing.current_process().name == "worker-0"


def next_mishap():
    """The first that no actor before this one has met. Notes of them lie in the run's current folder."""
    for mishap in os.environ.get(MISHAPS, "").split(","):
        if not Path(mishap).exists():
            return mishap
    return None


def note(mishap):
    Path(mishap).touch()


def send_half(link, slot, payload):
    """Instead of `Link.send`: the length of a message and half of it, then the end."""
    note("killed while sending")
    os.write(link._results.fileno(), b"\0\0\0\x30" + 20 * b"x")
    os.kill(os.getpid(), signal.SIGKILL)


class MishapEnv(CartPoleEnv):
    """Each actor 0 meets the next mishap; the one after the last is killed once there is a file `enough`."""

    steps = 0
    mishap = None

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if in_actor_0() and MishapEnv.steps == 0:
            MishapEnv.mishap = next_mishap()
            if MishapEnv.mishap == "killed at start":
                note(MishapEnv.mishap)
                os.kill(os.getpid(), signal.SIGKILL)
            if MishapEnv.mishap == "killed while sending":
                Link.send = send_half

    def step(self, action):
        MishapEnv.steps += 1
        if in_actor_0() and MishapEnv.steps >= STEPS:
            self.meet(MishapEnv.mishap)
        return super().step(action)

    def meet(self, mishap):
        if mishap == "killed in a step" or (mishap is None and Path("enough").exists()):
            note("killed in a step")
            os.kill(os.getpid(), signal.SIGKILL)
        if mishap == "raised":
            note(mishap)
            raise ArithmeticError("the pole caught fire")
        if mishap == "hung":
            note(mishap)
            time.sleep(3600)
        if mishap == "stopped":
            note(mishap)
            os.kill(os.getpid(), signal.SIGSTOP)


class UnmakeableEnv(CartPoleEnv):
    """Can be made by the trainer, which looks at its spaces, and by no actor."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if multiprocessing.current_process().name != "MainProcess":
            if not Path("failed").exists():
                note("failed")
            raise ArithmeticError("no coin in the slot")


gymnasium.register("Mishap-v0", entry_point=MishapEnv, max_episode_steps=500)
gymnasium.register("Unmakeable-v0", entry_point=UnmakeableEnv, max_episode_steps=500)


class HelperEnv(MishapEnv):
    """In an actor it has three helper processes: one that `close()` ends, and two that it leaves: a program, a fork.

    Each has a file `helpers/ACTOR-PID`; `close()` leaves `closed/ACTOR`.
    """

    def __init__(self, **kwargs):
        self.ended_by_close = None
        super().__init__(**kwargs)
        if not multiprocessing.current_process().name.startswith("worker-"):
            return
        self.ended_by_close, program = (subprocess.Popen(["sleep", "120"]) for _ in range(2))
        if (fork := os.fork()) == 0:
            time.sleep(120)
            os._exit(0)
        for folder in ("helpers", "closed"):
            Path(folder).mkdir(exist_ok=True)
        for pid in (self.ended_by_close.pid, program.pid, fork):
            note(f"helpers/{os.getpid()}-{pid}")

    def close(self):
        if self.ended_by_close is not None:
            self.ended_by_close.terminate()
            self.ended_by_close.wait()
            note(f"closed/{os.getpid()}")


gymnasium.register("Helper-v0", entry_point=HelperEnv, max_episode_steps=500)


class NotFiniteEnv(CartPoleEnv):
    """Rewards or observations that are not finite: once, in the 150th step, or from there on."""

    def __init__(self, reward=0.0, obs=0.0, always=False, **kwargs):
        super().__init__(**kwargs)
        self.bad_reward, self.bad_obs, self.always, self.total = reward, obs, always, 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        self.total += 1
        if self.total == 150 or (self.always and self.total > 150):
            obs, reward = obs + np.float32(self.bad_obs), reward + self.bad_reward
        return obs, reward, *rest


for name, numbers in {
    "NanReward": {"reward": np.nan},
    "InfiniteReward": {"reward": np.inf},
    "NanObs": {"obs": np.nan},
    "InfiniteObs": {"obs": -np.inf},
    "NanForEver": {"reward": np.nan, "always": True},
    "NanObsForEver": {"obs": np.nan, "always": True},
}.items():
    gymnasium.register(f"{name}-v0", entry_point=NotFiniteEnv, max_episode_steps=500, kwargs=numbers)
