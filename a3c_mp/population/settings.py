"""Settings of chapter 6, and its presets."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from a3c_mp.algorithms.apex_settings import ReplayArgs
from a3c_mp.config import Between, Count, Fraction, NonNegative
from a3c_mp.errors import ConfigError
from a3c_mp.population.evolution import Evolution, Steps
from a3c_mp.population.genome import Genome, Range, check_start, spread
from a3c_mp.seeds import FIRST, derive_seeds

MAX_LAYERS = 32
"""that a record of a member has room for"""
Ends = tuple[float, float]
IntEnds = tuple[int, int]


@dataclass(frozen=True)
class Args(ReplayArgs):
    """Settings of a population: chapter 6. It has no other actors than its members (--population)."""

    chapter = "population"
    actors_flag = "population"
    actor_name = "member"

    env_id: str = "CartPole-v1"
    """gymnasium environment id with vector observations and discrete actions; module:Env-v0 imports the module first"""
    population: Annotated[int, Between(2, 256)] = 6
    """members: agents that learn at the same time, each in a process of its own"""
    num_envs: Annotated[int, Between(1, 4096)] = 8
    """environments for each member (B)"""
    generation_steps: Count = 4_000
    """agent steps of each member in a generation, rounded up to a multiple of num-envs"""
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
    keep_default: bool = False
    """member 0 survives without mutations, for comparison"""
    tournament_size: Count = 2
    """members in each tournament; the fittest of them is a parent"""
    elitism: bool = True
    """the fittest member survives unchanged"""
    mutate_none: NonNegative = 0.4
    """relative probability that a child is not mutated"""
    mutate_architecture: NonNegative = 0.2
    """relative probability that a child's net is mutated: a layer is added, widened or shrunk"""
    mutate_parameters: NonNegative = 0.2
    """relative probability that a tenth of a child's weights get noise"""
    mutate_activation: NonNegative = 0.0
    """relative probability that a child gets another activation function"""
    mutate_hyperparameters: NonNegative = 0.2
    """relative probability that a child's learning rate, batch size or learn-every are mutated"""
    parameter_noise: NonNegative = 0.1
    """standard deviation of the noise of mutate-parameters, relative to each weight"""
    grow_factor: Ends = (1.1, 2.5)
    """a mutated hyperparameter or layer is multiplied by a log-uniform factor between these, in half of all cases"""
    shrink_factor: Ends = (1.1, 2.5)
    """in the other half it is divided by a log-uniform factor between these"""
    resample: Fraction = 0.25
    """probability that a mutated hyperparameter is drawn from its whole range instead"""
    touch: Fraction = 0.5
    """probability that mutate-hyperparameters changes each of them; it changes at least one"""
    new_layer: Fraction = 0.2
    """probability that mutate-architecture adds a layer instead of resizing one"""
    learning_rate: NonNegative = 1e-3
    """first learning rate (Adam)"""
    learning_rate_range: Ends = (1e-5, 1e-1)
    """learning rates that evolution can reach"""
    batch_size: Count = 64
    """first batch size: transitions in one gradient"""
    batch_size_range: IntEnds = (8, 256)
    """batch sizes that evolution can reach"""
    learn_every: Count = 4
    """first learn-every: agent steps for each update"""
    learn_every_range: IntEnds = (1, 120)
    """values of learn-every that evolution can reach"""
    hidden: tuple[int, ...] = (64, 64)
    """first architecture: units of each hidden layer"""
    units_range: IntEnds = (16, 256)
    """units of a layer that evolution can reach"""
    layers_range: IntEnds = (1, 3)
    """hidden layers that evolution can reach"""
    activation: Literal["relu", "elu", "gelu", "tanh"] = "relu"
    """first activation function"""
    replay_size: Count = 100_000
    """transitions of earlier generations, of all members, that each member can sample"""
    learning_starts: Count = 1_000
    """transitions in the replay buffer before a member's first update; its actions are random until then"""
    adam_eps: Annotated[float, Between(1e-12)] = 1e-5
    """Adam epsilon"""
    target_period: Count = 100
    """target network update interval (updates)"""
    cuda: bool = False
    """refused: members train on the CPU, where small nets are faster"""
    deterministic: bool = True
    """always on in this chapter: runs with the same seed are bit-identical"""
    # Flags of other chapters that this one does not have: class variables are no fields.
    num_actors: ClassVar = property(attrgetter("population"))  # type: ignore[misc]
    eval_every: ClassVar = 0  # type: ignore[misc]
    stop_eval_return: ClassVar = None  # type: ignore[misc]

    @property
    def rounds(self) -> int:
        """Steps of a member's vector environment in a generation (T)."""
        return -(-self.generation_steps // self.num_envs)

    @property
    def training_goal(self) -> None:
        return None  # games of exploring members do not show that the fittest one has solved the task

    @property
    def evaluates(self) -> bool:
        return True  # each generation

    @property
    def genome(self) -> Genome:
        """Genome of member 0."""
        return Genome(self.learning_rate, self.batch_size, self.learn_every, tuple(self.hidden), self.activation)

    @property
    def ranges(self) -> dict[str, Range]:
        return {
            "learning_rate": Range(*self.learning_rate_range),
            "batch_size": Range(*self.batch_size_range, integer=True),
            "learn_every": Range(*self.learn_every_range, integer=True),
            "units": Range(*self.units_range, integer=True),
            "layers": Range(*self.layers_range, log=False, integer=True),
        }

    @property
    def evolution_settings(self) -> Evolution:
        kinds = ("none", "architecture", "parameters", "activation", "hyperparameters")
        return Evolution(
            self.tournament_size,
            self.elitism,
            {kind: getattr(self, f"mutate_{kind}") for kind in kinds},
            self.ranges,
            Steps(self.grow_factor, self.shrink_factor, self.resample, self.touch, self.new_layer),
        )


def check_settings(args: Args) -> None:
    """Raise ConfigError for settings that do not fit each other, or that this chapter does not have."""
    if args.tournament_size > args.population:
        why = f"there are {args.population} members"
        raise ConfigError("tournament-size", args.tournament_size, why, "lower it, or raise --population")
    if not args.deterministic:
        raise ConfigError("deterministic", False, "a population is always deterministic", "leave it out")
    if args.learner_threads > 1:
        why = "each member is a process with one thread"
        raise ConfigError("learner-threads", args.learner_threads, why, "leave it out, or raise --population")
    if args.cuda:
        raise ConfigError("cuda", True, "members train on the CPU, where small nets are faster", "leave it out")
    if args.layers_range[1] > MAX_LAYERS:
        raise ConfigError("layers-range", args.layers_range, f"more than {MAX_LAYERS} layers", "lower it")
    if args.learning_starts > args.replay_size // 2:
        why = f"the replay has room for {args.replay_size}"
        raise ConfigError("learning-starts", args.learning_starts, why, "use half of it at most")
    if args.learning_rate == 0 or not args.hidden or min(args.hidden) < 1:
        name = "hidden" if args.learning_rate else "learning-rate"
        raise ConfigError(name, getattr(args, name.replace("-", "_")), "must be more than 0")
    check_start(args.genome, args.ranges)
    _ = args.evolution_settings  # checks the rest


def first_genomes(args: Args) -> list[Genome]:
    """Genomes of the first generation, by place."""
    if args.init == "same":
        return [args.genome] * args.population
    return spread(args.genome, args.ranges, args.population, np.random.default_rng(derive_seeds(args.seed, FIRST)[1]))


PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"stop_return": 475.0, "total_steps": 400_000, "reward_scale": 0.05},
    "Acrobot-v1": {"stop_return": -90.0, "total_steps": 600_000, "reward_scale": 0.1},
    "LunarLander-v3": {
        "stop_return": 200.0,
        "total_steps": 1_000_000,
        "reward_scale": 0.05,
        "generation_steps": 8_000,
        "eval_episodes": 10,  # of up to 1,000 steps
        "hidden": (128, 128),
        "batch_size": 128,
    },
}
