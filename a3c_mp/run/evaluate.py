"""Whole games with a trained net, and their raw returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.nets.actor_critic import ActorCritic
from a3c_mp.nets.distributions import mask_logits, to_env
from a3c_mp.nets.layers import reset_state
from wrappers import action_mask, make_vec_env

NUM_ENVS = 8
"""games played at once"""

Policy = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
"""(observations [N, *obs_shape], whether each begins an episode [N], masks [N, choices] or None) -> actions of the
environment [N, ...]"""
MakePolicy = Callable[[Any, gymnasium.Space], Policy]
"""(net, action space of one environment) -> the net's greedy policy; a module-level function"""


def make_policy(net: ActorCritic, action_space: gymnasium.Space, *, greedy: bool = True, seed: int = 0) -> Policy:
    """A policy that acts with an actor-critic net on the CPU: greedy, or sampled."""
    rng = torch.Generator().manual_seed(seed)
    state: list[Tensor] = []

    @torch.inference_mode()
    def act(obs: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        nonlocal state
        state = net.initial_state(len(obs)) if starts.all() else [reset_state(part, starts) for part in state]
        logits, _, *state = net(torch.from_numpy(obs), *state)
        policy = net.distribution(mask_logits(logits.float(), mask))
        return to_env(action_space, (policy.mode() if greedy else policy.sample(rng)).numpy())

    return act


def make_play_envs(env_id: str, episodes: int, *, seed: int, num_envs: int = NUM_ENVS) -> VectorEnv:
    """Make the environments for `play_episodes`, at most as many as episodes; i is seeded with (seed + i) % 2^31."""
    return make_vec_env(env_id, min(num_envs, episodes), seed=seed)


def play_episodes(
    policy: Policy, env: VectorEnv, episodes: int, on_step: Callable[[], object] = lambda: None,
    max_steps: int | None = None,
) -> Iterator[Episode]:  # fmt: skip
    """Play whole games in parallel; yields each when it ends.

    Each environment plays a fixed number of games: taking the first that finish would favour short games.

    Args:
        env: from `make_play_envs`, not stepped before.
        on_step: called after each step of all environments.
        max_steps: a game that lasts this number of agent steps is cut, with the return so far.
    """
    num_envs = env.num_envs
    left = np.array([episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)])
    stats = EpisodeStats(num_envs)
    obs, _ = env.reset()
    starts = np.ones(num_envs, dtype=np.bool_)
    while left.any():
        obs, reward, terminated, truncated, _ = env.step(policy(obs, starts, action_mask(env)))
        starts = terminated | truncated
        stats.step(reward, starts)
        on_step()
        if max_steps is not None and (cut := ~starts & (stats.lengths >= max_steps)).any():
            obs, _ = env.reset(options={"reset_mask": cut})
            stats.done = starts = starts | cut
        for i in np.flatnonzero(stats.done & (left > 0)):
            left[i] -= 1
            yield Episode(float(stats.returns[i]), int(stats.lengths[i]))
