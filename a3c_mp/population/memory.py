"""Shared memory of a population: the replay, and a record of each member as its generation begins and as it ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from a3c_mp.data.transitions import episode_stats_spec
from a3c_mp.errors import ConfigError
from a3c_mp.population.records import Spaces, record_spec
from a3c_mp.population.settings import Args
from a3c_mp.processes.slots import Slots, Spec, shared_counters
from a3c_mp.replay import Shards

METRICS = ("losses/value", "values/q")
"""means over a member's updates"""
SKIPPED = ("transitions_not_finite", "obs_values_clipped", "obs_moments_not_finite")
"""counters of what a member could not learn from; see `run.guard`"""


class PopulationMemory(NamedTuple):
    """What members share: memory, and the spaces of their environments."""

    shards: Shards  # of the replay, one for each place
    births: Slots  # for each place: the member as its generation begins, and the rows that are filled in each lane
    results: Slots  # for each place: the member as its generation ends, its games, and the rows of its own lanes
    steps: Tensor  # int64 [places]: agent steps so far in the current generation
    games: Tensor  # int64 [places]: evaluation games that have ended in it
    spaces: Spaces

    def pack(self, place: int, rows: np.ndarray) -> bytes:
        """Return a place's result, and its shard's rows from `rows` [lanes] on, as bytes of always the same length."""
        return b"".join(part.tobytes() for part in (self.results.arena[place].numpy(), *self._new(place, rows)))

    def unpack(self, place: int, rows: np.ndarray, packed: bytes) -> None:
        """Write what another rank's `pack` returned."""
        result = self.results.arena[place].numpy()
        result[:] = np.frombuffer(packed, np.uint8, result.size)
        start, (env, row) = result.size, self._places(place, rows)
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
        steps = self.results.spec["done"][0][0]
        return lanes[:, None], (rows[lanes][:, None] + np.arange(2 * steps)) % self.shards.rows


def allocate(args: Args, spaces: Spaces) -> PopulationMemory:
    """Allocate the memory of a population. Raises ConfigError if too little is free."""
    num = args.population
    try:
        shards = Shards(num, args.num_envs, lane_rows(args), spaces.obs, spaces.action)
        births, results = Slots(birth_spec(args, spaces), num), Slots(result_spec(args, spaces), num)
        return PopulationMemory(shards, births, results, shared_counters(num), shared_counters(num), spaces)
    except MemoryError as error:
        fix = "lower --replay-size, --population or --units-range"
        raise ConfigError("replay-size", args.replay_size, f"for replay and nets {error}", fix) from error


def birth_spec(args: Args, spaces: Spaces) -> Spec:
    """Return shapes and dtypes of `PopulationMemory.births`."""
    return {**record_spec(spaces, args.ranges), "rows": ((args.population * args.num_envs,), torch.int64)}


def result_spec(args: Args, spaces: Spaces) -> Spec:
    """Return shapes and dtypes of `PopulationMemory.results`."""
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
