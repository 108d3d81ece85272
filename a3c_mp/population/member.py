"""One generation of a member: what it plays, stores, samples and is evaluated on.

A generation of one member is a pure function of the record that it starts from, the transitions of earlier generations
and the seed of (generation, place): which process computes it, when, and how many times changes no bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.algorithms import dqn
from a3c_mp.algorithms.apex import ladder
from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.data.transitions import reward_to_learn, write_stats
from a3c_mp.nets.obs_norm import ObsNorm
from a3c_mp.population.genome import Genome
from a3c_mp.population.growth import MemberState
from a3c_mp.population.memory import METRICS, SKIPPED, PopulationMemory
from a3c_mp.population.records import write_member
from a3c_mp.population.settings import Args
from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.replay import Batch, EnvStep, Replay, Shards, Writer
from a3c_mp.run.averages import Means
from a3c_mp.run.evaluate import make_play_envs, play_episodes
from a3c_mp.seeds import FITNESS, MEMBER, derive_seeds
from wrappers import action_mask, make_vec_env


class MemberActor:
    """The environments of a member in one generation, its exploration, and where its transitions go.

    Args:
        args: the chapter's settings.
        memory: what members share; steps, games and new transitions are written to it.
        shards: the replay as this generation finds it.
        place: of the member in its generation.
        seeds: of environments, and of exploration.
    """

    def __init__(self, args: Args, memory: PopulationMemory, shards: Shards, place: int, seeds: tuple[int, int]):
        self.args, self.steps = args, memory.steps[place]
        self.record = memory.results[place]
        self.rng = np.random.default_rng(seeds[1])
        self.epsilons = ladder(args.epsilon, args.ladder_exponent, 0, args.num_envs, 1)
        self.stats = EpisodeStats(args.num_envs)
        self.writer = Writer(shards, place, n_step=1, gamma=1.0)  # the discount factor is each learner's own
        self.t = 0
        self.env = make_vec_env(args.env_id, args.num_envs, seed=seeds[0])

    def reset(self) -> None:
        """Start the games."""
        self.obs, _ = self.env.reset()

    @torch.inference_mode()
    def act(self, net: nn.Module, is_random: bool) -> None:
        """Take an epsilon-greedy or a random step in all environments, and store its transitions."""
        num_envs, obs, mask = self.args.num_envs, self.obs, action_mask(self.env)
        q = dqn.allowed_q(net(torch.from_numpy(obs))[0].numpy(), mask)
        explores = self.rng.random(num_envs) < (1.0 if is_random else self.epsilons)
        action = np.where(explores, dqn.random_actions(self.rng, q.shape, mask), q.argmax(axis=1))
        self.obs, reward, terminated, truncated, infos = self.env.step(action)
        done = terminated | truncated
        self.stats.step(reward, done)
        write_stats(self.record, self.t, self.stats)
        self.t += 1
        # The end of a generation interrupts games as a time limit does: they are worth what would have followed.
        truncated = truncated | (self.t == self.args.rounds)
        final_obs = self.obs.copy()
        final_mask = action_mask(self.env)
        if done.any():
            final_obs[done] = infos["final_obs"][done]
            if final_mask is not None:
                final_mask = np.where(done[:, None], infos["final_mask"], final_mask)
        unknown = np.zeros(num_envs, np.float32)  # values would give priorities, which uniform sampling does not need
        step = EnvStep(obs, action, reward_to_learn(self.args, reward), terminated, truncated, unknown, unknown)
        life_lost = infos.get("life_lost") if self.args.life_loss_terminal else None
        step = step._replace(life_lost=life_lost, mask=mask, final_mask=final_mask)
        self.writer.step(step._replace(final_obs=final_obs, final_value=unknown))
        self.steps.fill_(self.t * num_envs)  # for the display


class MemberSampler:
    """The batches of a member in one generation, and when they are due.

    It samples the member's own new transitions and those of all finished generations, never what others write now.

    Args:
        args: the chapter's settings.
        shards: the replay as this generation finds it.
        place: of the member in its generation.
        seed: of sampling.
    """

    def __init__(self, args: Args, shards: Shards, place: int, seed: int):
        self.place, self.num_envs, self.learning_starts = place, args.num_envs, args.learning_starts
        self.replay = Replay(shards, priority_exponent=0.0, seed=seed)
        for shard in range(shards.num_shards):
            self.replay.make_room(shard, 2 * args.rounds)
            self.replay.ingest(shard)
        self.skipped = Counter(transitions_not_finite=-self.replay.rejected)  # those of earlier generations are counted
        self.updates = self.learning_steps = 0
        self.means = Means()

    @property
    def is_learning(self) -> bool:
        """Whether there are enough transitions to learn from; until then actions are random."""
        return self.replay.size >= self.learning_starts

    def ingest(self) -> None:
        """Take in the transitions of the member's latest step."""
        self.replay.ingest(self.place)
        self.learning_steps += self.num_envs * self.is_learning

    def batches(self, genome: Genome) -> Iterator[Batch]:
        """Sample a batch for each update that is due: one for every `learn_every` steps."""
        while self.updates < self.learning_steps // genome.learn_every:
            self.updates += 1
            yield self.replay.sample(genome.batch_size)

    def update_norm(self, norm: ObsNorm, obs: Tensor) -> None:
        """Update a net's running mean and variance with observations, and count outliers."""
        is_finite, clipped = norm.update(obs)
        self.skipped.update(obs_values_clipped=clipped, obs_moments_not_finite=not is_finite)

    def write(self, record: dict[str, Tensor]) -> None:
        """Write the figures of the updates to a record of `PopulationMemory.results`."""
        means = self.means.pop()
        record["metrics"][:] = torch.tensor([means.get(name, math.nan) for name in METRICS])
        record["updates"].fill_(self.updates)
        self.skipped["transitions_not_finite"] += self.replay.rejected
        record["skipped"][:] = torch.tensor([self.skipped[name] for name in SKIPPED])


