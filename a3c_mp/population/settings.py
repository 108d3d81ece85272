"""Settings of chapter 6 that all of its algorithms have; each one adds its own, see `dqn` and `ppo`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from a3c_mp.config import Between, CommonArgs, Count, Fraction, NonNegative, check_ranges, flag_name
from a3c_mp.errors import ConfigError
from a3c_mp.population.genes import Gene, read_genes

ARCHITECTURE = ("hidden", "activation", "convolutions")  # of the first members
MUTATIONS = ("none", "architecture", "parameters", "activation", "hyperparameters")  # `--mutate-KIND`: its share
Activation = Literal["relu", "elu", "gelu", "tanh"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
NEW_KERNEL = 3  # of a convolution that evolution adds


class Convolution(NamedTuple):
    """Convolution of a net on images, followed by a ReLU."""

    channels: int
    kernel: int
    stride: int
    padding: int = 0


@dataclass(frozen=True)
class Args(CommonArgs):
    """Settings of a population: chapter 6. It has no other actors than its members (--population)."""

    chapter = "population"
    actors_flag = "population"
    actor_name = "member"
    fixed = (*CommonArgs.fixed, "algo", "population", "num_envs", "generation_steps", "init", *ARCHITECTURE)
    actors_learn = True
    family: ClassVar[Literal["q", "actor_critic"]] = "q"  # nets: action values, with a target net; or policy and value
    gene_table: ClassVar[dict[str, Gene]] = {}  # settings that can be genes

    env_id: str = "CartPole-v1"
    """gymnasium environment id; module:Env-v0 imports the module first"""
    algo: Literal["dqn", "ppo"] = "dqn"
    """dqn: Q-learning from the replay of all members, for discrete actions; ppo: chapter 1's, each from its rollouts"""
    population: Annotated[int, Between(2, 256)] = 6
    """members: agents that learn at the same time, each in a process of its own"""
    num_envs: Annotated[int, Between(1, 4096)] = 8
    """environments for each member (B)"""
    generation_steps: Count = 4_000
    """agent steps of each member in a generation, rounded up to a multiple of num-envs; ppo: to whole rollouts"""
    total_steps: Count = 1_000_000
    """total timesteps: stop after this many agent steps, over all members; evaluation games are not counted"""
    stop_return: float | None = None
    """early stopping: solved when the fittest member's mean return in confirm-episodes new games reaches this"""
    eval_episodes: Annotated[int, Between(1, 10_000)] = 20
    """games of each member at the end of a generation: their mean return is its fitness; the same starts for all"""
    eval_max_steps: Count = 10_000
    """longest evaluation game (agent steps): it is cut there, with the return so far, as some games never end"""
    confirm_episodes: Annotated[int, Between(1, 10_000)] = 100
    """further games of the fittest member once its fitness reaches stop-return: the best of many may have been lucky"""
    init: Literal["spread", "same"] = "spread"
    """hyperparameters of the first generation: member 0 as given and the others drawn in their ranges, or all alike"""
    evolve: bool = True
    """let the fittest have children; --no-evolve: all live on with their own hyperparameters (random search)"""
    tournament_size: Count = 2
    """members in each tournament; the fittest of them is a parent"""
    elitism: bool = True
    """the fittest member survives unchanged"""
    mutate_none: NonNegative = 0.4
    """relative probability that a child is not mutated"""
    mutate_architecture: NonNegative = 0.2
    """relative probability that a child's net is mutated: a layer is added, removed, widened or shrunk"""
    mutate_parameters: NonNegative = 0.2
    """relative probability that a tenth of a child's weights get noise"""
    mutate_activation: NonNegative = 0.0
    """relative probability that a child gets another activation function"""
    mutate_hyperparameters: NonNegative = 0.2
    """relative probability that some of a child's --genes are mutated"""
    parameter_noise: NonNegative = 0.1
    """standard deviation of the noise of mutate-parameters, relative to each weight"""
    grow_factor: tuple[float, float] = (1.1, 2.5)
    """a mutated hyperparameter or layer is multiplied by a log-uniform factor between these, in half of all cases"""
    shrink_factor: tuple[float, float] = (1.1, 2.5)
    """in the other half it is divided by a log-uniform factor between these"""
    resample: Fraction = 0.25
    """probability that a mutated hyperparameter is drawn from its whole range instead"""
    new_layer: Fraction = 0.2
    """probability that mutate-architecture adds a layer instead of resizing one"""
    remove_layer: Fraction = 0.1
    """probability that it removes one"""
    genes: tuple[str, ...] = ()
    """hyperparameters that mutate, NAME, or with range and step (a factor) NAME=LOW:HIGH or NAME=LOW:HIGH:STEP"""
    learning_rate: NonNegative = 1e-3
    """first learning rate (Adam)"""
    batch_size: Count = 64
    """first batch size: transitions or samples in one gradient"""
    hidden: tuple[int, ...] = (64, 64)
    """first architecture: units of each hidden layer; on images, behind the convolutions"""
    units_range: tuple[int, int] = (16, 256)
    """units of a layer that evolution can reach"""
    layers_range: tuple[int, int] = (1, 3)
    """hidden layers that evolution can reach"""
    convolutions: tuple[int, ...] = ()
    """images: first architecture: channels, kernel size and stride of each convolution, in turn"""
    channels_range: tuple[int, int] = (8, 64)
    """channels of a convolution that evolution can reach"""
    kernels_range: tuple[int, int] = (1, 10)
    """kernel sizes that a convolution can grow or shrink to; a new one has 3"""
    convolutions_range: tuple[int, int] = (1, 5)
    """convolutions that evolution can reach"""
    activation: Activation = "relu"
    """first activation function"""
    adam_eps: Annotated[float, Between(1e-12)] = 1e-5
    """Adam epsilon"""
    deterministic: bool = True
    """always on in this chapter: runs with the same seed are bit-identical"""
    # Flags of other chapters that this one does not have: class variables are no fields.
    act_on: ClassVar = "cuda"  # type: ignore[misc]  # a member acts where it learns
    cuda_graph: ClassVar = True  # type: ignore[misc]
    learner_threads: ClassVar = 1  # type: ignore[misc]  # each member is a process
    num_actors: ClassVar = property(lambda args: args.population)  # type: ignore[misc]
    eval_every: ClassVar = 0  # type: ignore[misc]
    stop_eval_return: ClassVar = None  # type: ignore[misc]
    has_fitness = True  # exploring members do not show what the best can

    def check(self) -> None:
        """Raise ConfigError for settings of an algorithm that do not fit each other."""

    @property
    def mutations(self) -> dict[str, float]:
        """Kinds of mutation with their relative probabilities."""
        return {kind: getattr(self, f"mutate_{kind}") for kind in MUTATIONS}

    @property
    def evolving(self) -> dict[str, Gene]:
        """Genes of `--genes`, in its order. Raises ConfigError."""
        return read_genes(self.genes, self.gene_table)

    @property
    def first_convolutions(self) -> tuple[Convolution, ...]:
        """Those of `--convolutions`."""
        return tuple(Convolution(*self.convolutions[i : i + 3]) for i in range(0, len(self.convolutions), 3))

    @property
    def local_actors(self) -> int:
        """The most members that this machine has where there are others, by variables of torchrun and accelerate."""
        if not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
            return self.population
        ranks, here = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return min(self.population, -(-self.population // ranks) * here)

    @property
    def rounds(self) -> int:
        """Steps of a member's vector environment in a generation (T)."""
        return -(-self.generation_steps // self.num_envs)


def check_genome(args: Args, genome: Any, member: int) -> None:
    """Raise ConfigError if a member has grown beyond the ranges of architectures: records have no room for it."""
    layers = genome.convolutions
    sizes = {"layers_range": [len(genome.hidden)], "units_range": genome.hidden, "convolutions_range": [len(layers)]}
    sizes |= {"channels_range": [c.channels for c in layers], "kernels_range": [c.kernel for c in layers]}
    for name, found in sizes.items():
        most = getattr(args, name)[1]
        if found and max(found) > max(most, NEW_KERNEL if name == "kernels_range" else 0):
            why = f"member {member} has {max(found)}, as it grew before"
            raise ConfigError(flag_name(name), most, why, "widen the range")


def check_settings(args: Args, image: bool) -> None:
    """Raise ConfigError for settings that do not fit each other, or that this chapter does not have."""
    if args.tournament_size > args.population:
        why, fix = f"there are {args.population} members", "lower it, or raise --population"
        raise ConfigError("tournament-size", args.tournament_size, why, fix)
    if not args.deterministic:
        raise ConfigError("deterministic", False, "a population is always deterministic", "leave it out")
    args.check()
    if image != bool(args.convolutions) or len(args.convolutions) % 3 or min(args.convolutions, default=1) < 1:
        why = "each one has three numbers of 1 or more" if image else "observations are vectors"
        fix = "for instance --convolutions 16 8 4 32 4 2" if image else "leave it out"
        raise ConfigError("convolutions", " ".join(map(str, args.convolutions)), why, fix)
    channels, kernels, _, _ = zip(*args.first_convolutions, strict=True) if image else [()] * 4
    ranges: dict[str, Sequence[float]] = {"units_range": args.hidden, "layers_range": [len(args.hidden)]}
    ranges |= {"channels_range": channels, "kernels_range": kernels, "convolutions_range": [len(kernels)] * image}
    rows = [(flag_name(name), getattr(args, name), values, 1.0) for name, values in ranges.items()]
    rows += [(flag_name(name), getattr(args, name), (), 1.01) for name in ("grow_factor", "shrink_factor")]
    rows += [(f"genes={name}", gene[:2], [getattr(args, name)], 1e-12) for name, gene in args.evolving.items()]
    for flag, (low, high), values, least in rows:
        if not least <= low <= high < math.inf:
            why = f"both ends must be finite and {least:g} or more, the lower one first"
            raise ConfigError(flag, f"{low:g} to {high:g}", why)
        outside = [value for value in values if value is None or not low <= value <= high]
        is_gone = args.resume is not None and flag.startswith("genes=")  # its members are elsewhere, or will be
        if outside and (None in outside or not is_gone):
            why, fix = f"the first member has {outside[0]}", "widen the range, or start inside it"
            raise ConfigError(flag, f"{low:g} to {high:g}", why, fix)
    shared = {*args.fixed, "unroll_length", "eval_episodes", "replay_size"}  # sizes of memory
    for name, gene in args.evolving.items():
        if name in shared:
            raise ConfigError("genes", name, "it is the same for all members", "leave it out")
        for end in gene[:2]:  # the setting's own limits
            check_ranges(replace(args, **{name: int(end) if gene.integer else end}))  # type: ignore[arg-type]
