"""AgileRL's DQN with evolution on LunarLander, for comparison with chapter 6: prints one line of JSON.

    pip install -r bench/peers/agilerl.txt      # in a virtual environment of its own
    python bench/agilerl_dqn.py --seed 1 --total-steps 600000 --max-seconds 900

AgileRL trains, evaluates, selects and mutates by its own `train_off_policy`. After each of its evaluations the fittest
member plays 100 new games, whose steps and seconds are not counted. It imports nothing of a3c_mp.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
import tyro
from accelerate import Accelerator
from agilerl.algorithms import DQN
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.components.replay_buffer import ReplayBuffer
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.train_off_policy import train_off_policy
from agilerl.utils.utils import make_vect_envs

POPULATION = 4
EVO_STEPS = 10_000
"""agent steps of each member between two evaluations, in both settings"""


@dataclass(frozen=True)
class Args:
    settings: Literal["own", "seed"] = "own"
    """AgileRL's own DQN configuration for LunarLander, or the repaired script of its page on distributed training"""
    env_id: str = "LunarLander-v3"
    """gymnasium id"""
    seed: int = 1
    """of weights, environments, sampling and evolution"""
    total_steps: int = 600_000
    """stop after this many agent steps, over all members"""
    max_seconds: float = 900
    """time limit (s), without the games of the report"""
    stop_return: float = 200
    """stop when the fittest member's mean return over the report's games reaches this"""
    report_games: int = 100
    """new games that the fittest member plays after each evaluation"""
    mutate_elite: bool = True
    """AgileRL's default: the fittest member is mutated like all others"""
    sync_envs: bool = False
    """environments one after the other in this process; AgileRL's default is a process each"""
    threads: int = 1
    """CPU threads of torch"""
    accelerate: bool = False
    """pass an Accelerator to AgileRL; in two processes its first selection fails (2.58.0, KeyError: 'actor')"""


class Settings(NamedTuple):
    """What the two configurations differ in."""

    num_envs: int
    dqn: dict[str, Any]
    ranges: dict[str, dict[str, Any]]
    memory_size: int
    learning_delay: int
    eps_decay: float
    activation: float


OWN = Settings(  # configs/training/dqn/dqn.yaml of AgileRL, commit 141b049f
    num_envs=16,
    dqn={
        "double": False,
        "batch_size": 128,
        "lr": 6.3e-4,
        "learn_step": 4,
        "net_config": {
            "latent_dim": 128,
            "encoder_config": {"hidden_size": [256]},
            "head_config": {"hidden_size": [256]},
        },
    },
    ranges={
        "lr": {"min": 6.25e-5, "max": 1e-2},
        "batch_size": {"min": 8, "max": 512, "dtype": int},
        "learn_step": {"min": 1, "max": 10, "dtype": int},
    },
    memory_size=50_000,
    learning_delay=0,
    eps_decay=0.99,
    activation=0.2,
)
SEED = Settings(
    num_envs=8,
    dqn={
        "double": True,
        "batch_size": 64,  # the page has 128, outside the range of its own
        "lr": 1e-3,
        "learn_step": 1,
        "net_config": {"head_config": {"hidden_size": [32, 32]}},
    },
    ranges={  # the page never passes them on
        "lr": {"min": 1e-4, "max": 1e-2},
        "batch_size": {"min": 8, "max": 64, "dtype": int},
        "learn_step": {"min": 1, "max": 120, "dtype": int, "grow_factor": 1.5, "shrink_factor": 0.75},
    },
    memory_size=10_000,
    learning_delay=1_000,
    eps_decay=0.995,
    activation=0.0,
)
SETTINGS = {"own": OWN, "seed": SEED}


class Finished(Exception):
    """Ends AgileRL's training loop: the goal or the time limit is reached."""