class MemberGeneration:
    """One generation of a member, in a `with` block that closes its environments.

    Args:
        args: the chapter's settings.
        memory: what members share.
        place: of the member in its generation.
        generation: its number, from 0.
        channel: to the parent process; gets at least one heartbeat for each step.
    """

    def __init__(self, args: Args, memory: PopulationMemory, place: int, generation: int, channel: WorkerChannel):
        self.args, self.memory, self.place, self.channel = args, memory, place, channel
        self.seeds = derive_seeds(args.seed, generation, place, MEMBER)
        self.fitness_seed = derive_seeds(args.seed, generation, FITNESS)[0]

    def __enter__(self) -> MemberGeneration:
        self.channel.starting()
        self.memory.steps[self.place] = self.memory.games[self.place] = 0
        shards = self.memory.shards.at(self.memory.births[self.place]["rows"].numpy())
        self.sampler = MemberSampler(self.args, shards, self.place, self.seeds[1] + 1)
        with ExitStack() as stack:
            self.actor = MemberActor(self.args, self.memory, shards, self.place, self.seeds)
            stack.enter_context(closing(self.actor.env))
            self.actor.reset()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def act(self, net: nn.Module) -> None:
        """Take a step in all environments; actions are random until the member learns."""
        self.actor.act(net, is_random=not self.sampler.is_learning)
        self.sampler.ingest()
        self.channel.beat()

    def end(self, genome: Genome, state: MemberState) -> None:
        """Evaluate the member, and write it and its figures to its record in `PopulationMemory.results`."""
        record = self.memory.results[self.place]
        returns, lengths = self._play(state.net)
        record["eval_returns"][:], record["eval_lengths"][:] = torch.tensor(returns), torch.tensor(lengths)
        self.sampler.write(record)
        record["rows"][:] = torch.from_numpy(self.actor.writer.row)
        write_member(record, genome, state)

    def _play(self, net: nn.Module) -> tuple[list[float], list[int]]:
        """Play the games that decide the member's fitness, greedily: (returns, lengths), NaN for broken weights."""
        num = self.args.eval_episodes
        if not all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values()):
            return [math.nan] * num, [0] * num
        self.channel.starting()
        games = []
        for game in play_greedily(self.args, net, num, self.fitness_seed, self.channel.beat):
            games.append(game)
            self.memory.games[self.place] = len(games)  # for the display
        return [game.episode_return for game in games], [game.length for game in games]


def play_greedily(
    args: Args, net: nn.Module, episodes: int, seed: int, on_step: Callable[[], object]
) -> Iterator[Episode]:
    """Play evaluation games of at most `--eval-max-steps` each; yields each when it ends."""
    with closing(make_play_envs(args.env_id, episodes, seed=seed)) as env:
        policy = dqn.make_policy(net, env.single_action_space)
        yield from play_episodes(policy, env, episodes, on_step, args.eval_max_steps)
