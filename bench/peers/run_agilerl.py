"""AgileRL's DQN with evolution of four members on LunarLander-v3: prints points of its curve, see points.py.

Settings are those of its configs/training/dqn/dqn.yaml (commit 141b049f). Steps are those of training, of all members;
its evaluations take time, and their steps do not count. After each the fittest member plays 100 new games greedily,
whose mean return is that of the points, and whose time does not count.
"""

import random
import time

import gymnasium
import numpy as np
import torch
from agilerl.algorithms import DQN
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.components.replay_buffer import ReplayBuffer
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.tournament import TournamentSelection
from agilerl.training.train_off_policy import train_off_policy
from agilerl.utils.utils import make_vect_envs
from points import STEPS, WINDOW, Points, parser

MEMBERS = 4
NET = {"latent_dim": 128, "encoder_config": {"hidden_size": [256]}, "head_config": {"hidden_size": [256]}}
DQN_SETTINGS = {"double": False, "batch_size": 128, "lr": 6.3e-4, "learn_step": 4, "gamma": 0.99, "tau": 1e-3}
MUTATIONS = {"no_mutation": 0.4, "architecture": 0.2, "new_layer_prob": 0.2, "parameters": 0.2, "activation": 0.2}
SCHEDULE = {"learning_delay": 0, "evo_steps": 10_000, "eps_start": 1.0, "eps_end": 0.1, "eps_decay": 0.99}


class Counted(gymnasium.vector.VectorWrapper):
    """Environments that print points and end the run when it is over; their first reset is seeded."""

    def __init__(self, args):
        super().__init__(make_vect_envs(args.env_id, 16))
        self.points, self.seed, self.steps, self.counts, self.returns = Points(args), args.seed, 0, True, []

    def reset(self, *, seed=None, options=None):
        seed, self.seed = self.seed, None
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        self.steps += self.num_envs * self.counts
        if not self.points.add(self.steps, self.returns):
            raise SystemExit
        return super().step(actions)


class Member(DQN):
    def test(self, env, **limits):
        env.counts = False
        fitness, env.counts = super().test(env, **limits), True
        return fitness


class Tournament(TournamentSelection):
    """AgileRL's; before each, the fittest member plays new games."""

    def __init__(self, envs, games):
        super().__init__(tournament_size=2, elitism=True, population_size=MEMBERS)
        self.envs, self.games = envs, games

    def select(self, population):
        began, fittest = time.perf_counter(), max(population, key=lambda member: member.fitness[-1])
        fitness = fittest.fitness
        self.envs.returns = [DQN.test(fittest, self.games)] * WINDOW  # a game of each environment
        fittest.fitness = fitness
        self.envs.points.started += time.perf_counter() - began
        return super().select(population)


def make_ranges():
    """The hyperparameters that mutate; without them as `hp_config` none would."""
    found = {"lr": (6.25e-5, 1e-2, float), "batch_size": (8, 512, int), "learn_step": (1, 10, int)}
    return HyperparameterConfig(**{name: RLParameter(min=a, max=b, dtype=kind) for name, (a, b, kind) in found.items()})


def main():
    args = parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(args.seed)
    envs, games = Counted(args), gymnasium.make_vec(args.env_id, WINDOW, vectorization_mode="sync")
    games.reset(seed=10_000 * args.seed)
    mutations = Mutations(**MUTATIONS, rl_hp=0.2, mutation_sd=0.1, rand_seed=args.seed)
    spaces = envs.single_observation_space, envs.single_action_space
    members = [Member(*spaces, index, make_ranges(), NET, **DQN_SETTINGS) for index in range(MEMBERS)]
    own = {"max_steps": STEPS, "selection_strategy": Tournament(envs, games), "mutation": mutations, "verbose": False}
    train_off_policy(envs, args.env_id, "DQN", members, ReplayBuffer(50_000), **SCHEDULE, **own)


if __name__ == "__main__":
    main()
