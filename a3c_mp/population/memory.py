"""Shared memory of a population: the replay, and a record of each member as its generation begins and as it ends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import gymnasium
import torch
from torch import Tensor

from a3c_mp.algorithms import dqn
from a3c_mp.data.transitions import episode_stats_spec
from a3c_mp.errors import ConfigError
from a3c_mp.nets.q_values import DuelingQ
from a3c_mp.population.evolution import Genome
from a3c_mp.population.settings import Args
from a3c_mp.processes.slots import Slots, Spec, shared_counters
from a3c_mp.replay import Shards

GENOME_BYTES = 512
"""longest genome as JSON"""
MOMENTS = ("exp_avg", "exp_avg_sq")
METRICS = ("losses/value", "values/q")
"""means over a member's updates"""
SKIPPED = ("transitions_not_finite", "obs_values_clipped", "obs_moments_not_finite")
"""counters of what a member could not learn from; see `run.guard`"""
Spaces = tuple[gymnasium.Space, gymnasium.Space]  # of observations and actions of one environment
Record = Mapping[str, Tensor]  # a member in shared memory


def make_net(spaces: Spaces, genome: Genome) -> DuelingQ:
    """Make a Q network with the architecture of a genome and random weights; torch's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        return dqn.make_net(*spaces, genome.hidden, genome.activation)


class MemberState(NamedTuple):
    """What a member trains: online net, target net, and Adam, which has moments from the start."""

    net: DuelingQ
    target_net: DuelingQ
    optimizer: torch.optim.Adam

    @classmethod
    def make(cls, spaces: Spaces, genome: Genome, adam_eps: float) -> MemberState:
        """Make a new member: random weights, the same ones in its target net, moments of 0."""
        net = make_net(spaces, genome)
        optimizer = torch.optim.Adam(net.parameters(), lr=genome.learning_rate, eps=adam_eps, fused=True)
        for parameter in net.parameters():
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        return cls(net, copy.deepcopy(net).requires_grad_(False), optimizer)

    @property
    def updates(self) -> int:
        """Gradient steps of the member and its ancestors: those of the output layer, which no mutation replaces."""
        *_, output_bias = self.net.parameters()
        return int(self.optimizer.state[output_bias]["step"])

    def tensors(self) -> list[Tensor]:
        """Return all tensors of it, in the order of a record."""
        moments = [self.optimizer.state[p][name] for p in self.net.parameters() for name in ("step", *MOMENTS)]
        return [*self.net.state_dict().values(), *self.target_net.state_dict().values(), *moments]


def write_member(record: Record, genome: Genome, state: MemberState) -> None:
    """Write a member to a record; what it does not need of it becomes 0."""
    text = torch.frombuffer(bytearray(genome.to_json().encode()), dtype=torch.uint8)
    values = torch.cat([tensor.detach().flatten() for tensor in state.tensors()])
    for field, content in ((record["genome"], text), (record["tensors"], values)):
        field[: len(content)] = content
        field[len(content) :] = 0


@torch.no_grad()
def read_member(record: Record, spaces: Spaces, adam_eps: float) -> tuple[Genome, MemberState]:
    """Return the member in a record, in tensors of its own."""
    genome = Genome.from_json(bytes(record["genome"].tolist()).rstrip(b"\0").decode())
    state, start = MemberState.make(spaces, genome, adam_eps), 0
    for tensor in state.tensors():
        tensor.copy_(record["tensors"][start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return genome, state


class PopulationMemory(NamedTuple):
    """What members share: memory, and the spaces of their environments."""

    shards: Shards  # of the replay, one for each place
    rows: Tensor  # int64 [lanes]: rows of each that are filled as the current generation begins
    births: Slots  # for each place: the member as its generation begins
    results: Slots  # for each place: the member as its generation ends, its games, and the rows of its own lanes
    steps: Tensor  # int64 [places]: agent steps so far in the current generation
    games: Tensor  # int64 [places]: evaluation games that have ended in it
    confirming: Tensor  # int64 [1]: place of the member that new games are to confirm, -1 in a generation
    spaces: Spaces

    @classmethod
    def allocate(cls, args: Args, spaces: Spaces) -> PopulationMemory:
        """Allocate the memory of a population. Raises ConfigError if too little is free."""
        with torch.device("meta"):  # the largest net that evolution can reach
            net = dqn.make_net(*spaces, (args.units_range[1],) * args.layers_range[1])
        weights = sum(tensor.numel() for tensor in net.state_dict().values())
        adam = sum(2 * parameter.numel() + 1 for parameter in net.parameters())
        record: Spec = {"genome": ((GENOME_BYTES,), torch.uint8), "tensors": ((2 * weights + adam,), torch.float32)}
        results = {
            **record,
            **episode_stats_spec(args.rounds, args.num_envs),
            "eval_returns": ((args.eval_episodes,), torch.float64),
            "eval_lengths": ((args.eval_episodes,), torch.int64),
            "updates": ((), torch.int64),
            "metrics": ((len(METRICS),), torch.float64),
            "skipped": ((len(SKIPPED),), torch.int64),
            "rows": ((args.num_envs,), torch.int64),
        }
        num = args.population
        # A lane has its share of the replay, and room for a generation of at most two rows a step.
        rows = -(-args.replay_size // (num * args.num_envs)) + 2 * args.rounds + 2
        try:
            shards = Shards(num, args.num_envs, rows, *spaces)
            slots = shared_counters(shards.num_lanes), Slots(record, num), Slots(results, num)
            counters = shared_counters(num), shared_counters(num), shared_counters(1).fill_(-1)
            return cls(shards, *slots, *counters, spaces)
        except MemoryError as error:
            fix = "lower --replay-size, --population or --units-range"
            raise ConfigError("replay-size", args.replay_size, f"for replay and nets {error}", fix) from error

    def pack(self, places: range) -> bytes:
        """Return what a generation has written at places, results and rows of the replay, as bytes for other ranks."""
        from safetensors.torch import save  # comes with accelerate

        index = self._new_rows(places)
        new = {name: field[index] for name, field in self.shards.fields().items()}
        return save({**new, "results": self.results.arena[places.start : places.stop].clone()})

    def unpack(self, places: range, packed: bytes) -> None:
        """Write what another rank's `pack` returned."""
        from safetensors.torch import load

        new, index = load(packed), self._new_rows(places)
        self.results.arena[places.start : places.stop] = new.pop("results")
        for name, values in new.items():
            self.shards.fields()[name][index] = values

    def _new_rows(self, places: range) -> tuple[Tensor, Tensor]:
        """Index of what a generation can write: (lanes [N, 1], places in the lanes [N, rows])."""
        rounds, num_envs = self.results.spec["done"][0]
        lanes = torch.arange(places.start * num_envs, places.stop * num_envs)[:, None]
        return lanes, (self.rows[lanes] + torch.arange(2 * rounds)) % self.shards.rows  # two rows for each step
