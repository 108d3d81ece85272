"""The process of a member: one generation after the other, each from the record of its birth.

A generation of one member is a pure function of the record that it starts from, the transitions of earlier generations
and the seed of (generation, place): which process computes it, when, and how many times changes no bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from a3c_mp.algorithms import dqn
from a3c_mp.algorithms.apex import ladder
from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.data.transitions import reward_to_learn, write_stats
from a3c_mp.population.memory import METRICS, SKIPPED, PopulationMemory, read_member, write_member
from a3c_mp.population.settings import Args
from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.replay import Batch, EnvStep, Replay, Writer
from a3c_mp.run.evaluate import make_play_envs, play_episodes
from a3c_mp.run.metrics import Means
from a3c_mp.seeds import CONFIRMATION, FITNESS, MEMBER, derive_seeds
from wrappers import action_mask, make_vec_env


class Confirmation(NamedTuple):
    """What a member did in the games that confirm its fitness."""

    mean: float  # return of the games with a finite one; NaN if there is none
    games: int  # of these
    steps: int  # of all games


def run_member(
    channel: WorkerChannel, member: Callable[[Args, MemberGeneration], None], args: Args, memory: PopulationMemory
) -> None:
    """Process of a member: `member(args, generation)`, then its evaluation, for each token: a generation's number.

    While `memory.confirming` names a member, the process at place 0 plays the games that confirm its fitness instead.
    """
    place = channel.actor
    for slot, number in channel.tokens():
        channel.starting()
        if (fittest := int(memory.confirming)) >= 0:
            channel.send(slot, confirm(channel, args, memory, fittest, number) if place == 0 else None)
            continue
        seeds = derive_seeds(args.seed, number, place, MEMBER)
        with closing(make_vec_env(args.env_id, args.num_envs, seed=seeds[0])) as env:
            generation = MemberGeneration(args, memory, channel, env, seeds[1])
            member(args, generation)
        generation.end(number)
        channel.send(slot, None)


class MemberGeneration:
    """One generation of a member. It samples its own new transitions and those of all finished generations.

    The member is read from its birth in `memory`, and written to its result when its generation ends. The seed is that
    of exploration; sampling has the next one.
    """

    def __init__(self, args: Args, memory: PopulationMemory, channel: WorkerChannel, env: VectorEnv, seed: int):
        self.args, self.channel, self.place = args, channel, channel.actor
        self.genome, self.state = read_member(memory.births[self.place], memory.spaces, args.adam_eps)
        self.result = memory.results[self.place]
        self.steps, self.games = memory.steps[self.place].zero_(), memory.games[self.place].zero_()  # for the display
        shards = memory.shards.at(memory.rows.numpy())  # what others write from now on stays unseen
        self.replay = Replay(shards, priority_exponent=0.0, seed=seed + 1)
        for shard in range(shards.num_shards):
            self.replay.make_room(shard, 2 * args.rounds)
            self.replay.ingest(shard)
        writer = Writer(shards, self.place, n_step=1, gamma=1.0)  # the discount factor is each learner's own
        self.actor = MemberActor(args, env, writer, self.result, seed)
        self.skipped = Counter(transitions_not_finite=-self.replay.rejected)  # those of earlier generations are counted
        self.updates = self.learning_steps = 0
        self.means = Means()

    def act(self) -> None:
        """Take a step in all environments, epsilon-greedy or at first random, and store its transitions."""
        self.actor.act(self.state.net, is_random=self.replay.size < self.args.learning_starts)
        self.steps += self.args.num_envs
        self.replay.ingest(self.place)
        if self.replay.size >= self.args.learning_starts:
            self.learning_steps += self.args.num_envs
        self.channel.beat()

    def batches(self) -> Iterator[Batch]:
        """Sample a batch for each update that is due: one for every `learn_every` steps."""
        while self.updates < self.learning_steps // self.genome.learn_every:
            self.updates += 1
            batch = self.replay.sample(self.genome.batch_size)
            if self.args.normalize_obs:
                is_finite, clipped = self.state.net.norm.update(batch.obs)
                self.skipped.update(obs_values_clipped=clipped, obs_moments_not_finite=not is_finite)
            yield batch

    def end(self, number: int) -> None:
        """Evaluate the member in the games of generation `number`, and write it and its figures to its result."""
        result, means = self.result, self.means.pop()
        returns, lengths = self._evaluate(derive_seeds(self.args.seed, number, FITNESS)[0])
        self.skipped["transitions_not_finite"] += self.replay.rejected
        result["eval_returns"][:], result["eval_lengths"][:] = torch.tensor(returns), torch.tensor(lengths)
        result["updates"].fill_(self.updates)
        result["metrics"][:] = torch.tensor([means.get(name, math.nan) for name in METRICS])
        result["skipped"][:] = torch.tensor([self.skipped[name] for name in SKIPPED])
        result["rows"][:] = torch.from_numpy(self.actor.writer.row)
        write_member(result, self.genome, self.state)

    def _evaluate(self, seed: int) -> tuple[list[float], list[int]]:
        """Play the games that decide the member's fitness, greedily: (returns, lengths), NaN for broken weights."""
        net, num = self.state.net, self.args.eval_episodes
        if not all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values()):
            return [math.nan] * num, [0] * num
        self.channel.starting()
        games = []
        for game in play_greedily(self.args, net, num, seed, self.channel.beat):
            games.append(game)
            self.games += 1
        return [game.episode_return for game in games], [game.length for game in games]