class Meter(gymnasium.vector.VectorWrapper):
    """Environments that count their steps, seed their first games and end the run at its time limit."""

    def __init__(self, envs: gymnasium.vector.VectorEnv, args: Args):
        super().__init__(envs)
        self.seed: int | None = args.seed
        self.max_seconds, self.steps, self.paused = args.max_seconds, 0, 0.0
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time since the start, without pauses."""
        return time.perf_counter() - self.started - self.paused

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        seed, self.seed = self.seed if seed is None else seed, None
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        if self.seconds > self.max_seconds:
            raise Finished
        self.steps += self.num_envs
        return super().step(actions)


class Reporter(TournamentSelection):
    """AgileRL's tournament; before each, the fittest member plays new games for the report."""

    def __init__(self, args: Args, envs: Meter):
        super().__init__(tournament_size=2, elitism=True, population_size=POPULATION)
        self.args, self.envs = args, envs
        self.points: list[dict[str, Any]] = []

    def report(self, population: list[DQN]) -> None:
        """Record an evaluation. Raises Finished where the mean return reaches the goal."""
        generation, began = len(self.points) + 1, time.perf_counter()
        steps = generation * POPULATION * (EVO_STEPS // self.envs.num_envs) * self.envs.num_envs
        fittest = max(population, key=lambda agent: agent.fitness[-1])
        point = {
            "steps": steps,
            "eval_steps": self.envs.steps - steps,
            "seconds": round(self.envs.seconds, 1),
            "fitness": [round(float(agent.fitness[-1]), 1) for agent in population],
            "learning_rate": fittest.lr,
            "mean_return": round(play(fittest, self.args, generation), 1),
        }
        self.points.append(point)
        self.envs.paused += time.perf_counter() - began
        if point["mean_return"] >= self.args.stop_return:
            raise Finished

    def select(self, population: list[DQN]) -> Any:
        self.report(population)
        return super().select(population)


def play(agent: DQN, args: Args, generation: int) -> float:
    """Mean return of an agent's greedy games, whose seeds differ in each generation."""
    envs = [gymnasium.make(args.env_id) for _ in range(args.report_games)]
    seeds = np.random.SeedSequence([args.seed, generation]).generate_state(len(envs)).tolist()
    obs = {i: env.reset(seed=seed)[0] for i, (env, seed) in enumerate(zip(envs, seeds, strict=True))}
    total = 0.0
    agent.set_training_mode(False)
    with torch.random.fork_rng():
        while obs:
            actions = agent.get_action(np.stack(list(obs.values())), epsilon=0.0)
            for i, action in zip(list(obs), actions, strict=True):
                obs[i], reward, terminated, truncated, _ = envs[i].step(action)
                total += float(reward)
                if terminated or truncated:
                    del obs[i]
    agent.set_training_mode(True)
    for env in envs:
        env.close()
    return total / len(envs)


def train(args: Args, envs: Meter, reporter: Reporter, accelerator: Accelerator | None) -> None:
    """Train until the goal, the time limit or the budget of steps. Raises Finished for the first two."""
    settings = SETTINGS[args.settings]
    spaces = envs.single_observation_space, envs.single_action_space
    members = []
    for index in range(POPULATION):
        ranges = {name: RLParameter(**ends) for name, ends in settings.ranges.items()}  # none shared among members
        config = HyperparameterConfig(**ranges)
        members.append(DQN(*spaces, index, config, gamma=0.99, tau=1e-3, accelerator=accelerator, **settings.dqn))
    mutations = Mutations(
        no_mutation=0.4,
        architecture=0.2,
        new_layer_prob=0.2,
        parameters=0.2,
        activation=settings.activation,
        rl_hp=0.2,
        mutation_sd=0.1,
        mutate_elite=args.mutate_elite,
        rand_seed=args.seed,
        accelerator=accelerator,
    )
    train_off_policy(
        envs,
        args.env_id,
        "DQN",
        members,
        ReplayBuffer(settings.memory_size),
        max_steps=args.total_steps // POPULATION,
        evo_steps=EVO_STEPS,
        learning_delay=settings.learning_delay,
        eps_start=1.0,
        eps_end=0.1,
        eps_decay=settings.eps_decay,
        selection_strategy=reporter,
        mutation=mutations,
        verbose=False,
        accelerator=accelerator,
    )


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002  AgileRL's tournaments draw from the global generator
    random.seed(args.seed)
    accelerator = Accelerator(cpu=True) if args.accelerate else None
    vector = make_vect_envs(args.env_id, SETTINGS[args.settings].num_envs, should_async_vector=not args.sync_envs)
    envs = Meter(vector, args)
    reporter = Reporter(args, envs)
    try:
        train(args, envs, reporter, accelerator)
    except Finished:
        envs.close()
    solved = next((point for point in reporter.points if point["mean_return"] >= args.stop_return), None)
    result = {
        "args": asdict(args),
        "seconds": round(envs.seconds, 1),
        "env_steps": envs.steps,
        "steps_to_goal": solved and solved["steps"],
        "eval_steps_to_goal": solved and solved["eval_steps"],
        "seconds_to_goal": solved and solved["seconds"],
        "evaluations": reporter.points,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
