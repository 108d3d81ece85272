"""What parts.py measures in processes of their own: a learner without actors, and the calls that an actor makes.

python bench/gpu/alone.py learner FIGURES train_a3c_data.py FLAGS      # a run whose rollouts are random numbers
python bench/gpu/alone.py calls NUMBER train_a3c_data.py FLAGS         # reads "prepare WHAT", "call WHAT SECONDS"
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script finds only what lies beside it

import a3c_mp  # isort: skip  (first: it ends this process with its parent)

import numpy as np
import torch

import a3c_mp.chapter
from a3c_mp.data.actor import make_envs
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.rollout import empty_rollout, rollout_spec
from a3c_mp.errors import one_line
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.nets.precision import acting_dtype, acting_forward
from a3c_mp.processes.pool import Filled
from a3c_mp.run.learner import Learner, Processes
from a3c_mp.wrappers import spaces
from bench import common

WARM_UP, PROFILED = 0.35, 0.75
"""shares of a learner's time after which rounds are measured, and some are profiled"""
PROFILED_ROUNDS, PROFILER_SECONDS = 3, 20.0
REWARDS = 0.02
"""share of steps with a reward, as in Pong"""


# ---- a learner without actors


class RandomRollouts(Processes):
    """In place of actors: each slot holds a rollout of random numbers, and is filled at once; measures rounds."""

    def __init__(self, seconds: float, save: Callable[..., None]):
        self.seconds, self.save = seconds, save
        self.started = self.last = 0.0
        self.updates, self.measured = 0, list[tuple[float, int, int]]()  # of each round: seconds, updates, rollouts
        self.between: list[float] = []  # updates (s)
        self.profiler: Any = None
        self.profiled = 0

    def start(self, make_actor: Any, args: Any, memory: Any, **pool: Any) -> Any:
        self.version, per_actor = (lambda: memory.weights.version), pool["options"].slots_per_worker
        self.filled = itertools.cycle([(slot // per_actor, slot) for slot in range(pool["num_workers"] * per_actor)])
        rng = torch.Generator().manual_seed(1)
        for slot in range(pool["num_workers"] * per_actor):
            fields = memory.slots[slot]
            for name in ("behaviour_logits", "value"):
                fields[name].normal_(generator=rng)
            fields["obs"].random_(0, 256, generator=rng)
            fields["action"].random_(0, fields["behaviour_logits"].shape[-1], generator=rng)
            fields["reward"].copy_((torch.rand(fields["reward"].shape, generator=rng) < REWARDS).float())
        return self

    def __enter__(self) -> RandomRollouts:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def release(self, filled: Sequence[Filled], version: int) -> None: ...

    def take(self, should_stop: Any, size: int = 1) -> list[Filled]:
        self.mark(should_stop.__self__.updates, size)
        if should_stop() or self.profiled > PROFILED_ROUNDS:
            return []
        return [Filled(*next(self.filled), self.version()) for _ in range(size)]

    def mark(self, updates: int, size: int) -> None:
        """A round ends."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.started = self.started or now
        share = (now - self.started) / self.seconds
        if WARM_UP < share < PROFILED and self.last:
            self.measured.append((now - self.last, updates - self.updates, size))
        elif share >= PROFILED:
            self.profile(updates)
        self.updates, self.last = updates, time.perf_counter()

    def profile(self, updates: int) -> None:
        """Start the profiler, or stop it after some rounds; its error is recorded, as on the virtual GPU."""
        try:
            if not self.profiled:
                self.save(**self.figures())
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiled_from = updates
                self.profiler.start()
            elif self.profiled == PROFILED_ROUNDS:
                self.profiler.stop()
                self.save(**counted(self.profiler, updates - self.profiled_from))
        except Exception as error:
            self.save(profiler=one_line(error))
            self.profiled = PROFILED_ROUNDS
        self.profiled += 1

    def figures(self) -> dict[str, Any]:
        rounds = [each for each in self.measured if each[1]]
        per_update = [1000 * seconds / updates for seconds, updates, _ in rounds]
        between = sorted(1000 * seconds for seconds in self.between)
        return {
            "ms_per_update": round(statistics.median(per_update), 4), "rounds": len(rounds),
            "ms_per_rollout": round(statistics.median(1000 * seconds / size for seconds, _, size in rounds), 4),
            "updates_per_rollout": round(sum(each[1] for each in rounds) / sum(each[2] for each in rounds), 3),
            "host_ms_between_updates": round(statistics.median(between), 4) if between else None,
        }  # fmt: skip

    def on_update(self) -> None:
        now = time.perf_counter()
        if self.measured and not self.profiled and self.last < self.last_update:
            self.between.append(now - self.last_update)
        self.last_update = now

    last_update = 0.0


def counted(profiler: Any, updates: int) -> dict[str, Any]:
    """Kernels, copies and calls of CUDA for each update, and their time on the GPU, from a profiler's trace."""
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(path := str(Path(folder, "trace.json")))
        events = json.loads(Path(path).read_text())["traceEvents"]
    kinds: dict[str, list[float]] = {"kernel": [], "gpu_memcpy": [], "gpu_memset": []}
    calls: Counter[str] = Counter()
    for event in events:
        if (kind := event.get("cat")) in kinds:
            kinds[kind].append(float(event.get("dur", 0)))
        elif kind in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]] += 1
    found: dict[str, Any] = {"updates_profiled": updates}
    for kind, times in kinds.items():
        found[f"{kind}s_per_update"] = round(len(times) / updates, 2)
        found[f"{kind}_ms_per_update"] = round(sum(times) / 1000 / updates, 4)
    return found | {"calls_per_update": {name: round(number / updates, 2) for name, number in calls.most_common(12)}}


def learner(out: Path, script: str, *flags: str) -> int:
    """Run a chapter without actors."""
    figures: dict[str, Any] = {}

    def save(**found: Any) -> None:
        figures.update(found)
        out.write_text(json.dumps(figures))

    sys.argv = [script, *flags]
    chapter = importlib.import_module(Path(script).stem)
    seconds = common.trainer_settings(sys.argv).max_seconds - PROFILER_SECONDS
    rollouts = RandomRollouts(max(seconds, 1.0), save)

    def alone(args: Any, run: Any, setup: Any, make_actor: Any, group: Any = None) -> Learner:
        made: Any = Learner(args, run, setup, make_actor, group, rollouts)
        record = made.record_update

        def recorded(*metrics: Any) -> None:
            rollouts.on_update()
            record(*metrics)

        made.record_update = recorded
        return made

    a3c_mp.chapter.Learner = alone  # type: ignore[assignment, misc]
    code = chapter.main()
    if not rollouts.profiled:
        save(**rollouts.figures())
    return int(code)


# ---- calls


class Calls:
    """Calls that an actor makes: `cuda` and `cpu`, an acting pass there; `step`, all else that a step needs."""

    def __init__(self, number: int, *command: str):
        self.number, self.args = number, common.trainer_settings(command)
        self.made: dict[str, tuple[Callable[[], Any], int]] = {}  # a call, and of how many steps it is

    def prepare(self, what: str) -> None:
        if what not in self.made:
            self.made[what] = self.step() if what == "step" else (self.act(torch.device(what)), 1)
        for _ in range(3):
            self.made[what][0]()

    def act(self, device: torch.device) -> Callable[[], Any]:
        obs_space, action_space = spaces(self.args.env_id)
        net = make_actor_critic(obs_space, action_space, self.args.net_spec).to(device)
        net = net.to(acting_dtype(self.args.precision, net))
        obs = torch.from_numpy(np.stack([obs_space.sample() for _ in range(self.args.num_envs)]))
        forward = acting_forward(self.args, net, obs)
        return torch.inference_mode()(lambda: forward(obs))

    def step(self) -> tuple[Callable[[], Any], int]:
        cpu = torch.device("cpu")
        memory = SimpleNamespace(place=lambda net: net.to(cpu), load=lambda net, token: 0)
        channel: Any = SimpleNamespace(
            worker=self.number, actor=self.number, seed_key=(0, self.number, 0), restored=None, memory=memory,
            beat=lambda: None, starting=lambda: None, closing=lambda env: env, not_restored=print,
        )  # fmt: skip
        collector = RolloutCollector(self.args, env := make_envs(self.args, channel), channel)
        outputs = collector.forward(collector.obs)
        collector.forward = lambda *inputs: outputs
        length = self.args.unroll_length
        spec = rollout_spec(length, self.args.num_envs, env.single_observation_space, env.single_action_space)
        rollout = empty_rollout(spec)
        return (lambda: collector.collect(rollout)), length

    def call(self, what: str, seconds: float) -> dict[str, float]:
        """Times of calls for one step each (ms)."""
        function, steps = self.made[what]
        times, until = list[float](), time.perf_counter() + seconds
        while (started := time.perf_counter()) < until or len(times) < 3:
            function()
            times.append(1000 * (time.perf_counter() - started) / steps)
        times.sort()
        p99 = times[int(0.99 * (len(times) - 1))]
        return {"mean_ms": statistics.fmean(times), "median_ms": statistics.median(times), "p99_ms": p99}


def calls(number: str, *command: str) -> int:
    """Make calls as they are asked for on the standard input; the answers are lines of JSON."""
    made: Calls | None = None
    for line in sys.stdin:
        what, name, *seconds = line.split()
        answer: dict[str, Any] = {}
        try:
            made = made or Calls(int(number), *command)
            if what == "prepare":
                made.prepare(name)
            else:
                answer = made.call(name, float(seconds[0]))
        except Exception as error:
            answer = {"error": one_line(error)[:1000]}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    code = learner(Path(words[0]), *words[1:]) if what == "learner" else calls(*words)
    sys.stdout.flush()
    os._exit(code)  # whatever libraries have left running
