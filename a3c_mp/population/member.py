"""The process of a member: one generation after the other.

Each is a pure function of a birth, of the transitions of earlier generations and of the seed of (generation, place).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from a3c_mp.algorithms import dqn
from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.maths.losses import Metrics
from a3c_mp.nets.distributions import ACTIONS
from a3c_mp.population.growth import MemberState
from a3c_mp.population.population import COUNTS, PopulationMemory
from a3c_mp.population.settings import Args
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.run.evaluate import make_play_envs, make_policy, play_episodes
from a3c_mp.run.metrics import Means
from a3c_mp.run.preflight import set_up_torch
from a3c_mp.seeds import CONFIRMATION, FITNESS, MEMBER, derive_seeds, seed_global_generators
from a3c_mp.wrappers import GuardedEnvs, make_vec_env

Confirmation = tuple[float, int, int]
"""of games that confirm a fitness: their mean return; number of those that failed; agent steps of all"""


class Algorithm(NamedTuple):
    """What an algorithm gives a population; docs/population.md adds one."""

    args_class: Any  # settings, a subclass of `settings.Args`: flags, genes, kind of nets
    presets: dict[str, dict[str, Any]]  # environment id -> settings
    generation: type[MemberGeneration]  # how a member gets its data
    member: Callable[[Any, Any], None]  # the chapter's `member(args, generation)`: what it does with it


def run_member(channel: WorkerChannel, algorithm: Algorithm, args: Args, memory: PopulationMemory) -> None:
    """Process of a member: `algorithm.member`, then its evaluation, for each token: a generation's number.

    While `memory.confirming` names a member, the process at place 0 plays the games that confirm its fitness instead.
    """
    place = channel.actor
    if args.cuda:
        set_up_torch(args, place % torch.cuda.device_count())
    for slot, number in channel.tokens():
        if (fittest := int(memory.confirming)) >= 0:
            channel.send(slot, confirm(channel, args, memory, fittest, number) if place == 0 else None)
            continue
        seeds = derive_seeds(args.seed, number, place, MEMBER)
        seed_global_generators(seeds[0])
        found: dict[str, Any] = {"fields": getattr(args, "rollout_fields", ()), "heartbeats": channel, "actor": place}
        with closing(make_vec_env(args.env_id, args.num_envs, seed=seeds[0], **found)) as env:
            generation = algorithm.generation(args, memory, channel, env, seeds[1])
            generation.number = number
            algorithm.member(generation.args, generation)
            channel.starting()  # closing all environments may take as long as making one
        generation.end()
        del generation  # with its CUDA graph, before the next one is captured
        channel.send(slot, None)


class MemberGeneration:
    """One generation of a member: the base of that of an algorithm. To its loss it is what a `Learner` is elsewhere."""

    metrics: ClassVar[tuple[str, ...]] = ()  # of its loss, of which means over a member's updates are recorded
    actions: ClassVar[Any] = ACTIONS  # action spaces that it is for
    number = 0  # of this generation, from 0

    @classmethod
    def share(cls, args: Any, spaces: tuple[Any, Any]) -> Any:
        """Allocate the data that members share, a `Shards`; None: each has its own."""
        return None

    def __init__(self, args: Args, memory: PopulationMemory, channel: WorkerChannel, env: GuardedEnvs, seed: int):
        self.channel, self.env, self.place = channel, env, channel.actor
        self.device = torch.device("cuda", torch.cuda.current_device()) if args.cuda else torch.device("cpu")
        self.state = MemberState.read(memory.births[self.place], memory.spaces, args, self.device)
        self.net, self.optimizer, self.group = self.state.net, self.state.optimizer, LearnerGroup()
        self.args: Any = self.state.genome.settings(args)  # the member's own
        if not args.normalize_obs:
            for net in self.state.nets.values():
                net.norm.turn_off()
        self.result = memory.results[self.place]
        self.steps, self.games = memory.progress[:, self.place].zero_()  # for the display
        self.rng = torch.Generator().manual_seed(seed)
        self.updates = self.state.updates  # counted here from now on: those of the optimizer wait for the GPU
        self.counts, self.means, self.stats = Counter[str](), Means(), EpisodeStats(args.num_envs)
        fixed = self.args.reward_scale
        self.reward_scale = float(self.net.reward_scale) if fixed is None else fixed
        self.net.reward_scale.fill_(self.reward_scale)

    def take_step(self, gradients: Callable[..., Metrics], args: Any, loss: Any, *batch: Any) -> Metrics:
        """Take a step with the gradients that `gradients(args, self, loss, *batch)` leaves, and return its metrics."""
        self.channel.beat()  # between two rollouts no environment does
        metrics = gradients(args, self, loss, *batch)
        self.optimizer.step()
        self.counts["updates"] += 1
        self.updates += 1
        self.means.add({name: metrics[name] for name in self.metrics})
        return metrics

    def scale_rewards(self, rewards: torch.Tensor, done: torch.Tensor) -> None:
        """Update what rewards are multiplied by, with raw rewards [T, B] and where games end, bool [T, B]."""
        stats, is_fixed = self.state.return_stats, self.args.reward_scale is not None
        if not is_fixed and rewards.float().isfinite().all():  # as they are learned from
            stats.update(0, rewards, done)
            self.reward_scale = stats.scale()
            self.net.reward_scale.fill_(self.reward_scale)
        elif not is_fixed:
            stats.forget(0)

    def end(self) -> None:
        """Play the games that decide the member's fitness, and write it and its figures to its result."""
        result, means = self.result, self.means.pop()
        result["eval_returns"].fill_(math.nan)  # where its weights are broken
        result["eval_lengths"].zero_()
        if all(bool(tensor.isfinite().all()) for tensor in self.net.state_dict().values()):
            seed = derive_seeds(self.args.seed, self.number, FITNESS)[0]
            for i, game in enumerate(play_greedily(self.args, self.state, self.args.eval_episodes, seed, self.channel)):
                result["eval_returns"][i], result["eval_lengths"][i] = game.episode_return, game.length
                self.games += 1
        result["metrics"][:] = torch.tensor([means.get(name, math.nan) for name in self.metrics])
        result["counts"][:] = torch.tensor([self.counts[name] for name in COUNTS])
        self.state.write(result)


