"""The process of a member: one generation after the other.

Each is a pure function of a birth, of the transitions of earlier generations and of the seed of (generation, place).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from a3c_mp.algorithms import dqn
from a3c_mp.algorithms.apex import NORM_PERIOD, ladder
from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.data.transitions import write_stats
from a3c_mp.nets.precision import autocast
from a3c_mp.population.growth import MemberState
from a3c_mp.population.population import COUNTS, METRICS, PopulationMemory
from a3c_mp.population.settings import Args
from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.replay import Batch, EnvStep, Replay, Writer
from a3c_mp.run.evaluate import make_play_envs, play_episodes
from a3c_mp.run.metrics import Means
from a3c_mp.seeds import CONFIRMATION, FITNESS, MEMBER, derive_seeds, seed_global_generators
from a3c_mp.wrappers import action_mask, make_vec_env

Confirmation = tuple[float, int, int]
"""of games that confirm a fitness: their mean return; number of those that failed; agent steps of all"""


def run_member(
    channel: WorkerChannel, member: Callable[[Args, MemberGeneration], None], args: Args, memory: PopulationMemory
) -> None:
    """Process of a member: `member(args, generation)`, then its evaluation, for each token: a generation's number.

    While `memory.confirming` names a member, the process at place 0 plays the games that confirm its fitness instead.
    """
    place = channel.actor
    for slot, number in channel.tokens():
        if (fittest := int(memory.confirming)) >= 0:
            channel.send(slot, confirm(channel, args, memory, fittest, number) if place == 0 else None)
            continue
        seeds = derive_seeds(args.seed, number, place, MEMBER)
        seed_global_generators(seeds[0])
        with closing(make_vec_env(args.env_id, args.num_envs, seed=seeds[0], heartbeats=channel, actor=place)) as env:
            generation = MemberGeneration(args, memory, channel, env, seeds[1])
            member(generation.args, generation)
        generation.end(number)
        channel.send(slot, None)


class MemberGeneration:
    """One generation of a member. It samples its own new transitions and those of all finished generations."""

    def __init__(self, args: Args, memory: PopulationMemory, channel: WorkerChannel, env: VectorEnv, seed: int):
        self.channel, self.env, self.place = channel, env, channel.actor
        self.state = MemberState.read(memory.births[self.place], memory.spaces, args)
        self.args = args = self.state.genome.settings(args)  # the member's own
        if not args.normalize_obs:
            self.state.net.norm.turn_off()
            self.state.target_net.norm.turn_off()
        self.result = memory.results[self.place]
        self.steps, self.games = memory.progress[:, self.place].zero_()  # for the display
        shards = memory.shards.at(memory.rows.numpy())  # what others write from now on stays unseen
        self.rng = np.random.default_rng(seed)  # of exploration
        self.replay = Replay(shards, priority_exponent=0.0, seed=seed + 1)
        for shard in range(shards.num_shards):
            self.replay.make_room(shard, 2 * args.rounds)
            self.replay.ingest(shard)
        self.writer = Writer(shards, self.place, n_step=1, gamma=1.0)  # n and discount factor are each learner's own
        self.counts = Counter(transitions_not_finite=-self.replay.rejected)  # those of earlier generations are counted
        self.learning_steps = 0
        self.means, self.stats = Means(), EpisodeStats(args.num_envs)
        self.epsilons = ladder(args.epsilon, args.ladder_exponent, 0, args.num_envs, 1)
        self.obs, self.t = env.reset()[0], 0

    def act(self) -> None:
        """Take a step in all environments, epsilon-greedy or at first random, and store its transitions."""
        self._step(self.epsilons if self.replay.size >= self.args.learning_starts else 1.0)
        self.replay.ingest(self.place)
        if self.replay.size >= self.args.learning_starts:
            self.learning_steps += self.args.num_envs

    @torch.inference_mode()
    def _step(self, epsilons: np.ndarray | float) -> None:
        obs, mask = self.obs, action_mask(self.env)
        with autocast(self.args.precision, self.state.net):
            q = dqn.allowed_q(self.state.net(torch.from_numpy(obs))[0].float().numpy(), mask)
        explores = self.rng.random(len(q)) < epsilons
        action = np.where(explores, dqn.random_actions(self.rng, q.shape, mask), q.argmax(axis=1))
        self.obs, reward, terminated, truncated, infos = self.env.step(action)
        done = terminated | truncated
        self.stats.step(reward, done)
        write_stats(self.result, self.t, self.stats)
        self.t += 1
        self.steps += len(q)
        # The end of a generation interrupts games as a time limit does: they are worth what would have followed.
        truncated = truncated | (self.t == self.args.rounds)
        final_obs, final_mask = self.obs.copy(), action_mask(self.env)
        if done.any():
            final_obs[done] = infos["final_obs"][done]
            if final_mask is not None:
                final_mask = np.where(done[:, None], infos["final_mask"], final_mask)
        unknown = np.zeros(len(q), np.float32)  # values would give priorities, which uniform sampling does not need
        life_lost = infos.get("life_lost") if self.args.life_loss_terminal else None
        learned = self.args.reward_scale * (np.sign(reward) if self.args.reward_clip else reward)
        step = EnvStep(obs, action, learned, terminated, truncated, unknown, unknown, final_obs, unknown)
        self.writer.step(step._replace(life_lost=life_lost, mask=mask, final_mask=final_mask))

    def batches(self) -> Iterator[Batch]:
        """Sample a batch for each update that is due: one for every `learn_every` steps."""
        args = self.args
        while self.counts["updates"] < self.learning_steps // args.learn_every:
            batch = self.replay.extend(self.replay.sample(args.batch_size), args.n_step, args.gamma)
            if args.normalize_obs and self.counts["updates"] % NORM_PERIOD == 0:
                self.counts["obs_values_far"] += self.state.net.norm.update(batch.obs)
            self.counts["updates"] += 1
            yield batch

    def end(self, number: int) -> None:
        """Evaluate the member in the games of generation `number`, and write it and its figures to its result."""
        result, means = self.result, self.means.pop()
        games = self._evaluate(derive_seeds(self.args.seed, number, FITNESS)[0])
        self.counts["transitions_not_finite"] += self.replay.rejected
        result["eval_returns"][:] = torch.tensor([game.episode_return for game in games], dtype=torch.float64)
        result["eval_lengths"][:] = torch.tensor([game.length for game in games])
        result["metrics"][:] = torch.tensor([means.get(name, math.nan) for name in METRICS])
        result["counts"][:] = torch.tensor([self.counts[name] for name in COUNTS])
        result["rows"][:] = torch.from_numpy(self.writer.row)
        self.state.write(result)

    def _evaluate(self, seed: int) -> list[Episode]:
        """Play the games that decide the member's fitness, greedily; with broken weights their return is NaN."""
        net, num, games = self.state.net, self.args.eval_episodes, list[Episode]()
        if not all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values()):
            return [Episode(math.nan, 0)] * num
        for game in play_greedily(self.args, net, num, seed, self.channel):
            games.append(game)
            self.games += 1
        return games


def play_greedily(args: Args, net: nn.Module, num: int, seed: int, channel: WorkerChannel) -> Iterator[Episode]:
    """Play evaluation games of at most `--eval-max-steps` each; yields each when it ends.

    A game whose return is NaN or inf has failed, and is the worst possible one: -inf. Left out, it would favour a
    policy that breaks its simulator where it would lose.
    """
    with closing(make_play_envs(args.env_id, num, seed=seed, heartbeats=channel, actor=channel.actor)) as env:
        policy = dqn.make_policy(net, env.single_action_space)
        for game in play_episodes(policy, env, num, args.eval_max_steps):
            yield game if math.isfinite(game.episode_return) else game._replace(episode_return=-math.inf)


def confirm(channel: WorkerChannel, args: Args, memory: PopulationMemory, place: int, number: int) -> Confirmation:
    """Have the member at a place play new games, which confirm the fitness that it had in generation `number`."""
    net = MemberState.read(memory.results[place], memory.spaces, args).net
    seed = derive_seeds(args.seed, number, CONFIRMATION)[0]
    games = list(play_greedily(args, net, args.confirm_episodes, seed, channel))
    returns = [game.episode_return for game in games]
    return float(np.mean(returns)), returns.count(-math.inf), sum(game.length for game in games)
