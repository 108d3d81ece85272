"""A population: what a member does in a generation, and what is kept of it; whole runs are in test_population_runs."""

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

import train_population
from a3c_mp.errors import ConfigError
from a3c_mp.population import member as member_module
from a3c_mp.population.dqn import Args, Generation
from a3c_mp.population.evolution import Genome, first_members
from a3c_mp.population.genes import Gene
from a3c_mp.population.growth import MemberState, layers_by_depth
from a3c_mp.population.population import EliteNet, Population, PopulationMemory, saved_net
from a3c_mp.population.report import Report
from a3c_mp.population.settings import check_settings
from a3c_mp.processes.pool import Token
from a3c_mp.run.preflight import probe_env

SPACES = probe_env("CartPole-v1")
FAST = Args(
    population=2, num_envs=4, generation_steps=200, learning_starts=100, eval_episodes=4, learn_every=120,
    units_range=(16, 64), init="same",
)  # fmt: skip
START = first_members(FAST)[0].genome


def live(population, place, beat=lambda: None):
    """Run the current generation of a place in this process."""
    tokens, nothing = [Token(place, population.generation)], lambda *args: None
    channel = SimpleNamespace(actor=place, tokens=lambda: tokens, beat=beat, starting=nothing, send=nothing)
    member_module.run_member(channel, train_population.ALGORITHMS["dqn"], population.args, population.memory)


def generations_later(num, genomes=(START, START), spaces=SPACES, **changes):
    """A population after some generations; in the current one, its places have these genomes."""
    population = Population(dataclasses.replace(FAST, **changes), spaces, Generation)
    for generation in range(num):
        for place in range(2):
            live(population, place)
        parents = enumerate(population.evaluated)
        children = [parent.survive("none")._replace(genome=genomes[place]) for place, parent in parents]
        population.breed([child._replace(id=2 * generation + 2 + i) for i, child in enumerate(children)])
    return population


@pytest.fixture
def updates(monkeypatch):
    """All calls of `learn`, in a list."""
    updates, learn = [], train_population.learn

    def noted(args, generation, batch):
        numbers = {"number": generation.counts["updates"] + 1, "learning_steps": generation.learning_steps}
        updates.append(SimpleNamespace(state=generation.state, batch=batch, **numbers))
        learn(args, generation, batch)

    monkeypatch.setattr(train_population, "learn", noted)
    return updates


# ---- genes


def with_genes(**genes):
    return dataclasses.replace(START, hyperparameters=START.hyperparameters | genes)


@pytest.mark.parametrize("name", Args.gene_table)
def test_a_gene_is_a_setting_that_only_its_member_has(updates, monkeypatch, name):
    """Whatever reads the setting in a member's process reads the member's own value."""
    start, value = getattr(FAST, name), {"gamma": 0.5}.get(name, Args.gene_table[name].low)
    seen, learn = [], train_population.learn
    monkeypatch.setattr(
        train_population, "learn", lambda args, *rest: (seen.append(getattr(args, name)), learn(args, *rest))
    )
    own = dataclasses.replace(START, hyperparameters={name: value})
    population = generations_later(1, (START, own), genes=(name,), **{"learn_every": 40} | {name: start})
    for place, expected in enumerate((start, value)):
        seen.clear()
        live(population, place)
        assert set(seen) == {expected}


@dataclasses.dataclass(frozen=True)
class OwnArgs(Args):
    """Settings of which others are genes."""

    gene_table: ClassVar = {**Args.gene_table, "reward_scale": Gene(0.001, 1.0), "eval_episodes": Gene(2, 99)}


def test_the_scale_of_rewards_can_be_a_gene_and_a_size_of_memory_cannot(monkeypatch):
    seen = []
    monkeypatch.setattr(train_population, "learn", lambda args, generation, batch: seen.append(generation.reward_scale))
    settings = {name: getattr(FAST, name) for name in ("population", "num_envs", "generation_steps", "learning_starts")}
    args = OwnArgs(**settings, genes=("reward_scale",))
    population = Population(args, SPACES, Generation)
    genome = dataclasses.replace(population.members[1].genome, hyperparameters={"reward_scale": 0.25})
    MemberState.make(SPACES, genome, args).write(population.memory.births[1])
    monkeypatch.setattr(Generation, "batches", lambda generation: [None])
    live(population, 1)
    assert set(seen) == {0.25}
    for bad, message in ({"reward_scale": None}, "has None"), ({"genes": ("eval_episodes",)}, "same for all members"):
        with pytest.raises(ConfigError, match=message):
            check_settings(dataclasses.replace(args, **bad), image=False)


def test_members_scale_rewards_by_the_largest_one_that_any_has_seen():
    population = generations_later(1, reward_scale=None)
    population.results[1]["returns"][:] = torch.tensor([0.0, 0.0, 0.0, 1e-6])
    population.results[0]["returns"][:] = torch.tensor([0.0, 0.0, 0.0, 0.0])
    for place in range(2):
        population.results[place]["rows"][:] = population.memory.rows[:4]
    population.breed([member.survive("none") for member in population.members])
    for place in range(2):
        state = MemberState.read(population.memory.births[place], SPACES, population.args)
        assert state.return_stats.scale() == pytest.approx(1e6)