def play_greedily(args: Args, state: MemberState, num: int, seed: int, channel: WorkerChannel) -> Iterator[Episode]:
    """Play evaluation games of at most `--eval-max-steps` each; yields each when it ends.

    A game whose return is NaN or inf has failed, and is the worst possible one: -inf. Left out, it would favour a
    policy that breaks its simulator where it would lose.
    """
    who: dict[str, Any] = {"num_envs": args.eval_envs, "heartbeats": channel, "actor": channel.actor}
    with closing(make_play_envs(args.env_id, num, seed=seed, **who)) as env:
        make = dqn.make_policy if state.genome.family == "q" else make_policy
        policy = make(copy.deepcopy(state.net).cpu(), env.single_action_space)
        for game in play_episodes(policy, env, num, args.eval_max_steps):
            yield game if math.isfinite(game.episode_return) else game._replace(episode_return=-math.inf)
        channel.starting()


def confirm(channel: WorkerChannel, args: Args, memory: PopulationMemory, place: int, number: int) -> Confirmation:
    """Have the member at a place play new games, which confirm the fitness that it had in generation `number`."""
    state = MemberState.read(memory.results[place], memory.spaces, args)
    seed = derive_seeds(args.seed, number, CONFIRMATION)[0]
    games = list(play_greedily(args, state, args.confirm_episodes, seed, channel))
    returns = [game.episode_return for game in games]
    return float(np.mean(returns)), returns.count(-math.inf), sum(game.length for game in games)
