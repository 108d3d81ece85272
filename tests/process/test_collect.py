"""Rollouts of an environment that counts: every field stands where the contract says, and so does an LSTM's state."""

from itertools import pairwise

import pytest
import torch
from envs import EPISODE_LENGTH, CarelessEnv, CountEnv
from forked import fork_children
from gymnasium.spaces import Discrete
from harness import rounds
from inline import collect, unconnected_collector

from a3c_mp.algorithms.impala import Args as ImpalaArgs
from a3c_mp.data.actor import Memory, run_actor
from a3c_mp.data.episodes import episodes_at
from a3c_mp.data.resume_states import ActorLayout, ResumeStates
from a3c_mp.data.rollout import Rollout, episode_starts, is_finite, rollout_spec
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.processes.pool import WorkerOptions
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import Workers
from a3c_mp.run.evaluate import make_play_envs, make_policy, play_episodes
from train_a3c_data import Args, actor

T, B, ACTORS = 5, 3, 2
SPACES = CountEnv.observation_space, CountEnv.action_space


# ---- chapter 1's own actors, spawned


@pytest.fixture(scope="module")
def rollouts():
    """Eight rollouts of each of two actors, copied out of their slots in the order in which they were filled."""
    args = Args(env_id="envs:Count-v0", num_actors=ACTORS, num_envs=B, unroll_length=T)
    net = make_actor_critic(*SPACES)
    states = ResumeStates(args, ActorLayout(SPACES[1], T, {}), start=0)
    memory = Memory(Slots(rollout_spec(T, B, *SPACES), 2 * ACTORS), Weights(net), states, torch.float32, in_order=False)
    seen: dict[int, list[Rollout]] = {worker: [] for worker in range(ACTORS)}
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch)
        with Workers(run_actor, ACTORS, (actor, args, memory), options=WorkerOptions(), on_restart=print) as workers:
            for filled in rounds(workers, lambda: all(len(found) >= 8 for found in seen.values())):
                for worker, slot, _ in filled:
                    seen[worker].append(Rollout.of(memory.slots[slot]).map(torch.clone))
                workers.release(filled, memory.weights.version)
    return net, [found[:8] for found in seen.values()]


def steps(found, name):
    """A field of all steps of rollouts that follow each other, [8 * T, B, ...]."""
    return torch.cat([getattr(rollout, name)[:T] for rollout in found])