def test_a_resumed_run_may_have_a_gene_whose_range_is_without_its_first_setting(tmp_path):
    args = dataclasses.replace(FAST, genes=("learning_rate=1e-5:1e-4",))
    check_settings(dataclasses.replace(args, resume=tmp_path), image=False)
    for other in {}, {"resume": tmp_path, "units_range": (16, 32)}:
        with pytest.raises(ConfigError, match=r"the first member has (0\.001|64)"):
            check_settings(dataclasses.replace(args, **other), image=False)


@pytest.mark.parametrize("learn_every", [1, 3, 64])
def test_each_gene_acts(updates, learn_every):
    genes = {"learning_rate": 2.5e-3, "batch_size": 17, "learn_every": learn_every}
    population = generations_later(1, genomes=(START, Genome(genes, (24, 40))))
    updates.clear()
    live(population, 1)
    assert updates[0].state.optimizer.param_groups[0]["lr"] == 2.5e-3
    assert [len(layers[0].bias) for layers in layers_by_depth(updates[0].state.net)[:-1]] == [24, 40]
    assert {len(update.batch.reward) for update in updates} == {17}
    num, rest = 400 // learn_every - 200 // learn_every, 200 % learn_every  # that of the generation before
    assert [update.number for update in updates] == list(range(1, num + 1))
    assert population.results[1]["counts"][0] == num
    for update in updates:  # none is early, or later than the step of four environments that it is due in
        assert update.learning_steps - 4 < update.number * learn_every - rest <= update.learning_steps


def test_the_target_net_of_a_member_that_learns_rarely_moves_too(updates, monkeypatch):
    moved = []
    monkeypatch.setattr(train_population, "move_target", lambda *args: moved.append(len(updates)))
    rarely, never = (with_genes(learn_every=steps) for steps in (40, 10_000))
    generations_later(6, genomes=(rarely, never), target_period=6)
    assert [update.number for update in updates[-5:]] == [1, 2, 3, 4, 5], "a generation has fewer than six"
    assert [first - second for first, second in zip(moved[1:], moved, strict=False)] == [6] * (len(moved) - 1)
    assert len(moved) == len(updates) // 6 > 2


# ---- the shared replay


@pytest.mark.parametrize("generation", [1, 5])
def test_members_draw_all_finished_generations_and_their_own_new_transitions(updates, generation):
    population = generations_later(generation, (with_genes(learn_every=20),) * 2, replay_size=400)
    shards, before = population.memory.shards, population.memory.rows.numpy().copy()
    if generation == 5:
        assert before.min() > shards.rows, "the lanes have come round"
    others = np.arange(shards.num_lanes)[shards.lanes(1)]

    def beat():  # what another member's generation may write meanwhile
        for lane in others:
            new = (before[lane] + np.arange(2 * population.args.rounds)) % shards.rows
            shards.frame[lane, new], shards.reward[lane, new] = 777.0, 777.0
            shards.priority[lane, new], shards.discount[lane, new] = 1.0, 1.0
        shards.written[:] = shards.committed[:] = before + 2 * population.args.rounds

    updates.clear()
    live(population, 0, beat)
    for batch in (update.batch for update in updates):
        assert not any((field == 777).any() for field in (batch.obs, batch.next_obs, batch.reward))
    row, lane = np.divmod(torch.cat([update.batch.ids for update in updates]).numpy(), shards.num_lanes)
    assert set(lane) == set(range(shards.num_lanes)), "transitions of every environment are drawn"
    is_new = row >= before[lane]
    assert set(lane[is_new]) == set(range(4)), "of this generation, its own only"
    assert is_new.mean() > 0.1


@pytest.mark.parametrize(("env_id", "num_generations"), [("CartPole-v1", 5), ("envs:Masked-v0", 2)])
def test_returns_are_of_the_members_own_number_of_steps_and_discount_factor(monkeypatch, env_id, num_generations):
    """Against a walk from each transition to the next, in lanes that have come round and are being written to."""
    lengths, learn = set(), train_population.learn

    def checked(args, generation, batch):
        shards, replay = generation.replay.shards, generation.replay
        for i, (row, lane) in enumerate(zip(*np.divmod(batch.ids.numpy(), shards.num_lanes), strict=True)):
            total, discount, at = 0.0, 1.0, row
            for steps in range(args.n_step):
                if steps and (at >= replay.seen[lane] or not shards.priority[lane, at % shards.rows] > 0):
                    break
                total += discount * shards.reward[lane, at % shards.rows]
                discount *= args.gamma * shards.discount[lane, at % shards.rows]
                if not discount:
                    break
                at += 1
            lengths.add(at - row)
            assert batch.reward[i] == pytest.approx(total, rel=1e-5)
            assert batch.discount[i] == pytest.approx(discount, rel=1e-5)
            if discount:
                assert (batch.next_obs[i].numpy() == shards.frame[lane, at % shards.rows]).all()
                assert (batch.next_mask[i].numpy() == shards.mask[lane, at % shards.rows]).all()
        learn(args, generation, batch)

    monkeypatch.setattr(train_population, "learn", checked)
    own = {"learn_every": 20, "n_step": 4, "gamma": 0.9}
    spaces = probe_env(env_id)
    generations_later(
        num_generations, (with_genes(**own),) * 2, spaces, env_id=env_id, replay_size=400, n_step=3, learn_every=20
    )
    assert lengths >= {1, 2, 3, 4}


