"""The evaluator: a supervised process at low priority that plays whole games with snapshots of the run's weights.

It is a `Workers` of one: a token tells it to play with a version of the weights, and the slot that it fills holds the
returns and lengths of the games. A frozen, slow or killed evaluator costs the learner nothing but a look at its pipe.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode
from a3c_mp.processes.pool import Filled, WorkerEvent, WorkerOptions
from a3c_mp.processes.slots import Slots, Spec
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import WorkerChannel, Workers
from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.evaluate import MakePolicy, make_play_envs, play_episodes
from a3c_mp.run.evaluation import PlayedGames, evaluation_seed

NICENESS = 10  # actors have 5: where cores are short, training goes first
LOOK_SECONDS = 0.1
"""shortest time between two looks at the evaluator"""


class EvaluationGames(NamedTuple):
    """Which games an evaluation plays: the same as `play.py` with these settings."""

    env_id: str
    episodes: int
    seed: int
    max_steps: int  # of one game

    @classmethod
    def of(cls, args: CommonArgs) -> EvaluationGames:
        return cls(args.env_id, args.eval_episodes, evaluation_seed(args), args.eval_max_steps)

    def play(self, net: nn.Module, make_policy: MakePolicy, channel: Any) -> list[Episode]:
        """Play them greedily with a net on the CPU; each step is a heartbeat of a channel that closes environments."""
        channel.starting()
        env = channel.closing(make_play_envs(self.env_id, self.episodes, seed=self.seed))
        policy = make_policy(net, env.single_action_space)
        return list(play_episodes(policy, env, self.episodes, channel.beat, self.max_steps))


def evaluator(
    channel: WorkerChannel, games: EvaluationGames, pickled_net: bytes, make_policy: MakePolicy, weights: Weights,
    results: Slots,
) -> None:  # fmt: skip
    """Evaluator process: play all games with each version of the weights until the learner stops it."""
    net: nn.Module = pickle.loads(pickled_net)
    for slot, version in channel.tokens():
        weights.load(net, version)
        played = games.play(net, make_policy, channel)
        results[slot]["returns"].copy_(torch.tensor([game.episode_return for game in played]))
        results[slot]["lengths"].copy_(torch.tensor([game.length for game in played]))
        channel.send(slot, sha256_of_weights(net.state_dict()))
        channel.close()  # each evaluation makes new environments, so that all of them play the same games


class EvaluatorProcess:
    """The evaluator's process as the learner sees it, an `evaluation.Evaluator`; the first snapshot starts it.

    Args:
        net: on the CPU, of the shapes of every snapshot.
        should_stop: whether a signal has asked the run to stop; ends every wait.
        on_restart: called each time the process is replaced.
    """

    def __init__(
        self, args: CommonArgs, net: nn.Module, make_policy: MakePolicy, should_stop: Callable[[], bool],
        on_restart: Callable[[WorkerEvent], None],
    ):  # fmt: skip
        self.should_stop, games = should_stop, EvaluationGames.of(args)
        spec: Spec = {"returns": ((games.episodes,), torch.float64), "lengths": ((games.episodes,), torch.int64)}
        self.weights, self.results = Weights(net), Slots(spec, 1)
        # The start of a process would move a net into /dev/shm, and bytes not. New values pass through `weights`.
        shared = games, pickle.dumps(net), make_policy, self.weights, self.results
        options = WorkerOptions(
            slots_per_worker=1,
            max_restarts=args.max_restarts,
            hang_seconds=args.hang_seconds,
            versions=[self.weights.version + 1],  # the first snapshot, with which the process starts
            name="evaluator",
            niceness=NICENESS,
        )
        self.workers = Workers(evaluator, 1, shared, options=options, on_restart=on_restart)
        self._is_started, self._next_look = False, 0.0

    def start(self, net: nn.Module) -> None:
        version = self.weights.publish(net)
        if self._is_started:
            self.workers.release([Filled(0, 0, None)], version)
        else:
            self._is_started = True
            self.workers.__enter__()

    def poll(self) -> PlayedGames | None:
        now = time.monotonic()
        if not self._is_started or now < self._next_look:
            return None
        self._next_look = now + LOOK_SECONDS
        return self._read(self.workers.poll(self.should_stop))

    def wait(self, seconds: float) -> PlayedGames | None:
        deadline = time.monotonic() + seconds
        return self._read(self.workers.take(lambda: self.should_stop() or time.monotonic() >= deadline))

    def close(self) -> None:
        """End the process: it closes its environments, and is killed if that takes too long."""
        if self._is_started:
            self._is_started = False
            self.workers.__exit__()

    def _read(self, filled: list[Filled]) -> PlayedGames | None:
        if not filled:
            return None
        [(_, slot, weights_sha256)] = filled
        result = self.results[slot]
        return PlayedGames(result["returns"].tolist(), result["lengths"].tolist(), weights_sha256)
