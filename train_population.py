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

import torch
from torch import Tensor

from a3c_mp.algorithms import dqn
from a3c_mp.algorithms.apex import move_target
from a3c_mp.cli import parse_args
from a3c_mp.maths import losses
from a3c_mp.population import ranks
from a3c_mp.population.evolution import Birth, next_generation, survive_all
from a3c_mp.population.growth import MemberState
from a3c_mp.population.member import MemberGeneration, MemberSampler
from a3c_mp.population.members import Members
from a3c_mp.population.memory import PopulationMemory
from a3c_mp.population.population import Population
from a3c_mp.population.records import find_spaces, read_member
from a3c_mp.population.report import Report
from a3c_mp.population.settings import PRESETS, Args, check_settings
from a3c_mp.processes.learner_group import LearnerGroup
from a3c_mp.processes.workers import WorkerChannel
from a3c_mp.replay import Batch
from a3c_mp.run.preflight import set_up_torch
from a3c_mp.run.progress import RunState
from a3c_mp.run.run import Run
from a3c_mp.run.script import exit_with


def member(channel: WorkerChannel, args: Args, memory: PopulationMemory) -> None:
    """Member process: one generation for each token, starting from the record of its place."""
    place = channel.actor
    for slot, generation in channel.tokens():
        genome, state = read_member(memory.births[place], memory.spaces, args.adam_eps)
        with MemberGeneration(args, memory, place, generation, channel) as member_run:
            for _ in range(args.rounds):
                member_run.act(state.net)
                for batch in member_run.sampler.batches(genome):
                    learn(args, member_run.sampler, state, batch)
            member_run.end(genome, state)
        channel.send(slot, None)


def loss(args: Args, state: MemberState, batch: Batch) -> tuple[Tensor, losses.Metrics]:
    """Compute (loss, metrics) of one-step double Q-learning (van Hasselt et al. 2016), for a batch [N]."""
    q = dqn.q_values(state.net, batch)
    bootstrap = dqn.bootstrap_values(state.net, state.target_net, batch)
    target = batch.reward + args.gamma * batch.discount * bootstrap
    value_loss = losses.huber(target - q, torch.ones_like(q))
    return value_loss, {"losses/value": value_loss, "values/q": q}


def learn(args: Args, sampler: MemberSampler, state: MemberState, batch: Batch) -> None:
    """Take one gradient step of a member."""
    net, target_net, optimizer = state
    if args.normalize_obs:
        sampler.update_norm(net.norm, batch.obs)
    total, metrics = loss(args, state, batch)
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm)
    optimizer.step()
    sampler.means.add(metrics)
    if state.updates % args.target_period == 0:
        move_target(target_net, net, args.target_rate)


def evolve(args: Args, population: Population) -> list[Birth]:
    """Choose the members of the next generation: the elite, and mutated children of tournament winners."""
    members = population.candidates
    kept = [0] if args.keep_default else []  # member 0 has the settings as given
    if not args.evolve:
        return survive_all(members)
    return next_generation(members, args.evolution_settings, population.rng, kept)


def train(args: Args, run: RunState, population: Population, group: LearnerGroup, report: Report | None) -> None:
    """Train the population, a generation at a time, in every rank alike; rank 0 reports."""
    group.broadcast_state(population)
    on_wait = report.show_progress if report is not None else lambda: None
    with Members(member, run, population, group, on_wait) as members:
        while members.run_generation():
            births = evolve(args, population)
            if report is not None and not report.record():
                break
            population.apply(births)
            run.end_round()


def main() -> int:
    with ranks.refused_once():
        args = parse_args(Args, PRESETS, __doc__)
        check_settings(args)
        spaces = find_spaces(args.env_id)
        group = ranks.join(args)
        population = Population(args, spaces)
    set_up_torch(args, group.rank)
    if group.rank > 0:
        return ranks.follow(train, args, population, group)
    with Run(args, args.chapter, population.elite, None, {"population": population}) as run:
        train(args, run, population, group, Report(run, population, group))
    return run.exit_code


if __name__ == "__main__":
    exit_with(main)