def test_the_loss_is_that_of_double_q_learning(updates):
    args = generations_later(2).args
    net, target_net, *_ = MemberState.make(SPACES, START, args)
    torch.nn.init.normal_(next(iter(target_net.parameters())), std=0.3)  # the two nets differ
    batch = updates[-1].batch
    assert set(batch.discount.tolist()) == {0.0, np.float32(0.99).item()}
    found, _ = train_population.loss(args, net, target_net, batch)
    assert found.item() == pytest.approx(literal_loss(net, target_net, batch), rel=1e-5)


@torch.no_grad()
def literal_loss(net, target_net, batch):
    """Mean Huber loss of double Q-learning's errors, one transition after the other."""
    total = 0.0
    for i in range(len(batch.reward)):
        obs, next_obs = batch.obs[i : i + 1], batch.next_obs[i : i + 1]
        best = max(range(2), key=lambda action: float(net(next_obs)[0][0, action]))
        value = float(target_net(next_obs)[0][0, best])
        target = float(batch.reward[i]) + float(batch.discount[i]) * value
        error = abs(target - float(net(obs)[0][0, batch.action[i]]))
        total += error**2 / 2 if error <= 1 else error - 0.5
    return total / len(batch.reward)


# ---- fitness


def test_fitness_games_start_alike_for_all_members_and_differ_between_generations(monkeypatch):
    starts, make = [], member_module.make_play_envs

    def noted(*args, seed, **_):
        starts.append(make(*args, seed=seed).reset()[0])
        return make(*args, seed=seed)

    monkeypatch.setattr(member_module, "make_play_envs", noted)
    generations_later(2)
    first, second, third, fourth = starts
    assert len(np.unique(first, axis=0)) == 4
    assert (first == second).all()
    assert (third == fourth).all()
    assert (first != third).all()


# ---- what is kept


def equal(one, other):
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


@pytest.mark.parametrize(("hidden", "activation"), [((16,), "gelu"), ((40, 24), "relu"), ((64, 64, 64), "tanh")])
def test_a_record_holds_every_bit_of_a_member(hidden, activation):
    torch.manual_seed(0)
    state = MemberState.make(SPACES, Genome({"learning_rate": 0.1 + 0.2}, hidden, activation), FAST)
    for _ in range(3):
        for parameter in state.net.parameters():
            parameter.grad = torch.randn_like(parameter)
        state.optimizer.step()
    state.net.norm.update(torch.randn(9, 4))
    record = PopulationMemory.allocate(FAST, SPACES, Generation).births[0]
    state.write(record)
    written = [field.clone() for field in record.values()]
    restored = MemberState.read(record, SPACES, FAST)
    assert (restored.genome, restored.updates) == (state.genome, 3)
    assert restored.optimizer.param_groups[0]["lr"] == 0.1 + 0.2
    assert not any(parameter.requires_grad for parameter in restored.target_net.parameters())
    for field in record.values():
        field.fill_(7)
    assert equal(restored.tensors(), state.tensors()), "a copy"
    restored.write(record)
    assert equal(record.values(), written), "nothing is left of a member that was there before"


def test_the_net_of_the_fittest_is_restored_with_its_architecture():
    large, loaded = Genome({"gamma": 0.9}, (24, 40, 32), "tanh"), EliteNet(SPACES, START)
    net = MemberState.make(SPACES, large, FAST).net
    loaded.load_state_dict(saved_net(large.to_json(), net.state_dict()))
    assert loaded.genome == large
    obs = torch.randn(5, 4)
    assert torch.equal(loaded.net(obs)[0], net(obs)[0])


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, 0),
        ({"target_period": 20_000}, 1),
        ({"target_rate": 0.0}, 1),
        ({"target_period": 20_000, "evolving": ("target_period",)}, 0),
        ({"target_rate": 0.0, "evolving": ("target_period",)}, 1),
        ({"learn_every": 100}, 1),
        ({"learn_every": 100, "evolving": ("learn_every",)}, 0),
    ],
)
def test_a_target_net_that_never_moves_is_named(settings, warns):
    said = []
    own = {"total_steps": 400_000, "population": 6, "learn_every": 4, "target_period": 1_000, "target_rate": 1.0}
    args = SimpleNamespace(**{**own, "evolving": (), **settings})
    run = SimpleNamespace(log=SimpleNamespace(warning=said.append))
    Report._warn_of_target_nets(SimpleNamespace(args=args, run=run))
    assert len(said) == warns
