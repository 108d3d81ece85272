"""Scripts run in this process: a chapter's whole `main`, its learner, and its actors as threads, in a second."""

import importlib
import queue
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import inline_ray
import torch
from forked import fork_children
from gymnasium.spaces import Box, Discrete
from harness import CHAPTERS, Chapter, Finished

from a3c_mp.data.actor import Memory, make_envs
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.rollout import empty_rollout, rollout_spec
from a3c_mp.errors import NothingToDo
from a3c_mp.processes.console import console
from a3c_mp.processes.pool import Filled, Token
from a3c_mp.processes.prints import prints


class Ended(Exception):
    """The learner takes no further rollouts."""


MAKING = threading.Lock()
"""held by an actor while it makes environments, which find its number in this process's variables"""


def run_quietly(target, channel, *args):
    MAKING.acquire()
    try:
        target(channel, *args)
    except Ended:
        pass
    finally:
        channel.has_made_them()


class InlineChannel:
    """Stands in for `WorkerChannel`."""

    def __init__(self, worker, first_actor, states, results):
        self.worker, self.actor, self.results, self.given = worker, first_actor + worker, results, queue.Queue()
        self.seed_key = (states.start if states else 0, self.actor, 0)
        self.restored = states.record_start(self.actor) if states else None
        self.memory = None
        self._open, self._is_making = [], True

    def has_made_them(self):
        if self._is_making:
            self._is_making = False
            MAKING.release()

    def tokens(self):
        while True:
            yield self.take()

    def take(self):
        self.has_made_them()
        token = self.given.get(timeout=60)
        if token is None:
            raise Ended
        return token

    def send(self, slot, payload):
        self.results.put(Filled(self.worker, slot, payload))

    def beat(self):
        pass

    def starting(self):
        pass

    def closing(self, resource):
        self._open.append(resource)
        return resource

    def close(self):
        while self._open:
            self._open.pop().close()


def unconnected_collector(args, net=None, actor=0):
    """A rollout collector that no learner waits for, with the weights of `net` if there is one."""
    weights = SimpleNamespace(device=torch.device("cpu"))
    memory = Memory(None, weights, None, torch.float32, args.in_order)
    channel = SimpleNamespace(
        worker=actor, actor=actor, seed_key=(0, actor, 0), restored=None, memory=memory,
        beat=lambda: None, starting=lambda: None, closing=lambda env: env,
    )  # fmt: skip
    collector = RolloutCollector(args, make_envs(args, channel), channel)
    if net is not None:
        collector.net.load_state_dict(net.state_dict())
    return collector


def collect(collector, number=1):
    """The next rollouts of a collector, which follow each other."""
    args, spaces = collector.args, (collector.env.single_observation_space, collector.env.single_action_space)
    spec = rollout_spec(args.unroll_length, args.num_envs, *spaces, collector.net.lstm_size, args.rollout_fields)
    rollouts = [empty_rollout(spec) for _ in range(number)]
    for rollout in rollouts:
        collector.collect(rollout)
    return rollouts


def random_rollout(unroll_length, num_envs, lstm_size=0, seed=0, **extra):
    """A rollout of random vectors of 3, values and two actions, in which nothing ends, with extra `InfoField`s."""
    rng = torch.Generator().manual_seed(seed)
    rollout = empty_rollout(rollout_spec(unroll_length, num_envs, Box(-1.0, 1.0, (3,)), Discrete(2), lstm_size, extra))
    for field in rollout.fields().values():
        if field.is_floating_point():
            field.normal_(generator=rng)
    rollout.action.random_(2, generator=rng)
    return rollout


class InlineWorkers:
    """Stands in for `Workers`: the same calls, threads instead of processes, no supervision."""

    def __init__(self, target, num_workers, args, *, states=None, options, on_restart):
        self.in_order = options.in_order
        results = [queue.Queue() for _ in range(num_workers)] if self.in_order else [queue.Queue()] * num_workers
        self.channels = [
            InlineChannel(worker, options.first_actor, states, results[worker]) for worker in range(num_workers)
        ]
        self.threads = [
            threading.Thread(target=run_quietly, args=(target, channel, *args), daemon=True)
            for channel in self.channels
        ]
        for slot in range(num_workers * options.slots_per_worker):
            worker, number = divmod(slot, options.slots_per_worker)
            self.release([Filled(worker, slot, None)], options.versions[number])

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        for channel in self.channels:
            channel.given.put(None)
        for thread in self.threads:
            thread.join(60)

    def take(self, should_stop, size=1):
        if should_stop():
            return []
        channels = self.channels if self.in_order else self.channels[:1] * size
        return [channel.results.get(timeout=60) for channel in channels]

    def poll(self, should_stop):
        with suppress(queue.Empty):
            return [self.channels[0].results.get_nowait()]
        return []

    def release(self, filled, version):
        for worker, slot, _ in filled:
            self.channels[worker].given.put(Token(slot, version))


class Inline:
    """Runs scripts of the project in this process; actors and evaluator are threads, or forked processes."""

    def __init__(self, runs_dir: Path, monkeypatch, capsys):
        self.runs_dir, self.monkeypatch, self.capsys = runs_dir, monkeypatch, capsys
        monkeypatch.chdir(runs_dir)

    def __call__(self, script: str, *flags: str, name: str = "r", workers=InlineWorkers) -> Finished:
        """Run a script, with processes if `workers` is None or `Workers`. The run of a chapter is called `name`."""
        trains = script.startswith("train_")
        assert console.drain(60)  # of what a test before left
        stdout, console.output.file.error = sys.stdout, None
        named = ["--run-name", name] if trains and "--resume" not in flags else []
        with self.monkeypatch.context() as patch:
            if workers is not InlineWorkers:
                fork_children(patch)
            if trains and workers is not None:
                patch.setattr("a3c_mp.run.learner.Workers", workers)
                patch.setattr("a3c_mp.run.evaluate.Workers", workers)
                patch.setattr("a3c_mp.population.generations.Workers", workers)
                inline_ray.install(patch)
                flags = (*flags, *next((chapter.inline for chapter in CHAPTERS if chapter.script == script), ()))
            patch.setattr("sys.argv", [script, *named, *flags])
            try:
                code = importlib.import_module(Path(script).stem).main()
            except NothingToDo as reason:  # as `exit_with` does
                print(reason)
                code = 0
        prints.settle(60)  # a run itself waits less for its output, which a busy machine can delay
        assert console.drain(60)
        assert console.output.file.error is None, f"output is lost: {console.output.file.error!r}"
        assert sys.stdout is stdout, "something else has replaced it"
        return Finished(code, *self.capsys.readouterr(), self.folder(name))

    def folder(self, name: str = "r") -> Path:
        return self.runs_dir / "runs" / name

    def train(self, chapter: Chapter, *flags: str, **how) -> Finished:
        """A quick run of a chapter."""
        return self(chapter.script, *chapter.flags, *flags, **how)

    def resume(self, chapter: Chapter, *flags: str) -> Finished:
        """Look whether it can be; a checkpoint from beyond the budget leaves nothing to do."""
        return self(chapter.script, "--resume", "runs/r", "--total-steps", "1", *flags)
