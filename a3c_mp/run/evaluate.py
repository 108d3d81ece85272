"""Evaluation of a trained net: raw returns of whole games, and video."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from a3c_mp.data.episodes import Episode, EpisodeStats
from a3c_mp.nets.actor_critic import ActorCritic, initial_state
from a3c_mp.nets.distributions import mask_logits, to_env
from a3c_mp.nets.layers import reset_state
from wrappers import FRAME_SKIP, action_mask, allowed_action, is_atari, make_env, make_vec_env, mask_in

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
        state = initial_state(net, len(obs)) if starts.all() else [reset_state(part, starts) for part in state]
        logits, _, *state = net(torch.from_numpy(obs), *state)
        policy = net.distribution(mask_logits(logits.float(), mask))
        return to_env(action_space, (policy.mode() if greedy else policy.sample(rng)).numpy())

    return act


def with_random_actions(policy: Policy, action_space: gymnasium.Space, share: float, *, seed: int) -> Policy:
    """A policy with a share of uniformly random actions."""
    action_space.seed(seed)
    rng = np.random.default_rng(seed)

    def act(obs: np.ndarray, starts: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        actions = policy(obs, starts, mask)
        for i in np.flatnonzero(rng.random(len(actions)) < share):
            actions[i] = action_space.sample() if mask is None else allowed_action(action_space, mask[i], rng.choice)
        return actions

    return act


def make_play_envs(env_id: str, episodes: int, *, seed: int, num_envs: int = NUM_ENVS) -> VectorEnv:
    """Make the environments for `play_episodes`, no more than there are episodes.

    Args:
        env_id: gymnasium id.
        episodes: number of games.
        seed: environment i is seeded with (seed + i) % 2^31.
        num_envs: games played at once.
    """
    return make_vec_env(env_id, min(num_envs, episodes), seed=seed)


def play_episodes(
    policy: Policy,
    env: VectorEnv,
    episodes: int,
    on_step: Callable[[], object] = lambda: None,
    max_steps: int | None = None,
) -> Iterator[Episode]:
    """Play whole games in parallel; yields each when it ends.

    Each environment plays a fixed number of games: taking the first that finish would favour short games.

    Args:
        policy: chooses the actions.
        env: from `make_play_envs`, not stepped before.
        episodes: number of games.
        on_step: called after each step of all environments.
        max_steps: a game that lasts so long (agent steps) is cut, with the return so far.
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


def record_episode(policy: Policy, env_id: str, path: Path, *, seed: int, max_steps: int) -> Episode:
    """Play a game of at most `max_steps` and write it to an mp4 file at normal speed (of Atari: every 4th frame).

    Raises:
        ImportError: the extra `video` is not installed.
        NotRendered: the environment cannot be rendered.
    """
    import imageio.v2 as imageio

    env, (obs, info), first_frame = start_rendering(env_id, seed)
    fps = 60 // FRAME_SKIP if is_atari(env_id) else int(env.metadata.get("render_fps", 30))
    episode_return, length, done = 0.0, 0, False
    video: Any = imageio.get_writer(path, fps=fps, codec="libx264", macro_block_size=2)
    with video:
        video.append_data(first_frame)
        while not done:
            mask = mask_in(info, env.action_space)
            action = policy(obs[None], np.array([length == 0]), None if mask is None else mask[None])[0]
            obs, reward, terminated, truncated, info = env.step(action)
            video.append_data(_frame(env))
            episode_return, length = episode_return + float(reward), length + 1
            done = terminated or truncated or length >= max_steps
    env.close()
    return Episode(episode_return, length)


class NotRendered(Exception):
    """An environment cannot be rendered; its cause says why."""


def start_rendering(env_id: str, seed: int) -> tuple[gymnasium.Env, tuple[np.ndarray, dict[str, Any]], np.ndarray]:
    """(environment that renders images, what its first reset gave, its first image). Raises NotRendered."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders without a screen
    try:
        with warnings.catch_warnings():  # gymnasium's, of what the error says
            warnings.simplefilter("ignore")
            env = make_env(env_id, render_mode="rgb_array")
        return env, env.reset(seed=seed), _frame(env)
    except Exception as error:  # an environment of the user's own can raise anything
        text = " ".join(str(error).split()) or type(error).__name__
        unknown = isinstance(error, TypeError) and "unexpected keyword argument 'render_mode'" in text
        raise NotRendered("its constructor takes no render_mode" if unknown else text) from error


def _frame(env) -> np.ndarray:
    """The rendered image, uint8 [H, W, 3]; small ones are doubled, as video players blur them."""
    frame = env.render()
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise TypeError(f"render() returned a {type(frame).__name__}, must be an image [H, W, 3]")
    return frame.repeat(2, axis=0).repeat(2, axis=1) if frame.shape[0] < 300 else frame
