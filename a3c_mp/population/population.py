"""A population: its members, the memory that they share, and what a checkpoint holds of them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from a3c_mp.config import flag_name
from a3c_mp.data.transitions import episode_stats_spec
from a3c_mp.errors import ConfigError, TrainingError
from a3c_mp.population.evolution import Genome, Member, first_members, fittest_first, largest_genome, possible_parents
from a3c_mp.population.growth import MemberState, Record, Spaces, breed, make_net
from a3c_mp.population.settings import Args, check_genome
from a3c_mp.processes.learner_group import LearnerGroup, from_bytes
from a3c_mp.processes.slots import Slots, Spec, shared_counters
from a3c_mp.seeds import EVOLUTION, WEIGHTS, derive_seeds

COUNTS = ("updates", "transitions_not_finite", "obs_values_far")  # updates, and what a member could not learn from
RECENT = 5  # generations in the mean fitness of a line of descent


class PopulationMemory(NamedTuple):
    """What members share: memory, and the spaces of their environments."""

    shards: Any  # `Shards` of the replay, one for each place; None if each member has its own data
    rows: Tensor  # int64 [lanes]: rows of each that are filled as the current generation begins
    births: Slots  # for each place: the member as its generation begins
    results: Slots  # for each place: the member as its generation ends, its games, and the rows of its own lanes
    progress: Tensor  # int64 [2, places]: agent steps and evaluation games so far in the current generation
    confirming: Tensor  # int64 [1]: place of the member that new games are to confirm, -1 in a generation
    spaces: Spaces

    @classmethod
    def allocate(cls, args: Args, spaces: Spaces, generation: Any) -> Self:
        """Allocate the memory of a population. Raises ConfigError if too little is free."""
        try:
            with torch.device("meta"):
                largest = MemberState.make(spaces, largest_genome(args), args, "meta")
        except RuntimeError as error:
            given, fix = " ".join(map(str, args.convolutions)), "use fewer, or smaller kernels and strides"
            raise ConfigError("convolutions", given, "nothing is left of the image behind them", fix) from error
        size = sum(tensor.numel() for tensor in largest.tensors())
        genome_bytes = 96 + sum(30 + len(json.dumps(name)) for name in args.evolving)
        genome_bytes += 16 * args.layers_range[1] + 32 * len(largest.genome.convolutions)
        record: Spec = {
            "genome": ((genome_bytes,), torch.uint8),
            "tensors": ((size,), torch.float32),
            "returns": ((4,), torch.float64),  # sums and largest of `ReturnStats`: squares leave float32 behind
        }
        results = {
            **record,
            **episode_stats_spec(args.rounds, args.num_envs),
            "eval_returns": ((args.eval_episodes,), torch.float64),
            "eval_lengths": ((args.eval_episodes,), torch.int64),
            "metrics": ((len(generation.metrics),), torch.float64),
            "counts": ((len(COUNTS),), torch.int64),
            "rows": ((args.num_envs,), torch.int64),
        }
        num = args.population
        try:
            shards = generation.share(args, spaces)
            slots = shared_counters(num * args.num_envs), Slots(record, num), Slots(results, num)
            counters = shared_counters(2 * num).view(2, num), shared_counters(1).fill_(-1)
            return cls(shards, *slots, *counters, spaces)
        except MemoryError as error:
            name = "replay_size" if hasattr(args, "replay_size") else "population"
            fix = f"lower --{flag_name(name)}, --generation-steps, --units-range or --channels-range"
            raise ConfigError(flag_name(name), getattr(args, name), f"for replay and nets {error}", fix) from error

    def exchange(self, group: LearnerGroup) -> None:
        """Exchange what a generation has written, results and rows of the replay, with the other ranks."""
        rounds, num_envs = self.results.spec["done"][0]
        for source in range(group.size):
            places = LearnerGroup(source, group.size).own_share(len(self.results.arena))
            lanes = torch.arange(places.start * num_envs, places.stop * num_envs)[:, None]
            for field in self.shards.fields().values() if self.shards is not None else ():
                new_rows = (self.rows[lanes] + torch.arange(2 * rounds)) % self.shards.rows  # at most two for each step
                field[lanes, new_rows] = group.broadcast(field[lanes, new_rows], source)
            results = self.results.arena[places.start : places.stop]
            results.copy_(group.broadcast(results, source))


class EliteNet(nn.Module):
    """The net of the fittest member; `load_state_dict` restores its architecture too, whatever `genome` was."""

    def __init__(self, spaces: Spaces, genome: Genome):
        super().__init__()
        self.spaces, self.genome = spaces, genome
        self.net = make_net(self.spaces, self.genome)

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
    """The members of a generation, the memory that they share, and the fittest net. Raises as `allocate` does."""

    def __init__(self, args: Args, spaces: Spaces, generation: Any):
        self.args, self.spaces, self.metrics = args, spaces, generation.metrics
        self.generation = 0  # the current one, or the next
        self.lineage: list[dict[str, Any]] = []  # lines of `lineage.csv`, of all generations so far
        self.members = first_members(args)
        self.memory = PopulationMemory.allocate(args, spaces, generation)
        self.elite = EliteNet(spaces, self.members[0].genome)
        for place, member in enumerate(self.members):
            torch.manual_seed(derive_seeds(args.seed, place, WEIGHTS)[1])
            MemberState.make(self.spaces, member.genome, args).write(self.memory.births[place])

    @property
    def results(self) -> list[Record]:
        """Of the members whose generation ends."""
        return [self.memory.results[place] for place in range(len(self.members))]

    @property
    def evaluated(self) -> list[Member]:
        """The members whose generation ends, with their fitness: NaN for broken weights, -inf if a game has failed."""
        members = []
        for member, result in zip(self.members, self.results, strict=True):
            fitness = float(result["eval_returns"].mean())
            members.append(member._replace(fitnesses=(*member.fitnesses, fitness)[-RECENT:]))
        return members

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of this generation's births, from their beginning."""
        return np.random.default_rng(derive_seeds(self.args.seed, self.generation, EVOLUTION)[1])

    @property
    def fittest(self) -> int:
        """Place of the fittest member; of equals the one that the chapter finds by the first use of `rng`.

        Raises TrainingError if no member has finite weights.
        """
        members = self.evaluated
        if not possible_parents(members):
            fix = "lower --learning-rate, and leave it out of --genes"
            raise TrainingError(f"no member has a finite fitness: all have diverged; {fix}")
        return members.index(fittest_first(members, self.rng)[0])

    def take_elite(self) -> None:
        """Take the net of the fittest member, whose generation ends, as the elite's. Raises as `fittest` does."""
        state = self._read(self.results[self.fittest])
        self.elite.load_state_dict(saved_net(state.genome.to_json(), state.net.state_dict()))

    def breed(self, births: Sequence[Member]) -> None:
        """Make the members of the next generation from those of this one, in the order of `births`."""
        results = {member.id: result for member, result in zip(self.members, self.results, strict=True)}
        parents = {id: self._read(results[id]) for id in {birth.parent for birth in births}}
        self.memory.rows.copy_(torch.cat([result["rows"] for result in self.results]))
        self.memory.progress.zero_()
        self.generation += 1
        self.members = list(births)
        largest = max(float(result["returns"][3]) for result in self.results)
        for place, birth in enumerate(births):
            child = breed(parents[birth.parent], birth, self.spaces, self.args)
            if self.memory.shards is not None:  # they learn from the rewards of all
                child.return_stats.largest.fill_(largest)
            child.write(self.memory.births[place])

    def digest(self) -> bytes:
        """SHA-256 of the members as their generation begins, and of where the replay ends."""
        return hashlib.sha256(self.memory.births.arena.numpy().tobytes() + self.memory.rows.numpy().tobytes()).digest()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next generation follows from; between two generations only."""
        members = []
        for place, member in enumerate(self.members):
            state = self._read(self.memory.births[place])
            parts = [part.state_dict() for part in state.parts]
            members.append({**member._asdict(), "genome": state.genome.to_json(), "state": parts})
        replay = {}
        if (shards := self.memory.shards) is not None:
            used = int(self.memory.rows.max())
            used = used if used < shards.rows // 2 else shards.rows  # all frames are a view, some of them a copy
            replay = {name: rows[:, :used].clone() for name, rows in shards.fields().items() if name != "frame"}
            replay["frame"] = shards.fields()["frame"][:, :used].contiguous()
        counters = {"generation": self.generation, "sizes": self._sizes, "rows": self.memory.rows.clone()}
        # Without the lines of the generation that this state begins with: a resumed run records it again.
        counters["lineage"] = [row for row in self.lineage if row["generation"] < self.generation]
        return {**counters, "replay": replay, "members": members}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError if it is of other sizes."""
        if state["sizes"] != self._sizes:
            raise ValueError(f"(members, environments, rows of the replay for each) are {state['sizes']}")
        for name, rows in state["replay"].items():
            self.memory.shards.fields()[name][:, : rows.shape[1]] = rows
        self.generation, self.lineage = state["generation"], state["lineage"]
        self.memory.rows.copy_(state["rows"])
        for place, saved in enumerate(state["members"]):
            genome = Genome.from_json(saved["genome"]).with_genes(self.args)
            self.members[place] = Member(**{name: saved[name] for name in Member._fields} | {"genome": genome})
            check_genome(self.args, genome, saved["id"])
            member = MemberState.make(self.spaces, genome, self.args)
            for part, content in zip(member.parts, saved["state"], strict=True):
                part.load_state_dict(content)
            member.write(self.memory.births[place])

    @property
    def _sizes(self) -> list[int]:
        return [self.args.population, self.args.num_envs, getattr(self.memory.shards, "rows", 0)]

    def _read(self, record: Record) -> MemberState:
        return MemberState.read(record, self.spaces, self.args)
