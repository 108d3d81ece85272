"""The life of a member in one generation: what it plays, stores, samples and is evaluated on.

A generation of one member is a pure function of the record that it starts from, the transitions of earlier generations
and the seed of (generation, place): which process computes it, when, and how many times changes no bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.algorithms import dqn
from a3c_mp.algorithms.apex import ladder
from a3c_mp.data.episodes import EpisodeStats
from a3c_mp.data.transitions import episode_stats_spec, reward_to_learn, write_stats
from a3c_mp.nets.obs_norm import ObsNorm
from a3c_mp.population.genome import Genome
from a3c_mp.population.growth import MemberState
from a3c_mp.population.records import Spaces, record_spec, write_member
from a3c_mp.population.settings import Args
from a3c_mp.processes.slots import Slots, Spec
from a3c_mp.replay import Batch, EnvStep, Replay, Shards, Writer
from a3c_mp.run.averages import Means
from a3c_mp.run.evaluate import make_play_envs, play_episodes
from a3c_mp.seeds import FITNESS, MEMBER, derive_seeds
from wrappers import make_vec_env

METRICS = ("losses/value", "values/q")
"""means over a member's updates"""
SKIPPED = ("transitions_not_finite", "obs_values_clipped", "obs_moments_not_finite")
"""counters of what a member could not learn from; see `run.guard`"""


