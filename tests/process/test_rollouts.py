"""The chapter's own actors, spawned, on an environment that counts: every field stands where the contract says."""

import numpy as np
import pytest
import torch
from envs import EPISODE_LENGTH
from forked import fork_children
from gymnasium.spaces import Box, Discrete
from harness import rounds

from a3c_mp.data.resume_states import ActorLayout, ResumeStates
from a3c_mp.data.rollout import Rollout, finished_episodes, rollout_spec
from a3c_mp.nets.build import make_actor_critic
from a3c_mp.processes.slots import Slots
from a3c_mp.processes.weights import Weights
from a3c_mp.processes.workers import Workers
from train_a3c_data import Args, actor

T, B, ACTORS = 5, 3, 2
SPACES = Box(-np.inf, np.inf, (2,), np.float32), Discrete(3)


@pytest.fixture(scope="module")
def rollouts():
    """Eight rollouts of each of two actors, copied out of their slots in the order in which they were filled."""
    args = Args(env_id="envs:Count-v0", num_actors=ACTORS, num_envs=B, unroll_length=T)
    net = make_actor_critic(*SPACES)
    slots, weights = Slots(rollout_spec(T, B, *SPACES), 2 * ACTORS), Weights(net)
    states = ResumeStates(args, ActorLayout(SPACES[1], T, {}), start=0)
    seen: dict[int, list[Rollout]] = {worker: [] for worker in range(ACTORS)}
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch)
        with Workers(actor, ACTORS, (args, slots, weights, states)) as workers:
            for filled in rounds(workers, lambda: all(len(found) >= 8 for found in seen.values())):
                for worker, slot, _ in filled:
                    seen[worker].append(Rollout(*(field.clone() for field in Rollout(**slots[slot]))))
                workers.release(filled, weights.version)
    return net, [Rollout(*(torch.stack(f) for f in zip(*found[:8], strict=True))) for found in seen.values()]


def stream(field):
    """[rollouts, T, B, ...] -> [rollouts * T, B, ...]"""
    return field.flatten(0, 1)


def test_rollouts_join_end_to_end(rollouts):
    for found in rollouts[1]:
        torch.testing.assert_close(found.obs[1:, 0], found.obs[:-1, T])
        torch.testing.assert_close(found.value[1:, 0], found.value[:-1, T])


def test_every_step_is_there_once_and_in_place(rollouts):
    for found in rollouts[1]:
        step = torch.arange(8 * T)
        expected = torch.stack([step // EPISODE_LENGTH, step % EPISODE_LENGTH], dim=-1).float()
        obs = stream(found.obs[:, :T])
        torch.testing.assert_close(obs, expected[:, None].expand_as(obs))
        torch.testing.assert_close(stream(found.reward), obs[..., 1], msg="the reward of step t is t")


def test_ends_are_told_apart(rollouts):
    for found in rollouts[1]:
        obs, terminated, truncated = stream(found.obs[:, :T]), stream(found.terminated), stream(found.truncated)
        last = obs[..., 1] == EPISODE_LENGTH - 1
        third = obs[..., 0] % 3 == 2
        assert torch.equal(terminated, last & ~third)
        assert torch.equal(truncated, last & third)
        assert truncated.any()


def test_values_and_logits_are_those_of_the_published_net(rollouts):
    net, founds = rollouts
    for found in founds:
        with torch.no_grad():
            logits, value = net(found.obs.flatten(0, 2))
        torch.testing.assert_close(found.value.flatten(), value)
        torch.testing.assert_close(found.behaviour_logits, logits.view(8, T + 1, B, 3)[:, :T])


def test_truncated_steps_bring_the_value_of_the_final_observation(rollouts):
    net, founds = rollouts
    for found in founds:
        obs, truncated = stream(found.obs[:, :T]), stream(found.truncated)
        final_obs = obs[truncated] + torch.tensor([0.0, 1.0])  # what the next count would have been
        with torch.no_grad():
            torch.testing.assert_close(stream(found.truncation_value)[truncated], net(final_obs)[1])


def test_episodes_are_whole_games(rollouts):
    for found in rollouts[1]:
        episodes = [e for i in range(8) for e in finished_episodes(Rollout(*(field[i] for field in found)))]
        assert len(episodes) == B * (8 * T // EPISODE_LENGTH)
        assert set(episodes) == {(sum(range(EPISODE_LENGTH)), EPISODE_LENGTH, env) for env in range(B)}
