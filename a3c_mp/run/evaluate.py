"""Whole games with a trained net, and their raw returns: for `play.py`, and in a process beside the training.

The evaluator is a `Workers` of one at low priority: a token tells it to play with a version of the weights, and the
slot that it fills holds the returns and lengths of the games. A frozen, slow or killed one costs the learner nothing
but a look at its pipe.
"""

import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.config import CommonArgs
from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.errors import ConfigError, one_line
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.distributions import mask_logits
from a3c_mp.nets.layers import reset_acting_state
from a3c_mp.processes.pool import Filled, WorkerOptions
from a3c_mp.processes.slots import Slots, Spec
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import WorkerChannel, Workers
from a3c_mp.run.checkpoint import sha256_of_weights
from a3c_mp.run.evaluation import PlayedGames, evaluation_seed
from a3c_mp.run.progress import RunState
from a3c_mp.run.script import raise_received
from a3c_mp.seeds import seed_global_generators
from a3c_mp.wrappers import EVALUATOR, OUTSIDE, UNWATCHED, ActionScaling, GuardedEnvs, make_vec_env

NICENESS = 10  # actors have 5: where cores are short, training goes first
LOOK_SECONDS = 0.1  # shortest time between two looks at the evaluator

Policy = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
"""(observations [N, *obs_shape], whether each begins an episode [N], masks [N, choices] or None) -> actions of the
environment [N, ...]"""
MakePolicy = Callable[[Any, gymnasium.Space], Policy]
"""(net, action space of one environment) -> the net's greedy policy; a module-level function"""


def make_policy(net: ActorCritic, action_space: gymnasium.Space, *, greedy: bool = True, seed: int = 0) -> Policy:
    """A policy that acts with an actor-critic net on the CPU: greedy, or sampled."""
    rng, to_env = torch.Generator().manual_seed(seed), ActionScaling(action_space)
    state: list[Tensor] = []

    @torch.inference_mode()
    def act(obs: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        nonlocal state
        state = net.initial_state(len(obs)) if starts.all() else [reset_acting_state(s, starts) for s in state]
        logits, _, *state = net(torch.from_numpy(obs), *state)
        policy = net.distribution(mask_logits(logits.float(), mask))
        return to_env((policy.mode() if greedy else policy.sample(rng)).numpy())

    return act


def make_play_envs(
    env_id: str, episodes: int, *, seed: int, num_envs: int = CommonArgs.eval_envs, heartbeats: Any = UNWATCHED,
    actor: int = OUTSIDE,
) -> GuardedEnvs:  # fmt: skip
    """Make the environments for `play_episodes`, at most as many as episodes, and seed what they may draw from."""
    seed_global_generators(seed)
    return make_vec_env(env_id, min(num_envs, episodes), seed=seed, heartbeats=heartbeats, actor=actor)


def play_episodes(policy: Policy, env: GuardedEnvs, episodes: int, max_steps: int) -> Iterator[Episode]:
    """Play whole games in parallel in an `env` of `make_play_envs`, not stepped before; yields each when it ends.

    Each environment plays a fixed number of them: taking the first that finish would favour short games. A game that
    lasts `max_steps` agent steps is cut, with the return so far.
    """
    num_envs = env.num_envs
    left = np.array([episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)])
    stats = EpisodeStats(num_envs)
    obs, _ = env.reset()
    starts = np.ones(num_envs, dtype=np.bool_)
    while left.any():
        obs, reward, terminated, truncated, _ = env.step(policy(obs, starts, env.mask))
        raise_received()
        starts = terminated | truncated
        stats.step(reward, starts)
        if (cut := ~starts & (stats.lengths >= max_steps)).any():
            obs, _ = env.reset_some(cut)
            stats.done = starts = starts | cut
        for i in np.flatnonzero(stats.done & (left > 0)):
            left[i] -= 1
            yield Episode(float(stats.returns[i]), int(stats.lengths[i]))


def play_evaluation(args: CommonArgs, net: nn.Module, make_policy: MakePolicy, channel: Any) -> PlayedGames:
    """Play the games of an evaluation, greedily with a net on the CPU; each step is a heartbeat of the channel."""
    try:
        seed = evaluation_seed(args)
        who = {"num_envs": args.eval_envs, "heartbeats": channel, "actor": EVALUATOR}
        env = channel.closing(make_play_envs(args.env_id, args.eval_episodes, seed=seed, **who))
        policy = make_policy(net, env.single_action_space)
        games = list(play_episodes(policy, env, args.eval_episodes, args.eval_max_steps))
        channel.starting()  # closing all of them may take as long as making one
    finally:
        channel.close()  # each evaluation makes new environments, so that all of them play the same games
    returns, lengths = [game.episode_return for game in games], [game.length for game in games]
    return PlayedGames(returns, lengths, sha256_of_weights(net.state_dict()) or "")


def evaluator(
    channel: WorkerChannel, args: CommonArgs, pickled_net: bytes, make_policy: MakePolicy, weights: Weights,
    results: Slots,
) -> None:  # fmt: skip
    net: nn.Module = pickle.loads(pickled_net)
    for slot, version in channel.tokens():
        weights.load(net, version)
        returns, lengths, weights_sha256 = play_evaluation(args, net, make_policy, channel)
        results[slot]["returns"].copy_(torch.tensor(returns, dtype=torch.float64))
        results[slot]["lengths"].copy_(torch.tensor(lengths))
        channel.send(slot, weights_sha256)


class EvaluatorProcess:
    """The evaluator's process as the learner sees it, an `evaluation.Evaluator`; the first snapshot starts it."""

    def __init__(self, run: RunState, make_policy: MakePolicy):
        self.run, args, net, num = run, run.args, run.progress.evals.snapshot, run.args.eval_episodes
        spec: Spec = {"returns": ((num,), torch.float64), "lengths": ((num,), torch.int64)}
        self.weights, self.results = Weights(net), Slots(spec, 1)
        # The start of a process would move a net into /dev/shm, and bytes not. New values pass through `weights`.
        try:
            net_bytes = pickle.dumps(net)
        except Exception as error:  # of a net of the user's own
            why = f"the net cannot be sent to the evaluator's process: {one_line(error)}"
            fix = "define its classes and functions at the top of a module, or leave --eval-every out"
            raise ConfigError("eval-every", args.eval_every, why, fix) from error
        shared = args, net_bytes, make_policy, self.weights, self.results
        options = WorkerOptions(
            name="evaluator", niceness=NICENESS, max_restarts=args.max_restarts, hang_seconds=args.hang_seconds,
            slots_per_worker=1, versions=[self.weights.version + 1],  # the first snapshot starts the process
        )  # fmt: skip
        record = run.progress.evals.record_restart
        self.workers = Workers(evaluator, 1, shared, options=options, on_restart=lambda event: record(event.text))
        self._is_started, self._next_look = False, 0.0

    def start(self, net: nn.Module) -> None:
        version = self.weights.publish(net)
        if self._is_started:
            self.workers.release([Filled(0, 0, None)], version)
        else:
            self._is_started = True
            self.workers.__enter__()

    def poll(self) -> PlayedGames | None:
        if (now := time.monotonic()) < self._next_look:
            return None
        self._next_look = now + LOOK_SECONDS
        return self._read(self.workers.poll(self.run.is_interrupted))

    def wait(self, seconds: float) -> PlayedGames | None:
        deadline = time.monotonic() + seconds
        return self._read(self.workers.take(lambda: self.run.is_interrupted() or time.monotonic() >= deadline))

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