class World(NamedTuple):
    """What members share: memory, and the spaces of their environments."""

    shards: Shards  # of the replay, one for each place
    births: Slots  # for each place: the member as its generation begins, and the rows that are filled in each lane
    lives: Slots  # for each place: the member as its generation ends, its games, and the rows of its own lanes
    spaces: Spaces

    def pack(self, place: int, rows: np.ndarray) -> bytes:
        """Return a place's life, and its shard's rows from `rows` [lanes] on, as bytes of always the same length."""
        return b"".join(part.tobytes() for part in (self.lives.arena[place].numpy(), *self._new(place, rows)))

    def unpack(self, place: int, rows: np.ndarray, packed: bytes) -> None:
        """Write what another rank's `pack` returned."""
        life = self.lives.arena[place].numpy()
        life[:] = np.frombuffer(packed, np.uint8, life.size)
        start, (env, row) = life.size, self._places(place, rows)
        for name, field in zip(self.shards.fields(), self._new(place, rows), strict=True):
            new = np.frombuffer(packed, field.dtype, field.size, start).reshape(field.shape)
            getattr(self.shards, name)[env, row] = new
            start += field.nbytes

    def _new(self, place: int, rows: np.ndarray) -> list[np.ndarray]:
        """Copies of the rows that a generation can write, [num_envs, rows, ...] for each field."""
        env, row = self._places(place, rows)
        return [getattr(self.shards, name)[env, row] for name in self.shards.fields()]

    def _places(self, place: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where they are: (lane [num_envs, 1], place in the lane [num_envs, rows])."""
        lanes = np.arange(self.shards.num_lanes)[self.shards.lanes(place)]
        steps = self.lives.spec["done"][0][0]
        return lanes[:, None], (rows[lanes][:, None] + np.arange(2 * steps)) % self.shards.rows


def birth_spec(args: Args, spaces: Spaces) -> Spec:
    """Return shapes and dtypes of `World.births`."""
    return {**record_spec(spaces, args.ranges), "rows": ((args.population * args.num_envs,), torch.int64)}


def life_spec(args: Args, spaces: Spaces) -> Spec:
    """Return shapes and dtypes of `World.lives`."""
    return {
        **record_spec(spaces, args.ranges),
        **episode_stats_spec(args.rounds, args.num_envs),
        "eval_returns": ((args.eval_episodes,), torch.float64),
        "eval_lengths": ((args.eval_episodes,), torch.int64),
        "updates": ((), torch.int64),
        "metrics": ((len(METRICS),), torch.float64),
        "skipped": ((len(SKIPPED),), torch.int64),
        "rows": ((args.num_envs,), torch.int64),
    }


def lane_rows(args: Args) -> int:
    """Return the rows of each lane: its share of the replay, and room for a generation of at most two rows a step."""
    return -(-args.replay_size // (args.population * args.num_envs)) + 2 * args.rounds + 2


class Life:
    """One generation of a member, in a `with` block that closes its environments.

    It samples its own new transitions and those of all members' finished generations, never what others write now.

    Args:
        args: the chapter's settings.
        world: what members share.
        place: of the member in its generation.
        generation: its number, from 0.
        beat: called at least once for each step of its environments.
    """

    def __init__(self, args: Args, world: World, place: int, generation: int, beat: Callable[[], None]):
        self.args, self.world, self.place, self.beat = args, world, place, beat
        self.env_seed, seed = derive_seeds(args.seed, generation, place, MEMBER)
        self.fitness_seed = derive_seeds(args.seed, generation, FITNESS)[0]
        self.rng = np.random.default_rng(seed)
        self.epsilons = ladder(args.epsilon, args.ladder_exponent, 0, args.num_envs, 1)
        self.stats = EpisodeStats(args.num_envs)
        shards = world.shards.at(world.births[place]["rows"].numpy())
        self.writer = Writer(shards, place, n_step=1, gamma=1.0)  # the discount factor is each learner's own
        self.replay = Replay(shards, priority_exponent=0.0, seed=seed + 1)
        for shard in range(shards.num_shards):
            self.replay.make_room(shard, 2 * args.rounds)
            self.replay.ingest(shard)
        self.skipped = Counter(transitions_not_finite=-self.replay.rejected)  # those of earlier generations are counted
        self.t = self.updates = self.learning_steps = 0
        self.means = Means()

    def __enter__(self) -> Life:
        with ExitStack() as stack:
            self.env = stack.enter_context(
                closing(make_vec_env(self.args.env_id, self.args.num_envs, seed=self.env_seed))
            )
            self.obs, _ = self.env.reset()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    @property
    def is_learning(self) -> bool:
        """Whether there are enough transitions to learn from; until then actions are random."""
        return self.replay.size >= self.args.learning_starts

    @torch.inference_mode()
    def act(self, net: nn.Module) -> None:
        """Take an epsilon-greedy step in all environments, and store its transitions."""
        num_envs, obs = self.args.num_envs, self.obs
        q = net(torch.from_numpy(obs))[0].numpy()
        is_random = self.rng.random(num_envs) < (self.epsilons if self.is_learning else 1.0)
        action = np.where(is_random, self.rng.integers(q.shape[1], size=num_envs), q.argmax(axis=1))
        self.obs, reward, terminated, truncated, infos = self.env.step(action)
        done = terminated | truncated
        self.stats.step(reward, done)
        write_stats(self.world.lives[self.place], self.t, self.stats)
        self.t += 1
        # The end of a generation interrupts games as a time limit does: they are worth what would have followed.
        truncated = truncated | (self.t == self.args.rounds)
        final_obs = self.obs.copy()
        if done.any():
            final_obs[done] = infos["final_obs"][done]
        unknown = np.zeros(num_envs, np.float32)  # values would give priorities, which uniform sampling does not need
        step = EnvStep(obs, action, reward_to_learn(self.args, reward), terminated, truncated, unknown, unknown)
        life_lost = infos.get("life_lost") if self.args.life_loss_terminal else None
        self.writer.step(step._replace(final_obs=final_obs, final_value=unknown, life_lost=life_lost))
        self.replay.ingest(self.place)
        self.learning_steps += num_envs * self.is_learning
        self.beat()

    def batches(self, genome: Genome) -> Iterator[Batch]:
        """Sample a batch for each update that is due: one for every `learn_every` steps."""
        while self.updates < self.learning_steps // genome.learn_every:
            self.updates += 1
            yield self.replay.sample(genome.batch_size)

    def update_norm(self, norm: ObsNorm, obs: Tensor) -> None:
        """Update a net's running mean and variance with observations, and count outliers."""
        is_finite, clipped = norm.update(obs)
        self.skipped.update(obs_values_clipped=clipped, obs_moments_not_finite=not is_finite)

    def end(self, genome: Genome, state: MemberState) -> None:
        """Evaluate the member, and write it and its figures to its record in `World.lives`."""
        record = self.world.lives[self.place]
        returns, lengths = self._play(state.net)
        record["eval_returns"][:], record["eval_lengths"][:] = torch.tensor(returns), torch.tensor(lengths)
        means = self.means.pop()
        record["metrics"][:] = torch.tensor([means.get(name, math.nan) for name in METRICS])
        record["updates"].fill_(self.updates)
        self.skipped["transitions_not_finite"] += self.replay.rejected
        record["skipped"][:] = torch.tensor([self.skipped[name] for name in SKIPPED])
        record["rows"][:] = torch.from_numpy(self.writer.row)
        write_member(record, genome, state)

    def _play(self, net: nn.Module) -> tuple[list[float], list[int]]:
        """Play the games that decide the member's fitness, greedily: (returns, lengths), NaN for broken weights."""
        args, policy = self.args, dqn.make_policy(net, self.world.spaces.action)
        if not all(bool(tensor.isfinite().all()) for tensor in net.state_dict().values()):
            return [math.nan] * args.eval_episodes, [0] * args.eval_episodes
        with closing(make_play_envs(args.env_id, args.eval_episodes, seed=self.fitness_seed)) as env:
            games = list(play_episodes(policy, env, args.eval_episodes, self.beat))
        return [game.episode_return for game in games], [game.length for game in games]
