"""CartPole with mishaps in actor 0. Loaded as `fault_env:Name-v0`, so every process of a run imports this module."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

from a3c_mp.workers import Link

STEPS = 400
"""of all environments of an actor together, before something happens"""
MISHAPS = ("killed at start", "killed in a step", "killed while sending", "raised", "hung", "stopped")


def in_actor_0():
    return multiprocessing.current_process().name == "worker-0"


def next_mishap():
    """The first that no actor before this one has met. Notes of them lie in the run's current folder."""
    for mishap in MISHAPS:
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
    """Each actor 0 meets the next mishap; when all have been met, the last one raises if there is a file `enough`."""

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
        if mishap == "killed in a step":
            note(mishap)
            os.kill(os.getpid(), signal.SIGKILL)
        if mishap == "raised" or (mishap is None and Path("enough").exists()):
            note("raised")
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
            raise ArithmeticError("no coin in the slot")


gymnasium.register("Mishap-v0", entry_point=MishapEnv, max_episode_steps=500)
gymnasium.register("Unmakeable-v0", entry_point=UnmakeableEnv, max_episode_steps=500)
