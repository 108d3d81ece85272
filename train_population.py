"""Chapter 6. A population: agents that learn side by side, compete, and have mutated children.

Each member is a process with environments, a Q network and hyperparameters of its own: its genome. A generation is a
number of steps for everyone: act, learn from the replay that all members share, and in the end play the games that
decide fitness. The fittest member lives on; tournaments choose the parents of all others, and children are mutated:
learning rate, batch size, how often they learn, size of the net, weights.

    births --(genome, net, optimizer)--> member 0 --(transitions)--> replay --> every member, a generation later
                                         member 1                      |
    births <-- mutate <-- tournament <-- fitness, net, optimizer <-----'

A generation of one member is a pure function of its birth, of the replay and of a seed. So every run is deterministic,
and a member that was killed, or a whole run, starts again from the last generation as if nothing had happened.
"""

from __future__ import annotations

import a3c_mp  # noqa: F401  # isort: skip  (first: a spawned member ends with its parent even while it imports torch)

from collections.abc import Sequence
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor, nn

from a3c_mp.algorithms.apex import move_target
from a3c_mp.algorithms.dqn import bootstrap_values, q_values
from a3c_mp.cli import parse_args
from a3c_mp.maths.losses import huber
from a3c_mp.population.evolution import Member, mutate_genome, possible_parents, rank
from a3c_mp.population.generations import Generations, launch
from a3c_mp.population.member import MemberGeneration
from a3c_mp.population.settings import PRESETS, Args
from a3c_mp.replay import Batch
from a3c_mp.run.script import exit_with
from train_a3c_data import backward


def member(args: Args, generation: MemberGeneration) -> None:
    """One generation of a member, in its process."""
    for _ in range(args.rounds):
        generation.act()  # a step in each of its environments; the transitions go to the replay
        for batch in generation.batches():  # one for every `learn-every` steps
            learn(args, generation, batch)


def loss(args: Any, net: Any, target_net: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, metrics) of double Q-learning (van Hasselt et al. 2016), for a batch [N] of n-step transitions."""
    q = q_values(net, batch)
    target = batch.reward + batch.discount * bootstrap_values(net, target_net, batch)
    value_loss = huber(target - q, torch.ones_like(q))
    return value_loss, {"losses/value": value_loss, "values/q": q}


def learn(args: Args, generation: MemberGeneration, batch: Batch) -> None:
    """Take one gradient step of a member."""
    net, target_net, optimizer, _ = generation.state
    optimizer.zero_grad(set_to_none=True)
    _, metrics = backward(args, net, loss, target_net, batch)
    nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm)
    optimizer.step()
    generation.means.add(metrics)
    if generation.state.updates % args.target_period == 0:
        move_target(target_net, net, args.target_rate)


def evolve(args: Args, members: Sequence[Member], rng: Generator) -> list[Member]:
    """Return the next generation: the elite, unchanged, and mutated children of tournament winners."""
    if not args.evolve:
        return [survivor.survive("kept") for survivor in members]
    elite, *_ = rank(members, rng)
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
    return [rank([able[i] for i in row], rng)[0] for row in entrants]


def mutate(args: Args, parent: Member, child_id: int, rng: Generator) -> Member:
    """Return a child whose genome or weights are mutated in one way, with the relative probabilities `--mutate-*`."""
    kinds, weights = zip(*args.mutations.items(), strict=True)
    total = sum(weights)
    kind = kinds[rng.choice(len(kinds), p=[weight / total for weight in weights])] if total else "none"
    genome = mutate_genome(parent.genome, kind, args, rng)
    return Member(child_id, parent.id, kind, genome, int(rng.integers(2**63)), parent.fitnesses)


def train(args: Args, generations: Generations) -> None:
    """Train the population, a generation at a time, the same in every rank."""
    for population in generations:  # all members have learned and played, every rank has their results
        population.breed(evolve(args, population.evaluated, population.rng))


def main() -> int:
    return launch(lambda: parse_args(Args, PRESETS, __doc__), member, train)


if __name__ == "__main__":
    exit_with(main)
