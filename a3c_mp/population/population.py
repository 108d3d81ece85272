"""A population: its members, the memory that they share, and what a checkpoint holds of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.population.evolution import Birth, Candidate, rank
from a3c_mp.population.genome import Genome
from a3c_mp.population.growth import MemberState, breed
from a3c_mp.population.memory import allocate
from a3c_mp.population.records import Spaces, make_net, make_state, read_member, write_member
from a3c_mp.population.settings import Args, first_genomes
from a3c_mp.processes.learner_group import Stateful, from_bytes
from a3c_mp.seeds import EVOLUTION, WEIGHTS, derive_seeds

RECENT = 5
"""generations in the mean fitness of a line of descent"""


@dataclass
class Member:
    """A member of the current generation, beside its record in shared memory."""

    birth: Birth
    fitnesses: list[float] = field(default_factory=list)  # of the last generations of its line of descent


class EliteNet(nn.Module):
    """The net of the fittest member; a saved one restores its architecture too.

    Args:
        spaces: of one environment.
        genome: of its net, until `become` or `load_state_dict` changes both; default: any, as one is to be loaded.
    """

    def __init__(self, spaces: Spaces, genome: Genome | None = None):
        super().__init__()
        self.spaces, self.genome = spaces, genome or Genome(1e-3, 1, 1)
        self.net = make_net(spaces, self.genome)

    @property
    def norm(self) -> nn.Module:
        return self.net.norm

    def forward(self, obs: Tensor) -> tuple[Tensor]:
        return self.net(obs)

    def become(self, genome: Genome, net: nn.Module) -> None:
        """Take architecture and weights of a member."""
        self.genome, self.net = genome, make_net(self.spaces, genome)
        self.net.load_state_dict(net.state_dict())

    def get_extra_state(self) -> Tensor:
        return from_bytes(self.genome.to_json().encode())

    def set_extra_state(self, state: Tensor) -> None:
        """Called by `load_state_dict` before the weights are loaded."""
        self.genome = Genome.from_json(bytes(state.tolist()).decode())
        self.net = make_net(self.spaces, self.genome)


def saved_net(member: Mapping[str, Any]) -> dict[str, Any]:
    """The net of a member in a checkpoint, as `EliteNet` loads it."""
    net = {f"net.{name}": tensor for name, tensor in member["state"][0].items()}
    return {"_extra_state": from_bytes(member["genome"].encode()), **net}


class Population:
    """The members of a generation, the memory that they share, and the fittest net so far.

    Args:
        args: the chapter's settings.
        spaces: of one environment.

    Raises:
        ConfigError: too little memory.
    """

    def __init__(self, args: Args, spaces: Spaces):
        self.args, self.spaces = args, spaces
        self.generation = 0  # the current one, or the next
        self.elite = EliteNet(spaces, args.genome)
        self.memory = allocate(args, spaces)
        self.rows = np.zeros(self.memory.shards.num_lanes, np.int64)  # that are filled in each lane of the replay
        self.members: list[Member] = []
        for place, genome in enumerate(first_genomes(args)):
            torch.manual_seed(derive_seeds(args.seed, place, WEIGHTS)[1])
            state = make_state(spaces, genome, args.adam_eps)
            self._place(place, Birth(place, place, "first", "", genome), state, [])

    @property
    def candidates(self) -> list[Candidate]:
        """The members whose generation ends, as evolution sees them."""
        return [
            Candidate(member.birth.id, member.birth.genome, self.fitness(place))
            for place, member in enumerate(self.members)
        ]

    def fitness(self, place: int) -> float:
        """Mean return of a member's evaluation games, without those with NaN or inf; NaN for broken weights."""
        returns = self.memory.results[place]["eval_returns"]
        return float(returns[returns.isfinite()].mean())

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of this generation's births, from their beginning."""
        return np.random.default_rng(derive_seeds(self.args.seed, self.generation, EVOLUTION)[1])

    @property
    def fittest(self) -> int:
        """Place of the fittest member, the elite: `next_generation` chooses the same one with `rng`."""
        return rank([self.fitness(place) for place in range(len(self.members))], self.rng)[0]

    def fittest_net(self) -> nn.Module:
        """Net of the fittest member, whose generation ends."""
        return self._read(self.memory.results[self.fittest])[1].net

    def end_generation(self) -> None:
        """Take the fittest member's net as the elite, and note every member's fitness."""
        for place, member in enumerate(self.members):
            member.fitnesses = [*member.fitnesses, self.fitness(place)][-RECENT:]
        genome, state = self._read(self.memory.results[self.fittest])
        self.elite.become(genome, state.net)

    def apply(self, births: Sequence[Birth]) -> None:
        """Make the members of the next generation from those of this one, in the order of `births`."""
        assert len(births) == len(self.members), (len(births), len(self.members))
        places = {member.birth.id: place for place, member in enumerate(self.members)}
        fitnesses = {member.birth.id: member.fitnesses for member in self.members}
        parents = {id: self._read(self.memory.results[places[id]]) for id in {birth.parent for birth in births}}
        self.rows = np.concatenate([self.memory.results[place]["rows"].numpy() for place in range(len(births))])
        self.generation += 1
        self.memory.steps.zero_()
        self.memory.games.zero_()
        self.members = []
        for place, birth in enumerate(births):
            genome, state = parents[birth.parent]
            child = breed(state, genome, birth, self.args.parameter_noise)
            self._place(place, birth, child, list(fitnesses[birth.parent]))

    def digest(self) -> bytes:
        """SHA-256 of the members as their generation begins, and of where the replay ends."""
        return hashlib.sha256(self.memory.births.arena.numpy().data).digest()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next generation follows from; between two generations only."""
        used = min(int(self.rows.max()), self.memory.shards.rows)
        return {
            "generation": self.generation,
            "rows": torch.from_numpy(self.rows),
            "replay": {name: rows[:, :used].clone() for name, rows in self.memory.shards.fields().items()},
            "members": [self._saved(place) for place in range(len(self.members))],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError for another number of members or environments."""
        sizes = len(state["members"]), len(state["rows"]) // len(state["members"])
        if sizes != (self.args.population, self.args.num_envs):
            raise ValueError(
                "it has {} members with {} environments each: leave --population and --num-envs out".format(*sizes)
            )
        lanes, used = self.memory.shards, next(iter(state["replay"].values())).shape[1]
        if used != lanes.rows and int(state["rows"].max()) > used:  # rows are kept at their number modulo the length
            raise ValueError("its replay has another length (--replay-size, --generation-steps)")
        for name, rows in state["replay"].items():
            self.memory.shards.fields()[name][:, : rows.shape[1]] = rows
        self.generation, self.rows, self.members = state["generation"], state["rows"].numpy().copy(), []
        for place, saved in enumerate(state["members"]):
            genome = Genome.from_json(saved["genome"])
            member = make_state(self.spaces, genome, self.args.adam_eps)
            parts: Sequence[Stateful] = member
            for part, content in zip(parts, saved["state"], strict=True):
                part.load_state_dict(content)
            self._place(place, Birth(**saved["birth"], genome=genome), member, saved["fitnesses"])

    def _saved(self, place: int) -> dict[str, Any]:
        birth, member = self.members[place].birth, self._read(self.memory.births[place])[1]
        return {
            "birth": {name: value for name, value in birth._asdict().items() if name != "genome"},
            "genome": birth.genome.to_json(),
            "fitnesses": self.members[place].fitnesses,
            "state": [part.state_dict() for part in member],
        }

    def _place(self, place: int, birth: Birth, state: MemberState, fitnesses: list[float]) -> None:
        """Put a member into its place of the next generation, and into the record that its generation begins with."""
        self.members.append(Member(birth, fitnesses))
        record = self.memory.births[place]
        write_member(record, birth.genome, state)
        record["rows"][:] = torch.from_numpy(self.rows)

    def _read(self, record: Mapping[str, Tensor]) -> tuple[Genome, MemberState]:
        return read_member(record, self.spaces, self.args.adam_eps)
