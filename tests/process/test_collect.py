"""The RolloutCollector on an environment that counts: the memory of a net with a core, over rollouts and ends."""

import numpy as np
import pytest
import torch
from envs import EPISODE_LENGTH
from gymnasium.spaces import Box, Discrete
from inline import unconnected_channel

from a3c_mp.algorithms.actor_critic_settings import RolloutArgs
from a3c_mp.data.collector import RolloutCollector
from a3c_mp.data.rollout import Rollout, episode_starts, is_finite, rollout_spec
from a3c_mp.nets.actor_critic import initial_state, unroll
from a3c_mp.nets.build import NetSpec, make_actor_critic
from wrappers import make_vec_env

T, B, ROLLOUTS = 5, 3, 8
SPACES = Box(-np.inf, np.inf, (2,), np.float32), Discrete(3)


def collect(net, env, spaces, number):
    """Rollouts that follow each other."""
    collector, rollouts = RolloutCollector(RolloutArgs(seed=0), env, net, unconnected_channel()), []
    for _ in range(number):
        spec = rollout_spec(T, env.num_envs, *spaces, net.lstm_size)
        rollouts.append(Rollout(**{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}))
        collector.collect(rollouts[-1])
    return rollouts


@pytest.fixture(scope="module")
def collected():
    """(net, its first rollouts); the weights stay the same, so a rollout's first action is that of the same net too."""
    torch.manual_seed(0)
    net = make_actor_critic(*SPACES, NetSpec(lstm=True))
    torch.nn.init.normal_(net.policy[-1].weight)
    env = make_vec_env("envs:Count-v0", B, seed=0)
    return net, collect(net, env, SPACES, ROLLOUTS)


def test_an_unroll_of_the_learner_is_what_the_actor_computed_step_by_step(collected):
    net, rollouts = collected
    assert sum(rollout.truncated.any() for rollout in rollouts) > 0
    assert sum(rollout.terminated[:-1].any() for rollout in rollouts) > 1, "episodes end inside unrolls"
    for rollout in rollouts:
        with torch.no_grad():
            logits, values = unroll(net, rollout.obs, rollout.lstm_state[0], episode_starts(rollout))
        torch.testing.assert_close(logits[:-1], rollout.behaviour_logits)
        torch.testing.assert_close(values, rollout.value)


def test_the_memory_reaches_back_to_the_start_of_the_episode_and_no_further(collected):
    """Against a net that is shown each episode alone, from its first observation on."""
    net, rollouts = collected
    obs = torch.cat([rollout.obs[:T] for rollout in rollouts])
    logits = torch.cat([rollout.behaviour_logits for rollout in rollouts])
    final = {
        i * T + t: r.truncation_value[t]
        for i, r in enumerate(rollouts)
        for t in r.truncated[:, 0].nonzero()[:, 0].tolist()
    }
    assert final
    for start in range(0, len(obs) - EPISODE_LENGTH, EPISODE_LENGTH):
        state = initial_state(net, B)
        for t in range(start, start + EPISODE_LENGTH):
            with torch.no_grad():
                expected, _, *state = net(obs[t], *state)
            torch.testing.assert_close(logits[t], expected)
        if t in final:  # truncated: the final observation is the next one of this episode
            with torch.no_grad():
                _, value, _ = net(obs[t] + torch.tensor([0.0, 1.0]), *state)
            torch.testing.assert_close(final[t], value)


def test_the_state_matters_to_these_tests(collected):
    net, rollouts = collected
    rollout = rollouts[1]
    assert rollout.lstm_state.any()
    logits, _ = unroll(net, rollout.obs, torch.zeros_like(rollout.lstm_state[0]), episode_starts(rollout))
    assert not torch.allclose(logits[0], rollout.behaviour_logits[0], atol=1e-3)


def test_an_observation_that_is_nan_spoils_no_later_unroll_of_the_episode():
    spaces = Box(-np.inf, np.inf, (4,), np.float32), Discrete(2)
    net = make_actor_critic(*spaces, NetSpec(lstm=True))
    bad, good = collect(net, make_vec_env("envs:NanObs-v0?at=2", 1, seed=0), spaces, 2)
    assert not (bad.terminated | bad.truncated).any(), "the episode goes on"
    assert not is_finite(bad)
    assert is_finite(good)
