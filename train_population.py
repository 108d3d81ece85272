"""Chapter 6. A population: agents that learn side by side, compete, and have mutated children.

Each member is a process with environments, a net and hyperparameters of its own: its genome. A generation is a number
of steps for everyone: act, learn (`--algo dqn`: from the replay that all share, `--algo ppo`: from rollouts as chapter
1 does), and play the games that decide fitness. The fittest member lives on; tournaments choose the parents of all
others, and children are mutated: hyperparameters, size of the net, weights.

    births --(genome, net, optimizer)--> member 0 --(dqn: transitions)--> replay --> every member, a generation later
    births <-- mutate <-- tournament <-- fitness, net, optimizer

A generation of one member is a pure function of its birth, of the replay and of a seed. So every run is deterministic,
and a member that was killed, or a whole run, starts again from the last generation as if nothing had happened.
"""

import a3c_mp  # noqa: F401  # isort: skip  (first: it prepares the process before torch is imported)

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor

import train_a3c_data
from a3c_mp.algorithms.apex import move_target
from a3c_mp.algorithms.dqn import bootstrap_values, q_values
from a3c_mp.maths.losses import quantile_huber
from a3c_mp.population import dqn, ppo
from a3c_mp.population.evolution import Member, fittest_first, mutate_genome, possible_parents
from a3c_mp.population.generations import Generations, launch
from a3c_mp.population.member import Algorithm
from a3c_mp.population.settings import Args
from a3c_mp.replay import Batch
from a3c_mp.run.script import exit_with


def q_member(args: Any, generation: Any) -> None:
    """One generation of a member by Q-learning, in its process."""
    for _ in range(args.rounds):
        generation.act()  # a step in each of its environments; the transitions go to the replay
        for batch in generation.batches():  # one for every `learn-every` steps
            learn(args, generation, batch)


def loss(args: Any, net: Any, target_net: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, metrics) of double Q-learning (van Hasselt et al. 2016), for a batch [N] of n-step transitions."""
    (q,) = q_values(net, batch)
    target = batch.reward[:, None] + batch.discount[:, None] * bootstrap_values(args, net, target_net, batch)
    value_loss = quantile_huber(q, target, torch.ones_like(batch.reward), args.error_width)  # one quantile: Huber's
    return value_loss, {"losses/value": value_loss, "values/q": q}


def learn(args: Any, generation: Any, batch: Batch) -> None:
    """Take one gradient step of a member, and now and then move its target net."""
    train_a3c_data.gradient_step(args, generation, loss, generation.state.target_net, batch)
    if generation.updates % args.target_period == 0:
        move_target(generation.state.target_net, generation.net, args.target_rate)


def ppo_member(args: Any, generation: Any) -> None:
    """One generation of a member by PPO, in its process: to chapter 1's loop and loss it is a learner."""
    for rollout in generation.rollouts():
        train_a3c_data.learn(args, generation, rollout)


def evolve(args: Args, members: Sequence[Member], rng: Generator) -> list[Member]:
    """Return the next generation: the elite, unchanged, and mutated children of tournament winners."""
    if not args.evolve:
        return [survivor.survive("kept") for survivor in members]
    elite, *_ = fittest_first(members, rng)
    births = [elite.survive("elite")] if args.elitism else []
    winners = tournament(args, members, len(members) - len(births), rng)
    first_id = max(each.id for each in members) + 1
    for child_id, parent in enumerate(winners, first_id):
        births.append(mutate(args, parent, child_id, rng))
    return births


def tournament(args: Args, members: Sequence[Member], num: int, rng: Generator) -> list[Member]:
    """Return the winners of `num` tournaments: the fittest of some members, drawn with replacement.

    Without ties, the r-th least fit of n wins with probability (r^size - (r - 1)^size) / n^size.
    """
    able = possible_parents(members)
    entrants = rng.integers(len(able), size=(num, args.tournament_size))
    return [fittest_first([able[i] for i in row], rng)[0] for row in entrants]


def mutate(args: Args, parent: Member, child_id: int, rng: Generator) -> Member:
    """Return a child with one kind of mutation, drawn by `--mutate-*`; weights change when it is made (`breed`)."""
    kinds, weights = zip(*args.mutations.items(), strict=True)
    total = sum(weights)
    kind = kinds[rng.choice(len(kinds), p=[weight / total for weight in weights])] if total else "none"
    genome = mutate_genome(parent.genome, kind, args, rng)
    return Member(child_id, parent.id, kind, genome, int(rng.integers(2**63)), parent.fitnesses)


def train(args: Args, generations: Generations) -> None:
    """Train the population, a generation at a time, the same in every rank."""
    for population in generations:  # all members have learned and played, every rank has their results
        population.breed(evolve(args, population.evaluated, population.rng))


ALGORITHMS = {"dqn": Algorithm(*dqn.PARTS, q_member), "ppo": Algorithm(*ppo.PARTS, ppo_member)}
"""`--algo` -> settings, presets, how a member gets its data, and what it does with it; docs/population.md adds one"""


def main(algorithms: Mapping[str, Algorithm] = ALGORITHMS) -> int:
    """Train with the algorithm that `--algo` names, or else the first; returns the exit code."""
    return launch(algorithms, train, __doc__ or "")


if __name__ == "__main__":
    exit_with(main)