class MemberActor:
    """The environments of a member and its exploration; `result` gets the statistics of its games."""

    def __init__(self, args: Args, env: VectorEnv, writer: Writer, result: dict[str, Tensor], seed: int):
        self.args, self.env, self.writer, self.result = args, env, writer, result
        self.rng = np.random.default_rng(seed)
        self.epsilons = ladder(args.epsilon, args.ladder_exponent, 0, args.num_envs, 1)
        self.stats = EpisodeStats(args.num_envs)
        self.t = 0
        self.obs, _ = env.reset()

    @torch.inference_mode()
    def act(self, net: nn.Module, is_random: bool) -> None:
        """Take a step in all environments, and write its transitions."""
        num_envs, obs, mask = self.args.num_envs, self.obs, action_mask(self.env)
        q = dqn.allowed_q(net(torch.from_numpy(obs))[0].numpy(), mask)
        explores = self.rng.random(num_envs) < (1.0 if is_random else self.epsilons)
        action = np.where(explores, dqn.random_actions(self.rng, q.shape, mask), q.argmax(axis=1))
        self.obs, reward, terminated, truncated, infos = self.env.step(action)
        done = terminated | truncated
        self.stats.step(reward, done)
        write_stats(self.result, self.t, self.stats)
        self.t += 1
        # The end of a generation interrupts games as a time limit does: they are worth what would have followed.
        truncated = truncated | (self.t == self.args.rounds)
        final_obs, final_mask = self.obs.copy(), action_mask(self.env)
        if done.any():
            final_obs[done] = infos["final_obs"][done]
            if final_mask is not None:
                final_mask = np.where(done[:, None], infos["final_mask"], final_mask)
        unknown = np.zeros(num_envs, np.float32)  # values would give priorities, which uniform sampling does not need
        life_lost = infos.get("life_lost") if self.args.life_loss_terminal else None
        learned = reward_to_learn(self.args, reward)
        step = EnvStep(obs, action, learned, terminated, truncated, unknown, unknown, final_obs, unknown)
        self.writer.step(step._replace(life_lost=life_lost, mask=mask, final_mask=final_mask))


def play_greedily(args: Args, net: nn.Module, num: int, seed: int, beat: Callable[[], object]) -> Iterator[Episode]:
    """Play evaluation games of at most `--eval-max-steps` each; yields each when it ends."""
    with closing(make_play_envs(args.env_id, num, seed=seed)) as env:
        policy = dqn.make_policy(net, env.single_action_space)
        yield from play_episodes(policy, env, num, args.eval_max_steps, beat)


def confirm(channel: WorkerChannel, args: Args, memory: PopulationMemory, place: int, number: int) -> Confirmation:
    """Have the member at a place play new games, which confirm the fitness that it had in generation `number`."""
    net = read_member(memory.results[place], memory.spaces, args.adam_eps)[1].net
    seed = derive_seeds(args.seed, number, CONFIRMATION)[0]
    games = list(play_greedily(args, net, args.confirm_episodes, seed, channel.beat))
    returns = [game.episode_return for game in games if math.isfinite(game.episode_return)]
    return Confirmation(float(np.mean(returns or math.nan)), len(returns), sum(game.length for game in games))