def test_rollouts_join_end_to_end_and_every_step_is_there_once(rollouts):
    for found in rollouts[1]:
        for one, following in pairwise(found):
            torch.testing.assert_close(following.obs[0], one.obs[T])
            torch.testing.assert_close(following.value[0], one.value[T])
        t, obs = torch.arange(8 * T), steps(found, "obs")
        expected = torch.stack([t // EPISODE_LENGTH, t % EPISODE_LENGTH], dim=-1).float()
        torch.testing.assert_close(obs, expected[:, None].expand_as(obs))
        torch.testing.assert_close(steps(found, "reward"), obs[..., 1], msg="the reward of step t is t")


def test_ends_are_those_of_the_environment_and_episodes_are_whole_games(rollouts):
    for found in rollouts[1]:
        obs = steps(found, "obs")
        last, third = obs[..., 1] == EPISODE_LENGTH - 1, obs[..., 0] % 3 == 2
        assert torch.equal(steps(found, "terminated"), last & ~third)
        assert torch.equal(steps(found, "truncated"), last & third)
        episodes = [e for r in found for e in episodes_at(r.done, r.episode_return, r.episode_length)]
        assert len(episodes) == B * (8 * T // EPISODE_LENGTH)
        assert set(episodes) == {(sum(range(EPISODE_LENGTH)), EPISODE_LENGTH, env) for env in range(B)}


def test_values_and_logits_are_those_of_the_published_net_of_final_observations_too(rollouts):
    net, founds = rollouts
    for rollout in founds[0] + founds[1]:
        with torch.no_grad():
            logits, value = net(rollout.obs.flatten(0, 1))
            _, of_next_count = net((rollout.obs[:T] + torch.tensor([0.0, 1.0])).flatten(0, 1))
        truncated = rollout.truncated.flatten()
        torch.testing.assert_close(rollout.truncation_value.flatten()[truncated], of_next_count[truncated])
        torch.testing.assert_close(rollout.value.flatten(), value)
        torch.testing.assert_close(rollout.behaviour_logits, logits.view(T + 1, B, 3)[:T])
    assert sum(rollout.truncated.sum() for rollout in founds[0]) == B


@pytest.mark.parametrize("which", [0, 1, 2], ids=["random", "np.random", "torch"])
def test_a_seed_seeds_the_generators_that_all_code_of_a_process_shares(which):
    """In collectors, another one for each actor, and in games that are played with a trained net."""
    args = ImpalaArgs(env_id=f"envs:Careless-v0?which={which}", num_envs=B, unroll_length=T)
    net = make_actor_critic(CarelessEnv().observation_space, Discrete(2), args.net_spec)
    policy = make_policy(net, Discrete(2))
    runs, games = [], []
    for number in (0, 0, 1):
        runs.append(collect(unconnected_collector(args, net, number))[0].obs.tolist())
        games.append(list(play_episodes(policy, make_play_envs(args.env_id, 2, seed=number), 2, 10)))
        CarelessEnv.DRAWS[which]()
    assert runs[0] == runs[1] != runs[2]
    assert games[0] == games[1] != games[2]


# ---- the state of a net with an LSTM


@pytest.fixture(scope="module")
def collected():
    """(net, its first rollouts); the weights stay the same, so a rollout's first action is that of the same net too."""
    args = ImpalaArgs(env_id="envs:Count-v0", num_envs=B, unroll_length=T, lstm=True)
    torch.manual_seed(0)
    net = make_actor_critic(*SPACES, args.net_spec)
    torch.nn.init.normal_(net.policy[-1].weight)
    return net, collect(unconnected_collector(args, net), 8)


def test_an_unroll_of_the_learner_is_what_the_actor_computed_step_by_step(collected):
    net, rollouts = collected
    assert any(rollout.truncated.any() for rollout in rollouts)
    assert sum(rollout.terminated[:-1].any() for rollout in rollouts) > 1, "episodes end inside unrolls"
    for rollout in rollouts:
        with torch.no_grad():
            logits, values, _ = net.unroll(rollout.obs, rollout.lstm_state[0], episode_starts(rollout))
            without, *_ = net.unroll(rollout.obs, torch.zeros_like(rollout.lstm_state[0]), episode_starts(rollout))
        torch.testing.assert_close(logits[:-1], rollout.behaviour_logits)
        torch.testing.assert_close(values, rollout.value)
        if rollout.lstm_state.any():
            assert not torch.allclose(without[0], rollout.behaviour_logits[0], atol=1e-3), "the state matters"


def test_the_memory_reaches_back_to_the_start_of_the_episode_and_no_further(collected):
    """Against a net that is shown each episode alone, from its first observation on."""
    net, rollouts = collected
    obs, logits, truncated, values = (
        steps(rollouts, name) for name in ("obs", "behaviour_logits", "truncated", "truncation_value")
    )
    assert truncated.any()
    for start in range(0, len(obs) - EPISODE_LENGTH, EPISODE_LENGTH):
        state = net.initial_state(B)
        for t in range(start, start + EPISODE_LENGTH):
            with torch.no_grad():
                expected, _, *state = net(obs[t], *state)
            torch.testing.assert_close(logits[t], expected)
        if truncated[t].any():  # the final observation is the next one of this episode
            with torch.no_grad():
                _, value, _ = net(obs[t] + torch.tensor([0.0, 1.0]), *state)
            torch.testing.assert_close(values[t], value)


def test_an_observation_that_is_nan_spoils_no_later_unroll_of_the_episode():
    args = ImpalaArgs(env_id="envs:NanObs-v0?at=2", num_envs=1, unroll_length=T, lstm=True)
    bad, good = collect(unconnected_collector(args), 2)
    assert not (bad.terminated | bad.truncated).any(), "the episode goes on"
    assert not is_finite(bad)
    assert is_finite(good)
