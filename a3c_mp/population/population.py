"""A population: its members, the memory that they share, and what a checkpoint holds of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.errors import TrainingError
from a3c_mp.population.evolution import Genome, Member, first_members, rank
from a3c_mp.population.growth import breed
from a3c_mp.population.memory import MemberState, PopulationMemory, Record, Spaces, make_net, read_member, write_member
from a3c_mp.population.settings import Args
from a3c_mp.processes.learner_group import from_bytes
from a3c_mp.seeds import EVOLUTION, WEIGHTS, derive_seeds

RECENT = 5
"""generations in the mean fitness of a line of descent"""


class EliteNet(nn.Module):
    """The net of the fittest member; `load_state_dict` restores its architecture too, whatever `genome` was."""

    def __init__(self, spaces: Spaces, genome: Genome | None = None):
        super().__init__()
        self.spaces, self.genome = spaces, genome or Genome(1e-3, 1, 1)
        self.net = make_net(spaces, self.genome)

    @property
    def norm(self) -> nn.Module:
        return self.net.norm

    def forward(self, obs: Tensor) -> tuple[Tensor]:
        return self.net(obs)

    def get_extra_state(self) -> Tensor:
        return from_bytes(self.genome.to_json().encode())

    def set_extra_state(self, state: Tensor) -> None:
        """Called by `load_state_dict` before the weights are loaded."""
        self.genome = Genome.from_json(bytes(state.tolist()).decode())
        self.net = make_net(self.spaces, self.genome)


def saved_net(genome: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The net of a member, by its genome as JSON and its weights, as `EliteNet` loads it."""
    return {"_extra_state": from_bytes(genome.encode()), **{f"net.{name}": value for name, value in weights.items()}}


class Population:
    """The members of a generation, the memory that they share, and the fittest net so far.

    Raises:
        ConfigError: too little memory.
    """

    def __init__(self, args: Args, spaces: Spaces):
        self.args, self.spaces = args, spaces
        self.generation = 0  # the current one, or the next
        self.members = first_members(args)
        self.elite = EliteNet(spaces, self.members[0].genome)
        self.memory = PopulationMemory.allocate(args, spaces)
        for place, member in enumerate(self.members):
            torch.manual_seed(derive_seeds(args.seed, place, WEIGHTS)[1])
            state = MemberState.make(spaces, member.genome, args.adam_eps)
            write_member(self.memory.births[place], member.genome, state)

    @property
    def results(self) -> list[Record]:
        """Of the members whose generation ends."""
        return [self.memory.results[place] for place in range(len(self.members))]

    @property
    def evaluated(self) -> list[Member]:
        """The members whose generation ends, with their fitness; NaN for broken weights."""
        members = []
        for member, result in zip(self.members, self.results, strict=True):
            returns = result["eval_returns"]
            fitness = float(returns[returns.isfinite()].mean())
            members.append(member._replace(fitnesses=(*member.fitnesses, fitness)[-RECENT:]))
        return members

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of this generation's births, from their beginning."""
        return np.random.default_rng(derive_seeds(self.args.seed, self.generation, EVOLUTION)[1])

    @property
    def fittest(self) -> int:
        """Place of the fittest member, the elite; of equals the one that the chapter finds by the first use of `rng`.

        Raises:
            TrainingError: no member has a finite fitness.
        """
        members = self.evaluated
        fittest = rank(members, self.rng)[0]
        if not math.isfinite(fittest.fitness):
            raise TrainingError("no member has a finite fitness: all have diverged; lower the learning rates")
        return members.index(fittest)

    def take_elite(self) -> None:
        """Take the net of the fittest member, whose generation ends, as the elite's. Raises as `fittest` does."""
        genome, state = self._read(self.results[self.fittest])
        self.elite.load_state_dict(saved_net(genome.to_json(), state.net.state_dict()))

    def breed(self, births: Sequence[Member]) -> None:
        """Make the members of the next generation from those of this one, in the order of `births`."""
        results = {member.id: result for member, result in zip(self.members, self.results, strict=True)}
        parents = {id: self._read(results[id]) for id in {birth.parent for birth in births}}
        self.memory.rows.copy_(torch.cat([result["rows"] for result in self.results]))
        self.generation += 1
        self.memory.steps.zero_()
        self.memory.games.zero_()
        self.members = list(births)
        for place, birth in enumerate(births):
            genome, state = parents[birth.parent]
            child = breed(state, genome, birth, self.spaces, self.args.parameter_noise)
            write_member(self.memory.births[place], birth.genome, child)

    def digest(self) -> bytes:
        """SHA-256 of the members as their generation begins, and of where the replay ends."""
        return hashlib.sha256(self.memory.births.arena.numpy().tobytes() + self.memory.rows.numpy().tobytes()).digest()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next generation follows from; between two generations only."""
        shards, members = self.memory.shards, []
        for place, member in enumerate(self.members):
            genome, state = self._read(self.memory.births[place])
            parts = [part.state_dict() for part in state]
            members.append({**member._asdict(), "genome": genome.to_json(), "state": parts})
        used = min(int(self.memory.rows.max()), shards.rows)
        replay = {name: rows[:, :used].clone() for name, rows in shards.fields().items()}
        sizes = [self.args.population, self.args.num_envs, shards.rows]
        rows = self.memory.rows.clone()
        return {"generation": self.generation, "sizes": sizes, "rows": rows, "replay": replay, "members": members}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError if it is of other sizes."""
        shards, sizes = self.memory.shards, state["sizes"]
        if sizes != [self.args.population, self.args.num_envs, shards.rows]:
            what = "it has {} members with {} environments each, and {} rows in the replay for each".format(*sizes)
            fix = "leave --population, --num-envs, --replay-size and --generation-steps out"
            raise ValueError(f"{what}: {fix}")
        for name, rows in state["replay"].items():
            shards.fields()[name][:, : rows.shape[1]] = rows
        self.generation = state["generation"]
        self.memory.rows.copy_(state["rows"])
        for place, saved in enumerate(state["members"]):
            genome = Genome.from_json(saved["genome"])
            fields = {name: saved[name] for name in Member._fields}
            self.members[place] = Member(**fields | {"genome": genome})
            member = MemberState.make(self.spaces, genome, self.args.adam_eps)
            for part, content in zip(member, saved["state"], strict=True):
                part.load_state_dict(content)  # type: ignore[attr-defined]
            write_member(self.memory.births[place], genome, member)

    def _read(self, record: Record) -> tuple[Genome, MemberState]:
        return read_member(record, self.spaces, self.args.adam_eps)
