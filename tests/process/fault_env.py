"""CartPole with mishaps in actor 0. Loaded as `fault_env:Name-v0`, so every process of a run imports this module."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

from a3c_mp.processes.channel import WorkerChannel

STEPS = 400
"""of all environments of an actor together, before something happens"""
CHATTER = 100
"""lines that a ChattyEnv prints in a step"""
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


def send_half(channel, slot, payload):
    """Instead of `WorkerChannel.send`: the length of a message and half of it, then the end."""
    note("killed while sending")
    os.write(channel._results.fileno(), b"\0\0\0\x30" + 20 * b"x")
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
                WorkerChannel.send = send_half

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
    """Rewards or observations that are not finite, or huge: once, in the 150th step, or from there on."""

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
    "HugeObs": {"obs": np.finfo(np.float32).max},
    "NanForEver": {"reward": np.nan, "always": True},
    "NanObsForEver": {"obs": np.nan, "always": True},
}.items():
    gymnasium.register(f"{name}-v0", entry_point=NotFiniteEnv, max_episode_steps=500, kwargs=numbers)


class UnrepeatableEnv(CartPoleEnv):
    """Its observations depend on more than its seed and its actions: on the process that it lives in."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + np.float32(os.getpid() * 1e-6), *rest


gymnasium.register("Unrepeatable-v0", entry_point=UnrepeatableEnv, max_episode_steps=500)


class ThreadEnv(CartPoleEnv):
    """Leaves a thread behind wherever it is made, and has SIGTERM ignored."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(3600,)).start()


class ChattyEnv(CartPoleEnv):
    """Prints in every step; actor 0 crashes in native code in its 400th."""

    steps = 0

    def step(self, action):
        ChattyEnv.steps += 1
        print("\n".join(f"step {ChattyEnv.steps}, line {number}" for number in range(CHATTER)))
        if in_actor_0() and ChattyEnv.steps == STEPS:
            os.write(2, b"the emulator crashed\n")
            os.abort()
        return super().step(action)


class SurrogateEnv(CartPoleEnv):
    """Raises with a text that no encoding can write, in the trainer's first actor."""

    def step(self, action):
        if in_actor_0():
            raise ArithmeticError("a broken name: \udcff")
        return super().step(action)


gymnasium.register("Thread-v0", entry_point=ThreadEnv, max_episode_steps=500)
gymnasium.register("Chatty-v0", entry_point=ChattyEnv, max_episode_steps=500)
gymnasium.register("Surrogate-v0", entry_point=SurrogateEnv, max_episode_steps=500)


class LengthsEnv(CartPoleEnv):
    """Games of random length, 20 to 400 steps, whatever is done; their return is 400 - length: 190 on average."""

    def reset(self, **kwargs):
        result = super().reset(**kwargs)
        self.left = self.length = int(self.np_random.integers(20, 401))
        return result

    def step(self, action):
        obs, *_ = super().step(action)
        self.left -= 1
        return obs, float(400 - self.length) * (self.left == 0), self.left == 0, False, {}


class HundredEnv(CartPoleEnv):
    """Games of 100 steps, whatever is done."""

    def reset(self, **kwargs):
        self.t = 0
        return super().reset(**kwargs)

    def step(self, action):
        obs, *_ = super().step(action)
        self.t += 1
        return obs, 1.0, self.t == 100, False, {}


gymnasium.register("Lengths-v0", entry_point=LengthsEnv)
gymnasium.register("Hundred-v0", entry_point=HundredEnv)
